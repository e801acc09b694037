"""Finding out what a machine offers: metadata only, broken packages included, nothing heavy imported."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import Environment, Request, load_matrix
from mla_prefill.selector import detection, telling
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import VISIBLE_DEVICES
from mla_prefill.selector.probe import import_error, probe
from mla_prefill.selector.report import report, report_text

MATRIX = load_matrix()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages that comes first on sys.path, here and in child processes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def install(site: Path, distribution: str, version: str, files: dict[str, str]) -> None:
    """Lays out what pip would: modules and the distribution's metadata."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    digests = {name: hashlib.sha256(textwrap.dedent(text).encode()).digest() for name, text in files.items()}
    lines = [f"{name},sha256={base64.urlsafe_b64encode(d).rstrip(b'=').decode()}," for name, d in digests.items()]
    (info / "RECORD").write_text("\n".join(lines))


def test_c45_the_distribution_decides_not_the_module(site: Path) -> None:
    """FlashAttention 2.8.3 ships flash_attn/cute, whose import raises with a newer DSL: FA2 is there, FA4 is not."""
    broken = "raise AttributeError(\"module 'cutlass' has no attribute 'CACHE'\")"
    install(site, "flash-attn", "2.8.3", {"flash_attn/__init__.py": "", "flash_attn/cute/__init__.py": broken})
    installed = detection.installed(MATRIX.distributions)
    assert installed["flash-attn"] == "2.8.3"
    assert "flash-attn-4" not in installed
    assert "flash_attn" not in sys.modules


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ImportError('undefined symbol: _ZN3c104cuda')", "ImportError: undefined symbol: _ZN3c104cuda"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart.so.13"),
        ("undefined_name", "NameError: name 'undefined_name' is not defined"),
        ("None.attribute", "AttributeError:"),
        ("len(1)", "TypeError:"),
        ("import os; os._exit(7)", "status 7"),
        ("raise SystemExit(4)", "SystemExit: 4"),
    ],
)
def test_c35_c47_whatever_an_import_raises_is_kept_as_text(site: Path, body: str, says: str) -> None:
    install(site, "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": f"import sys\n{body}\n"})
    said: list[str] = []
    errors, notes = probe(MATRIX, {"fa3-fwd": "0.0.3"}, said.append)
    assert any("broken install" in note for note in notes.get("fa3-fwd", ())) == ("OSError" in says or "symbol" in says)
    assert says in errors["fa3-fwd"]
    assert "\n" not in errors["fa3-fwd"]
    assert said == ["importing fa3_fwd_interface of fa3-fwd 0.0.3"]
    environment = Environment("sm90", {"fa3-fwd": "0.0.3", "torch": "2.11.0"}, errors)
    decision = decide(Request((128, 64, 128)), environment, MATRIX)
    assert decision.chosen is not None
    assert decision.chosen.kernel == "fa2"
    assert says in "".join(r.message for v in decision.rejected for r in v.reasons)


def test_c48_a_package_that_works_is_no_error_and_is_imported_in_the_child_only(site: Path) -> None:
    install(site, "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": ""})
    assert probe(MATRIX, {"fa3-fwd": "0.0.3"}, lambda _: None) == ({}, {})
    assert "fa3_fwd_interface" not in sys.modules


@pytest.mark.parametrize(
    "body",
    [
        "import atexit\natexit.register(lambda: print('bye!'))\nprint('hello')",
        "import atexit, os\natexit.register(lambda: os._exit(3))",
        "import io, sys\nsys.stdout = io.StringIO()",
        "import os\nos.write(1, b'no line end, no UTF-8: \\xff')",
    ],
    ids=["prints at exit", "ends otherwise", "keeps stdout", "prints bytes"],
)
def test_what_a_package_prints_or_does_at_exit_is_not_the_answer(site: Path, body: str) -> None:
    install(site, "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": body})
    assert import_error(["fa3_fwd_interface"]) is None


def test_a_relative_path_leads_the_child_to_the_same_package(tmp_path: Path) -> None:
    """The child starts elsewhere, so that a folder in the working directory is no package."""
    install(tmp_path / "vendored", "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": ""})
    install(tmp_path / "vendored", "flash-attn", "2.8.3", {})
    (tmp_path / "flash_attn").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "mla_prefill", "env", "--probe", "--format", "json"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "vendored"},
    )  # fmt: skip
    errors = {p["distribution"]: p["import_error"] for p in json.loads(done.stdout)["providers"] if p["version"]}
    assert errors["fa3-fwd"] is None
    assert errors["flash-attn"] == "ModuleNotFoundError: No module named 'flash_attn'"


