"""The compiled matrix: policy (rows) joined with physics (kernels), ready to be asked.

``Matrix.lookup`` answers ``(arch, fa_version, dims)`` in one dictionary access; ``Matrix.cells`` is what the selector
reads: every kernel's facts for an arch and dims, with or without a row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.findings import nearest, read_bytes
from mla_prefill.capabilities.model import (
    Architecture,
    Block,
    Candidate,
    Fit,
    Kernel,
    KnownBad,
    Limit,
    LseConvention,
    MLADimensions,
    NotAllowed,
    Order,
    Provider,
    Row,
    Span,
    Width,
)

if TYPE_CHECKING:
    from mla_prefill.capabilities.profiles import Profile

#: A kernel that is given a padded V writes rows as wide as qk, so never into the caller's buffer.
_LOST_BY_PADDING = frozenset({"out"})
#: What drivers write before a product's name, and people leave out.
BRANDS = ("nvidia", "amd", "instinct", "geforce", "tesla")


class UnknownNameError(ValueError):
    """An architecture, GPU, backend, kernel, block or model that nobody declared. The text names the nearest one."""


class Offer(NamedTuple):
    """A provider that can run the kernel on this arch and dims, with the versions of it that can.

    ``described`` and ``installed`` are the candidate as this provider runs it, without and with its name.
    """

    provider: Provider
    distribution: str
    specifier: str
    requirement: str
    known_bad: tuple[KnownBad, ...]
    described: Candidate
    installed: Candidate

    def requirement_for(self, dtype: str, needs: Collection[str]) -> str:
        """The versions to ask for, less those known to be bad for this dtype and these needs."""
        return self.distribution + _less_bad(self.specifier, self.known_bad, dtype, needs)


class Cell(NamedTuple):
    """Everything the sheets say about one kernel for one arch and dims. ``rank`` None: no place in the order."""

    kernel: Kernel
    limit: Limit | None
    fit: Fit | None
    row: Row | None
    rank: int | None
    order: Order | None
    offers: tuple[Offer, ...]
    candidate: Candidate
    not_allowed: NotAllowed | None = None

    @property
    def allowed(self) -> bool:
        return self.row is not None and self.fit is not None

    @property
    def on_request(self) -> str | None:
        """Why this kernel is never chosen automatically here; None: it may be."""
        return self.order.on_request.get(self.kernel.name) if self.order else None


class Matrix:
    """An immutable, checked matrix. Get one from `load_matrix`.

    Attributes:
        architectures, kernels, blocks: the declared axes and rows, by name.
        not_allowed: why no row allows some of what the kernel sheet holds possible.
        features: what ``Request.needs`` may name, with a line of explanation each.
        families: the model families of models.yaml, as plain data.
        document: what it was made from, as plain data.
        fingerprint: SHA-256 over the sources; equal fingerprints give equal decisions.
    """

    def __eq__(self, other: object) -> bool:
        """By fingerprint, so that decisions from equal files are equal, also after pickling."""
        return self.fingerprint == other.fingerprint if isinstance(other, Matrix) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __init__(self, document: Mapping[str, Any], folder: Path | None = None) -> None:
        self.document = document
        self.fingerprint: str = document["fingerprint"]
        self.schema_version: int = document["schema_version"]
        self.features: Mapping[str, str] = MappingProxyType(document["features"])
        self.families: Mapping[str, Any] = MappingProxyType(document["models"])
        self.architectures: Mapping[str, Architecture] = MappingProxyType(
            {name: _architecture(name, raw) for name, raw in document["architectures"].items()}
        )
        self.kernels: Mapping[str, Kernel] = MappingProxyType(
            {name: _kernel(name, raw) for name, raw in document["kernels"].items()}
        )
        self.blocks: Mapping[str, Block] = MappingProxyType(
            {name: _block(name, raw) for name, raw in document["matrix"].items()}
        )
        self.orders: tuple[Order, ...] = tuple(_order(raw) for raw in document["orders"])
        self.not_allowed: tuple[NotAllowed, ...] = tuple(map(_not_allowed, document.get("not_allowed", ())))
        self._proof: Mapping[str, Sequence[str]] = document["proof"]
        self._measured = [
            (label, Path(folder or ".", "measured", name)) for label, name in document.get("measured", ())
        ]
        self._limits = {(k.name, a): limit for k in self.kernels.values() for limit in k.limits for a in limit.arch}
        self._blocks_by_dims: dict[MLADimensions, list[Block]] = {}
        for block in self.blocks.values():
            self._blocks_by_dims.setdefault(block.dims, []).append(block)
        self._orders: dict[tuple[str, MLADimensions | None], Order] = {
            (arch, self.blocks[name].dims if name else None): order
            for order in self.orders
            for name in order.dims or (None,)
            if name is None or name in self.blocks  # the shipped orders may stand beside a matrix of one's own
            for arch in order.arch
        }
        self._spellings = _spellings(self.architectures)
        self._cells: dict[tuple[str, MLADimensions], tuple[Cell, ...]] = {}
        self._table: dict[tuple[str, int | None, tuple[int, int, int]], tuple[Candidate, ...]] = {}
        self.answers: dict[Any, Any] = {}  # what a selector remembers for as long as this matrix lives

    def __reduce__(self) -> tuple[type[Matrix], tuple[Mapping[str, Any]]]:
        """Pickled and copied as what it was made of; a decision can then go to another process."""
        return Matrix, (self.document,)

    # ---- asking -----------------------------------------------------------------------------------------------

    def lookup(self, arch: str, fa_version: int | None, dims: MLADimensions) -> tuple[Candidate, ...]:
        """The allowed candidates in priority order, empty where nothing is allowed.

        Args:
            arch: an architecture id (``sm90``); other spellings are found too, at the cost of a search.
            fa_version: the FlashAttention version at hand, or None; backends that need none are in every tuple.
            dims: (qk_nope, qk_rope, v_head).
        """
        found = self._table.get((arch, fa_version, dims))
        return self._fill(arch, fa_version, dims) if found is None else found

    def _fill(self, arch: str, fa_version: int | None, dims: tuple[int, int, int]) -> tuple[Candidate, ...]:
        dims = MLADimensions(*dims)
        if arch not in self.architectures:
            return self.lookup(self.arch(arch), fa_version, dims)  # another spelling, or UnknownNameError
        if dims not in self._blocks_by_dims or fa_version not in self._fa_axis:
            return ()  # not kept: whatever a caller asks must not grow the table
        allowed = [c.candidate for c in self.cells(arch, dims) if c.allowed]
        candidates = [c for c in allowed if c.fa_version in (None, fa_version)]
        return self._table.setdefault((arch, fa_version, dims), tuple(candidates))

    def allowed(self, arch: str, fa_version: int | None, dims: MLADimensions) -> tuple[str, ...]:
        """The backend names in `lookup`'s answer, without repeats."""
        return tuple(dict.fromkeys(c.backend for c in self.lookup(arch, fa_version, dims)))

    def cells(self, arch: str, dims: MLADimensions) -> tuple[Cell, ...]:
        """Every kernel of the kernel sheet for an arch and dims, in priority order."""
        key = (arch, dims)
        cells = self._cells.get(key)
        if cells is None:
            if len(self._cells) >= 4096:  # dims come from callers; the shipped axes are far fewer
                self._cells.clear()
            joined = [self._cell(kernel, arch, dims) for kernel in self.kernels.values()]
            cells = self._cells[key] = tuple(sorted(joined, key=_priority))
        return cells

    def block_for(self, dims: MLADimensions) -> Block | None:
        """The block of these dims; where an overlay adds one, the shipped one comes first."""
        return next(iter(self._blocks_by_dims.get(dims, ())), None)

    def order_for(self, arch: str, dims: MLADimensions) -> Order | None:
        return self._orders.get((arch, dims)) or self._orders.get((arch, None))

    def keys(self) -> Iterator[tuple[str, int | None, MLADimensions]]:
        """Every key of the declared axes."""
        for dims in self._blocks_by_dims:
            for arch in self.architectures:
                for fa_version in self._fa_axis:
                    yield arch, fa_version, dims

    @cached_property
    def profiles(self) -> tuple[Profile, ...]:
        """The timing profiles beside the data, newest first; read when first asked for. Those that cannot be read are
        left out: `check` reports them.
        """
        from mla_prefill.capabilities.profiles import read

        found = []
        for label, path in self._measured:
            with suppress(OSError, ValueError):
                found.append(read(label, read_bytes(path)))
        return tuple(sorted(found, key=lambda profile: profile.date, reverse=True))

    @property
    def fa_versions(self) -> tuple[int, ...]:
        return tuple(sorted({k.fa_version for k in self.kernels.values() if k.fa_version is not None}))

    @property
    def _fa_axis(self) -> tuple[int | None, ...]:
        return (None, *self.fa_versions)

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(k.backend for k in self.kernels.values()))

    @property
    def distributions(self) -> tuple[str, ...]:
        """Every package whose version counts, in normalised spelling; those that provide a kernel come first, then
        others that their speed hangs on.
        """
        providers = [provider for kernel in self.kernels.values() for provider in kernel.providers]
        names = [provider.distribution for provider in providers]
        names += [name for provider in providers for name in provider.beside]
        return tuple(dict.fromkeys(map(versions.canonical, names)))

    def arch(self, spelling: str) -> str:
        """The id of an architecture in any accepted spelling: ``sm_90a``, ``9.0``, ``gfx942:sramecc+:xnack-``."""
        found = self._spellings.get(fold_arch(spelling))
        if found is None:
            hint = nearest(spelling, self.architectures)
            with suppress(UnknownNameError):
                hint = f"it is a GPU of {self.gpu(spelling)}: --gpu {spelling}"
            raise UnknownNameError(f"unknown architecture {spelling!r}; {hint}")
        return found

    def gpu(self, product: str) -> str:
        """The architecture of a product: ``H200``, ``NVIDIA L40S``."""
        products = {fold_product(p): a.id for a in self.architectures.values() for p in a.products}
        folded = fold_product(product)
        if folded in products:
            return products[folded]
        # Drivers write more than the product: "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB".
        words = [word for word in re.split(r"[^a-z0-9.]+", product.lower()) if word not in BRANDS]
        for end in range(len(words), 0, -1):
            if (known := "".join(words[:end])) in products:
                return products[known]
        hint = nearest(product, (p for a in self.architectures.values() for p in a.products))
        if fold_arch(product) in self._spellings:
            hint = f"it is an architecture: --arch {product}"
        raise UnknownNameError(f"unknown GPU {product!r}; {hint}")

    # ---- joining ----------------------------------------------------------------------------------------------

    def rows_for(self, arch: str, dims: MLADimensions, kernel: Kernel) -> Iterator[Row]:
        """The rows that allow this kernel for this arch and dims (one, in a matrix that passed its checks)."""
        for block in self._blocks_by_dims.get(dims, ()):
            for row in block.rows:
                if (
                    arch in row.arch
                    and kernel.backend in row.backends
                    and (kernel.fa_version is None or kernel.fa_version in row.fa_version)
                    and (not row.kernels or kernel.name in row.kernels)
                ):
                    yield row

    def excuse_for(self, arch: str, dims: MLADimensions, kernel: str) -> NotAllowed | None:
        """The entry that says why no row allows this kernel for this arch and dims."""
        names = {block.name for block in self._blocks_by_dims.get(dims, ())}
        for entry in self.not_allowed:
            if arch in entry.arch and kernel in entry.kernels and (names.intersection(entry.dims or names)):
                return entry
        return None

    def limit(self, kernel: str, arch: str) -> Limit | None:
        return self._limits.get((kernel, arch))

    def fit(self, kernel: str, arch: str, dims: MLADimensions) -> Fit | None:
        """How a kernel runs these dims on an arch, by the kernel sheet alone."""
        limit = self.limit(kernel, arch)
        if limit is None:
            return None
        return limit.fit(dims.qk_head_dim, dims.v_head_dim, self.architectures[arch].shared_memory_bytes)

    def _cell(self, kernel: Kernel, arch: str, dims: MLADimensions) -> Cell:
        limit = self.limit(kernel.name, arch)
        fit = self.fit(kernel.name, arch, dims)
        row = next(self.rows_for(arch, dims, kernel), None)
        order = self.order_for(arch, dims)
        rank = order.order.index(kernel.name) if order and kernel.name in order.order else None
        candidate = Candidate(
            backend=kernel.backend,
            kernel=kernel.name,
            fa_version=kernel.fa_version,
            pad_v_to=fit.pad_v_to if fit else None,
            requires=(),
            provider=None,
            dtypes=(limit and limit.dtypes) or kernel.dtypes,
            provides=kernel.provides - _LOST_BY_PADDING if fit and fit.pad_v_to else kernel.provides,
            lse=kernel.lse,
            source=row.source if row else kernel.source,
            **self.evidence(kernel.name, arch, dims),
        )
        offers: tuple[Offer, ...] = ()
        if fit is not None:
            requires = [versions.split(r) for r in fit.requires + (row.requires if row else ())]
            bad = [entry for entry in kernel.known_bad if entry.concerns(arch, dims)]
            for provider in kernel.providers:
                if provider.arch is None or arch in provider.arch:
                    # What one package's build was shown to do says nothing of another's.
                    build = versions.canonical(provider.distribution)
                    own = replace(candidate, **self.evidence(kernel.name, arch, dims, build))
                    offer = _offer(own, provider, requires, bad)
                    offers += () if offer is None else (offer,)
            if offers:
                candidate = replace(candidate, requires=(offers[0].requirement,))
        excuse = self.excuse_for(arch, dims, kernel.name) if offers and row is None else None
        return Cell(kernel, limit, fit, row, rank, order, offers, candidate, excuse)

    def proof(self, kernel: str, arch: str, dims: MLADimensions) -> str:
        """How well a cell is known: source, built, run, measured or contradicted (the records in data/evidence)."""
        return str(self.evidence(kernel, arch, dims)["proof"])

    def proven_pairs(self, kernel: str, arch: str) -> frozenset[tuple[int, int]]:
        """The (qk, v) pairs of this kernel on this arch that a record is about."""
        cells = (cell.split()[2:4] for cell in self._proof if cell.startswith(f"{kernel} {arch} "))
        return frozenset((int(qk), int(v)) for qk, v in cells)

    def evidence(self, kernel: str, arch: str, dims: MLADimensions, *distribution: str) -> dict[str, Any]:
        """A candidate's ``proof``, and with what it was ``proven``; of a cell, or of one package's build for it."""
        cell = f"{kernel} {arch} {dims.qk_head_dim} {dims.v_head_dim}"
        proof, proven = self._proof.get(" ".join((cell, *distribution)), ("source", ""))
        return {"proof": proof, "proven": proven}


