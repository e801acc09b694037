"""Proof without a GPU: what is compiled for which target, what a build proves, and what shipped binaries hold.

Texts of tools and names of kernels are excerpts of real ones: nvidia-cutlass-dsl 4.8.1, cuobjdump 12.8, vllm 0.33.0,
fa3-fwd 0.0.3, flashinfer-cubin 0.6.13.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_prefill.backends import binaries, build_worker, builds
from mla_prefill.backends.binaries import Code, Entry, Function, Shipped
from mla_prefill.backends.build_worker import Answer, Job
from mla_prefill.backends.builds import FA4, FLASHINFER, Sweep
from mla_prefill.backends.verify import Wanted
from mla_prefill.capabilities import Matrix, MLADimensions
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.capabilities.matrix import UnknownNameError
from mla_prefill.cli import main

DEEPSEEK = MLADimensions(128, 64, 128)
GLM = MLADimensions(192, 64, 256)
GIGACHAT = MLADimensions(128, 64, 192)
MINICPM = MLADimensions(64, 32, 64)


def entry(
    matrix: Matrix,
    kernel: str,
    arch: str,
    dims: MLADimensions,
    dtype: str = "bfloat16",
    operation: str = "new_tokens",
) -> Entry:
    found = binaries.entries(matrix, kernel, arch, (dtype,))
    return next(e for e in found if (e.dims, e.operation) == (dims, operation))


# ---- FA4: what is compiled, and for which target ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "kernel_path", "target"),
    [
        ("sm80", "sm_80", "sm_80"),
        ("sm89", "sm_89", "sm_89"),
        ("sm90", "sm_90", "sm_90a"),
        ("sm100", "sm_100", "sm_100a"),
        ("sm103", "sm_103", "sm_103a"),
        ("sm110", "sm_110", "sm_110a"),
        ("sm121", "sm_121", "sm_121a"),
    ],
)
def test_the_target_is_set_before_fa4_is_imported(matrix: Matrix, arch: str, kernel_path: str, target: str) -> None:
    environment = FA4.environment(matrix.architectures[arch])
    assert environment["FLASH_ATTENTION_ARCH"] == kernel_path
    assert environment["CUTE_DSL_ARCH"] == target
    assert int(environment["FLASH_ATTENTION_NUM_SMS"]) > 0


def test_every_block_is_compiled_in_both_operations_for_every_nvidia_arch_of_the_sheet(matrix: Matrix) -> None:
    dims = {block.dims for block in matrix.blocks.values()}
    for arch in matrix.kernels["fa4"].arch:
        planned = list(builds.planned(matrix, FA4, "fa4", arch, "4.0.0b36"))
        assert {(e.dims, e.operation) for e in planned} == {(d, o) for d in dims for o in binaries.OPERATIONS}
    for arch in ("sm75", "gfx942", "cpu"):
        assert list(builds.planned(matrix, FA4, "fa4", arch, "4.0.0b36")) == []


def test_a_version_that_the_sheet_does_not_offer_is_not_held_against_it(matrix: Matrix) -> None:
    """sm110 needs 4.0.0b15; what no version can run is still asked."""
    planned = list(builds.planned(matrix, FA4, "fa4", "sm110", "4.0.0b14"))
    assert {e.dims for e in planned if e.cell.fit is not None} == set()
    assert GIGACHAT in {e.dims for e in planned}


def test_flashinfer_is_compiled_for_what_the_sheet_offers(matrix: Matrix) -> None:
    turing = list(builds.planned(matrix, FLASHINFER, "flashinfer_fa2", "sm75", "0.7.4"))
    assert {e.dtype for e in turing} == {"float16"}  # 7.5 has no bf16
    hopper = list(builds.planned(matrix, FLASHINFER, "flashinfer_fa3", "sm90", "0.7.4"))
    assert DEEPSEEK in {e.dims for e in hopper}
    assert MINICPM not in {e.dims for e in hopper}
    assert list(builds.planned(matrix, FLASHINFER, "flashinfer_fa3", "sm100", "0.7.4")) == []
    assert FLASHINFER.environment(matrix.architectures["sm90"]) == {"FLASHINFER_CUDA_ARCH_LIST": "9.0"}


# ---- FA4: what a build proves ----------------------------------------------------------------------------------------

#: Of the host function that launches FA4's (192, 128) kernel on sm_90a.
COMPILED_SM90 = """
  llvm.mlir.global internal constant @printfFormat_0("\\0AError: kernel '@k' launch shared memory exceeds current GPU arch \
sm_90a allowed. Allocated: %lld bytes. Max: 232448 bytes.\\0A") {addr_space = 0 : i32}
  llvm.func @cuda_init(%arg0: !llvm.ptr) -> i32 {
    %30 = llvm.mlir.constant(999999 : i64) : i64
  }
  llvm.func @cutlass_call(%arg0: !llvm.ptr) -> i32 {
    %28 = llvm.mlir.constant(4194304 : i64) : i64
    %30 = llvm.mlir.constant(214016 : i64) : i64
    %340 = llvm.getelementptr %335[0, 1, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %28, %340 : i64, !llvm.ptr
    %341 = llvm.getelementptr %335[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %30, %341 : i64, !llvm.ptr
  }
"""


def test_shared_memory_and_target_are_read_from_the_compiled_function() -> None:
    assert build_worker.read_compiled(COMPILED_SM90) == Answer(True, 0.0, None, "sm_90a", 214016, 232448)
    assert build_worker.read_compiled("") == Answer(True, 0.0)


@pytest.mark.parametrize(
    ("arch", "dims", "need", "ok"),
    [
        ("sm80", GLM, 131072, True),  # 163 KB on an A100
        ("sm89", DEEPSEEK, 90112, True),
        ("sm89", GLM, 131072, False),  # compiles, and fails at launch: Dao-AILab/flash-attention#2750
        ("sm120", GLM, 131072, False),
        ("sm120", GIGACHAT, 98304, True),
        ("sm90", GLM, 230400, True),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["by the compiled function", "by arithmetic"])
def test_what_compiles_must_also_fit(
    matrix: Matrix, arch: str, dims: MLADimensions, need: int, ok: bool, told: bool
) -> None:
    answer = Answer(True, 3.0, shared_memory=need if told else None)
    cell = builds.compiled_cell(matrix.architectures[arch], entry(matrix, "fa4", arch, dims), answer)
    assert cell["ok"] is ok
    known = told or matrix.limit("fa4", arch).shared_memory is not None  # type: ignore[union-attr]
    assert (str(need) in (cell.get("refusal") or cell["detail"])) is known
    assert ("it cannot be launched" in cell.get("refusal", "")) is not ok


def test_the_compiler_knows_a_limit_that_the_sheet_does_not(matrix: Matrix) -> None:
    architecture = dataclasses.replace(matrix.architectures["sm103"], shared_memory_bytes=None)
    asked = entry(matrix, "fa4", "sm103", DEEPSEEK)
    assert builds.compiled_cell(architecture, asked, Answer(True, 3.0, None, "sm_103a", 232448, 232448))["ok"] is True
    assert builds.compiled_cell(architecture, asked, Answer(True, 3.0, None, "sm_103a", 232449, 232448))["ok"] is False


def test_a_disagreement_with_the_sheets_arithmetic_is_written_down(matrix: Matrix) -> None:
    cell = builds.compiled_cell(
        matrix.architectures["sm120"], entry(matrix, "fa4", "sm120", DEEPSEEK), Answer(True, 3.0, shared_memory=49152)
    )
    assert "the kernel sheet says 90112" in cell["detail"]


@pytest.mark.parametrize(
    ("arch", "dims", "answer", "allowed", "ok"),
    [
        ("sm100", GIGACHAT, Answer(False, 0.1, "AssertionError: (192, 192) is not supported"), False, False),
        ("sm90", DEEPSEEK, Answer(False, 0.1, "AssertionError: new rule"), True, False),
        ("sm90", DEEPSEEK, Answer(None, 300.0, "no answer within 300 s"), True, None),
    ],
)
def test_a_refusal_keeps_its_text(
    matrix: Matrix, arch: str, dims: MLADimensions, answer: Answer, allowed: bool, ok: bool | None
) -> None:
    cell = builds.compiled_cell(matrix.architectures[arch], entry(matrix, "fa4", arch, dims), answer)
    assert (cell["allowed"], cell["ok"], cell["refusal"]) == (allowed, ok, answer.refusal)


# ---- FA4: children crash and hang ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"ready": true}\n', {"ready": True}),
        ("CUDA Error: no device\n", None),
        ("[1, 2]\n", None),
        ("\n", None),
    ],
)
def test_only_answers_are_read_from_a_child(line: str, value: object) -> None:
    assert builds.parse_line(line) == value


@pytest.mark.parametrize(
    ("returncode", "stderr", "ok", "text"),
    [
        (1, "Timeout (0:05:00)!\nThread 0x1 (most recent call first):\n", None, "no answer within 300 s"),
        (-signal.SIGKILL, "", None, "SIGKILL"),  # out of memory, as a rule: not the kernel's doing
        (-signal.SIGTERM, "", None, "SIGTERM"),
        (-signal.SIGUSR1, "", None, "SIGUSR1"),
        (-signal.SIGRTMIN - 1, "", None, "signal"),
        (-signal.SIGSEGV, "", False, "SIGSEGV"),
        (-signal.SIGABRT, "", False, "SIGABRT"),
        (-signal.SIGBUS, "", False, "SIGBUS"),
        (-signal.SIGABRT, "terminate called\n  what():  std::bad_alloc\n", None, "SIGABRT"),
        (1, "Traceback ...\nOSError: [Errno 28] No space left on device\n", None, "No space left"),
        (1, "Traceback ...\nImportError: undefined symbol: _ZN3c10\n\n", False, "ImportError: undefined symbol"),
        (3, "", False, "exit status 3: it wrote nothing"),
    ],
)
def test_how_a_child_ended(returncode: int, stderr: str, ok: bool | None, text: str) -> None:
    answer = builds.how_it_ended(returncode, stderr, 300.0)
    assert answer.compiled is ok
    assert text in (answer.refusal or "")


@pytest.mark.parametrize(
    ("error", "compiled"),
    [
        (AssertionError("(192, 192) is not supported"), False),
        (OSError(28, "No space left on device"), None),
        (MemoryError(), None),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
        (OSError("libnvvm.so: cannot open shared object file: No such file or directory"), False),
    ],
    ids=repr,
)
def test_trouble_of_the_machine_is_no_refusal(error: Exception, compiled: bool | None) -> None:
    def compiler(job: Job) -> Answer:
        raise error

    answer = build_worker.attempt(compiler, Job(192, 128, "bfloat16", "new_tokens"))
    assert answer.compiled is compiled
    assert str(error) in (answer.refusal or "")


#: A child of the real protocol that crashes on 192-wide V and hangs on 256-wide V.
CHILD = """
import faulthandler, json, os, sys, time
request = json.load(sys.stdin)
print("noise of a compiler")
print(json.dumps({"ready": True}), flush=True)
for qk, v, dtype, operation in request["jobs"]:
    faulthandler.dump_traceback_later(request["timeout"], exit=True)
    if v == 192:
        os.abort()
    if v == 256:
        time.sleep(60)
    print(json.dumps({"compiled": True, "seconds": 0.1}), flush=True)
"""


def test_a_crash_or_a_hang_costs_one_job(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "child_command", lambda: [sys.executable, "-c", CHILD])
    jobs = [Job(qk, v, "bfloat16", "new_tokens") for qk, v in ((192, 128), (192, 192), (256, 256), (128, 128))]
    sweep = Sweep(FA4, "fa4", matrix.architectures["sm90"], ())
    answers = dict(sweep.build(jobs, timeout=0.5))
    assert list(answers) == jobs
    assert [answer.compiled for answer in answers.values()] == [True, False, None, True]
    assert "SIGABRT" in (answers[jobs[1]].refusal or "")
    assert "no answer within 0.5 s" in (answers[jobs[2]].refusal or "")


def test_a_child_that_cannot_start_is_reported_and_proves_nothing(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('ImportError: libcute_dsl_runtime.so')"]
    monkeypatch.setattr(builds, "child_command", lambda: broken)
    said: list[str] = []
    sweep = Sweep(FA4, "fa4", matrix.architectures["sm90"], (entry(matrix, "fa4", "sm90", DEEPSEEK),))
    answers: dict[Job, Answer] = {}
    sweep.compile(builds.Building(said.append), answers)
    assert list(sweep.cells(answers)) == []
    assert len(said) == 1
    assert "fa4 was not compiled for sm90" in said[0]
    assert "libcute_dsl_runtime.so" in said[0]


def test_without_packages_each_source_says_why_it_was_not_asked(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (builds, binaries):
        monkeypatch.setattr(module, "installed", lambda names: {})
    said: list[str] = []
    assert builds.prove(matrix, ["9.0"], builds.Building(said.append)) == []
    assert [text.split()[0] for text in said] == ["fa4", "flashinfer_fa2", "fa2", "trtllm_ragged"]
    with pytest.raises(UnknownNameError, match="sm90"):
        builds.prove(matrix, ["sm91"], builds.Building(said.append))


def is_installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_installed("flash-attn-4"), reason="flash-attn-4 is not installed: nothing to compile")
def test_fa4_is_really_compiled(matrix: Matrix) -> None:
    jobs = [Job(128, 128, "bfloat16", "new_tokens"), Job(192, 192, "bfloat16", "context_chunk")]
    sweep = Sweep(FA4, "fa4", matrix.architectures["sm100"], ())
    built, refused = (answer for _, answer in sweep.build(jobs, builds.TIMEOUT))
    assert built.compiled, built.refusal
    assert built.target == "sm_100a"
    assert built.shared_memory is not None
    assert 0 < built.shared_memory <= 232448
    assert refused.compiled is False
    assert "(192, 192) is not supported on SM100/SM110" in (refused.refusal or "")


@pytest.mark.skipif(not is_installed("flash-attn-4"), reason="flash-attn-4 is not installed: nothing to compile")
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120"])
def test_what_fa4_compiles_refuses_misaligned_tensors_itself(matrix: Matrix, arch: str) -> None:
    """So a planned call need not ask for pointers. All four checks are in the code; CPU tensors get past the first."""
    program = r"""
import importlib, re, torch
from mla_prefill.backends import build_worker
build_worker.describe_gpu(132)
interface = importlib.import_module("flash_attn.cute.interface")
build_worker.compile_fa4(interface, build_worker.Job(128, 128, "bfloat16", "new_tokens"))
(compiled,) = interface._flash_attn_fwd.compile_cache.cache.values()
code = str(compiled.ir_module)
(text,) = re.findall(r'constant (@\w+)\(", expected data alignment=16 bytes', code)
print(len(re.findall(rf"addressof {text} ", code)))
even = torch.zeros(32, 4, 128, dtype=torch.bfloat16)
odd = torch.zeros(32 * 4 * 128 + 1, dtype=torch.bfloat16)[1:].view(32, 4, 128)
starts = torch.tensor([0, 32], dtype=torch.int32)
for q in (even, odd):
    try:
        compiled(q, even, even, even, torch.zeros(4, 32), 1.0, starts, starts)
    except ValueError as error:
        print(str(error).split(" on argument")[0])
"""
    environment = {**os.environ, **builds.fa4_environment(matrix.architectures[arch])}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["4", "Mismatched Tensor", "Misaligned Tensor data"], run.stderr


@dataclass
class JitSpec:
    """What FlashInfer 0.7.4's JitSpec tells: one command for each source of a module."""

    commands: list[dict[str, str]]

    def get_compile_commands(self) -> list[dict[str, str]]:
        return self.commands


@pytest.mark.parametrize(
    ("script", "compiled", "text"),
    [
        ("", True, None),
        ("echo 'prefill.cuh(10): error: static assertion failed' >&2; exit 2", False, "static assertion failed"),
        ("echo \"nvcc fatal   : Unsupported gpu architecture 'compute_107a'\" >&2; exit 1", None, "compute_107a"),
        ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9", None, "signal 9"),
        ("echo 'Fatal error: error writing to /tmp/x.o: No space left on device' >&2; exit 1", None, "No space"),
        (
            "echo 'tensor_fill.h:52:10: fatal error: curand_kernel.h: No such file or directory' >&2; exit 1",
            None,
            "curand",
        ),
    ],
)
def test_one_ragged_source_of_flashinfers_module_is_compiled(
    tmp_path: Path, script: str, compiled: bool | None, text: str | None
) -> None:
    sources = [
        f"batch_prefill_{layout}_kernel_mask_{mask}.cu"
        for layout in ("paged", "ragged", "ragged_sm90")
        for mask in (0, 1)
    ]
    log = tmp_path / "compiled"
    commands = [
        {
            "directory": str(tmp_path / "build"),
            "file": f"/generated/{source}",
            "command": f"sh -c {shlex.quote(f'echo {source} >> {log}; {script}')} nvcc -gencode=arch=compute_80,code=sm_80",
        }
        for source in sources[:4]
    ]
    called: list[tuple[Any, ...]] = []

    def generate(*arguments: Any) -> JitSpec:
        called.append(arguments)
        return JitSpec(commands)

    job = Job(192, 128, "bfloat16", "new_tokens")
    answer = build_worker.compile_flashinfer(torch, generate, "fa2", job)
    assert log.read_text().split() == ["batch_prefill_ragged_kernel_mask_1.cu"]
    assert (answer.compiled, answer.target) == (compiled, "sm_80" if compiled else None)
    assert text is None or text in (answer.refusal or "")
    bf16 = torch.bfloat16
    assert called == [("fa2", bf16, bf16, bf16, torch.int32, 192, 128, 0, False, False, False)]


# ---- binaries: which architecture runs which code --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "ptx", "runs", "does_not"),
    [
        ("sm_80", False, "sm80 sm86 sm89", "sm75 sm87 sm90 sm120"),  # 8.7 is integrated: only its own code
        ("sm_86", False, "sm86 sm89", "sm80 sm87"),
        ("sm_87", False, "sm87", "sm89"),
        ("sm_80", True, "sm80 sm87 sm90 sm103 sm121", "sm75"),
        ("sm_90", False, "sm90", "sm89 sm100"),
        ("sm_90a", False, "sm90", "sm100"),
        ("sm_90a", True, "sm90", "sm100 sm120"),  # PTX of an `a` target is bound to it too
        ("sm_100", False, "sm100 sm103 sm107", "sm110 sm120"),
        ("sm_100a", False, "sm100", "sm103"),
        ("sm_100f", False, "sm100 sm103 sm107", "sm110"),
        ("sm_103a", False, "sm103", "sm100 sm107"),
        ("sm_101a", False, "sm110", "sm103"),  # CUDA 12's name of 11.0
        ("sm_120", False, "sm120 sm121", "sm110"),
        ("sm_52", True, "", "sm80"),  # not a declared architecture: nothing is claimed
        ("sm_90", False, "", "gfx942 cpu"),
    ],
)
def test_which_architectures_run_a_target(matrix: Matrix, target: str, ptx: bool, runs: str, does_not: str) -> None:
    for expected, arches in ((True, runs), (False, does_not)):
        for arch in arches.split():
            assert binaries.runs_on(matrix, target, ptx, arch) is expected, arch


# ---- binaries: what cuobjdump says -----------------------------------------------------------------------------------

FA2_192 = (
    "_ZN5flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi192ELi128ELi64ELi8ELb0ELb0EN7cutlass10bfloat16_tE"
    "19Flash_kernel_traitsILi192ELi128ELi64ELi8ES3_EELb0ELb1ELb0ELb0ELb0ELb1ELb0ELb0EEEvNS_16Flash_fwd_paramsE"
)
FA2_SPLIT = FA2_192.replace("16flash_fwd_kernelI", "24flash_fwd_splitkv_kernelI")
FA3_SM90 = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90ILi2EN4"
    "cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJNS7_ILi128EEESA_NS7_ILi192EEEEEELi128ENS_10bfloat16_tEfNS_4arch4Sm90ELb0ELb0"
    "ELb0ELb1ELb0ELb0ELb0ELb1ELb1ELb1ELb0ELb0EEENS1_21CollectiveEpilogueFwdINS6_IJSA_SA_SA_EEES9_SD_SF_Li256ELb0ELb1ELb0E"
    "Lb0EEENS1_29StaticPersistentTileSchedulerILb0EEEEEEEEEvNT_6ParamsE"
)
FA3_SM80 = (
    "_ZN7cutlass13device_kernelIN5flash19enable_sm80_to_sm89INS1_16FlashAttnFwdSm80INS1_25CollectiveMainloopFwdSm80ILi8ELi1E"
    "Lb1EN4cute5tupleIJNS5_1CILi128EEENS7_ILi96EEENS7_ILi192EEEEEELi192ENS_10bfloat16_tEfNS_4arch4Sm80ELb1ELb0ELb0ELb1ELb0"
    "ELb0ELb1ELb0EEENS1_21CollectiveEpilogueFwdINS6_IJS8_SA_S9_EEENS6_IJNS7_ILi1EEESI_SI_EEESC_SE_Li256ELb0ELb1ELb0ELb0EEE"
    "NS1_19SingleTileSchedulerILb0ELb0ELb1ELi128EEEEEEEEEvNT_6ParamsE"
)
FA3_FIXED_LENGTH = FA3_SM90.replace("4arch4Sm90ELb0ELb0ELb0ELb1E", "4arch4Sm90ELb0ELb0ELb0ELb0E")
FA3_FP8 = FA3_SM90.replace("10bfloat16_t", "12float_e4m3_t")


