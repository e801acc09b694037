"""Threads that select while another reloads good and bad matrices, and workers that are forked or spawned.

A few seconds by default; SOAK_SECONDS=60 pytest tests/test_soak.py takes its time.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mla_prefill import Environment, MatrixError, NoBackendError, Request, clear, reload, select
from mla_prefill.selector import engine

SECONDS = float(os.environ.get("SOAK_SECONDS", "1"))
THREADS = 8
#: What growth over thousands of questions and many reloads is noise; one matrix takes several times as much.
NOISE_BYTES = 400_000
DIMS = [(128, 64, 128), (192, 64, 256), (64, 64, 128), (64, 32, 64), (96, 32, 96)]
ROW = "{arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}"
EXPECTED = {ROW: "fa4", ROW.replace("2, 3, 4", "2, 3"): "fa3"}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    clear()


class Site:
    """A data folder that changes under the engine: every valid version is another matrix, every third is broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "matrix.yaml"
        self.text = self.path.read_text(encoding="utf-8")
        self.published: list[tuple[str, str]] = []  # (fingerprint, kernel for the first dims), as reload() returned

    def publish(self, number: int) -> None:
        row, kernel = list(EXPECTED.items())[number % 2]
        self.path.write_text(f"{self.text.replace(ROW, row)}# version {number}\n", encoding="utf-8")
        self.published.append((reload(self.folder).fingerprint, kernel))

    def spoil(self, number: int) -> None:
        self.path.write_text(self.text[: len(self.text) // (2 + number % 5)] + "\n  broken: [", encoding="utf-8")
        with pytest.raises(MatrixError):
            reload()


def test_soak(data_folder: Path) -> None:
    site, stop = Site(data_folder), threading.Event()
    site.publish(0)
    seen: set[tuple[int, str, str, int]] = set()
    wrong: list[BaseException | str] = []
    asked = [0] * THREADS
    described = [
        Environment("sm90"),
        Environment("sm90", {"torch": "2.13.0", "fa3-fwd": "0.0.3"}),
        Environment("sm90", {}),
    ]

    def ask(thread: int) -> None:
        try:
            while not stop.is_set():
                for environment in described:
                    for dims in DIMS:
                        question(environment, dims)
                        asked[thread] += 1
                time.sleep(0.002)  # a serving engine has other things to do, and so has the thread that reloads
        except BaseException as error:
            wrong.append(error)

    def question(environment: Environment, dims: tuple[int, int, int]) -> None:
        before = len(site.published)
        try:
            decision = select(Request(dims), environment)
        except NoBackendError as error:
            if environment.packages != () and dims != DIMS[-1]:
                wrong.append(error)
            return
        if environment.packages is None and dims == DIMS[0] and decision.chosen is not None:
            seen.add((before, decision.matrix.fingerprint, decision.chosen.kernel, len(site.published)))

    workers = [threading.Thread(target=ask, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    number, levels, end = 0, [], time.monotonic() + SECONDS
    tracemalloc.start()
    try:
        while time.monotonic() < end or number < 6:
            number += 1
            (site.spoil if number % 3 == 0 else site.publish)(number)
            if number >= 3:
                for environment, dims in itertools.product(described, DIMS):  # as much remembered at every level
                    question(environment, dims)
                gc.collect()
                levels.append(tracemalloc.get_traced_memory()[0])
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        tracemalloc.stop()

    assert wrong == []
    assert min(asked) > 0
    assert min(levels[-3:]) - min(levels[:3]) < NOISE_BYTES, levels
    index = {fingerprint: i for i, (fingerprint, _) in enumerate(site.published)}
    for before, fingerprint, kernel, after in seen:
        assert kernel == site.published[index[fingerprint]][1]
        assert before - 1 <= index[fingerprint] <= after  # in force at some time while the question was answered
    assert len({fingerprint for _, fingerprint, *_ in seen}) > 1


ASK = "__import__('mla_prefill').select(request, environment).one_line()"
RELOAD = "__import__('mla_prefill').reload(path).fingerprint"


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_get_the_same_decision(method: str) -> None:
    here = [
        (dims, environment)
        for dims in DIMS[:4]
        for environment in (Environment("sm90"), Environment("cpu", {"torch": "2.13.0"}))
    ]
    expected = [select(Request(dims), environment).one_line() for dims, environment in here]
    with multiprocessing.get_context(method).Pool(2) as pool:
        asked = [pool.apply_async(eval, (ASK, {"request": Request(d), "environment": e})) for d, e in here]
        assert [answer.get(120) for answer in asked] == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_worker_forked_during_a_reload_can_reload(edited: Callable[[str, str, str], Path]) -> None:
    """The fork waits: what a thread has half imported or locked would stay so in the child, where it is not."""
    folder = edited("matrix.yaml", ROW, list(EXPECTED)[1])
    at_work, done = threading.Event(), []

    def work() -> None:
        with engine._working:
            at_work.set()
            time.sleep(0.3)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    at_work.wait()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert done
        fingerprint = pool.apply_async(eval, (RELOAD, {"path": folder})).get(120)
    thread.join()
    assert fingerprint == reload(folder).fingerprint


def test_a_reload_in_a_signals_handler_may_interrupt_another(
    edited: Callable[[str, str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edited("matrix.yaml", ROW, list(EXPECTED)[1])
    read, meanwhile = engine.load_matrix, [folder]

    def interrupted(path: str | None) -> object:
        if meanwhile:
            reload(meanwhile.pop())
        return read(path)

    monkeypatch.setattr(engine, "load_matrix", interrupted)
    assert reload(folder).fingerprint == read(folder).fingerprint
    assert not meanwhile
