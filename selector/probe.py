"""Importing kernel packages in child processes: what a broken install raises becomes text, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping

from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.versions import canonical

TIMEOUT_S = 120
# torch first: the kernel packages' own extensions need its libraries loaded. Any exception is an answer.
_CHILD = """
import importlib, sys
try:
    for name in sys.argv[1:]:
        importlib.import_module(name)
except BaseException as error:
    text = " ".join(str(error).split())
    print(f"{type(error).__name__}: {text}"[:500])
    sys.exit(3)
"""


def probe(matrix: Matrix, installed: Mapping[str, str], report: Callable[[str], None]) -> dict[str, str]:
    """Distribution -> what importing its modules raised, for those installed packages that cannot be imported."""
    modules: dict[str, list[str]] = {}
    for kernel in matrix.kernels.values():
        for provider in kernel.providers:
            name = canonical(provider.distribution)
            if name in installed and provider.module not in modules.setdefault(name, []):
                modules[name].append(provider.module)
    errors = {}
    for name, wanted in modules.items():
        report(f"importing {', '.join(wanted)} of {name} {installed[name]}")
        first = ["torch"] if "torch" in installed and name != "torch" else []
        if error := import_error([*first, *wanted]):
            errors[name] = error
    return errors


def import_error(modules: list[str], timeout_s: float = TIMEOUT_S) -> str | None:
    """What importing these modules, in order, raises in a fresh interpreter; None where it works."""
    try:
        # -P (3.11) is not at hand on 3.10; -c puts the working directory on sys.path, so the child starts elsewhere.
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, *modules],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd="/",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing took longer than {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    said = done.stdout.strip().splitlines()
    if done.returncode == 3 and said:
        return said[-1]
    tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the interpreter ended with status {done.returncode}: {tail}"
