"""The selector inside an engine: requests from configs, reloading, telling, old names, what a probe reports.

A test named after a case (C26 ...) holds the right outcome of that public report.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mla_prefill
import pytest
from mla_prefill import (
    Environment,
    EnvironmentVariableError,
    Matrix,
    MatrixError,
    MLADimensions,
    NoBackendError,
    NotMLAError,
    Overrides,
    Request,
    RequestError,
    UnknownNameError,
    clear,
    load_matrix,
    reload,
    select,
)
from mla_prefill.selector import detection, renamed, telling
from mla_prefill.selector.environment import VISIBLE_DEVICES
from mla_prefill.selector.renamed import Renamed

CONFIGS = Path(__file__).parent / "data" / "hf_configs"
DEEPSEEK, GLM, MISTRAL = (128, 64, 128), (192, 64, 256), (64, 64, 128)
HOPPER = Environment("sm90")

Edited = Callable[[str, str, str], Path]


def kernel(environment: Environment = HOPPER) -> str | None:
    chosen = select(Request(DEEPSEEK), environment).chosen
    return chosen and chosen.kernel


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    clear()


# ---- requests from configs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer", "dims"),
    [
        ("deepseek_v3", None, DEEPSEEK),
        ("deepseek_v3", 61, DEEPSEEK),  # the MTP layer comes after the counted ones
        ("mistral_small_4", 0, MISTRAL),
        ("glm_4_7_flash", None, GLM),
        ("kimi_linear", None, DEEPSEEK),
        ("kimi_linear", 3, DEEPSEEK),
        ("glm_5_3_flash", 43, (256, 0, 256)),
        ("dots3_note", 0, DEEPSEEK),
        ("dots3_note", 3, (192, 64, 128)),
    ],
)
def test_a_request_from_a_config(name: str, layer: int | None, dims: tuple[int, int, int]) -> None:
    path = CONFIGS / f"{name}.json"
    assert Request.from_config(path, layer).dims == dims
    assert Request.from_config(str(path), layer, dtype="float16", needs=["lse"]) == Request(
        dims, "float16", needs=["lse"]
    )


@pytest.mark.parametrize(
    ("name", "layer", "says"),
    [
        ("gpt_oss_20b", None, "grouped-query attention"),
        ("deepseek_v4_flash", None, "no MLA prefill triple"),
        ("deepseek_ocr", 0, "use_mla: false"),
        ("kimi_linear", 0, "layer 0 has no MLA attention; those that do: layers 3, 7, 11, 15, 19, 23, 26"),
        ("glm_5_3_flash", 47, "layer 47 has no MLA attention"),
    ],
)
def test_what_has_no_mla_says_so(name: str, layer: int | None, says: str) -> None:
    with pytest.raises(NotMLAError, match=says):
        Request.from_config(CONFIGS / f"{name}.json", layer)


def test_two_geometries_need_a_layer() -> None:
    with pytest.raises(
        RequestError, match=r"\(128, 64, 128\) on layers 0, 1, 5.* and \(192, 64, 128\) on .*: say which"
    ) as error:
        Request.from_config(CONFIGS / "dots3_note.json")
    assert not isinstance(error.value, NotMLAError)


@pytest.mark.parametrize("layer", [-1, "3", 1.0, True])
def test_a_layer_is_a_number(layer: Any) -> None:
    with pytest.raises(RequestError, match="layer must be a whole number from 0"):
        Request.from_config(CONFIGS / "deepseek_v3.json", layer)


def test_families_come_from_the_matrix_that_is_given(edited: Edited) -> None:
    """The same file, read by a matrix whose model sheet calls the layer by another name."""
    folder = edited(
        "models.yaml",
        "{listed_in: linear_attn_config.full_attn_layers, numbered_from: 1}",
        "{last_of_group: 2, remainder: false}",
    )
    text = (folder / "models.yaml").read_text(encoding="utf-8")
    assert text.count("{last_of_group: 2, remainder: false}") == 1
    config = {
        "model_type": "kimi_k3",
        "text_config": {
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_attention_heads": 8,
            "num_hidden_layers": 4,
        },
    }
    assert Request.from_config(config, 1, matrix=load_matrix(folder)).dims == DEEPSEEK
    with pytest.raises(NotMLAError, match="layer 0"):
        Request.from_config(config, 0, matrix=load_matrix(folder))


# ---- one state, replaced as a whole ---------------------------------------------------------------------------------


def without_fa4(edited: Edited) -> Path:
    return edited(
        "matrix.yaml",
        "{arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}",
        "{arch: [sm90], fa_version: [2, 3], backends: [FLASH_ATTN]}",
    )


def test_reload_picks_up_a_changed_file(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without_fa4(edited)
    shipped = load_matrix().fingerprint
    assert kernel() == "fa4"
    assert reload(folder).fingerprint != shipped
    assert kernel() == "fa3"
    monkeypatch.setenv("MLA_PREFILL_MATRIX", "/nowhere")  # an argument beats the environment
    assert kernel() == "fa3"
    monkeypatch.delenv("MLA_PREFILL_MATRIX")
    text = (folder / "matrix.yaml").read_text(encoding="utf-8")
    (folder / "matrix.yaml").write_text(
        text.replace("fa_version: [2, 3], backends", "fa_version: 2, backends"), encoding="utf-8"
    )
    assert kernel() == "fa3"  # nobody said so yet
    reload()
    assert kernel() == "fa2"
    clear()
    assert kernel() == "fa4"


def test_reload_reads_what_the_variable_names(edited: Edited, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = edited("matrix.yaml", "schema_version: 1", "schema_version: 1 ")
    monkeypatch.setenv("MLA_PREFILL_MATRIX", str(folder))
    here = Environment("sm90", overrides=Overrides.from_environ())
    assert kernel(here) == "fa4"
    without_fa4(edited)
    assert kernel(here) == "fa4"
    reload()
    assert kernel(here) == "fa3"
    assert kernel() == "fa4"  # this machine was described without the variable


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("matrix: ["), lambda path: path.unlink()])
def test_an_invalid_file_keeps_the_old_matrix_and_says_so_once(
    edited: Edited, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = without_fa4(edited)
    reload(folder)
    spoil(folder / "matrix.yaml")
    for _ in range(3):
        with pytest.raises((MatrixError, OSError)):
            reload()
        assert kernel() == "fa3"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"the matrix in force stays: {folder} cannot be used")


def test_a_reloaded_path_stays_where_it_was(edited: Edited, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A daemon changes its working directory."""
    folder = without_fa4(edited)
    monkeypatch.chdir(folder.parent)
    reload(folder.name)
    monkeypatch.chdir(tmp_path.anchor)
    assert reload().fingerprint == load_matrix(folder).fingerprint


