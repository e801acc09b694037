"""``mla-prefill bench``: times every eligible kernel over dims and shapes, and says what each choice loses.

Causal new tokens with LSE in bfloat16: one eager call between two CUDA events (launch cost included, as a layer pays
it), a call inside a replayed CUDA graph (device time alone), the host's part, and what a batch costs once. The kernels
take turns, since a GPU's clock wanders by more than they differ. The result is a profile
(``capabilities/profiles.py``), which ``policy="measured"`` chooses by.
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
        save: gets the profile after each dims, so that a crash costs only the rest; the whole profile is the caller's
            to save.
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
                try:
                    self.save(self.profile())
                except (OSError, ValueError) as error:
                    self.report(f"not saved yet: {error}")
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
            return
        for index, (lengths, heads) in enumerate(shapes):
            seconds = self.grid.seconds
            if deadline is not None:
                left = (deadline - time.monotonic()) / (len(shapes) - index)
                seconds = min(seconds, left / (3 * len(decisions)))
                if left <= 0:
                    self.skipped.append(f"{shape_text(dims, lengths, heads)}: the time was used up (--budget)")
                    continue
            self._time_shape(decisions, lengths, heads, seconds)

    def _candidates(self, dims: MLADimensions) -> Iterator[Decision]:
        """A decision for each kernel to be timed, in the order of the default policy."""
        for kernel in self.kernels or (None,):
            request = Request(dims, DTYPE, backend=kernel, needs=("lse",))
            decision = decide(request, self.environment, self.matrix)
            for verdict in decision.verdicts:
                if verdict.verdict != "rejected":
                    yield dataclasses.replace(decision, chosen=verdict.candidate)

    def _time_shape(self, decisions: Sequence[Decision], lengths: tuple[int, ...], heads: int, seconds: float) -> None:
        """All kernels in one shape, in turns of a few calls: what clock and heat do meanwhile, they do to all."""
        dims = decisions[0].request.dims
        name = shape_text(dims, lengths, heads)
        timed: list[_Timed] = []
        try:
            inputs = _Inputs(dims, lengths, heads, self._device)
        except RuntimeError as error:  # out of memory
            self._skip(name, "every kernel", error)
            return
        for decision in decisions:
            try:
                timed.append(_Timed(load(decision, num_heads=heads), inputs, seconds))
            except (KernelError, RuntimeError) as error:  # RuntimeError: out of memory, and what CUDA says later
                self._skip(name, decision.kernel.name, error)

        def each(act: Callable[..., None], *arguments: int) -> None:
            for run in list(timed):
                try:
                    act(run, *arguments)
                except (KernelError, RuntimeError) as error:
                    timed.remove(run)
                    self._skip(name, run.kernel, error)

        for turn in range(MOST_TURNS):
            each(_Timed.time_eager, turn)
        each(_Timed.capture)
        for turn in range(MOST_REPLAYS):
            each(_Timed.time_graph, turn)
        each(_Timed.time_plan)
        for run in timed:
            reading = run.reading()
            self.readings.append(reading)
            graph = "" if reading.graph_us is None else f", in a graph {reading.graph_us:.1f}"
            speed = tflops(reading.dims, lengths, heads) / (reading.eager_us * 1e-6)
            self.report(f"{name}, {run.kernel}: {reading.eager_us:.1f} us{graph} ({speed:.3g} TFLOP/s)")

    def _skip(self, name: str, kernel: str, error: Exception) -> None:
        self.skipped.append(f"{name}, {kernel}: {records.one_line(error)}")
        self.report(f"skipped {self.skipped[-1]}")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


# ---- one kernel in one shape ------------------------------------------------------------------------------------

#: One kernel in one shape at most: turns of eager calls, calls in each (after one that finds the caches of its rivals),
#: and replays of its graph.
MOST_TURNS, CALLS, MOST_REPLAYS = 20, 5, 50


class _Inputs:
    """One shape: V is a strided slice, as kv_b_proj gives it, and the lengths are known on the host too."""

    def __init__(self, dims: MLADimensions, lengths: Sequence[int], heads: int, device: torch.device) -> None:
        self.lengths, self.longest = tuple(lengths), max(lengths)
        tokens, dtype = sum(lengths), getattr(torch, DTYPE)
        self.cu_seqlens_cpu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        self.cu_seqlens = self.cu_seqlens_cpu.to(device)

        def randn(width: int) -> Tensor:
            return torch.randn(tokens, heads, width, device=device, dtype=dtype)

        self.q, self.k = randn(dims.qk_head_dim), randn(dims.qk_head_dim)
        self.v = randn(dims.qk_nope_head_dim + dims.v_head_dim)[..., dims.qk_nope_head_dim :]


class _Timed:
    """One kernel's times in one shape, each the median of as many runs as fit into ``seconds``.

    The first call, which may compile, is made here and not timed.
    """

    def __init__(self, adapter: PrefillAdapter, inputs: _Inputs, seconds: float) -> None:
        self.adapter, self.inputs = adapter, inputs
        self.on_gpu = adapter.device.type == "cuda"
        self._plan = self.plan()
        self.call()
        once = max(1e-6, self._elapsed(self.call))
        self._fits = max(2, int(seconds / once))
        self._eager: list[float] = []
        self._host: list[float] = []
        self._graph: list[float] = []
        self._replay: Callable[[], None] | None = None
        self._graph_calls = min(20, self._fits // 2)
        self._plan_us = 0.0
        for _ in range(min(3, self._fits)):
            self.call()

    @property
    def kernel(self) -> str:
        return self.adapter.kernel.name

    def plan(self) -> PrefillPlan:
        host, device, longest = self.inputs.cu_seqlens_cpu, self.inputs.cu_seqlens, self.inputs.longest
        return self.adapter.plan(
            *(device, device, longest, longest), causal=True, cu_seqlens_q_cpu=host, cu_seqlens_k_cpu=host
        )

    def call(self) -> object:
        return self._plan.run(self.inputs.q, self.inputs.k, self.inputs.v, return_lse=True)

    def time_eager(self, turn: int) -> None:
        """A few calls on an idle device: between two events, and until they return."""
        calls = min(CALLS, self._fits)
        if turn * calls >= self._fits:
            return
        self.call()
        for _ in range(calls):
            self._time_call()

    def _time_call(self) -> None:
        if not self.on_gpu:
            self._eager.append(self._elapsed(self.call) * 1e6)
            self._host.append(self._eager[-1])
            return
        host = 0.0

        def call() -> None:
            nonlocal host
            before = time.perf_counter()
            self.call()
            host = time.perf_counter() - before

        self._eager.append(graphs.event_us(call))
        self._host.append(host * 1e6)

    def capture(self) -> None:
        """A graph of several calls, where the kernel sheet says that it can be captured."""
        if self.on_gpu and "cuda_graph" in self.adapter.candidate.provides:
            self._plan = self.plan()
            graph, _ = graphs.captured(self.call, self._graph_calls)
            graph.replay()
            self._replay = graph.replay

    def time_graph(self, turn: int) -> None:
        if self._replay is not None and turn < max(2, self._fits // self._graph_calls):
            self._graph.append(graphs.event_us(self._replay) / self._graph_calls)

    def time_plan(self) -> None:
        """Host time of a new plan and of what its first call takes longer than the later ones."""
        measured_us = []
        for _ in range(min(5, self._fits)):
            self._wait()
            before = time.perf_counter()
            self._plan = self.plan()
            self.call()
            measured_us.append((time.perf_counter() - before) * 1e6)
        self._wait()
        self._plan_us = max(0.0, statistics.median(measured_us) - statistics.median(self._host))

    def reading(self) -> Reading:
        assert self.adapter.candidate.provider is not None
        return Reading(
            dims=self.adapter.dims,
            lengths=self.inputs.lengths,
            heads=self.adapter.num_heads,
            kernel=self.kernel,
            provider=self.adapter.candidate.provider,
            eager_us=round(statistics.median(self._eager), 2),
            graph_us=round(statistics.median(self._graph), 2) if self._graph else None,
            host_us=round(statistics.median(self._host), 2),
            plan_us=round(self._plan_us, 2),
        )

    def _elapsed(self, call: Callable[[], object]) -> float:
        self._wait()
        before = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - before

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.adapter.device)


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
        device = profile.times(dims, True)
        return measured.ranking(profile.times(dims, graph), list(times), BatchShape(*shape, graph), device)[0]

    def by_other_shapes(dims: MLADimensions, shape: Shape, times: Mapping[str, float]) -> str | None:
        others = {known: t for known, t in profile.times(dims, graph).items() if known != shape}
        device = profile.times(dims, True)
        ranked = measured.ranking(others, list(times), BatchShape(*shape, graph), device) if others else []
        return next(iter(ranked), None)

    return {
        "default": default,
        "fixed fa3": lambda dims, shape, times: "fa3",
        "measured": by_profile,
        "measured, other shapes": by_other_shapes,
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def speedups(profile: Profile, kernel: str = "fa4", over: str = "fa3") -> list[tuple[float, MLADimensions, Shape]]:
    """How many times as fast ``kernel`` is in every shape that both were timed in, eager, with planning spread over the
    profile's layers; the slowest first."""
    return sorted(
        (times[over] / times[kernel], dims, shape)
        for dims in dict.fromkeys(reading.dims for reading in profile.readings)
        for shape, times in profile.times(dims, False).items()
        if kernel in times and over in times
    )


# ---- for people ---------------------------------------------------------------------------------------------------


def lengths_text(lengths: Sequence[int]) -> str:
    if len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return f"{len(lengths)} mixed to {max(lengths)}"


def shape_text(dims: MLADimensions, lengths: Sequence[int], heads: int) -> str:
    return f"{dims} {lengths_text(lengths)}, {heads} heads"


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
