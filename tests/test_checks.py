"""Every rule fails when it should (C68), at the place that is wrong, and the shipped data passes all of them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill import Environment, Request
from mla_prefill.backends.records import lined
from mla_prefill.capabilities import Matrix, MatrixError, MLADimensions, checks, fixes, load, load_matrix
from mla_prefill.capabilities.findings import CODES, Finding, nearest
from mla_prefill.capabilities.report import FORMATS
from mla_prefill.capabilities.source import SourceFile, parse
from mla_prefill.cli import main
from mla_prefill.selector.diff import diff
from mla_prefill.selector.engine import decide

Edit = Callable[[str, str, str], Path]
FA_ROW = "- {arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}"
FA2_ROW = "- {arch: [sm80, sm86, sm87, sm89], fa_version: 2, backends: [FLASH_ATTN]}"

# code, file, old, new, what the finding says
CASES = [
    ("X301", "matrix.yaml", "{arch: [sm90]", "{arch: [sm9]", "unknown architecture 'sm9'"),
    ("X301", "priorities.yaml", "- arch: [sm90]", "- arch: [sm9]", "did you mean sm90?"),
    ("X302", "priorities.yaml", "order: [fa4, fa3", "order: [fa5, fa3", "unknown kernel 'fa5'"),
    ("X302", "matrix.yaml", "kernels: [flashinfer_fa2]", "kernels: [flashinfer_fa_2]", "did you mean flashinfer_fa2?"),
    ("X303", "matrix.yaml", "backends: [TRTLLM_RAGGED]", "backends: [TRTLLM_RAGED]", "did you mean TRTLLM_RAGGED?"),
    ("X304", "matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3, 5]"), "version 5"),
    ("X305", "priorities.yaml", "dims: [glm_4_7_flash]", "dims: [glm_4_7_flsh]", "did you mean glm_4_7_flash?"),
    ("X306", "kernels.yaml", "provides: [lse, ", "provides: [lze, ", "did you mean lse?"),
    ("X307", "kernels.yaml", "dtypes: [bfloat16, float16]", "dtypes: [bfloat16, flot16]", "did you mean float16?"),
    ("X308", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-atn-4>=4.0.0b11", "did you mean flash-attn-4?"),
    ("X305", "matrix.yaml", "dims: [glm_5_3_flash]", "dims: [glm_5_3_flsh]", "did you mean glm_5_3_flash?"),
    ("X309", "models.yaml", "like: deepseek_v3", "like: deepseek_v33", "did you mean deepseek_v3?"),
    ("X310", "matrix.yaml", FA_ROW, f"{FA_ROW}\n      {FA_ROW}", "fa2 on sm90 for (128, 64, 128) is already allowed"),
    ("X311", "matrix.yaml", FA_ROW, FA_ROW.replace("fa_version: [2, 3, 4], ", ""), "for which FlashAttention version"),
    ("X311", "matrix.yaml", "backends: [TRTLLM_RAGGED]", "fa_version: 4, backends: [TRTLLM_RAGGED]", "never applies"),
    ("X311", "matrix.yaml", FA2_ROW, FA2_ROW.replace("}", ", kernels: [fa3]}"), "no kernel of FLASH_ATTN is left"),
    ("X312", "matrix.yaml", "qk_nope: 64, qk_rope: 64, v_head: 128", "qk_nope: 128, qk_rope: 64, v_head: 128", "deepseek_v3"),
    ("X312", "matrix.yaml", "{qk_nope: 64, qk_rope: 64, v_head: 128}", "{v_head: 128, qk_rope: 64, qk_nope: 128}", "deepseek_v3"),
    ("X312", "matrix.yaml", "qk_nope: 64, qk_rope: 64", "qk_nope: 0, qk_rope: 0", "a head cannot be 0 wide"),
    ("X313", "architectures.yaml", "products: [H100", "products: [B200, H100", "already belongs to"),
    ("X313", "architectures.yaml", "products: [B200, GB200]", "products: [B200, GB200, H 200]", "'H 200' already belongs to sm90"),
    ("X313", "architectures.yaml", "products: [B200, GB200]", "products: [B200, GB200, NVIDIA H200]", "'NVIDIA H200' already belongs to sm90"),
    ("X313", "architectures.yaml", "spellings: [sm_89", "spellings: [sm90, sm_89", "'sm90' already belongs to sm90"),
    ("X313", "architectures.yaml", "spellings: [sm_89", "spellings: [SM-90A, sm_89", "'sm_90a' already belongs to sm89"),
    ("X313", "architectures.yaml", "spellings: [sm_89", "spellings: [gfx942:xnack+, sm_89", "'gfx942:xnack+' already belongs to gfx942"),
    ("X314", "kernels.yaml", "- arch: [sm90]\n", "- arch: [sm90, sm80]\n", "already has limits for sm80"),
    ("X320", "matrix.yaml", FA2_ROW, FA2_ROW.replace("fa_version: 2", "fa_version: [2, 3, 4]").replace("sm80, ", "sm100, sm80, "), "FLASH_ATTN/fa3 cannot run"),
    ("X322", "matrix.yaml", "kernels: [trtllm_ragged]\n    dims: [glm_5_3_flash]", "kernels: [trtllm_ragged]\n    dims: [glm_5_3_flash, minicpm3]", "nothing is excused for minicpm3"),
    ("X322", "matrix.yaml", "- arch: [sm80, sm86, sm87, sm89]\n    kernels: [fa3]", "- arch: [sm80, sm86, sm87, sm89, sm100]\n    kernels: [fa3]", "nothing is excused for sm100"),
    ("X322", "matrix.yaml", "kernels: [fa3]", "kernels: [fa3, aiter]", "nothing is excused for aiter"),
    ("X323", "matrix.yaml", "- arch: [sm70]\n", "- arch: [sm70, sm75]\n", "narrow one of the two"),
    ("X330", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-attn-4>=4.0.0b11,<4.0.0b11", "holds no version"),
    ("X330", "kernels.yaml", 'verified: ">=2.6.0,<2.8.4"', 'verified: ">=2.8,<2.7"', ">=2.8 and <2.7 exclude each other"),
    ("X330", "matrix.yaml", FA_ROW, FA_ROW.replace("}", ', requires: ["flash-attn==2.7.*,!=2.7.*"]}'), "==2.7.* and !=2.7.* exclude each other"),
    ("X330", "matrix.yaml", FA_ROW, FA_ROW.replace("}", ', requires: ["flash-attn-4<4.0.0b1"]}'), "exclude each other"),
    ("X331", "kernels.yaml", "flash-attn-4>=4.0.0b11", "flash-attn-4>=4", "write >=4b0"),
    ("X332", "kernels.yaml", 'version: ">=2.6.0"', 'version: ">=2.6..0"', "not a version range"),
    ("X340", "priorities.yaml", "order: [fa4, fa3, fa2, flashinfer_fa3", "order: [fa4, fa3, flashinfer_fa3", "fa2 runs on sm90 but is not in its order"),
    ("X341", "priorities.yaml", "order: [fa4, fa3, fa2", "order: [fa4, aiter, fa3, fa2", "aiter runs on none of"),
    ("X341", "priorities.yaml", "order: [fa4, fa3, fa2, flashinfer_fa3, cudnn", "order: [torch_math, fa4, fa3, fa2, flashinfer_fa3, cudnn", "two places"),
    ("X342", "priorities.yaml", "- arch: [sm90]", "- arch: [sm90, sm110]", "sm110 has a second order"),
    ("X343", "priorities.yaml", "order: [trtllm_ragged, fa4, flashinfer_cutlass", "order: [fa4, trtllm_ragged, flashinfer_cutlass", "is the same"),
    ("X344", "priorities.yaml", "  - arch: [sm110]\n    order", "  - {arch: [sm103], dims: [glm_4_7_flash], order: [trtllm_ragged], sources: [{kind: docs, ref: here}]}\n  - arch: [sm110]\n    order", "glm_4_7_flash on sm103 has a second order; the first is at"),
    ("X350", "models.yaml", "dims: [64, 64, 128]", "dims: [64, 64, 136]", "no block of the matrix has"),
    ("X351", "matrix.yaml", "  - arch: [sm70]\n    kernels: [torch_efficient, torch_math]", "  - arch: [sm70]\n    kernels: [torch_math]", "deepseek_v3 has no backend on sm70"),
    ("X382", "matrix.yaml", "[sm80, sm86, sm87, sm89], fa_version: 2", "[sm86, sm80, sm87, sm89], fa_version: 2", "write [sm80, sm86, sm87, sm89]"),
    ("X382", "kernels.yaml", "arch: [sm80, sm86, sm87, sm89, sm90]\n        widths", "arch: [sm80, sm86, sm87, sm90, sm89]\n        widths", "write [sm80, sm86, sm87, sm89, sm90]"),
    ("X384", "matrix.yaml", f"{FA2_ROW}\n", f"{FA_ROW}\n      {FA2_ROW}\n", "the row of line 78 comes before this one"),
    ("X384", "matrix.yaml", "- arch: [sm80, sm86, sm87, sm89]\n    kernels: [fa3]", "- arch: [sm80, sm86, sm87, sm89]\n    kernels: [cudnn]", "the row of line 35 comes before this one"),
    ("X381", "matrix.yaml", "# yaml-language-server", "# yaml-server", "no editor modeline"),
]  # fmt: skip


def findings_of(folder: Path) -> list[Finding]:
    return checks.check_path(folder)


def without_records(folder: Path) -> Path:
    """The folder without evidence and profiles, where what they say is not under test: they take half of a check."""
    for shipped in ("evidence", "measured"):
        shutil.rmtree(folder / shipped, ignore_errors=True)
    return folder


@pytest.mark.parametrize(("code", "name", "old", "new", "says"), CASES)
def test_each_rule_fails_when_it_should(edited: Edit, code: str, name: str, old: str, new: str, says: str) -> None:
    """C67, C68: one change, the expected code, in the changed file, on a changed line."""
    folder = without_records(edited(name, old, new))
    found = [f for f in findings_of(folder) if f.code == code]
    assert any(says in f"{f.message} {f.hint}" for f in found), [str(f) for f in findings_of(folder)][:5]
    text = (load.DATA_DIR / name).read_text(encoding="utf-8")
    start = text[: text.index(old)].count("\n") + 1
    lines = range(start, start + new.count("\n") + 2)
    assert any(Path(f.path).name == name and f.line in lines for f in found) or code in (
        "X340",
        "X342",
        "X313",
        "X351",
    ), found


def test_every_check_code_has_a_failing_example() -> None:
    """C68: no rule without an example; the reading and schema codes have theirs in test_reading.py."""
    tested = {case[0] for case in CASES} | {case[0] for case in RECORD_CASES} | {"X315", "X321", "X380", "X383"}
    assert tested == {code for code in CODES if code.startswith("X")}


# ---- records ----------------------------------------------------------------------------------------------------

RAN = {
    **{"kernel": "fa4", "provider": "flash-attn-4", "arch": "sm90", "dims": [128, 64, 128], "qk": 192, "v": 128},
    **{"pad_v_to": None, "dtype": "bfloat16", "operation": "new_tokens", "allowed": True, "ok": True},
    **{"error": 2e-3, "lse_error": 1e-6},
}
FAILED = {**RAN, "ok": False, "refusal": "CUDA error: an illegal memory access"}
NO_ROW = {**FAILED, "arch": "sm120", "allowed": False}
H200 = {"flash-attn-4": "4.0.0b36", "flashinfer-python": "0.7.4", "fa3-fwd": "0.0.3"}
RUN = {
    **{
        "schema_version": 1,
        "level": "run",
        "date": "2026-11-30",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "torch": "2.11.0",
    },
    **{"cuda": "13.0", "arch": "sm90", "packages": H200, "command": "mla-prefill verify"},
}
READING = {
    **{"dims": [128, 64, 128], "lengths": {"sequences": 8, "length": 512}, "heads": 16, "kernel": "fa4"},
    **{"provider": "flash-attn-4", "eager_us": 66.0, "graph_us": 44.0, "host_us": 13.0, "plan_us": 80.0},
}
TIMED = {**RUN, "dtype": "bfloat16", "layers": 60}
del TIMED["level"]

# code, severity, kind, what is in the file, what the finding says
RECORD_CASES: list[tuple[str, str, str, Any, str]] = [
    ("X360", "error", "evidence", '{"schema_version": 1,\n "cells": [', "not readable JSON"),
    ("X360", "error", "evidence", "[" * 100_000, "not readable JSON"),
    ("X360", "error", "evidence", "[]", "is not of type 'object'"),
    ("X360", "error", "evidence", {**RUN, "level": "seen", "cells": []}, "'seen' is not one of"),
    ("X360", "error", "evidence", {**RUN, "cells": [RAN, {**RAN, "ok": "yes"}]}, "cells.1.ok: 'yes' is not of type"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "kernel": "fa5"}]}, "unknown kernel 'fa5'"),
    ("X360", "error", "evidence", {**RUN, "cells": [RAN, {**RAN, "arch": "sm9"}]}, "did you mean sm90?"),
    ("X360", "error", "evidence", {**RUN, "arch": "sm900", "cells": [RAN]}, "unknown architecture 'sm900'"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "qk": 128}]}, "the entry says qk 128"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "dims": [0, 0, 128]}]}, "a head cannot be 0 wide"),
    ("X360", "error", "measured", {**TIMED, "readings": [{**READING, "eager_us": 0}]}, "readings.0.eager_us: 0 is less than"),
    ("X360", "error", "measured", {**TIMED, "readings": [READING, {**READING, "kernel": "fa5"}]}, "unknown kernel 'fa5'"),
    ("X360", "error", "measured", {**TIMED, "readings": [READING], "gpu": 7}, "gpu: 7 is not of type"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**FAILED, "provider": "flash-attn-5"}]}, "unknown provider of fa4 'flash-attn-5' did you mean flash-attn-4?"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**FAILED, "provider": "torch"}]}, "unknown provider of fa4 'torch'"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**FAILED, "dtype": "bf16"}]}, "unknown dtype 'bf16'"),
    ("X360", "error", "evidence", {**RUN, "packages": {"flash-attn-4": "beta"}, "cells": [FAILED] * 9}, "version of flash-attn-4, whose build this was; it has 'beta', which is no version"),
    ("X360", "error", "evidence", {**RUN, "packages": {"torch": "2.11.0"}, "cells": [FAILED]}, "version of flash-attn-4, whose build this was; it has none"),
    ("X360", "error", "evidence", {**RUN, "packages": {"flash-attn-4": 4}, "cells": [RAN]}, "packages.flash-attn-4: 4 is not of type 'string'"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "error": 0.5}]}, "ok, though its error is 0.5; at most 0.006 is right"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "error": None}]}, "ok, though its error is not on record"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "lse_error": 9.0}]}, "its lse_error is 9.0; at most 0.0001 is right"),
    ("X360", "error", "evidence", {**RUN, "cells": [{**RAN, "error": math.nan}]}, "not readable JSON: NaN is not a number of JSON"),
    ("X360", "error", "evidence", '{"cells": [{"ok": true, "ok": false}]}', "the key 'ok' occurs twice in one object"),
    ("X360", "error", "measured", '{"date": "2026-11-30", "date": "2026-11-29"}', "the key 'date' occurs twice in one object"),
    ("X360", "error", "measured", {**TIMED, "layers": 0, "readings": [READING]}, "layers: 0 is less than the minimum of 1"),
    ("X360", "error", "measured", {**TIMED, "layers": 2**60, "readings": [READING]}, "layers must be a whole number from 1 to"),
    ("X360", "error", "measured", {**TIMED, "readings": [{**READING, "plan_us": -1}]}, "readings.0.plan_us: -1 is less than the minimum of 0"),
    ("X360", "error", "measured", {**TIMED, "readings": [{**READING, "plan_us": math.nan}]}, "not readable JSON: NaN is not a number of JSON"),
    ("X360", "error", "measured", {**TIMED, "gpu": ["NVIDIA H200"], "readings": [READING]}, "gpu: ['NVIDIA H200'] is not of type"),
    ("X360", "error", "measured", {**TIMED, "packages": {}, "readings": [READING]}, "version of flash-attn-4, whose build this was; it has none"),
    ("X361", "error", "evidence", {**RUN, "cells": [{**RAN, "cuda_graph": "capture failed"}]}, "not run in a CUDA graph: capture failed"),
    ("X361", "error", "evidence", {**RUN, "cells": [RAN, FAILED]}, "fa4 of flash-attn-4 4.0.0b36 for (128, 64, 128) bfloat16 new_tokens on sm90 failed: CUDA error"),
    ("X361", "error", "evidence", {**RUN, "level": "built", "cells": [{**FAILED, "provider": None}]}, "matrix.yaml:"),
    ("X362", "notice", "evidence", {**RUN, "cells": [NO_ROW]}, "no row allows it, yet"),
    ("X362", "notice", "evidence", {**RUN, "cells": [{**RAN, "dims": [256, 64, 256], "qk": 320, "v": 256}]}, "though the kernel sheet says it cannot be"),
    ("X362", "notice", "evidence", {**RUN, "cells": [{**RAN, "arch": "sm120", "cuda_graph": "capture failed"}]}, "not run in a CUDA graph: capture failed"),
    ("X363", "notice", "evidence", {**RUN, "packages": {"flash-attn-4": "4.0.0b4"}, "cells": [RAN]}, "the kernel sheet offers flash-attn-4>=4.0.0b5"),
]  # fmt: skip


def with_record(folder: Path, kind: str, content: Any) -> Path:
    """The folder with one record, its entries on lines of their own, as they are written."""
    text = content
    if not isinstance(content, str):
        text = lined(content, "cells" if kind == "evidence" else "readings")
    (without_records(folder) / kind).mkdir()
    (folder / kind / "made.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("code", "severity", "kind", "content", "says"), RECORD_CASES)
def test_each_rule_about_records_fails_when_it_should(
    data_folder: Path, code: str, severity: str, kind: str, content: Any, says: str
) -> None:
    folder = with_record(data_folder, kind, content)
    found = [f for f in findings_of(folder) if f.path.endswith("made.json")]
    assert [(f.code, f.severity) for f in found] == [(code, severity)]
    assert says in f"{found[0].message} {found[0].hint}"
    assert found[0].path.endswith(f"{kind}/made.json")
    load_matrix(folder)  # a load decides nothing by records, and stops for none


@pytest.mark.parametrize(
    ("cell", "packages", "proof"),
    [
        (RAN, H200, "run"),
        (FAILED, H200, "contradicted"),
        ({**FAILED, "ok": None}, H200, "source"),  # could not be tried: nothing is known
        ({**FAILED, "dtype": "float32"}, H200, "source"),  # the kernel sheet does not offer it
        (FAILED, {"flash-attn-4": "4.0.0b4"}, "source"),  # nor this version
        ({**FAILED, "operation": "context_chunk"}, {"flash-attn-4": "4.0.0b9"}, "source"),  # which is known to be bad
        (FAILED, {"flash-attn-4": "4.0.0b9"}, "contradicted"),
        (RAN, {"torch": "2.11.0"}, "source"),  # of no version, so not of every version
        (FAILED, {"flash-attn-4": "beta"}, "source"),
    ],
)
def test_only_what_the_sheet_holds_possible_is_contradicted(
    data_folder: Path, cell: dict[str, Any], packages: dict[str, str], proof: str
) -> None:
    folder = with_record(data_folder, "evidence", {**RUN, "packages": packages, "cells": [cell]})
    assert load_matrix(folder).proof("fa4", "sm90", MLADimensions(128, 64, 128)) == proof
    assert bool([f for f in findings_of(folder) if f.code == "X361"]) is (proof == "contradicted")


def test_a_failure_outweighs_what_went_well(data_folder: Path) -> None:
    folder = with_record(data_folder, "evidence", {**RUN, "cells": [RAN, FAILED, RAN]})
    matrix = load_matrix(folder)
    assert matrix.proof("fa4", "sm90", MLADimensions(128, 64, 128)) == "contradicted"
    (finding,) = [f for f in findings_of(folder) if f.code == "X361"]
    text = (folder / "evidence" / "made.json").read_text(encoding="utf-8").splitlines()
    assert "illegal memory access" in text[finding.line - 1]


def test_a_row_that_excludes_the_failing_version_is_not_contradicted(edited: Edit) -> None:
    """The way out that X361's hint names."""
    row = "- {arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]"
    folder = edited("matrix.yaml", row, f'{row}, requires: ["flash-attn-4>=4.0.0b40"]')
    with_record(folder, "evidence", {**RUN, "cells": [FAILED]})
    assert not [f for f in findings_of(folder) if f.code in ("X361", "X362")]


