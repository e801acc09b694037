"""What is wrong with installed kernel packages: imports in child processes, and what files and metadata tell.

What a broken install raises becomes text, not a traceback, and nothing is imported here.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

from mla_prefill.capabilities.load import importable
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.versions import canonical
from mla_prefill.selector.detection import installed as installed_of

TIMEOUT_S = 120
#: Packages that must have the same version, local part aside (flashinfer-ai/flashinfer#4337).
COMPANIONS = {"flashinfer-python": ("flashinfer-cubin", "flashinfer-jit-cache")}
#: How the setup of FlashAttention 3 names what a build leaves out, in the module whose name ends so.
_BUILD_CONFIG, _LEFT_OUT = "_config.py", "_DISABLE_"
#: How the line begins in which a child answers: what packages print, before and after it, is none of ours.
_SAID = "mla-prefill probe: "
# torch first: the kernel packages' own extensions need its libraries loaded. Any exception is an answer.
# Neither what a package made of sys.stdout nor what it does at exit may touch the answer.
_CHILD = (
    f"_SAID = {_SAID!r}"
    + """
import importlib, json, os, sys
said, modules = {"error": None, "flags": {}}, []
try:
    for name in sys.argv[1:]:
        modules.append(importlib.import_module(name))
except BaseException as error:
    said["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
for module in modules:
    config = getattr(module, "CONFIG", None)
    if isinstance(config, dict) and isinstance(config.get("build_flags"), dict):
        said["flags"].update(config["build_flags"])
torch = modules[0] if modules and modules[0].__name__ == "torch" else None
if torch is not None:
    said["torch"] = {"cuda": torch.version.cuda, "hip": torch.version.hip, "arch": torch.cuda.get_arch_list()}
os.write(1, f"\\n{_SAID}{json.dumps(said, default=str)}\\n".encode())
os._exit(0)
"""
)


class Probed(NamedTuple):
    """What a probe found: ``errors`` as `Environment.import_errors` takes them, ``notes`` on each distribution."""

    errors: dict[str, str]
    notes: dict[str, list[str]]


def probe(matrix: Matrix, installed: Mapping[str, str], report: Callable[[str], None]) -> Probed:
    """Imports the modules of every installed package in a child process, and looks at its files."""
    modules = {name: list(dict.fromkeys(wanted)) for name, wanted in _modules(matrix).items()}
    errors: dict[str, str] = {}
    notes = {name: list(_from_files(name, wanted, installed)) for name, wanted in modules.items()}
    for name, wanted in modules.items():
        if name not in installed:
            continue
        if foreign := [module for module, trusted in importable(wanted).items() if not trusted]:
            errors[name] = f"not imported: only the matrix at hand names {', '.join(foreign)}; the shipped one does not"
            continue
        report(f"importing {', '.join(wanted)} of {name} {installed[name]}")
        first = ["torch"] if "torch" in installed and name != "torch" else []
        error, facts = _imported([*first, *_build_configs(name), *wanted], TIMEOUT_S)
        if error:
            errors[name] = error
        notes[name] += [*_diagnosis(error or "", installed), *_from_build(name, facts)]
    return Probed(errors, {name: said for name, said in notes.items() if said})


def import_error(modules: list[str], timeout_s: float = TIMEOUT_S) -> str | None:
    """What importing these modules, in order, raises in a fresh interpreter; None where it works."""
    return _imported(modules, timeout_s)[0]


def _modules(matrix: Matrix) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for kernel in matrix.kernels.values():
        for provider in kernel.providers:
            modules.setdefault(canonical(provider.distribution), []).append(provider.module)
    return modules


def _imported(modules: list[str], timeout_s: float) -> tuple[str | None, dict[str, Any]]:
    """(what importing raised, or None; what the child tells about the builds)."""
    try:
        done = fresh_python("-c", _CHILD, *modules, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return f"importing took longer than {timeout_s:.0f} s", {}
    with suppress(ValueError, IndexError):
        answers = [line for line in done.stdout.splitlines() if line.startswith(_SAID)]
        if done.returncode == 0 and isinstance(said := json.loads(answers[-1].removeprefix(_SAID)), dict):
            return said["error"], said
    tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"the interpreter ended with status {done.returncode}: {tail}", {}


def fresh_python(
    *arguments: str, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter that finds what this one finds, save for what lies about in the working directory.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout_s`` seconds.
    """
    # -P (3.11) is not at hand on 3.10; -c and -m put the working directory on sys.path, so the child starts elsewhere.
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        cwd="/",
        env={**environ, "PYTHONPATH": os.pathsep.join(search_path())},
        check=False,
    )


def search_path() -> list[str]:
    """sys.path with absolute entries, without the working directory unless PYTHONPATH names it."""
    here = os.getcwd()
    named = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    entries = (os.path.abspath(entry) for entry in sys.path if entry)
    return [entry for entry in entries if entry != here or entry in named]


