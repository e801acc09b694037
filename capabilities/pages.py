"""The generated parts of docs/: support tables by architecture, by model and by backend, and the codes.

A page is prose with generated sections between markers::

    <!-- begin generated: sm90 -->
    <!-- end generated: sm90 -->

What stands around the markers is nobody's but the author's. Everything between them comes from the compiled matrix and
the catalogues of codes: `check` reports a section that says something else, and ``check --fix`` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from mla_prefill.capabilities.findings import ADVICE, CODES, Finding
from mla_prefill.capabilities.fixes import write
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.capabilities.matrix import Cell, Matrix
from mla_prefill.capabilities.model import Architecture, Block, Kernel, KnownBad
from mla_prefill.capabilities.tables import markdown

#: Beside the data in a checkout; an installed package has no pages.
DOCS = DATA_DIR.parents[1] / "docs"
BEGIN, END = "<!-- begin generated: {} -->", "<!-- end generated: {} -->"
_KERNELS = "kernels, best first"


class Section(NamedTuple):
    """One generated part of a page (``support/models.md``); its name stands in the markers."""

    page: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{BEGIN.format(self.name)}\n{self.text}\n{END.format(self.name)}"


def sections(matrix: Matrix, reasons: Iterable[Sequence[str]]) -> list[Section]:
    """Every generated section. ``reasons``: (code, what it means, what to do) of each reason of a decision."""
    findings = [(_anchored(code), title, ADVICE[code]) for code, title in CODES.items()]
    decisions = [(_anchored(code), *rest) for code, *rest in reasons]
    parts = {
        "support/architectures.md": [_architecture(matrix, a) for a in matrix.architectures.values()],
        "support/models.md": [_block(matrix, b) for b in matrix.blocks.values()],
        "support/backends.md": [_backend(matrix, name) for name in matrix.backends],
    }
    return [
        Section("codes.md", "findings", markdown(findings, ("code", "title", "what to do"))),
        Section("codes.md", "reasons", markdown(decisions, ("code", "means", "what to do"))),
        *(Section(page, "tables", "\n\n".join(texts)) for page, texts in parts.items()),
    ]


def stale(wanted: Iterable[Section], folder: Path = DOCS) -> Iterator[Finding]:
    """A finding for each section that says something else than it should; none where there is no such folder."""
    hint = "run: mla-prefill check --fix"
    for section in wanted if folder.is_dir() else ():
        page = folder / section.page
        label = f"docs/{section.page}"
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        if (match := _find(section, text)) is None:
            how = hint if not text else f"add the lines {BEGIN.format(section.name)} and {END.format(section.name)}"
            message = f"there is no generated section {section.name}"
            yield Finding(label, 1, 1, "X383", message, how, fixable=not text)
        elif match.group() != str(section):
            line = text.count("\n", 0, match.start()) + 1 + _first_difference(match.group(), str(section))
            yield Finding(
                label, line, 1, "X383", f"section {section.name} is out of date from here on", hint, fixable=True
            )


def rewrite(wanted: Iterable[Section], folder: Path = DOCS) -> Iterator[str]:
    """Writes the sections into their pages, and the pages that do not exist yet; names each file that changed."""
    for name, group in groupby(wanted, key=lambda section: section.page) if folder.is_dir() else ():
        page = folder / name
        old = page.read_text(encoding="utf-8") if page.is_file() else ""
        parts = list(group)
        new = old or "\n\n".join([f"# {page.stem.capitalize()}", *map(str, parts)]) + "\n"
        for section in parts:
            if match := _find(section, new):
                new = new[: match.start()] + str(section) + new[match.end() :]
        if new != old:
            page.parent.mkdir(exist_ok=True)
            write(page, new.encode())
            yield str(page)


def _find(section: Section, text: str) -> re.Match[str] | None:
    begin, end = (re.escape(marker.format(section.name)) for marker in (BEGIN, END))
    return re.search(f"{begin}\n.*?{end}", text, re.DOTALL)


def _first_difference(one: str, other: str) -> int:
    pairs = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)


# ---- support tables -------------------------------------------------------------------------------------------------


def cell_text(cell: Cell) -> str:
    """`` `fa2` (V to 192, run)``: kernel, V padding, whether only on request, and how far it is proven."""
    candidate = cell.candidate
    about = [f"V to {candidate.pad_v_to}"] if candidate.pad_v_to else []
    about += ["on request"] if cell.on_request is not None else []
    return f"`{candidate.kernel}` ({', '.join([*about, candidate.proof])})"


def _allowed(matrix: Matrix, arch: str, block: Block) -> list[Cell]:
    return [cell for cell in matrix.cells(arch, block.dims) if cell.allowed]


def _cells(matrix: Matrix, arch: str, block: Block) -> str:
    return ", ".join(map(cell_text, _allowed(matrix, arch, block))) or "none"


def _architecture(matrix: Matrix, arch: Architecture) -> str:
    blocks = matrix.blocks.values()
    rows = [(str(b.dims), b.name, _cells(matrix, arch.id, b)) for b in blocks]
    about = [arch.name, f"compute capability {arch.capability}" if arch.capability else "", ", ".join(arch.products)]
    bad: dict[tuple[str, KnownBad], None] = {}
    for block in blocks:
        for cell in _allowed(matrix, arch.id, block):
            bad.update(
                dict.fromkeys((cell.kernel.name, e) for e in cell.kernel.known_bad if e.concerns(arch.id, block.dims))
            )
    lines = [f"## {arch.id}", "; ".join(filter(None, about)) + ".", markdown(rows, ("dims", "block", _KERNELS))]
    return "\n\n".join([*lines, *_known_bad(bad)])


def _block(matrix: Matrix, block: Block) -> str:
    families = [name for name, raw in matrix.families.items() if raw.get("dims") == list(block.dims)]
    by_cells: dict[str, list[str]] = {}
    for arch in matrix.architectures:
        by_cells.setdefault(_cells(matrix, arch, block), []).append(arch)
    rows = [(", ".join(arches), cells) for cells, arches in by_cells.items()]
    dims = f"{block.dims}: qk {block.dims.qk_head_dim}, v {block.dims.v_head_dim}."
    about = f"{dims} Families: {', '.join(families) or 'none'}."
    return "\n\n".join([f"## {block.name}", about, markdown(rows, ("arch", _KERNELS)), *_not_allowed(matrix, block)])


def _not_allowed(matrix: Matrix, block: Block) -> Iterator[str]:
    why: dict[tuple[str, str], list[str]] = {}
    for arch in matrix.architectures:
        for cell in matrix.cells(arch, block.dims):
            if cell.not_allowed:
                why.setdefault((cell.kernel.name, cell.not_allowed.reason), []).append(arch)
    if why:
        lines = [f"- `{kernel}` on {', '.join(arches)}: {reason}" for (kernel, reason), arches in why.items()]
        yield "Not allowed, though the kernel sheet holds it possible:"
        yield "\n".join(lines)


def _backend(matrix: Matrix, backend: str) -> str:
    kernels = [kernel for kernel in matrix.kernels.values() if kernel.backend == backend]
    parts = [f"## {backend}", *(part for kernel in kernels for part in _kernel(matrix, kernel))]
    return "\n\n".join(parts)


def _kernel(matrix: Matrix, kernel: Kernel) -> Iterator[str]:
    providers = " or ".join(f"{p.distribution}{p.version}" for p in kernel.providers)
    version = f"FlashAttention {kernel.fa_version}. " if kernel.fa_version else ""
    dtypes, provides = ", ".join(kernel.dtypes), ", ".join(sorted(kernel.provides))
    yield f"### {kernel.name}"
    call = "".join(f" Always called with `{name}={value}`." for name, value in kernel.call)
    yield f"{version}From {providers}. Computes in {dtypes}; provides {provides}.{call}"
    by_answers: dict[tuple[str, ...], list[str]] = {}
    for arch in kernel.arch:
        answers = tuple(_answer(matrix, kernel, arch, block) for block in matrix.blocks.values())
        by_answers.setdefault(answers, []).append(arch)
    header = ("arch", *(f"{b.name} {b.dims}" for b in matrix.blocks.values()))
    yield markdown([(", ".join(arches), *answers) for answers, arches in by_answers.items()], header)
    yield from _known_bad((kernel.name, entry) for entry in kernel.known_bad)


def _answer(matrix: Matrix, kernel: Kernel, arch: str, block: Block) -> str:
    cell = next(c for c in matrix.cells(arch, block.dims) if c.kernel is kernel)
    if cell.allowed:
        return cell_text(cell).partition("(")[2].removesuffix(")")
    return "cannot" if cell.fit is None or not cell.offers else "not allowed"


def _known_bad(entries: Iterable[tuple[str, KnownBad]]) -> Iterator[str]:
    """What is accepted and goes wrong: kernel, versions, when, why, and where that was read."""
    lines = []
    for kernel, bad in entries:
        where = f" on {', '.join(bad.arch)}"
        where += f" for {'; '.join(map(str, bad.widths))}" if bad.widths else ""
        when = f", with {', '.join((*bad.dtypes, *bad.needs))}" if bad.dtypes or bad.needs else ""
        package = f"{bad.distribution}{bad.version}"
        lines.append(f"- `{kernel}` of {package}{where}{when}: {bad.reason} ({', '.join(bad.refs)})")
    if lines:
        yield "Known bad:"
        yield "\n".join(lines)


def _anchored(code: str) -> str:
    """A code that links can lead to: codes.md#x320."""
    return f'<a id="{code.lower()}"></a>{code}'
