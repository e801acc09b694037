"""The contract of every prefill backend, as checks that any adapter can be put through, on any device.

    @pytest.mark.parametrize("check", CUDA_CHECKS, ids=check_id)  # or CHECKS, where there is no GPU
    def test_contract(check):
        check(Subject(make_adapter, MLADimensions(64, 64, 128), "bfloat16", "cuda"))

Truth is ``reference_attention`` in float64. All plans are made with ``validate=True``, which also holds the shapes and
dtypes of what a kernel returns to the contract.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Protocol

import pytest
import torch
from mla_prefill.backends import merge_attention_states
from mla_prefill.backends.base import PrefillAdapter
from mla_prefill.backends.job import TOLERANCES, by_sequence, tolerance_of
from mla_prefill.backends.reference import reference_attention
from mla_prefill.capabilities.model import MLADimensions
from torch import Tensor

#: Device types and the tokens of a context that counts as long there.
LONG_CONTEXT = {"cpu": 3000, "cuda": 70_000}


class AdapterFactory(Protocol):
    """Loads the kernel under test."""

    def __call__(
        self, dims: MLADimensions, dtype: str, num_heads: int, softmax_scale: float | None = None
    ) -> PrefillAdapter: ...


@dataclass(frozen=True)
class Subject:
    """What is put through the checks: a kernel with dims and a dtype on a device."""

    make: AdapterFactory
    dims: MLADimensions
    dtype: str
    device: str

    def adapter(self, num_heads: int = 3, softmax_scale: float | None = None) -> PrefillAdapter:
        return self.make(self.dims, self.dtype, num_heads, softmax_scale)


@dataclass(frozen=True)
class Ragged:
    """Random q, k and v of a ragged batch; V is a strided slice, as kv_b_proj gives it."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool

    @classmethod
    def random(
        cls,
        adapter: PrefillAdapter,
        lengths_q: Sequence[int],
        lengths_k: Sequence[int] | None = None,
        *,
        causal: bool,
        seed: int = 0,
    ) -> Ragged:
        """``lengths_k`` None: new tokens, with one and the same cu_seqlens for q and k."""
        generator = torch.Generator().manual_seed(seed)
        dims, heads = adapter.dims, adapter.num_heads

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(adapter.device, adapter.dtype)

        cu_q = cu_seqlens(lengths_q, adapter.device)
        cu_k = cu_q if lengths_k is None else cu_seqlens(lengths_k, adapter.device)
        lengths_k = lengths_q if lengths_k is None else lengths_k
        kv = randn(sum(lengths_k), heads, dims.qk_nope_head_dim + dims.v_head_dim)
        return cls(
            q=randn(sum(lengths_q), heads, dims.qk_head_dim),
            k=randn(sum(lengths_k), heads, dims.qk_head_dim),
            v=kv[..., dims.qk_nope_head_dim :],
            cu_q=cu_q,
            cu_k=cu_k,
            lengths_q=tuple(lengths_q),
            lengths_k=tuple(lengths_k),
            causal=causal,
        )

    def plan(self, adapter: PrefillAdapter):
        return adapter.plan(
            self.cu_q, self.cu_k, max(self.lengths_q), max(self.lengths_k), causal=self.causal, validate=True
        )

    def run(self, adapter: PrefillAdapter) -> tuple[Tensor, Tensor]:
        return self.plan(adapter).run(self.q, self.k, self.v, return_lse=True)

    def truth(self, adapter: PrefillAdapter) -> tuple[Tensor, Tensor]:
        return reference_attention(
            self.q,
            self.k,
            self.v,
            self.cu_q,
            self.cu_k,
            causal=self.causal,
            softmax_scale=adapter.softmax_scale,
            dtype=torch.float64,
        )


