"""Evidence: records of what was really built or run, and the proof level of a cell that follows from them.

A record file (``data/evidence/*.json``, ``schema/evidence.schema.json``) is written by ``mla-prefill verify``::

    {"schema_version": 1, "level": "run", "date": ..., "gpu": ..., "packages": {...}, "command": ...,
     "cells": [{"kernel": "fa4", "provider": "flash-attn-4", "arch": "sm90", "dims": [128, 64, 128], "qk": 192,
                "v": 128, "pad_v_to": null, "dtype": "bfloat16", "operation": "new_tokens", "allowed": true,
                "ok": true, ...}]}

``ok`` is true (built, or right against float32 math), false (``refusal`` says why), or null: it could not be tried.
Records decide nothing: they are what `check` holds the matrix and the kernel sheet to, and the proof that answers show.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.model import MLADimensions

if TYPE_CHECKING:
    from mla_prefill.capabilities.matrix import Cell, Matrix, Offer
    from mla_prefill.capabilities.profiles import Profile
    from mla_prefill.capabilities.source import SourceFile

#: From weakest to strongest. ``contradicted``: a record shows a cell failing that the kernel sheet holds possible.
LEVELS = ("source", "built", "run", "measured")


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
            record = json.loads(source.raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not isinstance(record.get("packages", {}), dict):
            continue
        if record.get("level") in LEVELS and isinstance(record.get("cells"), list):
            for number, cell in enumerate(record["cells"]):
                if _readable(cell):
                    yield Item(source, record, number, cell)


def _readable(cell: Any) -> bool:
    try:
        dims = MLADimensions(*cell["dims"])
        widths = (cell["qk"], cell["v"])
        named = isinstance(cell["kernel"], str) and isinstance(cell["arch"], str)
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
        if item.cell["ok"] and is_offered(item, matrix):  # what an excluded version did proves nothing
            found(keys, item.record["level"], origin, item.cell.get("dtype"))
        elif contradicts(item, matrix):
            failed.update(dict.fromkeys(keys, origin))
    for profile in profiles:
        for reading in profile.readings:
            cell = {"kernel": reading.kernel, "arch": profile.arch, "dims": reading.dims, "provider": reading.provider}
            if not is_offered(Item(None, {"packages": profile.packages}, 0, cell | {"dtype": profile.dtype}), matrix):
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


def is_offered(item: Item, matrix: Matrix) -> bool:
    """Whether the kernel sheet offers what the record is about: this package, in the version that it was run with."""
    cell = cell_of(item, matrix)
    named = item.cell.get("provider")
    return any(_offered(item, offer) for offer in (cell.offers if cell else ()) if named in (None, offer.distribution))


def cell_of(item: Item, matrix: Matrix) -> Cell | None:
    """What the sheets say about the record's cell; None where nobody declared its kernel or architecture."""
    kernel, arch = item.cell["kernel"], item.cell["arch"]
    if kernel not in matrix.kernels or arch not in matrix.architectures:
        return None
    return next(cell for cell in matrix.cells(arch, item.dims) if cell.kernel.name == kernel)


def _offered(item: Item, offer: Offer) -> bool:
    """Whether this offer includes the cell: its dtype, and its package's version, not known to be bad."""
    dtype, operation = item.cell.get("dtype"), item.cell.get("operation")
    if dtype is not None and dtype not in offer.installed.dtypes:
        return False
    version = item.record.get("packages", {}).get(offer.distribution)
    if version is None:
        return True
    known_bad = any(
        versions.contains(bad.version, version)
        and (not bad.dtypes or dtype in bad.dtypes)
        and (not bad.needs or operation in bad.needs)
        for bad in offer.known_bad
    )
    return bool(versions.contains(offer.specifier, version)) and not known_bad
