"""``policy="measured"``: the order of a profile, only where that profile is about this very question."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill import BatchShape, Environment, Matrix, MLADimensions, Request, RequestError, load_matrix
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.capabilities.profiles import Shape
from mla_prefill.cli import main
from mla_prefill.selector import measured
from mla_prefill.selector.engine import decide

DEEPSEEK, MISTRAL, GLM = MLADimensions(128, 64, 128), MLADimensions(64, 64, 128), MLADimensions(192, 64, 256)
PACKAGES = {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0.0b36", "flashinfer-python": "0.7.4", "torch": "2.11.0+cu130"}
PROVIDERS = {"fa3": "fa3-fwd", "fa4": "flash-attn-4", "fa2": "torch", "flashinfer_fa3": "flashinfer-python"}
TIMED_WITH = {**PACKAGES, "nvidia-cutlass-dsl": "4.8.1"}
H200 = Environment("sm90", PACKAGES, device="NVIDIA H200")

# (dims, sequences, length, heads) -> kernel: (eager, graph, plan) in microseconds. Made up for these tests.
TIMES: dict[tuple[MLADimensions, int, int, int], dict[str, tuple[float, float | None, float]]] = {
    (DEEPSEEK, 1, 128, 16): {"fa4": (30, 8, 60), "fa3": (37, 11, 0), "flashinfer_fa3": (25, 7, 600)},
    (DEEPSEEK, 8, 512, 16): {"fa4": (66, 44, 60), "fa3": (89, 44, 0), "flashinfer_fa3": (50, 38, 600)},
    (DEEPSEEK, 1, 8192, 128): {"fa4": (3500, 3400, 60), "fa3": (3300, 3450, 0), "fa2": (9000, 8900, 0)},
    (MISTRAL, 1, 512, 16): {"fa4": (24, 11, 60), "fa3": (24, 9, 0), "fa2": (12, None, 0)},
}  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    readings = [
        {
            **{"dims": list(dims), "lengths": {"sequences": sequences, "length": length}, "heads": heads},
            **{"kernel": kernel, "provider": PROVIDERS[kernel]},
            **{"eager_us": eager, "graph_us": graph, "host_us": 10.0, "plan_us": plan},
        }
        for (dims, sequences, length, heads), kernels in TIMES.items()
        for kernel, (eager, graph, plan) in kernels.items()
    ]
    made = {
        **{"schema_version": 1, "date": "2026-11-30", "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0+cu130"},
        **{"cuda": "13.0", "arch": "sm90", "dtype": "bfloat16", "layers": 60, "packages": TIMED_WITH},
        **{"command": "mla-prefill bench", "readings": readings},
    }
    return {**made, **changes}


Measured = Callable[..., Matrix]


@pytest.fixture
def with_profiles(data_folder: Path) -> Measured:
    """with_profiles(record, ...) -> the shipped data with these timing profiles."""

    def build(*records: dict[str, Any]) -> Matrix:
        for shipped in ("evidence", "measured"):
            shutil.rmtree(data_folder / shipped, ignore_errors=True)
        folder = data_folder / "measured"
        folder.mkdir()
        for number, profile in enumerate(records):
            (folder / f"{number}.json").write_text(json.dumps(profile), encoding="utf-8")
        return load_matrix(data_folder)

    return build


def chosen(matrix: Matrix, request: Request, environment: Environment = H200) -> tuple[list[str], str]:
    """(the eligible kernels, best first; the notes)."""
    decision = decide(request, environment, matrix)
    eligible = [v.candidate.kernel for v in decision.verdicts if v.verdict != "rejected"]
    assert decision.chosen is not None
    assert decision.chosen.kernel == eligible[0]
    return eligible, "; ".join(decision.notes)


# ---- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "shape", "order"),
    [
        # flashinfer_fa3: 25 + 600 / 60 = 35 a layer, fa4: 30 + 60 / 60 = 31
        (DEEPSEEK, BatchShape(1, 128, 16), ["fa4", "flashinfer_fa3", "fa3"]),
        (DEEPSEEK, BatchShape(1, 128, 16, graph=True), ["flashinfer_fa3", "fa4", "fa3"]),  # planned at capture
        (DEEPSEEK, BatchShape(6, 600, 16), ["flashinfer_fa3", "fa4", "fa3"]),  # nearest: 8x512
        (DEEPSEEK, BatchShape(8, 512, 16, graph=True), ["flashinfer_fa3", "fa4", "fa3"]),  # fa4 = fa3: default order
        (DEEPSEEK, BatchShape(2, 16000, 64), ["fa3", "fa4", "fa2"]),
        (DEEPSEEK, BatchShape.of([1, 17, 64, 130], heads=16), ["fa4", "flashinfer_fa3", "fa3"]),
        (MISTRAL, BatchShape(64, 128, 128), ["fa2", "fa3", "fa4"]),  # the only shape; fa4 pays for its plan
        (MISTRAL, BatchShape(64, 128, 128, graph=True), ["fa3", "fa4"]),  # fa2 was not timed in a graph
        (MISTRAL, None, ["fa2", "fa3", "fa4"]),
        # fa3: 37/31, 89/60, 3300/3300; fa4: 31/31, 67/60, 3501/3300; flashinfer_fa3: 35/31, 60/60; fa2: 9000/3300
        (DEEPSEEK, None, ["fa4", "flashinfer_fa3", "fa3", "fa2"]),
    ],
    ids=str,
)
def test_the_nearest_shape_decides(
    with_profiles: Measured, dims: MLADimensions, shape: BatchShape | None, order: list[str]
) -> None:
    """What was not timed there keeps its default order, behind what was."""
    matrix = with_profiles(record())
    request = Request(dims, policy="measured", shape=shape)
    eligible, notes = chosen(matrix, request)
    default, _ = chosen(matrix, Request(dims))
    assert eligible == order + [kernel for kernel in default if kernel not in order]
    assert "measured/0.json" in notes
    assert ("in a CUDA graph" in notes) is (shape is not None and shape.graph)
    reasons = [r for v in decide(request, H200, matrix).verdicts[1:] for r in v.reasons if r.code == "lower-priority"]
    assert {str(reason.source).rpartition("/")[2] for reason in reasons} == {"0.json"}


def test_measured_cells_say_so(with_profiles: Measured) -> None:
    matrix = with_profiles(record())
    assert matrix.proof("fa4", "sm90", DEEPSEEK) == "measured"
    assert matrix.proof("fa4", "sm100", DEEPSEEK) == "source"
    assert matrix.proof("fa4", "sm90", GLM) == "source"


def test_the_default_policy_reads_no_profile(with_profiles: Measured) -> None:
    matrix = with_profiles(record())
    assert chosen(matrix, Request(DEEPSEEK, shape=BatchShape(8, 512, 16))) == (chosen(matrix, Request(DEEPSEEK))[0], "")
    assert "profiles" not in vars(matrix)


def test_a_profile_is_part_of_the_fingerprint(with_profiles: Measured) -> None:
    assert with_profiles().fingerprint != with_profiles(record()).fingerprint
    assert with_profiles(record()).fingerprint != with_profiles(record(layers=61)).fingerprint


# ---- when a profile does not count ----------------------------------------------------------------------------------

OTHER_FA4 = Environment("sm90", {**PACKAGES, "flash-attn-4": "4.0.0b40"}, device="NVIDIA H200")
OTHER_DSL = Environment("sm90", {**PACKAGES, "nvidia-cutlass-dsl": "4.6.2"}, device="NVIDIA H200")
UNTIMED_OTHER = Environment("sm90", {**PACKAGES, "nvidia-cudnn-frontend": "1.29.0"}, device="NVIDIA H200")
OTHER_FA3 = Environment("sm90", {"flash-attn-3": "3.0.0", "torch": "2.11.0"}, device="NVIDIA H200")


@pytest.mark.parametrize(
    ("request_", "environment", "why"),
    [
        (Request(GLM, policy="measured"), H200, "has no times for (192, 64, 256)"),
        (Request(DEEPSEEK, "float16", policy="measured"), H200, "was timed in bfloat16"),
        (Request(DEEPSEEK, policy="measured"), OTHER_FA4, "timed with flash-attn-4 4.0.0b36, installed is 4.0.0b40"),
        # Without the planned call, which is proven for 4.8.1 alone, fa4 costs five times as much on the host.
        (Request(DEEPSEEK, policy="measured"), OTHER_DSL, "timed with nvidia-cutlass-dsl 4.8.1, installed is 4.6.2"),
        (Request(DEEPSEEK, policy="measured"), OTHER_FA3, "timed fa3 of fa3-fwd, here it comes from flash-attn-3"),
        (Request(DEEPSEEK, policy="measured"), H200.replace(device="NVIDIA H100"), "no timing profile of NVIDIA H100"),
        (Request(DEEPSEEK, policy="measured"), H200.replace(device=None), "no GPU is named"),
        (Request(DEEPSEEK, policy="measured"), Environment("sm100", device="B200"), "no timing profile of B200"),
        (Request(DEEPSEEK, policy="measured"), Environment("cpu", {"torch": "2.11.0"}), "no timing profile of cpu"),
        (Request(DEEPSEEK, backend="torch_efficient", policy="measured"), H200, "an eligible kernel"),
    ],
)
def test_otherwise_the_default_order_stands_and_says_why(
    with_profiles: Measured, request_: Request, environment: Environment, why: str
) -> None:
    matrix = with_profiles(record())
    eligible, notes = chosen(matrix, request_, environment)
    assert eligible == chosen(matrix, Request(**{**request_._asdict(), "policy": "default"}), environment)[0]
    assert "the default order, because" in notes
    assert why in notes


@pytest.mark.parametrize(
    "environment",
    [
        UNTIMED_OTHER,  # a package whose kernels were not timed is not concerned
        H200.replace(installed={**PACKAGES, "torch": "2.11.0"}),  # a local part names the flavour of a build
        H200.replace(device="H200"),
        Environment("sm90", device="H200"),  # packages are no constraint
    ],
)
def test_it_counts_where_nothing_that_was_timed_differs(with_profiles: Measured, environment: Environment) -> None:
    request = Request(DEEPSEEK, policy="measured", shape=BatchShape(8, 512, 16))
    eligible, notes = chosen(with_profiles(record()), request, environment)
    assert eligible[0] == "flashinfer_fa3"
    assert "its shape 8x512, 16 heads" in notes
    assert ("timed with fa3-fwd 0.0.3, flash-attn-4 4.0.0b36" in notes) is (environment.packages is None)


def test_the_newest_profile_that_fits_counts(with_profiles: Measured) -> None:
    newer = record(date="2026-12-24", packages={**PACKAGES, "flash-attn-4": "4.0.0b40"})
    request = Request(DEEPSEEK, policy="measured")
    matrix = with_profiles(record(), newer)
    assert "1.json" in chosen(matrix, request, OTHER_FA4)[1]
    assert "0.json" in chosen(matrix, request, H200)[1]
    neither = H200.replace(installed={**PACKAGES, "flash-attn-4": "4.0.0b30"})
    _, notes = chosen(matrix, request, neither)
    assert "4.0.0b40, installed is 4.0.0b30" in notes
    assert "4.0.0b36, installed is 4.0.0b30" in notes


def test_an_unreadable_profile_is_no_profile(data_folder: Path, with_profiles: Measured) -> None:
    with_profiles(record())
    (data_folder / "measured" / "1.json").write_text('{"gpu": "NVIDIA H200"}', encoding="utf-8")
    (data_folder / "measured" / "2.json").write_text("[", encoding="utf-8")
    for number, wrong in enumerate(
        [
            *({"eager_us": 0}, {"eager_us": math.nan}, {"eager_us": 10**400}, {"eager_us": "30"}, {"graph_us": -1}),
            *({"plan_us": -1e9}, {"plan_us": math.nan}, {"plan_us": None}, {"host_us": -1}, {"host_us": math.inf}),
            *({"lengths": []}, {"lengths": [0]}, {"lengths": {"sequences": 10**8, "length": 1}}, {"lengths": 7}),
            *({"heads": 0}, {"heads": True}, {"dims": [1, 2]}, {"kernel": ["fa4"]}, {"provider": None}),
        ]
    ):
        text = json.dumps(record(readings=[{**record()["readings"][0], **wrong}]))
        (data_folder / "measured" / f"wrong-reading-{number}.json").write_text(text, encoding="utf-8")
    for number, wrong in enumerate(
        [
            *({"layers": 0}, {"layers": -1}, {"layers": 1.5}, {"layers": 10**400}, {"gpu": ["NVIDIA H200"]}),
            *({"arch": None}, {"date": 2026}, {"dtype": []}, {"packages": ["torch"]}, {"packages": {"torch": 2}}),
        ]
    ):
        text = json.dumps(record(**wrong))
        (data_folder / "measured" / f"wrong-{number}.json").write_text(text, encoding="utf-8")
    matrix = load_matrix(data_folder)
    assert [Path(profile.label).name for profile in matrix.profiles] == ["0.json"]


def test_without_a_candidate_there_is_nothing_to_order(with_profiles: Measured) -> None:
    decision = decide(Request(DEEPSEEK, policy="measured"), H200.replace(installed={}), with_profiles(record()))
    assert (decision.chosen, decision.notes) == (None, ())


# ---- against brute force --------------------------------------------------------------------------------------------

SHAPES = st.builds(BatchShape, *(st.integers(1, 1 << n) for n in (8, 16, 8)), st.booleans())


@pytest.fixture(scope="module")
def measured_matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """The shipped data with the profile made of TIMES, and no other."""
    folder = tmp_path_factory.mktemp("measured") / "data"
    shutil.copytree(DATA_DIR, folder, ignore=shutil.ignore_patterns("measured", "evidence"))
    (folder / "measured").mkdir()
    (folder / "measured" / "0.json").write_text(json.dumps(record()), encoding="utf-8")
    return load_matrix(folder)


def far(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, float]:
    (sequences, length, heads), (sequences_2, length_2, heads_2) = one, other
    problems = math.log2(sequences * heads) - math.log2(sequences_2 * heads_2)
    return math.hypot(problems, math.log2(length) - math.log2(length_2)), abs(math.log2(heads) - math.log2(heads_2))


def brute_force(dims: MLADimensions, kernels: list[str], shape: BatchShape | None) -> str | None:
    """The rule, read off TIMES: nearest by logarithms, plan over 60 layers, ties to the default order."""
    graph = shape is not None and shape.graph
    table: dict[tuple[int, ...], dict[str, float]] = {}
    for (timed_dims, *numbers), row in TIMES.items():
        cost = {k: (g if graph else e + p / 60) for k, (e, g, p) in row.items() if k in kernels}
        known = {k: c for k, c in cost.items() if c is not None}
        if timed_dims == dims and known:
            table[tuple(numbers)] = known
    if not table:
        return None
    if shape is None:
        logs = {
            k: [math.log(row[k] / min(row.values())) for row in table.values() if k in row]
            for k in {k for row in table.values() for k in row}
        }
        cost = {k: sum(values) / len(values) for k, values in logs.items()}
    else:
        here = (shape.sequences, shape.length, shape.heads)
        cost = table[min(table, key=lambda timed: (*far(timed, here), timed))]
    return min((k for k in kernels if k in cost), key=cost.__getitem__)


@settings(max_examples=300, deadline=None)
@given(
    dims=st.sampled_from([DEEPSEEK, MISTRAL, GLM]),
    shape=st.none() | SHAPES,
    installed=st.sets(st.sampled_from(sorted(PACKAGES))),
    backend=st.none() | st.sampled_from(["FLASH_ATTN", "FLASHINFER", "fa3"]),
)
def test_the_choice_is_brute_forces_and_always_eligible(
    measured_matrix: Matrix, dims: MLADimensions, shape: BatchShape | None, installed: set[str], backend: str | None
) -> None:
    matrix = measured_matrix
    environment = H200.replace(installed={name: PACKAGES[name] for name in installed})
    default = decide(Request(dims, backend=backend), environment, matrix)
    eligible = [v.candidate.kernel for v in default.verdicts if v.verdict != "rejected"]
    got = decide(Request(dims, backend=backend, policy="measured", shape=shape), environment, matrix)
    assert {v.candidate.kernel for v in got.verdicts if v.verdict != "rejected"} == set(eligible)
    expected = brute_force(dims, eligible, shape)
    if eligible:
        assert got.chosen is not None
        assert got.chosen.kernel == (expected or eligible[0])
    else:
        assert got.chosen is None


@pytest.mark.parametrize(
    ("eager", "device", "first"),
    [
        ({"fa4": 100.0, "fa3": 105.9}, {"fa4": 90.0, "fa3": 80.0}, "fa3"),
        ({"fa4": 100.0, "fa3": 106.1}, {"fa4": 90.0, "fa3": 80.0}, "fa4"),
        ({"fa4": 105.9, "fa3": 100.0}, {"fa4": 90.0, "fa3": 80.0}, "fa3"),
        ({"fa4": 100.0, "fa3": 100.0}, {"fa4": 80.0, "fa3": 80.0}, "fa4"),  # equal in all: the default order
        ({"fa4": 100.0, "fa3": 105.9}, {"fa3": 80.0}, "fa4"),  # one cannot be captured
        ({"fa4": 100.0, "fa3": 105.9, "fa2": 105.95}, {"fa4": 90.0, "fa3": 80.0, "fa2": 70.0}, "fa2"),
    ],
)
def test_a_tie_is_decided_by_device_time(eager: dict[str, float], device: dict[str, float], first: str) -> None:
    at = Shape(8, 512, 16)
    ranked = measured.ranking({at: eager}, ["fa4", "fa3", "fa2"], BatchShape(*at), {at: device})
    rest = sorted((kernel for kernel in eager if kernel != first), key=eager.__getitem__)
    assert ranked == [first, *rest]


@given(st.sets(SHAPES.map(lambda s: Shape(*s[:3])), min_size=1), SHAPES)
def test_nearest_is_nearest_and_exact_on_a_measured_shape(known: set[Shape], shape: BatchShape) -> None:
    asked = Shape(*shape[:3])
    found = measured.nearest(known, asked)
    assert all(found.distance(asked) <= other.distance(asked) for other in known)
    assert measured.nearest({*known, asked}, asked) == asked
    doubled = asked._replace(length=asked.length * 2)
    assert asked.distance(doubled) == doubled.distance(asked) == (pytest.approx(1.0), 0.0)


def test_a_head_of_a_sequence_is_a_problem_of_its_own() -> None:
    """So many short sequences are near to one with many heads; where both were measured, the same heads decide."""
    asked = Shape(8, 512, 16)
    assert measured.nearest([Shape(1, 512, 128), Shape(8, 1024, 16)], asked) == Shape(1, 512, 128)
    assert measured.nearest([Shape(1, 512, 128), Shape(8, 512, 16)], asked) == asked


def test_the_shipped_profiles_lose_at_most_2_percent_in_their_own_shapes(matrix: Matrix) -> None:
    """By the public way, one question a shape, against the fastest kernel on record."""
    for profile in matrix.profiles:
        here = Environment(profile.arch, profile.packages, device=profile.gpu)
        for graph in (False, True):
            ratios = []
            for dims in dict.fromkeys(reading.dims for reading in profile.readings):
                for shape, times in profile.times(dims, graph).items():
                    request = Request(dims, policy="measured", shape=BatchShape(*shape, graph=graph))
                    ratios.append(times[chosen(matrix, request, here)[0][0]] / min(times.values()))
            assert math.prod(ratios) ** (1 / len(ratios)) <= 1.02


# ---- anew for each batch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "graph", "fastest"),
    [
        (DEEPSEEK, False, {(1, 128, 16): "fa4", (8, 512, 16): "flashinfer_fa3", (1, 8192, 128): "fa3"}),
        (DEEPSEEK, True, {(1, 128, 16): "flashinfer_fa3", (8, 512, 16): "flashinfer_fa3", (1, 8192, 128): "fa4"}),
        (MISTRAL, False, {(1, 512, 16): "fa2"}),
        (GLM, False, {}),  # not timed
    ],
    ids=str,
)
def test_each_timed_shape_has_its_fastest_kernel(
    with_profiles: Measured, dims: MLADimensions, graph: bool, fastest: dict[tuple[int, int, int], str]
) -> None:
    decision = decide(Request(dims, policy="measured"), H200, with_profiles(record()))
    assert measured.fastest_by_shape(decision, graph) == fastest


def test_only_what_is_eligible_is_the_fastest(with_profiles: Measured) -> None:
    """Among FlashAttention's versions; and nothing at all without a profile that applies."""
    matrix = with_profiles(record())
    decision = decide(Request(DEEPSEEK, backend="FLASH_ATTN", policy="measured"), H200, matrix)
    assert set(measured.fastest_by_shape(decision).values()) == {"fa4", "fa3"}
    decision = decide(Request(DEEPSEEK, policy="measured"), OTHER_FA4, matrix)
    assert measured.fastest_by_shape(decision) == {}


