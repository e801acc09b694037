"""Evidence: records of what was really built or run, and the proof level of a cell that follows from them.

A record file (``data/evidence/*.json``, ``schema/evidence.schema.json``) is written by ``mla-prefill verify``::

    {"schema_version": 1, "level": "run", "date": ..., "gpu": ..., "packages": {...}, "command": ...,
     "cells": [{"kernel": "fa4", "provider": "flash-attn-4", "arch": "sm90", "dims": [128, 64, 128], "qk": 192,
                "v": 128, "pad_v_to": null, "dtype": "bfloat16", "operation": "new_tokens", "allowed": true,
                "ok": true, ...}]}

``ok`` is true (built, or right against float32 math), false (``refusal`` says why), or null: it could not be tried, or
the machine failed and not the kernel.
Records decide nothing: they are what `check` holds the matrix and the kernel sheet to, and the proof that answers show.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.model import LseConvention, MLADimensions

if TYPE_CHECKING:
    from mla_prefill.capabilities.matrix import Cell, Matrix, Offer
    from mla_prefill.capabilities.profiles import Profile
    from mla_prefill.capabilities.source import SourceFile

#: From weakest to strongest. ``contradicted``: a record shows a cell failing that the kernel sheet holds possible.
LEVELS = ("source", "built", "run", "measured")

#: operation -> what serving needs of a kernel for it.
OPERATIONS = {"new_tokens": ("lse",), "context_chunk": ("lse", "context_chunk")}


class Tolerance(NamedTuple):
    """``out``: norm of the difference over the norm of the truth. ``lse``: the largest difference."""

    out: float
    lse: float


#: One kernel call in bfloat16 reads about 2e-3 on a GPU (rounding of P and out); three merged ones a little more.
TOLERANCES = {
    "bfloat16": Tolerance(6e-3, 1e-4),
    "float16": Tolerance(1e-3, 1e-4),
    "float32": Tolerance(2e-5, 1e-4),
}


def tolerance_of(dtype: str, lse: LseConvention | None) -> Tolerance:
    """What is right for a dtype and a kernel's LSE: one whose sum is of rounded probabilities is as exact as out."""
    tolerance = TOLERANCES[dtype]
    return tolerance._replace(lse=tolerance.out) if lse is not None and lse.rounded else tolerance


class Item(NamedTuple):
    """One cell of a record, and where it stands there."""

    source: SourceFile | None
    record: dict[str, Any]
    number: int
    cell: dict[str, Any]

    @property
    def dims(self) -> MLADimensions:
        return MLADimensions(*self.cell["dims"])

    def __str__(self) -> str:
        c = self.cell
        provider = c.get("provider")
        version = self.record.get("packages", {}).get(provider)
        origin = f" of {' '.join(filter(None, (provider, version)))}" if provider else ""
        return f"{c['kernel']}{origin} for {self.dims} {c.get('dtype', '')} {c.get('operation', '')} on {c['arch']}"


