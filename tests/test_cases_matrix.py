"""Public reports about the matrix as data, as tests of the shipped data. C09 is in test_select.py, C57 and C58 in
test_pages.py; C13, C25 and C34 ask for less here than elsewhere, since nothing is ever replaced: see each."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import (
    Environment,
    Matrix,
    NoBackendError,
    Overrides,
    Request,
    RequestError,
    UnknownNameError,
    load_matrix,
    select,
)
from mla_prefill.capabilities import MatrixError
from mla_prefill.capabilities.configs import ModelDims, read_config
from mla_prefill.cli import build_parser
from mla_prefill.selector.decision import Decision
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import VARIABLES

ROOT = Path(__file__).parent.parent
DEEPSEEK, MISTRAL, GLM = (128, 64, 128), (64, 64, 128), (192, 64, 256)


def ask(arch: str, dims: Any, matrix: Matrix, installed: dict[str, str] | None = None, **request: Any) -> Decision:
    return decide(Request(dims, **request), Environment(arch, installed), matrix)


def chosen(decision: Decision) -> str | None:
    return decision.chosen.kernel if decision.chosen else None


def codes(decision: Decision, kernel: str) -> list[str]:
    return [r.code for v in decision.verdicts if v.candidate.kernel == kernel for r in v.reasons]


# ---- variants and dtypes --------------------------------------------------------------------------------------------


def test_c13_a_model_with_sparse_attention_takes_nothing_from_the_dense_prefill(matrix: Matrix) -> None:
    """Only the dense prefill is answered, and says so: no sparse variant is there that could restrict it."""
    answer = read_config(ROOT / "tests/data/hf_configs/deepseek_v3_2.json", matrix.families)
    assert isinstance(answer, ModelDims)
    assert answer.dims == DEEPSEEK
    assert any("sparse" in note for note in answer.notes)
    dense = ask("sm90", answer.dims, matrix, needs=["context_chunk"])
    assert chosen(dense) == chosen(ask("sm90", DEEPSEEK, matrix, needs=["context_chunk"])) == "fa4"
    with pytest.raises(RequestError, match="answers prefill only"):
        Request(answer.dims, phase="sparse_prefill")


def test_c23_an_fp8_query_is_part_of_the_question(matrix: Matrix) -> None:
    asked = ask("sm100", DEEPSEEK, matrix, needs=["fp8_query"])
    assert chosen(asked) == "trtllm_ragged"
    eligible = [v.candidate.backend for v in asked.verdicts if v.verdict != "rejected"]
    assert list(dict.fromkeys(eligible)) == ["TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA"]
    assert codes(asked, "fa4") == ["feature-missing"]
    assert chosen(ask("sm100", DEEPSEEK, matrix)) == "fa4"


def test_c25_the_compute_dtype_is_stated_and_never_exchanged(matrix: Matrix) -> None:
    """FP8 that was asked for is computed in FP8 or refused: a 16 bit answer cannot be a silent one."""
    asked = ask("sm100", DEEPSEEK, matrix, dtype="float8_e4m3fn", needs=["fp8_query"])
    assert asked.to_dict()["request"]["dtype"] == "float8_e4m3fn"
    assert asked.chosen is not None
    assert "float8_e4m3fn" in asked.chosen.dtypes
    refused = ask("sm90", DEEPSEEK, matrix, dtype="float8_e4m3fn")
    assert refused.chosen is None
    assert "dtype-unsupported" in codes(refused, "fa4")
    assert any("use dtype bfloat16" in hint.text for hint in refused.hints)


def test_c34_one_line_for_each_distinct_decision_not_for_each_layer(
    matrix: Matrix, caplog: pytest.LogCaptureFixture
) -> None:
    """A requested backend is used or refused, so there is no replacement to warn of; what was decided is told once."""
    with caplog.at_level(logging.INFO, "mla_prefill"):
        for _ in range(60):
            for dims in (DEEPSEEK, (192, 64, 128)):  # two layer kinds of dots3-note
                select(Request(dims, backend="FLASH_ATTN"), Environment("sm90"), load_matrix())
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(told) == len(set(told)) <= 2
    with pytest.raises(NoBackendError):
        select(Request(DEEPSEEK, backend="TRTLLM_RAGGED"), Environment("sm90"), matrix)


# ---- architectures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "dtype"), [((128, 128, 256), "float16"), (DEEPSEEK, "float16"), (GLM, "bfloat16")])
def test_c17_volta_lists_every_kernel_and_why(dims: Any, dtype: str, matrix: Matrix) -> None:
    with pytest.raises(NoBackendError) as raised:
        select(Request(dims, dtype), Environment("sm70"), matrix)
    assert all(f"  {name}: " in str(raised.value) for name in matrix.kernels)


VOLTA = """  volta_sdpa:
    backend: TORCH_SDPA
    providers:
      - {distribution: flash-attn-v100, module: flash_attn_v100, sources: [{kind: issue, ref: "1CatAI/1Cat-vLLM#200"}]}
    dtypes: [float16]
    provides: [out]
    causal: bottom_right
    limits:
      - arch: [sm70]
        widths: [{qk: {max: 256}, v: equal}]
        multiple_of: 8
        pad_v: false
        sources: [{kind: issue, ref: "1CatAI/1Cat-vLLM#200"}]
    sources: [{kind: issue, ref: "1CatAI/1Cat-vLLM#200"}]
