"""Proof without a GPU: kernels compiled for architectures that this machine does not have, and what binaries hold.

``prove`` returns evidence records (``capabilities/evidence.py``) of level ``built``. FA4 has a build-only path of its
own: with ``FLASH_ATTENTION_ARCH``, ``CUTE_DSL_ARCH`` and ``FLASH_ATTENTION_NUM_SMS`` set before its import, its public
function compiles the real kernel for tensors without memory and launches nothing (flash-attn-4 4.0.0b36,
flash_attn/cute/interface.py: _get_device_arch). FlashInfer's JIT takes ``FLASHINFER_CUDA_ARCH_LIST`` and needs nvcc.
Because these are read at import, each architecture has a child process of its own (``build_worker``).

Compiling does not ask whether a block's shared memory fits, so what FA4 would be launched with is read from the
compiled function and held against the architecture. FlashInfer chooses its tiles by it at run time: not proven here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.backends import binaries, trouble
from mla_prefill.backends.binaries import TRTLLM, Entry, entries, usable
from mla_prefill.backends.build_worker import MULTIPROCESSORS, Answer, Job, one_line
from mla_prefill.backends.verify import EVERYTHING, Wanted
from mla_prefill.capabilities.versions import contains
from mla_prefill.selector.detection import installed

if TYPE_CHECKING:
    from mla_prefill.capabilities.matrix import Matrix
    from mla_prefill.capabilities.model import Architecture

#: A child compiles on one core and holds about 1 GB.
CHILDREN = min(2, os.cpu_count() or 1)

#: Seconds for one compilation. FA4 takes 2 to 12, a source of FlashInfer 25 to 70.
TIMEOUT = 300.0

Report = Callable[[str], None]


class Building(NamedTuple):
    """How a build goes on.

    ``report`` takes lines about progress, and about each source that could not be asked; ``wanted`` says which of the
    cells, whose dims may be others than the matrix has; ``timeout`` is seconds for one compilation; ``failed`` takes a
    line for each architecture for which the compiler did not start, beside ``report``.
    """

    report: Report
    wanted: Wanted = EVERYTHING
    timeout: float = TIMEOUT
    failed: Report = lambda text: None


class CannotBuild(Exception):
    """Why nothing could be compiled at all; never leaves this module."""


class Builder(NamedTuple):
    """How a package's kernels are compiled without a GPU.

    ``versions``: whose build was tried. ``packages``: what the build depends on. ``beyond``: whether dims that the
    kernel sheet rules out are tried too; FA4 refuses them at once.
    """

    kernels: tuple[str, ...]
    distribution: str
    versions: str
    packages: tuple[str, ...]
    environment: Callable[[Architecture], dict[str, str]]
    beyond: bool


def fa4_environment(architecture: Architecture) -> dict[str, str]:
    """What FA4 and its compiler read at import; the ``a`` target where the architecture has one."""
    target = f"sm_{(architecture.capability or '').replace('.', '')}"
    specific = f"{target}a"
    return {
        "FLASH_ATTENTION_ARCH": target,
        "CUTE_DSL_ARCH": specific if specific in architecture.spellings else target,
        "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",  # what comes from a cache was not compiled now
        "CUTE_DSL_NO_CACHE": "1",
    }


def flashinfer_environment(architecture: Architecture) -> dict[str, str]:
    """What FlashInfer's JIT reads at import; it chooses the ``a`` or ``f`` target itself."""
    return {"FLASHINFER_CUDA_ARCH_LIST": architecture.capability or ""}


FA4 = Builder(
    ("fa4",),
    "flash-attn-4",
    ">=4.0.0b36",
    ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "torch"),
    fa4_environment,
    beyond=True,
)
FLASHINFER = Builder(
    ("flashinfer_fa2", "flashinfer_fa3"),
    "flashinfer-python",
    ">=0.7.4",
    ("flashinfer-python", "apache-tvm-ffi", "torch"),
    flashinfer_environment,
    beyond=False,
)


SHIPPED = tuple(dict.fromkeys(shipped.kernel for shipped in binaries.SHIPPED))
#: What can be built or read without a GPU.
KERNELS = (*FA4.kernels, *FLASHINFER.kernels, *SHIPPED, TRTLLM)


