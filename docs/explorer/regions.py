"""The plane of head widths (qk, v), cut along every line at which the kernel sheet can change its mind.

All limits of the sheet are conditions on a sum: ``a * qk + b * v`` is less than a number, or a multiple of one. Lines
cut the plane into regions, and within a region every condition has one answer. So a question about any two numbers is a
walk down a tree of conditions, and each leaf needs to be asked of the engine only once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import combinations
from math import lcm, log2
from typing import Any, NamedTuple

from mla_prefill.capabilities.model import MAX_HEAD_DIM, Limit, Width

Pair = tuple[int, int]


class Condition(NamedTuple):
    """``a * qk + b * v < n``, or with ``%``: is a multiple of n."""

    a: int
    b: int
    n: int
    kind: str = "<"

    def holds(self, qk: int, v: int) -> bool:
        total = self.a * qk + self.b * v
        return total < self.n if self.kind == "<" else total % self.n == 0


#: qk is the sum of two widths, each at most `MAX_HEAD_DIM`.
WIDEST = (2 * MAX_HEAD_DIM, MAX_HEAD_DIM)
_EDGES = (Condition(1, 0, 1), Condition(0, 1, 1), Condition(1, 0, WIDEST[0] + 1), Condition(0, 1, WIDEST[1] + 1))


def conditions(limit: Limit, known_bad: Iterable[Width], shared_memory_bytes: int | None) -> list[Condition]:
    """Everything that decides how a pair runs under this limit, and which of these defects it meets."""
    found = set()
    for lines, pad_v in ((limit.widths, limit.pad_v), (known_bad, False)):
        for line in lines:
            found |= {Condition(1, 0, line.qk.min), Condition(1, 0, line.qk.max + 1)}
            if line.v is None:
                found |= {Condition(-1, 1, 0), Condition(-1, 1, 1)}
            else:
                # A padded V is as wide as qk, which then has to lie within the bounds of V.
                axes = ((0, 1), (1, 0)) if pad_v else ((0, 1),)
                found |= {Condition(*axis, n) for axis in axes for n in (line.v.min, line.v.max + 1)}
    if limit.pad_v:
        found.add(Condition(-1, 1, 0))
    if limit.multiple_of > 1:
        found |= {Condition(*axis, limit.multiple_of, "%") for axis in ((1, 0), (0, 1))}
    if limit.shared_memory and shared_memory_bytes is not None:
        per_qk, per_v = limit.shared_memory
        found.add(Condition(per_qk, per_v, shared_memory_bytes + 1))
        if limit.pad_v:
            found.add(Condition(per_qk + per_v, 0, shared_memory_bytes + 1))
    return sorted(found)


def samples(cuts: Collection[Condition]) -> list[Pair]:
    """Pairs that lie in every region: those around each point where two lines cross, multiples and others."""
    lines = [*_EDGES, *(cut for cut in cuts if cut.kind == "<")]
    step = lcm(*(cut.n for cut in cuts if cut.kind == "%"))
    found = set()
    for one, other in combinations(lines, 2):
        if determinant := one.a * other.b - other.a * one.b:
            qk = (one.n * other.b - other.n * one.b) // determinant
            v = (one.a * other.n - other.a * one.n) // determinant
            found |= {(x, y) for x in _around(qk, step, WIDEST[0]) for y in _around(v, step, WIDEST[1])}
    return sorted(found)


def _around(n: int, step: int, most: int) -> Iterator[int]:
    multiple = n // step * step
    near = {n + d for d in (-step - 1, -step, -1, 0, 1, step, step + 1)}
    near |= {multiple + d for d in (-step, 0, step, 2 * step)}
    return (x for x in near if 1 <= x <= most)


def tree(cuts: Collection[Condition], known: Mapping[Pair, int], number: Callable[[Condition], int]) -> Any:
    """The conditions to ask, in order: nested (condition's number, where it holds, where not), or the value itself."""
    signs: dict[tuple[bool, ...], int] = {}
    for (qk, v), value in known.items():
        signature = tuple(cut.holds(qk, v) for cut in cuts)
        if signs.setdefault(signature, value) != value:
            raise ValueError(f"the conditions do not tell (qk {qk}, v {v}) from a pair with another answer")
    return _grow(list(cuts), signs, number)


def _grow(cuts: list[Condition], signs: dict[tuple[bool, ...], int], number: Callable[[Condition], int]) -> Any:
    values = set(signs.values())
    if len(values) == 1:
        return values.pop()
    splits = {i: _split(signs, i) for i in range(len(cuts))}
    best = min((i for i, sides in splits.items() if all(sides)), key=lambda i: sum(map(_disorder, splits[i])))
    holds, fails = splits[best]
    return number(cuts[best]), _grow(cuts, holds, number), _grow(cuts, fails, number)


def _split(signs: dict[tuple[bool, ...], int], i: int) -> tuple[dict[tuple[bool, ...], int], ...]:
    return tuple({s: value for s, value in signs.items() if s[i] is side} for side in (True, False))


def _disorder(signs: Mapping[Hashable, int]) -> float:
    """Bits that are left to find out, summed over the signatures."""
    counts: dict[int, int] = {}
    for value in signs.values():
        counts[value] = counts.get(value, 0) + 1
    return sum(n * log2(len(signs) / n) for n in counts.values())
