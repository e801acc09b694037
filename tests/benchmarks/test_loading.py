"""Reading a matrix: from its compiled form, and with every check."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice, product
from pathlib import Path

import pytest
from mla_prefill.capabilities import Matrix, load_matrix, schema
from mla_prefill.capabilities.load import DATA_DIR

Report = Callable[..., None]
Median = Callable[..., float]
#: Multiples of 4 but not of 8, so that no made-up block has the dims of a real one.
WIDTHS = range(4, 260, 8)


def test_compiled(median: Median, report: Report) -> None:
    report("load, compiled form", median(load_matrix))


def test_shipped(median: Median, report: Report) -> None:
    report("load with all checks, shipped data", median(first_load), 150e-3)


def test_again(median: Median, report: Report) -> None:
    report("load with all checks, files that were read before", median(load_matrix, DATA_DIR))


def overlay(blocks: int) -> str:
    """The text of a matrix file with so many made-up blocks, two rows each."""
    lines = ["schema_version: 1", "matrix:"]
    for i, (nope, rope, v) in enumerate(islice(product(WIDTHS, repeat=3), blocks)):
        lines += [
            f"  made_up_{i}:",
            f"    dims: {{qk_nope: {nope}, qk_rope: {rope}, v_head: {v}}}",
            '    sources: [{kind: issue, ref: "example/example#1"}]',
            "    allow:",
            "      - {arch: [sm80, sm86, sm89, sm90, sm100], backends: [TORCH_SDPA], kernels: [torch_math]}",
            "      - {arch: [cpu], backends: [TORCH_SDPA]}",
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("blocks", [100, 1_000, 10_000])
def test_overlay(report: Report, tmp_path: Path, blocks: int) -> None:
    """Linear: the time a block does not grow with the number of blocks."""
    path = tmp_path / "matrix.yaml"
    path.write_text(overlay(blocks), encoding="utf-8")
    shipped = seconds(first_load)
    taken = seconds(lambda: first_load(None, [path]))
    each = (taken - shipped) / blocks
    report(f"load with all checks, {blocks:,} more blocks", taken, None, f"{each * 1e6:.0f} us for each block more")


def first_load(path: Path | None = DATA_DIR, extra: Sequence[Path] = ()) -> Matrix:
    """As in a new process, to which no file is known to pass its schema."""
    schema._passed.clear()
    return load_matrix(path, extra)


def seconds(load: Callable[[], Matrix]) -> float:
    """CPU time: the longest run here takes seconds, and something else always runs meanwhile."""
    start = time.process_time()
    load()
    return time.process_time() - start