def _offer(
    candidate: Candidate, provider: Provider, requires: list[tuple[str, str]], known_bad: list[KnownBad]
) -> Offer | None:
    name = versions.canonical(provider.distribution)
    specifier = versions.intersect((provider.version, *(range_ for about, range_ in requires if about == name)))
    if specifier is None:
        return None  # an empty range: `check` reports it
    bad = tuple(entry for entry in known_bad if entry.distribution == name)
    requirement = name + _less_bad(specifier, bad, None, ())
    described = replace(
        candidate,
        requires=(requirement,),
        dtypes=tuple(d for d in candidate.dtypes if provider.dtypes is None or d in provider.dtypes),
        provides=candidate.provides if provider.provides is None else candidate.provides & provider.provides,
    )
    return Offer(provider, name, specifier, requirement, bad, described, replace(described, provider=name))


def _less_bad(specifier: str, known_bad: Iterable[KnownBad], dtype: str | None, needs: Collection[str]) -> str:
    for entry in known_bad:
        if entry.matters(dtype, needs):
            specifier = versions.without(specifier, entry.version)
    return specifier


def _priority(cell: Cell) -> tuple[bool, int]:
    """The order of automatic choice; kernels without a place in it come last."""
    return (cell.rank is None, cell.rank or 0)


def _fold(name: str) -> str:
    return "".join(ch for ch in name.lower() if ch.isalnum() or ch == ".")


