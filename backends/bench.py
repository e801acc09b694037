"""``mla-prefill bench``: times every eligible kernel over dims and shapes, and says what each choice loses.

Causal new tokens with LSE in bfloat16: one eager call between two CUDA events (launch cost included, as a layer pays
it), a call inside a replayed CUDA graph (device time alone), the host's part, and what a batch costs once. The result
is a profile (``capabilities/profiles.py``), which ``policy="measured"`` chooses by.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from mla_prefill.backends import KernelError, graphs, load, records
from mla_prefill.backends.base import PrefillAdapter, PrefillPlan
from mla_prefill.capabilities import tables
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.capabilities.profiles import Profile, Reading, Shape
from mla_prefill.selector import measured
from mla_prefill.selector.decision import Decision
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import BatchShape, Request
from torch import Tensor

DTYPE = "bfloat16"
LAYERS = 60
Report = Callable[[str], None]


class Grid(NamedTuple):
    """The shapes to time, and for how long one kind of reading repeats at most."""

    lengths: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]
    seconds: float


#: As serving's batches are: mostly short prompts, one long.
MIXED = (1, 17, 64, 130, 257, 300, 512, 777, 1024, 1500, 2048, 4096)
CUDA_GRID = Grid(
    ((128,), (512,), (2048,), (8192,), (32768,), (512,) * 8, (128,) * 64, MIXED), heads=(16, 128), seconds=0.15
)
CUDA_QUICK = Grid(((128,), (2048,), (512,) * 8), heads=(16,), seconds=0.04)
CPU_GRID = Grid(((16,), (128,), (32,) * 4, (1, 17, 64, 130)), heads=(4,), seconds=0.1)
CPU_QUICK = Grid(((16,), (32,) * 4), heads=(2,), seconds=0.02)


def grid_for(on_gpu: bool, quick: bool) -> Grid:
    if on_gpu:
        return CUDA_QUICK if quick else CUDA_GRID
    return CPU_QUICK if quick else CPU_GRID


def today() -> str:
    return datetime.date.today().isoformat()


def command(quick: bool, layers: int, kernels: Sequence[str], dims: Sequence[MLADimensions]) -> str:
    """How to run the same again."""
    words = ["mla-prefill bench", *(["--quick"] if quick else []), f"--layers {layers}"]
    words += [f"--kernel {kernel}" for kernel in kernels]
    return " ".join([*words, *(f"--dims {','.join(map(str, d))}" for d in dims)])


class Result(NamedTuple):
    """The profile as plain data, and what could not be timed, with the reason."""

    profile: dict[str, Any]
    skipped: list[str]


class Bench:
    """One run of the bench.

    Args:
        kernels: only these, also those that are used on request only; empty: every eligible one.
        dims: only these; empty: those of all blocks.
        budget_s: seconds for everything; each dims gets an equal share of what is left. None: no limit.
        save: gets the profile after each dims, so that a crash costs only the rest.
    """

    def __init__(
        self,
        matrix: Matrix,
        environment: Environment,
        grid: Grid,
        *,
        kernels: Sequence[str] = (),
        dims: Sequence[MLADimensions] = (),
        layers: int = LAYERS,
        budget_s: float | None = None,
        command: str = "mla-prefill bench",
        report: Report = lambda text: None,
        save: Callable[[dict[str, Any]], None] = lambda profile: None,
    ) -> None:
        self.matrix, self.environment, self.grid, self.kernels = matrix, environment, grid, kernels
        self.dims = list(dims) or list(dict.fromkeys(block.dims for block in matrix.blocks.values()))
        self.layers, self.command, self.report, self.save = layers, command, report, save
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self.arch = matrix.arch(environment.arch)
        self.readings: list[Reading] = []
        self.skipped: list[str] = []

    def run(self) -> Result:
        """Times everything; what fails or finds no time is in ``skipped``."""
        for index, dims in enumerate(self.dims):
            share = None
            if self._deadline is not None:
                now = time.monotonic()
                share = now + (self._deadline - now) / (len(self.dims) - index)
            with torch.inference_mode():
                self._time_dims(dims, share)
            if self.readings:
                self.save(self.profile())
        return Result(self.profile(), self.skipped)

    def profile(self) -> dict[str, Any]:
        device = self._device
        return {
            "schema_version": 1,
            "date": today(),
            **records.machine(device),
            "arch": self.arch,
            "dtype": DTYPE,
            "layers": self.layers,
            "packages": records.packages(self.matrix),
            "command": self.command,
            "readings": [reading.to_dict() for reading in self.readings],
        }

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu" if self.matrix.architectures[self.arch].vendor == "cpu" else "cuda")

    def _time_dims(self, dims: MLADimensions, deadline: float | None) -> None:
        shapes = [(lengths, heads) for heads in self.grid.heads for lengths in self.grid.lengths]
        decisions = list(self._candidates(dims))
        if not decisions:
            self.skipped.append(f"{dims}: no kernel is eligible")
        for index, (lengths, heads) in enumerate(shapes):
            name = f"{dims} {lengths_text(lengths)}, {heads} heads"
            seconds = self.grid.seconds
            if deadline is not None:
                left = (deadline - time.monotonic()) / (len(shapes) - index)
                seconds = min(seconds, left / (3 * max(1, len(decisions))))
                if left <= 0:
                    self.skipped.append(f"{name}: the time was used up (--budget)")
                    continue
            for decision in decisions:
                self._time_kernel(decision, lengths, heads, seconds, name)

    def _candidates(self, dims: MLADimensions) -> Iterator[Decision]:
        """A decision for each kernel to be timed, in the order of the default policy."""
        for kernel in self.kernels or (None,):
            request = Request(dims, DTYPE, backend=kernel, needs=("lse",))
            decision = decide(request, self.environment, self.matrix)
            for verdict in decision.verdicts:
                if verdict.verdict != "rejected":
                    yield dataclasses.replace(decision, chosen=verdict.candidate)

    def _time_kernel(self, decision: Decision, lengths: tuple[int, ...], heads: int, seconds: float, name: str) -> None:
        kernel = decision.kernel.name
        try:
            adapter = load(decision, num_heads=heads)
            reading = time_reading(adapter, lengths, seconds)
        except (KernelError, RuntimeError) as error:  # RuntimeError: out of memory, and what CUDA says later
            self.skipped.append(f"{name}, {kernel}: {records.one_line(error)}")
            self.report(f"skipped {self.skipped[-1]}")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return
        self.readings.append(reading)
        graph = "" if reading.graph_us is None else f", in a graph {reading.graph_us:.1f}"
        speed = tflops(reading.dims, lengths, heads) / (reading.eager_us * 1e-6)
        self.report(f"{name}, {kernel}: {reading.eager_us:.1f} us{graph} ({speed:.3g} TFLOP/s)")


# ---- one reading ------------------------------------------------------------------------------------------------


def time_reading(adapter: PrefillAdapter, lengths: Sequence[int], seconds: float) -> Reading:
    """All four times of one kernel in one shape, each the median of as many runs as fit into ``seconds`` (2 to 100).

    The first call, which may compile, is not timed.
    """
    batch = _Batch(adapter, lengths)
    plan = batch.plan()
    batch.call(plan)
    once = max(1e-6, _elapsed(lambda: batch.call(plan), adapter.device))
    fits = max(2, int(seconds / once))
    for _ in range(min(3, fits)):
        batch.call(plan)
    eager, host = zip(*(_one_call(batch, plan) for _ in range(min(100, fits + 1))), strict=True)
    assert adapter.candidate.provider is not None
    return Reading(
        dims=adapter.dims,
        lengths=tuple(lengths),
        heads=adapter.num_heads,
        kernel=adapter.kernel.name,
        provider=adapter.candidate.provider,
        eager_us=round(statistics.median(eager), 2),
        graph_us=_graph_us(batch, fits),
        host_us=round(statistics.median(host), 2),
        plan_us=round(_plan_us(batch, statistics.median(host), min(5, fits)), 2),
    )


class _Batch:
    """Inputs of one shape: V is a strided slice, as kv_b_proj gives it, and the lengths are known on the host too."""

    def __init__(self, adapter: PrefillAdapter, lengths: Sequence[int]) -> None:
        self.adapter, self.longest = adapter, max(lengths)
        dims, tokens = adapter.dims, sum(lengths)
        self.cu_seqlens_cpu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.cu_seqlens = self.cu_seqlens_cpu.to(adapter.device)

        def randn(width: int) -> Tensor:
            return torch.randn(tokens, adapter.num_heads, width, device=adapter.device, dtype=adapter.dtype)

        self.q, self.k = randn(dims.qk_head_dim), randn(dims.qk_head_dim)
        self.v = randn(dims.qk_nope_head_dim + dims.v_head_dim)[..., dims.qk_nope_head_dim :]

    def plan(self) -> PrefillPlan:
        host, device = self.cu_seqlens_cpu, self.cu_seqlens
        return self.adapter.plan(
            *(device, device, self.longest, self.longest),
            causal=True,
            cu_seqlens_q_cpu=host,
            cu_seqlens_k_cpu=host,
        )

    def call(self, plan: PrefillPlan) -> object:
        return plan.run(self.q, self.k, self.v, return_lse=True)


def _one_call(batch: _Batch, plan: PrefillPlan) -> tuple[float, float]:
    """(event, host) microseconds of one call on an idle device."""
    if batch.adapter.device.type != "cuda":
        elapsed = _elapsed(lambda: batch.call(plan), batch.adapter.device) * 1e6
        return elapsed, elapsed
    host = 0.0

    def call() -> None:
        nonlocal host
        before = time.perf_counter()
        batch.call(plan)
        host = time.perf_counter() - before

    return graphs.event_us(call), host * 1e6


def _graph_us(batch: _Batch, fits: int) -> float | None:
    """A call inside a replayed graph of several calls; None where the kernel sheet does not say that it can be."""
    if batch.adapter.device.type != "cuda" or "cuda_graph" not in batch.adapter.candidate.provides:
        return None
    calls = min(20, fits // 2)
    plan = batch.plan()
    graph, _ = graphs.captured(lambda: batch.call(plan), calls)
    graph.replay()
    replays = max(2, min(50, fits // calls))
    return round(statistics.median(graphs.event_us(graph.replay) / calls for _ in range(replays)), 2)


def _plan_us(batch: _Batch, host_us: float, times: int) -> float:
    """Host time of a new plan and of what its first call takes longer than the later ones."""
    measured_us = []
    for _ in range(times):
        _wait(batch.adapter.device)
        before = time.perf_counter()
        batch.call(batch.plan())
        measured_us.append((time.perf_counter() - before) * 1e6)
    _wait(batch.adapter.device)
    return max(0.0, statistics.median(measured_us) - host_us)


def _elapsed(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    before = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tflops(dims: MLADimensions, lengths: Iterable[int], heads: int) -> float:
    """10^12 floating point operations of causal attention: half of both matrix products."""
    return sum((dims.qk_head_dim + dims.v_head_dim) * heads * n * n for n in lengths) / 1e12


# ---- what a choice loses ----------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """A way to choose, what it loses against the fastest kernel (0.05 is 5 %), and over how many shapes."""

    choice: str
    graph: bool
    loss: float
    shapes: int


def as_dicts(lost: Sequence[Loss]) -> list[dict[str, Any]]:
    return [loss._asdict() for loss in lost]


Choice = Callable[[MLADimensions, Shape, Mapping[str, float]], "str | None"]


def losses(profile: Profile, matrix: Matrix, environment: Environment) -> list[Loss]:
    """Geometric mean over dims and shapes of the chosen kernel's time against the fastest one's.

    ``measured`` chooses by this very profile, so it loses nothing in its own shapes; ``measured, other shapes`` has to
    decide each shape by the nearest of the others, which is what a new batch is to a profile.
    """
    lost = []
    for graph in (False, True):
        for name, choose in _choices(profile, matrix, environment, graph).items():
            ratios = [
                times[chosen] / min(times.values())
                for dims in dict.fromkeys(reading.dims for reading in profile.readings)
                for shape, times in profile.times(dims, graph).items()
                if (chosen := choose(dims, shape, times)) and chosen in times
            ]
            if ratios:
                lost.append(Loss(name, graph, geometric_mean(ratios) - 1, len(ratios)))
    return lost


def _choices(profile: Profile, matrix: Matrix, environment: Environment, graph: bool) -> dict[str, Choice]:
    def default(dims: MLADimensions, shape: Shape, times: Mapping[str, float]) -> str | None:
        chosen = decide(Request(dims, profile.dtype, needs=("lse",)), environment, matrix).chosen
        return chosen.kernel if chosen else None

    def by_profile(dims: MLADimensions, shape: Shape, times: Mapping[str, float]) -> str | None:
        return measured.ranking(profile.times(dims, graph), list(times), BatchShape(*shape, graph))[0]

    def by_other_shapes(dims: MLADimensions, shape: Shape, times: Mapping[str, float]) -> str | None:
        others = {known: t for known, t in profile.times(dims, graph).items() if known != shape}
        there = others[measured.nearest(others, shape)] if others else {}
        return min(times.keys() & there.keys(), key=there.__getitem__, default=None)

    return {
        "default": default,
        "fixed fa3": lambda dims, shape, times: "fa3",
        "measured": by_profile,
        "measured, other shapes": by_other_shapes,
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def speedups(profile: Profile, kernel: str = "fa4", over: str = "fa3") -> list[tuple[float, MLADimensions, Shape]]:
    """How many times as fast ``kernel`` is, eager, in every shape that both were timed in; the slowest first."""
    times: dict[tuple[MLADimensions, tuple[int, ...], int], dict[str, float]] = {}
    for r in profile.readings:
        times.setdefault((r.dims, r.lengths, r.heads), {})[r.kernel] = r.eager_us
    return sorted(
        (by_kernel[over] / by_kernel[kernel], dims, Shape.of(lengths, heads))
        for (dims, lengths, heads), by_kernel in times.items()
        if kernel in by_kernel and over in by_kernel
    )


# ---- for people ---------------------------------------------------------------------------------------------------


def lengths_text(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return f"{len(lengths)} mixed to {max(lengths)}"


def table(profile: Profile) -> str:
    """A line for each dims and shape; each kernel with eager / graph microseconds and eager TFLOP/s."""
    kernels = list(dict.fromkeys(reading.kernel for reading in profile.readings))
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for r in profile.readings:
        graph = "-" if r.graph_us is None else f"{r.graph_us:.1f}"
        speed = tflops(r.dims, r.lengths, r.heads) / (r.eager_us * 1e-6)
        row = rows.setdefault((r.dims, lengths_text(r.lengths), r.heads), {})
        row[r.kernel] = f"{r.eager_us:.1f} / {graph} ({speed:.3g})"
    lines = [[*map(str, key), *(row.get(kernel, "") for kernel in kernels)] for key, row in rows.items()]
    return tables.columns(lines, ("dims", "lengths", "heads", *kernels))


def summary(profile: Profile, lost: Sequence[Loss]) -> str:
    """What each choice loses, and how FA4 stands against FA3."""
    rows = [[loss.choice, "in a graph" if loss.graph else "eager", f"{loss.loss:.2%}", loss.shapes] for loss in lost]
    lines = [tables.columns(rows, ("choice", "", "time lost", "shapes"))]
    if ratios := speedups(profile):
        slowest, dims, shape = ratios[0]
        mean = geometric_mean([ratio for ratio, *_ in ratios])
        text = f"fa4 against fa3, eager: {mean:.2f} times as fast in the geometric mean of {len(ratios)} shapes"
        lines += ["", f"{text}; at worst {slowest:.2f}, for {dims} {shape}"]
    return "\n".join(lines)
