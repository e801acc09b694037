"""The command line as a user types it: output, streams and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import Environment, Matrix, Request, load_matrix
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.capabilities.model import DTYPES
from mla_prefill.cli import build_parser, main
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import VARIABLES

CONFIGS = Path(__file__).parent / "data" / "hf_configs"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = call(capsys, *arguments, "--format", "json")
    return code, json.loads(out)


def test_select_json_is_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer(capsys, "select", "--arch", "sm90", "--dims", "64,64,128")
    assert code == 0
    assert data["arch"] == "sm90"
    assert data["chosen"] == {
        "backend": "FLASH_ATTN", "kernel": "fa4", "fa_version": 4, "pad_v_to": None, "provider": None,
        "requires": ["flash-attn-4>=4.0.0b5"],
    }  # fmt: skip
    assert data["request"] == {
        "dims": [64, 64, 128], "dtype": "bfloat16", "fa_version": None, "backend": None, "needs": [], "policy": "default",
    }  # fmt: skip
    assert {"fingerprint", "schema_version"} == set(data["matrix"])
    for candidate in data["candidates"]:
        assert {"backend", "kernel", "fa_version", "verdict", "pad_v_to", "requires", "reasons"} <= set(candidate)
        assert candidate["verdict"] in ("chosen", "eligible", "rejected")
        assert all({"code", "message", "source"} == set(reason) for reason in candidate["reasons"])


@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        (["--gpu", "H200", "--model", "mistral_small_4"], "fa4"),
        (["--gpu", "H200", "--model", "Mistral-Small-4-119B-2603", "--fa-version", "3"], "fa3"),
        (["--arch", "sm_90a", "--model", "deepseek_v3", "--installed", "fa3-fwd==0.0.3"], "fa3"),
        (["--arch", "sm90", "--config", str(CONFIGS / "minicpm3.json"), "--backend", "TORCH_SDPA"], "torch_efficient"),
        (["--arch", "cpu", "--dims", "64, 32, 64", "--dtype", "fp32"], "torch_math"),
        (["--arch", "gfx942", "--model", "DeepSeek-V3"], "aiter"),
        (["--dims", "64,64,128", "--arch", "sm90", "--needs", "lse,context_chunk"], "fa4"),
    ],
)
def test_select(capsys: pytest.CaptureFixture[str], arguments: list[str], kernel: str) -> None:
    code, data = answer(capsys, "select", *arguments)
    assert (code, data["chosen"]["kernel"]) == (0, kernel)
    code, out, _ = call(capsys, "select", *arguments)
    assert code == 0
    assert f"/{kernel}" in out
    code, out, _ = call(capsys, "select", *arguments, "--explain")
    assert "turned down:" in out


def test_no_backend_is_exit_1_with_the_json_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("select", "--arch", "sm90", "--dims", "64,64,128", "--installed", "torch==2.4.0")
    code, data = answer(capsys, *arguments)
    assert (code, data["chosen"]) == (1, None)
    assert data["hints"]
    code, out, _ = call(capsys, *arguments)
    assert code == 1
    assert "no backend is eligible" in out
    assert "what would help:" in out


def test_help_names_every_variable() -> None:
    assert set(VARIABLES) <= set(build_parser().format_help().replace(",", " ").replace(".", " ").split())


def test_help_names_every_feature_and_dtype(capsys: pytest.CaptureFixture[str], matrix: Matrix) -> None:
    for command in ("run", "select"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = set(capsys.readouterr().out.replace(",", " ").split())
        assert said >= {*matrix.features, *DTYPES}


def test_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer(capsys, "select", "--arch", "sm90", "--dims", "64,64,128", "--installed", "none")
    nothing = decide(Request((64, 64, 128)), Environment("sm90", installed={}), load_matrix()).to_dict()
    assert (code, data["candidates"], data["hints"]) == (1, nothing["candidates"], nothing["hints"])
    assert data["hints"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda p: p.stem)
def test_dims_of_every_config(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    """The answers themselves are held by test_model_configs.py; here the command and its exit codes."""
    code, data = answer(capsys, "dims", str(path))
    assert code == (0 if data["is_mla"] else 1)
    text_code, out, _ = call(capsys, "dims", str(path))
    assert text_code == code
    if data["is_mla"]:
        assert data["block"] is not None
        assert str(tuple(data["dims"])) in out
        assert call(capsys, "select", "--arch", "sm90", "--config", str(path))[0] == 0
    else:
        assert set(data) == {"is_mla", "reason"}
        assert data["reason"] in out
        assert call(capsys, "select", "--arch", "sm90", "--config", str(path))[0] == 1


USAGE = [
    (["select", "--arch", "sm9", "--dims", "64,64,128"], "did you mean sm90?"),
    (["select", "--gpu", "H2OO", "--dims", "64,64,128"], "unknown GPU"),
    (["select", "--arch", "sm90", "--dims", "64,64"], "three numbers"),
    (["select", "--arch", "sm90", "--dims", "64,64,-1"], "three numbers"),
    (["select", "--arch", "sm90", "--dims", "64,64,99999"], "between 0 and 4096"),
    (["select", "--arch", "sm90", "--dims", "0,0,128"], "a head cannot be 0 wide"),
    (["select", "--arch", "sm90", "--model", "mistral_smal_4"], "mistral_small_4"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--dtype", "bf61"], "did you mean"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--backend", "FLASH_ATT"], "did you mean FLASH_ATTN?"),
    (
        ["select", "--arch", "sm90", "--dims", "64,64,128", "--backend", ""],
        "unknown backend '' (argument), which this matrix does not support; known: ",
    ),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--matrix", ""], "--matrix: must name a file or folder"),
    (["check", ""], "must name a file or folder"),
    (["check", "--fix", "--extra", ""], "--extra: must name a file or folder"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--fa-version", "9"], "known: 2, 3, 4"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--fa-version", "x"], "--fa-version"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--needs", "lze"], "did you mean lse?"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--installed", "flash-attn"], "DIST==VERSION"),
    (["select", "--arch", "sm90", "--dims", "1,2,3", "--installed", "none", "--installed", "torch==2.9"], "none alone"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--installed", "flash-atn==2"], "did you mean flash-attn?"),
    (["select", "--arch", "sm90", "--dims", "64,64,128", "--installed", "flash-attn==new"], "not a version"),
    (
        ["select", "--arch", "sm90", "--dims", "-1,2,3"],
        "three numbers qk_nope,qk_rope,v_head such as 64,64,128; got '-1,2,3'",
    ),
    (["select", "--arch", "sm90", "--dims", "1,2,3", "--policy", "measured", "--shape", "-8x512"], "got '-8x512'"),
    (["run", "--dims", "64,64,128", "--seed", "-1"], "--seed: must be a whole number from 0 to 2**64 - 1, got '-1'"),
    (["run", "--dims", "64,64,128", "--seed", str(2**64)], f"from 0 to 2**64 - 1, got '{2**64}'"),
    (["run", "--dims", "64,64,128", "--seed", "9" * 5000], "from 0 to 2**64 - 1"),
    (
        [
            "select",
            "--arch",
            "sm90",
            "--dims",
            "64,64,128",
            "--installed",
            "flash-attn==2.8.3",
            "--installed",
            "flash_attn==2.7",
        ],
        "--installed names flash-attn twice, 2.8.3 and 2.7; give one of the two",
    ),
    (["select", "--arch", "sm90"], "--dims"),
    (["select", "--arch", "sm90", "--dims", "1,2,3", "--model", "x"], "not allowed with"),
    (
        ["select", "--arch", "H100", "--dims", "64,64,128"],
        "unknown architecture 'H100'; it is a GPU of sm90: --gpu H100",
    ),
    (["select", "--gpu", "sm90", "--dims", "64,64,128"], "unknown GPU 'sm90'; it is an architecture: --arch sm90"),
    (["table", "--arch", "H100"], "it is a GPU of sm90"),
    (["select", "--modle", "x"], "unknown option --modle; did you mean --model?"),
    (["select", "--modle=x"], "unknown option --modle; did you mean --model?"),
    (["select", "--arch", "sm90", "--", "--modle"], "--dims --model --config is required"),
    (["select", "--mod"], "--model: expected one argument"),
    (["check", "--fromat", "json"], "unknown option --fromat; did you mean --format?"),
    (["table", "--format", "jsn"], "--format: unknown 'jsn'; did you mean json?"),
    (["selct"], "COMMAND: unknown 'selct'; did you mean select?"),
    ([], "COMMAND"),
    (["dims", "/nowhere/config.json"], "/nowhere/config.json"),
    (["table", "--arch", "sm9"], "did you mean sm90?"),
    (["table", "--model", "mistral_4"], "did you mean"),
    (["check", "/nowhere"], "/nowhere"),
    (["table", "--matrix", "/nowhere"], "/nowhere"),
    (["table", "--extra", "/"], "cannot read /: a folder; only files are laid over, --matrix takes a folder"),
]


@pytest.mark.parametrize(("arguments", "says"), USAGE, ids=[" ".join(a[:6])[-40:] for a, _ in USAGE])
def test_wrong_usage_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert says in err
    assert len(err.strip().split("\n")) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "content",
    [b"", b"not json", b"[1, 2]", b'"text"', b"\xff\xfe\x00", b'{"qk_nope_head_dim": -1, "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 512}',
     b'{"qk_nope_head_dim": "64", "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 512}',
     b'{"qk_nope_head_dim": 1000000000000, "qk_rope_head_dim": 64, "v_head_dim": 64, "kv_lora_rank": 512}', b"[" * 100_000],
    ids=["empty", "text", "list", "string", "bytes", "negative", "strings", "huge", "deep"],
)  # fmt: skip
def test_a_bad_config_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for command in (["dims", str(path)], ["select", "--arch", "sm90", "--config", str(path)]):
        code, out, err = call(capsys, *command)
        assert (code, out) == (2, "")
        assert str(path) in err
        assert len(err.strip().split("\n")) == 1


@pytest.mark.parametrize(
    "command",
    [
        "check {}",
        "check --fix {}",
        "check --extra {}",
        "check --fix --extra {}",
        "select --arch sm90 --dims 64,64,128 --matrix {}",
        "select --arch sm90 --dims 64,64,128 --extra {}",
        "select --arch sm90 --config {}",
        "dims {}",
        "add {} --dry-run",
        "add --dims 96,32,96 --name mine --output {}",
        "diff {}",
        "diff --overlay {0} {0}",
    ],
)
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_a_pipe_or_device_is_refused_not_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)  # in a checkout, `check` of an installed copy has a note to make
    path = "/dev/zero"
    if what == "pipe":
        path = str(tmp_path / "matrix.yaml")
        os.mkfifo(path)

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"mla-prefill {command} reads from a {what}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    try:
        code, out, err = call(capsys, *command.format(path).split())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert path in err
    assert "not a regular file" in err


def test_prefers_is_a_wish_and_its_warning_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["select", "--dims", "128,64,128", "--prefers", "fp8_query, cuda_graph", "--arch"]
    code, out, _ = call(capsys, *asked, "sm100")
    assert code == 0
    assert "TRTLLM_RAGGED/trtllm_ragged for (128, 64, 128) bfloat16 on sm100, computes in float8_e4m3fn" in out
    code, out, _ = call(capsys, *asked, "sm90")
    assert code == 0
    assert "\nwarning: fp8_query is preferred, but FLASH_ATTN/fa4" in out
    code, data = answer(capsys, *asked, "sm90")
    assert data["request"]["prefers"] == ["fp8_query", "cuda_graph"]
    assert (data["compute_dtype"], len(data["warnings"])) == ("bfloat16", 1)


def test_check_of_the_shipped_data_and_of_a_broken_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "check")
    assert code == 0
    assert out.strip().split("\n")[-1].startswith("0 errors")
    folder = tmp_path / "data"
    shutil.copytree(DATA_DIR, folder)
    (folder / "matrix.yaml").write_text("a: [\n")
    for form in ("text", "json", "github", "sarif"):
        code, out, _ = call(capsys, "check", str(folder), "--format", form)
        assert code == 1
        assert "Y101" in out
    code, out, _ = call(capsys, "check", str(folder / "matrix.yaml"))
    assert code == 1


def test_a_broken_matrix_stops_a_query_with_its_findings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text("schema_version: 1\nmatrix: {x: {dims: {qk_nope: no}}}\n")
    code, out, err = call(capsys, "select", "--arch", "sm90", "--dims", "64,64,128", "--matrix", str(path))
    assert (code, out) == (2, "")
    assert f"{path}:2:30: Y104" in err


def test_environment_variables_reach_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_PREFILL_FA_VERSION", "2")
    code, data = answer(capsys, "select", "--arch", "sm90", "--dims", "64,64,128")
    assert (code, data["chosen"]["kernel"]) == (0, "fa2")
    assert data["constraints"][0]["origin"] == "environment variable MLA_PREFILL_FA_VERSION"
    monkeypatch.setenv("MLA_PREFILL_FAVERSION", "2")
    code, _, err = call(capsys, "select", "--arch", "sm90", "--dims", "64,64,128")
    assert code == 2
    assert "did you mean MLA_PREFILL_FA_VERSION?" in err


def test_check_reads_our_variables_like_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_PREFILL_MATRIX", "/nowhere/matrix.yaml")
    assert call(capsys, "check")[0] == 2
    monkeypatch.delenv("MLA_PREFILL_MATRIX")
    monkeypatch.setenv("MLA_PREFILL_MATRX", "x")
    code, _, err = call(capsys, "check")
    assert code == 2
    assert "did you mean MLA_PREFILL_MATRIX?" in err


@pytest.mark.parametrize(
    "command",
    [
        f"diff {DATA_DIR} {DATA_DIR}",
        f"table --matrix {DATA_DIR}",
        f"dims {CONFIGS / 'mistral_small_4.json'} --matrix {DATA_DIR}",
        f"check {DATA_DIR}",
        "add --dims 96,32,96 --name mine --source here --dry-run",
        "drift",
    ],
)
def test_every_command_stops_at_a_bad_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("MLA_PREFILL_X", "1")
    code, out, err = call(capsys, *command.split())
    assert (code, out) == (2, "")
    assert err.startswith("mla-prefill: unknown environment variable MLA_PREFILL_X")


def test_check_says_which_copy_where_a_checkout_is_around(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(DATA_DIR, tmp_path / "capabilities" / "data")
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "check")
    assert code == 0
    assert err == (
        f"note: this checks the installed copy, {DATA_DIR}; "
        "for the checkout here: mla-prefill check capabilities/data\n"
    )
    assert call(capsys, "check", "capabilities/data")[2] == ""
    monkeypatch.chdir(DATA_DIR.parent.parent)
    assert call(capsys, "check")[2] == ""


@pytest.mark.parametrize(
    "raised", ["AttributeError('boom')", "OSError(2, 'No such file', 'libtorch.so')", "SystemExit(7)"]
)
@pytest.mark.parametrize("command", [["run", "--dims", "64,64,128"], ["verify"], ["bench", "--quick"]])
def test_a_broken_pytorch_is_one_line(tmp_path: Path, command: list[str], raised: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {raised}\n")
    info = tmp_path / "torch-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = [sys.executable, "-m", "mla_prefill", *command]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd="/", env=environment, check=False)
    assert done.returncode == 1
    assert "PyTorch is needed to run a kernel and cannot be imported" in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1


def test_where_a_record_cannot_go_is_said_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="verify computes with PyTorch")
    code, out, err = call(capsys, "verify", "--output", "/proc/x.json")
    assert (code, out) == (2, "")
    assert "cannot write /proc/x.json" in err
    assert len(err.strip().split("\n")) == 1


@pytest.mark.parametrize("command", ["verify", "verify --build-only", "bench --quick"])
@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("z.txt", "--output z.txt: give a .json file such as z.json, or a folder"),
        ("z.svg", "--output z.svg: give a .json file such as z.json, or a folder"),
        ("file/folder", "cannot write file/folder: Not a directory; give --output another file or folder"),
        ("file/x.json", "cannot write file/x.json: Not a directory; give --output another file or folder"),
        ("pipe.json", "cannot write pipe.json: not a regular file; give --output another file or folder"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    output: str,
    says: str,
) -> None:
    pytest.importorskip("torch", reason="they compute with PyTorch")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.json")
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *command.split(), "--output", output)
    assert (code, out, err) == (2, "", f"mla-prefill: {says}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe.json"]


def test_the_plot_beside_a_profile_is_tried_as_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="bench computes with PyTorch")
    (tmp_path / "x.svg").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "bench", "--quick", "--output", "x.json")
    assert code == 2
    assert "cannot write x.svg: not a regular file" in err


def test_a_second_geometry_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "select", "--arch", "sm90", "--config", str(CONFIGS / "dots3_note.json"))
    assert "33 layers have other dims: ask with --dims 192,64,128" in err
    _, _, err = call(capsys, "select", "--arch", "sm90", "--model", "dots3_note")
    assert "some layers of dots3_note have other dims" in err


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "table", "--arch", "sm90", "--model", "deepseek_v3")
    assert code == 0
    assert "fa2 (V to 192)" in out
    code, out, _ = call(capsys, "table", "--arch", "9.0", "--format", "md")
    assert out.startswith("| block | dims | arch |")
    code, data = answer(capsys, "table")
    assert len(data["cells"]) > 300


def test_a_table_fits_the_terminal_and_is_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("table", "--arch", "sm90", "--model", "deepseek_v3")
    _, piped, _ = call(capsys, *arguments)
    whole = piped.splitlines()
    monkeypatch.setattr("mla_prefill.cli._Stdout.isatty", lambda stream: True)
    for width in (80, 100, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = call(capsys, *arguments)
        lines = out.splitlines()
        assert max(map(len, lines)) <= width < len(whole[2])
        assert " ".join(" ".join(lines[2:]).split()) == " ".join(whole[2].split())
        assert any("fa2 (V to 192) (measured)," in line for line in lines), "broken elsewhere than after a comma"
    monkeypatch.setenv("COLUMNS", "10")
    assert "allowed kernels, best first" in call(capsys, *arguments)[1], "not narrower than its header"


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = answer(capsys, "env")
    assert (code, data["variable_errors"]) == (0, {})
    assert {p["distribution"] for p in data["providers"]} >= {"flash-attn", "flash-attn-4", "torch"}
    code, out, _ = call(capsys, "env")
    assert "matrix" in out


BAD_VARIABLES = [
    ({"MLA_PREFILL_BACKEND": "zz"}, ["unknown backend 'zz'"]),
    ({"MLA_PREFILL_BACKEND": "FLASH_ATT"}, ["did you mean FLASH_ATTN?"]),
    ({"MLA_PREFILL_FA_VERSION": "9"}, ["no kernel has FlashAttention version 9", "known: 2, 3, 4"]),
    ({"MLA_PREFILL_FA_VERSION": "three"}, ["must be a number such as 3, got 'three'"]),
    ({"MLA_PREFILL_DISABLE": "fa2, fa33,fa44"}, ["unknown backend 'fa33'", "unknown backend 'fa44'"]),
    ({"MLA_PREFILL_VLLM": "vetto"}, ["unknown mode 'vetto'", "did you mean veto?"]),
    ({"MLA_PREFILL_MATRIX": "/nowhere"}, ["cannot read /nowhere", "this report goes by the shipped one"]),
    ({"MLA_PREFILL_FOO": "1"}, ["unknown environment variable MLA_PREFILL_FOO; known: MLA_PREFILL_BACKEND"]),
    ({"MLA_PREFILL_DISABEL": "fa3"}, ["did you mean MLA_PREFILL_DISABLE?"]),
    ({"MLA_PREFILL_BACKEND": "CUDNN", "MLA_PREFILL_FA_VERSION": "3"}, ["give one of the two"]),
]


@pytest.mark.parametrize(("variables", "says"), BAD_VARIABLES, ids=lambda value: " ".join(value)[:40])
def test_env_reports_bad_variables_in_their_place_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: list[str]
) -> None:
    """Every other command stops at them; who pastes this has a problem to show."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    name, value = list(variables.items())[-1]
    code, out, err = call(capsys, "env")
    assert code == 2
    assert f"variable  {name}={value}\n          error: " in out
    assert out.startswith("arch ")
    code, data = answer(capsys, "env")
    assert (code, list(data["variable_errors"])) == (2, [name])
    for part in says:
        assert part in out
        assert part in err
        assert part in data["variable_errors"][name]
    code, out, err = call(capsys, "select", "--arch", "sm90", "--dims", "64,64,128")
    assert (code, out) == (2, "")
    assert says[0] in err