def cu_seqlens(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def assert_close(adapter: PrefillAdapter, got: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    """Out by the norm of the difference, LSE by its largest difference, rows without keys exactly."""
    tolerance = tolerance_of(str(adapter.dtype).removeprefix("torch."), adapter.kernel.lse)
    (out, lse), (true_out, true_lse) = got, truth
    assert lse.is_contiguous(), "kernels that merge states get no strides (vLLM: merge_attn_states.cu)"
    assert torch.equal(lse == -math.inf, true_lse == -math.inf), "rows without keys"
    assert not torch.isposinf(lse).any()
    filled = true_lse != -math.inf
    assert not out[~filled.t()].any(), "out of rows without keys"
    if filled.any():
        error = (out.double() - true_out).norm() / true_out.norm()
        assert error <= tolerance.out
        assert (lse.double() - true_lse)[filled].abs().max() <= tolerance.lse


def matches_full_attention(subject: Subject, lengths_q: Sequence[int], lengths_k: Sequence[int] | None, **how) -> None:
    adapter = subject.adapter()
    batch = Ragged.random(adapter, lengths_q, lengths_k, **how)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


# --- The checks. ---


def new_tokens(subject: Subject) -> None:
    matches_full_attention(subject, [1, 130, 257, 64], None, causal=True)


def context_chunk(subject: Subject) -> None:
    matches_full_attention(subject, [5, 130, 64], [300, 17, 512], causal=False)


def causal_is_aligned_bottom_right(subject: Subject) -> None:
    """With a longer context than queries, the last query sees every key (top-left would hide most of them)."""
    matches_full_attention(subject, [5, 1, 33], [64, 200, 34], causal=True)


def causal_rows_before_the_first_key(subject: Subject) -> None:
    """Bottom-right with fewer keys than queries: the first rows see nothing."""
    matches_full_attention(subject, [70, 40, 5], [7, 40, 1], causal=True)


def zero_length_sequences(subject: Subject) -> None:
    matches_full_attention(subject, [0, 37, 0, 0, 5, 0], None, causal=True)
    matches_full_attention(subject, [0, 37, 0, 6, 5, 0], [9, 140, 0, 1, 0, 0], causal=False)


def sequences_without_keys(subject: Subject) -> None:
    """A later chunk that shorter prefixes do not reach (sgl-project/sglang#22688, flashinfer-ai/flashinfer#3047)."""
    matches_full_attention(subject, [16, 130, 1, 64], [0, 300, 0, 64], causal=False)


def no_keys_at_all(subject: Subject) -> None:
    matches_full_attention(subject, [16, 3], [0, 0], causal=False)


def no_queries_at_all(subject: Subject) -> None:
    matches_full_attention(subject, [0, 0], [16, 3], causal=False)


def batch_of_n_equals_n_single_runs(subject: Subject) -> None:
    adapter = subject.adapter()
    batch = Ragged.random(adapter, [3, 40, 1, 65, 16, 2, 130, 7], [96, 0, 33, 0, 500, 64, 0, 8], causal=False)
    out, lse = batch.run(adapter)
    for index, (q, k) in enumerate(zip(batch.lengths_q, batch.lengths_k, strict=True)):
        rows = slice(int(batch.cu_q[index]), int(batch.cu_q[index + 1]))
        keys = slice(int(batch.cu_k[index]), int(batch.cu_k[index + 1]))
        plan = adapter.plan(
            cu_seqlens([q], adapter.device), cu_seqlens([k], adapter.device), q, k, causal=False, validate=True
        )
        single, single_lse = plan.run(batch.q[rows], batch.k[keys], batch.v[keys], return_lse=True)
        torch.testing.assert_close(out[rows], single)
        torch.testing.assert_close(lse[:, rows], single_lse)


def lse_is_heads_by_tokens(subject: Subject) -> None:
    """As many heads as tokens: a swapped layout shows no wrong shape (vllm-project/vllm#57012)."""
    adapter = subject.adapter(num_heads=8)
    batch = Ragged.random(adapter, [5, 3], [40, 9], causal=False)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


def lse_is_a_natural_logarithm(subject: Subject) -> None:
    """With q = 0 all keys weigh the same: out is the mean of V, and the LSE is ln(keys) (vllm-project/vllm#47079)."""
    adapter = subject.adapter()
    batch = Ragged.random(adapter, [2, 4], [100, 7], causal=False)
    out, lse = batch.plan(adapter).run(torch.zeros_like(batch.q), batch.k, batch.v, return_lse=True)
    expected = torch.tensor([100.0] * 2 + [7.0] * 4).log().expand(adapter.num_heads, -1)
    torch.testing.assert_close(lse.cpu(), expected, atol=1e-5, rtol=0)
    means = torch.cat(
        [v.double().mean(0, keepdim=True).expand(n, -1, -1) for v, n in ((batch.v[:100], 2), (batch.v[100:], 4))]
    )
    assert (out.double() - means).norm() / means.norm() <= 2 * TOLERANCES[subject.dtype].out


def softmax_scale_is_used(subject: Subject) -> None:
    adapter = subject.adapter(softmax_scale=0.3)
    batch = Ragged.random(adapter, [17, 3], None, causal=True)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


def large_scores_do_not_overflow(subject: Subject) -> None:
    adapter = subject.adapter(softmax_scale=20.0)
    out, lse = Ragged.random(adapter, [40, 3], None, causal=True).run(adapter)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def without_lse_only_out(subject: Subject) -> None:
    adapter = subject.adapter()
    batch = Ragged.random(adapter, [16, 33], [50, 0], causal=False)
    plan = batch.plan(adapter)
    out = plan.run(batch.q, batch.k, batch.v)
    torch.testing.assert_close(out, plan.run(batch.q, batch.k, batch.v, return_lse=True)[0])
    assert out.is_contiguous()


def out_is_written_and_returned(subject: Subject) -> None:
    adapter = subject.adapter()
    for lengths_k in ([50, 0], [0, 0]):
        batch = Ragged.random(adapter, [16, 33], lengths_k, causal=False)
        expected, expected_lse = batch.run(adapter)
        out = torch.full_like(expected, math.nan)
        got, lse = batch.plan(adapter).run(batch.q, batch.k, batch.v, out=out, return_lse=True)
        assert got.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def one_plan_many_layers(subject: Subject) -> None:
    """Other values, and K and V of other strides, through the same plan (flashinfer-ai/flashinfer#4146)."""
    adapter = subject.adapter()
    first = Ragged.random(adapter, [16, 33], [50, 8], causal=False)
    plan = first.plan(adapter)
    wide_k = torch.cat([first.k, first.k * 2], dim=-1)
    layers = [
        (first.q, first.k, first.v),
        (first.q, first.k * 0.5, first.v.contiguous()),
        (first.q, wide_k[..., adapter.dims.qk_head_dim :], first.v),
        (first.q * 0.5, first.k.transpose(0, 1).contiguous().transpose(0, 1), first.v),
    ]
    for q, k, v in layers:
        truth = reference_attention(
            q, k, v, first.cu_q, first.cu_k, causal=False, softmax_scale=adapter.softmax_scale, dtype=torch.float64
        )
        assert_close(adapter, plan.run(q, k, v, return_lse=True), truth)


def results_outlive_the_next_layer(subject: Subject) -> None:
    """A plan may keep buffers, but not hand them out twice."""
    adapter = subject.adapter()
    batch = Ragged.random(adapter, [16, 33], None, causal=True)
    plan = batch.plan(adapter)
    out, lse = plan.run(batch.q, batch.k, batch.v, return_lse=True)
    before = out.clone(), lse.clone()
    plan.run(-batch.q, batch.k, -batch.v, return_lse=True)
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])


