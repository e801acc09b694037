"""Drift: the data against rules that stand in installed packages. Real packages where they are installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from mla_prefill import Matrix
from mla_prefill.backends import drift
from mla_prefill.backends.drift import RULES, Answer, Cell, Rule, as_dict, as_text
from mla_prefill.cli import main

FA4, FA4_VLLM, FI_FA3, FI_CUTLASS, FI_CUDNN = RULES
#: In the form of flash-attn-4 4.0.0b36, with what each test changes left open.
VALIDATOR = '''
import torch_is_not_needed

def _validate_head_dims(head_dim: int, head_dim_v: int, compute_capability: int, alignment: int) -> None:
    """Validate head dimension constraints based on compute capability."""
    if compute_capability == 9:
        assert 8 <= head_dim <= {max_sm90} and 8 <= head_dim_v <= 256 and head_dim % alignment == 0 == head_dim_v % alignment
    elif compute_capability in [10, 11]:
        standard = 8 <= head_dim <= 128 and 8 <= head_dim_v <= 128
        assert (standard or (head_dim, head_dim_v) in {pairs}) and head_dim % alignment == 0 == head_dim_v % alignment
'''
AS_SHEET = {"max_sm90": 256, "pairs": [(192, 128), (256, 256)]}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, rule: Rule, number: str, text: str) -> None:
    """One file of a package, and the metadata by which it is found."""
    info = site / f"{rule.distribution.replace('-', '_')}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {rule.distribution}\nVersion: {number}\n")
    file = site / rule.file
    file.parent.mkdir(parents=True)
    file.write_text(text)


def ask(rule: Rule, matrix: Matrix) -> Answer:
    return drift._ask(rule, matrix)


def told(answer: Answer) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(cell.verdict, cell.arch, cell.dims) for cell in answer.differences}


def test_a_validator_as_the_sheet_has_it_agrees_in_every_cell(site: Path, matrix: Matrix) -> None:
    install(site, FA4, "4.0.0b36", VALIDATOR.format(**AS_SHEET))
    answer = ask(FA4, matrix)
    assert answer.why_not is None
    assert told(answer) == set()
    assert answer.beyond == ()
    assert {cell.arch for cell in answer.cells} == {"sm90", "sm100", "sm103", "sm107", "sm110"}  # 8.x and 12.x: no rule
    assert answer.source == "flash-attn-4 4.0.0b36: flash_attn/cute/interface.py:_validate_head_dims"


def test_a_narrower_package_shows_with_our_row(site: Path, matrix: Matrix) -> None:
    install(site, FA4, "4.0.0b36", VALIDATOR.format(**{**AS_SHEET, "pairs": [(192, 128)]}))
    answer = ask(FA4, matrix)
    assert told(answer) == {("wider", arch, (256, 256)) for arch in ("sm100", "sm103", "sm107", "sm110")}
    assert answer.differences[0].row.startswith("capabilities/data/kernels.yaml:")
    text = as_text([answer])
    assert "wider     fa4 (256, 256) on sm100, sm103, sm107: we allow it, it does not" in text


def test_a_wider_package_shows_for_models_and_beyond_them(site: Path, matrix: Matrix) -> None:
    install(site, FA4, "4.0.0b36", VALIDATOR.format(max_sm90=320, pairs=[(192, 128), (256, 256), (192, 192)]))
    answer = ask(FA4, matrix)
    assert {(verdict, dims) for verdict, _, dims in told(answer)} == {("narrower", (192, 192))}
    assert {cell.arch for cell in answer.beyond} == {"sm90"}
    assert {cell.dims[0] for cell in answer.beyond} == set(range(264, 321, 8))
    assert "beyond the matrix, narrower: fa4 on sm90 in 256 pairs: (264, 8), " in as_text([answer])


def test_the_version_at_hand_counts(site: Path, matrix: Matrix) -> None:
    """Before b11 (256, 256) was refused, and the sheet's row has that bound."""
    install(site, FA4, "4.0.0b10", VALIDATOR.format(**{**AS_SHEET, "pairs": [(192, 128)]}))
    assert {d for d in told(ask(FA4, matrix)) if d[1] in ("sm100", "sm103", "sm107")} == set()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "this version has no _validate_head_dims"),
        ("def _validate_head_dims(d, dv, cc): pass", "_validate_head_dims of this version has other parameters"),
        ("def _validate_head_dims(", "was never closed"),
        ("def _validate_head_dims(head_dim, head_dim_v, compute_capability, alignment): assert LIMIT", "LIMIT"),
    ],
)
def test_what_cannot_be_asked_says_why(site: Path, matrix: Matrix, text: str, why: str) -> None:
    install(site, FA4, "4.0.0b36", text)
    answer = ask(FA4, matrix)
    assert why in str(answer.why_not)
    assert f"cannot be asked: {answer.why_not}" in as_text([answer])