@pytest.mark.parametrize(
    ("variables", "contradict"),
    [
        ({"MLA_PREFILL_BACKEND": "FLASH_ATTN", "MLA_PREFILL_DISABLE": "FLASH_ATTN"}, True),
        ({"MLA_PREFILL_BACKEND": "FLASH_ATTN", "MLA_PREFILL_DISABLE": "fa2,fa3"}, False),
        ({"MLA_PREFILL_FA_VERSION": "3", "MLA_PREFILL_DISABLE": "fa3"}, True),
        ({"MLA_PREFILL_BACKEND": "fa2", "MLA_PREFILL_DISABLE": "fa3"}, False),
    ],
)
def test_env_says_where_what_is_forced_is_disabled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], contradict: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, data = answer(capsys, "env")
    assert (code, list(data["variable_errors"])) == ((2, ["MLA_PREFILL_DISABLE"]) if contradict else (0, []))
    assert (call(capsys, "select", "--arch", "sm90", "--dims", "64,64,128")[0] == 1) is contradict


def test_env_shows_every_bad_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLA_PREFILL_BACKEND", "MLA_PREFILL_FA_VERSION", "MLA_PREFILL_DISABLE", "MLA_PREFILL_VLLM"):
        monkeypatch.setenv(name, "99")
    assert len(answer(capsys, "env")[1]["variable_errors"]) == 4
    for name, value in {"BACKEND": "fa3", "FA_VERSION": "3", "DISABLE": "fa2,", "VLLM": " Veto"}.items():
        monkeypatch.setenv(f"MLA_PREFILL_{name}", value)
    code, data = answer(capsys, "env")
    assert (code, data["variable_errors"]) == (0, {})


