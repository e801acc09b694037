"""What a machine offers: architecture, installed kernel packages, and overrides from environment variables.

Only packages' metadata is read. No kernel package and no torch is imported to answer a query.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from mla_prefill.capabilities.findings import nearest
from mla_prefill.capabilities.versions import canonical
from mla_prefill.selector import renamed

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
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: What the plugin inside a vLLM engine can be told to do.
VLLM_MODES = ("advise", "veto", "supply")


#: How tools write architectures. What is written otherwise may be the name of a GPU.
_SPELLING = re.compile(r"(?i)(sm|compute)[-_ ]?\d+[a-z]?|\d+\.\d+|gfx[0-9a-f]+(:.*)?|cpu")


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
        """Reads the variables of `VARIABLES`.

        Raises:
            EnvironmentVariableError: a value that cannot be meant, or an unknown name with our prefix: not a silent
                no-op. All of them in one line.
        """
        overrides, wrong = cls.read(environ)
        if wrong:
            raise EnvironmentVariableError("; ".join(wrong.values()))
        return overrides

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> tuple[Overrides, dict[str, str]]:
        """What the variables ask for, and variable -> what is wrong with it; that one then asks for nothing.

        Names of backends and kernels, and the known FlashAttention versions, are the matrix's to judge.
        """
        try:
            environ = renamed.variables(os.environ if environ is None else environ)
        except ValueError as error:
            return NO_OVERRIDES, {f"{PREFIX}*": str(error)}
        wrong = {name: _unknown(name) for name in environ if name.startswith(PREFIX) and name not in VARIABLES}
        backend, fa_version, disable, matrix, mode = (environ.get(name, "").strip() for name in VARIABLES)
        if fa_version and not (fa_version.isdecimal() and len(fa_version) < 8):
            wrong["MLA_PREFILL_FA_VERSION"] = f"MLA_PREFILL_FA_VERSION must be a number such as 3, got {fa_version!r}"
            fa_version = ""
        if mode and mode.lower() not in VLLM_MODES:
            wrong["MLA_PREFILL_VLLM"] = (
                f"unknown mode {mode!r} (environment variable MLA_PREFILL_VLLM); {nearest(mode, VLLM_MODES)}"
            )
        return cls(
            backend=backend or None,
            fa_version=int(fa_version) if fa_version else None,
            disable=tuple(name.strip() for name in disable.split(",") if name.strip()),
            matrix=matrix or None,
        ), wrong


def _unknown(variable: str) -> str:
    """Compared without the prefix, which alone would make any two names near."""
    known = {name.removeprefix(PREFIX): name for name in VARIABLES}
    near = difflib.get_close_matches(variable.removeprefix(PREFIX), known, n=1, cutoff=0.7)
    hint = f"did you mean {known[near[0]]}?" if near else f"known: {', '.join(VARIABLES)}"
    return f"unknown environment variable {variable}; {hint}"


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
        arch: the architecture id, in any accepted spelling (``sm90``, ``9.0``, ``gfx942``, ``cpu``). One that no
            matrix knows is newer hardware, on which nothing runs yet; the name of a GPU is not (see `Matrix.gpu`).
        installed: distribution -> version of the kernel packages, by the names that pip has for them; None: packages
            are no constraint, and the answer lists what it requires. Packages without a kernel make no difference.
        import_errors: distribution -> text of the error that importing it raised.
        overrides: what environment variables ask for (`detect` reads them; a described machine has none).
        device: the product's name, for people.
        detected_by: how the architecture was found.

    Raises:
        ValueError: a value that cannot be meant. One line, with a valid one.
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
            _arch(arch),
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

    @property
    def gpus_differ(self) -> bool:
        """Whether it was found on a machine with GPUs of several kinds, one of which is the current one."""
        from mla_prefill.selector.detection import DIFFER

        return DIFFER in self.detected_by

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
    def detect(
        cls, distributions: Iterable[str] | None = None, arch: str | None = None, overrides: Overrides | None = None
    ) -> Environment:
        """This machine, without importing a kernel package, and torch only where no driver library answers.

        Args:
            distributions: the packages to look for; None: those of the matrix in force.
            arch: the architecture, where the caller knows it already.
            overrides: None: what the environment variables ask for.

        Raises:
            EnvironmentVariableError: they cannot be meant.
        """
        from mla_prefill.selector import detection

        overrides = Overrides.from_environ() if overrides is None else overrides
        if distributions is None:
            from mla_prefill.selector.engine import matrix_named

            distributions = matrix_named(overrides.matrix).distributions
        device, how = None, "explicit"
        if arch is None:
            arch, device, how = detection.architecture()
        return cls(arch, detection.installed(distributions), None, overrides, device, how)


def _arch(given: Any) -> str:
    if not isinstance(given, str) or given.isdecimal() or not given:
        raise ValueError(f"arch must be an architecture such as 'sm90', '9.0' or 'gfx942', got {given!r}")
    if not _SPELLING.fullmatch(given):
        from mla_prefill.capabilities import UnknownNameError, load_matrix

        with suppress(UnknownNameError):
            arch = load_matrix().gpu(given)
            raise ValueError(f"arch must be an architecture, and {given!r} is a GPU: give {arch!r}")
    return str(given)


def _pairs(mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"installed maps distributions to versions such as {{'torch': '2.11.0'}}, got {mapping!r}")
    return tuple(sorted((canonical(str(name)), str(value)) for name, value in mapping.items()))