# ---- what a child said ----------------------------------------------------------------------------------------------


def _diagnosis(error: str, installed: Mapping[str, str]) -> Iterator[str]:
    if "undefined symbol" in error:
        torch = installed.get("torch")
        beside = f"torch {torch} that is installed" if torch else "PyTorch at hand (none is installed)"
        yield f"broken install: its binary was built for another PyTorch than the {beside}"
    elif "cannot open shared object file" in error:
        yield "broken install: a library that its binary was built for is missing"


def _from_build(name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    left_out = [flag.partition(_LEFT_OUT)[2] for flag, on in facts.get("flags", {}).items() if on and _LEFT_OUT in flag]
    if left_out:
        yield f"built without {', '.join(left_out)}"
    if name == "torch" and (torch := facts.get("torch")):
        platform = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else ""
        arches = f", for {' '.join(torch['arch'])}" if torch["arch"] else ""
        yield f"built with {platform}{arches}" if platform else "built without CUDA and ROCm: no kernel runs on a GPU"


def _build_configs(name: str) -> list[str]:
    """Top-level modules of a package that say how it was built."""
    files = _recorded(name)
    return [path.removesuffix(".py") for path in files if path.endswith(_BUILD_CONFIG) and "/" not in path]


# ---- what files and metadata say ------------------------------------------------------------------------------------


def _from_files(name: str, modules: list[str], installed: Mapping[str, str]) -> Iterator[str]:
    version = installed.get(name)
    for module in modules:
        yield from _alien(name, module) if version is None else _overwritten(name, module)
    if version is None:
        return
    if local := version.partition("+")[2]:
        yield f"+{local} names the flavour of the build and counts in no version range"
    for companion, other in installed_of(COMPANIONS.get(name, ())).items():
        if other.partition("+")[0] != version.partition("+")[0]:
            yield f"{companion} {other} does not go with it: install {companion}=={version.partition('+')[0]}"


def _alien(name: str, module: str) -> Iterator[str]:
    """A module that can be found though its package is not installed: what others detect the package by."""
    found, holders = _on_disk(module), _owners(module)
    if found is None or name in map(canonical, holders):
        return
    owners = [f"{owner} {distribution(owner).version}" for owner in holders]
    whose = f" (from {', '.join(owners)})" if owners else ""
    if found.is_dir():
        yield f"{module} is a namespace package here{whose}: importing it works, and it is not {name}"
    else:
        yield f"{module} is there{whose}, but it is not {name}"


def _overwritten(name: str, module: str) -> Iterator[str]:
    """A file that is no longer what this package installed: two packages hold the same path."""
    for path in _paths(module):
        mode, _, digest = _recorded(name).get(path, "").partition("=")
        if mode != "sha256":
            continue
        try:
            raw = Path(str(distribution(name).locate_file(path))).read_bytes()
        except OSError:
            yield f"{path} is missing: reinstall {name}"
            continue
        if base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=").decode() != digest:
            others = [owner for owner in _owners(module) if canonical(owner) != name and path in _recorded(owner)]
            who = f": {', '.join(others)} holds it too; reinstall {name} last" if others else f": reinstall {name}"
            yield f"{path} is not the file that it installed{who}"


def _owners(module: str) -> list[str]:
    """The distributions that hold a module, or anything under its first name where none holds it whole."""
    top = module.partition(".")[0]
    holders = {}
    for found in distributions():
        paths = [path for path in _rows(found) if path == f"{top}.py" or path.startswith(f"{top}/")]
        if paths and (name := found.metadata["Name"]):
            holders[name] = paths
    near = sorted(holders)
    return [owner for owner in near if not _paths(module).isdisjoint(holders[owner])] or near


def _on_disk(module: str) -> Path | None:
    """The file of a module, or its folder where it is a namespace package; found as import would, without importing."""
    folders = []
    for entry in search_path():
        base = Path(entry, *module.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
        folders += [base] if base.is_dir() else []
    return folders[0] if folders else None


def _paths(module: str) -> set[str]:
    path = module.replace(".", "/")
    return {f"{path}.py", f"{path}/__init__.py"}


def _recorded(name: str) -> dict[str, str]:
    """path -> ``sha256=...`` of each file that a distribution installed."""
    try:
        return _rows(distribution(name))
    except (PackageNotFoundError, OSError, ValueError):
        return {}


def _rows(found: Distribution) -> dict[str, str]:
    """RECORD as it stands: from Python 3.12 on ``Distribution.files`` leaves out the files that are missing."""
    rows = csv.reader((found.read_text("RECORD") or "").splitlines())
    return {row[0]: row[1] for row in rows if len(row) > 1}