def items(files: Iterable[SourceFile]) -> Iterator[Item]:
    """Every cell of every readable record; what cannot be read is left out here, and reported by `check`."""
    for source in files:
        try:
            record = read_json(source.raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not are_versions(record.get("packages", {})):
            continue
        if record.get("level") in LEVELS and isinstance(record.get("cells"), list):
            for number, cell in enumerate(record["cells"]):
                if _readable(cell):
                    yield Item(source, record, number, cell)


def read_json(raw: bytes) -> Any:
    """JSON without what Python takes besides: NaN and Infinity, which nothing compares with, and a key given twice.

    Raises:
        ValueError: it is not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number of JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {twice!r} occurs twice in one object")
        return found

    return json.loads(raw, parse_constant=refuse, object_pairs_hook=once)


def are_versions(packages: Any) -> bool:
    """Whether it maps names to texts, as ``packages`` of a record does."""
    return isinstance(packages, dict) and all(isinstance(version, str) for version in packages.values())


def _readable(cell: Any) -> bool:
    try:
        dims = MLADimensions(*cell["dims"])
        widths = (cell["qk"], cell["v"])
        named = isinstance(cell["kernel"], str) and isinstance(cell["arch"], str)
        named = named and all(isinstance(cell.get(n), str | None) for n in ("provider", "dtype", "operation"))
        named = named and all(isinstance(cell.get(n), float | int | None) for n in ("error", "lse_error"))
        return named and widths == (dims.qk_head_dim, dims.v_head_dim) and cell["ok"] in (True, False, None)
    except (KeyError, TypeError, ValueError):
        return False


def proofs(files: Iterable[SourceFile], profiles: Iterable[Profile], matrix: Matrix) -> dict[str, list[str]]:
    """[the strongest level on record or ``contradicted``, with what it was shown] of each cell:
    ``"kernel arch qk v"`` by any package, ``"kernel arch qk v distribution"`` by that one.

    A level without its packages, dtypes and GPU would claim for a version what another one did.
    """
    best: dict[str, tuple[int, dict[str, list[str]]]] = {}
    failed: dict[str, str] = {}

    def found(keys: Iterable[str], level: str, origin: str, dtype: str | None) -> None:
        for key in keys:
            height, origins = best.get(key, (0, {}))
            if LEVELS.index(level) > height:
                height, origins = LEVELS.index(level), {}
            if LEVELS.index(level) == height:
                dtypes = origins.setdefault(origin, [])
                dtypes += [dtype] if dtype and dtype not in dtypes else []
                best[key] = (height, origins)

    for item in items(files):
        keys = _keys(item.cell["kernel"], item.cell["arch"], item.dims, item.cell.get("provider"))
        origin = _origin(item.cell.get("provider"), item.record.get("packages", {}), item.record.get("gpu"))
        # What an excluded version did proves nothing, nor does a result that is wrong by its own numbers.
        if item.cell["ok"] and is_offered(item, matrix) and not wrong_result(item, matrix):
            found(keys, item.record["level"], origin, item.cell.get("dtype"))
        elif contradicts(item, matrix):
            failed.update(dict.fromkeys(keys, origin))
    for profile in profiles:
        for reading in profile.readings:
            cell = {"kernel": reading.kernel, "arch": profile.arch, "dims": reading.dims, "provider": reading.provider}
            cell |= {"dtype": profile.dtype, "operation": "new_tokens"}
            if not is_offered(Item(None, {"packages": profile.packages}, 0, cell), matrix):
                continue
            keys = _keys(reading.kernel, profile.arch, reading.dims, reading.provider)
            found(keys, "measured", _origin(reading.provider, profile.packages, profile.gpu), profile.dtype)
    levels = {key: [LEVELS[height], _shown(origins)] for key, (height, origins) in best.items()}
    levels.update({key: ["contradicted", origin] for key, origin in failed.items()})
    return dict(sorted(levels.items()))


def _origin(provider: str | None, packages: Mapping[str, str], gpu: str | None) -> str:
    """``flash-attn-4 4.0.0b36, NVIDIA H200``."""
    package = " ".join(filter(None, (provider, packages.get(provider or ""))))
    return ", ".join(str(part) for part in (package, gpu) if part)


def _shown(origins: dict[str, list[str]]) -> str:
    return "; ".join(", ".join(filter(None, (origin, "/".join(dtypes)))) for origin, dtypes in origins.items())


def _keys(kernel: str, arch: str, dims: MLADimensions, provider: str | None) -> tuple[str, ...]:
    cell = f"{kernel} {arch} {dims.qk_head_dim} {dims.v_head_dim}"
    return (cell,) if provider is None else (cell, f"{cell} {versions.canonical(provider)}")


def contradicts(item: Item, matrix: Matrix) -> bool:
    """Whether the record shows failing what the kernel sheet holds possible, with the versions that it was run with."""
    return item.cell["ok"] is False and is_offered(item, matrix)


def is_offered(item: Item, matrix: Matrix, *needs: str) -> bool:
    """Whether the kernel sheet offers what the record is about: this package, in the version that it was run with,
    with what the operation needs (and ``needs``).
    """
    cell = cell_of(item, matrix)
    named = item.cell.get("provider")
    offers = (offer for offer in (cell.offers if cell else ()) if named in (None, offer.distribution))
    return any(_offered(item, offer, needs) for offer in offers)


def cell_of(item: Item, matrix: Matrix) -> Cell | None:
    """What the sheets say about the record's cell; None where nobody declared its kernel or architecture."""
    kernel, arch = item.cell["kernel"], item.cell["arch"]
    if kernel not in matrix.kernels or arch not in matrix.architectures:
        return None
    return next(cell for cell in matrix.cells(arch, item.dims) if cell.kernel.name == kernel)


def _offered(item: Item, offer: Offer, more: Collection[str]) -> bool:
    """Whether this offer includes the cell: its dtype, and its package's version, not known to be bad."""
    dtype, version = item.cell.get("dtype"), item.record.get("packages", {}).get(offer.distribution)
    if version is None or not offer.installed.provides.issuperset(more):
        return False  # of which version it is true nobody can say
    if dtype is not None and dtype not in offer.installed.dtypes:
        return False
    needs = {*OPERATIONS.get(item.cell.get("operation") or "", ()), *more}
    bad = any(versions.contains(bad.version, version) and bad.matters(dtype, needs) for bad in offer.known_bad)
    return bool(versions.contains(offer.specifier, version)) and not bad


def wrong_result(item: Item, matrix: Matrix) -> str | None:
    """Why a cell that was run and says ``ok`` is not right by its own numbers; None where it is."""
    known = cell_of(item, matrix)
    if item.record.get("level") != "run" or not item.cell["ok"] or known is None:
        return None
    dtype = item.cell.get("dtype")
    limits = tolerance_of(dtype, known.kernel.lse) if dtype in TOLERANCES else Tolerance(math.inf, math.inf)
    for name, most in (("error", limits.out), ("lse_error", limits.lse)):
        found = item.cell.get(name)
        if found is None or not 0 <= found <= most or found == math.inf:
            return f"ok, though its {name} is {'not on record' if found is None else found}; at most {most:g} is right"
    return None
