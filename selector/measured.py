"""policy="measured": the order of the eligible kernels as a timing profile of this GPU has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.capabilities.profiles import Profile, Shape


def ranking(
    profile: Profile, dims: MLADimensions, kernels: Sequence[str], shape: Shape | None, graph: bool
) -> list[str]:
    """Those of ``kernels`` that the profile times for these dims, fastest first; equal ones keep their order.

    With a shape: by the nearest measured one. Without: by the geometric mean over all shapes of the time against the
    fastest kernel there, so that a kernel is not judged by which shapes it was timed in.
    """
    times = {
        measured: {kernel: time for kernel, time in by_kernel.items() if kernel in kernels}
        for measured, by_kernel in profile.times(dims, graph).items()
    }
    times = {measured: by_kernel for measured, by_kernel in times.items() if by_kernel}
    if not times:
        return []
    cost = _relative(times) if shape is None else times[nearest(times, shape)]
    return sorted((kernel for kernel in kernels if kernel in cost), key=cost.__getitem__)


def nearest(measured: Mapping[Shape, object], shape: Shape) -> Shape:
    """The closest measured shape; of two equally close ones the smaller."""
    return min(measured, key=lambda known: (known.distance(shape), known))


def _relative(times: Mapping[Shape, Mapping[str, float]]) -> dict[str, float]:
    logs: dict[str, list[float]] = {}
    for by_kernel in times.values():
        best = min(by_kernel.values())
        for kernel, time in by_kernel.items():
            logs.setdefault(kernel, []).append(math.log(time / best))
    return {kernel: math.exp(math.fsum(values) / len(values)) for kernel, values in logs.items()}
