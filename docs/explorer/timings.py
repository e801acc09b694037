"""Timing profiles for the explorer: the speeds, and what ``policy="measured"`` makes of them.

The measured order hangs on which of the timed kernels are eligible, so the engine is asked for every set of them. In
almost all questions a set comes in the order of the full one, with the same note; the others are exported one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from itertools import chain, combinations
from typing import Any

from mla_prefill import BatchShape, Environment, Matrix, MLADimensions, Overrides, Request
from mla_prefill.capabilities import versions
from mla_prefill.capabilities.model import DTYPES
from mla_prefill.capabilities.profiles import Profile
from mla_prefill.selector.decision import Decision
from mla_prefill.selector.engine import decide
from mla_prefill.selector.measured import no_profile, same_gpu

DEFAULT_ORDER = "policy measured: the default order, because "
_TIMED_WITH = "; timed with "


def devices(matrix: Matrix) -> dict[str, list[Any]]:
    """arch -> [why none applies where no GPU is named, the same where one is, GPU -> the profiles that are of it]."""
    found = {}
    for arch in matrix.architectures.values():
        of = {
            product: [i for i, p in enumerate(matrix.profiles) if p.arch == arch.id and same_gpu(p.gpu, product)]
            for product in (None, *arch.products)
        }
        unnamed = no_profile(matrix, Environment(arch.id), arch.id)
        named = no_profile(matrix, Environment(arch.id, device="{device}"), arch.id)
        found[arch.id] = [unnamed, named, {product or "": profiles for product, profiles in of.items() if profiles}]
    return found


class Timings:
    """One profile, asked through the engine."""

    def __init__(self, matrix: Matrix, profile: Profile, packages: Mapping[str, Iterable[str]]) -> None:
        self.matrix, self.profile, self.packages = copy(matrix), profile, packages
        self.matrix.profiles = (profile,)  # else a newer profile of the same GPU would answer
        self._notes: dict[str, int] = {}
        self.dims = list(dict.fromkeys(reading.dims for reading in profile.readings))

    def data(self) -> dict[str, Any]:
        p = self.profile
        orders = {str(d): dict(self._orders(d)) for d in self.dims}
        return {
            "label": p.label, "gpu": p.gpu, "arch": p.arch, "dtype": p.dtype, "date": p.date,
            "packages": {of: p.packages.get(of) for of in dict.fromkeys(p.providers.values())},
            "providers": dict(p.providers),
            "times": self._times(),
            "timed": {str(d): [self._timed(d, False), self._timed(d, True)] for d in self.dims},
            "orders": orders,
            "notes": list(self._notes),
            "mismatches": {kernel: dict(self._mismatches(kernel)) for kernel in p.providers},
            "other_dtypes": {dtype: self._other_dtype(dtype) for dtype in DTYPES if dtype != p.dtype},
            "no_times": [self._no_times(False), self._no_times(True)],
        }  # fmt: skip

    def _times(self) -> dict[str, dict[str, dict[str, list[float | None]]]]:
        """TFLOP/s, eager and in a graph, by dims, shape and kernel."""
        times: dict[str, dict[str, dict[str, list[float | None]]]] = {}
        for reading in self.profile.readings:
            d, flops = reading.dims, sum(n * n for n in reading.lengths) * reading.heads / 1e6
            flops *= d.qk_head_dim + d.v_head_dim
            alike = len(set(reading.lengths)) == 1
            length = f"x{reading.lengths[0]}" if alike else f" mixed to {max(reading.lengths)}"
            shape = f"{len(reading.lengths)}{length}, {reading.heads} heads"
            speed = [round(flops / us, 1) if us else None for us in (reading.eager_us, reading.graph_us)]
            times.setdefault(str(d), {}).setdefault(shape, {})[reading.kernel] = speed
        return times

    def _timed(self, dims: MLADimensions, graph: bool) -> list[str]:
        return sorted({kernel for by_kernel in self.profile.times(dims, graph).values() for kernel in by_kernel})

    def _orders(self, dims: MLADimensions) -> Iterable[tuple[str, list[Any]]]:
        """shape as people write it -> [kernels, best first; the note's number; {some of the kernels: both for these}],
        the last for those whose order is not that of the full set, or that are judged by another shape.
        """
        shapes = [BatchShape(*shape, graph) for graph in (False, True) for shape in self.profile.times(dims, graph)]
        for shape in (None, *shapes):
            timed = self._timed(dims, shape is not None and shape.graph)
            best, note = self._order(dims, shape, timed)
            differing = {}
            for some in chain.from_iterable(combinations(timed, n) for n in range(1, len(timed))):
                order = self._order(dims, shape, some)
                if order[0] and order != ([kernel for kernel in best if kernel in order[0]], note):
                    differing[" ".join(sorted(order[0]))] = order
            yield _written(shape), [best, note, differing]

    def _order(self, dims: MLADimensions, shape: BatchShape | None, kernels: Iterable[str]) -> tuple[list[str], int]:
        """What the engine makes of these kernels alone: (those that are eligible, best first; its note's number)."""
        decision = self._ask(dims, kernels, shape=shape)
        order = [verdict.candidate.kernel for verdict in decision.verdicts if verdict.verdict != "rejected"]
        note = (*decision.notes, "")[0].partition(_TIMED_WITH)[0]
        return order, self._notes.setdefault(note, len(self._notes))

    def _mismatches(self, kernel: str) -> Iterable[tuple[str, dict[str, str | None]]]:
        """package -> version -> why the times of this kernel do not count with it."""
        for provider in self.matrix.kernels[kernel].providers:
            name = versions.canonical(provider.distribution)
            found = {version: self._against(kernel, {name: version}) for version in self.packages[name]}
            yield name, {version: why for version, why in found.items() if why}

    def _against(self, kernel: str, installed: dict[str, str]) -> str | None:
        answers = (self._ask(dims, [kernel], installed=installed) for dims in self.dims)
        return next((self._why(a) for a in answers if a.chosen and kernel in self._timed(a.request.dims, False)), None)

    def _other_dtype(self, dtype: str) -> str | None:
        answers = (self._ask(dims, self.matrix.kernels, dtype=dtype) for dims in self.dims)
        return next((self._why(answer) for answer in answers if answer.chosen), None)

    def _no_times(self, graph: bool) -> str | None:
        """What is said where none of the eligible kernels was timed."""
        shape = BatchShape(1, 1, 1, graph)
        for dims in self.dims:
            untimed = set(self.matrix.kernels) - set(self._timed(dims, graph))
            answer = self._ask(dims, untimed, shape=shape)
            if answer.chosen:
                return str(self._why(answer)).replace(str(dims), "{dims}")
        return None

    def _why(self, decision: Decision) -> str | None:
        """What speaks against this profile; None where it counts."""
        reasons = decision.notes[-1].removeprefix(DEFAULT_ORDER)
        if reasons == decision.notes[-1]:
            return None
        own = (part for part in reasons.split("; ") if part.startswith(self.profile.label))
        return next(own).removeprefix(f"{self.profile.label} ")

    def _ask(
        self,
        dims: MLADimensions,
        kernels: Iterable[str],
        dtype: str | None = None,
        installed: dict[str, str] | None = None,
        shape: BatchShape | None = None,
    ) -> Decision:
        alone = Overrides(disable=tuple(self.matrix.kernels.keys() - set(kernels)))
        here = Environment(self.profile.arch, installed, None, alone, self.profile.gpu)
        request = Request(dims, dtype or self.profile.dtype, policy="measured", shape=shape)
        return decide(request, here, self.matrix)


def _written(shape: BatchShape | None) -> str:
    """As it stands in an address: ``8x512x16``, ``8x512x16 graph``; empty for no shape."""
    if shape is None:
        return ""
    return f"{shape.sequences}x{shape.length}x{shape.heads}{' graph' if shape.graph else ''}"
