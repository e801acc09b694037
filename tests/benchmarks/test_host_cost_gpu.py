"""On a GPU: what an adapter's ``run`` costs the host over the lowest entry point of its kernel, call by call in turn.

pytest -m gpu tests/benchmarks/test_host_cost_gpu.py
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from mla_prefill import Environment, MLADimensions, Request, load, load_matrix
from mla_prefill.selector import decide

torch = pytest.importorskip("torch", reason="adapters compute with PyTorch")
cudnn = pytest.importorskip("mla_prefill.backends.cudnn")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

HEADS, DIMS = 16, MLADimensions(64, 64, 128)
CALLS = 400
Call = Callable[[Any, Any, Any], Any]


def raw_fa2(plan: Any, return_lse: bool) -> Call:
    op, b = torch.ops.aten._flash_attention_forward.default, plan.batch
    scale = plan.adapter.softmax_scale

    def call(q: Any, k: Any, v: Any) -> Any:
        ragged = (b.cu_seqlens_q, b.cu_seqlens_k, b.max_seqlen_q, b.max_seqlen_k)
        return op(q, k, v, *ragged, 0.0, True, False, scale=scale)

    return call


def raw_fa3(plan: Any, return_lse: bool) -> Call:
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


def raw_fa4(plan: Any, return_lse: bool) -> Call:
    """The compiled function itself, with the buffers that it needs."""
    q, k, v = tensors(plan)
    plan.run(q, k, v, return_lse=return_lse)
    [known] = inside(plan._attention, dict)
    [(function, rest, out_shape, lse_shape)] = known.values()

    def call(q: Any, k: Any, v: Any) -> Any:
        out = q.new_empty(out_shape)
        lse = q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None
        function(q, k, v, out, lse, *rest)
        return out, lse

    return call


def raw_flashinfer(plan: Any, return_lse: bool) -> Call:
    """The wrapper's ``run``, asked for the LSE as the adapter asks."""
    [run] = inside(plan._attention, functools.partial)
    return lambda q, k, v: run.func(q, k, v, return_lse=return_lse, **run.keywords)


def raw_cudnn(plan: Any, return_lse: bool) -> Call:
    """The graph's ``execute``, with the buffers that it needs."""
    q, k, v = tensors(plan)
    plan.run(q, k, v, return_lse=return_lse)
    [known] = inside(plan._attention, dict)
    [bound] = known.values()
    handle = plan.adapter._handle()

    def call(q: Any, k: Any, v: Any) -> Any:
        out = q.new_empty(bound.out)
        lse = (q.new_empty(bound.lse, dtype=torch.float32),) if return_lse else ()
        bound.execute((q, k, v, out, *lse, *bound.ragged), q.new_empty(bound.workspace, dtype=torch.uint8), handle)
        return out, *lse

    return call


def raw_cudnn_and_copy(plan: Any, return_lse: bool) -> Call:
    """The same, and the launch that makes an LSE of a power of two of tokens one of as many as there are."""
    direct, tokens = raw_cudnn(plan, return_lse), plan.batch.starts_q[-1]
    return lambda q, k, v: torch.narrow_copy(direct(q, k, v)[1], 1, 0, tokens)


def raw_cudnn_op(plan: Any, return_lse: bool) -> Call:
    """The frontend's own PyTorch op, which the adapter does not call."""
    importlib.import_module("cudnn.sdpa.fwd.torch_op")
    op, b = torch.ops.cudnn.sdpa_fwd.default, plan.batch
    ragged = (b.cu_seqlens_q, b.cu_seqlens_k, b.max_seqlen_q, b.max_seqlen_k)
    after_v = (plan.adapter.softmax_scale, True, True, -1, -1, None, None, None, *ragged, return_lse)
    return lambda q, k, v: op(q, k, v, *after_v)


