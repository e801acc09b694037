"""The exported regions of head widths, without a browser: any pair falls into the region for which the engine answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from mla_prefill import Environment, Matrix, MLADimensions, Request, load_matrix
from mla_prefill.capabilities.model import MAX_HEAD_DIM, Limit, Span, Width
from mla_prefill.selector.engine import decide

MATRIX = load_matrix()


@pytest.fixture(scope="session")
def regions(export: Any) -> Any:
    import regions

    return regions


@pytest.fixture(scope="session")
def data(export: Any, matrix: Matrix) -> Any:
    return export.Export(matrix).data()


def walk(conditions: Any, tree: Any, qk: int, v: int) -> Any:
    """What the page does."""
    while isinstance(tree, tuple):
        a, b, n, kind = conditions[tree[0]]
        total = a * qk + b * v
        tree = tree[1] if (total < n if kind == "<" else total % n == 0) else tree[2]
    return tree


def bounds(limit: Limit, smem: int | None, qk: int) -> Iterator[int]:
    """Widths of V near which something can change for this qk."""
    edges = {1, qk, qk + 1, MAX_HEAD_DIM + 1}
    for line in limit.widths:
        edges |= {line.qk.min, line.qk.max + 1} if line.v is None else {line.v.min, line.v.max + 1}
    if limit.shared_memory and smem:
        edges.add((smem - limit.shared_memory[0] * qk) // limit.shared_memory[1] + 1)
    near = {edge // 8 * 8 + d for edge in edges for d in (-8, 0, 8)} | {edge + d for edge in edges for d in (-1, 0, 1)}
    return (v for v in near if 1 <= v <= MAX_HEAD_DIM)


@pytest.mark.parametrize("kernel", MATRIX.kernels)
def test_every_qk_with_every_v_near_a_bound(kernel: str, matrix: Matrix, export: Any, regions: Any) -> None:
    """qk from 1 to 600 and around the widest, on every arch."""
    exported, sheet, conditions, seen = export.Export(matrix), matrix.kernels[kernel], export.Table(), set()
    for arch in sheet.arch:
        limit, smem = matrix.limit(kernel, arch), matrix.architectures[arch].shared_memory_bytes
        cuts, plane = exported._plane(sheet, arch)
        classes = list(dict.fromkeys(plane.values()))
        tree = regions.tree(cuts, {pair: classes.index(which) for pair, which in plane.items()}, conditions)
        if (id(limit), tree) in seen:
            continue
        seen.add((id(limit), tree))
        for qk in (*range(1, 601), *range(4080, 4112), 8191, 8192):
            for v in bounds(limit, smem, qk):
                assert classes[walk(conditions.values, tree, qk, v)] == exported._said(sheet, arch, (qk, v)), (
                    arch,
                    qk,
                    v,
                )


@pytest.mark.parametrize("arch", MATRIX.architectures)
def test_any_triple_is_what_the_engine_says(arch: str, data: Any, matrix: Matrix) -> None:
    """Packages no constraint: padding, versions, proof, and every reason in its words."""
    chance = random.Random(arch)
    strings = data["strings"]
    for _ in range(1500):
        qk = chance.choice(
            (
                chance.randint(1, 600),
                chance.randint(1, 75) * 8,
                chance.choice((64, 128, 192, 256)),
                chance.randint(1, 8192),
            )
        )
        v = chance.choice(
            (
                qk,
                chance.randint(1, 600),
                chance.randint(1, 75) * 8,
                chance.choice((64, 128, 256)),
                chance.randint(1, 4096),
            )
        )
        rope = chance.randint(max(0, qk - 4096), min(qk, 4096))
        dims = MLADimensions(qk - rope, rope, min(v, 4096))
        if matrix.block_for(dims):
            continue
        found = []
        for tree, records, proven in data["others"][arch][2]:
            place = proven.get(
                f"{qk} {dims.v_head_dim}", records[walk(data["conditions"], data["trees"][tree], qk, dims.v_head_dim)]
            )
            record = data["records"][place]
            always, _, (reasons, _, runs), *_ = data["variants"][record[7][0][0]]
            texts = [strings[data["reasons"][number][1]] for number in (*record[4][0], *always, *reasons)]
            pair = f"(qk {qk}, v {dims.v_head_dim})"
            values = {"{dims}": str(dims), "{pair}": pair, "{arch}": arch}
            for name, value in values.items():
                texts = [text.replace(name, value) for text in texts]
            pad = qk if record[1] else None
            found.append(
                (
                    data["kernels"][record[0]][0],
                    pad,
                    [strings[r] for r in runs[1]],
                    strings[runs[0]],
                    strings[runs[3]],
                    texts,
                )
            )
        decision = decide(Request(dims), Environment(arch), matrix)
        said = [(v.candidate, [r.message for r in v.reasons if r.code != "lower-priority"]) for v in decision.verdicts]
        assert sorted(found) == sorted(
            [(c.kernel, c.pad_v_to, list(c.requires), c.proof, c.proven, texts) for c, texts in said]
        ), dims


@pytest.mark.parametrize("seed", range(20))
def test_limits_that_nobody_has_yet(seed: int, regions: Any, export: Any) -> None:
    """Bounds that cross, other multiples, shared memory in any proportion, with and without padding."""
    chance = random.Random(seed)

    def span() -> Span:
        low = chance.choice((1, 8, chance.randint(1, 300)))
        return Span(low, low + chance.choice((0, 31, chance.randint(0, 300))))

    widths = tuple(
        Width(span(), chance.choice((None, span())), (f"flash-attn>={i}",)) for i in range(chance.randint(1, 4))
    )
    memory = chance.choice((None, (chance.randint(1, 400), chance.randint(1, 400))))
    limit = Limit(("sm90",), widths, chance.choice((1, 4, 8, 16)), chance.random() < 0.6, None, (), memory, "here:1")
    smem = chance.randint(20_000, 120_000)
    cuts = regions.conditions(limit, (), smem)

    def said(qk: int, v: int) -> Any:
        fit = limit.fit(qk, v, smem)
        return fit and (fit.pad_v_to is not None, fit.requires)

    plane = {pair: said(*pair) for pair in regions.samples(cuts)}
    classes = list(dict.fromkeys(plane.values()))
    conditions = export.Table()
    tree = regions.tree(cuts, {pair: classes.index(which) for pair, which in plane.items()}, conditions)
    for _ in range(20_000):
        qk = chance.randint(1, 650)
        v = chance.choice((qk, qk + chance.randint(-9, 9), chance.randint(1, 650), chance.randint(1, 81) * 8))
        if v >= 1:
            assert classes[walk(conditions.values, tree, qk, v)] == said(qk, v), (qk, v, limit)


def test_widths_that_the_conditions_do_not_tell_apart_are_an_error(regions: Any) -> None:
    with pytest.raises(ValueError, match=r"do not tell \(qk 9, v 1\)"):
        regions.tree([regions.Condition(1, 0, 16)], {(8, 1): 0, (9, 1): 1}, lambda _: 0)
