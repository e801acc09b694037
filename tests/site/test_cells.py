"""Every answer of the page is the answer of ``select --format json``: all cells, not a sample."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mla_prefill import BatchShape, Environment, Matrix, MLADimensions, Request, load_matrix
from mla_prefill.capabilities.model import DTYPES
from mla_prefill.capabilities.profiles import Profile
from mla_prefill.selector.engine import decide
from packaging.version import Version

PACKAGES = "return JSON.parse(document.getElementById('data').textContent).packages"
ANSWERS = "return JSON.stringify(arguments[0].map(explorer.answer))"
#: What operators have: nothing, one package old or new, an engine with everything, AMD's, and things that do not fit.
#: Which versions the page knows follows from the data: `known` takes the nearest.
MACHINES: tuple[dict[str, str] | None, ...] = (
    None,
    {},
    {"torch": "2.11.0"},
    {"torch": "2.6", "flash-attn": "2.6.0"},
    {"flash-attn": "2.8.3"},
    {"vllm": "0.18"},
    {"vllm": "0.33.0", "torch": "2.11.0", "flashinfer-python": "0.7.4"},
    {"vllm": "0.25", "flash-attn-4": "4.0.0b5", "flash-attn": "2.7.0"},
    {"flash-attn-3": "1", "fa3-fwd": "0.0.3", "sglang-kernel": "0.4.9"},
    {"flash-attn-4": "4.0.0b36", "fa3-fwd": "0.0.3", "torch": "2.11.0", "flashinfer-python": "0.7.4", "nvidia-cudnn-frontend": "1.32.0"},
    {"flash-attn-4": "4.0.0b10", "flashinfer-python": "0.2.14", "nvidia-cudnn-frontend": "1.33"},
    {"flashinfer-python": "0.6.12", "tokenspeed-mla": "0.1.8"},
    {"amd-aiter": "0.1.7", "flash-attn": "2.8.3", "torch": "2.11.0"},
)  # fmt: skip
#: Dims without a block: like one (same widths), odd splits, too wide for most, too narrow, odd numbers, the widest.
OTHERS = (
    (96, 96, 128),
    (96, 32, 96),
    (64, 0, 64),
    (0, 64, 512),
    (127, 65, 256),
    (97, 30, 61),
    (4096, 4096, 4096),
)


class Question(NamedTuple):
    """As the page's script takes it."""

    arch: str
    dims: tuple[int, int, int]
    dtype: str = "bfloat16"
    fa_version: int | None = None
    installed: dict[str, str] | None = None
    needs: tuple[str, ...] = ()
    policy: str = "default"
    shape: BatchShape | None = None
    device: str | None = None
    prefers: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        return {**self._asdict(), "shape": self.shape and self.shape._asdict()}

    def expected(self, matrix: Matrix) -> dict[str, Any]:
        request = Request(
            self.dims, self.dtype, self.fa_version, None, self.needs, self.policy, self.shape, self.prefers
        )
        return decide(request, Environment(self.arch, self.installed, device=self.device), matrix).to_dict()


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """The part of a decision that the page shows, as `select --format json` has it."""
    fields = (
        "backend",
        "kernel",
        "fa_version",
        "verdict",
        "pad_v_to",
        "requires",
        "proof",
        "proven",
        "reasons",
        "notes",
    )
    kept = ("backend", "kernel", "fa_version", "pad_v_to", "provider", "requires")
    return {
        "chosen": answer["chosen"] and {name: answer["chosen"][name] for name in kept},
        "candidates": [{name: candidate[name] for name in fields} for candidate in answer["candidates"]],
        "notes": answer["notes"],
        "hints": answer["hints"],
        "compute_dtype": answer["compute_dtype"],
        "warnings": answer["warnings"],
    }


def known(installed: dict[str, str] | None, packages: dict[str, list[str]]) -> dict[str, str] | None:
    """Each package in the newest version that the page knows and that is not above the one given, else the oldest."""

    def nearest(name: str, version: str) -> str:
        older = [here for here in packages[name] if Version(here) <= Version(version)]
        return older[-1] if older else packages[name][0]

    return installed and {name: nearest(name, version) for name, version in installed.items() if name in packages}


def assert_the_page_says_what_select_says(browser: Any, asked: list[Question], matrix: Matrix) -> None:
    packages = dict(browser.execute_script(PACKAGES))
    asked = [question._replace(installed=known(question.installed, packages)) for question in asked]
    for start in range(0, len(asked), 2000):  # a script of a browser under test has 30 seconds
        some = asked[start : start + 2000]
        answers = json.loads(browser.execute_script(ANSWERS, [question.plain() for question in some]))
        for question, answer in zip(some, answers, strict=True):
            assert shown(answer) == shown(question.expected(matrix)), question