def test_a_relative_entry_of_sys_path_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "vendored", "fa3-fwd", "0.0.3", {"fa3_fwd_interface.py": ""})
    monkeypatch.chdir(tmp_path)
    assert "No module named" in str(import_error(["fa3_fwd_interface"]))
    monkeypatch.syspath_prepend("vendored")
    assert import_error(["fa3_fwd_interface"]) is None


def test_the_working_directory_is_searched_only_where_pythonpath_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.chdir(tmp_path)
    for entry in ("", str(tmp_path)):  # python -c, python -m
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        assert "No module named" in str(import_error(["flash_attn"]))
    monkeypatch.setenv("PYTHONPATH", ".")
    assert import_error(["flash_attn"]) is None


def test_an_import_that_hangs_ends(site: Path) -> None:
    install(site, "slow", "1", {"slow_module.py": "import time; time.sleep(60)"})
    assert "longer than" in str(import_error(["slow_module"], timeout_s=0.5))


def notes_on(name: str, **versions: str) -> list[str]:
    installed = {key.replace("_", "-"): value for key, value in versions.items()}
    return probe(MATRIX, installed, lambda _: None).notes.get(name, [])


def test_c45_a_probe_tells_the_cute_folder_of_2_8_3_from_fa4(site: Path) -> None:
    install(site, "flash-attn", "2.8.3", {"flash_attn/__init__.py": "", "flash_attn/cute/__init__.py": ""})
    notes = notes_on("flash-attn-4", flash_attn="2.8.3")
    assert notes == ["flash_attn.cute is there (from flash-attn 2.8.3), but it is not flash-attn-4"]


