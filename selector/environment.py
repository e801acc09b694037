"""What a machine offers: architecture, installed kernel packages, and overrides from environment variables.

Only packages' metadata is read. No kernel package and no torch is imported to answer a query.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities.findings import nearest
from mla_prefill.capabilities.versions import canonical
from mla_prefill.selector import renamed

if TYPE_CHECKING:
    from mla_prefill.capabilities.matrix import Matrix

PREFIX = "MLA_PREFILL_"
#: What each variable does; `env` and the docs print this.
VARIABLES = {
    "MLA_PREFILL_BACKEND": "forces a backend or one of its kernels",
    "MLA_PREFILL_FA_VERSION": "pins the FlashAttention version",
    "MLA_PREFILL_DISABLE": "comma list of backends or kernels never to use",
    "MLA_PREFILL_MATRIX": "a matrix file or data folder in place of the shipped one",
    "MLA_PREFILL_VLLM": "inside a vLLM engine: advise, veto or supply",
}
#: Which devices a process sees, and so which one it is asked about; the drivers' own variables.
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class EnvironmentVariableError(ValueError):
    """An environment variable with our prefix that nobody reads, or a value that cannot be meant."""


class Overrides(NamedTuple):
    """What environment variables ask for; an argument of the request beats them."""

    backend: str | None = None
    fa_version: int | None = None
    disable: tuple[str, ...] = ()
    matrix: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Overrides:
        """Reads the variables of `VARIABLES`. An unknown name with our prefix is an error, not a silent no-op."""
        try:
            environ = renamed.variables(os.environ if environ is None else environ)
        except ValueError as error:
            raise EnvironmentVariableError(str(error)) from None
        for name in environ:
            if name.startswith(PREFIX) and name not in VARIABLES:
                raise EnvironmentVariableError(f"unknown environment variable {name}; {nearest(name, VARIABLES)}")
        fa_version = environ.get("MLA_PREFILL_FA_VERSION", "").strip()
        if fa_version and not fa_version.isdecimal():
            raise EnvironmentVariableError(f"MLA_PREFILL_FA_VERSION must be a number such as 3, got {fa_version!r}")
        disable = environ.get("MLA_PREFILL_DISABLE", "").split(",")
        return cls(
            backend=environ.get("MLA_PREFILL_BACKEND", "").strip() or None,
            fa_version=int(fa_version) if fa_version else None,
            disable=tuple(name.strip() for name in disable if name.strip()),
            matrix=environ.get("MLA_PREFILL_MATRIX", "").strip() or None,
        )


NO_OVERRIDES = Overrides()


class _Fields(NamedTuple):
    arch: str
    packages: tuple[tuple[str, str], ...] | None
    import_errors: tuple[tuple[str, str], ...]
    overrides: Overrides
    device: str | None
    detected_by: str


class Environment(_Fields):
    """One machine, real or described. Immutable and hashable.

    Args:
        arch: the architecture id, in any accepted spelling (``sm90``, ``9.0``, ``gfx942``, ``cpu``).
        installed: distribution -> version of the kernel packages; None: packages are no constraint, and the answer
            lists what it requires.
        import_errors: distribution -> text of the error that importing it raised.
        overrides: what environment variables ask for (`detect` reads them; a described machine has none).
        device: the product's name, for people.
        detected_by: how the architecture was found.
    """

    __slots__ = ()

    def __new__(
        cls,
        arch: str,
        installed: Mapping[str, str] | None = None,
        import_errors: Mapping[str, str] | None = None,
        overrides: Overrides = NO_OVERRIDES,
        device: str | None = None,
        detected_by: str = "described",
    ) -> Environment:
        return super().__new__(
            cls,
            str(arch),
            None if installed is None else _pairs(installed),
            _pairs(import_errors or {}),
            overrides,
            device,
            detected_by,
        )

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What `__new__` takes, so that it can be pickled and sent to other ranks."""
        return (self.arch, self.installed, dict(self.import_errors), self.overrides, self.device, self.detected_by)

    @property
    def installed(self) -> dict[str, str] | None:
        return None if self.packages is None else dict(self.packages)

    def replace(self, **changes: Any) -> Environment:
        """A copy with some arguments changed."""
        now = {
            "arch": self.arch,
            "installed": self.installed,
            "import_errors": dict(self.import_errors),
            "overrides": self.overrides,
            "device": self.device,
            "detected_by": self.detected_by,
        }
        return Environment(**{**now, **changes})

    @classmethod
    def detect(cls, distributions: Iterable[str] | None = None, arch: str | None = None) -> Environment:
        """This machine, without importing a kernel package, and torch only where no driver library answers.

        Args:
            distributions: the packages to look for; None: those of the shipped kernel sheet.
            arch: the architecture, where the caller knows it already.
        """
        from mla_prefill.selector import detection

        overrides = Overrides.from_environ()
        if distributions is None:
            from mla_prefill.capabilities import load_matrix

            distributions = load_matrix(overrides.matrix).distributions
        device, how = None, "explicit"
        if arch is None:
            arch, device, how = detection.architecture()
        return cls(arch, detection.installed(distributions), None, overrides, device, how)


def _pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"installed maps distributions to versions such as {{'torch': '2.11.0'}}, got {mapping!r}")
    return tuple(sorted((canonical(str(name)), str(value)) for name, value in mapping.items()))


def report(
    environment: Environment, matrix: Matrix, notes: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """What an operator pastes into a bug report, as plain data; ``notes`` on packages are those of a probe."""
    import platform

    errors = dict(environment.import_errors)
    installed = environment.installed or {}
    providers = [
        {
            "distribution": name,
            "version": installed.get(name),
            "kernels": [
                k.name for k in matrix.kernels.values() if any(canonical(p.distribution) == name for p in k.providers)
            ],
            "import_error": errors.get(name),
            "notes": list((notes or {}).get(name, ())),
        }
        for name in matrix.distributions
    ]
    return {
        "arch": _known_arch(environment.arch, matrix),
        "device": environment.device,
        "detected_by": environment.detected_by,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "providers": providers,
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "matrix": {"fingerprint": matrix.fingerprint, "schema_version": matrix.schema_version},
    }


def _known_arch(arch: str, matrix: Matrix) -> str:
    try:
        return matrix.arch(arch)
    except ValueError:
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
    lines += [f"variable  {name}={value}" for name, value in report["variables"].items() if value is not None]
    return "\n".join(lines)
