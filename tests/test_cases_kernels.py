"""Right outcomes of public reports about kernels (the cases that are not held next to an adapter's or a rule's test)."""

from __future__ import annotations

from typing import Any

import pytest
from mla_prefill import Environment, Request, UnknownNameError, load_matrix
from mla_prefill.selector import Decision, decide

MATRIX = load_matrix()
DEEPSEEK, GLM, GLM_FLASH = (128, 64, 128), (192, 64, 256), (256, 0, 256)


def ask(arch: str, dims: Any, installed: dict[str, str] | None = None, **request: Any) -> Decision:
    return decide(Request(dims, **request), Environment(arch, installed), MATRIX)


def against(decision: Decision, kernel: str) -> dict[str, str]:
    """code -> message of the reasons against one kernel."""
    [verdict] = [v for v in decision.verdicts if v.candidate.kernel == kernel]
    return {reason.code: reason.message for reason in verdict.reasons}


@pytest.mark.parametrize("dims", [GLM, GLM_FLASH])
def test_c02_cutlass_quotes_its_pairs_and_the_two_triples_stay_apart(dims: Any) -> None:
    """vllm-project/vllm#57217: widening a list would have crashed, since the kernel dispatches three pairs only."""
    decision = ask("sm103", dims, backend="flashinfer_cutlass")
    assert decision.chosen is None
    text = against(decision, "flashinfer_cutlass")["dims-unsupported"]
    assert all(pair in text for pair in ("qk 192, v 128", "qk 128, v 128", "qk 64, v 64", "(qk 256, v 256)"))
    other = ask("sm103", dims, backend="FLASHINFER")
    assert other.chosen is None or other.chosen.kernel != "flashinfer_cutlass"
    trtllm = ask("sm103", dims, backend="TRTLLM_RAGGED")
    assert (trtllm.chosen is not None) is (dims == GLM)
    assert dims == GLM or "no-rule" in against(trtllm, "trtllm_ragged")


@pytest.mark.parametrize(("version", "allowed"), [("0.6.11", False), ("0.6.12", True), ("0.7.4", True)])
def test_c04_a_library_release_opens_a_shape_without_an_engine_release(version: str, allowed: bool) -> None:
    decision = ask("sm100", GLM, {"flashinfer-python": version}, backend="TRTLLM_RAGGED")
    assert (decision.chosen is not None) is allowed
    assert allowed or ">=0.6.12" in against(decision, "trtllm_ragged")["version-out-of-range"]


def test_c06_an_early_fa4_is_refused_for_256_before_any_call() -> None:
    """Dao-AILab/flash-attention#1959: the tensor memory of sm100 does not hold it in that build."""
    bundled = ask("sm100", GLM, {"flash-attn": "2.8.3", "nvidia-cutlass-dsl": "4.2.1"})
    assert bundled.chosen is not None
    assert bundled.chosen.kernel == "fa2"
    assert set(against(bundled, "fa4")) == {"kernel-not-installed"}
    early = ask("sm100", GLM, {"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b10"})
    assert early.chosen is not None
    assert early.chosen.kernel == "fa2"
    assert "4.0.0b11" in against(early, "fa4")["version-out-of-range"]


def test_c15_a_wheel_without_the_binary_offers_no_fa3() -> None:
    """sgl-project/sglang#38980: the support function said yes, the wheel held no sm_89 code."""
    decision = ask("sm89", DEEPSEEK, {"sglang-kernel": "0.4.9", "torch": "2.11.0"})
    assert decision.chosen is not None
    assert decision.chosen.kernel == "fa2"
    assert "sglang-kernel" not in str(against(decision, "fa3"))
    assert against(decision, "fa3")


@pytest.mark.parametrize("name", ["FLASHMLA", "FLASH_MLA", "flash_mla", "FLASH_ATTN_MLA"])
def test_c16_a_kernel_nobody_declared_is_refused_with_valid_names(name: str) -> None:
    """deepseek-ai/FlashMLA#83: it was selectable on Blackwell, and failed by an assertion."""
    with pytest.raises(UnknownNameError, match=r"which this matrix does not support; known: .*FLASH_ATTN, .*fa4"):
        ask("sm100", DEEPSEEK, backend=name)


def test_c24_the_output_dtype_is_a_condition_of_its_own() -> None:
    """flashinfer-ai/flashinfer#2597: bf16 in, FP8 out has no kernel on sm103; bf16 out has."""
    assert ask("sm103", DEEPSEEK, backend="TRTLLM_RAGGED").chosen is not None
    refused = ask("sm103", DEEPSEEK, backend="TRTLLM_RAGGED", needs=["fp8_output"])
    assert refused.chosen is None
    assert "fp8_output" in against(refused, "trtllm_ragged")["feature-missing"]


@pytest.mark.parametrize(
    "arch", [a.id for a in MATRIX.architectures.values() if a.vendor == "nvidia" and a.id != "sm70"]
)
def test_c33_the_slow_path_is_never_taken_unasked(arch: str) -> None:
    """huggingface/transformers#46960: SDPA's mathematical path grows with the square of the length, silently."""
    only_torch = ask(arch, (448, 64, 448), {"torch": "2.11.0"})
    assert only_torch.chosen is None or only_torch.chosen.kernel != "torch_math"
    assert "slow" in against(ask(arch, DEEPSEEK, {"torch": "2.11.0"}), "torch_math")["not-requested"]
    asked = ask(arch, DEEPSEEK, {"torch": "2.11.0"}, backend="torch_math")
    assert asked.chosen is not None
    assert asked.chosen.kernel == "torch_math"


def test_c39_the_release_whose_cudnn_call_wants_other_offsets_is_refused() -> None:
    """flashinfer-ai/flashinfer#5258 and the offsets in elements of 0.6.14: only ragged calls in token units are made."""
    old = ask("sm100", DEEPSEEK, {"flashinfer-python": "0.6.14"}, backend="flashinfer_cudnn")
    assert old.chosen is None
    assert "version-out-of-range" in against(old, "flashinfer_cudnn")
    assert ask("sm100", DEEPSEEK, {"flashinfer-python": "0.7.4"}, backend="flashinfer_cudnn").chosen is not None


def test_c43_known_wrong_results_have_a_bound() -> None:
    """vllm-project/vllm#38562 and #38819: away from FA4, and back with the fixed copy."""
    before = ask("sm100", DEEPSEEK, {"vllm": "0.19.0"}, fa_version=4)
    assert before.chosen is None
    assert "NaN" in against(before, "fa4")["known-bad"]
    assert ask("sm100", DEEPSEEK, {"vllm": "0.33.0"}, fa_version=4).chosen is not None
