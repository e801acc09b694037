"""The words of this project as immutable values: dims, architectures, kernels, rows, candidates.

Nothing here reads a file or knows a fact; facts come from ``data/*.yaml``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_prefill.capabilities import versions

#: A head dimension above this is a typing error, not a model.
MAX_HEAD_DIM = 4096


def whole(value: Any) -> int | None:
    """A whole number of any library (NumPy's, say) as an int; None for all else, truth values too."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _width(name: str, value: Any) -> int:
    width = whole(value)
    if width is None:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not 0 <= width <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must be between 0 and {MAX_HEAD_DIM}, got {width}")
    return width


class _Dims(NamedTuple):
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MLADimensions(_Dims):
    """The head dims of a (non-absorbed) MLA prefill: vLLM's name and Hugging Face's config fields.

    ``q`` and ``k`` are (tokens, heads, qk_nope_head_dim + qk_rope_head_dim), ``v`` is (tokens, heads, v_head_dim).
    A plain tuple underneath, so it hashes and compares at C speed.

    Raises:
        ValueError: not three whole numbers, a width of zero, or a number no model has.
    """

    __slots__ = ()

    def __new__(cls, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int) -> MLADimensions:
        given = (qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        dims = super().__new__(cls, *map(_width, cls._fields, given))
        if dims.qk_head_dim == 0 or dims.v_head_dim == 0:
            widths = f"qk_nope + qk_rope = {dims.qk_head_dim}, v_head = {dims.v_head_dim}"
            raise ValueError(f"a head cannot be 0 wide: {widths}")
        return dims

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def __str__(self) -> str:
        return f"({self.qk_nope_head_dim}, {self.qk_rope_head_dim}, {self.v_head_dim})"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GPU target. ``vendor`` is part of the identity: AMD's gfx950 is never mixed up with NVIDIA's 9.x."""

    id: str
    vendor: str
    name: str
    capability: str | None
    shared_memory_bytes: int | None
    products: tuple[str, ...]
    spellings: tuple[str, ...]


class Span(NamedTuple):
    """An inclusive range of head widths."""

    min: int
    max: int

    def __contains__(self, width: object) -> bool:
        return self.min <= width <= self.max  # type: ignore[operator]

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"


@dataclass(frozen=True, slots=True)
class Width:
    """One line of (qk, v) widths that a kernel takes as they are; ``v`` None means equal to qk."""

    qk: Span
    v: Span | None
    requires: tuple[str, ...] = ()

    def takes(self, qk: int, v: int) -> bool:
        return qk in self.qk and (v == qk if self.v is None else v in self.v)

    def __str__(self) -> str:
        return f"qk {self.qk}, v {'equal' if self.v is None else self.v}"


class Fit(NamedTuple):
    """How a (qk, v) pair runs: V zero-padded to ``pad_v_to`` (None: as it is), and the packages' versions it needs."""

    pad_v_to: int | None
    requires: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a kernel can run on some architectures (physics, read from the kernel's own code)."""

    arch: tuple[str, ...]
    widths: tuple[Width, ...]
    multiple_of: int
    pad_v: bool
    dtypes: tuple[str, ...] | None
    requires: tuple[str, ...]
    shared_memory: tuple[int, int] | None
    source: str

    def fit(self, qk: int, v: int, shared_memory_bytes: int | None) -> Fit | None:
        """The way this pair runs, natively before padded; None where it cannot."""
        for pad_v_to, width_v in ((None, v), (qk, qk)):
            if pad_v_to is not None and not (self.pad_v and v < qk):
                break
            if qk % self.multiple_of or width_v % self.multiple_of:
                continue
            if not self._fits_shared_memory(qk, width_v, shared_memory_bytes):
                continue
            for line in self.widths:
                if line.takes(qk, width_v):
                    return Fit(pad_v_to, self.requires + line.requires)
        return None

    def _fits_shared_memory(self, qk: int, v: int, limit: int | None) -> bool:
        if self.shared_memory is None or limit is None:
            return True
        per_qk, per_v = self.shared_memory
        return per_qk * qk + per_v * v <= limit

    def __str__(self) -> str:
        text = "; ".join(map(str, self.widths))
        if self.multiple_of > 1:
            text += f"; multiples of {self.multiple_of}"
        if self.shared_memory:
            text += f"; {self.shared_memory[0]} x qk + {self.shared_memory[1]} x v bytes of shared memory"
        return text + ("; V may be padded to qk" if self.pad_v else "")


@dataclass(frozen=True, slots=True)
class Provider:
    """An installed package that offers a kernel. ``None`` for arch, dtypes or provides: as the kernel says."""

    distribution: str
    module: str
    version: str
    verified: str
    arch: tuple[str, ...] | None
    dtypes: tuple[str, ...] | None
    provides: frozenset[str] | None
    source: str
    #: Requirements that must all hold for a call to be repeated without the public function; empty: never.
    planned_call: tuple[str, ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """Other packages that this one's speed hangs on."""
        names = (versions.split(requirement)[0] for requirement in self.planned_call)
        return tuple(name for name in names if name != self.distribution)


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A shape that a kernel accepts and gets wrong (or crashes on), bounded by a package's versions."""

    arch: tuple[str, ...]
    widths: tuple[Width, ...]
    distribution: str
    version: str
    dtypes: tuple[str, ...]
    needs: tuple[str, ...]
    reason: str
    source: str
    refs: tuple[str, ...] = ()

    def matters(self, dtype: str | None, needs: Collection[str]) -> bool:
        """Whether it strikes a request for this dtype and these features (None and (): whatever is asked)."""
        return (not self.dtypes or dtype in self.dtypes) and (not self.needs or not set(self.needs).isdisjoint(needs))

    def concerns(self, arch: str, dims: MLADimensions) -> bool:
        if arch not in self.arch:
            return False
        return not self.widths or any(line.takes(dims.qk_head_dim, dims.v_head_dim) for line in self.widths)


@dataclass(frozen=True, slots=True)
class LseConvention:
    """How a kernel returns its log-sum-exp: base ``e`` or ``2``, layout, and the value of a row without keys.

    ``rounded``: the sum behind it is of probabilities in the inputs' dtype, so it is only as exact as that.
    """

    base: str
    layout: str
    no_keys: str
    rounded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """What computes. Each belongs to one backend; the FA version is a property of a FLASH_ATTN kernel."""

    name: str
    backend: str
    fa_version: int | None
    providers: tuple[Provider, ...]
    dtypes: tuple[str, ...]
    provides: frozenset[str]
    lse: LseConvention | None
    causal: str
    #: Arguments that its entry point always gets, where it takes them.
    call: tuple[tuple[str, int | bool], ...]
    limits: tuple[Limit, ...]
    known_bad: tuple[KnownBad, ...]
    note: str
    source: str
    arch: tuple[str, ...]

    @property
    def label(self) -> str:
        """How people name it: ``FLASH_ATTN/fa3``."""
        return f"{self.backend}/{self.name}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A (backend, kernel) that the matrix allows for an arch and dims.

    ``requires`` are PEP 508 strings of the preferred provider (or of the chosen one, once a selection resolved it);
    ``provider`` is its distribution's name, None while packages are no constraint.
    """

    backend: str
    kernel: str
    fa_version: int | None
    pad_v_to: int | None
    requires: tuple[str, ...]
    provider: str | None
    dtypes: tuple[str, ...]
    provides: frozenset[str]
    lse: LseConvention | None
    proof: str
    source: str
    proven: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As one entry of the JSON of `mla-prefill select`; its keys are stable."""
        return {
            "backend": self.backend,
            "kernel": self.kernel,
            "fa_version": self.fa_version,
            "pad_v_to": self.pad_v_to,
            "provider": self.provider,
            "requires": list(self.requires),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``matrix.yaml``, spread over its architectures and kernels by the compiler."""

    arch: tuple[str, ...]
    fa_version: tuple[int, ...]
    backends: tuple[str, ...]
    kernels: tuple[str, ...]
    requires: tuple[str, ...]
    note: str
    source: str


@dataclass(frozen=True, slots=True)
class NotAllowed:
    """Why no row allows cells that the kernel sheet holds possible. ``dims`` are block names, empty for all blocks."""

    arch: tuple[str, ...]
    kernels: tuple[str, ...]
    dims: tuple[str, ...]
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Block:
    """One dims triple and the rows that allow backends for it."""

    name: str
    dims: MLADimensions
    rows: tuple[Row, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Order:
    """The order of kernels on some architectures; ``on_request`` kernels are never chosen automatically."""

    arch: tuple[str, ...]
    dims: tuple[str, ...]
    order: tuple[str, ...]
    on_request: dict[str, str] = field(default_factory=dict)
    source: str = ""


#: PyTorch's names of the dtypes a prefill may compute in.
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