def test_a_wish_that_is_met_comes_before_speed(with_profiles: Measured) -> None:
    """PyTorch's build of FA2 writes into no given out; one that no kernel meets leaves all of them."""
    matrix = with_profiles(record())
    wishing = decide(Request(MISTRAL, policy="measured", prefers=["out"]), H200, matrix)
    assert measured.fastest_by_shape(wishing) == {(1, 512, 16): "fa3"}
    in_vain = decide(Request(MISTRAL, policy="measured", prefers=["sparse"]), H200, matrix)
    assert measured.fastest_by_shape(in_vain) == {(1, 512, 16): "fa2"}


# ---- the question ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 512, 16), "sequences must be a positive whole number"),
        ((8, 512.5, 16), "length must be a positive whole number"),
        ((8, 512, "16"), "heads must be a positive whole number"),
        ((8, 512, True), "heads must be a positive whole number"),
    ],
)
def test_shapes_that_cannot_be_meant(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        BatchShape(*arguments)


def test_a_shape_is_a_batch_shape() -> None:
    with pytest.raises(RequestError, match="BatchShape"):
        Request(DEEPSEEK, shape=(8, 512, 16))
    with pytest.raises(RequestError, match="at least one sequence"):
        BatchShape.of([], 16)
    for lengths in ([1.5], [-5], ["12"], [10**400], [2**31], "12", 5, None):
        with pytest.raises(RequestError, match="lengths must be whole numbers of tokens such as"):
            BatchShape.of(lengths, 16)
    with pytest.raises(RequestError) as refused:
        BatchShape.of([10**4000], 16)
    assert len(str(refused.value)) < 200
    assert BatchShape.of([100, 700], 16, graph=True) == BatchShape(2, 500, 16, True)


def test_the_shape_is_in_the_json_only_where_it_was_given() -> None:
    assert "shape" not in Request(DEEPSEEK).to_dict()
    given_ = Request(DEEPSEEK, policy="measured", shape=BatchShape(8, 512, 16)).to_dict()
    assert given_["shape"] == {"sequences": 8, "length": 512, "heads": 16, "graph": False}
    assert Request(DEEPSEEK, shape=BatchShape(8, 512, 16)) != Request(DEEPSEEK)


def test_select_takes_a_shape(capsys: pytest.CaptureFixture[str], data_folder: Path, with_profiles: Measured) -> None:
    with_profiles(record())
    question = [
        "select",
        "--gpu",
        "H200",
        "--model",
        "deepseek_v3",
        "--policy",
        "measured",
        "--matrix",
        str(data_folder),
    ]
    assert main([*question, "--shape", "8x512", "--heads", "16", "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"]["kernel"] == "flashinfer_fa3"
    assert answer["request"]["shape"] == {"sequences": 8, "length": 512, "heads": 16, "graph": False}
    assert "its shape 8x512, 16 heads" in answer["notes"][0]
    assert main([*question, "--shape", "1x8000", "--graph"]) == 0  # 128 heads, as the model has
    assert capsys.readouterr().out.splitlines()[1].startswith("note: policy measured: ordered by")
    assert main([*question, "--shape", "8x512", "--explain"]) == 0
    assert "priorities.yaml" not in capsys.readouterr().out.split("turned down:")[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "8by512"], "--shape takes SEQUENCESxLENGTH such as 8x512"),
        (["--shape", "8x512"], "add --heads N"),
        (["--shape", "0x512", "--heads", "16"], "sequences must be a positive whole number"),
        (["--graph"], "--graph goes with --shape"),
        (["--heads", "16"], "--heads goes with --shape"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["select", "--arch", "sm90", "--dims", "7,8,9", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# ---- the shipped order -----------------------------------------------------------------------------------------------


def test_the_sm90_order_follows_the_profile() -> None:
    """priorities.yaml: by the geometric mean of eager times in shared shapes, with the exceptions that its comment has."""
    matrix = load_matrix()
    (profile,) = (p for p in matrix.profiles if p.gpu == "NVIDIA H200")
    times: dict[str, dict[Any, float]] = {}
    for dims in {reading.dims for reading in profile.readings}:
        for shape, by_kernel in profile.times(dims, False).items():
            for kernel, microseconds in by_kernel.items():
                times.setdefault(kernel, {})[dims, shape] = microseconds

    def against(a: str, b: str, heads: int | None = None) -> float:
        """How long a takes, in units of b."""
        shared = [key for key in times[a] if key in times[b] and heads in (None, key[1].heads)]
        return math.exp(sum(math.log(times[a][key] / times[b][key]) for key in shared) / len(shared))

    (order,) = (order for order in matrix.orders if "sm90" in order.arch and not order.dims)
    flash = [kernel for kernel in order.order if matrix.kernels[kernel].backend == "FLASH_ATTN"]
    others = list(order.order[len(flash) :])
    assert [*flash, *others] == list(order.order), "FLASH_ATTN goes first"
    assert {*flash, *others} == times.keys(), "a kernel of the order was not timed"
    slower = {(a, b) for ranked in (flash, others) for a, b in itertools.pairwise(ranked) if against(a, b) > 1}
    assert slower == {("flashinfer_cudnn", "torch_efficient")}
    text = (DATA_DIR / "priorities.yaml").read_text(encoding="utf-8")
    comment = " ".join(text.partition("- arch: [sm90]")[2].partition("note:")[0].replace("#", " ").split())
    assert f"fa3 takes {against('flashinfer_fa3', 'fa2'):.2f} of FA2's time" in comment
    assert f"and cuDNN {against('cudnn', 'fa2'):.2f}" in comment
    assert f"takes {against('torch_efficient', 'flashinfer_cudnn'):.2f} of its time because of small batches" in comment
    assert f"but {against('torch_efficient', 'flashinfer_cudnn', 128):.2f} with 128 heads" in comment