@pytest.mark.parametrize(("needs", "cell"), [("lse", FAILED), ("cuda_graph", {**RAN, "cuda_graph": "capture failed"})])
def test_what_is_known_to_be_bad_for_a_need_is_not_contradicted(edited: Edit, needs: str, cell: dict[str, Any]) -> None:
    old = 'version: "flash-attn-4>=4.0.0b5,<4.0.0b10"\n        needs: [context_chunk]'
    folder = edited("kernels.yaml", old, f'version: "flash-attn-4>=4.0.0b5"\n        needs: [{needs}]')
    with_record(folder, "evidence", {**RUN, "cells": [cell]})
    assert not [f for f in findings_of(folder) if f.code in ("X361", "X362")]


@pytest.mark.parametrize(
    "cell",
    [
        {**RAN, "provider": 4},
        {**RAN, "dtype": ["bfloat16"]},
        {**RAN, "operation": {}},
        {**RAN, "arch": ["sm90"]},
        {**RAN, "dims": [128, 64.0, 128]},
        {**RAN, "error": "small"},
        {**RAN, "error": True, "lse_error": [1]},
        {**RAN, "cuda_graph": {}},
    ],
)
@pytest.mark.parametrize("packages", [H200, {"flash-attn-4": 4}, {"flash-attn-4": None}, ["flash-attn-4"]])
def test_an_odd_cell_is_reported_and_never_raises(data_folder: Path, cell: dict[str, Any], packages: object) -> None:
    folder = with_record(data_folder, "evidence", {**RUN, "packages": packages, "cells": [cell]})
    assert {f.code for f in findings_of(folder) if f.path.endswith("made.json")} == {"X360"}
    load_matrix(folder)