def fold_arch(spelling: str) -> str:
    """An architecture's name as it is looked up: without AMD's feature suffixes."""
    return _fold(spelling.split(":", 1)[0])


def fold_product(name: str) -> str:
    """A GPU's name without its brand and spaces: drivers say ``NVIDIA H200``, people say ``H200``."""
    folded = _fold(name)
    for brand in BRANDS:
        folded = folded.removeprefix(brand)
    return folded


def _spellings(architectures: Mapping[str, Architecture]) -> dict[str, str]:
    return {fold_arch(name): a.id for a in architectures.values() for name in (*a.spellings, a.id)}


# ---- plain data -> values -------------------------------------------------------------------------------------------


def _tuple(raw: Any) -> tuple[Any, ...]:
    return () if raw is None else tuple(raw) if isinstance(raw, list) else (raw,)


def _optional(raw: Any) -> tuple[Any, ...] | None:
    return None if raw is None else tuple(raw)


def _architecture(name: str, raw: Mapping[str, Any]) -> Architecture:
    return Architecture(
        id=name,
        vendor=raw["vendor"],
        name=raw["name"],
        capability=raw.get("capability"),
        shared_memory_bytes=raw.get("shared_memory_bytes"),
        products=_tuple(raw.get("products")),
        spellings=_tuple(raw.get("spellings")),
    )


