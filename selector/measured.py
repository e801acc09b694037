"""policy="measured": the order of the eligible kernels as a timing profile of this GPU has it.

A profile counts only for the very GPU, dims, dtype and package versions that it was taken with. Where none does, the
default order stands, and a note says why.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from mla_prefill.capabilities.matrix import Matrix, fold_product
from mla_prefill.capabilities.model import Kernel, MLADimensions
from mla_prefill.capabilities.profiles import Profile, Shape
from mla_prefill.selector.decision import Decision, Verdict
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import BatchShape, Request

#: shape -> kernel -> microseconds a layer.
Times = Mapping[Shape, Mapping[str, float]]
Ordered = tuple[list[Verdict], "str | None", tuple[str, ...]]

#: Eager times within this part of the fastest one are a tie, for device time to decide: a host's part of them wanders
#: by more than kernels differ there. Choices by one H200's profile lose least in another's with it (docs/measured.md).
TIE = 0.06


def ordered(
    eligible: list[Verdict],
    request: Request,
    environment: Environment,
    arch: str,
    matrix: Matrix,
    default_source: str | None,
) -> Ordered:
    """(the eligible verdicts, best first; where that order comes from; a note about it).

    Kernels that the profile does not time for this question keep their default order behind those that it does.
    """
    if not eligible:
        return eligible, default_source, ()
    graph = request.shape is not None and request.shape.graph
    found = _applicable(eligible, request, environment, arch, matrix, graph)
    if isinstance(found, str):
        return eligible, default_source, (f"policy measured: the default order, because {found}",)
    profile, times = found
    best_first = ranking(times, _kernels(eligible), request.shape, profile.times(request.dims, True))
    places = {kernel: place for place, kernel in enumerate(best_first)}
    by_time = sorted(eligible, key=lambda verdict: places.get(verdict.candidate.kernel, len(places)))
    return by_time, profile.label, (_note(profile, times, request, environment),)


def fastest_by_shape(decision: Decision, graph: bool = False) -> dict[Shape, str]:
    """timed shape -> the fastest of the decision's eligible kernels there; empty where no profile applies.

    Args:
        graph: inside CUDA graphs, where only device time counts.
    """
    met = set(decision.request.prefers).difference(decision.unmet)  # a wish comes before speed
    eligible = [v for v in decision.verdicts if v.verdict != "rejected" and met <= v.candidate.provides]
    found = _applicable(eligible, decision.request, decision.environment, decision.arch, decision.matrix, graph)
    if not eligible or isinstance(found, str):
        return {}
    profile, times = found
    device = profile.times(decision.request.dims, True)
    return {shape: _best_first(times[shape], _kernels(eligible), device.get(shape, {}))[0] for shape in times}


def _kernels(verdicts: Iterable[Verdict]) -> list[str]:
    return [verdict.candidate.kernel for verdict in verdicts]


def _applicable(
    eligible: list[Verdict], request: Request, environment: Environment, arch: str, matrix: Matrix, graph: bool
) -> tuple[Profile, Times] | str:
    """The profile of this GPU that counts here, with its times of the eligible kernels; or why none does."""
    against = []
    for profile in matrix.profiles:
        if profile.arch != arch or not same_gpu(profile.gpu, environment.device):
            continue
        times = timed(profile, request.dims, _kernels(eligible), graph)
        why_not = _against(profile, request, times, eligible, environment, matrix, graph)
        if why_not is None:
            return profile, times
        against.append(f"{profile.label} {why_not}")
    return "; ".join(against) or no_profile(matrix, environment, arch)


def same_gpu(timed: str | None, here: str | None) -> bool:
    return timed == here if timed is None or here is None else fold_product(timed) == fold_product(here)


def no_profile(matrix: Matrix, environment: Environment, arch: str) -> str:
    timed_gpus = sorted({str(profile.gpu) for profile in matrix.profiles if profile.arch == arch})
    if environment.device is None and timed_gpus:
        return f"no GPU is named, and a profile is of one GPU ({', '.join(timed_gpus)})"
    return f"there is no timing profile of {environment.device or arch}"


def _against(
    profile: Profile,
    request: Request,
    times: Times,
    eligible: Sequence[Verdict],
    environment: Environment,
    matrix: Matrix,
    graph: bool,
) -> str | None:
    """Why a profile of this GPU does not count here; None where it does."""
    if request.dtype != profile.dtype:
        return f"was timed in {profile.dtype}"
    if not times:
        return f"has no times for {request.dims} and an eligible kernel{' in a CUDA graph' if graph else ''}"
    concerned = {kernel for by_kernel in times.values() for kernel in by_kernel}
    installed = environment.installed or {}
    for candidate in (verdict.candidate for verdict in eligible):
        if candidate.kernel not in concerned or candidate.provider is None:
            continue
        provider = profile.providers[candidate.kernel]
        if candidate.provider != provider:
            return f"timed {candidate.kernel} of {provider}, here it comes from {candidate.provider}"
        for name in (provider, *_beside(matrix.kernels[candidate.kernel], provider)):
            there, here = profile.packages.get(name), installed.get(name)
            if not _same_version(there, here) and (name == provider or None not in (there, here)):
                return f"was timed with {name} {there}, installed is {here}"
    return None


def _beside(kernel: Kernel, distribution: str) -> tuple[str, ...]:
    """What the kernel's speed hangs on beside its package, which neither need state."""
    return next((provider.beside for provider in kernel.providers if provider.distribution == distribution), ())


