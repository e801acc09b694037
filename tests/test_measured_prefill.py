"""``load_measured``: each batch by the kernel that a profile has as the fastest for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from mla_prefill import Environment, Matrix, MLADimensions, Request, load, load_measured
from mla_prefill.backends.base import PrefillAdapter
from mla_prefill.backends.measured import MeasuredPrefill
from mla_prefill.backends.reference import reference_attention
from mla_prefill.capabilities.profiles import Shape
from mla_prefill.selector.engine import decide

from .backend_contract import cu_seqlens

DIMS, HEADS = MLADimensions(64, 32, 64), 2
SHORT, LONG = Shape(1, 16, HEADS), Shape(1, 256, HEADS)
HERE = Environment("cpu", {"torch": torch.__version__})


@pytest.fixture
def adapter(matrix: Matrix) -> PrefillAdapter:
    return load(decide(Request(DIMS, "float32"), HERE, matrix), num_heads=HEADS)


@pytest.fixture
def prefill(adapter: PrefillAdapter, matrix: Matrix) -> MeasuredPrefill:
    """The CPU has one kernel, so it stands here under two names."""
    other = load(decide(Request(DIMS, "float32"), HERE, matrix), num_heads=HEADS)
    return MeasuredPrefill({"one": adapter, "other": other}, "one", {SHORT: "one", LONG: "other"})


@pytest.mark.parametrize(
    ("lengths", "causal", "kernel"),
    [
        ([16], True, "one"),
        ([17, 20], True, "one"),
        ([300], True, "other"),
        ([1, 1, 400], True, "other"),  # root mean square 231
        ([64] * 4, True, "one"),  # 8 problems of 64: nearer to 2 of 16 than to 2 of 256, by logarithms
        ([300], False, "one"),  # context chunks are not in a profile: the chosen kernel
        ([0], True, "one"),
    ],
)
@pytest.mark.parametrize("on_host", [True, False])
def test_a_plan_is_made_by_the_kernel_of_the_nearest_timed_shape(
    prefill: MeasuredPrefill, lengths: Sequence[int], causal: bool, kernel: str, on_host: bool
) -> None:
    starts = cu_seqlens(lengths)
    longest = max(lengths, default=0)
    copies = {"cu_seqlens_q_cpu": starts, "cu_seqlens_k_cpu": starts} if on_host else {}
    plan = prefill.plan(starts, starts, longest, longest, causal=causal, validate=True, **copies)
    assert plan.adapter is prefill.adapters[kernel]
    q, k, v = (torch.randn(sum(lengths), HEADS, width) for width in (96, 96, 64))
    expected, expected_lse = reference_attention(q, k, v, starts, starts, causal=causal, softmax_scale=96**-0.5)
    out, lse = plan.run(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_it_tells_where_and_how_many_heads(prefill: MeasuredPrefill, adapter: PrefillAdapter) -> None:
    assert (prefill.device, prefill.num_heads) == (adapter.device, adapter.num_heads)


def test_an_empty_batch_is_the_chosen_kernels(prefill: MeasuredPrefill) -> None:
    none = torch.zeros(1, dtype=torch.int32)
    assert prefill.plan(none, none, 0, 0, causal=True).adapter is prefill.adapters["one"]
    with pytest.raises(ValueError, match=r"cu_seqlens_q: must be contiguous, of shape \(sequences \+ 1,\)"):
        prefill.plan(none, none, 0, 0, causal=True, validate=True)


def test_without_a_profile_it_is_the_chosen_kernel(adapter: PrefillAdapter) -> None:
    alone = MeasuredPrefill({"one": adapter}, "one", {})
    assert alone.adapter_for([16]) is alone.adapter_for([4096]) is adapter


def test_warming_up_reaches_every_kernel(prefill: MeasuredPrefill, monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[int] = []
    monkeypatch.setattr(PrefillAdapter, "warm_up", lambda self, report=None: warm.append(id(self)))
    prefill.warm_up()
    assert warm == [id(adapter) for adapter in prefill.adapters.values()]


def test_it_is_loaded_from_a_measured_decision(matrix: Matrix) -> None:
    """No profile of a CPU is shipped, so there is one kernel; the decision says why."""
    decision = decide(Request(DIMS, "float32", policy="measured"), HERE, matrix)
    prefill = load_measured(decision, num_heads=HEADS)
    assert list(prefill.adapters) == ["torch_math"]
    assert "no timing profile" in decision.notes[0]
    with pytest.raises(ValueError, match='policy="measured"'):
        load_measured(decide(Request(DIMS, "float32"), HERE, matrix), num_heads=HEADS)
