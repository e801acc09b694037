"""``mla-prefill verify``: every cell of this machine's architecture, run and held to float32 math.

A cell is a kernel with dims; it is verified for every installed provider, in both operations and each dtype. Cells that
no row allows but the kernel sheet holds possible are run too: they are what the next row could be. Kernels crash and
hang, so cells run in worker processes (``verify_worker``), one or more for each GPU, with a time limit for each cell.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mla_prefill.backends import KernelError, trouble
from mla_prefill.capabilities import tables
from mla_prefill.capabilities.evidence import OPERATIONS
from mla_prefill.capabilities.matrix import Cell, Matrix
from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import NO_OVERRIDES, Environment, Overrides
from mla_prefill.selector.request import Request

DTYPES = ("bfloat16", "float16", "float32")
#: FlashInfer's first call in a process compiles for up to 110 s.
TIMEOUT_S = 300.0
SAVE_S = 20.0
Report = Callable[[str], None]


class Task(NamedTuple):
    """One cell, as one provider runs it, in one operation and dtype."""

    kernel: str
    provider: str
    dims: MLADimensions
    pad_v_to: int | None
    dtype: str
    operation: str
    allowed: bool

    def __str__(self) -> str:
        return f"{self.kernel} of {self.provider}, {self.dims} {self.dtype} {self.operation}"


class Skipped(NamedTuple):
    """A cell of an installed provider that its own sheet rules out, and why."""

    task: Task
    why: str


class Wanted(NamedTuple):
    """What to verify or build; empty means everything."""

    kernels: Sequence[str] = ()
    dims: Sequence[MLADimensions] = ()
    dtypes: Sequence[str] = ()

    def any_of(self, kernels: Iterable[str]) -> bool:
        return not self.kernels or not set(self.kernels).isdisjoint(kernels)

    def command(self, *first: str) -> str:
        given = [("--kernel", k) for k in self.kernels] + [("--dtype", d) for d in self.dtypes]
        given += [("--dims", ",".join(map(str, d))) for d in self.dims]
        return " ".join(["mla-prefill verify", *first, *(f"{option} {value}" for option, value in given)])


EVERYTHING = Wanted()


def tasks(
    matrix: Matrix,
    arch: str,
    installed: dict[str, str],
    wanted: Wanted = EVERYTHING,
    overrides: Overrides = NO_OVERRIDES,
) -> tuple[list[Task], list[Skipped]]:
    """Every cell of this architecture that an installed provider offers, and those that are ruled out.

    A cell without a row is possible, and run; any other reason against it (version, dtype, known bad, an environment
    variable) rules it out. Kernels named in ``wanted`` beat a variable that forces others.
    """
    forced = not wanted.kernels and (overrides.backend, overrides.fa_version) != (None, None)
    run: list[Task] = []
    skipped: list[Skipped] = []
    for dims in wanted.dims or dict.fromkeys(block.dims for block in matrix.blocks.values()):
        for cell in matrix.cells(arch, dims):
            if wanted.kernels and cell.kernel.name not in wanted.kernels:
                continue
            for task in _tasks_of(cell, dims, installed, wanted.dtypes or DTYPES):
                environment = Environment(arch, {task.provider: installed[task.provider]}, overrides=overrides)
                why = _ruled_out(task, matrix, environment, None if forced else task.kernel)
                if why:
                    skipped.append(Skipped(task, why))
                else:
                    run.append(task)
    return run, skipped


def _tasks_of(cell: Cell, dims: MLADimensions, installed: dict[str, str], dtypes: Sequence[str]) -> Iterable[Task]:
    for offer in cell.offers:
        if offer.distribution in installed:
            runs, pad = offer.installed, offer.installed.pad_v_to
            for dtype in (d for d in dtypes if d in runs.dtypes):
                for operation in OPERATIONS:
                    yield Task(runs.kernel, offer.distribution, dims, pad, dtype, operation, cell.allowed)


def _ruled_out(task: Task, matrix: Matrix, environment: Environment, backend: str | None) -> str:
    """Everything against this cell except that no row allows it."""
    request = Request(task.dims, task.dtype, backend=backend, needs=OPERATIONS[task.operation])
    verdicts = decide(request, environment, matrix).verdicts
    reasons = next(v.reasons for v in verdicts if v.candidate.kernel == task.kernel)
    return "; ".join(reason.message for reason in reasons if reason.code != "no-rule")


# ---- worker processes -------------------------------------------------------------------------------------------


class WorkerDied(Exception):
    """The text says how: a status, a signal or a time limit, and the last thing on stderr.

    ``outside``: something else ended it, which says nothing about the cell.
    """

    def __init__(self, how: str, outside: bool = False) -> None:
        super().__init__(how)
        self.outside = outside


class Worker:
    """A ``verify_worker`` process on one GPU.

    Args:
        gpu: what CUDA_VISIBLE_DEVICES is to be; None: as it is.
        setup: ``arch``, ``matrix`` and ``extra`` for the process.

    Raises:
        WorkerDied: it did not come up.
    """

    def __init__(self, gpu: str | None, setup: dict[str, Any], timeout_s: float, command: Sequence[str]) -> None:
        environment = {**os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            [*command, json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            start_new_session=True,  # a compiler that it started ends with it
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.hello: dict[str, Any] = self._answer("hello", timeout_s, lambda text: None)["hello"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def verify(self, task: Task, timeout_s: float, report: Report) -> tuple[dict[str, Any], bool]:
        """(the result, whether the process can be given another cell)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already; the answer below says how
            self._process.stdin.write(json.dumps(task._asdict()) + "\n")
            self._process.stdin.flush()
        answer = self._answer("result", timeout_s, report)
        return answer["result"], answer["healthy"]

    def _answer(self, name: str, timeout_s: float, report: Report) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.stop()
                raise WorkerDied(f"no answer within {timeout_s:g} s") from None
            if line is None:
                raise self._how_it_ended()
            message: dict[str, Any] = json.loads(line)
            if name in message:
                return message
            report(message.get("progress", ""))

    def _how_it_ended(self) -> WorkerDied:
        status = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        how = f"signal {trouble.signal_name(-status)}" if status < 0 else f"status {status}"
        self.stop()
        outside = (status < 0 and -status not in trouble.OWN_SIGNALS) or trouble.told(last)
        return WorkerDied(f"the process ended with {how}" + (f": {last[:400]}" if last else ""), outside)

    def stop(self) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for file in (self._process.stdin, self._process.stdout, self._stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()


# ---- the sweep --------------------------------------------------------------------------------------------------


class Sweep:
    """Gives the tasks of one queue to the workers of all GPUs and collects the results in the tasks' order."""

    def __init__(
        self,
        todo: Sequence[Task],
        setup: dict[str, Any],
        report: Report,
        timeout_s: float = TIMEOUT_S,
        command: Sequence[str] = (sys.executable, "-m", "mla_prefill.backends.verify_worker"),
        save: Callable[[], object] = lambda: None,
    ) -> None:
        self._save, self._saved = save, time.monotonic()
        self._todo, self._setup, self._report = todo, setup, report
        self._timeout_s, self._command = timeout_s, command
        self._queue: queue.Queue[int] = queue.Queue()
        for index in range(len(todo)):
            self._queue.put(index)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._start = time.monotonic()
        self.results: dict[int, dict[str, Any]] = {}
        self.machine: dict[str, Any] = {}
        self.failures: list[str] = []

    def run(self, gpus: Sequence[str | None]) -> list[dict[str, Any]]:
        """One worker for each entry of ``gpus``.

        Raises:
            KernelError: no worker came up, so nothing was verified.
        """
        threads = [threading.Thread(target=self._work, args=(gpu,), daemon=True) for gpu in gpus]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        finally:
            self._stopped.set()
        if len(self.results) < len(self._todo):
            raise KernelError(f"cells could not be run: {'; '.join(dict.fromkeys(self.failures))}")
        return [self.results[index] for index in range(len(self._todo))]

    def _work(self, gpu: str | None) -> None:
        worker: Worker | None = None
        try:
            while not self._stopped.is_set():
                try:
                    index = self._queue.get_nowait()
                except queue.Empty:
                    return
                try:
                    worker = worker or self._new_worker(gpu)
                except WorkerDied as how:
                    self.failures.append(str(how))
                    self._queue.put(index)
                    return
                worker = self._verify(index, worker)
        finally:
            if worker is not None:
                worker.stop()

    def _new_worker(self, gpu: str | None) -> Worker:
        worker = Worker(gpu, self._setup, self._timeout_s, self._command)
        if worker.hello["arch"] != self._setup["arch"]:
            worker.stop()
            raise WorkerDied(f"GPU {gpu} is {worker.hello['arch']}, not {self._setup['arch']}")
        self.machine = {name: value for name, value in worker.hello.items() if name != "arch"}
        return worker

    def _verify(self, index: int, worker: Worker) -> Worker | None:
        """Runs one cell; returns the worker if it can take another."""
        task, start = self._todo[index], time.monotonic()
        try:
            result, healthy = worker.verify(task, self._timeout_s, lambda text: self._report(f"        {text}"))
        except WorkerDied as how:
            seconds = round(time.monotonic() - start, 2)
            ok = None if how.outside else False
            result, healthy = {"ok": ok, "refusal": str(how), "seconds": seconds}, False
        if not healthy:
            worker.stop()
        with self._lock:
            self.results[index] = result
            self._report(f"[{len(self.results)}/{len(self._todo)}] {task}: {outcome(result)}{self._remaining()}")
            if time.monotonic() - self._saved > SAVE_S:
                self._save_so_far()
        return worker if healthy else None

    def _save_so_far(self) -> None:
        self._saved = time.monotonic()
        try:
            self._save()
        except (OSError, ValueError) as error:  # the cells go on; the last save says so again
            self._report(f"not saved yet: {error}")

    def _remaining(self) -> str:
        done, elapsed = len(self.results), time.monotonic() - self._start
        left = elapsed / done * (len(self._todo) - done)
        return f" (eta {left / 60:.0f} min)" if left > 90 else f" (eta {left:.0f} s)" if left else ""


def outcome(result: dict[str, Any]) -> str:
    """One cell's result in a few words."""
    if result["ok"] is None:
        return f"not tried: {result['refusal']}"
    if not result["ok"]:
        return f"FAILED: {result['refusal']}"
    graph = result.get("cuda_graph")
    why = f", but not in a CUDA graph: {graph}" if isinstance(graph, str) else ""
    return f"ok, error {result['error']:.1e}{why}"


def gpus(on_gpu: bool, jobs: int | None = None) -> list[str | None]:
    """An entry for each worker: the GPUs that are visible, each ``jobs`` times (most of the time goes to compilers)."""
    if not on_gpu:
        return [None]
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    each = jobs or max(1, min(2, (os.cpu_count() or 1) // (8 * max(1, len(names)))))
    return [name for _ in range(each) for name in names]


def verify(
    matrix: Matrix,
    environment: Environment,
    wanted: Wanted = EVERYTHING,
    *,
    setup: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
    jobs: int | None = None,
    report: Report = lambda text: None,
    save: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Runs the sweep and returns the evidence record (``capabilities/evidence.py`` describes it).

    Args:
        setup: where the workers find the same matrix: ``{"matrix": path or None, "extra": [...]}``.
        jobs: worker processes for each GPU.
        save: gets the record of what is done every `SAVE_S` seconds, and where the sweep ends early; the whole record
            is the caller's to save.

    Raises:
        KernelError: nothing could be run.
        UnknownNameError: this machine's architecture, or what an environment variable names, is not in the matrix.
    """
    from mla_prefill.backends import records  # needs torch, which the words above do not

    arch = matrix.arch(environment.arch)
    todo, skipped = tasks(matrix, arch, environment.installed or {}, wanted, environment.overrides)
    for task, why in skipped:
        report(f"left out: {task}: {why}")
    if not todo:
        raise KernelError(
            f"nothing to verify: no installed package offers such a cell on {arch}{', see above' if skipped else ''}"
        )
    packages = records.packages(matrix)

    def record() -> dict[str, Any]:
        return {
            "schema_version": 1,
            "level": "run",
            "date": datetime.date.today().isoformat(),
            **sweep.machine,
            "arch": arch,
            "packages": packages,
            "command": wanted.command(),
            "cells": [cell(todo[index], arch, result) for index, result in sorted(sweep.results.items())],
        }

    sweep = Sweep(
        todo,
        {"arch": arch, "matrix": None, "extra": [], **(setup or {})},
        report,
        timeout_s,
        save=lambda: save(record()),
    )
    try:
        sweep.run(gpus(matrix.architectures[arch].vendor != "cpu", jobs))
    except BaseException:  # no worker came up any more, or an interrupt
        if sweep.results:
            save(record())
            report(f"{len(sweep.results)} of {len(todo)} cells were verified and are saved")
        raise
    return record()


def cell(task: Task, arch: str, result: dict[str, Any]) -> dict[str, Any]:
    """One entry of an evidence record."""
    return {
        "kernel": task.kernel,
        "provider": task.provider,
        "arch": arch,
        "dims": list(task.dims),
        "qk": task.dims.qk_head_dim,
        "v": task.dims.v_head_dim,
        "pad_v_to": task.pad_v_to,
        "dtype": task.dtype,
        "operation": task.operation,
        "allowed": task.allowed,
        **result,
    }


# ---- for people ---------------------------------------------------------------------------------------------------

HEADER = ("kernel", "provider", "dims", "dtype", "operation", "row", "result", "out", "LSE", "CUDA graph")


def table(record: dict[str, Any]) -> str:
    """A line for each cell, then the texts of what went wrong."""
    rows = [_row(cell) for cell in record["cells"]]
    texts = [
        f"  {c['kernel']} of {c['provider']}, {tuple(c['dims'])} {c['dtype']} {c['operation']}: {outcome(c)}"
        for c in record["cells"]
        if not fine(c)
    ]
    return "\n".join([tables.columns(rows, HEADER), "", *texts, summary(record)])


def _row(cell: dict[str, Any]) -> list[str]:
    graph = cell.get("cuda_graph")
    says = "" if graph is None else {True: "yes", False: "not claimed"}.get(graph, "FAILED")
    errors = ["" if cell.get(name) is None else f"{cell[name]:.1e}" for name in ("error", "lse_error")]
    what = [cell["kernel"], cell["provider"], _dims(cell), cell["dtype"], cell["operation"]]
    return [*what, _allowed(cell), _result(cell), *errors, says]


def _dims(cell: dict[str, Any]) -> str:
    return str(MLADimensions(*cell["dims"])) + (f" V to {cell['pad_v_to']}" if cell.get("pad_v_to") else "")


def _allowed(cell: dict[str, Any]) -> str:
    return "allowed" if cell["allowed"] else "no row"


def _result(cell: dict[str, Any]) -> str:
    return {True: "ok", False: "FAILED", None: "not tried"}[cell["ok"]]


def fine(cell: dict[str, Any]) -> bool:
    """Right, and in a CUDA graph too where the kernel sheet says so."""
    return cell["ok"] is True and not isinstance(cell.get("cuda_graph"), str)


def all_fine(record: dict[str, Any]) -> bool:
    """Whether every cell that a row allows is fine; cells without a row may fail."""
    return all(fine(cell) for cell in record["cells"] if cell["allowed"])


def summary(record: dict[str, Any]) -> str:
    cells = record["cells"]
    allowed = [cell for cell in cells if cell["allowed"]]
    text = f"{sum(map(fine, allowed))} of {len(allowed)} allowed cells are right on {record['gpu'] or record['arch']}"
    possible = [cell for cell in cells if not cell["allowed"]]
    return text + (f"; {sum(map(fine, possible))} of {len(possible)} that no row allows" if possible else "")


def build_table(record: dict[str, Any]) -> str:
    """A record of level *built*: a line for each cell, and what its builder or its binary said."""
    rows = [
        [c["kernel"], c["arch"], _dims(c), c["dtype"], c["operation"], _allowed(c), _result(c), *_how(c)]
        for c in record["cells"]
    ]
    return tables.columns(rows, ("kernel", "arch", "dims", "dtype", "operation", "row", "result", "how", ""))


def _how(cell: dict[str, Any]) -> list[str]:
    said = cell.get("refusal") or cell.get("detail") or ""
    return [cell.get("how", ""), said if len(said) <= 80 else f"{said[:77]}..."]


def all_built(record: dict[str, Any]) -> bool:
    """Whether no cell that a row allows refused to build."""
    return all(cell["ok"] is not False for cell in record["cells"] if cell["allowed"])


def not_proven(built: Sequence[dict[str, Any]], arches: Sequence[str], kernels: Sequence[str]) -> Iterator[str]:
    """What was asked for by name, or is allowed, and was neither built nor refused."""
    cells = [cell for record in built for cell in record["cells"]]
    for key, names in (("arch", arches), ("kernel", kernels)):
        tried = {cell[key] for cell in cells if cell["ok"] is not None}
        yield from (f"{name}: nothing was built or read for it" for name in dict.fromkeys(names) if name not in tried)
    ended = Counter((c["kernel"], c["arch"], c["refusal"]) for c in cells if c["allowed"] and c["ok"] is None)
    for (kernel, arch, how), count in ended.items():
        yield f"{kernel} on {arch}, {count} allowed cells: {how}"


def stem(record: dict[str, Any]) -> str:
    """The usual name of a record's file: ``run-nvidia-h200-2026-11-30``, ``built-fa4-2026-11-30``."""
    kernels = dict.fromkeys(cell["kernel"] for cell in record["cells"])
    about = record.get("gpu") or record.get("arch") or " ".join(kernels)
    return f"{record['level']} {about} {record['date']}"


def written(record: dict[str, Any], output: str | Path | None, *, beside: bool = False) -> Path:
    """Writes the record and says where, as `records.keep` does."""
    from mla_prefill.backends import records

    return records.keep("evidence", stem(record), records.lined(record, "cells"), output, beside=beside)
