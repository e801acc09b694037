"""From process start to the answer, against a bare interpreter."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROUNDS = 15
IMPORT = "from mla_prefill import Environment, MLADimensions, Request, select"
REQUEST = "Request(MLADimensions(64, 64, 128))"
PROGRAMS = {
    "a bare interpreter": ["-c", "pass"],
    "cold query, environment described": ["-c", f"{IMPORT}\nselect({REQUEST}, Environment('sm90'))"],
    "cold query, machine detected": ["-c", f"{IMPORT}\nselect({REQUEST})"],
    "cold query, command line": ["-m", "mla_prefill", "select", "--arch", "sm90", "--dims", "64,64,128"],
    "cold query, command line, --explain": ["-m", "mla_prefill", "select", "--dims", "64,64,128", "--explain"],
}
TARGETS = {"cold query, environment described": 60e-3, "cold query, machine detected": 120e-3}


class Taken(NamedTuple):
    """Seconds of one process: on the clock, and of CPU time (which other programs disturb less)."""

    clock: float
    cpu: float


def run(arguments: list[str], folder: Path) -> Taken:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def test_cold_query(report: Callable[..., None], tmp_path: Path) -> None:
    """All programs take turns, so that whatever else the machine does hits each of them alike."""
    rounds = [{what: run(arguments, tmp_path) for what, arguments in PROGRAMS.items()} for _ in range(ROUNDS)]
    bare, *queries = PROGRAMS
    report(bare, statistics.median(taken[bare].clock for taken in rounds))
    for what in queries:
        clock = statistics.median(taken[what].clock - taken[bare].clock for taken in rounds)
        cpu = statistics.median(taken[what].cpu - taken[bare].cpu for taken in rounds)
        report(what, clock, TARGETS.get(what), f"over the bare interpreter; {cpu * 1e3:.0f} ms of CPU time")