def test_a_namespace_package_is_no_fa2(site: Path) -> None:
    install(site, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": ""})
    (note,) = notes_on("flash-attn", flash_attn_4="4.0.0b36")
    assert note.startswith("flash_attn is a namespace package here (from flash-attn-4 4.0.0b36)")


def test_a_file_that_another_package_has_overwritten(site: Path) -> None:
    """Installing flash-attn 2.8.3 after flash-attn-4 leaves its own cute folder in FA4's place."""
    install(site, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": "NEW = True"})
    install(site, "flash-attn", "2.8.3", {"flash_attn/__init__.py": "", "flash_attn/cute/__init__.py": "OLD = True"})
    assert notes_on("flash-attn-4", flash_attn_4="4.0.0b36", flash_attn="2.8.3") == [
        "flash_attn/cute/__init__.py is not the file that it installed: flash-attn holds it too; reinstall flash-attn-4 last"
    ]
    (site / "flash_attn" / "cute" / "__init__.py").unlink()
    notes = notes_on("flash-attn-4", flash_attn_4="4.0.0b36", flash_attn="2.8.3")
    assert notes == ["flash_attn/cute/__init__.py is missing: reinstall flash-attn-4"]


@pytest.mark.parametrize(("cubin", "consistent"), [("0.6.16", True), ("0.6.16+cu130", True), ("0.6.15", False)])
def test_c49_a_local_version_part_is_no_mismatch(site: Path, cubin: str, consistent: bool) -> None:
    install(site, "flashinfer-python", "0.6.16", {"flashinfer/__init__.py": "", "flashinfer/prefill.py": ""})
    install(site, "flashinfer-cubin", cubin, {})
    install(site, "flashinfer-jit-cache", "0.6.16+cu130", {})
    notes = notes_on("flashinfer-python", flashinfer_python="0.6.16")
    expected = [f"flashinfer-cubin {cubin} does not go with it: install flashinfer-cubin==0.6.16"]
    assert notes == ([] if consistent else expected)


def test_a_build_says_what_it_leaves_out(site: Path) -> None:
    """FlashAttention 3 keeps it in a module; a local version part names the flavour."""
    flags = "{'FLASHATTENTION_DISABLE_FP16': True, 'FLASHATTENTION_DISABLE_SPLIT': False, 'FLASHATTENTION_ENABLE_VCOLMAJOR': True}"
    files = {"fa3_fwd_interface.py": "", "fa3_fwd_config.py": f"CONFIG = {{'build_flags': {flags}}}"}
    install(site, "fa3-fwd", "0.0.3+cu130", files)
    assert notes_on("fa3-fwd", fa3_fwd="0.0.3+cu130") == [
        "+cu130 names the flavour of the build and counts in no version range",
        "built without FP16",
    ]


def test_a_stub_that_swallows_the_error_is_found_out(site: Path) -> None:
    """tokenspeed_mla imports well and raises when it is called; the module behind it tells."""
    stub = "try:\n    from tokenspeed_mla.mla_prefill import run\nexcept ImportError:\n    run = None\n"
    install(
        site,
        "tokenspeed-mla",
        "2.0.4",
        {"tokenspeed_mla/__init__.py": stub, "tokenspeed_mla/mla_prefill.py": "import cutlass_is_missing"},
    )
    errors = probe(MATRIX, {"tokenspeed-mla": "2.0.4"}, lambda _: None).errors
    assert errors == {"tokenspeed-mla": "ModuleNotFoundError: No module named 'cutlass_is_missing'"}


def test_metadata_cut_short_hides_no_other_package(site: Path) -> None:
    install(site, "flash-attn-3", "3.0.0", {})
    install(site, "fa3-fwd", "0.0.3", {})
    (site / "flash_attn_3-3.0.0.dist-info" / "METADATA").write_bytes(b"\xff\xfe")
    installed = detection.installed(["flash-attn-3", "fa3-fwd"])
    assert installed["fa3-fwd"] == "0.0.3"


def test_a_query_imports_no_torch_no_yaml_no_schema() -> None:
    """Only metadata is read: cold start stays cold."""
    code = (
        "import sys; from mla_prefill import *; "
        "d = select(Request((64, 64, 128)), Environment('sm90', {'torch': '2.11.0'})); "
        "Environment.detect(); "
        "bad = {'torch', 'yaml', 'jsonschema', 'numpy', 'flash_attn', 'flashinfer'} & set(sys.modules); "
        "assert not bad, bad; print(d.chosen.kernel)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fa2"


def test_hidden_gpus_mean_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert detection.architecture()[0] == "cpu"


H200, H100 = ("9.0", "NVIDIA H200"), ("9.0", "NVIDIA H100 80GB HBM3")
A100, L40S = ("8.0", "NVIDIA A100-SXM4-80GB"), ("8.9", "NVIDIA L40S")
CUT, SLICE = ("9.0", "NVIDIA H200, all of it"), "NVIDIA H200 MIG 1g.18gb"


class Nvml:
    """The driver's library with these GPUs in the order of the PCI bus. GPU 1 has the UUID GPU-1111-abcd, its first MIG
    slice, where one is asked for, MIG-1111-abcd. ``CUT`` is a GPU in MIG mode."""

    def __init__(self, *gpus: tuple[str, str]) -> None:
        self.gpus = [*gpus, *(("no capability of its own", SLICE) for _ in gpus)]
        self.uuids = [f"{kind}-{i}{i}{i}{i}-abcd" for kind in ("GPU", "MIG") for i in range(len(gpus))]
        self.count = len(gpus)
        self.nvmlInit_v2 = self.nvmlShutdown = lambda: 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self.uuids:
            return 2
        handle._obj.value = self.uuids.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, mode: Any, pending: Any) -> int:
        mode._obj.value = int(self.gpus[handle.value - 1] is CUT)
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, mig: Any) -> int:
        mig._obj.value = handle.value + self.count
        return 0

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mig: Any, handle: Any) -> int:
        handle._obj.value = mig.value - self.count
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = map(int, self.gpus[handle.value - 1][0].split("."))
        return 0

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self.gpus[handle.value - 1][1].encode()
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = self.uuids[handle.value - 1].encode()
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str | None, str]]:
    """machine([H200, A100], CUDA_VISIBLE_DEVICES="1") -> what is detected there."""

    def detect(gpus: list[tuple[str, str]], **variables: str) -> tuple[str, str | None, str]:
        for variable in VISIBLE_DEVICES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(detection.ctypes, "CDLL", lambda _: Nvml(*gpus))
        monkeypatch.setattr(detection, "DEVICE_NODES", ())
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        telling.clear()
        return detection.architecture()

    return detect


PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("gpus", "variables", "found"),
    [
        ([H200], {}, H200),
        ([H200, H200], {"CUDA_VISIBLE_DEVICES": "1"}, H200),  # alike: the order does not matter
        ([A100, H200], {**PCI}, A100),
        ([A100, H200], {**PCI, "CUDA_VISIBLE_DEVICES": "1,0"}, H200),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "GPU-1111-abcd"}, H200),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "GPU-0, 1"}, A100),  # the beginning of a UUID is enough
        ([CUT], {}, ("9.0", SLICE)),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "MIG-1111-abcd"}, ("9.0", SLICE)),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-1111-abcd/2/0"}, ("9.0", None)),  # drivers before 470
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "MIG-7777-abcd"}, ("cpu", None)),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "GPU-"}, ("cpu", None)),  # which of the two?
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "7,0"}, ("cpu", None)),  # no such GPU: it hides the rest
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": "-1,0"}, ("cpu", None)),
        ([A100, H200], {"CUDA_VISIBLE_DEVICES": ""}, ("cpu", None)),
        ([], {}, ("cpu", None)),
    ],
)
def test_the_gpu_that_cuda_calls_the_first(
    machine: Any, gpus: list[tuple[str, str]], variables: dict[str, str], found: tuple[str, str | None]
) -> None:
    *what, how = machine(gpus, **variables)
    assert tuple(what) == found
    assert "not known" not in how


