"""On a GPU: what an adapter's ``run`` costs the host over the lowest entry point of its kernel, call by call in turn.

pytest -m gpu tests/benchmarks/test_host_cost_gpu.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from mla_prefill import Environment, MLADimensions, Request, load, load_matrix
from mla_prefill.selector import decide

torch = pytest.importorskip("torch", reason="adapters compute with PyTorch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOKENS, HEADS, DIMS = 128, 16, MLADimensions(64, 64, 128)
CALLS = 400
Call = Callable[[Any, Any, Any], Any]


def raw_fa2(plan: Any) -> Call:
    op, b = torch.ops.aten._flash_attention_forward.default, plan.batch
    scale = plan.adapter.softmax_scale

    def call(q: Any, k: Any, v: Any) -> Any:
        ragged = (b.cu_seqlens_q, b.cu_seqlens_k, b.max_seqlen_q, b.max_seqlen_k)
        return op(q, k, v, *ragged, 0.0, True, False, scale=scale)

    return call


def raw_fa3(plan: Any) -> Call:
    """The registered op with every argument in its place, as the package's own function calls it."""
    op, b = torch.ops.fa3_fwd.fwd.default, plan.batch
    given = {
        "cu_seqlens_q": b.cu_seqlens_q,
        "cu_seqlens_k": b.cu_seqlens_k,
        "max_seqlen_q": b.max_seqlen_q,
        "max_seqlen_k": b.max_seqlen_k,
        "softmax_scale": plan.adapter.softmax_scale,
        "is_causal": True,
        "num_splits": 1,
    }
    after_v = tuple(given.get(a.name, a.default_value) for a in op._schema.arguments[3:])
    return lambda q, k, v: op(q, k, v, *after_v)


def raw_fa4(plan: Any) -> Call:
    """The compiled function itself, with the buffers that it needs."""
    q, k, v = tensors()
    plan.run(q, k, v, return_lse=True)
    plan.run(q, k, v, return_lse=True)
    [(function, rest, *_)] = planned_of(plan)

    def call(q: Any, k: Any, v: Any) -> Any:
        out = q.new_empty((TOKENS, HEADS, DIMS.v_head_dim))
        lse = q.new_empty((HEADS, TOKENS), dtype=torch.float32)
        function(q, k, v, out, lse, *rest)
        return out, lse

    return call


def planned_of(plan: Any) -> list[Any]:
    """The calls that a plan of FA4 repeats; empty where it fell back to the public function."""
    cells = [cell.cell_contents for cell in plan._attention.__closure__ or ()]
    return [call for cell in cells if isinstance(cell, dict) for call in cell.values() if call is not None]


def tensors() -> tuple[Any, Any, Any]:
    def randn(width: int) -> Any:
        return torch.randn(TOKENS, HEADS, width, device="cuda", dtype=torch.bfloat16)

    return randn(DIMS.qk_head_dim), randn(DIMS.qk_head_dim), randn(DIMS.qk_nope_head_dim + 128)[..., 64:]


@pytest.mark.parametrize(("kernel", "raw"), [("fa2", raw_fa2), ("fa3", raw_fa3), ("fa4", raw_fa4)])
def test_host_cost(kernel: str, raw: Callable[[Any], Call], report: Callable[..., None]) -> None:
    """3 us over the raw op is the target."""
    matrix, environment = load_matrix(), Environment.detect()
    decision = decide(Request(DIMS, backend=kernel), environment, matrix)
    if decision.chosen is None:
        pytest.skip(f"{kernel} is not eligible here: {decision.one_line()}")
    with torch.inference_mode():
        adapter = load(decision, num_heads=HEADS, device="cuda")
        cu_seqlens = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
        plan = adapter.plan(cu_seqlens, cu_seqlens, TOKENS, TOKENS, causal=True)
        direct, (q, k, v) = raw(plan), tensors()
        costs = in_turn(lambda: direct(q, k, v), lambda: plan.run(q, k, v, return_lse=True))
    for name, seconds in zip(("raw entry point", "adapter"), costs, strict=True):
        report(f"{kernel}, {name}, host", seconds)
    report(f"{kernel}, adapter over the raw entry point", costs[1] - costs[0], 3e-6)


def in_turn(*calls: Callable[[], Any]) -> list[float]:
    """Median seconds until each call returns, on an idle device."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS):
        for call, times in zip(calls, taken, strict=True):
            torch.cuda.synchronize()
            before = time.perf_counter()
            call()
            times.append(time.perf_counter() - before)
    return [statistics.median(times) for times in taken]
