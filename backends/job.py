"""The main job: one chunked prefill through the chosen kernel, checked against float32 full attention.

What a serving engine does in one layer for a batch whose sequences have cached context: attention of the new tokens
among themselves (causal), attention of the same queries over each chunk of context (not causal), and the merge of these
partial results. The chunks' K and V are built as kv_b_proj gives them: V is a strided slice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mla_prefill.backends import KernelError, load
from mla_prefill.backends.base import PrefillAdapter, PrefillPlan
from mla_prefill.backends.merge import merge_attention_states
from mla_prefill.backends.reference import reference_attention
from mla_prefill.capabilities.evidence import TOLERANCES, tolerance_of
from mla_prefill.capabilities.model import MLADimensions
from torch import Tensor

if TYPE_CHECKING:
    from mla_prefill.selector.decision import Decision


class SequenceLengths(NamedTuple):
    """One sequence of the batch: its new tokens, and its cached tokens in each context chunk."""

    new_tokens: int
    context_chunks: tuple[int, ...]


#: Some sequences without context, some that end before the second chunk, one of a single token.
CPU_SEQUENCES = (
    SequenceLengths(64, (128, 96)),
    SequenceLengths(1, (160, 0)),
    SequenceLengths(33, (0, 0)),
    SequenceLengths(128, (96, 40)),
    SequenceLengths(17, (75, 0)),
)
CUDA_SEQUENCES = (
    SequenceLengths(1024, (2048, 2048)),
    SequenceLengths(1, (2048, 0)),
    SequenceLengths(333, (0, 0)),
    SequenceLengths(512, (2048, 777)),
    SequenceLengths(130, (1500, 0)),
    SequenceLengths(1024, (0, 0)),
)


@dataclass(frozen=True)
class JobResult:
    """What ``mla-prefill run`` prints. ``seconds`` are for one layer: all calls and merges, without planning."""

    backend: str
    kernel: str
    provider: str
    device: str
    dims: MLADimensions
    dtype: str
    num_heads: int
    sequences: tuple[SequenceLengths, ...]
    new_tokens: int
    context_tokens: int
    error: float
    tolerance: float
    lse_error: float
    lse_tolerance: float
    seconds: float
    tokens_per_second: float

    @property
    def ok(self) -> bool:
        """Both errors are within their tolerance (NaN is not)."""
        return self.error <= self.tolerance and self.lse_error <= self.lse_tolerance

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an error that is not finite becomes None."""
        plain = asdict(self) | {
            "dims": list(self.dims),
            "sequences": [
                {"new_tokens": new_tokens, "context_chunks": list(chunks)} for new_tokens, chunks in self.sequences
            ],
            "ok": self.ok,
        }
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in plain.items()}


@dataclass(frozen=True)
class _Keys:
    """The keys and values of one operation: a context chunk, or the new tokens."""

    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    cu_seqlens: Tensor


