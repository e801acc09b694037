"""``verify``: which cells are run, how wrong results and dying processes are told, and what is written."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from mla_prefill import Environment, Overrides
from mla_prefill.backends import KernelError, torch_sdpa, verify
from mla_prefill.backends.records import keep, lined, one_line
from mla_prefill.backends.reference import reference_attention
from mla_prefill.backends.verify_worker import Errors, Tensors, _errors, decision_for, verify_cell
from mla_prefill.capabilities import Matrix, MLADimensions, load_matrix
from mla_prefill.capabilities.schema import SCHEMA_DIR
from mla_prefill.cli import main

DEEPSEEK, MISTRAL, MINICPM = MLADimensions(128, 64, 128), MLADimensions(64, 64, 128), MLADimensions(64, 32, 64)
H200 = {
    "fa3-fwd": "0.0.3",
    "flash-attn": "2.8.3",
    "flash-attn-4": "4.0.0b36",
    "flashinfer-python": "0.7.4",
    "nvidia-cudnn-frontend": "1.32.0",
    "torch": "2.11.0",
}


def planned(matrix: Matrix, installed: dict[str, str], dims: MLADimensions, arch: str = "sm90") -> list[verify.Task]:
    return verify.tasks(matrix, arch, installed, verify.Wanted(dims=[dims]))[0]


# ---- which cells ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "provider", "dims", "dtypes", "pad_v_to"),
    [
        ("fa2", "flash-attn", DEEPSEEK, ["bfloat16", "float16"], 192),
        ("fa2", "torch", DEEPSEEK, ["bfloat16", "float16"], 192),  # every provider, not only the first
        ("fa2", "torch", MISTRAL, ["bfloat16", "float16"], None),
        ("fa3", "fa3-fwd", DEEPSEEK, ["bfloat16"], None),  # built without FP16
        ("fa3", "fa3-fwd", MINICPM, ["bfloat16"], 96),
        ("fa4", "flash-attn-4", MINICPM, ["bfloat16", "float16"], None),
        ("flashinfer_fa3", "flashinfer-python", DEEPSEEK, ["bfloat16", "float16"], None),
        ("flashinfer_fa3", "flashinfer-python", MINICPM, [], None),  # the kernel sheet has no such widths
        ("torch_efficient", "torch", MINICPM, ["bfloat16", "float16", "float32"], None),
        ("trtllm_ragged", "flashinfer-python", DEEPSEEK, [], None),  # not on sm90
    ],
)
def test_every_provider_runs_its_dtypes_in_both_operations(
    matrix: Matrix, kernel: str, provider: str, dims: MLADimensions, dtypes: list[str], pad_v_to: int | None
) -> None:
    mine = [task for task in planned(matrix, H200, dims) if (task.kernel, task.provider) == (kernel, provider)]
    expected = [(dtype, operation) for dtype in dtypes for operation in verify.OPERATIONS]
    assert [(task.dtype, task.operation) for task in mine] == expected
    assert {task.pad_v_to for task in mine} <= {pad_v_to}


def test_possible_cells_without_a_row_are_run_too(matrix: Matrix) -> None:
    assert all(task.allowed for task in planned(matrix, H200, DEEPSEEK) if task.kernel == "fa4")
    unlisted = planned(matrix, H200, MLADimensions(96, 64, 128))
    assert {"fa2", "fa3", "fa4", "torch_efficient", "torch_math"} <= {task.kernel for task in unlisted}
    assert not any(task.allowed for task in unlisted)


@pytest.mark.parametrize(
    ("installed", "kernel", "operations", "why"),
    [
        ({"flash-attn-4": "4.0.0b5"}, "fa4", ["context_chunk"], "crashes when no sequence"),
        ({"fa3-fwd": "0.0.2"}, "fa3", [*verify.OPERATIONS], "needs fa3-fwd>=0.0.3"),
        ({"flash-attn-4": "4.0.0b36"}, "fa4", [], ""),
    ],
)
def test_what_the_sheet_rules_out_is_left_out_with_its_reason(
    matrix: Matrix, installed: dict[str, str], kernel: str, operations: list[str], why: str
) -> None:
    tasks, skipped = verify.tasks(matrix, "sm90", installed, verify.Wanted([kernel], [DEEPSEEK], ["bfloat16"]))
    assert [task.operation for task, _ in skipped] == operations
    assert all(why in reason for _, reason in skipped)
    assert {task.operation for task in tasks} == set(verify.OPERATIONS) - set(operations)


@pytest.mark.parametrize(
    ("overrides", "kernels", "run"),
    [
        (Overrides(), [], {"fa2", "fa3", "torch_efficient", "torch_math"}),
        (Overrides(disable=("TORCH_SDPA", "fa3")), [], {"fa2"}),
        (Overrides(backend="FLASH_ATTN"), [], {"fa2", "fa3"}),
        (Overrides(backend="torch_math"), [], {"torch_math"}),
        (Overrides(fa_version=3), [], {"fa3"}),
        (Overrides(fa_version=3), ["fa2"], {"fa2"}),  # an argument beats the environment
        (Overrides(disable=("fa2",)), ["fa2"], set()),
    ],
)
def test_environment_variables_narrow_what_is_verified(
    matrix: Matrix, overrides: Overrides, kernels: list[str], run: set[str]
) -> None:
    installed = {"flash-attn": "2.8.3", "fa3-fwd": "0.0.3", "torch": "2.11.0"}
    wanted = verify.Wanted(kernels, [DEEPSEEK], ["bfloat16"])
    todo, skipped = verify.tasks(matrix, "sm90", installed, wanted, overrides)
    assert {task.kernel for task in todo} == run
    assert all(why for _, why in skipped)


def test_a_variable_that_names_nothing_is_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa33")
    assert main(["verify", "--dims", "64,32,64"]) == 2
    assert "unknown backend 'fa33' (environment variable MLA_PREFILL_DISABLE)" in capsys.readouterr().err


def test_packages_that_are_not_installed_have_no_cells(matrix: Matrix) -> None:
    assert {task.provider for task in planned(matrix, {"torch": "2.11.0"}, DEEPSEEK)} == {"torch"}
    assert planned(matrix, {}, DEEPSEEK) == []


# ---- right and wrong ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth() -> Tensors:
    """Two sequences, the second without keys."""
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 2, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 8)
    starts = torch.tensor([0, 4, 7]), torch.tensor([0, 9, 9])
    return Tensors(q, k, v, *reference_attention(q, k, v, *starts, causal=False, softmax_scale=0.25))


def changed(tensor: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    copy = tensor.clone()
    copy[place] = value
    return copy


def test_the_truth_is_right(truth: Tensors) -> None:
    assert _errors((truth.out, truth.lse), truth) == Errors(0.0, 0.0, None)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("out of a row without keys", "out is not 0"),
        ("LSE +inf without keys", "rows without keys"),
        ("LSE -inf with keys", "rows without keys"),
    ],
)
def test_rows_without_keys_are_held_exactly(truth: Tensors, what: str, says: str) -> None:
    wrong = {
        "out of a row without keys": (changed(truth.out, (5, 0, 0), 1e-3), truth.lse),
        "LSE +inf without keys": (truth.out, changed(truth.lse, (0, 5), math.inf)),
        "LSE -inf with keys": (truth.out, changed(truth.lse, (0, 0), -math.inf)),
    }[what]
    assert says in (_errors(wrong, truth).wrong or "")


@pytest.mark.parametrize("wrong", ["LSE of base 2", "V of another head", "NaN"])
def test_other_differences_are_errors(truth: Tensors, wrong: str) -> None:
    out, lse = {
        "LSE of base 2": (truth.out, truth.lse / math.log(2)),
        "V of another head": (truth.out.flip(1), truth.lse),
        "NaN": (changed(truth.out, (0, 0, 0), math.nan), truth.lse),
    }[wrong]
    errors = _errors((out, lse), truth)
    assert not (errors.out <= 1e-2 and errors.lse <= 1e-2)


@pytest.mark.parametrize(
    ("result", "fine", "says"),
    [
        ({"ok": True, "error": 2e-3, "cuda_graph": True}, True, "ok, error 2.0e-03"),
        ({"ok": True, "error": 2e-3, "cuda_graph": False}, True, "ok, error 2.0e-03"),  # nothing was claimed
        ({"ok": True, "error": 2e-3, "cuda_graph": "cannot sync"}, False, "but not in a CUDA graph: cannot sync"),
        ({"ok": False, "refusal": "head dim must be 192"}, False, "FAILED: head dim must be 192"),
        ({"ok": None, "refusal": "no module"}, False, "not tried: no module"),
    ],
)
def test_outcomes(result: dict[str, Any], fine: bool, says: str) -> None:
    cell = {"allowed": True, **result}
    assert verify.fine(cell) is fine
    assert says in verify.outcome(result)
    assert verify.all_fine({"cells": [cell]}) is fine
    assert verify.all_fine({"cells": [{**cell, "allowed": False}]})  # what no row allows may fail


# ---- processes ------------------------------------------------------------------------------------------------------

#: A worker that does to itself what kernels do, by operation and dtype of the cell that it is given.
UNRULY = """
import json, os, signal, sys, time
say = lambda **message: print(json.dumps(message), flush=True)
say(hello={"gpu": "X", "driver": "1", "torch": "2", "cuda": "13", "arch": json.loads(sys.argv[1])["arch"]})
for line in sys.stdin:
    cell = json.loads(line)
    what = cell["operation"], cell["dtype"]
    say(progress="compiling")
    if what == ("new_tokens", "bfloat16"):
        print("Fatal: an illegal instruction", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == ("context_chunk", "bfloat16"):
        time.sleep(600)
    if what == ("new_tokens", "float16"):
        sys.exit(7)
    say(result={"ok": True, "error": 0.001, "lse_error": 0.0, "seconds": os.getpid()}, healthy=what[1] != "float16")
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_crash_or_hang_of_one_cell_does_not_end_the_sweep(matrix: Matrix, workers: int) -> None:
    todo = planned(matrix, {"torch": "2.11.0"}, MINICPM, "cpu")
    assert [(t.operation, t.dtype) for t in todo][:3] == [
        ("new_tokens", "bfloat16"),
        ("context_chunk", "bfloat16"),
        ("new_tokens", "float16"),
    ]
    said: list[str] = []
    sweep = verify.Sweep(todo, {"arch": "cpu"}, said.append, 2.0, [sys.executable, "-c", UNRULY])
    results = sweep.run([None] * workers)
    assert [result["ok"] for result in results] == [False, False, False, True, True, True]
    assert results[0]["refusal"] == "the process ended with signal SIGSEGV: Fatal: an illegal instruction"
    assert results[1]["refusal"] == "no answer within 2 s"
    assert results[2]["refusal"] == "the process ended with status 7"
    assert sweep.machine == {"gpu": "X", "driver": "1", "torch": "2", "cuda": "13"}
    counted = [line for line in said if line.startswith("[")]
    assert [line.split("]")[0] for line in counted] == [f"[{i}/6" for i in range(1, 7)]
    assert any("compiling" in line for line in said)


@pytest.mark.parametrize(
    ("end", "ok"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", False),  # by these a kernel ends its own process
        ("os.kill(os.getpid(), signal.SIGABRT)", False),
        ("os.kill(os.getpid(), signal.SIGBUS)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", None),  # by these somebody else does: the system, out of memory
        ("os.kill(os.getpid(), signal.SIGTERM)", None),
        ("sys.exit('ValueError: no such width')", False),
        ("sys.exit('OSError: [Errno 28] No space left on device')", None),
    ],
)
def test_an_end_from_outside_says_nothing_about_the_cell(matrix: Matrix, end: str, ok: bool | None) -> None:
    script = (
        f'import os, signal, sys\nprint(\'{{"hello": {{"arch": "cpu"}}}}\', flush=True)\nsys.stdin.readline()\n{end}'
    )
    todo = planned(matrix, {"torch": "2.11.0"}, MINICPM, "cpu")[:1]
    (result,) = verify.Sweep(todo, {"arch": "cpu"}, print, 10.0, [sys.executable, "-c", script]).run([None])
    assert result["ok"] is ok


@pytest.mark.parametrize(
    ("error", "ok"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("Error Code: CUDA_ERROR_OUT_OF_MEMORY"), None),
        (MemoryError(), None),
        (OSError(28, "No space left on device"), None),
        (FileNotFoundError(2, "No such file or directory", "nvcc"), None),
        (OSError("libcute.so: cannot open shared object file: No such file or directory"), False),  # the package's own
        (ImportError("undefined symbol: _ZN3c10"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=repr,
)
def test_trouble_of_the_machine_refutes_no_kernel(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, error: Exception, ok: bool | None
) -> None:
    def attend(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch_sdpa, "_attend", attend)
    cell = {"kernel": "torch_math", "provider": "torch", "dims": [64, 64, 128], "dtype": "bfloat16"}
    result = verify_cell(decision_for(matrix, "cpu", cell), "new_tokens", print)
    assert result["ok"] is ok
    assert type(error).__name__ in result["refusal"]
    assert not verify.all_fine({"cells": [{"allowed": True, **result}]})


def test_a_process_that_an_error_has_spoiled_gets_no_further_cell(matrix: Matrix) -> None:
    todo = [task for task in planned(matrix, {"torch": "2.11.0"}, MINICPM, "cpu") if task.dtype != "bfloat16"][1:]
    results = verify.Sweep(todo, {"arch": "cpu"}, print, 5.0, [sys.executable, "-c", UNRULY]).run([None])
    first, second, third = (result["seconds"] for result in results)
    assert first != second  # float16 answered healthy=False
    assert second == third


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import sys; sys.exit('torch sees no GPU')", "torch sees no GPU"),
        ('print(\'{"hello": {"arch": "sm80"}}\')', "is sm80, not cpu"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_where_no_worker_comes_up_the_reason_is_told(matrix: Matrix, script: str, says: str) -> None:
    todo = planned(matrix, {"torch": "2.11.0"}, MINICPM, "cpu")
    with pytest.raises(KernelError, match=says):
        verify.Sweep(todo, {"arch": "cpu"}, print, 1.0, [sys.executable, "-c", script]).run([None])


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_cpu_is_verified_and_the_record_proves_its_cells(
    capsys: pytest.CaptureFixture[str], data_folder: Path
) -> None:
    """The real thing: a process, the torch_math kernel, a record that `check` reads, a proof that answers show."""
    folder = data_folder / "evidence"
    arguments = ["--dims", "64,32,64", "--dims", "70,6,30", "--dtype", "bf16", "--output", str(folder)]
    assert main(["verify", *arguments]) == 0
    captured = capsys.readouterr()
    assert "2 of 2 allowed cells are right on cpu; 2 of 2 that no row allows" in captured.out
    assert "[4/4]" in captured.err
    (path,) = [p for p in folder.glob("*.json") if p.name.startswith("run-cpu-")]
    record = json.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((SCHEMA_DIR / "evidence.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(record)
    assert record["command"] == "mla-prefill verify --dtype bfloat16 --dims 64,32,64 --dims 70,6,30"
    assert record["packages"]["torch"] == torch.__version__
    assert [(c["operation"], c["allowed"], c["ok"]) for c in record["cells"]] == [
        ("new_tokens", True, True),
        ("context_chunk", True, True),
        ("new_tokens", False, True),
        ("context_chunk", False, True),
    ]
    assert all(0 < c["error"] < 6e-3 and c["lse_error"] < 1e-4 for c in record["cells"])
    assert load_matrix(data_folder).proof("torch_math", "cpu", MINICPM) == "run"
    assert main(["check", str(data_folder)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kernel", "fa5"], "unknown kernel 'fa5'; did you mean fa"),
        (["--dtype", "bf15"], "unknown dtype 'bf15'"),
        (["--dims", "64,64"], "--dims takes three numbers"),
        (["--arch", "sm90"], "--arch goes with --build-only"),
        (["--timeout", "0"], "must be a number of seconds above 0"),
        (["--jobs", "none"], "must be a number from 1"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["verify", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_what_is_done_is_saved_on_the_way(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep takes minutes; a machine that goes away takes the last seconds only."""
    monkeypatch.setattr(verify, "SAVE_S", 0.0)
    saved: list[int] = []
    wanted = verify.Wanted(kernels=["torch_math"], dims=[MINICPM], dtypes=["float32"])
    record = verify.verify(matrix, Environment.detect(), wanted, save=lambda so_far: saved.append(len(so_far["cells"])))
    assert saved == [1, 2]
    assert len(record["cells"]) == 2


def test_a_save_that_fails_on_the_way_costs_nothing(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: dict[str, Any]) -> None:
        raise ValueError("cannot write x.json: No space left on device")

    monkeypatch.setattr(verify, "SAVE_S", 0.0)
    said: list[str] = []
    wanted = verify.Wanted(kernels=["torch_math"], dims=[MINICPM], dtypes=["float32"])
    record = verify.verify(matrix, Environment.detect(), wanted, report=said.append, save=full)
    assert [cell["ok"] for cell in record["cells"]] == [True, True]
    assert said.count("not saved yet: cannot write x.json: No space left on device") == 2


def test_a_last_save_that_fails_is_exit_2_with_the_results(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["verify", "--dims", "64,32,64", "--dtype", "bf16", "--output", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "2 of 2 allowed cells are right on cpu" in captured.out
    assert captured.err.splitlines()[-1].endswith(".json: No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_what_was_verified_before_an_early_end_is_saved(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(sweep: verify.Sweep, gpus: object) -> None:
        sweep.results[0] = {"ok": True}
        raise KernelError("cells could not be run: the GPU is gone")

    monkeypatch.setattr(verify.Sweep, "run", run)
    saved: list[int] = []
    with pytest.raises(KernelError, match="the GPU is gone"):
        verify.verify(matrix, Environment.detect(), save=lambda so_far: saved.append(len(so_far["cells"])))
    assert saved == [1]


def test_nothing_to_verify_is_a_negative_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--kernel", "fa3"]) == 1
    assert "nothing to verify" in capsys.readouterr().err


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_record_has_a_line_for_each_cell() -> None:
    record = {"level": "run", "packages": {"torch": "2.11.0"}, "cells": [{"kernel": "fa4", "ok": True}] * 3}
    text = lined(record, "cells")
    assert json.loads(text) == record
    assert text.count('\n  {"kernel"') == 3


def test_a_record_never_replaces_another(tmp_path: Path) -> None:
    first = keep("evidence", "run NVIDIA H200 2026-11-30", "1", tmp_path)
    assert first == tmp_path / "run-nvidia-h200-2026-11-30.json"
    assert keep("evidence", "run NVIDIA H200 2026-11-30", "2", tmp_path).name == "run-nvidia-h200-2026-11-30-2.json"
    assert first.read_text(encoding="utf-8") == "1"
    mine = tmp_path / "Mine.json"
    assert [keep("evidence", "anything", text, mine) for text in "34"] == [mine, mine]
    assert keep("evidence", "anything", "5", mine, beside=True).name == "Mine-2.json"
    assert mine.read_text(encoding="utf-8") == "4"


def test_two_at_once_take_two_names(tmp_path: Path) -> None:
    texts = [str(number) for number in range(50)]
    with ThreadPoolExecutor(8) as pool:
        kept = list(pool.map(lambda text: keep("measured", "cpu 2026-11-30", text, tmp_path / "new"), texts))
    assert [path.read_text(encoding="utf-8") for path in kept] == texts


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    class FullDisk:
        def __init__(self, **options: Any) -> None:
            self.name = tempfile.mkstemp(dir=options["dir"])[1]

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None: ...

        write = full

    good = keep("evidence", "good", "good", tmp_path)
    if step == "write":
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", FullDisk)
    else:
        monkeypatch.setattr(os, "replace", full)
    for output in (good, tmp_path):
        with pytest.raises(ValueError, match=r"cannot write \S+\.json: No space left on device"):
            keep("evidence", "bad", "bad", output)
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["good"]


def test_long_errors_keep_both_ends() -> None:
    text = one_line("the beginning\n" + "x" * 1000 + "\nthe end")
    assert len(text) <= 400
    assert text.startswith("the beginning x")
    assert text.endswith("x the end")
