"""Generated pages say what the matrix says (C57), and every documented cell is what the selector answers (C58)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mla_prefill import Environment, MLADimensions, Request
from mla_prefill.capabilities import Matrix, pages
from mla_prefill.capabilities.findings import ADVICE, CODES
from mla_prefill.cli import main
from mla_prefill.selector.engine import decide
from mla_prefill.selector.reasons import CURES, MEANINGS, REASONS

#: The pages of this checkout; what is installed has none.
DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def wanted(matrix: Matrix) -> list[pages.Section]:
    return pages.sections(matrix, [(code, MEANINGS[code], CURES[code]) for code in REASONS])


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DOCS, tmp_path / "docs"))


# ---- current --------------------------------------------------------------------------------------------------------


def test_the_pages_are_current(wanted: list[pages.Section]) -> None:
    assert [str(f) for f in pages.stale(wanted, DOCS)] == []


def test_every_code_says_what_to_do() -> None:
    assert list(ADVICE) == list(CODES)
    assert list(CURES) == list(MEANINGS) == list(REASONS)
    codes = (DOCS / "codes.md").read_text(encoding="utf-8")
    anchors = re.findall(r'^\| <a id="(.*?)"></a>(\S+) \|', codes, re.MULTILINE)
    assert anchors == [(code.lower(), code) for code in (*CODES, *REASONS)]


def test_a_changed_page_is_found_and_written_again(wanted: list[pages.Section], docs: Path) -> None:
    page = docs / "support" / "models.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("`fa4` (", "`fa5` (", 1).replace("# Models", "# Our models"), encoding="utf-8")
    [finding] = pages.stale(wanted, docs)
    assert (finding.code, finding.path, finding.fixable) == ("X383", "docs/support/models.md", True)
    assert "`fa5`" in page.read_text(encoding="utf-8").splitlines()[finding.line - 1]
    assert list(pages.rewrite(wanted, docs)) == [str(page)]
    assert page.read_text(encoding="utf-8") == text.replace("# Models", "# Our models")  # prose is the author's
    assert list(pages.stale(wanted, docs)) == list(pages.rewrite(wanted, docs)) == []


def test_a_page_that_is_missing_is_written(wanted: list[pages.Section], docs: Path) -> None:
    shutil.rmtree(docs / "support")
    assert {f.path for f in pages.stale(wanted, docs)} == {
        f"docs/support/{p}.md" for p in ("architectures", "backends", "models")
    }
    assert len(list(pages.rewrite(wanted, docs))) == 3
    assert list(pages.stale(wanted, docs)) == []


def test_a_page_without_markers_is_left_to_its_author(wanted: list[pages.Section], docs: Path) -> None:
    page = docs / "codes.md"
    page.write_text("# Codes\n", encoding="utf-8")
    assert [(f.code, f.fixable) for f in pages.stale(wanted, docs)] == [("X383", False)] * 2
    assert list(pages.rewrite(wanted, docs)) == []


def test_check_reports_stale_pages_and_mends_them(
    docs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages.stale, "__defaults__", (docs,))
    monkeypatch.setattr(pages.rewrite, "__defaults__", (docs,))
    (docs / "support" / "backends.md").unlink()
    assert main(["check"]) == 1
    assert "docs/support/backends.md:1:1: X383" in capsys.readouterr().out
    assert main(["check", "--fix"]) == 0
    assert (docs / "support" / "backends.md").is_file()


def test_where_there_is_no_checkout_there_are_no_pages(wanted: list[pages.Section], tmp_path: Path) -> None:
    assert list(pages.stale(wanted, tmp_path / "docs")) == list(pages.rewrite(wanted, tmp_path / "docs")) == []


# ---- there and back -------------------------------------------------------------------------------------------------

CELL = re.compile(r"`(\w+)` \((?:V to (\d+), )?(on request, )?(\w+)\)")
Documented = tuple[str, MLADimensions, list[tuple[str, int | None, bool, str]]]


def documented(page: str, matrix: Matrix) -> Iterator[Documented]:
    """(arch, dims, [(kernel, V padded to, on request, proof)]) of every cell of a page of support/."""
    heading = ""
    for line in (DOCS / "support" / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| ---", "| dims", "| arch")):
            *names, text = line.strip("| ").split(" | ")
            cells = [(k, int(pad) if pad else None, bool(ask), proof) for k, pad, ask, proof in CELL.findall(text)]
            assert cells or text == "none", line
            for name in names[0].split(", ") if page == "models" else [heading]:
                block = heading if page == "models" else names[1]
                yield name, matrix.blocks[block].dims, cells


@pytest.mark.parametrize("page", ["architectures", "models"])
def test_every_documented_cell_is_what_the_selector_answers(page: str, matrix: Matrix) -> None:
    seen = set()
    for arch, dims, cells in documented(page, matrix):
        seen.add((arch, dims))
        answers = {}
        for kernel in matrix.kernels.values():  # each one asked for, in a dtype of its own
            dtype = next(c for c in matrix.cells(arch, dims) if c.kernel is kernel).candidate.dtypes[0]
            chosen = decide(Request(dims, dtype, backend=kernel.name), Environment(arch), matrix).chosen
            if chosen is not None:
                answers[chosen.kernel] = chosen.pad_v_to
        assert {kernel: pad for kernel, pad, _, _ in cells} == answers, (arch, dims)
        assert all(proof == matrix.proof(kernel, arch, dims) for kernel, _, _, proof in cells)
        dtype = "float16" if arch in ("sm70", "sm75") else "bfloat16"
        verdicts = decide(Request(dims, dtype), Environment(arch), matrix).verdicts
        unasked = [kernel for kernel, _, on_request, _ in cells if not on_request]
        assert [v.candidate.kernel for v in verdicts if v.verdict != "rejected"] == unasked  # and in this order (C57)
    assert seen == {(arch, block.dims) for arch in matrix.architectures for block in matrix.blocks.values()}


def test_the_page_of_backends_has_the_same_cells(matrix: Matrix) -> None:
    kernel, header = "", list[str]()
    seen: dict[tuple[str, str, str], str] = {}
    for line in (DOCS / "support" / "backends.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            kernel = line.removeprefix("### ")
        elif line.startswith("| arch"):
            header = [name.split()[0] for name in line.strip("| ").split(" | ")[1:]]
        elif line.startswith("| ") and not line.startswith("| ---"):
            arches, *answers = line.strip("| ").split(" | ")
            for arch in arches.split(", "):
                seen.update({(kernel, arch, block): text for block, text in zip(header, answers, strict=True)})
    for (name, arch, block), text in seen.items():
        cell = next(c for c in matrix.cells(arch, matrix.blocks[block].dims) if c.kernel.name == name)
        assert (text not in ("cannot", "not allowed")) is cell.allowed
        assert (text == "not allowed") is bool(cell.offers and cell.row is None)
        if cell.allowed:
            assert f"V to {cell.candidate.pad_v_to}" in text or cell.candidate.pad_v_to is None
    assert len(seen) == sum(len(k.arch) for k in matrix.kernels.values()) * len(matrix.blocks)


def test_every_known_defect_is_documented_with_its_reason_and_source(matrix: Matrix) -> None:
    text = (DOCS / "support" / "backends.md").read_text(encoding="utf-8")
    for kernel in matrix.kernels.values():
        for bad in kernel.known_bad:
            assert f"`{kernel.name}` of {bad.distribution}{bad.version} on {', '.join(bad.arch)}" in text
            assert f": {bad.reason} ({', '.join(bad.refs)})" in text
