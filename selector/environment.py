"""What a machine offers: architecture, installed kernel packages, and overrides from environment variables.

Only packages' metadata is read. No kernel package and no torch is imported to answer a query.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mla_prefill.capabilities.findings import nearest
from mla_prefill.capabilities.versions import canonical

PREFIX = "MLA_PREFILL_"
#: What each variable does; `env` and the docs print this.
VARIABLES = {
    "MLA_PREFILL_BACKEND": "forces a backend or one of its kernels",
    "MLA_PREFILL_FA_VERSION": "pins the FlashAttention version",
    "MLA_PREFILL_DISABLE": "comma list of backends or kernels never to use",
    "MLA_PREFILL_MATRIX": "a matrix file or data folder in place of the shipped one",
}


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
        environ = os.environ if environ is None else environ
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
        overrides: Overrides = Overrides(),
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
        """This machine, without importing torch or a kernel package.

        Args:
            distributions: the packages to look for; None: those of the shipped kernel sheet.
            arch: the architecture, where the caller knows it already.
        """
        from mla_prefill.selector import detection

        if distributions is None:
            from mla_prefill.capabilities import load_matrix

            distributions = load_matrix().distributions
        device, how = None, "explicit"
        if arch is None:
            arch, device, how = detection.architecture()
        installed = detection.installed(distributions)
        return cls(arch, installed, None, Overrides.from_environ(), device, how)


def _pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((canonical(str(name)), str(value)) for name, value in mapping.items()))
