"""Timing profiles: what ``mla-prefill bench`` measured on one GPU, in ``data/measured/*.json``.

    {"schema_version": 1, "gpu": "NVIDIA H200", "arch": "sm90", "dtype": "bfloat16", "layers": 60,
     "driver": ..., "torch": ..., "packages": {"flash-attn-4": "4.0.0b36", ...}, "command": ..., "date": "2026-11-30",
     "readings": [{"dims": [128, 64, 128], "lengths": {"sequences": 8, "length": 512}, "heads": 16, "kernel": "fa4",
                   "provider": "flash-attn-4", "eager_us": 65.9, "graph_us": 43.5, "host_us": 13.1, "plan_us": 80.2}]}

``lengths`` is a list where they are mixed. All readings are causal new tokens with LSE. ``eager_us`` is one call
between two CUDA events, launch included; ``graph_us`` a call inside a replayed CUDA graph (null: cannot be captured);
``host_us`` until the call returns; ``plan_us`` what a batch costs once: planning, and what its first call costs more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities.evidence import are_versions, read_json
from mla_prefill.capabilities.model import MLADimensions

if TYPE_CHECKING:
    from mla_prefill.capabilities.source import SourceFile

#: More sequences, tokens, heads or layers are a mistake; a batch is kept as a list of its lengths.
MOST = 2**20


class Shape(NamedTuple):
    """A batch of new tokens. ``length`` is the root mean square of its sequences' lengths: attention's work goes with
    the square, so a batch of mixed lengths costs about what one of equal lengths with this number costs.
    """

    sequences: int
    length: int
    heads: int

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int) -> Shape:
        return cls(len(lengths), max(1, round(math.sqrt(sum(n * n for n in lengths) / len(lengths)))), heads)

    def distance(self, other: Shape) -> tuple[float, float]:
        """How far apart two shapes are, by logarithms: in length and in independent problems, then in heads alone.

        A head of a sequence is a problem of its own: 1x512 with 128 heads costs what 8x512 with 16 heads costs. On an
        H200, deciding each shape by its nearest other one loses 2.9 % so.
        """
        problems = math.log2(self.sequences * self.heads) - math.log2(other.sequences * other.heads)
        length = math.log2(self.length) - math.log2(other.length)
        return math.hypot(problems, length), abs(math.log2(self.heads) - math.log2(other.heads))

    def __str__(self) -> str:
        return f"{self.sequences}x{self.length}, {self.heads} heads"


class Reading(NamedTuple):
    """One kernel in one shape; microseconds."""

    dims: MLADimensions
    lengths: tuple[int, ...]
    heads: int
    kernel: str
    provider: str
    eager_us: float
    graph_us: float | None
    host_us: float
    plan_us: float

    @property
    def shape(self) -> Shape:
        return Shape.of(self.lengths, self.heads)

    def a_layer(self, layers: int, graph: bool) -> float | None:
        """Microseconds a layer, with planning spread over the layers; a graph is planned when it is captured."""
        return self.graph_us if graph else self.eager_us + self.plan_us / layers

    def to_dict(self) -> dict[str, Any]:
        alike = len(set(self.lengths)) == 1
        lengths = {"sequences": len(self.lengths), "length": self.lengths[0]} if alike else list(self.lengths)
        return {**self._asdict(), "dims": list(self.dims), "lengths": lengths}


class Profile:
    """One profile, read. ``label`` says which file it is."""

    def __init__(self, label: str, record: Mapping[str, Any]) -> None:
        self.label = label
        self.gpu: str | None = None if record["gpu"] is None else _text(record, "gpu")
        self.arch, self.dtype, self.date = (_text(record, name) for name in ("arch", "dtype", "date"))
        self.layers = _count(record["layers"], "layers")
        self.packages: Mapping[str, str] = record["packages"]
        if not are_versions(self.packages):
            raise ValueError("packages must map names to versions, both as text")
        self.readings = tuple(map(_reading, record["readings"]))

    @cached_property
    def providers(self) -> Mapping[str, str]:
        """kernel -> the distribution whose build was timed."""
        return {reading.kernel: reading.provider for reading in self.readings}

    @cached_property
    def _times(self) -> dict[tuple[MLADimensions, bool], dict[Shape, dict[str, float]]]:
        table: dict[tuple[MLADimensions, bool], dict[Shape, dict[str, float]]] = {}
        for reading in self.readings:
            for graph in (False, True):
                time = reading.a_layer(self.layers, graph)
                if time is not None:
                    table.setdefault((reading.dims, graph), {}).setdefault(reading.shape, {})[reading.kernel] = time
        return table

    def times(self, dims: MLADimensions, graph: bool) -> Mapping[Shape, Mapping[str, float]]:
        """shape -> kernel -> microseconds a layer."""
        return self._times.get((dims, graph), {})


def read(label: str, raw: bytes) -> Profile:
    """A profile from the bytes of its file.

    Raises:
        ValueError: it is not one.
    """
    try:
        return Profile(label, read_json(raw))
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{label} is not a timing profile ({type(error).__name__}: {error})") from None
    except ValueError as error:
        raise ValueError(f"{label} is not a timing profile: {error}") from None


def readable(files: Iterable[SourceFile]) -> Iterator[Profile]:
    """Those of the files that are profiles; `check` reports the others."""
    for source in files:
        with suppress(ValueError):
            yield read(source.label, source.raw)


def _reading(raw: Mapping[str, Any]) -> Reading:
    lengths = raw["lengths"]
    if isinstance(lengths, dict):
        lengths = [lengths["length"]] * _count(lengths["sequences"], "sequences")
    _count(len(lengths), "the number of lengths")
    return Reading(
        dims=MLADimensions(*raw["dims"]),
        lengths=tuple(_count(length, "a length") for length in lengths),
        heads=_count(raw["heads"], "heads"),
        kernel=_text(raw, "kernel"),
        provider=_text(raw, "provider"),
        eager_us=_time(raw, "eager_us"),
        graph_us=None if raw["graph_us"] is None else _time(raw, "graph_us"),
        host_us=_time(raw, "host_us"),
        plan_us=_time(raw, "plan_us"),
    )


def _text(raw: Mapping[str, Any], name: str) -> str:
    if not isinstance(raw[name], str):
        raise ValueError(f"{name} must be text, got {str(raw[name])[:40]}")
    return str(raw[name])


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST:
        raise ValueError(f"{what} must be a whole number from 1 to {MOST}, got {str(value)[:40]}")
    return value


def _time(raw: Mapping[str, Any], name: str) -> float:
    """Microseconds: of a call above 0; of planning and of the host it may be 0."""
    time = raw[name]
    if type(time) not in (int, float) or not 0 <= time < math.inf or (time == 0 and name in ("eager_us", "graph_us")):
        raise ValueError(f"{name} of a reading of {raw['kernel']} is no time: {str(time)[:40]}")
    return float(time)
