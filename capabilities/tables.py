"""The compiled matrix for people and for programs: text, Markdown and JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mla_prefill.capabilities.matrix import Cell, Matrix

#: How far a cell is proven, in one sign.
PROOF_SIGNS = {"source": "", **{level: f" ({level})" for level in ("built", "run", "measured", "contradicted")}}


def columns(rows: Iterable[Sequence[object]], header: Sequence[str], width: int | None = None) -> str:
    """Aligned columns for a terminal; where ``width`` is less, what stands in the last one is broken after commas."""
    table = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    if width is not None:
        widths[-1] = min(widths[-1], max(len(header[-1]), width - sum(widths[:-1]) - 2 * len(widths[:-1])))
    lines = [line for row in table for line in _lines(row, widths)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """A row, in as many lines as its last cell needs."""
    parts = [row[-1]]
    if len(row[-1]) > widths[-1]:
        kept = re.sub("(?<!,) ", "\xa0", row[-1])  # breaks at no other space
        parts = [part.replace("\xa0", " ") for part in textwrap.wrap(kept, widths[-1], break_on_hyphens=False)]
    for number, part in enumerate(parts):
        cells = (*row[:-1], part) if number == 0 else (*[""] * (len(row) - 1), part)
        yield "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()


def markdown(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def cell_text(cell: Cell) -> str:
    """``fa3``, ``fa2 (V to 192)``, with the proof level and ``on request`` where they apply."""
    candidate = cell.candidate
    text = candidate.kernel
    if candidate.pad_v_to:
        text += f" (V to {candidate.pad_v_to})"
    if cell.on_request is not None:
        text += " (on request)"
    return text + PROOF_SIGNS[candidate.proof]


def support_rows(matrix: Matrix, arches: Iterable[str], blocks: Iterable[str]) -> list[list[str]]:
    """One row a (dims block, arch): the allowed kernels in priority order."""
    rows = []
    wanted = list(arches)
    for name in blocks:
        dims = matrix.blocks[name].dims
        for arch in wanted:
            allowed = [cell_text(cell) for cell in matrix.cells(arch, dims) if cell.allowed]
            rows.append([name, str(dims), arch, ", ".join(allowed) or "none"])
    return rows


HEADER = ("block", "dims", "arch", "allowed kernels, best first")


def as_json(matrix: Matrix, arches: Iterable[str], blocks: Iterable[str]) -> dict[str, Any]:
    """Every cell of the declared axes, with V padding, requirements, proof and the row it comes from."""
    wanted = list(arches)
    cells = []
    for name in blocks:
        for arch in wanted:
            for cell in matrix.cells(arch, matrix.blocks[name].dims):
                if cell.allowed:
                    c = cell.candidate
                    entry = {"block": name, "dims": list(matrix.blocks[name].dims), "arch": arch, **c.to_dict()}
                    cells.append({**entry, "on_request": cell.on_request, "proof": c.proof, "source": c.source})
    return {
        "schema_version": matrix.schema_version,
        "fingerprint": matrix.fingerprint,
        "architectures": {
            a.id: {"vendor": a.vendor, "products": list(a.products)} for a in matrix.architectures.values()
        },
        "cells": cells,
    }