@pytest.mark.parametrize(("error", "proof"), [(2e-3, "run"), (0.5, "source"), (None, "source")])
def test_a_wrong_result_proves_nothing(data_folder: Path, error: float | None, proof: str) -> None:
    folder = with_record(data_folder, "evidence", {**RUN, "cells": [{**RAN, "error": error}]})
    assert load_matrix(folder).proof("fa4", "sm90", MLADimensions(128, 64, 128)) == proof


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"level": "run", "cells": [1, {}, {"kernel": 3}]}', "\xff", "[" * 9999]
)
@pytest.mark.parametrize("kind", ["evidence", "measured"])
def test_a_damaged_record_never_raises(data_folder: Path, kind: str, content: str) -> None:
    folder = with_record(data_folder, kind, content)
    assert "X360" in {f.code for f in findings_of(folder)}
    assert load_matrix(folder).profiles == ()


def test_what_is_possible_but_not_allowed_is_a_notice(edited: Edit) -> None:
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    [finding] = [
        f
        for f in findings_of(folder)
        if f.code == "X321" and "fa4 can run (128, 64, 128)" in f.message and "sm90" in f.message
    ]
    assert finding.severity == "notice"
    load_matrix(folder)  # a notice never stops a load


def test_every_gap_of_the_shipped_matrix_is_explained(matrix: Matrix) -> None:
    """Nothing is possible and silently not allowed; a kernel without a row says why to whoever asks for it."""
    assert checks.check_path() == []
    arch, dims = "sm120", matrix.blocks["mistral_small_4"].dims
    decision = decide(Request(dims, backend="fa4"), Environment(arch), matrix)
    [reason] = next(v.reasons for v in decision.verdicts if v.candidate.kernel == "fa4")
    assert reason.code == "no-rule"
    assert reason.message == f"no row allows FA4 for {dims} on sm120: {reason.expected}"
    assert "nobody showed it right" in reason.message
    assert reason.source is not None
    number = int(reason.source.rpartition(":")[2])
    lines = (load.DATA_DIR / "matrix.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[number - 1].startswith("  - arch: [sm80,")


def test_without_an_exception_the_gap_is_back(edited: Edit) -> None:
    folder = edited(
        "matrix.yaml",
        "kernels: [tokenspeed_mla]\n    dims: [mistral_small_4]",
        "kernels: [tokenspeed_mla]\n    dims: [deepseek_v3]",
    )
    codes = {f.code for f in findings_of(folder)}
    assert codes == {"X321", "X323"}  # deepseek_v3 allows it, mistral_small_4 leaves it without a word


def test_an_overlay_alone_makes_no_noise(tmp_path: Path) -> None:
    """A site may allow what the shipped matrix gives a reason against; only its own mistakes are told."""
    row = "- {arch: [sm120], fa_version: 4, backends: [FLASH_ATTN]}"
    text = "schema_version: 1\nmatrix:\n  deepseek_v3:\n    dims: {qk_nope: 128, qk_rope: 64, v_head: 128}\n"
    text += f"    sources: [{{kind: measurement, ref: our own run}}]\n    allow:\n      {row}\n"
    site = tmp_path / "site.yaml"
    site.write_text(text, encoding="utf-8")
    assert checks.check_path(None, [site]) == []
    wrong = "not_allowed:\n  - {arch: [sm90, sm80], kernels: [fa4], reason: no, sources: [{kind: issue, ref: a/b#1}]}\n"
    site.write_text(text + wrong.replace(": no,", ": site,"), encoding="utf-8")
    assert {(f.code, f.path) for f in checks.check_path(None, [site])} == {("X323", str(site)), ("X382", str(site))}
    assert [Path(p) for p in fixes.fix(None, [site])] == [site]
    assert "arch: [sm80, sm90], kernels" in site.read_text(encoding="utf-8")


def test_a_changed_source_is_never_answered_from_the_compiled_form(
    edited: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X380: stale is a fixable finding, and loading reads the sources."""
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    monkeypatch.setattr(load, "DATA_DIR", folder)
    monkeypatch.setattr(load, "COMPILED", folder / "compiled.json")
    monkeypatch.setattr(checks, "COMPILED", folder / "compiled.json")
    dims = next(b.dims for b in load_matrix().blocks.values() if b.name == "deepseek_v3")
    assert all(c.fa_version != 4 for c in load_matrix().lookup("sm90", 4, dims))
    assert [f.code for f in checks.check_path() if f.fixable] == ["X380"]
    assert [Path(p).name for p in fixes.fix(None)] == ["compiled.json"]
    assert [f.code for f in checks.check_path() if f.fixable] == []
    assert load_matrix().fingerprint == load.shipped_fingerprint()


def test_the_compiled_form_equals_its_sources() -> None:
    matrix = checks.require_clean(load.gather())
    assert json.loads(load.COMPILED.read_text(encoding="utf-8")) == matrix.document


def test_fix_mends_what_a_link_leads_to(edited: Edit, tmp_path: Path) -> None:
    folder = edited("matrix.yaml", fixes.MODELINE.format(kind="matrix"), "")
    real = (folder / "matrix.yaml").rename(tmp_path / "real.yaml")
    (folder / "matrix.yaml").symlink_to(real)
    assert [Path(p).name for p in fixes.fix(folder)] == ["matrix.yaml"]
    assert (folder / "matrix.yaml").is_symlink()
    assert real.read_text(encoding="utf-8").startswith(fixes.MODELINE.format(kind="matrix"))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_write_that_fails_says_so_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".matrix.yaml.tmp"))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"^cannot write \S+/matrix.yaml: Permission denied$"):
        fixes.write(tmp_path / "matrix.yaml", b"")


def test_fix_restores_a_modeline(edited: Edit) -> None:
    folder = edited("matrix.yaml", "# yaml-language-server: $schema=../schema/matrix.schema.json\n", "")
    before = (folder / "matrix.yaml").read_text(encoding="utf-8")
    assert [Path(p).name for p in fixes.fix(folder)] == ["matrix.yaml"]
    after = (folder / "matrix.yaml").read_text(encoding="utf-8")
    assert after.endswith(before)
    assert list(fixes.fix(folder)) == []
    assert not [f for f in findings_of(folder) if f.code == "X381"]


# ---- the order of rows ----------------------------------------------------------------------------------------------

#: Rows in order, in every layout; the second and third have comments of their own.
ROWS = [
    "      - {arch: [sm80, sm89], fa_version: 2, backends: [FLASH_ATTN]}",
    "      # What Hopper runs.\n      # All of it.\n      - arch: [sm90]  # H100\n        fa_version: [2, 3]\n"
    "        backends: [FLASH_ATTN]\n        note: >-\n          two\n\n          paragraphs",
    "      # FA4 apart.\n      - {arch: [sm90], fa_version: 4,\n         backends: [FLASH_ATTN]}",
    '      - arch: [sm80]\n        # inside\n        backends: [FLASHINFER]\n        note: "#1"\n        kernels: [flashinfer_fa2]',
    "      - {arch: [sm90], backends: [TORCH_SDPA]}",
]
SITE = """schema_version: 1
# Ours.
matrix:
  site:  # a site
    dims: {{qk_nope: 96, qk_rope: 32, v_head: 96}}
    sources: [{{kind: docs, ref: here}}]
    allow:  # rows
{rows}

  # The next one.
  other:
    dims: {{qk_nope: 160, qk_rope: 32, v_head: 128}}
    sources: [{{kind: docs, ref: here}}]
    allow:
      - {{arch: [sm90], fa_version: 3, backends: [FLASH_ATTN]}}
"""


def site(rows: Iterable[str]) -> str:
    return SITE.format(rows="\n".join(rows))


def mended(path: Path, text: str) -> str:
    path.write_bytes(text.encode())
    list(fixes.fix(None, [path]))
    return path.read_bytes().decode()


@pytest.fixture(scope="module")
def shipped() -> load.Sources:
    sources = load.gather()
    for _, source in sources.all():
        assert parse(source) == []
    return sources


@settings(deadline=None)
@given(st.permutations(ROWS), st.sampled_from(["\n", "\r\n", "\r", "\u2028"]), st.sampled_from(["", "\ufeff"]))
def test_fix_puts_rows_in_order_with_their_comments_and_moves_nothing_else(
    shipped: load.Sources, rows: list[str], newline: str, mark: str
) -> None:
    """But for a comment above the first row, which may be about the whole list: then all stays as it is."""
    text, wanted = ((mark + site(order)).replace("\n", newline).encode() for order in (rows, ROWS))
    source = SourceFile("site.yaml", text)
    assert parse(source) == []
    sheets = checks.Sheets(replace(shipped, overlays=[("matrix", source)]))
    found = list(checks.rows_are_in_order(sheets))
    assert [f.code for f in found] == ["X384"] * (rows != ROWS)
    movable = not rows[0].lstrip().startswith("#")
    assert all(f.fixable is movable and f.severity == "notice" for f in found)
    fixable = [f for f in found if f.fixable]
    misplaced = [rows for _, rows in checks.misplaced_rows(sheets)]
    assert fixes.mended(source, "matrix", fixable, misplaced) == (wanted if movable else text)


@pytest.mark.parametrize(
    "rows",
    [
        [ROWS[4], "", ROWS[0]],
        [ROWS[4], "    # of the block, or of the row?", ROWS[0]],
        [ROWS[4], "          # deeper", ROWS[0]],
        [ROWS[4], ROWS[0], "      # at the end"],
        ["      # at the start", ROWS[4], ROWS[0]],
        ["      -", ROWS[4].replace("-", " ", 1), ROWS[0]],
        ["      - # why", ROWS[4].replace("-", " ", 1), ROWS[0]],
        [f"      [{ROWS[4].strip(' -')},", f"       {ROWS[0].strip(' -')}]"],
        [f"      [{ROWS[4].strip(' -')}, {ROWS[0].strip(' -')}]"],
    ],
)
def test_rows_whose_lines_cannot_be_told_apart_are_left_alone(shipped: load.Sources, rows: list[str]) -> None:
    source = SourceFile("site.yaml", site(rows).encode())
    assert parse(source) == []
    sheets = checks.Sheets(replace(shipped, overlays=[("matrix", source)]))
    (found,) = checks.rows_are_in_order(sheets)
    assert not found.fixable
    misplaced = [rows for _, rows in checks.misplaced_rows(sheets)]
    assert fixes.mended(source, "matrix", [], misplaced) == source.raw
    own_lines = all(row.lstrip().startswith(("- {", "#")) or not row for row in rows)
    why = "whose a comment or blank line is" if own_lines else "the rows do not each begin a line"
    assert f"by hand, since {why}" in found.hint


@pytest.mark.parametrize(("kind", "odd"), [("evidence", Path.mkdir), ("measured", os.mkfifo)], ids=["folder", "pipe"])
def test_what_is_named_as_a_record_and_is_no_file_stops_no_load(
    data_folder: Path, kind: str, odd: Callable[[Path], None]
) -> None:
    before = load_matrix(data_folder).fingerprint
    odd(data_folder / kind / "odd.json")
    assert load_matrix(data_folder).fingerprint == before
    (found,) = (f for f in findings_of(data_folder) if f.path.endswith("odd.json"))
    assert (found.code, found.severity) == ("X360", "error")


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("bogus", ["lse", "out"], None),
        ("a", ["fa2", "fa4"], None),
        ("h100", ["sm100", "sm90"], None),
        ("FLASHMLA", ["FLASH_ATTN", "FLASHINFER"], None),
        ("FLASH_ATTN_MLA", ["FLASH_ATTN"], None),
        ("FLASH_ATN", ["FLASH_ATTN", "FLASHINFER"], "FLASH_ATTN"),
        ("FLASH_ATTENTION", ["FLASH_ATTN"], "FLASH_ATTN"),
        ("fa-4", ["fa3", "fa4"], "fa4"),
        ("bfloat61", ["bfloat16", "float16"], "bfloat16"),
        ("sm_9O", ["sm80", "sm90"], "sm90"),
        ("mistral_4", ["mistral_small_4"], "mistral_small_4"),
        ("LSE", ["lse"], "lse"),
    ],
)
def test_only_a_misspelling_is_taken_for_another_name(name: str, known: list[str], meant: str | None) -> None:
    assert nearest(name, known) == (f"did you mean {meant}?" if meant else f"known: {', '.join(sorted(known))}")


def test_fix_mends_the_order_of_rows_and_of_architectures_at_once(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    jumbled = [ROWS[4], ROWS[0].replace("sm80, sm89", "sm89, sm80"), *ROWS[1:4]]
    text = site(jumbled)
    assert mended(path, text) == site(ROWS)
    unended = text.rstrip("\n").replace("fa_version: 3, backends", "fa_version: 3,\r\n         backends")
    assert mended(path, unended).count("\n") == unended.count("\n")


# ---- overlays -------------------------------------------------------------------------------------------------------

NEW_BLOCK = """schema_version: 1
matrix:
  ours:
    dims: {v_head: 96, qk_rope: 32, qk_nope: 96}
    sources: [{kind: measurement, ref: our own run}]
    allow: [{arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}]
"""
ORDER = """  - arch: [sm90]
    dims: [DIMS]
    order: [fa3, fa4, fa2, flashinfer_fa3, flashinfer_fa2, flashinfer_cudnn, cudnn, torch_efficient]
    on_request: {torch_math: slow}
    sources: [{kind: measurement, ref: our own run}]
"""


#: Every kernel of sm90 but fa3.
RANK = ["fa4", "fa2", "flashinfer_fa3", "flashinfer_fa2", "flashinfer_cudnn", "cudnn", "torch_efficient", "torch_math"]


def overlay(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def shipped_data(kind: str) -> Any:
    source = SourceFile(kind, (load.DATA_DIR / f"{kind}.yaml").read_bytes())
    assert parse(source) == []
    return source.data


def orders(*dims: str) -> str:
    return "schema_version: 1\norders:\n" + "".join(ORDER.replace("DIMS", name) for name in dims)


def first_choice(extra: list[Path], dims: tuple[int, int, int]) -> str:
    decision = decide(Request(dims), Environment("sm90"), load_matrix(extra=extra))
    assert decision.chosen is not None
    return decision.chosen.kernel


@pytest.mark.parametrize("turned", [1, -1])
def test_an_overlay_orders_its_own_dims_and_ours(tmp_path: Path, turned: int) -> None:
    ours, site = overlay(tmp_path, "ours.yaml", NEW_BLOCK), overlay(tmp_path, "site.yaml", orders("ours", "minicpm3"))
    extra = [ours, site][::turned]
    assert checks.check_path(None, extra) == []
    assert [first_choice([ours], (96, 32, 96)), first_choice(extra, (96, 32, 96))] == ["fa4", "fa3"]
    assert [first_choice(extra, dims) for dims in ((64, 32, 64), (64, 64, 128))] == ["fa3", "fa4"]


def test_an_order_laid_over_comes_before_the_shipped_one_for_the_same_dims(tmp_path: Path) -> None:
    """Also where the shipped one is for these dims, and the overlay puts back the architecture's plain one."""
    plain = load_matrix().order_for("sm100", MLADimensions(64, 64, 128))
    assert plain is not None
    entry = {"arch": ["sm100"], "dims": ["glm_4_7_flash"], "order": plain.order, "on_request": plain.on_request}
    entry["sources"] = [{"kind": "measurement", "ref": "our own run"}]
    site = overlay(tmp_path, "site.yaml", f"schema_version: 1\norders:\n  - {json.dumps(entry)}\n")
    assert checks.check_path(None, [site]) == []
    asked = Request((192, 64, 256)), Environment("sm100")
    chosen = [decide(*asked, load_matrix(extra=extra)).chosen for extra in ([], [site])]
    assert [one and one.kernel for one in chosen] == ["trtllm_ragged", "fa4"]


def test_of_two_orders_laid_over_neither_wins(tmp_path: Path) -> None:
    """Nor does the name of a block: they are for the same dims."""
    twin = NEW_BLOCK.replace("ours", "theirs").replace("[2, 3, 4]", "2").replace("sm90", "sm80")
    extra = [overlay(tmp_path, f"{name}.yaml", text) for name, text in (("one", NEW_BLOCK), ("two", twin))]
    extra += [overlay(tmp_path, f"{name}-order.yaml", orders(name)) for name in ("ours", "theirs")]
    (found,) = checks.check_path(None, extra)
    assert (found.code, found.path, found.line) == ("X344", str(extra[-1]), 3)
    assert found.message == f"theirs on sm90 has a second order; the first is at {extra[-2]}:3"


def test_files_given_together_are_laid_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new block with its order, as pre-commit gives them: of one folder where a kind is there twice."""
    monkeypatch.chdir(tmp_path)
    plain = [order for order in shipped_data("priorities")["orders"] if "dims" not in order]
    for folder, block in (("a", "ours"), ("b", "theirs")):
        own = {
            **plain[0],
            "arch": ["sm90"],
            "dims": [block],
            "order": ["fa3"],
            "on_request": dict.fromkeys(RANK, "slow"),
        }
        (tmp_path / folder).mkdir()
        overlay(tmp_path / folder, "matrix.yaml", NEW_BLOCK.replace("ours", block))
        overlay(tmp_path / folder, "priorities.yaml", json.dumps({"schema_version": 1, "orders": [*plain, own]}))

    def errors(*paths: str) -> set[str]:
        main(["check", *paths, "--format", "json"])
        return {f["code"] for f in json.loads(capsys.readouterr().out)["findings"] if f["severity"] == "error"}

    a, b = (["a/matrix.yaml", "a/priorities.yaml"], ["b/matrix.yaml", "b/priorities.yaml"])
    assert [errors(path) for path in a] == [set(), {"X305"}]
    assert [errors(*paths) for paths in (a, a[::-1], a + b, [*b[::-1], *a], [a[0], b[1]])] == [set()] * 4 + [{"X305"}]
    assert main(["check", "--fix", *a]) == 0
    assert capsys.readouterr().err == "fixed a/matrix.yaml\nfixed a/priorities.yaml\n"
    assert not any(Path(path).read_text(encoding="utf-8").startswith("#") for path in b)


@pytest.mark.parametrize("kind", ["kernels", "architectures"])
def test_facts_are_not_laid_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.yaml"
    shutil.copy(load.DATA_DIR / path.name, path)
    (found,) = checks.check_path(None, [path])
    assert (found.code, found.line, found.column) == ("X315", 1, 1)
    assert f"in place of the shipped {kind}.yaml: --matrix FILE" in found.hint
    with pytest.raises(MatrixError, match="cannot be laid over the matrix"):
        load_matrix(extra=[path])


def test_the_order_of_the_keys_of_dims_means_nothing(tmp_path: Path) -> None:
    text = (load.DATA_DIR / "matrix.yaml").read_text(encoding="utf-8")
    turned = re.sub(r"dims: \{(qk_nope: \d+), (qk_rope: \d+), (v_head: \d+)\}", r"dims: {\3, \2, \1}", text)
    assert turned != text
    path = overlay(tmp_path, "matrix.yaml", turned)
    assert checks.check_path(path) == []
    assert list(diff(load_matrix(path), load_matrix())) == []


@pytest.mark.parametrize("newline", ["\r", "\x85", "\u2028"])
def test_every_line_break_of_yaml_counts(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "site.yaml"
    good, bad = (site([ROWS[0].replace("sm80, sm89", arches)]) for arches in ("sm80, sm89", "sm89, sm80"))
    assert mended(path, bad.replace("\n", newline)) == good.replace("\n", newline)


def test_the_order_of_rows_decides_nothing(edited: Edit) -> None:
    folder = edited("matrix.yaml", f"      {FA2_ROW}\n", "")
    path = folder / "matrix.yaml"
    text = path.read_text(encoding="utf-8")
    last = "- {arch: [gfx90a, gfx942, gfx950, gfx1250, cpu], backends: [TORCH_SDPA], kernels: [torch_math]}\n"
    path.write_text(text.replace(last, f"{last}      {FA2_ROW}\n", 1), encoding="utf-8")
    assert [f.code for f in findings_of(folder)] == ["X384"]
    assert list(diff(load_matrix(folder), load_matrix())) == []


def test_a_single_file_stands_in_for_its_namesake(edited: Edit, tmp_path: Path) -> None:
    folder = edited("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"))
    other = tmp_path / "my-site.yaml"
    other.write_text((folder / "matrix.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    matrix = load_matrix(other)
    assert all(c.fa_version != 4 for c in matrix.lookup("sm90", 4, matrix.blocks["deepseek_v3"].dims))


def test_a_matrix_of_ones_own_may_leave_out_our_models(tmp_path: Path) -> None:
    """What the shipped orders and families say of blocks that are not there is no mistake of the file."""
    text = "schema_version: 1\nmatrix:\n  ours:\n    dims: {qk_nope: 96, qk_rope: 32, v_head: 96}\n"
    text += "    sources: [{kind: measurement, ref: our own run}]\n"
    text += "    allow: [{arch: [sm90], fa_version: 4, backends: [FLASH_ATTN]}]\n"
    site = tmp_path / "matrix.yaml"
    site.write_text(text, encoding="utf-8")
    assert {f.severity for f in checks.check_path(site)} == {"notice"}
    assert list(load_matrix(site).blocks) == ["ours"]


def test_loading_raises_every_finding_at_once(edited: Edit) -> None:
    folder = edited("matrix.yaml", "backends: [TRTLLM_RAGGED]", "backends: [TRTLLM]")
    edited("kernels.yaml", "dtypes: [bfloat16, float16]", "dtypes: [bf16, float16]")
    with pytest.raises(MatrixError) as raised:
        load_matrix(folder)
    assert {f.code for f in raised.value.findings} == {"X303", "X307"}


FINDING = Finding("a,b:c.yaml", 3, 7, "X301", "50% wrong\nline", "hint", "error")


def test_formats_say_the_same() -> None:
    assert FORMATS["text"]([FINDING]).startswith("a,b:c.yaml:3:7: X301 50% wrong")
    assert json.loads(FORMATS["json"]([FINDING]))["findings"][0]["line"] == 3
    github = FORMATS["github"]([FINDING]).split("\n")[0]
    assert github == "::error file=a%2Cb%3Ac.yaml,line=3,col=7,title=X301::50%25 wrong%0Aline%0Ahint"
    sarif = json.loads(FORMATS["sarif"]([FINDING]))
    [result] = sarif["runs"][0]["results"]
    assert sarif["version"] == "2.1.0"
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 3, "startColumn": 7}
    assert sarif["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "X301"
