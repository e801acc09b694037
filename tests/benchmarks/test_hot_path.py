"""What a serving engine pays in a running process: selection, lookup, and the adapter's host cost in each layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mla_prefill import Environment, Matrix, MLADimensions, Request, load, select
from mla_prefill.capabilities.load import document, gather
from mla_prefill.capabilities.source import parse
from mla_prefill.selector.engine import decide

Report = Callable[..., None]
Median = Callable[..., float]
DIMS = MLADimensions(64, 64, 128)
#: An H200 with a few kernel packages, one of them too old: every kind of reason has to be worked out.
INSTALLED = {"flash-attn": "2.5.8", "flash-attn-4": "4.0.0b36", "fa3-fwd": "0.0.3", "torch": "2.13.0"}


def test_select_again(median: Median, report: Report) -> None:
    environment = Environment("sm90", INSTALLED)
    report("select again, environment described", median(select, Request(DIMS), environment), 0.5e-6, "cached")


def test_select_again_on_this_machine(median: Median, report: Report) -> None:
    report("select again, machine detected", median(select, Request(DIMS)), 0.5e-6, "cached")


def test_decide(median: Median, report: Report, matrix: Matrix) -> None:
    environment = Environment("sm90", INSTALLED)
    assert len(decide(Request(DIMS), environment, matrix).verdicts) == len(matrix.kernels)
    report("select anew", median(decide, Request(DIMS), environment, matrix), 50e-6, "every reason of every kernel")


def test_decide_for_new_dims(median: Median, report: Report, matrix: Matrix) -> None:
    """The first question about an arch and dims also joins the two sheets for them; later ones find that done."""

    def first_question() -> None:
        matrix._cells.clear()
        decide(Request(DIMS), Environment("sm90", INSTALLED), matrix)

    report("select anew, first question about these dims", median(first_question), None, "joins the two sheets")


def test_explain(median: Median, report: Report, matrix: Matrix) -> None:
    decision = decide(Request(DIMS), Environment("sm90", {"torch": "2.13.0"}), matrix)
    assert decision.hints
    report("explain", median(decision.explain), None, f"text, with {len(decision.hints)} hints tried")


def generated(rows: int) -> Matrix:
    """The shipped matrix with ``rows`` rows of made-up dims in place of its own: one row a block, any dims run."""
    sources = gather()
    for _, source in sources.all():
        assert parse(source) == []
    content = document(sources)
    row = {"arch": ["sm90", "cpu"], "backends": ["TORCH_SDPA"], "@": "generated.yaml:1"}
    orders = [order for order in content["orders"] if "dims" not in order]
    blocks = {
        f"block_{i}": {
            "dims": {"qk_nope": 1 + i % 400, "qk_rope": 64, "v_head": 1 + i // 400},
            "allow": [row],
            "@": "generated.yaml:1",
        }
        for i in range(rows)
    }
    return Matrix({**content, "matrix": blocks, "orders": orders})


@pytest.mark.parametrize("rows", [10, 1_000, 100_000])
def test_lookup(median: Median, report: Report, rows: int) -> None:
    matrix = generated(rows)
    dims = [block.dims for block in matrix.blocks.values()][rows // 2]
    assert matrix.allowed("sm90", 2, dims) == ("TORCH_SDPA",)
    report(f"lookup in {rows:,} rows", median(matrix.lookup, "sm90", 2, dims), 0.2e-6)


def test_adapter_host_cost(report: Report) -> None:
    """``plan.run`` against the kernel call inside it, in turns, on a batch small enough that Python is all there is."""
    decision = select(Request(DIMS, "float32", backend="torch_math"), Environment("cpu", {"torch": torch.__version__}))
    adapter = load(decision, num_heads=1, device="cpu")
    starts = torch.tensor([0, 1], dtype=torch.int32)
    plan = adapter.plan(starts, starts, 1, 1, causal=True)
    q, k, v = torch.randn(1, 1, 128), torch.randn(1, 1, 128), torch.randn(1, 1, 128)
    out = torch.empty(1, 1, 128)
    through = _nanoseconds(lambda: plan.run(q, k, v, out=out, return_lse=True))
    raw = _nanoseconds(lambda: plan._attention(q, k, v, out, True))
    pairs = [(next(through), next(raw)) for _ in range(2_000)]
    more = statistics.median(a for a, _ in pairs) - statistics.median(b for _, b in pairs)
    report("adapter over the raw call", more * 1e-9, 3e-6, "TORCH_SDPA/torch_math on the CPU")


def _nanoseconds(call: Callable[[], Any]) -> Any:
    while True:
        start = time.perf_counter_ns()
        call()
        yield time.perf_counter_ns() - start