MATRIX = load_matrix()
BLOCKS = [tuple(block.dims) for block in MATRIX.blocks.values()]
every_arch = pytest.mark.parametrize("arch", MATRIX.architectures)


@every_arch
def test_every_cell_is_what_select_says(arch: str, page: Any, matrix: Matrix) -> None:
    pins = (None, *matrix.fa_versions)
    asked = [
        Question(arch, dims, dtype, pin, installed)
        for dims in (*BLOCKS, *OTHERS)
        for dtype in DTYPES
        for pin in pins
        for installed in MACHINES
    ]
    assert_the_page_says_what_select_says(page(), asked, matrix)


@every_arch
def test_every_package_in_every_version(arch: str, page: Any, matrix: Matrix, export: Any) -> None:
    packages = export.Export(matrix).packages
    asked = [
        Question(arch, dims, dtype, None, {name: version}, needs)
        for dims in BLOCKS
        for dtype in ("bfloat16", "float8_e4m3fn")
        for needs in ((), ("context_chunk", "lse", "out"))
        for name, versions in packages.items()
        for version in versions
    ]
    assert_the_page_says_what_select_says(page(), asked, matrix)


def subsets(names: Any) -> Iterator[tuple[str, ...]]:
    names = sorted(names)
    return chain.from_iterable(combinations(names, n) for n in range(len(names) + 1))


