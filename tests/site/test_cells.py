"""Every answer of the page is the answer of ``select --format json``: all cells, not a sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import Environment, Matrix, MLADimensions, Request
from mla_prefill.capabilities.model import DTYPES
from mla_prefill.selector.engine import decide

ANSWERS = """
return JSON.stringify(arguments[0].map(([arch, dims, dtype, fa_version, installed]) =>
  explorer.answer({arch, dims, dtype, fa_version, installed})));
"""
#: What operators have: nothing, one package old or new, an engine with everything, AMD's, and things that do not fit.
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
#: Dims without a block: like one (same widths), odd splits, too wide for most, too narrow, the largest exported.
OTHERS = (
    (96, 96, 128),
    (96, 32, 96),
    (64, 0, 64),
    (8, 0, 8),
    (0, 64, 512),
    (288, 32, 256),
    (512, 0, 512),
    (127, 65, 256),
)

Question = tuple[str, tuple[int, int, int], str, "int | None", "dict[str, str] | None"]


def expected(question: Question, matrix: Matrix) -> dict[str, Any]:
    arch, dims, dtype, pin, installed = question
    return decide(Request(dims, dtype, pin), Environment(arch, installed), matrix).to_dict()


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    """The part of a decision that the page shows, as `select --format json` has it."""
    fields = ("backend", "kernel", "fa_version", "verdict", "pad_v_to", "requires", "proof", "reasons", "notes")
    kept = ("backend", "kernel", "fa_version", "pad_v_to", "provider", "requires")
    return {
        "chosen": answer["chosen"] and {name: answer["chosen"][name] for name in kept},
        "candidates": [{name: candidate[name] for name in fields} for candidate in answer["candidates"]],
        "hints": answer["hints"],
    }


def questions(matrix: Matrix, arch: str) -> Iterator[Question]:
    for dims in (*(tuple(block.dims) for block in matrix.blocks.values()), *OTHERS):
        for dtype in DTYPES:
            for pin in (None, *matrix.fa_versions):
                for installed in MACHINES:
                    yield arch, dims, dtype, pin, installed


def architectures() -> list[str]:
    from mla_prefill import load_matrix

    return list(load_matrix().architectures)


@pytest.mark.parametrize("arch", architectures())
def test_every_cell_is_what_select_says(arch: str, page: Any, matrix: Matrix) -> None:
    browser = page()
    asked = list(questions(matrix, arch))
    answers = json.loads(browser.execute_script(ANSWERS, asked))
    for question, answer in zip(asked, answers, strict=True):
        assert shown(answer) == shown(expected(question, matrix)), question


@pytest.mark.parametrize("arch", architectures())
def test_every_package_in_every_version(arch: str, page: Any, matrix: Matrix, export: Any) -> None:
    packages = export.Export(matrix).packages
    asked: list[Question] = [
        (arch, tuple(block.dims), dtype, None, {name: version})
        for block in matrix.blocks.values()
        for dtype in ("bfloat16", "float8_e4m3fn")
        for name, versions in packages.items()
        for version in versions
    ]
    answers = json.loads(page().execute_script(ANSWERS, asked))
    for question, answer in zip(asked, answers, strict=True):
        assert shown(answer) == shown(expected(question, matrix)), question


@pytest.mark.parametrize("arch", architectures())
def test_every_pair_of_widths(arch: str, page: Any, matrix: Matrix, export: Any) -> None:
    """Dims that no block has, over the whole grid: every verdict with its padding, requirements, codes and sources."""
    browser, widths = page(), range(export.STEP, export.WIDEST + 1, export.STEP)
    brief = "return explorer.answer({arch: arguments[0], dims: arguments[1], dtype: 'bfloat16', fa_version: null, installed: null})"
    lines = f"""
    const answers = [];
    for (const dims of arguments[1]) {{
      const found = (() => {{ {brief.replace("arguments[1]", "dims")} }})();
      answers.push(found.candidates.map((c) => [c.kernel, c.verdict, c.pad_v_to, c.requires, c.reasons.map((r) => [r.code, r.source])]));
    }}
    return JSON.stringify(answers);"""
    grid = [(qk - 1, 1, v) for qk in widths for v in widths]
    answers = json.loads(browser.execute_script(lines.replace("arguments[0]", json.dumps(arch)), arch, grid))
    for dims, answer in zip(grid, answers, strict=True):
        assert matrix.block_for(MLADimensions(*dims)) is None
        decision = decide(Request(dims), Environment(arch), matrix)
        assert answer == [
            [
                v.candidate.kernel,
                v.verdict,
                v.candidate.pad_v_to,
                list(v.candidate.requires),
                [[r.code, r.source] for r in v.reasons],
            ]
            for v in decision.verdicts
        ], dims


def test_the_command_that_the_page_shows_is_the_same_question(page: Any, matrix: Matrix) -> None:
    """Run as it stands, in a shell."""
    query = "#gpu=H200&dims=128,64,128&fa=2&installed=flash-attn%3D%3D2.8.3"
    browser = page(query)
    state = browser.execute_script("return explorer.read(location.hash)")
    command = browser.execute_script("return explorer.command(explorer.read(location.hash))")
    assert state["installed"] == {"flash-attn": "2.8.3"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # the command of this environment
    done = subprocess.run(
        command.replace("--explain", "--format json"),
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": path},
    )
    answer = browser.execute_script("return explorer.answer({...arguments[0], arch: 'sm90'})", state)
    assert shown(answer) == shown(json.loads(done.stdout))
