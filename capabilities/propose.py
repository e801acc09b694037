"""The matrix block of a new model's dims: what the kernel sheet holds possible, by the policy of the blocks at hand.

Policy is learned, not written down again: a kernel is proposed on an architecture where some block allows it already,
unless ``not_allowed`` speaks against it or a record shows it failing. Everything else that can run is named and left
to a person.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mla_prefill.capabilities import checks
from mla_prefill.capabilities.findings import MatrixError
from mla_prefill.capabilities.load import Sources
from mla_prefill.capabilities.matrix import Cell, Matrix
from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.capabilities.row_order import place, ranks
from mla_prefill.capabilities.source import SourceFile
from mla_prefill.capabilities.tables import columns

#: Answers about a cell. The first two are in the block.
NATIVE, PADDED, HELD_BACK, IMPOSSIBLE = "native", "padded", "possible, not proposed", "impossible"
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
NEW_FILE = b"schema_version: 1\nmatrix:\n"
WIDTH = 120

Row = Mapping[str, Any]


class ProposalError(ValueError):
    """No block can be proposed under this name, or put into this file. One line."""


class NothingToAddError(Exception):
    """The answer is no: these dims have a block, or nothing runs them. One line."""


class Answer(NamedTuple):
    """What can be said of one kernel on one architecture: one of the four answers, and why or how."""

    kernel: str
    arch: str
    answer: str
    why: str
    requires: tuple[str, ...]
    proof: str

    @property
    def proposed(self) -> bool:
        return self.answer in (NATIVE, PADDED)

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "requires": list(self.requires)}


class Proposal(NamedTuple):
    """A block that passes `check`, and every cell behind it.

    On the architectures ``on_request`` nothing of it is chosen automatically, by the orders at hand.
    """

    name: str
    dims: MLADimensions
    answers: tuple[Answer, ...]
    rows: tuple[Row, ...]
    on_request: tuple[str, ...]

    def block(self, ref: str) -> list[str]:
        """The lines of the block in the style of the shipped file, not indented; ``ref`` says where the dims stand."""
        nope, rope, v = self.dims
        lines = [
            f"{self.name}:",
            f"  dims: {{qk_nope: {nope}, qk_rope: {rope}, v_head: {v}}}",
            f"  sources: [{{kind: {source_kind(ref)}, ref: {json.dumps(ref, ensure_ascii=False)}}}]",
            "  allow:",
        ]
        return lines + [f"    {line}" for row in self.rows for line in _row_lines(row)]

    def document(self) -> dict[str, Any]:
        """The block as `Matrix` takes it."""
        nope, rope, v = self.dims
        dims = {"qk_nope": nope, "qk_rope": rope, "v_head": v}
        return {self.name: {"dims": dims, "allow": [{**row, "@": self.name} for row in self.rows], "@": self.name}}

    def to_dict(self, ref: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "dims": list(self.dims),
            "block": "\n".join(self.block(ref)),
            "on_request": list(self.on_request),
            "cells": [answer.to_dict() for answer in self.answers],
        }

    def table(self) -> str:
        """Cells with equal answers in one line: what is proposed, what is held back, and what cannot run.

        Kernels are left out where they have no limits for an architecture.
        """
        lines: dict[tuple[str, ...], list[str]] = {}
        for a in self.answers:
            if a.why != _NO_LIMITS:
                line = (a.answer, a.kernel, a.why, *((", ".join(a.requires), a.proof) if a.proposed else ()))
                lines.setdefault(line, []).append(a.arch)
        proposed = [
            (kernel, f"{answer}{why and f', {why}'}", needs, proof, ", ".join(arches))
            for (answer, kernel, why, *more), arches in lines.items()
            for needs, proof in ([more] if more else [])
        ]
        parts = [columns(proposed, ("kernel", "how", "needs", "proof", "arch"))]
        for kind in (HELD_BACK, IMPOSSIBLE):
            others = [(key[1], key[2], ", ".join(arches)) for key, arches in lines.items() if key[0] == kind]
            parts += (
                [f"{kind}:", *(f"  {kernel} on {arches}: {why}" for kernel, why, arches in others)] if others else []
            )
        if self.on_request:
            parts.append(f"nothing chosen automatically on {', '.join(self.on_request)}: see priorities.yaml")
        return "\n".join(parts)


_NO_LIMITS = "the kernel sheet has no limits for it there"


def propose(matrix: Matrix, name: str, dims: MLADimensions) -> Proposal:
    """The block ``name`` for ``dims``.

    Raises:
        NothingToAddError: these dims have a block, or no kernel that the matrix allows anywhere can run them.
        ProposalError: the name is taken, or no name.
    """
    if block := matrix.block_for(dims):
        raise NothingToAddError(f"{dims} is there already: block {block.name} ({block.source})")
    if not NAME.match(name):
        raise ProposalError(f"{name!r} is no name for a block: lower case letters, digits and _, such as my_model_2")
    if taken := matrix.blocks.get(name):
        raise ProposalError(f"block {name} ({taken.source}) has other dims, {taken.dims}; choose another name")
    precedents = _precedents(matrix)
    cells = {arch: matrix.cells(arch, dims) for arch in matrix.architectures}
    answers = [_answer(matrix, cell, arch, dims, precedents) for arch in cells for cell in cells[arch]]
    order = list(matrix.kernels)
    answers.sort(key=lambda a: order.index(a.kernel))
    kept = {(a.kernel, a.arch) for a in answers if a.proposed}
    proposed = {arch: [cell for cell in cells[arch] if (cell.kernel.name, arch) in kept] for arch in cells}
    if not kept:
        raise NothingToAddError(f"no kernel that the matrix allows anywhere can run {dims}")
    on_request = (arch for arch, own in proposed.items() if own and all(cell.on_request for cell in own))
    return Proposal(name, dims, tuple(answers), tuple(_rows(matrix, proposed, precedents)), tuple(on_request))


# ---- the answer to one cell -----------------------------------------------------------------------------------------

#: (kernel, arch) -> the vendors of the architectures in the first row that allows it.
Precedents = Mapping[tuple[str, str], frozenset[str]]


def _precedents(matrix: Matrix) -> Precedents:
    found: dict[tuple[str, str], frozenset[str]] = {}
    for block in matrix.blocks.values():
        for row in block.rows:
            vendors = frozenset(matrix.architectures[arch].vendor for arch in row.arch)
            for arch in row.arch:
                for cell in matrix.cells(arch, block.dims):
                    if cell.row is row and cell.fit:
                        found.setdefault((cell.kernel.name, arch), vendors)
    return found


def _answer(matrix: Matrix, cell: Cell, arch: str, dims: MLADimensions, precedents: Precedents) -> Answer:
    name, proof = cell.kernel.name, cell.candidate.proof
    if cell.limit is None:
        return Answer(name, arch, IMPOSSIBLE, _NO_LIMITS, (), "")
    if cell.fit is None:
        return Answer(name, arch, IMPOSSIBLE, f"it takes {cell.limit}", (), proof)
    if not cell.offers:
        return Answer(name, arch, IMPOSSIBLE, "no package ships it for this architecture", (), proof)
    requires = cell.candidate.requires
    if why := _against(matrix, cell, arch, dims, precedents):
        return Answer(name, arch, HELD_BACK, why, requires, proof)
    if cell.fit.pad_v_to:
        return Answer(name, arch, PADDED, f"V to {cell.fit.pad_v_to}", requires, proof)
    return Answer(name, arch, NATIVE, "", requires, proof)


def _against(matrix: Matrix, cell: Cell, arch: str, dims: MLADimensions, precedents: Precedents) -> str | None:
    """Why a cell that can run is not proposed."""
    if cell.candidate.proof == "contradicted":
        return "a record shows it failing"
    for entry in matrix.not_allowed:
        # A kernel sees (qk, v) only: what speaks against it for one block does so for all of the same widths.
        pairs = {_pair(matrix.blocks[block].dims) for block in entry.dims}
        concerned = not pairs or _pair(dims) in pairs
        if arch in entry.arch and cell.kernel.name in entry.kernels and concerned:
            return f"{entry.reason} ({entry.source})"
    return None if (cell.kernel.name, arch) in precedents else "no block allows it there"


def _pair(dims: MLADimensions) -> tuple[int, int]:
    return dims.qk_head_dim, dims.v_head_dim


# ---- rows -----------------------------------------------------------------------------------------------------------


def _rows(matrix: Matrix, proposed: Mapping[str, Sequence[Cell]], precedents: Precedents) -> list[Row]:
    """Architectures of equal answers in one row, rows in the order that `check` asks for."""
    groups: dict[tuple[str, tuple[str, ...], frozenset[str]], list[str]] = {}
    for arch, cells in proposed.items():
        for backend in matrix.backends:
            if kernels := tuple(cell.kernel.name for cell in cells if cell.kernel.backend == backend):
                groups.setdefault((backend, kernels, precedents[kernels[0], arch]), []).append(arch)
    kernel_ranks, arch_ranks = ranks(matrix.kernels), ranks(matrix.architectures)
    rows = [(kernels, _row(matrix, backend, kernels, arches)) for (backend, kernels, _), arches in groups.items()]
    rows.sort(key=lambda row: place(row[0], _fa_versions(matrix, row[0]), row[1]["arch"], kernel_ranks, arch_ranks))
    return [row for _, row in rows]


def _fa_versions(matrix: Matrix, kernels: Sequence[str]) -> list[int]:
    return sorted({fa for name in kernels if (fa := matrix.kernels[name].fa_version) is not None})


def _row(matrix: Matrix, backend: str, kernels: Sequence[str], arches: list[str]) -> Row:
    fa_versions = _fa_versions(matrix, kernels)
    row: dict[str, Any] = {"arch": arches}
    if fa_versions:
        row["fa_version"] = fa_versions if len(fa_versions) > 1 else fa_versions[0]
    row["backends"] = [backend]
    named = {k.name for k in matrix.kernels.values() if k.backend == backend and k.fa_version in (None, *fa_versions)}
    return row if named == set(kernels) else {**row, "kernels": list(kernels)}


def _row_lines(row: Row) -> list[str]:
    """One line in flow style where it fits below ``matrix:``, else one line a field."""
    fields = [f"{key}: {_flow(value)}" for key, value in row.items()]
    line = "- {" + ", ".join(fields) + "}"
    if len(line) + 6 <= WIDTH:
        return [line]
    return [f"{'  ' if i else '- '}{field}" for i, field in enumerate(fields)]


def _flow(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def source_kind(ref: str) -> str:
    """``issue`` for a reference such as vllm-project/vllm#48855, else ``config``."""
    return "issue" if re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", ref) else "config"


