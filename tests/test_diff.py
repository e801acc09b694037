"""`mla-prefill diff`: exactly the decisions that change, from paths and from git revisions."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill.capabilities import Matrix, load, load_matrix
from mla_prefill.capabilities.load import DATA_DIR, KINDS
from mla_prefill.cli import main
from mla_prefill.selector.diff import diff, markdown, text

from .test_matrix import brute_force

Edit = Callable[[str, str, str], Path]
DOCUMENT: dict[str, Any] = json.loads(load.COMPILED.read_bytes())
FA_ROW = "- {arch: [sm90], fa_version: [2, 3, 4], backends: [FLASH_ATTN]}"
FA4_ORDER = "order: [fa4, fa3, fa2, flashinfer_fa3"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ---- what changes ---------------------------------------------------------------------------------------------------

OURS = """\
  our_model:
    dims: {qk_nope: 96, qk_rope: 32, v_head: 96}
    sources: [{kind: measurement, ref: "our own run"}]
    allow:
      - {arch: [sm90], fa_version: [3, 4], backends: [FLASH_ATTN]}
"""
SITE = f"schema_version: 1\nmatrix:\n{OURS}"

# file, old, new, what the text says of it
EDITS = [
    ("matrix.yaml", FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"), ["deepseek_v3 (128, 64, 128)", "  sm90", "    chosen: FLASH_ATTN/fa4 -> FLASH_ATTN/fa3", "    with FlashAttention 4: FLASH_ATTN/fa4 -> none", "    - FLASH_ATTN/fa4"]),
    ("matrix.yaml", "  dots3_note_swa:\n", OURS + "  dots3_note_swa:\n", ["our_model (96, 32, 96), new", "    + FLASH_ATTN/fa4, FLASH_ATTN/fa3"]),
    ("priorities.yaml", FA4_ORDER, FA4_ORDER.replace("fa4, fa3", "fa3, fa4"), ["    chosen: FLASH_ATTN/fa4 -> FLASH_ATTN/fa3", "    order: FLASH_ATTN/fa4, FLASH_ATTN/fa3, "]),
    ("priorities.yaml", "[fa2]\n    on_request:\n      torch_math: \"slow: memory grows with the square of the length\"", "[fa2, torch_math]", ["  gfx90a", "TORCH_SDPA/torch_math, on request only: yes -> none"]),
    ("kernels.yaml", '        version: ">=4.0.0b5"', '        version: ">=4.0.0b15"', ["FLASH_ATTN/fa4, needs: flash-attn-4>=4.0.0b5 or vllm>=0.20 -> flash-attn-4>=4.0.0b15 or vllm>=0.20"]),
    ("kernels.yaml", 'version: "flash-attn-4>=4.0.0b5,<4.0.0b10"', 'version: "flash-attn-4>=4.0.0b5,<4.0.0b11"', ["FLASH_ATTN/fa4, known bad: "]),
    ("kernels.yaml", 'lse: {base: e, layout: heads_tokens, no_keys: "+inf"}', 'lse: {base: "2", layout: heads_tokens, no_keys: "+inf"}', ["FLASH_ATTN/fa2, LSE: e heads_tokens +inf -> 2 heads_tokens +inf"]),
    ("kernels.yaml", "provides: [lse, context_chunk, strided_v, cuda_graph]", "provides: [lse, context_chunk, strided_v]", ["FLASH_ATTN/fa2, features: "]),
    ("kernels.yaml", "          - {qk: 192, v: 128}\n          - {qk: 256, v: 256, requires", "          - {qk: 256, v: 256, requires", ["FLASH_ATTN/fa4"]),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "lines"), EDITS, ids=[e[3][-1].strip()[:40] for e in EDITS])
def test_an_edit_that_changes_a_decision_is_shown(
    matrix: Matrix, edited: Edit, file: str, old: str, new: str, lines: list[str]
) -> None:
    folder = edited(file, old, new)
    if "v: 128}" in old:  # what the kernel can no longer run may not be allowed any more
        rows = (folder / "matrix.yaml").read_text(encoding="utf-8")
        (folder / "matrix.yaml").write_text(rows.replace("sm107], fa_version: [2, 4]", "sm107], fa_version: [2]", 1))
    changed = load_matrix(folder)
    changes = list(diff(matrix, changed))
    for line in lines:
        assert line in text(changes)
    assert markdown(changes).startswith("## Decisions that change\n\n### ")
    back = list(diff(changed, matrix))
    assert {(c.arch, c.dims, c.keys) for c in back} == {(c.arch, c.dims, c.keys) for c in changes}
    reverse = {(c.arch, c.dims): (c.removed, c.added) for c in back}
    assert {(c.arch, c.dims): (c.added, c.removed) for c in changes} == reverse


def test_equal_architectures_share_a_line(matrix: Matrix, edited: Edit) -> None:
    row = "{arch: [sm100, sm103, sm107], backends: [TRTLLM_RAGGED]}"
    changes = list(diff(matrix, load_matrix(edited("matrix.yaml", f"      - {row}\n", ""))))
    assert [change.arch for change in changes] == ["sm100", "sm103", "sm107"]
    assert text(changes) == "\n".join(
        ["deepseek_v3 (128, 64, 128)", "  sm100, sm103, sm107", "    - TRTLLM_RAGGED/trtllm_ragged"]
    )
    assert changes[0].keys == (None, 2, 3, 4)
    assert changes[0].to_dict()["removed"] == ("TRTLLM_RAGGED/trtllm_ragged",)


# ---- what changes nothing -------------------------------------------------------------------------------------------


def reformatted(folder: Path) -> Path:
    """Every file written anew: no comments, block style, other quotes, rows and blocks in another order, other notes."""
    for kind, key in KINDS.items():
        path = folder / f"{kind}.yaml"
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if kind == "matrix":
            content[key] = dict(reversed(content[key].items()))
            for block in content[key].values():
                block["allow"].reverse()
                block["note"] = "another note"
        content[key] = list(reversed(content[key])) if isinstance(content[key], list) else content[key]
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return folder


def test_formatting_and_the_order_of_rows_change_nothing(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(reformatted(data_folder))
    assert call(capsys, "diff", folder) == (0, "", "")
    assert call(capsys, "diff", folder, "--format", "md") == (0, "", "")
    code, out, _ = call(capsys, "diff", str(DATA_DIR), folder, "--format", "json")
    answer = json.loads(out)
    assert (code, answer["changes"]) == (0, [])
    assert answer["old"]["fingerprint"] != answer["new"]["fingerprint"]


def test_a_matrix_does_not_differ_from_itself(matrix: Matrix) -> None:
    assert list(diff(matrix, matrix)) == []
    assert text([]) == markdown([]) == ""


# ---- exactly that ---------------------------------------------------------------------------------------------------

EDIT = st.tuples(st.sampled_from(["drop a row", "drop an arch", "add an arch", "swap", "padding"]), st.randoms())


def edit_at_random(document: dict[str, Any], what: str, random: Any) -> None:
    rows = [(block, row) for block in document["matrix"].values() for row in block["allow"]]
    block, row = random.choice(rows)
    if what == "drop a row" or (what == "drop an arch" and len(row["arch"]) == 1):
        block["allow"].remove(row)
    elif what == "drop an arch":
        row["arch"].remove(random.choice(row["arch"]))
    elif what == "add an arch":  # where its kernels cannot run there, or are allowed already, nothing changes
        row["arch"].append(random.choice([a for a in document["architectures"] if a not in row["arch"]]))
    elif what == "swap":
        order = random.choice([o["order"] for o in document["orders"] if len(o["order"]) > 1])
        i = random.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
    else:
        limit = random.choice([limit for kernel in document["kernels"].values() for limit in kernel["limits"]])
        limit["pad_v"] = not limit.get("pad_v", False)


@settings(max_examples=25, deadline=None)
@given(st.lists(EDIT, min_size=1, max_size=3))
def test_the_keys_that_differ_are_those_of_a_brute_force_reading(edits: list[tuple[str, Any]]) -> None:
    changed = copy.deepcopy(DOCUMENT)
    for what, random in edits:
        edit_at_random(changed, what, random)
    old, new = Matrix(DOCUMENT), Matrix(changed)
    raws = [{**document, "priorities": document["orders"]} for document in (DOCUMENT, changed)]
    expected = {key for key in old.keys() if brute_force(raws[0], *key) != brute_force(raws[1], *key)}  # noqa: SIM118
    changes = list(diff(old, new))
    assert {(change.arch, fa, change.dims) for change in changes for fa in change.keys} == expected
    for change in changes:
        assert change.keys or change.order  # an order among FlashAttention versions is in no single lookup
        assert text([change])


# ---- revisions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with the data under its usual path and a site's own overlay, one commit, and we in it."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    root = tmp_path / "repository"
    shutil.copytree(DATA_DIR, root / "capabilities" / "data")
    (root / "site.yaml").write_text(SITE, encoding="utf-8")
    monkeypatch.chdir(root)
    for key in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(key, raising=False)
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-q", "-m", "data")
    return root


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def test_a_revision_against_the_work_tree(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = repository / "capabilities" / "data"
    assert call(capsys, "diff", "HEAD", "capabilities/data") == (0, "", "")
    rows = (data / "matrix.yaml").read_text(encoding="utf-8")
    (data / "matrix.yaml").write_text(rows.replace(FA_ROW, FA_ROW.replace("[2, 3, 4]", "[2, 3]"), 1), encoding="utf-8")
    status = git("status", "--porcelain")
    for old, new in (("HEAD", "capabilities/data"), ("HEAD:capabilities/data/", str(data))):
        code, out, _ = call(capsys, "diff", old, new)
        assert (code, "chosen: FLASH_ATTN/fa4 -> FLASH_ATTN/fa3" in out) == (1, True)
    code, out, _ = call(capsys, "diff", "HEAD:capabilities/data/matrix.yaml", "capabilities/data/matrix.yaml")
    assert (code, "- FLASH_ATTN/fa4" in out) == (1, True)
    assert git("status", "--porcelain") == status


def test_overlays(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "diff", "--overlay", "HEAD:site.yaml", "site.yaml") == (0, "", "")
    (repository / "site.yaml").write_text(SITE.replace("[3, 4]", "[3]"), encoding="utf-8")
    code, out, _ = call(capsys, "diff", "--overlay", "HEAD:site.yaml", "site.yaml")
    assert (code, out.splitlines()[0]) == (1, "our_model (96, 32, 96)")
    code, out, _ = call(capsys, "diff", "--overlay", "site.yaml")
    assert (code, out.splitlines()[0]) == (1, "our_model (96, 32, 96), gone")


WRONG = [
    (["nope"], "nope: no such file or folder, and no revision"),
    (["HEAD~9"], "HEAD~9: no such file or folder, and no revision"),
    (["HEAD:site"], "revision HEAD has no site; name another as HEAD:PATH"),
    (["HEAD:capabilities"], "is no data folder: it has no architectures.yaml"),
    (["--overlay", "HEAD"], "a folder cannot be laid over"),
    (["HEAD", "capabilities"], "architectures.yaml"),
    (["--overlay", "capabilities"], "cannot read capabilities"),
    (["", ""], "no such file or folder"),
    (["a\nb"], "no such file or folder"),
    ([], "OLD"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(a) or "nothing" for a, _ in WRONG])
@pytest.mark.usefixtures("repository")
def test_what_cannot_be_read_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = call(capsys, "diff", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_data_that_does_not_pass_its_checks_is_findings_and_exit_2(
    edited: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = edited("matrix.yaml", "backends: [TRTLLM_RAGGED]", "backends: [TRTLLM_RAGED]")
    code, out, err = call(capsys, "diff", str(folder))
    assert (code, out) == (2, "")
    assert "X303 unknown backend 'TRTLLM_RAGED'" in err