def inputs_are_left_alone(subject: Subject) -> None:
    adapter = subject.adapter()
    batch = Ragged.random(adapter, [16, 33], None, causal=True)
    before = [tensor.clone() for tensor in (batch.q, batch.k, batch.v, batch.cu_q)]
    batch.run(adapter)
    assert all(map(torch.equal, before, (batch.q, batch.k, batch.v, batch.cu_q)))


def chunks_merge_to_full_attention(subject: Subject) -> None:
    """A long context in three chunks and the new tokens: the main use (vllm-project/vllm#42642)."""
    adapter = subject.adapter(num_heads=2)
    context = LONG_CONTEXT[torch.device(subject.device).type]
    new_lengths = [33, 1, 70]
    chunks = [[context // 2, 0, 5], [context // 3, 0, 0], [context // 6, 0, 0]]
    new = Ragged.random(adapter, new_lengths, None, causal=True)
    parts = [Ragged.random(adapter, new_lengths, chunk, causal=False, seed=1 + i) for i, chunk in enumerate(chunks)]
    parts.append(new)
    partial = [part.plan(adapter).run(new.q, part.k, part.v, return_lse=True) for part in parts]
    out, lse = reduce(lambda a, b: merge_attention_states(*a, *b), partial)
    lengths = [part.lengths_k for part in parts]
    truth = reference_attention(
        new.q,
        by_sequence([part.k for part in parts], lengths),
        by_sequence([part.v for part in parts], lengths),
        new.cu_q,
        torch.stack([part.cu_k for part in parts]).sum(0),
        causal=True,
        softmax_scale=adapter.softmax_scale,
        dtype=torch.float64,
    )
    assert_close(adapter, (out, lse), truth)


def runs_in_a_cuda_graph(subject: Subject) -> None:
    """Captured once, replayed with other values in the same places."""
    adapter = subject.adapter()
    if "cuda_graph" not in adapter.candidate.provides:
        pytest.skip(f"the kernel sheet does not say that {adapter.kernel.label} runs in a CUDA graph")
    batch = Ragged.random(adapter, [16, 33], [50, 8], causal=False)
    plan = adapter.plan(batch.cu_q, batch.cu_k, 33, 50, causal=False)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        plan.run(batch.q, batch.k, batch.v, return_lse=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan.run(batch.q, batch.k, batch.v, return_lse=True)
    batch.q.mul_(-0.5)
    batch.v.mul_(2)
    graph.replay()
    assert_close(adapter, captured, batch.truth(adapter))


def runs_in_inference_mode(subject: Subject) -> None:
    adapter = subject.adapter()
    with torch.inference_mode():
        batch = Ragged.random(adapter, [16, 33], [50, 0], causal=False)
        assert_close(adapter, batch.run(adapter), batch.truth(adapter))


CHECKS: tuple[Callable[[Subject], None], ...] = (
    new_tokens,
    context_chunk,
    causal_is_aligned_bottom_right,
    causal_rows_before_the_first_key,
    zero_length_sequences,
    sequences_without_keys,
    no_keys_at_all,
    no_queries_at_all,
    batch_of_n_equals_n_single_runs,
    lse_is_heads_by_tokens,
    lse_is_a_natural_logarithm,
    softmax_scale_is_used,
    large_scores_do_not_overflow,
    without_lse_only_out,
    out_is_written_and_returned,
    one_plan_many_layers,
    results_outlive_the_next_layer,
    inputs_are_left_alone,
    chunks_merge_to_full_attention,
    runs_in_inference_mode,
)
CUDA_CHECKS = (*CHECKS, runs_in_a_cuda_graph)


def check_id(check: Callable[[Subject], None]) -> str:
    return check.__name__