"""


def test_c17_a_kernel_of_ones_own_answers_for_what_it_takes_and_nothing_else(data_folder: Path) -> None:
    """A sheet with an entry for sm70, fp16 and equal widths: the first query is allowed, the others are refused."""
    kernels, rows, orders = (data_folder / f"{kind}.yaml" for kind in ("kernels", "matrix", "priorities"))
    kernels.write_text(kernels.read_text(encoding="utf-8").rstrip("\n") + "\n" + VOLTA, encoding="utf-8")
    orders.write_text(
        orders.read_text(encoding="utf-8").replace(
            "order: [torch_efficient]", "order: [volta_sdpa, torch_efficient]", 1
        ),
        encoding="utf-8",
    )
    row = "      - {arch: [sm70], backends: [TORCH_SDPA], kernels: [volta_sdpa]}\n"
    text = rows.read_text(encoding="utf-8")
    glm = re.compile(r"(  glm_4_7_flash:\n(?:    .*\n)*?    allow:\n)")
    rows.write_text(glm.sub(lambda m: m[1] + row, text), encoding="utf-8")
    matrix = load_matrix(data_folder)
    assert chosen(ask("sm70", GLM, matrix, dtype="float16")) == "volta_sdpa"
    assert "dtype-unsupported" in codes(ask("sm70", GLM, matrix), "volta_sdpa")
    assert "dims-unsupported" in codes(ask("sm70", DEEPSEEK, matrix, dtype="float16"), "volta_sdpa")
    deepseek = re.compile(r"(  deepseek_v3:\n(?:    .*\n)*?    allow:\n)")
    rows.write_text(deepseek.sub(lambda m: m[1] + row, text), encoding="utf-8")
    with pytest.raises(MatrixError, match=r"X320 TORCH_SDPA/volta_sdpa cannot run \(128, 64, 128\)"):
        load_matrix(data_folder)


def test_c18_aiter_by_generation_switch_and_package(matrix: Matrix) -> None:
    """Preferred where all three hold. Upstream's AITER runs on gfx942 too, which the reported gate left out."""
    packages = {"amd-aiter": "0.1.9", "flash-attn": "2.8.3"}
    for arch in ("gfx950", "gfx942"):
        decision = ask(arch, DEEPSEEK, matrix, packages)
        assert decision.chosen is not None
        assert (decision.chosen.kernel, decision.chosen.pad_v_to) == ("aiter", None)
        assert decision.chosen.lse is not None
        assert decision.chosen.lse.layout == "heads_tokens"
    environment = Environment("gfx950", packages, overrides=Overrides(disable=("ROCM_AITER_FA",)))
    switched_off = decide(Request(DEEPSEEK), environment, matrix)
    for decision, code in (
        (switched_off, "disabled-by-user"),
        (ask("gfx950", DEEPSEEK, matrix, {"flash-attn": "2.8.3"}), "kernel-not-installed"),
        (ask("gfx90a", DEEPSEEK, matrix, packages), "arch-unsupported"),
    ):
        assert decision.chosen is not None
        assert (decision.chosen.kernel, decision.chosen.pad_v_to) == ("fa2", 192)
        assert codes(decision, "aiter") == [code]


def test_c21_no_restriction_is_inherited_and_no_family_is_an_architecture(matrix: Matrix) -> None:
    for arch in ("gfx90a", "gfx942", "gfx950"):
        assert "FLASH_ATTN" in matrix.allowed(arch, 2, Request(MISTRAL).dims)
    assert "ROCM_AITER_FA" in matrix.allowed("gfx942", None, Request(MISTRAL).dims)
    assert matrix.gpu("MI300X") == "gfx942"
    with pytest.raises(UnknownNameError):
        matrix.arch("gfx9")  # a family of generations, not one of them
    for kernel in matrix.kernels.values():  # what a limit does not say is the kernel's own, never another limit's
        for limit in kernel.limits:
            cell = next(c for c in matrix.cells(limit.arch[0], Request(MISTRAL).dims) if c.kernel is kernel)
            assert cell.candidate.dtypes == (limit.dtypes or kernel.dtypes)


# ---- documentation --------------------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Options of other programs: pip, pre-commit, the installer of another page.
FOREIGN = {"--extra-index-url", "--no-deps", "--site"}


def options() -> set[str]:
    parser = build_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices.values()
    return {name for p in (parser, *commands) for action in p._actions for name in action.option_strings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_c59_every_documented_option_and_command_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"`([^`\n]+)`", text)
    named = {
        name for span in code if span.startswith(("--", "mla-prefill ")) for name in re.findall(r"--[a-z][a-z-]*", span)
    }
    assert named - options() <= FOREIGN
    variables = {
        *VARIABLES,
        *re.findall(r"MLA_PREFILL_\w+", (ROOT / "selector" / "environment.py").read_text(encoding="utf-8")),
    }
    assert set(re.findall(r"`(MLA_PREFILL_[A-Z_]+)`", text)) <= variables
    parser = build_parser()
    for line in re.findall(r"^\$ mla-prefill (.*)$", text, re.MULTILINE):
        parser.parse_args(shlex.split(line, comments=True))