def test_a_matrix_that_is_not_there_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_MATRIX", "/nowhere")
    for ask in (lambda: select(Request(DEEPSEEK)), reload):
        with pytest.raises(FileNotFoundError, match=r"\(MLA_PREFILL_MATRIX=/nowhere\): '/nowhere'"):
            ask()


def test_detection_looks_for_the_packages_of_the_matrix_in_force(edited: Edited) -> None:
    folder = edited("kernels.yaml", "distribution: fa3-fwd", "distribution: pytest")
    assert "pytest" not in (Environment.detect(arch="sm90").installed or {})
    reload(folder)
    assert "pytest" in (Environment.detect(arch="sm90").installed or {})


def test_a_variable_that_changes_meanwhile_leaves_no_stale_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of that moment may be either; the next one is right."""
    detect = Environment.detect

    def slowly(*arguments: Any) -> Environment:
        found = detect(*arguments, arch="sm90", overrides=Overrides.from_environ()).replace(
            installed={"flash-attn-4": "4.0.0b36", "fa3-fwd": "0.0.3"}
        )
        monkeypatch.delenv("MLA_PREFILL_DISABLE", raising=False)
        return found

    monkeypatch.setattr(Environment, "detect", slowly)
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa4")
    assert select(Request(DEEPSEEK)).kernel.name == "fa3"
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa4")
    monkeypatch.delenv("MLA_PREFILL_DISABLE")
    assert select(Request(DEEPSEEK)).kernel.name == "fa4"


@pytest.mark.parametrize("count", [1, 2])
def test_c55_where_gpus_differ_the_current_one_counts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """torch.cuda.set_device between two questions; GPUs of one kind are looked at once."""
    torch = pytest.importorskip("torch")
    gpus = [SimpleNamespace(major=8, minor=9, name="L40S"), SimpleNamespace(major=12, minor=0, name="RTX 5090")]
    current, looked = [0], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: looked.append(1) or current[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    assert select(Request(DEEPSEEK, backend="TORCH_SDPA")).arch == "sm89"
    assert select(Request(DEEPSEEK, backend="TORCH_SDPA")).arch == "sm89"
    assert len(looked) == count
    current[0] = count - 1
    assert select(Request(DEEPSEEK, backend="TORCH_SDPA")).arch == ("sm89", "sm120")[count - 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1],), r"select takes a Request such as Request\(\(64, 64, 128\)\), got \[1\]"),
        (("deepseek_v3",), "select takes a Request"),
        (
            (Request(DEEPSEEK), "sm90"),
            r"environment must be an Environment such as Environment\(\"sm90\"\), got 'sm90'",
        ),
        ((Request(DEEPSEEK), HOPPER, "matrix.yaml"), "matrix must be what load_matrix gives"),
    ],
)
def test_arguments_that_are_no_question(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises((RequestError, TypeError), match=says):
        select(*arguments)


def test_c52_the_visible_device_is_an_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sets its device after the first question in the process it was forked from."""
    machine = {"0": "sm90", "1": "sm80"}
    detected: list[str] = []

    def architecture() -> tuple[str, None, str]:
        detected.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return machine[detected[-1]], None, "test"

    monkeypatch.setattr(detection, "architecture", architecture)
    monkeypatch.setattr(detection, "installed", lambda _: {"torch": "2.13.0"})
    for device in "0", "1", "0", "1":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
        assert select(Request(DEEPSEEK)).arch == machine[device]
    assert detected == ["0", "1"]
    assert set(VISIBLE_DEVICES) >= {"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}


def test_clear_asks_the_machine_anew(monkeypatch: pytest.MonkeyPatch, matrix: Matrix) -> None:
    """Also where the caller gives the matrix: a package may have been installed meanwhile."""
    packages = {"torch": "2.13.0"}
    monkeypatch.setattr(detection, "architecture", lambda: ("sm90", None, "test"))
    monkeypatch.setattr(detection, "installed", lambda _: dict(packages))
    assert select(Request(DEEPSEEK), matrix=matrix).chosen.kernel == "fa2"  # type: ignore[union-attr]
    packages["fa3-fwd"] = "0.0.3"
    clear()
    assert select(Request(DEEPSEEK), matrix=matrix).chosen.kernel == "fa3"  # type: ignore[union-attr]


def test_c54_a_matrix_that_nobody_holds_takes_its_answers_along() -> None:
    import gc
    import weakref

    matrix = load_matrix()
    select(Request(DEEPSEEK), HOPPER, matrix)
    gone = weakref.ref(matrix)
    del matrix
    gc.collect()
    assert gone() is None


def test_c56_an_answer_is_never_modified() -> None:
    decision = select(Request(DEEPSEEK), HOPPER)
    before = copy.deepcopy(decision.to_dict())
    plain = decision.to_dict()
    plain["candidates"].clear()
    plain["request"]["dims"][0] = 1
    (decision.environment.installed or {})["torch"] = "0"
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.chosen = None  # type: ignore[misc]
    with pytest.raises(AttributeError):
        decision.request.dtype = "float16"  # type: ignore[misc]
    assert select(Request(DEEPSEEK), HOPPER) is decision
    assert decision.to_dict() == before


@pytest.mark.parametrize(
    "value",
    [
        MLADimensions(*DEEPSEEK),
        Request(DEEPSEEK, needs=["lse"], fa_version=3),
        Environment(
            "sm90", {"torch": "2.13.0"}, {"torch": "no"}, Overrides("FLASH_ATTN", 3, ("fa2",), None), "H200", "x"
        ),
        Environment("sm90"),
        select(Request(DEEPSEEK), HOPPER),
    ],
    ids=lambda value: type(value).__name__,
)
def test_questions_and_answers_travel_to_other_processes(value: Any) -> None:
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert again == value
        assert type(again) is type(value)


# ---- telling ------------------------------------------------------------------------------------------------------


def test_each_decision_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mla_prefill")
    for _ in range(3):
        select(Request(DEEPSEEK), HOPPER)
        select(Request(MISTRAL), HOPPER)
    reload()  # the answer is worked out anew, and it is the same
    select(Request(DEEPSEEK), HOPPER)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(told) == 2
    assert told[0].startswith("FLASH_ATTN/fa4 for (128, 64, 128) bfloat16 on sm90")
    rejections = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    decision = select(Request(DEEPSEEK), HOPPER)
    assert len(rejections) == 2 * len(decision.rejected)
    assert any(line.startswith("not trtllm_ragged: trtllm_ragged runs on sm100") for line in rejections)


def test_a_reload_that_turns_another_kernel_down_is_told(
    data_folder: Path, edited: Edited, caplog: pytest.LogCaptureFixture
) -> None:
    """The choice stays the same; what stands against the others does not."""
    caplog.set_level(logging.DEBUG, "mla_prefill")
    reload(data_folder)
    select(Request(DEEPSEEK), HOPPER)
    caplog.clear()
    allowed = "{arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}"
    edited("matrix.yaml", allowed, allowed.replace("2, 3, 4", "3, 4"))
    reload()
    select(Request(DEEPSEEK), HOPPER)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("FLASH_ATTN/fa4 for (128, 64, 128) bfloat16 on sm90")
    assert any(line.startswith("not fa2: no row allows FA2") for line in lines)


def test_what_was_told_is_remembered_within_bounds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telling, "MAX_TOLD", 3)
    for text in "abcabcde":
        telling.warning(text)
        assert len(telling._told) <= 3
    assert [record.getMessage() for record in caplog.records] == list("abcde")