def _same_version(one: str | None, other: str | None) -> bool:
    """A local part (``+cu130``) names the flavour of a build."""
    return None not in (one, other) and str(one).partition("+")[0] == str(other).partition("+")[0]


def _note(profile: Profile, times: Times, request: Request, environment: Environment) -> str:
    graph = request.shape is not None and request.shape.graph
    how = "in a CUDA graph" if graph else f"eager, over {profile.layers} layers"
    if request.shape is not None and not graph:
        how += f", within {TIE:.0%} by the time in a graph"
    where = "the mean of its shapes" if request.shape is None else f"its shape {nearest(times, _shape(request.shape))}"
    note = f"policy measured: ordered by {profile.label}, {where}, {how}"
    if environment.packages is not None:
        return note
    distributions = sorted({profile.providers[kernel] for by_kernel in times.values() for kernel in by_kernel})
    return f"{note}; timed with {', '.join(f'{d} {profile.packages.get(d)}' for d in distributions)}"


def timed(profile: Profile, dims: MLADimensions, kernels: Collection[str], graph: bool) -> Times:
    """What the profile says about these kernels for these dims, eager or in a graph."""
    table = {}
    for shape, by_kernel in profile.times(dims, graph).items():
        if found := {kernel: time for kernel, time in by_kernel.items() if kernel in kernels}:
            table[shape] = found
    return table


def ranking(times: Times, kernels: Sequence[str], shape: BatchShape | None, device: Times) -> list[str]:
    """Those of ``kernels`` that were timed, fastest first; equal ones keep their order.

    With a shape: by the nearest measured one, where ``device`` (the times in a graph) decides a `TIE` for the first
    place. Without: by the geometric mean over all shapes of the time against the fastest kernel there, so that a kernel
    is not judged by which shapes it was timed in.
    """
    if shape is None:
        return _best_first(_relative(times), kernels, {})
    measured = nearest(times, _shape(shape))
    return _best_first(times[measured], kernels, device.get(measured, {}))


def _best_first(cost: Mapping[str, float], kernels: Iterable[str], device: Mapping[str, float]) -> list[str]:
    best_first = sorted((kernel for kernel in kernels if kernel in cost), key=cost.__getitem__)
    tied = [kernel for kernel in best_first if cost[kernel] <= cost[best_first[0]] * (1 + TIE)]
    if not all(kernel in device for kernel in tied):
        return best_first
    first = min(tied, key=device.__getitem__, default=None)
    return sorted(best_first, key=lambda kernel: kernel != first)


def nearest(measured: Iterable[Shape], shape: Shape) -> Shape:
    """The closest measured shape; of two equally close ones the smaller."""
    return min(measured, key=lambda known: (known.distance(shape), known))


def _shape(shape: BatchShape) -> Shape:
    return Shape(shape.sequences, shape.length, shape.heads)


def _relative(times: Times) -> dict[str, float]:
    logs: dict[str, list[float]] = {}
    for by_kernel in times.values():
        best = min(by_kernel.values())
        for kernel, time in by_kernel.items():
            logs.setdefault(kernel, []).append(math.log(time / best))
    return {kernel: math.exp(math.fsum(values) / len(values)) for kernel, values in logs.items()}