def run_chunked_prefill(
    decision: Decision,
    *,
    num_heads: int,
    seed: int = 0,
    sequences: Sequence[SequenceLengths] | None = None,
    device: torch.device | str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> JobResult:
    """Loads the chosen kernel, runs one layer of a ragged chunked prefill and compares it with full attention.

    Args:
        decision: what ``select`` answered.
        num_heads: heads on this rank.
        seed: of the random inputs.
        sequences: the batch, all with equally many chunks; None takes one that suits the device.
        device: None means the current device of the kind that the decision is for.
        report: gets a line of progress now and then.

    Raises:
        KernelError: the kernel could not be imported or raised, or there was not enough memory.
        ValueError: an argument makes no sense.
    """
    dtype = decision.compute_dtype or decision.request.dtype
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype: the job knows what to expect of {', '.join(TOLERANCES)}, not of {dtype}")
    report("loading the kernel")
    adapter = load(decision, num_heads=num_heads, device=device)
    adapter.warm_up(report)
    if sequences is None:
        sequences = CUDA_SEQUENCES if adapter.device.type == "cuda" else CPU_SEQUENCES
    _check_sequences(sequences)
    new_tokens = sum(sequence.new_tokens for sequence in sequences)
    context_tokens = sum(sum(sequence.context_chunks) for sequence in sequences)
    report(f"running {len(sequences)} sequences: {new_tokens} new tokens, {context_tokens} tokens of context")
    try:
        error, lse_error, seconds = _run_and_compare(adapter, sequences, seed, report)
    except KernelError:
        raise
    except RuntimeError as cause:  # torch has no narrower class for a host whose memory is used up
        raise adapter.error("could not finish the main job", cause) from cause
    return JobResult(
        backend=adapter.candidate.backend,
        kernel=adapter.candidate.kernel,
        provider=adapter.provider.distribution,
        device=torch.cuda.get_device_name(adapter.device) if adapter.device.type == "cuda" else adapter.device.type,
        dims=adapter.dims,
        dtype=dtype,
        num_heads=num_heads,
        sequences=tuple(sequences),
        new_tokens=new_tokens,
        context_tokens=context_tokens,
        error=error,
        tolerance=tolerance_of(dtype, adapter.kernel.lse).out,
        lse_error=lse_error,
        lse_tolerance=tolerance_of(dtype, adapter.kernel.lse).lse,
        seconds=seconds,
        tokens_per_second=new_tokens / seconds,
    )


def _check_sequences(sequences: Sequence[SequenceLengths]) -> None:
    if not sequences or not any(sequence.new_tokens for sequence in sequences):
        raise ValueError("sequences: must have at least one new token among them")
    if len({len(sequence.context_chunks) for sequence in sequences}) != 1:
        raise ValueError("sequences: all must have equally many context chunks; use a length of 0 where one has none")
    if any(length < 0 for sequence in sequences for length in (sequence.new_tokens, *sequence.context_chunks)):
        raise ValueError("sequences: a length cannot be negative")


def _run_and_compare(
    adapter: PrefillAdapter, sequences: Sequence[SequenceLengths], seed: int, report: Callable[[str], None]
) -> tuple[float, float, float]:
    """Relative error of out, largest error of the LSE, seconds a layer."""
    generator = torch.Generator(adapter.device).manual_seed(seed)
    new_lengths = [sequence.new_tokens for sequence in sequences]
    q = _random(adapter, (sum(new_lengths), adapter.num_heads, adapter.dims.qk_head_dim), generator)
    chunks = [
        _random_keys(adapter, lengths, generator)
        for lengths in zip(*(s.context_chunks for s in sequences), strict=True)
    ]
    new = _random_keys(adapter, new_lengths, generator)

    out, lse = _one_layer(_plans(adapter, new, chunks, validate=True), q)
    report("comparing with float32 full attention")
    parts = [*chunks, new]
    lengths = [part.lengths for part in parts]
    truth, true_lse = reference_attention(
        q,
        by_sequence([part.k for part in parts], lengths),
        by_sequence([part.v for part in parts], lengths),
        new.cu_seqlens,
        torch.stack([part.cu_seqlens for part in parts]).sum(0),
        causal=True,
        softmax_scale=adapter.softmax_scale,
    )
    error = float((out.float() - truth).norm() / truth.norm())
    lse_error = float(torch.where(lse == true_lse, 0.0, (lse - true_lse).abs()).max())

    report("timing")
    plans = _plans(adapter, new, chunks, validate=False)
    _one_layer(plans, q)
    return error, lse_error, statistics.median(_seconds(lambda: _one_layer(plans, q), adapter.device) for _ in range(3))


def _plans(
    adapter: PrefillAdapter, new: _Keys, chunks: Sequence[_Keys], *, validate: bool
) -> list[tuple[PrefillPlan, _Keys]]:
    """Context first, new tokens last: the order in which a cache is read."""
    longest = max(new.lengths)
    return [
        (
            adapter.plan(
                new.cu_seqlens, keys.cu_seqlens, longest, max(keys.lengths), causal=keys is new, validate=validate
            ),
            keys,
        )
        for keys in (*chunks, new)
    ]


def _one_layer(plans: Sequence[tuple[PrefillPlan, _Keys]], q: Tensor) -> tuple[Tensor, Tensor]:
    partial = [plan.run(q, keys.k, keys.v, return_lse=True) for plan, keys in plans]
    return reduce(lambda a, b: merge_attention_states(*a, *b), partial)


def _random(adapter: PrefillAdapter, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=adapter.device).to(adapter.dtype)


def _random_keys(adapter: PrefillAdapter, lengths: Sequence[int], generator: torch.Generator) -> _Keys:
    """As kv_b_proj and the rope cache give them: k = [k_nope, k_pe of all heads alike], v = the rest of the output."""
    tokens, heads, dims = sum(lengths), adapter.num_heads, adapter.dims
    kv = _random(adapter, (tokens, heads, dims.qk_nope_head_dim + dims.v_head_dim), generator)
    k_pe = _random(adapter, (tokens, 1, dims.qk_rope_head_dim), generator)
    k_nope, v = kv[..., : dims.qk_nope_head_dim], kv[..., dims.qk_nope_head_dim :]
    k = torch.cat([k_nope, k_pe.expand(-1, heads, -1)], dim=-1)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=adapter.device)
    return _Keys(k, v, tuple(lengths), cu_seqlens)


def by_sequence(tensors: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> Tensor:
    """Ragged tensors joined sequence by sequence: all parts of the first one, then of the second ..."""
    split = [torch.split(tensor, list(part)) for tensor, part in zip(tensors, lengths, strict=True)]
    return torch.cat([piece for pieces in zip(*split, strict=True) for piece in pieces])


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    call()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