def test_what_was_asked_before_logging_was_set_up_is_told_after_clear(caplog: pytest.LogCaptureFixture) -> None:
    """As the docs say: a remembered answer does not look at the logger."""
    select(Request(MISTRAL), HOPPER)
    caplog.set_level(logging.INFO, "mla_prefill")
    select(Request(MISTRAL), HOPPER)
    assert caplog.records == []
    clear()
    select(Request(MISTRAL), HOPPER)
    assert len(caplog.records) == 1


def test_a_refusal_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mla_prefill")
    for _ in range(2):
        with pytest.raises(NoBackendError):
            select(Request(DEEPSEEK), Environment("sm90", {}))
    assert [record.getMessage() for record in caplog.records] == ["no backend for (128, 64, 128) bfloat16 on sm90"]


def test_c32_the_decision_is_one_line_for_any_later_error() -> None:
    """Two starts that differ in the backend alone: the line names it, its version, the reason and the source."""
    machine = Environment("sm120", {"torch": "2.13.0", "flash-attn": "2.8.3"})
    first = select(Request(DEEPSEEK), machine).one_line()
    second = select(Request(DEEPSEEK, backend="TORCH_SDPA"), machine).one_line()
    assert "FLASH_ATTN/fa2 from flash-attn 2.8.3" in first
    assert "TORCH_SDPA/torch_efficient from torch 2.13.0" in second
    assert "backend = TORCH_SDPA (argument)" in second
    assert "matrix.yaml:" in first
    assert "\n" not in first + second


