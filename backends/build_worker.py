"""The child of ``builds``: compiles kernels for the one architecture that its environment names.

``python -m mla_prefill.backends.build_worker`` takes ``{"kernel": ..., "jobs": [[qk, v, dtype, operation], ...],
"timeout": seconds}`` on stdin, writes ``{"ready": true}`` once the package is imported, then a line of JSON for each
job. A compiler that hangs ends the process; so does one that crashes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mla_prefill.backends import trouble

#: Multiprocessors of the GPU that is described to FA4. They decide on a split KV, which is off, and for few queries on
#: pairs of CTAs; neither changes whether a kernel builds.
MULTIPROCESSORS = 132


class Job(NamedTuple):
    """One compilation, for widths, dtype and operation: new_tokens is causal, context_chunk is not."""

    qk: int
    v: int
    dtype: str
    operation: str

    @property
    def causal(self) -> bool:
        return self.operation == "new_tokens"

    def __str__(self) -> str:
        return f"({self.qk}, {self.v}) {self.dtype} {self.operation}"


class Answer(NamedTuple):
    """What came of a job: compiled for ``target``, refused (False), or not tried to the end (None).

    ``shared_memory`` and ``capacity`` are bytes, where the compiled function tells them.
    """

    compiled: bool | None
    seconds: float
    refusal: str | None = None
    target: str | None = None
    shared_memory: int | None = None
    capacity: int | None = None


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # compilers print
    request = json.load(sys.stdin)
    limit = functools.partial(faulthandler.dump_traceback_later, request["timeout"], exit=True)
    limit()  # ends a hang in native code too; each call starts the time anew
    compiler = COMPILERS[request["kernel"]]()
    print(json.dumps({"ready": True}), file=answers)
    for job in request["jobs"]:
        limit()
        print(json.dumps(attempt(compiler, Job(*job))._asdict()), file=answers)
    faulthandler.cancel_dump_traceback_later()
    return 0


Compiler = Callable[[Job], Answer]


def attempt(compiler: Compiler, job: Job) -> Answer:
    started = time.monotonic()
    try:
        answer = compiler(job)
    except Exception as error:  # the exact text of a refusal is the evidence
        refused = None if trouble.raised(error) else False
        answer = Answer(refused, 0.0, one_line(f"{type(error).__name__}: {error}"))
    return answer._replace(seconds=round(time.monotonic() - started, 1))


def one_line(text: str, limit: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


# ---- FA4 -------------------------------------------------------------------------------------------------------------


def fa4() -> Compiler:
    """FA4 by its public function, which compiles and launches nothing for tensors without memory."""
    describe_gpu(MULTIPROCESSORS)
    return functools.partial(compile_fa4, importlib.import_module("flash_attn.cute.interface"))


def compile_fa4(interface: Any, job: Job) -> Answer:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    cache = getattr(getattr(interface._flash_attn_fwd, "compile_cache", None), "cache", {})
    cache.clear()
    sequences, heads, queries = 2, 16, 1024
    keys = queries if job.operation == "new_tokens" else 2 * queries
    dtype = getattr(torch, job.dtype)
    with FakeTensorMode():

        def ragged(length: int, width: int) -> torch.Tensor:
            return torch.empty(sequences * length, heads, width, dtype=dtype, device="cuda")

        interface.flash_attn_varlen_func(
            q=ragged(queries, job.qk),
            k=ragged(keys, job.qk),
            v=ragged(keys, job.v),
            cu_seqlens_q=torch.empty(sequences + 1, dtype=torch.int32, device="cuda"),
            cu_seqlens_k=torch.empty(sequences + 1, dtype=torch.int32, device="cuda"),
            max_seqlen_q=queries,
            max_seqlen_k=keys,
            causal=job.causal,
            num_splits=1,
            return_lse=True,
        )
    return read_compiled("\n".join(str(getattr(function, "ir_module", "")) for function in cache.values()))


#: The check of shared memory that nvidia-cutlass-dsl 4.8 puts in front of a launch names target and capacity ...
_CAPACITY = re.compile(r"exceeds current GPU arch (\w+) allowed\. Allocated: [^.]*\. Max: (\d+) bytes")
#: ... and the launch gets its bytes of dynamic shared memory in the third field of a CUlaunchConfig.
_LAUNCH_FIELD = re.compile(r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*<\(array<3 x i32>, array<3 x i32>, i64, ptr")
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i64\)")
_STORE = re.compile(r"llvm\.store (%\w+), (%\w+) : i64, !llvm\.ptr")


def read_compiled(code: str) -> Answer:
    """Target, shared memory of the launch (the most, where there are several) and the target's capacity."""
    needs: list[int] = []
    for function in re.split(r"\n +(?=llvm\.func )", code):  # names of values are a function's own
        fields = set(_LAUNCH_FIELD.findall(function))
        constants = dict(_CONSTANT.findall(function))
        needs += [int(constants[v]) for v, to in _STORE.findall(function) if to in fields and v in constants]
    check = _CAPACITY.search(code)
    target, capacity = (check[1], int(check[2])) if check else (None, None)
    return Answer(True, 0.0, target=target, shared_memory=max(needs, default=None), capacity=capacity)