def test_a_package_without_the_file(site: Path, matrix: Matrix) -> None:
    install(site, FI_FA3._replace(file="flashinfer/other.py"), "0.7.4", "")
    assert ask(FI_FA3, matrix).why_not == "this version has no such file"


def test_flashinfers_lists(site: Path, matrix: Matrix) -> None:
    """The three forms in which FlashInfer 0.7.4 states pairs: a function, a C++ macro, a constant."""
    fa3 = "def is_fa3_prefill_head_dim_supported(head_dim_qk: int, head_dim_vo: int) -> bool:\n    return (head_dim_qk, head_dim_vo) in [(64, 64), (128, 128), (256, 256), (192, 128)]\n"
    takes = FI_FA3.read(fa3, FI_FA3.symbol)
    assert [takes(9, *pair) for pair in ((192, 128), (192, 192))] == [True, False]
    macro = "#define DISPATCH_head_dim(head_dim_qk, head_dim_vo, A, B, ...) \\\n if (head_dim_qk == 192 && head_dim_vo == 128) {} \\\n#define OTHER\nhead_dim_qk == 1 && head_dim_vo == 1"
    takes = FI_CUTLASS.read(macro, FI_CUTLASS.symbol)
    assert [takes(10, *pair) for pair in ((192, 128), (1, 1))] == [True, False]
    install(site, FI_CUDNN, "0.7.4", "_CUDNN_RAGGED_AUTO_HEAD_DIMS = frozenset({(128, 128), (192, 128), (256, 256)})\n")
    assert told(ask(FI_CUDNN, matrix)) == {("narrower", arch, (256, 256)) for arch in ("sm100", "sm103")}
    with pytest.raises(drift.CannotAsk, match="lists no pairs"):
        FI_CUTLASS.read("// moved elsewhere", FI_CUTLASS.symbol)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.distribution}-{rule.kernel}")
def test_the_installed_package(rule: Rule, matrix: Matrix) -> None:
    """The real thing: no cell of a model is wider than the package; what is narrower is known."""
    try:
        version(rule.distribution)
    except PackageNotFoundError:
        pytest.skip(f"{rule.distribution} is not installed")
    answer = ask(rule, matrix)
    assert answer.why_not is None
    assert [cell for cell in answer.differences if cell.verdict == "wider"] == []


def test_vllm(matrix: Matrix) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    answer = drift._ask_vllm(matrix)
    assert answer.why_not is None
    agreed = {(c.subject, c.arch, c.dims) for c in answer.cells if c.verdict == "agrees" and c.ours}
    for dims in ((128, 64, 128), (192, 64, 256), (64, 64, 128)):
        assert ("FLASH_ATTN", "sm90", dims) in agreed
        assert ("order", "sm100", dims) in agreed
    assert {c.verdict for c in answer.differences} == {"wider"}


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        Cell("fa4", "sm90", (128, 128), True, True, "a.yaml:1"),
        Cell("fa4", "sm90", (192, 192), False, True, "a.yaml:1"),
    )
    order = Cell("order", "sm100", (128, 64, 128), "FLASH_ATTN CUDNN", "CUDNN FLASH_ATTN", "p.yaml:9")
    answers = [
        Answer("a", None, cells[:1]),
        Answer("b", "not installed"),
        Answer("c", None, (*cells, order), (), ("X: no",)),
    ]
    monkeypatch.setattr(drift, "drift", lambda *_: answers)
    assert main(["drift"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a",
        "  agrees in 1 of 1 cells",
        "",
        "b",
        "  cannot be asked: not installed",
        "",
        "c",
        "  agrees in 1 of 3 cells",
        "  cannot be asked for X: no",
        "  narrower  fa4 (192, 192) on sm90: it allows it, we do not  [a.yaml:1]",
        "  order     order (128, 64, 128) on sm100: another order: CUDNN FLASH_ATTN, ours FLASH_ATTN CUDNN  [p.yaml:9]",
        "",
        "2 of 3 sources compared; cells that differ: 2",
    ]
    assert main(["drift", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out) == as_dict(answers)
    answers.pop()
    capsys.readouterr()
    assert main(["drift"]) == 0
    assert capsys.readouterr().out.endswith("\n\n1 of 2 sources compared; cells that differ: none\n")
    answers.pop(0)
    assert main(["drift"]) == 0  # nothing that was asked differs
    last = "nothing was compared: it takes one of flash-attn-4, vllm, flashinfer-python"
    assert capsys.readouterr().out.splitlines()[-1] == last