def test_run_does_the_main_job(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="the main job computes with PyTorch")
    code, out, err = call(
        capsys,
        "run",
        "--config",
        str(CONFIGS / "mistral_small_4.json"),
        "--heads",
        "4",
        "--device",
        "cpu",
        "--format",
        "json",
    )
    assert code == 0, err
    data = json.loads(out)
    assert data["decision"]["chosen"]["backend"] == "TORCH_SDPA"
    assert data["result"]["ok"] is True
    assert data["result"]["tokens_per_second"] > 0
    code, out, _ = call(capsys, "run", "--dims", "64,32,64", "--heads", "2", "--device", "cpu", "--dtype", "float32")
    assert code == 0
    assert "tokens per second" in out


def test_run_prints_the_notes_and_warnings_of_its_decision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the main job computes with PyTorch")
    asked = ["--dims", "64,32,64", "--dtype", "float32", "--prefers", "fp8_query"]
    monkeypatch.setenv("MLA_PREFILL_FA_VERSION", "3")  # a note: the request asks for something else
    code, out, _ = call(capsys, "run", *asked, "--backend", "TORCH_SDPA", "--heads", "2", "--device", "cpu")
    assert code == 0
    assert "\nnote: MLA_PREFILL_FA_VERSION=3 is not used" in out
    assert "\nwarning: fp8_query is preferred, but TORCH_SDPA" in out