# ---- into the file --------------------------------------------------------------------------------------------------


def added(sources: Sources, target: SourceFile, lines: Sequence[str]) -> SourceFile:
    """The target with the block, checked together with all the other files. Nothing is written.

    Args:
        target: the matrix file or the overlay in ``sources``, or an overlay that is to become one.

    Raises:
        ProposalError: the file is not laid out so that a block can be put below ``matrix:``.
        MatrixError: the result would not pass its checks.
    """
    new = SourceFile(target.label, inserted(target, lines))
    files = {kind: new if source is target else source for kind, source in sources.files.items()}
    overlays = [(kind, new if source is target else source) for kind, source in sources.overlays]
    if new not in (*files.values(), *(source for _, source in overlays)):
        overlays.append(("matrix", new))
    if findings := checks.check(replace(sources, files=files, overlays=overlays), notices=False):
        if any(finding.code.startswith("Y") for finding in findings):
            raise ProposalError(f"{target.label}: its layout leaves no place for a block; put it there by hand")
        raise MatrixError(findings)
    return new


def inserted(source: SourceFile, lines: Sequence[str]) -> bytes:
    """The file with the block after its last one. Every byte that was there stays, in its order.

    Only the layout is looked at: top-level keys start a line, blocks are indented below ``matrix:``.
    """
    old = source.raw.splitlines(keepends=True)
    tops = [i for i, line in enumerate(old) if line.strip() and line[:1] not in (b" ", b"\t", b"#")]
    start = next((i for i in tops if re.match(rb"(\xef\xbb\xbf)?[\"']?matrix[\"']?\s*:\s*(#.*)?$", old[i])), None)
    if start is None:
        raise ProposalError(f"{source.label}: no line 'matrix:' with blocks below it; put the block there by hand")
    end = next((i for i in tops if i > start), len(old))
    below = [i for i in range(start + 1, end) if old[i].strip() and old[i][:1] != b"#"]
    blocks = [old[i] for i in below if not old[i].lstrip().startswith(b"#")]
    indent = blocks[0][: len(blocks[0]) - len(blocks[0].lstrip())] if blocks else b"  "
    newline = b"\r\n" if old[start].endswith(b"\r\n") else b"\n"
    last = below[-1] if below else start
    gap = [b""] if below else []
    block = [indent + line.encode() for line in lines]
    head, tail = b"".join(old[: last + 1]), b"".join(old[last + 1 :])
    if not head.endswith((b"\n", b"\r")):
        head += newline
    return head + newline.join([*gap, *block, b""]) + tail