# ---- old names ----------------------------------------------------------------------------------------------------


def test_c26_c30_an_old_variable_is_obeyed_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(renamed.VARIABLES, "MLA_PREFILL_FORCE", Renamed("MLA_PREFILL_BACKEND", "9.9"))
    old = {"MLA_PREFILL_FORCE": "FLASH_ATTN"}
    assert Overrides.from_environ(old).backend == Overrides.from_environ(old).backend == "FLASH_ATTN"
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable MLA_PREFILL_FORCE was renamed in version 9.9: use MLA_PREFILL_BACKEND"
    ]
    assert Overrides.from_environ({**old, "MLA_PREFILL_BACKEND": "FLASH_ATTN"}).backend == "FLASH_ATTN"
    with pytest.raises(EnvironmentVariableError, match="MLA_PREFILL_FORCE and MLA_PREFILL_BACKEND differ"):
        Overrides.from_environ({**old, "MLA_PREFILL_BACKEND": "CUDNN"})


def test_c26_a_removed_variable_does_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(renamed.VARIABLES, "MLA_PREFILL_FAST", Renamed(None, "9.9", 'ask for policy="measured"'))
    assert Overrides.from_environ({"MLA_PREFILL_FAST": "1"}) == Overrides()
    assert [record.getMessage() for record in caplog.records] == [
        'environment variable MLA_PREFILL_FAST was removed in version 9.9; ask for policy="measured"'
    ]


def test_c30_a_removed_backend_names_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed.BACKENDS, "FLASHMLA_DENSE", Renamed("FLASH_ATTN", "9.9"))
    with pytest.raises(
        UnknownNameError, match=r"backend FLASHMLA_DENSE \(argument\) was renamed in version 9.9: use FLASH_ATTN"
    ):
        select(Request(DEEPSEEK, backend="FLASHMLA_DENSE"), HOPPER)