def _span(raw: Any, low: int = 1, high: int = 1 << 30) -> Span:
    return Span(raw, raw) if isinstance(raw, int) else Span(raw.get("min", low), raw.get("max", high))


def _width(raw: Mapping[str, Any]) -> Width:
    v = None if raw["v"] == "equal" else _span(raw["v"])
    return Width(_span(raw["qk"]), v, _tuple(raw.get("requires")))


def _limit(raw: Mapping[str, Any]) -> Limit:
    memory = raw.get("shared_memory")
    return Limit(
        arch=_tuple(raw["arch"]),
        widths=tuple(map(_width, raw["widths"])),
        multiple_of=raw.get("multiple_of", 1),
        pad_v=raw.get("pad_v", False),
        dtypes=_optional(raw.get("dtypes")),
        requires=_tuple(raw.get("requires")),
        shared_memory=(memory["per_qk"], memory["per_v"]) if memory else None,
        source=raw["@"],
    )


def _provider(raw: Mapping[str, Any]) -> Provider:
    provides = raw.get("provides")
    return Provider(
        distribution=raw["distribution"],
        module=raw["module"],
        version=raw.get("version", ""),
        verified=raw.get("verified", ""),
        arch=_optional(raw.get("arch")),
        dtypes=_optional(raw.get("dtypes")),
        provides=None if provides is None else frozenset(provides),
        source=raw["@"],
        planned_call=tuple(raw.get("planned_call", ())),
    )


