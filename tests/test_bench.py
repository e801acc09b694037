"""``bench``: what is timed and written, what a choice loses, and the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from mla_prefill.backends import bench, plot
from mla_prefill.capabilities import Matrix, MLADimensions
from mla_prefill.capabilities.profiles import Profile, Reading, Shape, read
from mla_prefill.capabilities.schema import SCHEMA_DIR
from mla_prefill.cli import main
from mla_prefill.selector import Environment

DEEPSEEK, MISTRAL = MLADimensions(128, 64, 128), MLADimensions(64, 64, 128)
H200 = Environment("sm90", {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36", "torch": "2.11.0"}, device="NVIDIA H200")
SCHEMA = json.loads((SCHEMA_DIR / "measured.schema.json").read_text(encoding="utf-8"))


def reading(
    kernel: str, eager: float, graph: float | None, lengths: Sequence[int] = (512,), dims: MLADimensions = DEEPSEEK
) -> Reading:
    return Reading(dims, tuple(lengths), 16, kernel, "torch", eager, graph, 1.0, 0.0)


def profile(*readings: Reading) -> Profile:
    record: dict[str, Any] = {"gpu": "NVIDIA H200", "arch": "sm90", "dtype": "bfloat16", "date": "2026-11-30"}
    return Profile("made", {**record, "layers": 60, "packages": {}, "readings": [r.to_dict() for r in readings]})


# ---- the command on this machine ------------------------------------------------------------------------------------


def test_the_cpu_is_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The real thing: torch_math in small shapes; a profile that policy="measured" can read, a table and a plot."""
    assert main(["bench", "--quick", "--dims", "64,32,64", "--layers", "27", "--output", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    (path,) = tmp_path.glob("cpu-*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(SCHEMA).validate(record)
    assert record["command"] == "mla-prefill bench --quick --layers 27 --dims 64,32,64"
    known = read(str(path), path.read_bytes())
    assert {r.lengths for r in known.readings} == set(bench.CPU_QUICK.lengths)
    assert {(r.kernel, r.graph_us) for r in known.readings} == {("torch_math", None)}
    assert "(64, 32, 64)  4x32" in captured.out
    assert "default" in captured.out.split("time lost")[1]
    picture = ElementTree.parse(path.with_suffix(".svg")).getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"


def test_json_holds_the_profile_and_the_losses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--quick", "--dims", "64,32,64", "--format", "json", "--output", str(tmp_path / "mine.json")]
    assert main(["bench", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "mine.json").read_text(encoding="utf-8")) == answer["profile"]
    assert {loss["choice"] for loss in answer["losses"]} >= {"default", "measured"}
    assert answer["skipped"] == []


@pytest.mark.parametrize("fails", [False, True], ids=["two at once", "a full disk"])
def test_nothing_that_was_timed_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    """Another bench takes the usual name while this one runs; or each save fails."""
    other = tmp_path / f"cpu-{bench.today()}.json"

    def run(self: bench.Bench) -> bench.Result:
        other.write_text("of the other", encoding="utf-8")
        return real(self)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    real = bench.Bench.run
    monkeypatch.setattr(bench.Bench, "run", run)
    if fails:
        monkeypatch.setattr("os.replace", full)
    arguments = ["--quick", "--dims", "64,32,64", "--dims", "64,64,128", "--output", str(tmp_path)]
    assert main(["bench", *arguments]) == (2 if fails else 0)
    captured = capsys.readouterr()
    assert "(64, 64, 128)  4x32" in captured.out
    assert captured.err.count("not saved yet: cannot write") == (2 if fails else 0)
    assert other.read_text(encoding="utf-8") == "of the other"
    mine = {f"{other.stem}-2.json", f"{other.stem}-2.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {other.name, *(set() if fails else mine)}


def test_a_budget_is_kept_and_what_it_cost_is_told(matrix: Matrix) -> None:
    here = Environment("cpu", {"torch": "2.11.0"})
    result = bench.Bench(matrix, here, bench.CPU_QUICK, budget_s=1e-6).run()
    assert result.profile["readings"] == []
    assert len(result.skipped) == len(bench.CPU_QUICK.lengths) * len({b.dims for b in matrix.blocks.values()})
    assert all("--budget" in text for text in result.skipped)


def test_what_cannot_be_loaded_is_skipped_with_its_reason(matrix: Matrix) -> None:
    """No package at all, and a kernel that does not run here."""
    result = bench.Bench(matrix, Environment("cpu", {}), bench.CPU_QUICK, dims=[DEEPSEEK]).run()
    assert result.skipped == [f"{DEEPSEEK}: no kernel is eligible"]
    grid = bench.CPU_QUICK
    timed = bench.Bench(matrix, Environment("cpu", {"torch": "2.11.0"}), grid, kernels=["fa2"], dims=[DEEPSEEK]).run()
    assert timed.profile["readings"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "-1"], "must be a number of seconds above 0"),
        (["--layers", "0"], "must be a number from 1"),
        (["--kernel", "torch_maths"], "did you mean torch_math?"),
        (["--model", "no such model at all"], "no such model at all"),
    ],
)
def test_wrong_use_is_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "lengths", "heads", "expected"),
    [
        (DEEPSEEK, [8192], 16, 2 * (192 + 128) * 16 * 8192**2 / 2 / 1e12),
        (DEEPSEEK, [100, 200], 1, (192 + 128) * (100**2 + 200**2) / 1e12),
        (MISTRAL, [512] * 8, 128, 8 * (128 + 128) * 128 * 512**2 / 1e12),
    ],
)
def test_causal_attention_counts_half_of_both_products(
    dims: MLADimensions, lengths: list[int], heads: int, expected: float
) -> None:
    assert bench.tflops(dims, lengths, heads) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([512] * 8, Shape(8, 512, 16)),
        ([1], Shape(1, 1, 16)),
        ([100, 700], Shape(2, 500, 16)),
        ([0, 0], Shape(2, 1, 16)),
    ],
)
def test_mixed_lengths_count_as_the_equal_ones_of_the_same_work(lengths: list[int], shape: Shape) -> None:
    assert Shape.of(lengths, 16) == shape