def describe_gpu(multiprocessors: int) -> None:
    """Where there is no driver, answers the compiler's questions to it: how many clusters can run at once."""
    driver = importlib.import_module("cuda.bindings.driver")
    with contextlib.suppress(RuntimeError):  # no libcuda at all
        if int(driver.cuInit(0)[0]) == 0:
            return

    class DescribedGPU:
        """Stands in for cutlass.utils.HardwareInfo."""

        def __init__(self, device_id: int = 0) -> None:
            self.device_id = device_id

        def get_max_active_clusters(self, cluster_size: int, stream: object = None) -> int:
            return multiprocessors // cluster_size

        def get_device_multiprocessor_count(self) -> int:
            return multiprocessors

    for module in ("cutlass.utils", "cutlass.utils.hardware_info"):
        importlib.import_module(module).HardwareInfo = DescribedGPU  # type: ignore[attr-defined]


# ---- FlashInfer ------------------------------------------------------------------------------------------------------


def flashinfer(backend: str) -> Compiler:
    """FlashInfer's ragged prefill kernels by the commands of its own JIT, without the paged ones of the same module."""
    import torch

    module = importlib.import_module("flashinfer.jit.attention")
    return functools.partial(compile_flashinfer, torch, module.gen_batch_prefill_module, backend)


#: What nvcc says where the toolkit is too old or lacks a header: nothing about the kernel.
TOOLKIT = ("Unsupported gpu architecture", "No such file or directory")


def compile_flashinfer(torch: Any, generate: Callable[..., Any], backend: str, job: Job) -> Answer:
    dtype = getattr(torch, job.dtype)
    # position encoding 0: none; no sliding window, no soft cap, no fp16 accumulation
    spec = generate(backend, dtype, dtype, dtype, torch.int32, job.qk, job.v, 0, False, False, False)
    wanted = re.compile(rf"_ragged_(?:sm90_)?kernel_mask_{int(job.causal)}\.cu$")  # MaskMode: kNone, kCausal
    commands = [entry for entry in spec.get_compile_commands() if wanted.search(entry["file"])]
    if len(commands) != 1:
        raise LookupError(f"FlashInfer generated {len(commands)} sources like {wanted.pattern}, not one")
    (command,) = commands
    os.makedirs(command["directory"], exist_ok=True)
    ran = subprocess.run(shlex.split(command["command"]), cwd=command["directory"], capture_output=True, text=True)
    if ran.returncode:
        lines = ran.stderr.splitlines()
        said = " ".join([line for line in lines if "error" in line or "fatal" in line] or lines[-1:])
        untried = trouble.told(said) or any(sign in said for sign in TOOLKIT)
        return Answer(None if untried else False, 0.0, one_line(said) or f"nvcc ended with status {ran.returncode}")
    target = re.search(r"code=(sm_\w+)", command["command"])
    return Answer(True, 0.0, target=target and target[1])


COMPILERS: dict[str, Callable[[], Compiler]] = {
    "fa4": fa4,
    "flashinfer_fa2": functools.partial(flashinfer, "fa2"),
    "flashinfer_fa3": functools.partial(flashinfer, "fa3"),
}

if __name__ == "__main__":
    sys.exit(main())