def _known_bad(raw: Mapping[str, Any]) -> KnownBad:
    distribution, version = versions.split(raw["version"])
    return KnownBad(
        arch=_tuple(raw["arch"]),
        widths=tuple(map(_width, raw.get("widths", ()))),
        distribution=distribution,
        version=version,
        dtypes=_tuple(raw.get("dtypes")),
        needs=_tuple(raw.get("needs")),
        reason=raw["reason"],
        source=raw["@"],
        refs=tuple(source["ref"] for source in raw["sources"]),
    )


def _kernel(name: str, raw: Mapping[str, Any]) -> Kernel:
    lse = raw.get("lse")
    return Kernel(
        name=name,
        backend=raw["backend"],
        fa_version=raw.get("fa_version"),
        providers=tuple(map(_provider, raw["providers"])),
        dtypes=_tuple(raw["dtypes"]),
        provides=frozenset(raw["provides"]),
        lse=LseConvention(str(lse["base"]), lse["layout"], lse["no_keys"], lse.get("rounded", False)) if lse else None,
        causal=raw["causal"],
        call=tuple(raw.get("call", {}).items()),
        limits=tuple(map(_limit, raw["limits"])),
        known_bad=tuple(map(_known_bad, raw.get("known_bad", ()))),
        note=raw.get("note", ""),
        source=raw["@"],
        arch=tuple(dict.fromkeys(arch for limit in raw["limits"] for arch in _tuple(limit["arch"]))),
    )


def _row(raw: Mapping[str, Any]) -> Row:
    return Row(
        arch=_tuple(raw["arch"]),
        fa_version=_tuple(raw.get("fa_version")),
        backends=_tuple(raw["backends"]),
        kernels=_tuple(raw.get("kernels")),
        requires=_tuple(raw.get("requires")),
        note=raw.get("note", ""),
        source=raw["@"],
    )


def _not_allowed(raw: Mapping[str, Any]) -> NotAllowed:
    return NotAllowed(_tuple(raw["arch"]), _tuple(raw["kernels"]), _tuple(raw.get("dims")), raw["reason"], raw["@"])


def dims_of(block: Mapping[str, Any]) -> MLADimensions:
    """The dims of a block as matrix.yaml has it. Raises ValueError where no model has such."""
    dims = block["dims"]
    return MLADimensions(dims["qk_nope"], dims["qk_rope"], dims["v_head"])


def _block(name: str, raw: Mapping[str, Any]) -> Block:
    return Block(name, dims_of(raw), tuple(map(_row, raw["allow"])), raw["@"])


def _order(raw: Mapping[str, Any]) -> Order:
    return Order(
        _tuple(raw["arch"]), _tuple(raw.get("dims")), _tuple(raw["order"]), raw.get("on_request", {}), raw["@"]
    )