def test_old_names_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(renamed.NAMES, "choose", Renamed("select", "9.9"))
    monkeypatch.setitem(renamed.NAMES, "run_kernel", Renamed("load", "9.9"))
    monkeypatch.setitem(renamed.NAMES, "guess", Renamed(None, "9.9", "use select"))
    with pytest.warns(DeprecationWarning, match=r"mla_prefill.choose was renamed in version 9.9: use select") as warned:
        assert mla_prefill.choose is select
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="use load"):
        assert mla_prefill.run_kernel is mla_prefill.load
    with pytest.raises(AttributeError, match=r"mla_prefill.guess was removed in version 9.9; use select"):
        mla_prefill.guess  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        mla_prefill.never  # noqa: B018


def test_c31_what_an_override_did_is_part_of_the_answer() -> None:
    """Each constraint says where it came from; one that cannot be obeyed is refused; a default is no user's choice."""
    assert select(Request(DEEPSEEK), HOPPER).constraints == ()
    described = HOPPER.replace(overrides=Overrides(backend="TORCH_SDPA"))
    (constraint,) = select(Request(DEEPSEEK), described).constraints
    assert str(constraint) == "backend = TORCH_SDPA (environment variable MLA_PREFILL_BACKEND)"
    argument = select(Request(DEEPSEEK, backend="FLASH_ATTN"), described)
    assert [constraint.origin for constraint in argument.constraints] == ["argument"]
    assert argument.notes == ("MLA_PREFILL_BACKEND=TORCH_SDPA is not used: the request asks for backend FLASH_ATTN",)
    with pytest.raises(NoBackendError) as refused:
        select(Request(DEEPSEEK), HOPPER.replace(overrides=Overrides(backend="TRTLLM_RAGGED")))
    assert refused.value.decision.constraints[0].value == "TRTLLM_RAGGED"


# ---- this machine -------------------------------------------------------------------------------------------------


def test_a_torch_that_has_not_started_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking it would start CUDA in this process, whose forked workers could not use the GPU then."""
    torch = pytest.importorskip("torch")
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: asked.append("torch"))
    monkeypatch.setattr(detection, "_from_nvml", lambda: ("9.0", "H200", "NVML"))
    assert detection.architecture() == ("9.0", "H200", "NVML")
    assert asked == []


def test_torch_is_imported_only_where_there_is_a_gpu_that_no_library_answers_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(detection.importlib, "import_module", lambda name: imported.append(name))
    monkeypatch.setattr(detection, "_from_nvml", lambda: None)
    monkeypatch.setattr(detection, "_from_amd_driver", lambda: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for variable in VISIBLE_DEVICES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(detection, "DEVICE_NODES", (str(tmp_path / "nvidiactl"),))
    assert detection.architecture()[0] == "cpu"
    assert imported == []
    (tmp_path / "nvidiactl").touch()
    assert detection.architecture()[0] == "cpu"  # this torch is broken: no reason to fail
    assert imported == ["torch"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    detection.architecture()
    assert imported == ["torch"]


def test_c50_all_providers_are_looked_at_before_anything_is_said_to_be_missing() -> None:
    """An explicit FA2 request where flash-attn is absent: PyTorch has it too."""
    request = Request(DEEPSEEK, fa_version=2)
    assert select(request, Environment("sm90", {"torch": "2.13.0"})).chosen.provider == "torch"  # type: ignore[union-attr]
    with pytest.raises(NoBackendError, match=r"flash-attn.* or .*vllm.* or torch"):
        select(request, Environment("sm90", {"fa3-fwd": "0.0.3"}))


def test_c46_unverified_is_not_broken() -> None:
    newer = select(Request(DEEPSEEK, fa_version=2), Environment("sm90", {"flash-attn": "2.9.0"}))
    (note,) = newer.verdicts[0].notes
    assert note.startswith("unverified version: flash-attn 2.9.0")
    with pytest.raises(NoBackendError) as refused:
        select(Request(DEEPSEEK, fa_version=4), Environment("sm103", {"flash-attn-4": "4.0.0b14"}))
    codes = {r.code for v in refused.value.decision.verdicts if v.candidate.kernel == "fa4" for r in v.reasons}
    assert codes == {"known-bad"}


def test_nothing_here_left_a_matrix_in_force() -> None:
    with contextlib.suppress(MatrixError, OSError):
        reload("/nowhere")
    assert select(Request(DEEPSEEK), HOPPER).matrix.fingerprint == load_matrix().fingerprint
