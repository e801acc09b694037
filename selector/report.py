"""What an operator pastes into a bug report: machine, packages, variables and what is wrong with them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from mla_prefill.capabilities.matrix import Matrix, UnknownNameError
from mla_prefill.capabilities.versions import canonical
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import PREFIX, VARIABLES, VISIBLE_DEVICES, Environment, Overrides
from mla_prefill.selector.request import Request


def refused(overrides: Overrides, matrix: Matrix) -> dict[str, str]:
    """Variable -> why no query has an answer: a name or version that the matrix has not, or a contradiction."""
    each = [
        ("MLA_PREFILL_BACKEND", Overrides(backend=overrides.backend)),
        ("MLA_PREFILL_FA_VERSION", Overrides(fa_version=overrides.fa_version)),
        *(("MLA_PREFILL_DISABLE", Overrides(disable=(name,))) for name in overrides.disable),
    ]
    wrong: dict[str, str] = {}
    for variable, alone in each:
        if why := _refusal(alone, matrix):
            wrong[variable] = f"{wrong[variable]}; {why}" if variable in wrong else why
    if not wrong and (why := _refusal(overrides, matrix)):  # each can be meant, both together cannot
        wrong["MLA_PREFILL_FA_VERSION"] = why
    if not wrong and _nothing_left(overrides, matrix):
        disabled = ",".join(overrides.disable)
        wrong["MLA_PREFILL_DISABLE"] = (
            f"MLA_PREFILL_DISABLE={disabled} disables every kernel that the other variables leave; shorten it"
        )
    return wrong


def _nothing_left(overrides: Overrides, matrix: Matrix) -> bool:
    """Whether every kernel that the other variables ask for is disabled."""
    return all(
        {kernel.backend, kernel.name}.intersection(overrides.disable)
        for kernel in matrix.kernels.values()
        if overrides.backend in (None, kernel.backend, kernel.name)
        and overrides.fa_version in (None, kernel.fa_version)
    )


def _refusal(overrides: Overrides, matrix: Matrix) -> str | None:
    try:
        decide(Request(next(iter(matrix.blocks.values())).dims), Environment("cpu", overrides=overrides), matrix)
    except UnknownNameError as error:
        return str(error)
    return None


def report(
    environment: Environment,
    matrix: Matrix,
    notes: Mapping[str, Sequence[str]] | None = None,
    errors: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report as plain data.

    Args:
        notes: distribution -> what a probe found.
        errors: variable -> what is wrong with its value.
    """
    import_errors = dict(environment.import_errors)
    installed = environment.installed or {}
    providers = [
        {
            "distribution": name,
            "version": installed.get(name),
            "kernels": [
                k.name for k in matrix.kernels.values() if any(canonical(p.distribution) == name for p in k.providers)
            ],
            "import_error": import_errors.get(name),
            "notes": list((notes or {}).get(name, ())),
        }
        for name in matrix.distributions
    ]
    ours = dict.fromkeys([*VARIABLES, *sorted(name for name in os.environ if name.startswith(PREFIX))])
    return {
        "arch": _known_arch(environment.arch, matrix),
        "device": environment.device,
        "detected_by": environment.detected_by,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "providers": providers,
        "variables": {name: os.environ.get(name) for name in (*ours, *VISIBLE_DEVICES)},
        "variable_errors": dict(errors or {}),
        "matrix": {"fingerprint": matrix.fingerprint, "schema_version": matrix.schema_version},
    }


def _known_arch(arch: str, matrix: Matrix) -> str:
    try:
        return matrix.arch(arch)
    except UnknownNameError:
        return f"{arch} (not in the matrix)"


def report_text(report: Mapping[str, Any]) -> str:
    """`report` for people."""
    device = f" {report['device']}" if report["device"] else ""
    lines = [
        f"arch      {report['arch']}{device} ({report['detected_by']})",
        f"python    {report['python']} on {report['platform']}",
        f"matrix    {report['matrix']['fingerprint']}",
    ]
    for provider in report["providers"]:
        state = provider["version"] or "not installed"
        lines.append(f"package   {provider['distribution']:24} {state:16} {', '.join(provider['kernels'])}")
        if provider["import_error"]:
            lines.append(f"          import fails: {provider['import_error']}")
        lines += [f"          {note}" for note in provider["notes"]]
    errors = dict(report["variable_errors"])
    for name, value in report["variables"].items():
        if value is not None:
            lines.append(f"variable  {name}={value}")
            lines += [f"          error: {errors.pop(name)}"] if name in errors else []
    lines += [f"variable  error: {error}" for error in errors.values()]
    return "\n".join(lines)