@every_arch
def test_every_set_of_features(arch: str, page: Any, matrix: Matrix) -> None:
    """All of them for every block, on machines in turn, and with every pin."""
    pins = (None, *matrix.fa_versions)
    asked = [
        Question(arch, dims, DTYPES[(i // 7) % 4], pins[i % 5 % 4], MACHINES[(i + j) % len(MACHINES)], needs)
        for j, dims in enumerate((*BLOCKS, *OTHERS))
        for i, needs in enumerate(subsets(matrix.features))
    ]
    asked += [
        Question(arch, dims, needs=needs, installed=installed)
        for dims in BLOCKS
        for needs in ((), ("context_chunk",), ("context_chunk", "out"), ("fp8_query",), ("fp8_output", "out"))
        for installed in MACHINES
    ]
    assert_the_page_says_what_select_says(page(), asked, matrix)


#: Most wanted first, met by many or by none, in either order, or by another package than the next wish alone would be.
WISHES = (
    ("out", "strided_v"),
    ("strided_v", "out"),
    ("fp8_query", "out"),
    ("sparse", "context_chunk"),
    ("context_chunk", "lse"),
    ("fp8_output", "strided_v"),
    ("cuda_graph", "fp8_output", "fp8_query", "lse"),
)


@every_arch
def test_every_wish(arch: str, page: Any, matrix: Matrix) -> None:
    """Each feature alone for every block, dtype and machine; then some together, with needs, pins and other dims."""
    alone = [(feature,) for feature in sorted(matrix.features)]
    asked = [
        Question(arch, dims, dtype, None, installed, prefers=prefers)
        for dims in BLOCKS
        for dtype in DTYPES
        for installed in MACHINES
        for prefers in alone
    ]
    pins = (None, *matrix.fa_versions)
    asked += [
        Question(arch, dims, DTYPES[i % len(DTYPES)], pins[(i + j) // 3 % 4], MACHINES[(i + j) % len(MACHINES)], needs, prefers=prefers)
        for j, dims in enumerate((*BLOCKS, *OTHERS) * 2)
        for i, prefers in enumerate((*alone, *WISHES))
        for needs in ((), ("lse",), ("fp8_query", "lse"), ("context_chunk", "out"))
    ]  # fmt: skip
    assert_the_page_says_what_select_says(page(), asked, matrix)


@every_arch
def test_any_three_numbers(arch: str, page: Any, matrix: Matrix) -> None:
    """Thousands of triples by chance, most of them near a bound of some kernel, others odd or huge."""
    chance = random.Random(arch)
    bounds = (1, 8, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 512, 513, 4096)

    def any_width() -> int:
        near = chance.choice(bounds) + chance.choice((-8, -1, 0, 0, 0, 1, 8))
        return max(0, min(4096, chance.choice((near, near, near, chance.randint(1, 600), chance.randint(1, 4096)))))

    asked = []
    while len(asked) < 600:
        nope, rope, v = any_width(), chance.choice((0, 1, 32, 64, any_width())), max(1, any_width())
        if chance.random() < 0.7:  # the sum, not its parts, is what kernels have bounds for
            nope = max(1, nope - rope)
        if nope + rope:
            asked.append(Question(arch, (nope, rope, v), installed=chance.choice(MACHINES)))
    assert_the_page_says_what_select_says(page(), asked, matrix)


# ---- policy measured --------------------------------------------------------------------------------------------------


def shapes(matrix: Matrix, dims: tuple[int, int, int]) -> list[BatchShape | None]:
    """Those that were measured in these dims."""
    return [None] + [
        BatchShape(*shape, graph)
        for profile in matrix.profiles
        for graph in (False, True)
        for shape in profile.times(MLADimensions(*dims), graph)
    ]


def test_the_measured_policy(page: Any, matrix: Matrix) -> None:
    """Every shape of every profile, on every machine."""
    asked = [
        Question(profile.arch, dims, "bfloat16", pin, installed, needs, "measured", shape, profile.gpu)
        for profile in matrix.profiles
        for dims in BLOCKS
        for shape in shapes(matrix, dims)
        for installed in MACHINES
        for pin, needs in ((None, ()), (3, ()), (None, ("cuda_graph",)))
    ]
    asked += [question._replace(prefers=WISHES[i % len(WISHES)]) for i, question in enumerate(asked[::3])]
    assert len(asked) > 5000
    assert_the_page_says_what_select_says(page(), asked, matrix)


def test_each_timed_package_in_each_version(page: Any, matrix: Matrix, export: Any) -> None:
    packages = export.Export(matrix).packages
    asked = [
        Question(profile.arch, dims, dtype, None, {**profile.packages, name: version}, (), "measured", None, "H200")
        for profile in matrix.profiles
        for dims in BLOCKS
        for dtype in ("bfloat16", "float16", "float8_e4m3fn")
        for name, versions in packages.items()
        for version in versions
    ]
    assert_the_page_says_what_select_says(page(), asked, matrix)


def test_the_measured_policy_without_a_profile(page: Any, matrix: Matrix) -> None:
    asked = [
        Question(arch.id, dims, "bfloat16", None, installed, (), "measured", None, device)
        for arch in matrix.architectures.values()
        for device in (None, *arch.products)
        for dims in (*BLOCKS, OTHERS[0])
        for installed in (None, {}, {"torch": "2.11.0"})
    ]
    assert_the_page_says_what_select_says(page(), asked, matrix)


def test_two_profiles_of_one_gpu_with_gaps(page: Any, matrix: Matrix, export: Any, tmp_path: Path) -> None:
    """The newer one lacks dims, shapes of one kernel and the last kernel; what it does not answer the older one may."""
    (full,) = matrix.profiles
    last = full.readings[-1]
    kept = [
        reading.to_dict()
        for i, reading in enumerate(full.readings)
        if reading.dims != last.dims and reading.kernel != last.kernel and not (reading.kernel == "fa4" and i % 3)
    ]
    packages = {**full.packages, "fa3-fwd": "0.0.4"}
    fields = {"gpu": full.gpu, "arch": full.arch, "dtype": full.dtype, "layers": full.layers, "date": "2026-12-01"}
    few = Profile("newer.json", {**fields, "packages": packages, "readings": kept})
    gappy = copy(matrix)
    gappy.profiles = (few, full)
    export.write(tmp_path, gappy)
    asked = [
        Question("sm90", dims, dtype, pin, installed, needs, "measured", shape, "NVIDIA H200")
        for dims in BLOCKS
        for shape in shapes(gappy, dims)[::3]
        for dtype in ("bfloat16", "float16")
        for installed in (*MACHINES, {"torch": "2.11.0", "fa3-fwd": "0.0.4"}, {"torch": "2.11.0", "fa3-fwd": "0.0.3"})
        for pin, needs in ((None, ()), (3, ()), (None, ("cuda_graph",)))
    ]
    browser = page()
    browser.get(f"{tmp_path.as_uri()}/index.html")
    data = json.loads(browser.execute_script("return document.getElementById('data').textContent"))
    assert any(order[2] for of_shape in data["profiles"][0]["orders"].values() for order in of_shape.values())
    assert_the_page_says_what_select_says(browser, asked, gappy)


# ---- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "#gpu=H200&dims=128,64,128&fa=2&installed=flash-attn%3D%3D2.8.3",
        "#gpu=sm_100a&dims=97,30,61&dtype=float16&needs=lse,out",
        "#gpu=NVIDIA%20H200&dims=64,64,128&policy=measured&shape=8x512&heads=16&graph",
        "#gpu=B200&dims=192,64,256&policy=measured&needs=fp8_query",
        "#gpu=B200&dims=128,64,128&needs=lse&prefers=fp8_query,out",
        "#gpu=H200&dims=64,64,128&installed=",
    ],
)
def test_the_command_that_the_page_shows_is_the_same_question(query: str, page: Any) -> None:
    """Run as it stands, in a shell."""
    script = "const s = explorer.read(location.hash); return JSON.stringify([explorer.command(s), explorer.answer(explorer.understood(s).question)])"
    command, answer = json.loads(page(query).execute_script(script))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the command of this environment
    done = subprocess.run(
        command.replace("--explain", "--format json"),
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert done.stderr == ""
    assert shown(answer) == shown(json.loads(done.stdout))