@pytest.mark.parametrize(
    ("name", "target", "function"),
    [
        (FA2_192, "sm_80", Function(192, 192, "bfloat16", True)),
        (FA2_SPLIT, "sm_80", None),
        (FA3_SM90, "sm_90a", Function(192, 128, "bfloat16", False)),
        (FA3_SM90, "sm_80", None),  # compiled to nothing there
        (FA3_SM80, "sm_86", Function(192, 192, "bfloat16", True)),
        (FA3_SM80, "sm_90a", None),
        (FA3_FIXED_LENGTH, "sm_90a", None),
        (FA3_FP8, "sm_90a", None),
        ("_ZN2at6native6kernelEv", "sm_90a", None),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_names_of_forward_kernels(name: str, target: str, function: Function | None) -> None:
    assert binaries.parse_function(binaries.demangle(name), target) == function


def dump(*pieces: tuple[str, str, str]) -> list[str]:
    """(elf or ptx, target, kernel) as ``cuobjdump --dump-elf-symbols`` writes them."""
    lines = []
    for kind, target, name in pieces:
        lines += ["", f"Fatbin {kind} code:", "================", f"arch = {target}", "code version = [1,8]"]
        if kind == "elf":
            lines += ["symbols:", f"STT_FUNC         STB_GLOBAL STO_ENTRY      {name}"]
            lines += [f"STT_OBJECT       STB_WEAK   STV_DEFAULT  U {name}_alias"]
    return lines


def test_ptx_holds_what_the_machine_code_of_the_same_units_holds() -> None:
    held = frozenset({Function(192, 192, "bfloat16", True)})
    both = binaries.parse_dump(dump(("ptx", "sm_80", ""), ("elf", "sm_80", FA2_192)), binaries.demangle)
    assert both == [Code("sm_80", False, held), Code("sm_80", True, held)]
    other_units = dump(("elf", "sm_80", FA2_192), ("elf", "sm_80", FA2_192), ("ptx", "sm_80", ""))
    assert binaries.parse_dump(other_units, binaries.demangle)[1].functions == frozenset()
    assert binaries.parse_dump([], binaries.demangle) == []


def halves(qk: int, v: int) -> frozenset[Function]:
    return frozenset(Function(qk, v, "bfloat16", causal) for causal in (True, False))


def cells_of(matrix: Matrix, shipped: Shipped, version: str, codes: list[Code], arch: str) -> dict[str, dict[str, Any]]:
    """The causal bf16 cells, by dims."""
    cells = binaries.held_cells(matrix, shipped, version, codes, [arch])
    wanted = {"dtype": "bfloat16", "operation": "new_tokens"}
    return {str(MLADimensions(*c["dims"])): c for c in cells if wanted.items() <= c.items()}


VLLM_FA2 = Shipped("fa2", "vllm", "vllm/vllm_flash_attn/_vllm_fa2_C*.so")
FA3_FWD = Shipped("fa3", "fa3-fwd", "fa3_fwd/_C*.so")


def test_a_cell_is_proven_by_code_that_its_architecture_runs(matrix: Matrix) -> None:
    functions = halves(96, 96) | halves(192, 192) | halves(256, 256)
    machine, ptx = Code("sm_80", False, functions), Code("sm_80", True, functions)
    on_ampere = cells_of(matrix, VLLM_FA2, "0.33.0", [machine, ptx], "sm86")
    assert "sm_80 machine code of the (192, 192) kernel" in on_ampere[str(DEEPSEEK)]["detail"]
    assert on_ampere[str(DEEPSEEK)]["pad_v_to"] == 192
    assert "(96, 96)" in on_ampere[str(MINICPM)]["detail"]
    on_hopper = cells_of(matrix, VLLM_FA2, "0.33.0", [machine, ptx], "sm90")
    assert "sm_80 PTX" in on_hopper[str(DEEPSEEK)]["detail"]
    without_ptx = cells_of(matrix, VLLM_FA2, "0.33.0", [machine], "sm90")[str(DEEPSEEK)]
    assert (without_ptx["allowed"], without_ptx["ok"]) == (True, False)
    assert "nothing that runs there" in without_ptx["refusal"]


def test_unequal_widths_have_kernels_of_their_own(matrix: Matrix) -> None:
    equal = cells_of(matrix, FA3_FWD, "0.0.3", [Code("sm_90a", False, halves(192, 192))], "sm90")
    assert equal[str(GIGACHAT)]["ok"] is True
    assert equal[str(DEEPSEEK)]["ok"] is False
    both = [Code("sm_90a", False, halves(192, 192) | halves(192, 128))]
    assert cells_of(matrix, FA3_FWD, "0.0.3", both, "sm90")[str(DEEPSEEK)]["ok"] is True


def test_what_a_package_does_not_claim_is_no_failure(matrix: Matrix) -> None:
    """fa3-fwd holds sm_80 kernels that the sheet does not offer, is bf16 only, and its 0.0.2 is not in the sheet."""
    codes = [Code("sm_80", False, halves(192, 192)), Code("sm_90a", False, halves(192, 192))]
    found = cells_of(matrix, FA3_FWD, "0.0.3", codes, "sm80")
    assert set(found) == {str(DEEPSEEK), str(GIGACHAT)} | {str(dims) for dims in (MLADimensions(64, 64, 128), MINICPM)}
    assert all(cell["ok"] and not cell["allowed"] for cell in found.values())
    assert "does not offer it through fa3-fwd" in found[str(DEEPSEEK)]["detail"]
    everything = list(binaries.held_cells(matrix, FA3_FWD, "0.0.3", codes, ["sm90"]))
    assert {cell["dtype"] for cell in everything} == {"bfloat16"}
    assert not any(c["allowed"] for c in binaries.held_cells(matrix, FA3_FWD, "0.0.2", codes, ["sm90"]))


def test_without_cuobjdump_the_report_says_so(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(binaries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(binaries.CannotAsk, match="pip install triton"):
        binaries.cuobjdump()
    tool = tmp_path / "bin" / "cuobjdump"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 7\n")
    os.chmod(tool, 0o755)
    with pytest.raises(binaries.CannotAsk, match="exit status 7"):
        binaries.read_binary(tmp_path / "_C.abi3.so")


# ---- flashinfer-cubin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "function"),
    [
        ("Sm100fKernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128PersistentContext", "sm_100f",
         Function(192, 128, "bfloat16", True)),
        ("Sm103aKernel_QkvE4m3OBfloat16H256SeparateQkvDenseVarSeqQ128Kv128StaticContext", "sm_103a",
         Function(256, 256, "float8_e4m3fn", False)),
        ("Sm103aKernel_QkvE4m3OBfloat16H256SeparateQkvDenseVarSeqSkipsSoftmaxQ128Kv128StaticContext", "", None),
        ("Sm100fKernel_QkvFp16OFp16H128SeparateQkvDenseVarSeqQ128Kv128StaticContext", "sm_100f",
         Function(128, 128, "float16", False)),
        ("Sm100fKernel_QkvE4m3OBfloat16H128SeparateQkvDenseVarSeqQ128Kv128SageQ1SageK16SageV1StaticContext", "", None),
        ("Sm100fKernel_QkvE4m3OE4m3H128SeparateQkvDenseVarSeqQ128Kv128StaticContext", "", None),
        ("Sm100fKernel_QkBfloat16VE4m3OBfloat16H128SeparateQkvDenseVarSeqQ128Kv128StaticContext", "", None),
        ("Sm100aKernel_QE4m3KvE2m1OE4m3H128PagedKvCausalP16VarSeqQ128Kv128StaticContext", "", None),
        ("Sm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32VarSeqQ16Kv128StaticSwapsAbForGen", "", None),
    ],
)  # fmt: skip
def test_names_of_trtllm_kernels(name: str, target: str, function: Function | None) -> None:
    expected = [] if function is None else [Code(target, False, frozenset({function}))]
    assert binaries.parse_cubins([f"fmha{name}.cubin", "checksums.txt"]) == expected


def test_trtllm_cells_are_asked_by_exact_widths_dtype_and_mask(matrix: Matrix) -> None:
    both = halves(192, 128) | {Function(128, 128, "float16", False)}
    cells = list(binaries.cubin_cells(matrix, "0.6.13", [Code("sm_100f", False, both)], ["sm100", "sm120"]))
    found = {(tuple(c["dims"]), c["dtype"], c["operation"]): (c["ok"], c["allowed"]) for c in cells}
    assert {c["arch"] for c in cells} == {"sm100"}  # the sheet has no kernel for 12.x
    assert {c["provider"] for c in cells} == {"flashinfer-python"}
    assert found[DEEPSEEK, "bfloat16", "new_tokens"] == (True, True)
    assert found[DEEPSEEK, "float16", "new_tokens"] == (False, False)
    assert found[MLADimensions(64, 64, 128), "float16", "context_chunk"] == (True, False)
    assert found[GLM, "bfloat16", "new_tokens"] == (False, True)
    narrow = Wanted(dims=[DEEPSEEK], dtypes=["bfloat16"])
    some = binaries.cubin_cells(matrix, "0.6.13", [Code("sm_100f", False, both)], ["sm100", "sm103"], narrow)
    assert {(c["arch"], tuple(c["dims"]), c["dtype"]) for c in some} == {
        (arch, DEEPSEEK, "bfloat16") for arch in ("sm100", "sm103")
    }
    older = binaries.cubin_cells(matrix, "0.6.11", [Code("sm_100f", False, both)], ["sm100"])
    assert GLM not in {tuple(c["dims"]) for c in older}  # 256-wide heads need 0.6.12


def test_cubins_are_of_the_package_that_is_released_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flashinfer-cubin": "0.6.13", "flashinfer-python": "0.7.4"}
    monkeypatch.setattr(binaries, "installed", lambda names: {n: v for n, v in versions.items() if n in names})
    assert binaries.cubin_packages() == {"flashinfer-cubin": "0.6.13", "flashinfer-python": "0.6.13"}
    del versions["flashinfer-cubin"]
    assert binaries.cubin_packages() == {}


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer, str], None]:
    """compiler(answer, broken): FA4 4.0.0b36 that answers so, and does not start for one architecture; no binaries."""
    monkeypatch.setattr(builds, "installed", lambda names: {n: "4.0.0b36" for n in names if n == "flash-attn-4"})
    monkeypatch.setattr(binaries, "installed", lambda names: {})
    monkeypatch.chdir(tmp_path)

    def answering(answer: Answer, broken: str) -> None:
        def run(sweep: Sweep, jobs: Sequence[Job], timeout: float) -> Iterator[Answer]:
            if sweep.architecture.id == broken:
                raise builds.CannotBuild("ImportError: boom")
            return (answer for _ in jobs)

        monkeypatch.setattr(Sweep, "_run_child", run)

    return answering


BUILD = ["verify", "--build-only", "--kernel", "fa4", "--output", "out.json"]


@pytest.mark.parametrize(
    ("answer", "broken", "arguments", "code", "says"),
    [
        (Answer(True, 1.0), "", ["--arch", "sm90,sm100"], 0, ""),
        (Answer(True, 1.0), "sm100", ["--arch", "sm90,sm100"], 1, "fa4 was not compiled for sm100: ImportError: boom"),
        (Answer(True, 1.0), "sm100", [], 1, "fa4 was not compiled for sm100: ImportError: boom"),
        (Answer(True, 1.0), "", ["--arch", "sm90,gfx942"], 1, "gfx942: nothing was built or read for it"),
        (Answer(True, 1.0), "", ["--kernel", "fa2", "--arch", "sm90"], 1, "fa2: nothing was built or read for it"),
        (Answer(None, 300.0, "no answer within 300 s"), "", ["--arch", "sm90"], 1, "fa4 on sm90, "),
        (Answer(False, 1.0, "AssertionError: new rule"), "", ["--arch", "sm90"], 1, ""),
        (Answer(True, 1.0), "sm90", ["--arch", "sm90"], 1, "nothing could be built"),
    ],
)
def test_what_was_not_proven_is_told_and_exit_1(
    compiler: Callable[[Answer, str], None],
    capsys: pytest.CaptureFixture[str],
    answer: Answer,
    broken: str,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    compiler(answer, broken)
    assert main([*BUILD, *arguments]) == code
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mla-prefill: not proven: ")]
    assert any(says in line for line in said) if says else not said


@pytest.mark.parametrize(
    ("arguments", "dims", "dtypes", "command"),
    [
        (["--dims", "96,32,64"], {(96, 32, 64)}, {"bfloat16", "float16"}, "--dims 96,32,64"),
        (["--model", "deepseek_v3", "--dtype", "bf16"], {DEEPSEEK}, {"bfloat16"}, "--dtype bfloat16 --dims 128,64,128"),
    ],
)
def test_a_build_is_narrowed_as_a_run_is(
    compiler: Callable[[Answer, str], None],
    tmp_path: Path,
    arguments: list[str],
    dims: set[tuple[int, ...]],
    dtypes: set[str],
    command: str,
) -> None:
    compiler(Answer(True, 1.0), "")
    assert main([*BUILD, "--arch", "sm90", *arguments]) == 0
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {tuple(cell["dims"]) for cell in record["cells"]} == dims
    assert {cell["dtype"] for cell in record["cells"]} == dtypes
    assert record["command"] == f"mla-prefill verify --build-only --arch sm90 --kernel fa4 {command}"


def test_a_time_limit_holds_for_a_build(
    compiler: Callable[[Answer, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def run(sweep: Sweep, jobs: Sequence[Job], timeout: float) -> Iterator[Answer]:
        limits.append(timeout)
        return (Answer(True, 1.0) for _ in jobs)

    monkeypatch.setattr(Sweep, "_run_child", run)
    assert main([*BUILD, "--arch", "sm90", "--timeout", "7"]) == 0
    assert set(limits) == {7.0}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--jobs", "2"], "--jobs is for a run on GPUs"),
        (
            ["--kernel", "cudnn"],
            "--build-only does not build cudnn, only fa4, flashinfer_fa2, flashinfer_fa3, fa2, fa3, trt",
        ),
        (["--kernel", "fa5"], "unknown kernel 'fa5'"),
        (["--dtype", "bf15"], "unknown dtype 'bf15'"),
    ],
)
def test_wrong_use_of_a_build_is_exit_2(
    compiler: Callable[[Answer, str], None], capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main([*BUILD, *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("output", ["out.json", "folder"])
def test_each_record_of_a_build_has_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    def made(kernel: str, provider: str) -> dict[str, Any]:
        dims = {"dims": [64, 64, 128], "qk": 128, "v": 128, "dtype": "bfloat16", "operation": "new_tokens"}
        cell = {"kernel": kernel, "provider": provider, "arch": "sm90", **dims, "allowed": True, "ok": True}
        return builds.record("mla-prefill verify --build-only", {provider: "1.0"}, [cell])

    four = [made("fa4", "flash-attn-4"), made("flashinfer_fa2", "flashinfer-python"), made("fa2", "vllm")]
    four.append(made("trtllm_ragged", "flashinfer-python"))
    monkeypatch.setattr(builds, "prove", lambda *_: four)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out-2.json").write_text("an older one", encoding="utf-8")
    assert main(["verify", "--build-only", "--output", output]) == 0
    files = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines() if line.startswith("evidence: ")]
    assert [json.loads(Path(file).read_text(encoding="utf-8"))["packages"] for file in files] == [
        r["packages"] for r in four
    ]
    assert (tmp_path / "out-2.json").read_text(encoding="utf-8") == "an older one"


def test_an_interrupt_costs_what_is_not_done_yet(
    compiler: Callable[[Answer, str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches the children too, and is raised in the thread that waits for one."""
    compiler(Answer(True, 1.0), "")

    def run(sweep: Sweep, jobs: Sequence[Job], timeout: float) -> Iterator[Answer]:
        yield Answer(True, 1.0)
        if sweep.architecture.id == "sm100":
            raise KeyboardInterrupt
        yield from (Answer(True, 1.0) for _ in jobs[1:])

    monkeypatch.setattr(builds, "CHILDREN", 1)
    monkeypatch.setattr(Sweep, "_run_child", run)
    assert main([*BUILD, "--arch", "sm90,sm100"]) == 130
    cells = json.loads(Path("out.json").read_text(encoding="utf-8"))["cells"]
    done = Counter(cell["arch"] for cell in cells)
    assert done["sm90"] > done["sm100"] > 0
    assert "evidence: " in capsys.readouterr().err


# ---- what is committed -----------------------------------------------------------------------------------------------


def committed(kernel: str) -> list[dict[str, Any]]:
    records = (json.loads(path.read_text("utf-8")) for path in sorted((DATA_DIR / "evidence").glob("built-*.json")))
    return [cell for record in records for cell in record["cells"] if cell["kernel"] == kernel]


def test_fa4_was_built_for_every_architecture_of_the_sheet(matrix: Matrix) -> None:
    cells = committed("fa4")
    assert {cell["arch"] for cell in cells} == set(matrix.kernels["fa4"].arch)
    dims = {tuple(cell["dims"]) for cell in cells}
    for arch in matrix.kernels["fa4"].arch:
        for operation in binaries.OPERATIONS:
            built = {tuple(c["dims"]) for c in cells if (c["arch"], c["operation"]) == (arch, operation)}
            assert built == dims, (arch, operation)


@pytest.mark.parametrize("kernel", ["fa2", "fa3", "fa4", "trtllm_ragged"])
def test_no_committed_build_contradicts_the_sheet(matrix: Matrix, kernel: str) -> None:
    cells = committed(kernel)
    assert cells
    for cell in cells:
        known = next(c for c in matrix.cells(cell["arch"], MLADimensions(*cell["dims"])) if c.kernel.name == kernel)
        possible = known.fit is not None and cell["dtype"] in known.candidate.dtypes
        assert cell["ok"] or not possible, cell
        assert cell["ok"] is not None, cell