def raw_torch_efficient(plan: Any, return_lse: bool) -> Call:
    op, b = torch.ops.aten._efficient_attention_forward.default, plan.batch
    after_v = (None, b.cu_seqlens_q, b.cu_seqlens_k, b.max_seqlen_q, b.max_seqlen_k, 0.0, 2, return_lse)
    scale = plan.adapter.softmax_scale
    return lambda q, k, v: op(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), *after_v, scale=scale)


def raw_torch_efficient_and_gather(plan: Any, return_lse: bool) -> Call:
    """The same, and the launch that makes (heads, tokens) of the padded LSE."""
    direct = raw_torch_efficient(plan, return_lse)
    _, heads, padded = direct(*tensors(plan))[1].shape
    rows = plan.batch.sequence_of_row * (heads * padded) + plan.batch.position_of_row
    index = rows.expand(heads, -1)

    def call(q: Any, k: Any, v: Any) -> Any:
        lse = direct(q, k, v)[1]
        return lse.as_strided((heads, lse.numel() - (heads - 1) * padded), (padded, 1)).gather(1, index)

    return call


def inside(function: Any, kind: type) -> list[Any]:
    """What a plan's call and the calls inside it hold of a type."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    found = [content for content in cells if isinstance(content, kind)]
    return found + [deeper for cell in cells if cell is not function for deeper in inside(cell, kind)]


def tensors(plan: Any) -> tuple[Any, Any, Any]:
    tokens = plan.batch.starts_q[-1]

    def randn(width: int) -> Any:
        return torch.randn(tokens, HEADS, width, device="cuda", dtype=torch.bfloat16)

    return randn(DIMS.qk_head_dim), randn(DIMS.qk_head_dim), randn(DIMS.qk_nope_head_dim + 128)[..., 64:]


RAW = [
    ("fa2", raw_fa2),
    ("fa3", raw_fa3),
    ("fa4", raw_fa4),
    ("cudnn", raw_cudnn),
    ("cudnn", raw_cudnn_op),
    ("torch_efficient", raw_torch_efficient),
    *[(f"flashinfer_{name}", raw_flashinfer) for name in ("fa2", "fa3", "cudnn")],
]


ONE, RAGGED = [128], [100, 50]
CASES = [
    *[(kernel, raw, lengths, lse) for kernel, raw in RAW for lengths in (ONE, RAGGED) for lse in (False, True)],
    ("cudnn", raw_cudnn_and_copy, RAGGED, True),
    ("torch_efficient", raw_torch_efficient_and_gather, RAGGED, True),
]


@pytest.mark.parametrize(
    ("kernel", "raw", "lengths", "return_lse"), CASES, ids=lambda it: getattr(it, "__name__", str(it))
)
def test_host_cost(
    kernel: str, raw: Callable[..., Call], lengths: list[int], return_lse: bool, report: Callable[..., None]
) -> None:
    """3 us is the target over what gives the same: where an LSE needs a launch more, over the op and that launch."""
    matrix, environment = load_matrix(), Environment.detect()
    decision = decide(Request(DIMS, backend=kernel), environment, matrix)
    if decision.chosen is None:
        pytest.skip(f"{kernel} is not eligible here: {decision.one_line()}")
    with torch.inference_mode():
        adapter = load(decision, num_heads=HEADS, device="cuda")
        starts = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device="cuda")
        plan = adapter.plan(cu_seqlens, cu_seqlens, max(lengths), max(lengths), causal=True)
        q, k, v = tensors(plan)
        plan.run(q, k, v, return_lse=return_lse)
        direct = raw(plan, return_lse)
        costs = in_turn(lambda: direct(q, k, v), lambda: plan.run(q, k, v, return_lse=return_lse))
    what = f"{raw.__name__.removeprefix('raw_')} {lengths}{', LSE' if return_lse else ''}"
    for name, seconds in zip(("raw", "adapter"), costs, strict=True):
        report(f"{kernel} {what}, {name}", seconds)
    report(f"{kernel} {what}, adapter over raw", costs[1] - costs[0], 3e-6)


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
