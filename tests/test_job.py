"""The main job: a ragged chunked prefill that knows whether its kernel is right."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from mla_prefill import Environment, MLADimensions, Request, load_matrix, select
from mla_prefill.backends import KernelError, job, torch_sdpa
from mla_prefill.backends.job import JobResult, SequenceLengths, run_chunked_prefill
from mla_prefill.capabilities.model import LseConvention

SMALL = [SequenceLengths(9, (12, 5)), SequenceLengths(1, (7, 0)), SequenceLengths(4, (0, 0))]


MISTRAL_SMALL_4 = MLADimensions(64, 64, 128)


def decide(dims: MLADimensions = MISTRAL_SMALL_4, dtype: str = "bfloat16"):
    return select(Request(dims, dtype=dtype), Environment("cpu", {"torch": torch.__version__}))


@pytest.mark.parametrize("dtype", job.TOLERANCES)
@pytest.mark.parametrize("block", load_matrix().blocks.values(), ids=lambda block: block.name)
def test_every_model_of_the_matrix_on_the_cpu(block, dtype: str) -> None:
    result = run_chunked_prefill(decide(block.dims, dtype), num_heads=2, sequences=SMALL)
    assert result.ok
    assert (result.backend, result.kernel, result.provider) == ("TORCH_SDPA", "torch_math", "torch")
    assert (result.dims, result.dtype, result.device) == (block.dims, dtype, "cpu")


def test_the_default_batch_is_what_chunked_prefill_meets() -> None:
    """Ragged, some without context, some that end before the second chunk; 32 heads in bfloat16."""
    for sequences in (job.CPU_SEQUENCES, job.CUDA_SEQUENCES):
        assert len({sequence.new_tokens for sequence in sequences}) >= 4
        assert any(not any(sequence.context_chunks) for sequence in sequences)
        assert any(first and not second for _, (first, second) in sequences)
    result = run_chunked_prefill(decide(), num_heads=32)
    assert result.ok
    assert result.sequences == job.CPU_SEQUENCES
    assert result.error < 4e-3  # three calls and two merges, each rounded to bfloat16 once
    assert result.tokens_per_second == pytest.approx(result.new_tokens / result.seconds)


def test_progress_and_json() -> None:
    lines: list[str] = []
    result = run_chunked_prefill(decide(), num_heads=2, sequences=SMALL, report=lines.append)
    assert "running 3 sequences: 14 new tokens, 24 tokens of context" in lines
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert plain["ok"] is True
    assert plain["dims"] == [64, 64, 128]
    assert plain["sequences"][1] == {"new_tokens": 1, "context_chunks": [7, 0]}
    assert set(plain) == {field.name for field in dataclasses.fields(JobResult)} | {"ok"}


def test_the_seed_decides_the_inputs() -> None:
    errors = [run_chunked_prefill(decide(), num_heads=2, sequences=SMALL, seed=seed).error for seed in (0, 0, 1)]
    assert errors[0] == errors[1] != errors[2]


@pytest.mark.parametrize("chunks", [(), (5,), (5, 0, 3)])
def test_any_number_of_chunks(chunks: tuple[int, ...]) -> None:
    sequences = [SequenceLengths(6, chunks), SequenceLengths(0, chunks), SequenceLengths(2, (0,) * len(chunks))]
    assert run_chunked_prefill(decide(), num_heads=2, sequences=sequences).ok


# --- It must notice a kernel that is wrong. ---


def with_lse(**convention: str):
    decision = decide(dtype="float32")
    lse = dataclasses.replace(LseConvention("e", "heads_tokens", "-inf"), **convention)
    return dataclasses.replace(decision, chosen=dataclasses.replace(decision.chosen, lse=lse))


def test_a_wrong_lse_base_shows() -> None:
    """The merge weighs chunks wrongly (vllm-project/vllm#47079)."""
    result = run_chunked_prefill(with_lse(base="2"), num_heads=2, sequences=SMALL)
    assert not result.ok
    assert result.error > result.tolerance
    assert result.lse_error > result.lse_tolerance


def test_a_wrong_lse_shows_where_nothing_is_merged() -> None:
    """Out is right then, and the next chunk would not be (ROCm/aiter#3606)."""
    result = run_chunked_prefill(with_lse(base="2"), num_heads=2, sequences=[SequenceLengths(9, ())])
    assert result.error <= result.tolerance
    assert not result.ok


def test_a_wrong_lse_layout_shows_even_with_heads_equal_to_tokens() -> None:
    """vllm-project/vllm#57012: no shape error there."""
    result = run_chunked_prefill(with_lse(layout="tokens_heads"), num_heads=14, sequences=SMALL)
    assert not result.ok


def test_a_kernel_without_mask_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch_sdpa.TorchMath.prepare
    monkeypatch.setattr(
        torch_sdpa.TorchMath, "prepare", lambda self, batch: right(self, dataclasses.replace(batch, causal=False))
    )
    assert not run_chunked_prefill(decide(), num_heads=2, sequences=SMALL).ok


def test_nan_is_never_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(self, batch):
        return lambda q, k, v, out, return_lse: (v.new_full((len(q), *v.shape[1:]), math.nan), torch.zeros(2, len(q)))

    monkeypatch.setattr(torch_sdpa.TorchMath, "prepare", nan)
    result = run_chunked_prefill(decide(), num_heads=2, sequences=SMALL)
    assert not result.ok
    assert result.to_dict()["error"] is None


def test_out_of_memory_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(job, "reference_attention", exhausted)
    with pytest.raises(KernelError, match=r"TORCH_SDPA/torch_math \(torch .*, 2 heads, .*out of memory"):
        run_chunked_prefill(decide(), num_heads=2, sequences=SMALL)


@pytest.mark.parametrize(
    ("sequences", "says"),
    [
        ([], "at least one new token"),
        ([SequenceLengths(0, (5, 5))], "at least one new token"),
        ([SequenceLengths(3, (5, 5)), SequenceLengths(3, (5,))], "equally many context chunks"),
        ([SequenceLengths(3, (5, -5))], "a length cannot be negative"),
    ],
)
def test_a_batch_that_makes_no_sense(sequences: list[SequenceLengths], says: str) -> None:
    with pytest.raises(ValueError, match=f"^sequences: .*{says}"):
        run_chunked_prefill(decide(), num_heads=2, sequences=sequences)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_this_gpu() -> None:
    result = run_chunked_prefill(select(Request(MISTRAL_SMALL_4)), num_heads=16)
    assert result.ok
    assert result.device == torch.cuda.get_device_name()