def prove(
    matrix: Matrix,
    arches: Sequence[str] | None,
    how: Building,
    save: Callable[[list[dict[str, Any]]], object] = lambda records: None,
) -> list[dict[str, Any]]:
    """Evidence records of everything that this machine can prove without a GPU.

    Args:
        matrix: whose dims and kernel sheet are proven.
        arches: architecture ids, in any accepted spelling. None: every one that is declared, without FlashInfer's
            kernels, which take nvcc half a minute each.
        save: gets the records of what is done where it ends early, as by an interrupt.

    Raises:
        UnknownNameError: an architecture that nobody declared.
    """
    chosen = tuple(matrix.architectures if arches is None else dict.fromkeys(map(matrix.arch, arches)))
    named, report, wanted = arches is not None, how.report, how.wanted
    command = wanted.command("--build-only", *([f"--arch {','.join(chosen)}"] if named else ()))
    sources: tuple[tuple[Iterable[str], dict[str, str], Callable[[], Iterable[dict[str, Any]]]], ...] = (
        (FA4.kernels, installed(FA4.packages), lambda: compiled_cells(matrix, FA4, chosen, how)),
        (FLASHINFER.kernels, installed(FLASHINFER.packages), lambda: flashinfer_cells(matrix, chosen, named, how)),
        (SHIPPED, installed(binaries.PACKAGES), lambda: binaries.shipped_cells(matrix, chosen, report, wanted)),
        ([TRTLLM], binaries.cubin_packages(), lambda: binaries.trtllm_cells(matrix, chosen, report, wanted)),
    )
    proven: list[dict[str, Any]] = []
    for kernels, packages, ask in sources:
        if not wanted.any_of(kernels):
            continue
        cells: list[dict[str, Any]] = []
        try:
            cells.extend(ask())  # one by one: what came before an interrupt is kept
        except BaseException:
            if done := proven + ([record(command, packages, cells)] if cells else []):
                save(done)
            raise
        if cells:
            proven.append(record(command, packages, cells))
    return proven


def record(command: str, packages: dict[str, str], cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One evidence record of today."""
    return {
        "schema_version": 1,
        "level": "built",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        "packages": packages,
        "cells": cells,
    }


# ---- compiling -------------------------------------------------------------------------------------------------------


def flashinfer_cells(matrix: Matrix, arches: Iterable[str], named: bool, how: Building) -> Iterable[dict[str, Any]]:
    """FlashInfer's kernels, where somebody named the architectures and there is nvcc."""
    kernels = " and ".join(FLASHINFER.kernels)
    if not named:
        how.report(f"{kernels} not compiled: name architectures with --arch, each takes minutes")
    elif nvcc() is None:
        how.report(f"{kernels} not compiled: there is no nvcc on the PATH, in CUDA_HOME or in /usr/local/cuda")
    else:
        return compiled_cells(matrix, FLASHINFER, arches, how)
    return []


def nvcc() -> str | None:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes if home))


def compiled_cells(matrix: Matrix, builder: Builder, arches: Iterable[str], how: Building) -> Iterator[dict[str, Any]]:
    """A cell for each dims block, dtype and operation on each architecture that a sheet names for a kernel.

    What is done before an interrupt is yielded before it is raised.
    """
    kernels, package = " and ".join(builder.kernels), builder.distribution
    version = installed((package,)).get(package)
    if version is None:
        how.report(f"{kernels} not compiled: {package} is not installed (pip install {package})")
        return
    if not contains(builder.versions, version):
        how.report(f"{kernels} not compiled: {package} {version} may need a GPU to build, {builder.versions} does not")
        return
    sweeps = [
        Sweep(builder, kernel, matrix.architectures[arch], plan)
        for kernel, arch in itertools.product(builder.kernels, arches)
        if (plan := tuple(planned(matrix, builder, kernel, arch, version, how.wanted)))
    ]
    answers: list[dict[Job, Answer]] = [{} for _ in sweeps]
    interrupted: BaseException | None = None
    with ThreadPoolExecutor(CHILDREN) as pool:
        try:
            for _ in pool.map(lambda sweep, into: sweep.compile(how, into), sweeps, answers):
                pass
        except BaseException as error:  # leaving the block waits for the children, which a Ctrl-C ends as well
            pool.shutdown(wait=False, cancel_futures=True)
            interrupted = error
    for sweep, found in zip(sweeps, answers, strict=True):
        yield from sweep.cells(found)
    if interrupted is not None:
        raise interrupted


def planned(
    matrix: Matrix, builder: Builder, kernel: str, arch: str, version: str, wanted: Wanted = EVERYTHING
) -> Iterator[Entry]:
    """What to compile for an architecture: what the kernel sheet or a row names, if this version is to run it."""
    if matrix.architectures[arch].capability is None:
        return
    for entry in entries(matrix, kernel, arch, wanted=wanted):
        cell = entry.cell
        offered = usable(cell, builder.distribution, version, entry.dtype)
        named = cell.limit is not None or cell.row is not None
        if offered or (builder.beyond and named and cell.fit is None):
            yield entry