def test_run_of_what_cannot_run_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "run", "--model", "deepseek_v3", "--backend", "FLASH_ATTN", "--device", "cpu")
    assert code == 1
    assert "no backend is eligible" in out


@pytest.mark.parametrize("command", ["run", "select", "dims", "table", "check", "env"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build_parser().parse_args([command, "--help"])
    assert stopped.value.code == 0
    assert "usage: mla-prefill" in capsys.readouterr().out


def test_the_installed_command_and_the_module_are_the_same() -> None:
    for command in (["-m", "mla_prefill"], ["-c", "import sys; from mla_prefill.cli import main; sys.exit(main())"]):
        done = subprocess.run(
            [sys.executable, *command, "select", "--arch", "sm90", "--dims", "64,64,128"],
            capture_output=True, text=True, cwd="/", check=False,
        )  # fmt: skip
        assert done.returncode == 0
        assert done.stdout.startswith("FLASH_ATTN/fa4")
        assert done.stderr == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    code = f"{sys.executable} -m mla_prefill table --format json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {code}"], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("select --arch sm90 --dims 64,64,128", 0),
        ("select --arch sm90 --dims 1,1,1", 1),
        ("select --arch sm90 --dims 1,1,1 --format json", 1),  # more than a pipe's buffer of Python
        ("table --format json", 0),
        ("--help", 0),
    ],
)
def test_without_a_reader_the_exit_code_is_the_same(command: str, code: int) -> None:
    for ending in ("| true; exit ${PIPESTATUS[0]}", ">&-"):
        line = f"{sys.executable} -m mla_prefill {command} {ending}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd="/", check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has such a device")
def test_a_full_disk_is_one_line() -> None:
    line = f"{sys.executable} -m mla_prefill table > /dev/full"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd="/", check=False)
    assert (done.returncode, done.stderr) == (2, "mla-prefill: cannot write the output: No space left on device\n")