def test_a_plan_is_shared_by_the_layers() -> None:
    r = Reading(DEEPSEEK, (512,), 16, "fa4", "flash-attn-4", 40.0, 13.0, 13.0, 600.0)
    assert r.a_layer(60, graph=False) == 50.0
    assert r.a_layer(60, graph=True) == 13.0


def test_readings_survive_their_file() -> None:
    made = profile(
        reading("fa4", 40.0, 13.0), reading("fa4", 90.5, None, bench.MIXED), reading("fa3", 5.0, 1.0, [7] * 3)
    )
    assert profile(*made.readings).readings == made.readings


def losses(matrix: Matrix, *readings: Reading) -> dict[tuple[str, bool], tuple[float, int]]:
    found = bench.losses(profile(*readings), matrix, H200)
    return {(loss.choice, loss.graph): (pytest.approx(loss.loss), loss.shapes) for loss in found}


def test_losses_are_geometric_means_against_the_fastest(matrix: Matrix) -> None:
    """FA4 is the default choice on an H200; in one shape FA3 is twice as fast, in one FA4 is."""
    got = losses(
        matrix,
        *(reading("fa4", 20.0, 10.0, [128]), reading("fa3", 10.0, 10.0, [128])),
        *(reading("fa4", 30.0, 10.0, [512]), reading("fa3", 60.0, 40.0, [512])),
    )
    root = math.sqrt(2) - 1
    assert got["default", False] == (root, 2)
    assert got["fixed fa3", False] == (root, 2)
    assert got["measured", False] == (0.0, 2)
    assert got["measured, other shapes", False] == (1.0, 2)  # each shape is decided by the other: wrong both times
    assert got["default", True] == (0.0, 2)
    assert got["fixed fa3", True] == (1.0, 2)


def test_a_choice_that_was_not_timed_somewhere_is_not_judged_there(matrix: Matrix) -> None:
    got = losses(matrix, reading("fa4", 20.0, None, [128]), reading("torch_efficient", 10.0, None, [128]))
    assert got["default", False] == (1.0, 1)
    assert ("fixed fa3", False) not in got
    assert not any(graph for _, graph in got)


def test_fa4_against_fa3_names_its_worst_shape() -> None:
    made = profile(
        *(reading("fa4", 20.0, None, [128]), reading("fa3", 40.0, None, [128])),
        *(reading("fa4", 100.0, None, [512]), reading("fa3", 50.0, None, [512])),
        reading("fa4", 1.0, None, [2048]),
    )
    assert [(ratio, shape.length) for ratio, _, shape in bench.speedups(made)] == [(0.5, 512), (2.0, 128)]
    assert "1.00 times as fast in the geometric mean of 2 shapes; at worst 0.50" in bench.summary(made, [])


# ---- the picture ----------------------------------------------------------------------------------------------------


def test_every_kernel_has_a_line_in_every_panel() -> None:
    made = profile(
        *(reading(k, 10.0, None, n, d) for k in ("fa4", "fa3") for n in ([128], [512]) for d in (DEEPSEEK, MISTRAL))
    )
    root = ElementTree.fromstring(plot.svg(made))
    assert len(root.findall("{*}polyline")) == 4
    assert len(root.findall("{*}circle")) == 8
    assert any("NVIDIA H200" in (text.text or "") for text in root.findall("{*}text"))


@pytest.mark.parametrize("top", [0.0021, 0.04, 0.7, 1.0, 9.99, 37.0, 250.0, 716.0])
def test_axes_have_few_round_ticks(top: float) -> None:
    ticks = plot._ticks(top)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] <= top
