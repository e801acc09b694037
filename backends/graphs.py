"""CUDA graphs of a kernel's calls, for ``verify`` and ``bench``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Answer = TypeVar("Answer")


def captured(call: Callable[[], Answer], calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Answer]:
    """(a graph of ``calls`` calls, the last one's results), after two calls on a side stream as PyTorch asks for."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            answer = call()
    return graph, answer


def event_us(call: Callable[[], object]) -> float:
    """Microseconds between two events around a call on an idle device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3
