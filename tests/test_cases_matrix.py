"""Public reports about the matrix as data, as tests of the shipped data. C09 is in test_select.py, C57 and C58 in
test_pages.py."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
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


def test_c13_sparse_is_part_of_the_question_and_dense_stays_allowed(matrix: Matrix) -> None:
    """sm_90, a model with sparse attention, chunked prefill: no kernel takes indices, and dense loses nothing by it."""
    answer = read_config(ROOT / "tests/data/hf_configs/deepseek_v3_2.json", matrix.families)
    assert isinstance(answer, ModelDims)
    assert any("sparse" in note and "--needs sparse" in note for note in answer.notes)
    dense = ask("sm90", answer.dims, matrix, needs=["context_chunk"])
    assert chosen(dense) == "fa4"
    sparse = ask("sm90", answer.dims, matrix, needs=["context_chunk", "sparse"])
    assert sparse.chosen is None
    for kernel in (v.candidate.kernel for v in dense.verdicts):
        assert {"feature-missing", "arch-unsupported"} & set(codes(sparse, kernel))
    for kernel in (v.candidate.kernel for v in dense.verdicts if v.verdict != "rejected"):
        assert codes(sparse, kernel) == ["feature-missing"]
    assert any("do without sparse: FLASH_ATTN/fa4" in hint.text for hint in sparse.hints)


def test_c13_a_config_that_states_sparse_attention_says_so_without_a_family(matrix: Matrix) -> None:
    dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    for index, noted in (({"index_topk": 2048}, True), ({"index_topk": 0}, False), ({}, False)):
        answer = read_config({**dims, **index}, matrix.families)
        assert isinstance(answer, ModelDims)
        assert any("--needs sparse" in note for note in answer.notes) is noted


def test_c23_an_fp8_query_is_part_of_the_question(matrix: Matrix) -> None:
    asked = ask("sm100", DEEPSEEK, matrix, needs=["fp8_query"])
    assert chosen(asked) == "trtllm_ragged"
    eligible = [v.candidate.backend for v in asked.verdicts if v.verdict != "rejected"]
    assert list(dict.fromkeys(eligible)) == ["TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA"]
    assert codes(asked, "fa4") == ["feature-missing"]
    assert chosen(ask("sm100", DEEPSEEK, matrix)) == "fa4"


BLACKWELL = {"flashinfer-python": "0.7.4", "flash-attn-4": "4.0.0b36"}


@pytest.mark.parametrize(
    ("arch", "installed", "kernel", "dtype", "why"),
    [
        ("sm100", BLACKWELL, "trtllm_ragged", "float8_e4m3fn", None),
        ("sm100", {"flash-attn-4": "4.0.0b36"}, "fa4", "bfloat16", "trtllm_ragged is not installed"),
        ("sm90", BLACKWELL, "fa4", "bfloat16", "trtllm_ragged runs on sm100, sm103, sm107, not on sm90"),
    ],
)
def test_c25_fp8_where_a_kernel_can_and_a_warning_where_none_can(
    arch: str, installed: dict[str, str], kernel: str, dtype: str, why: str | None, matrix: Matrix
) -> None:
    decision = ask(arch, DEEPSEEK, matrix, installed, prefers=["fp8_query"])
    as_json = decision.to_dict()
    assert (chosen(decision), decision.compute_dtype, as_json["compute_dtype"]) == (kernel, dtype, dtype)
    assert f"computes in: {dtype}" in decision.explain()
    assert as_json["request"]["prefers"] == ["fp8_query"]
    assert as_json["warnings"] == list(decision.warnings)
    if why is None:
        assert not decision.warnings
        assert "computes in float8_e4m3fn" in decision.one_line()
        assert "trtllm_ragged comes before fa4 on sm100, where fp8_query is preferred" in decision.explain()
    else:
        (warning,) = decision.warnings
        assert f"FLASH_ATTN/fa4 for (128, 64, 128) on {arch}" in warning
        assert "q, k and v stay in bfloat16" in warning
        assert why in warning
        assert f"warning: {warning}" in decision.explain()
        assert "without fp8_query" in decision.one_line()


def test_c25_what_would_grant_the_wish_is_a_hint(matrix: Matrix) -> None:
    decision = ask("sm100", DEEPSEEK, matrix, {"flash-attn-4": "4.0.0b36"}, prefers=["fp8_query"])
    hint = next(hint for hint in decision.hints if hint.candidate == "trtllm_ragged")
    assert decide(hint.request, hint.environment, matrix).compute_dtype == "float8_e4m3fn"


def test_c25_a_dtype_that_is_asked_for_is_computed_in_or_refused(matrix: Matrix) -> None:
    asked = ask("sm100", DEEPSEEK, matrix, dtype="float8_e4m3fn", needs=["fp8_query"])
    assert asked.compute_dtype == asked.to_dict()["request"]["dtype"] == "float8_e4m3fn"
    refused = ask("sm90", DEEPSEEK, matrix, dtype="float8_e4m3fn")
    assert refused.chosen is None
    assert refused.compute_dtype is None
    assert "dtype-unsupported" in codes(refused, "fa4")
    assert any("use dtype bfloat16" in hint.text for hint in refused.hints)


@pytest.mark.parametrize(
    ("cache_dtype", "quantised", "prefers"),
    [
        ("auto", True, []),
        ("fp8_e4m3", True, ["fp8_query"]),
        ("fp8", True, ["fp8_query"]),
        ("fp8", False, []),  # vLLM keeps the query in 16 bit, so a kernel for FP8 would compute in 16 bit too
    ],
)
def test_c25_the_fp8_query_of_an_engine_is_a_wish(cache_dtype: str, quantised: bool, prefers: list[str]) -> None:
    hf_config = json.loads((ROOT / "tests/data/hf_configs/deepseek_v3.json").read_text(encoding="utf-8"))
    engine = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=True, hf_config=hf_config, dtype="bfloat16"),
        attention_config=SimpleNamespace(
            mla_prefill_backend=None, flash_attn_version=None, use_prefill_query_quantization=quantised
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )
    assert Request.from_vllm(engine) == Request(DEEPSEEK, needs=["lse", "context_chunk"], prefers=prefers)


def test_a_wish_is_granted_only_where_nothing_speaks_against_the_need(matrix: Matrix) -> None:
    """The version at hand has the feature and is known bad with it: that is no grant, and the reason is told."""
    decision = ask("sm100", DEEPSEEK, matrix, {"flash-attn-4": "4.0.0b8"}, prefers=["context_chunk"])
    assert chosen(decision) == "fa4"
    assert decision.unmet == ("context_chunk",)
    assert "crashes when no sequence of a context chunk has keys" in decision.warnings[0]
    both = {"flash-attn-4": "4.0.0b8", "flash-attn": "2.8.3"}
    assert chosen(ask("sm100", DEEPSEEK, matrix, both)) == "fa4"
    assert chosen(ask("sm100", DEEPSEEK, matrix, both, prefers=["context_chunk"])) == "fa2"


def test_a_wish_that_a_newer_version_grants_says_so_first(matrix: Matrix) -> None:
    """The chosen kernel is the one to cure: of flash-attn-4 the versions before 4.0.0b10 crash in a context chunk."""
    early = {"flash-attn-4": "4.0.0b8"}
    hint = ask("sm90", DEEPSEEK, matrix, early, prefers=["context_chunk"]).hints[0]
    assert hint.text == "install flash-attn-4>=4.0.0b10 for FLASH_ATTN/fa4"
    cured = decide(hint.request, hint.environment, matrix)
    assert (cured.request.prefers, cured.unmet, chosen(cured)) == (("context_chunk",), (), "fa4")


def test_no_hint_gives_up_what_was_asked_for_a_wish(matrix: Matrix) -> None:
    decision = ask("sm90", DEEPSEEK, matrix, {"flash-attn-4": "4.0.0b36"}, prefers=["fp8_output"])
    assert decision.unmet == ("fp8_output",)
    assert all(hint.request == decision.request for hint in decision.hints)


def test_of_two_wishes_the_first_weighs_more(matrix: Matrix) -> None:
    for prefers, kernel in ((["fp8_query", "cuda_graph"], "trtllm_ragged"), (["cuda_graph", "fp8_query"], "fa4")):
        decision = ask("sm100", DEEPSEEK, matrix, prefers=prefers)
        assert (chosen(decision), decision.unmet) == (kernel, (prefers[1],))


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "cpu"])
@pytest.mark.parametrize("prefers", [["sparse"], ["fp8_query"], ["out", "fp8_output"]])
def test_a_wish_excludes_nobody(arch: str, prefers: list[str], matrix: Matrix) -> None:
    plain, wished = ask(arch, DEEPSEEK, matrix), ask(arch, DEEPSEEK, matrix, prefers=prefers)
    eligible = [{v.candidate.kernel for v in d.verdicts if v.verdict != "rejected"} for d in (plain, wished)]
    assert eligible[0] == eligible[1]
    if set(prefers).isdisjoint(wished.chosen.provides if wished.chosen else ()):
        assert chosen(plain) == chosen(wished)
    assert bool(wished.warnings) is bool(wished.unmet)


def test_a_wish_nobody_declared_gets_the_nearest_one(matrix: Matrix) -> None:
    with pytest.raises(UnknownNameError, match="unknown feature 'fp8_qery'; did you mean fp8_query"):
        ask("sm100", DEEPSEEK, matrix, prefers=["fp8_qery"])
    with pytest.raises(RequestError, match="prefers must be a list of features"):
        Request(DEEPSEEK, prefers="fp8_query")
    assert Request(DEEPSEEK, needs=["fp8_query"], prefers=["fp8_query"]) == Request(DEEPSEEK, needs=["fp8_query"])


def test_c34_one_warning_for_each_kind_of_layer_not_for_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    """60 layers of two geometries, each asking anew: one warning a (dims, wish, kernel), whatever else differs."""
    geometries = DEEPSEEK, (192, 64, 128)  # dots3-note
    for layer in range(60):
        environment = Environment("sm90", device=f"GPU {layer}")  # no two questions have one cached answer
        select(Request(geometries[layer % 2], prefers=["fp8_query"]), environment, load_matrix())
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [[str(Request(dims).dims) in text for text in warned] for dims in geometries] == [
        [True, False],
        [False, True],
    ]
    assert all("fp8_query is preferred, but FLASH_ATTN/" in text for text in warned)


def test_c34_a_requested_backend_is_never_replaced(matrix: Matrix, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mla_prefill"):
        for _ in range(60):
            for dims in (DEEPSEEK, (192, 64, 128)):
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
