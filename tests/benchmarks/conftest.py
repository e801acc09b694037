"""The benchmarks' report: one line a number, with the target beside it. Nothing here asserts on time.

    pytest tests/benchmarks

Every number is measured next to what it is compared with, in the same run, so a slow machine is slow for both.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import pytest
from mla_prefill.capabilities.tables import columns

_LINES = pytest.StashKey[list[tuple[str, str, str, str]]]()
_UNITS = ((1e-6, 1e-9, "ns"), (1e-3, 1e-6, "us"), (1.0, 1e-3, "ms"), (float("inf"), 1.0, "s"))


def duration(seconds: float) -> str:
    """Three digits in the unit that suits."""
    factor, unit = next((factor, unit) for below, factor, unit in _UNITS if abs(seconds) < below)
    return f"{seconds / factor:.3g} {unit}"


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[..., None]:
    """report(what, seconds, seconds to reach or None, note): adds a line to the report that ends the run."""
    lines = request.config.stash.setdefault(_LINES, [])

    def add(what: str, seconds: float, target: float | None = None, note: str = "") -> None:
        aim = "" if target is None else f"{'within' if seconds <= target else 'OVER'} {duration(target)}"
        lines.append((what, duration(seconds), aim, note))

    return add


@pytest.fixture
def median(benchmark: Any) -> Callable[..., float]:
    """median(function, *arguments): seconds a call takes, from pytest-benchmark's calibrated rounds."""

    def measure(function: Callable[..., object], *arguments: object) -> float:
        function(*arguments)  # the first call fills caches, and would mislead the calibration
        benchmark(function, *arguments)
        if benchmark.stats is None:
            pytest.skip("benchmarks are disabled")
        return float(benchmark.stats.stats.median)

    return measure


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash.get(_LINES, []):
        terminalreporter.section("numbers to reach")
        terminalreporter.write_line(columns(lines, ("what", "median", "target", "note")))
        load, cores = os.getloadavg()[0], os.cpu_count()
        terminalreporter.write_line(f"Python {platform.python_version()}, {cores} cores, load average {load:.1f}")