class Sweep(NamedTuple):
    """One kernel on one architecture."""

    builder: Builder
    kernel: str
    architecture: Architecture
    plan: tuple[Entry, ...]

    def compile(self, how: Building, answers: dict[Job, Answer]) -> None:
        """Compiles, into ``answers``. Where no child can start, that is told to both."""
        jobs = dict.fromkeys(map(job_of, self.plan))  # equal widths are one kernel, whatever their dims
        try:
            for job, answer in self.build(list(jobs), how.timeout):
                answers[job] = answer
                outcome = f"not compiled: {answer.refusal}" if answer.refusal else f"compiled in {answer.seconds} s"
                how.report(f"{self.architecture.id} {len(answers)}/{len(jobs)}: {self.kernel} {job} {outcome}")
        except CannotBuild as error:
            for tell in (how.report, how.failed):
                tell(f"{self.kernel} was not compiled for {self.architecture.id}: {error}")

    def cells(self, answers: Mapping[Job, Answer]) -> Iterator[dict[str, Any]]:
        """What the answers prove."""
        for entry in self.plan:
            if (answer := answers.get(job_of(entry))) is not None:
                yield compiled_cell(self.architecture, entry, answer)

    def build(self, jobs: Sequence[Job], timeout: float) -> Iterator[tuple[Job, Answer]]:
        """(job, answer) of each job in order. A child that dies or hangs costs the job it was at, and the next goes on.

        Raises:
            CannotBuild: a child ended before its first job, with what it wrote last.
        """
        todo = list(jobs)
        while todo:
            for answer in self._run_child(todo, timeout):
                yield todo.pop(0), answer

    def _run_child(self, jobs: Sequence[Job], timeout: float) -> Iterator[Answer]:
        """Answers as they come; where the child ends too early, the last one says how it ended."""
        request = json.dumps({"kernel": self.kernel, "jobs": jobs, "timeout": timeout})
        with tempfile.TemporaryDirectory(prefix="mla-prefill-") as folder, open(f"{folder}/stderr", "w+b") as stderr:
            environment = {"PYTHONWARNINGS": "ignore", "FLASHINFER_WORKSPACE_BASE": folder}
            with subprocess.Popen(
                child_command(),
                env={**os.environ, **environment, **self.builder.environment(self.architecture)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            ) as child:
                assert child.stdin is not None
                assert child.stdout is not None
                ready, left = None, len(jobs)
                try:
                    with contextlib.suppress(BrokenPipeError):
                        child.stdin.write(request)
                        child.stdin.close()
                    lines = filter(None, map(parse_line, child.stdout))
                    ready = next(lines, None)
                    for line in lines:
                        left -= 1
                        yield Answer(**line)
                except BaseException:  # an interrupt, or a caller that wants no more
                    child.kill()
                    raise
            if child.returncode == -signal.SIGINT:
                raise KeyboardInterrupt
            stderr.seek(0)
            end = how_it_ended(child.returncode, stderr.read().decode(errors="replace"), timeout)
        if ready is None:
            raise CannotBuild(end.refusal)
        if left:
            yield end


def child_command() -> list[str]:
    return [sys.executable, "-m", "mla_prefill.backends.build_worker"]


def parse_line(line: str) -> dict[str, Any] | None:
    """A line of the child's answers; None for anything else that reached its stdout."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def how_it_ended(returncode: int, stderr: str, timeout: float) -> Answer:
    """A child's end as the answer to the job it was at: a time-out, a signal, or the last line that it wrote."""
    if "Timeout (" in stderr:  # what faulthandler writes before it ends the process
        return Answer(None, timeout, f"no answer within {timeout:g} s")
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it wrote nothing")
    outside = trouble.told(last) or (returncode < 0 and -returncode not in trouble.OWN_SIGNALS)
    how = f"with exit status {returncode}: {one_line(last)}"
    if returncode < 0:
        how = f"by signal {trouble.signal_name(-returncode)}"
    return Answer(None if outside else False, 0.0, f"the compiler's process ended {how}")


# ---- what a build proves ---------------------------------------------------------------------------------------------


def job_of(entry: Entry) -> Job:
    return Job(entry.qk, entry.width_v, entry.dtype, entry.operation)


def compiled_cell(architecture: Architecture, entry: Entry, answer: Answer) -> dict[str, Any]:
    """The evidence: compiled, and no more shared memory than the architecture has."""
    if not answer.compiled:
        return entry.to_dict("compiled", answer.compiled, refusal=answer.refusal, seconds=answer.seconds)
    detail = f"compiled for {answer.target or architecture.id}"
    expected = expected_shared_memory(entry)
    need = expected if answer.shared_memory is None else answer.shared_memory
    capacity = architecture.shared_memory_bytes or answer.capacity
    if need is not None:
        detail += f", {need} of {capacity or 'unknown'} bytes of shared memory"
        detail += "" if expected in (None, need) else f" (the kernel sheet says {expected})"
    if need and capacity and need > capacity:
        return entry.to_dict("compiled", False, refusal=f"{detail}: it cannot be launched", seconds=answer.seconds)
    return entry.to_dict("compiled", True, detail=detail, seconds=answer.seconds)


def expected_shared_memory(entry: Entry) -> int | None:
    """What a block needs by the kernel sheet's arithmetic."""
    limit = entry.cell.limit
    if limit is None or limit.shared_memory is None:
        return None
    per_qk, per_v = limit.shared_memory
    return per_qk * entry.qk + per_v * entry.width_v