@pytest.mark.parametrize(
    ("gpus", "visible", "found"),
    [
        ([A100, H200], None, H200),
        ([A100, H200], "0", H200),
        ([A100, H200], "1", A100),
        ([A100, L40S, H200, L40S], "1,0", L40S),
        ([H100, H200], None, ("9.0", None)),  # the architecture is certain, the product is not
    ],
)
def test_where_gpus_differ_cudas_order_is_a_guess_and_is_called_one(
    machine: Any, caplog: pytest.LogCaptureFixture, gpus: list[tuple[str, str]], visible: str | None, found: Any
) -> None:
    """By default CUDA counts the fastest first, by a heuristic that is not documented; NVML counts along the PCI bus."""
    *what, how = machine(gpus, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert tuple(what) == found
    assert f"the GPUs differ, {gpus[0][1]} ({gpus[0][0]}), " in how
    assert "CUDA's own order of them is not known here" in how
    warnings = [record.getMessage() for record in caplog.records]
    assert ("taken: " in how) == ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in how) == bool(warnings) == (found[1] is not None)


@pytest.mark.parametrize(
    ("target", "arch"),
    [(90402, "gfx942"), (90500, "gfx950"), (90010, "gfx90a"), (120500, "gfx1250"), (110000, "gfx1100")],
)
def test_amd_targets_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: int, arch: str) -> None:
    assert amd(tmp_path, monkeypatch, [0, target]) == arch


def amd(folder: Path, monkeypatch: pytest.MonkeyPatch, targets: list[int], **variables: str) -> str | None:
    """What is detected where the driver has these nodes; 0 is a CPU. Node n has the unique_id 0xabc<n>."""
    for variable in VISIBLE_DEVICES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    for node, target in enumerate(targets):
        (folder / str(node)).mkdir()
        text = f"cpu_cores_count 8\nunique_id {0xABC0 + node}\ngfx_target_version {target}\n"
        (folder / str(node) / "properties").write_text(text)
    found = detection._from_amd_driver(folder)
    return found and found[0]


@pytest.mark.parametrize(
    ("variables", "arch"),
    [
        ({}, "gfx942"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "gfx950"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "gfx950"),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "gfx942"),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, "gfx950"),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "gfx90a"),  # counts what ROCr leaves
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000ABC3"}, "gfx90a"),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, None),
        ({"ROCR_VISIBLE_DEVICES": "7"}, None),
    ],
)
def test_rocr_hides_before_hip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arch: str | None
) -> None:
    assert amd(tmp_path, monkeypatch, [0, 90402, 90500, 90010], **variables) == arch


def test_this_machine_answers() -> None:
    environment = Environment.detect()
    assert environment.arch
    assert environment.installed is not None
    assert Environment.detect(arch="sm90").detected_by == "explicit"


def test_the_report_can_be_pasted_into_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa2")
    environment = Environment("sm90", {"fa3-fwd": "0.0.3"}, {"fa3-fwd": "ImportError: no"}, device="H200")
    data = report(environment, MATRIX, {"fa3-fwd": ["built without FP16"]})
    assert data["arch"] == "sm90"
    assert data["matrix"]["fingerprint"] == MATRIX.fingerprint
    assert data["variables"]["MLA_PREFILL_DISABLE"] == "fa2"
    text = report_text(data)
    for part in (
        "sm90 H200",
        "fa3-fwd",
        "0.0.3",
        "import fails: ImportError: no",
        "built without FP16",
        "MLA_PREFILL_DISABLE=fa2",
        "not installed",
    ):
        assert part in text
    assert os.linesep == "\n" or text


# ---- a described machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("H200", "'H200' is a GPU: give 'sm90'"),
        ("NVIDIA H100 80GB HBM3", "is a GPU: give 'sm90'"),
        ("AMD Instinct MI300X", "is a GPU: give 'gfx942'"),
        ("90", "such as 'sm90', '9.0' or 'gfx942', got '90'"),
        ("", "got ''"),
        ((9, 0), "got (9, 0)"),
        (90, "got 90"),
        (9.0, "got 9.0"),
        (None, "got None"),
    ],
)
def test_what_is_no_architecture_is_not_taken_for_newer_hardware(arch: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Environment(arch)


@pytest.mark.parametrize(
    "arch", ["sm90", "sm_90a", "SM 90", "compute_100f", "10.3", "sm150", "gfx950:xnack-", "cpu", "xpu1"]
)
def test_newer_hardware_and_ones_of_another_matrix_are_described_by_their_names(arch: str) -> None:
    assert Environment(arch).arch == arch
