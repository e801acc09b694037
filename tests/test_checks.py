"""Every rule fails when it should (C68), at the place that is wrong, and the shipped data passes all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mla_prefill.capabilities import MatrixError, checks, fixes, load, load_matrix
from mla_prefill.capabilities.findings import CODES, Finding
from mla_prefill.capabilities.report import FORMATS

Edit = Callable[[str, str, str], Path]
FA_ROW = "- {arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}"
FA2_ROW = "- {arch: [sm80, sm86, sm87, sm89], fa_version: 2, backends: [FLASH_ATTN]}"

# code, file, old, new, what the finding says
CASES = [
    ("X301", "matrix.yaml", "{arch: [sm90]", "{arch: [sm9]", "unknown architecture 'sm9'"),
    ("X301", "priorities.yaml", "- arch: [sm90]", "- arch: [sm9]", "did you mean sm90?"),
    ("X302", "priorities.yaml", "order: [fa4, fa3", "order: [fa5, fa3", "unknown kernel 'fa5'"),
    ("X302", "matrix.yaml", "kernels: [flashinfer_fa2]", "kernels: [flashinfer_fa_2]", "did you mean flashinfer_fa2?"),
    ("X303", "matrix.yaml", "backends: [TRTLLM_RAGGED]", "backends: [TRTLLM_RAGED]", "did you mean TRTLLM_RAGGED?"),
    ("X304", "matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3, 5]"), "version 5"),
    ("X305", "priorities.yaml", "dims: [glm_4_7_flash]", "dims: [glm_4_7_flsh]", "did you mean glm_4_7_flash?"),
    ("X306", "kernels.yaml", "provides: [lse, ", "provides: [lze, ", "did you mean lse?"),
    ("X307", "kernels.yaml", "dtypes: [bfloat16, float16]", "dtypes: [bfloat16, flot16]", "did you mean float16?"),
    ("X308", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-atn-4>=4.0.0b11", "did you mean flash-attn-4?"),
    ("X310", "matrix.yaml", FA_ROW, f"{FA_ROW}\n      {FA_ROW}", "fa2 on sm90 for (128, 64, 128) is already allowed"),
    ("X311", "matrix.yaml", FA_ROW, FA_ROW.replace("fa_version: [2, 3, 4], ", ""), "for which FlashAttention version"),
    ("X311", "matrix.yaml", "backends: [TRTLLM_RAGGED]", "fa_version: 4, backends: [TRTLLM_RAGGED]", "never applies"),
    ("X311", "matrix.yaml", FA2_ROW, FA2_ROW.replace("}", ", kernels: [fa3]}"), "no kernel of FLASH_ATTN is left"),
    ("X312", "matrix.yaml", "qk_nope: 64, qk_rope: 64, v_head: 128", "qk_nope: 128, qk_rope: 64, v_head: 128", "deepseek_v3"),
    ("X312", "matrix.yaml", "qk_nope: 64, qk_rope: 64", "qk_nope: 0, qk_rope: 0", "a head cannot be 0 wide"),
    ("X313", "architectures.yaml", "products: [H100", "products: [B200, H100", "already belongs to"),
    ("X314", "kernels.yaml", "- arch: [sm90]\n", "- arch: [sm90, sm80]\n", "already has limits for sm80"),
    ("X320", "matrix.yaml", FA2_ROW, FA2_ROW.replace("fa_version: 2", "fa_version: [2, 3, 4]").replace("sm80, ", "sm100, sm80, "), "FLASH_ATTN/fa3 cannot run"),
    ("X330", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-attn-4>=4.0.0b11,<4.0.0b11", "holds no version"),
    ("X330", "kernels.yaml", 'verified: ">=2.6.0,<2.8.4"', 'verified: ">=2.8,<2.7"', "holds no version"),
    ("X330", "matrix.yaml", FA_ROW, FA_ROW.replace("}", ', requires: ["flash-attn-4<4.0.0b1"]}'), "exclude each other"),
    ("X331", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-attn-4>=4", "write >=4b0"),
    ("X332", "kernels.yaml", 'version: ">=2.6.0"', 'version: ">=2.6..0"', "not a version range"),
    ("X340", "priorities.yaml", "order: [fa4, fa3, fa2, flashinfer_fa3", "order: [fa4, fa3, flashinfer_fa3", "fa2 runs on sm90 but is not in its order"),
    ("X341", "priorities.yaml", "order: [fa4, fa3, fa2", "order: [fa4, aiter, fa3, fa2", "aiter runs on none of"),
    ("X341", "priorities.yaml", "order: [fa4, fa3, fa2, flashinfer_fa3, flashinfer_fa2", "order: [torch_math, fa4, fa3, fa2, flashinfer_fa3, flashinfer_fa2", "two places"),
    ("X342", "priorities.yaml", "- arch: [sm90]", "- arch: [sm90, sm110]", "sm110 has a second order"),
    ("X350", "models.yaml", "dims: [64, 64, 128]", "dims: [64, 64, 136]", "no block of the matrix has"),
    ("X381", "matrix.yaml", "# yaml-language-server", "# yaml-server", "no editor modeline"),
]  # fmt: skip


def findings_of(folder: Path) -> list[Finding]:
    return checks.check_path(folder)


@pytest.mark.parametrize(("code", "name", "old", "new", "says"), CASES)
def test_each_rule_fails_when_it_should(edited: Edit, code: str, name: str, old: str, new: str, says: str) -> None:
    """C67, C68: one change, the expected code, in the changed file, on a changed line."""
    folder = edited(name, old, new)
    found = [f for f in findings_of(folder) if f.code == code]
    assert any(says in f"{f.message} {f.hint}" for f in found), [str(f) for f in findings_of(folder)][:5]
    text = (load.DATA_DIR / name).read_text(encoding="utf-8")
    start = text[: text.index(old)].count("\n") + 1
    lines = range(start, start + new.count("\n") + 2)
    assert any(Path(f.path).name == name and f.line in lines for f in found) or code in ("X340", "X342", "X313"), found


def test_every_check_code_has_a_failing_example() -> None:
    """C68: no rule without an example; the reading and schema codes have theirs in test_reading.py."""
    tested = {case[0] for case in CASES} | {"X321", "X380"}
    assert tested == {code for code in CODES if code.startswith("X")}


def test_what_is_possible_but_not_allowed_is_a_notice(edited: Edit) -> None:
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    [finding] = [
        f
        for f in findings_of(folder)
        if f.code == "X321" and "fa4 can run (128, 64, 128)" in f.message and "sm90" in f.message
    ]
    assert finding.severity == "notice"
    load_matrix(folder)  # a notice never stops a load


def test_a_changed_source_is_never_answered_from_the_compiled_form(
    edited: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X380: stale is a fixable finding, and loading reads the sources."""
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    monkeypatch.setattr(load, "DATA_DIR", folder)
    monkeypatch.setattr(load, "COMPILED", folder / "compiled.json")
    monkeypatch.setattr(checks, "COMPILED", folder / "compiled.json")
    dims = next(b.dims for b in load_matrix().blocks.values() if b.name == "deepseek_v3")
    assert all(c.fa_version != 4 for c in load_matrix().lookup("sm90", 4, dims))
    assert [f.code for f in checks.check_path() if f.fixable] == ["X380"]
    assert [Path(p).name for p in fixes.fix(None)] == ["compiled.json"]
    assert [f.code for f in checks.check_path() if f.fixable] == []
    assert load_matrix().fingerprint == load.shipped_fingerprint()


