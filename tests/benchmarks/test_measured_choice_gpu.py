"""On a GPU: the kernel that ``load_measured`` takes for each batch against FA3, vLLM's way on Hopper, call by call in turn.

pytest -m gpu tests/benchmarks/test_measured_choice_gpu.py

The profile was taken in another process, so this says what its choices are worth and not what it says of itself.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from mla_prefill import Environment, Request, load, load_matrix, load_measured, select

torch = pytest.importorskip("torch", reason="adapters compute with PyTorch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SECONDS, MOST_CALLS = 0.15, 60


def test_each_batch_by_its_fastest_kernel(report: Callable[..., None]) -> None:
    """Design: 1.2 times FA3 in the geometric mean, nowhere below 0.98. All dims of the profile that FA3 takes.

    Where FA3 itself is taken, the two times are of the same calls: how far they are apart is what a reading is worth.
    """
    from mla_prefill.backends import bench, graphs

    matrix, here = load_matrix(os.environ.get("MLA_PREFILL_MATRIX")), Environment.detect()
    profile = next((p for p in matrix.profiles if p.gpu == here.device), None)
    if profile is None:
        pytest.skip(f"no timing profile of {here.device}")
    ratios, times = [], []
    for dims in dict.fromkeys(reading.dims for reading in profile.readings if reading.kernel == "fa3"):
        for heads in bench.CUDA_GRID.heads:
            asked = Request(dims, needs=["lse"], backend="FLASH_ATTN", policy="measured")
            measured = load_measured(select(asked, here, matrix), num_heads=heads)
            fa3 = load(select(Request(dims, needs=["lse"], backend="fa3"), here, matrix), num_heads=heads)
            for lengths in bench.CUDA_GRID.lengths:
                with torch.inference_mode():
                    inputs = bench._Inputs(dims, lengths, heads, torch.device("cuda"))
                    taken, over = in_turn(inputs, measured, fa3, graphs.event_us)
                times.append(taken)
                ratios.append((over / taken, measured.adapter_for(list(lengths)).kernel.name, dims, lengths, heads))
                print(f"{bench.shape_text(dims, lengths, heads)}: {ratios[-1][1]} {taken:.1f} us, fa3 {over:.1f} us")
    others = [ratio for ratio in ratios if ratio[1] != "fa3"]
    itself = [ratio for ratio, kernel, *_ in ratios if kernel == "fa3"] or [1.0]
    mean = bench.geometric_mean([1.0 if kernel == "fa3" else ratio for ratio, kernel, *_ in ratios])
    worst, kernel, *shape = min(others, key=lambda r: r[0])
    note = f"{mean:.3f} times as fast as fa3 in the geometric mean of {len(ratios)} shapes; at worst {worst:.3f}, with "
    note += f"{kernel} for {bench.shape_text(*shape)}; fa3 against itself reads {min(itself):.3f} to {max(itself):.3f}"
    print(note)
    report("each batch by its fastest kernel", bench.geometric_mean(times) / 1e6, None, note)


def in_turn(inputs: Any, measured: Any, fa3: Any, event_us: Callable[[Callable[[], object]], float]) -> list[float]:
    """Median microseconds of an eager call of each, on an idle device; which one is first changes with every turn."""
    calls: list[Callable[[], object]] = []
    for prefill in (measured, fa3):
        host, device, longest = inputs.cu_seqlens_cpu, inputs.cu_seqlens, inputs.longest
        copies = {"cu_seqlens_q_cpu": host, "cu_seqlens_k_cpu": host}
        plan = prefill.plan(device, device, longest, longest, causal=True, **copies)
        calls.append(lambda plan=plan: plan.run(inputs.q, inputs.k, inputs.v, return_lse=True))
    for call in (*calls, *calls, *calls):
        call()
    once = max(map(event_us, calls))
    times: list[list[float]] = [[] for _ in calls]
    turn = list(zip(calls, times, strict=True))
    for _ in range(int(min(MOST_CALLS, max(6, SECONDS * 1e6 / once)))):
        for call, taken in turn:
            taken.append(event_us(call))
        turn.reverse()
    return [statistics.median(taken) for taken in times]