def test_the_compiled_form_equals_its_sources() -> None:
    sources = load.gather()
    checks.require_clean(sources)
    assert json.loads(load.COMPILED.read_text(encoding="utf-8")) == load.document(sources)


def test_fix_restores_a_modeline(edited: Edit) -> None:
    folder = edited("matrix.yaml", "# yaml-language-server: $schema=../schema/matrix.schema.json\n", "")
    before = (folder / "matrix.yaml").read_text(encoding="utf-8")
    assert [Path(p).name for p in fixes.fix(folder)] == ["matrix.yaml"]
    after = (folder / "matrix.yaml").read_text(encoding="utf-8")
    assert after.endswith(before)
    assert list(fixes.fix(folder)) == []
    assert not [f for f in findings_of(folder) if f.code == "X381"]


def test_a_single_file_stands_in_for_its_namesake(edited: Edit, tmp_path: Path) -> None:
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    other = tmp_path / "my-site.yaml"
    other.write_text((folder / "matrix.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    matrix = load_matrix(other)
    assert all(c.fa_version != 4 for c in matrix.lookup("sm90", 4, matrix.blocks["deepseek_v3"].dims))


def test_loading_raises_every_finding_at_once(edited: Edit) -> None:
    folder = edited("matrix.yaml", "backends: [TRTLLM_RAGGED]", "backends: [TRTLLM]")
    edited("kernels.yaml", "dtypes: [bfloat16, float16]", "dtypes: [bf16, float16]")
    with pytest.raises(MatrixError) as raised:
        load_matrix(folder)
    assert {f.code for f in raised.value.findings} == {"X303", "X307"}


FINDING = Finding("a,b:c.yaml", 3, 7, "X301", "50% wrong\nline", "hint", "error")


def test_formats_say_the_same() -> None:
    assert FORMATS["text"]([FINDING]).startswith("a,b:c.yaml:3:7: X301 50% wrong")
    assert json.loads(FORMATS["json"]([FINDING]))["findings"][0]["line"] == 3
    github = FORMATS["github"]([FINDING]).split("\n")[0]
    assert github == "::error file=a%2Cb%3Ac.yaml,line=3,col=7,title=X301::50%25 wrong%0Aline%0Ahint"
    sarif = json.loads(FORMATS["sarif"]([FINDING]))
    [result] = sarif["runs"][0]["results"]
    assert sarif["version"] == "2.1.0"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3, "startColumn": 7}
    assert sarif["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "X301"
