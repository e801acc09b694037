"""`mla-prefill add`: what is proposed for new dims, and that the file keeps every byte it had."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill.capabilities import Matrix, MLADimensions, checks, load, propose
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.capabilities.propose import HELD_BACK, IMPOSSIBLE, NATIVE, PADDED, NothingToAddError, Proposal
from mla_prefill.capabilities.source import SourceFile
from mla_prefill.cli import main

CONFIGS = Path(__file__).parent / "data" / "hf_configs"
DOCUMENT: dict[str, Any] = json.loads(load.COMPILED.read_bytes())
NEW = {"model_type": "new", "kv_lora_rank": 256, "num_attention_heads": 32}
NEW |= {"qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 96}
REF = "my-org/my-model:config.json"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The config.json of a model that nobody knows, in its folder."""
    folder = tmp_path / "New-MLA-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NEW), encoding="utf-8")
    return str(folder / "config.json")


def cells(proposal: Proposal) -> dict[tuple[str, str], propose.Answer]:
    return {(answer.kernel, answer.arch): answer for answer in proposal.answers}


def proposed(proposal: Proposal) -> set[tuple[str, str]]:
    return {cell for cell, answer in cells(proposal).items() if answer.proposed}


# ---- what is proposed -----------------------------------------------------------------------------------------------

# dims, kernel, arch, answer, part of why, what it needs
ANSWERS = [
    ((96, 32, 96), "fa2", "sm90", PADDED, "V to 128", "flash-attn>=2.6.0"),
    ((96, 32, 96), "fa4", "sm90", NATIVE, "", "flash-attn-4>=4.0.0b5"),
    ((96, 32, 96), "fa4", "sm103", NATIVE, "", "flash-attn-4>=4.0.0b15"),
    ((96, 32, 96), "fa4", "sm120", HELD_BACK, "vLLM refuses it", "flash-attn-4>=4.0.0b5"),
    ((96, 32, 96), "fa3", "sm80", HELD_BACK, "a build of its own", "flash-attn-3"),
    ((96, 32, 96), "flashinfer_fa3", "sm90", IMPOSSIBLE, "it takes qk 192, v 128", ""),
    ((96, 32, 96), "fa3", "sm100", IMPOSSIBLE, "no limits for it there", ""),
    ((224, 32, 256), "fa4", "sm100", NATIVE, "", "flash-attn-4>=4.0.0b11"),
    ((224, 32, 256), "fa4", "sm110", HELD_BACK, "holds 256-wide heads back", "flash-attn-4>=4.0.0b15"),
    ((224, 32, 256), "fa4", "sm89", IMPOSSIBLE, "bytes of shared memory", ""),
    ((224, 32, 256), "cudnn", "sm100", HELD_BACK, "256-wide heads need cuDNN 9.23", "nvidia-cudnn-frontend>=1.18"),
    ((96, 96, 128), "tokenspeed_mla", "sm100", NATIVE, "", "tokenspeed-mla>=0.1.8"),
    ((96, 32, 128), "tokenspeed_mla", "sm100", HELD_BACK, "inferred from its self-test", "tokenspeed-mla>=0.1.8"),
    ((97, 32, 64), "fa2", "sm90", IMPOSSIBLE, "multiples of 8", ""),
    ((97, 32, 64), "torch_math", "cpu", NATIVE, "", "torch>=2.6"),
]


@pytest.mark.parametrize(("dims", "kernel", "arch", "answer", "why", "needs"), ANSWERS)
def test_what_is_said_of_a_cell(
    matrix: Matrix, dims: tuple[int, int, int], kernel: str, arch: str, answer: str, why: str, needs: str
) -> None:
    found = cells(propose.propose(matrix, "new", MLADimensions(*dims)))[kernel, arch]
    assert (found.answer, ", ".join(found.requires)) == (answer, needs)
    assert why in found.why


@pytest.mark.parametrize("name", DOCUMENT["matrix"])
def test_the_other_blocks_propose_each_shipped_block_as_it_was_written(matrix: Matrix, name: str) -> None:
    """But for what only this block allows, and for what `not_allowed` keeps from it or its widths by name."""
    excuses = [{**e, "dims": [d for d in e.get("dims", ()) if d != name]} for e in DOCUMENT["not_allowed"]]
    excuses = [
        new for new, old in zip(excuses, DOCUMENT["not_allowed"], strict=True) if new["dims"] or "dims" not in old
    ]
    blocks = {other: block for other, block in DOCUMENT["matrix"].items() if other != name}
    dims = matrix.blocks[name].dims
    found = proposed(propose.propose(Matrix({**DOCUMENT, "matrix": blocks, "not_allowed": excuses}), name, dims))
    written = allowed(matrix, dims)
    elsewhere = set().union(*(allowed(matrix, matrix.blocks[other].dims) for other in blocks))
    assert written - found <= (written - elsewhere) | kept_by_name(matrix, lambda d: d[2:] == dims[2:] and d != dims)
    assert found - written <= kept_by_name(matrix, lambda d: d == dims)


def kept_by_name(matrix: Matrix, which: Callable[[MLADimensions], bool]) -> set[tuple[str, str]]:
    entries = [e for e in matrix.not_allowed if any(which(matrix.blocks[name].dims) for name in e.dims)]
    return {(kernel, arch) for e in entries for kernel in e.kernels for arch in e.arch}


def allowed(matrix: Matrix, dims: MLADimensions) -> set[tuple[str, str]]:
    return {(c.kernel.name, arch) for arch in matrix.architectures for c in matrix.cells(arch, dims) if c.allowed}


def test_where_nothing_is_chosen_automatically_it_says_so(matrix: Matrix) -> None:
    proposal = propose.propose(matrix, "new", MLADimensions(96, 32, 96))
    assert proposal.on_request == ("gfx1250",)
    assert proposal.table().endswith("nothing chosen automatically on gfx1250: see priorities.yaml")


@pytest.mark.parametrize(("ok", "answer", "proof"), [(True, NATIVE, "built"), (False, HELD_BACK, "contradicted")])
def test_a_build_proves_a_cell_or_keeps_it_out(ok: bool, answer: str, proof: str) -> None:
    dims = MLADimensions(96, 40, 72)
    cell = {"kernel": "fa4", "provider": "flash-attn-4", "arch": "sm90", "dims": list(dims), "qk": 136, "v": 72}
    cell |= {"dtype": "bfloat16", "operation": "new_tokens", "allowed": True, "ok": ok, "refusal": "does not compile"}
    record = {"level": "built", "packages": {"flash-attn-4": "4.0.0b36"}, "cells": [cell]}
    sources = load.gather()
    checks.require_clean(sources)
    sources.evidence.append(SourceFile("this build", json.dumps(record).encode()))
    proposal = propose.propose(Matrix(load.document(sources)), "new", dims)
    found = cells(proposal)["fa4", "sm90"]
    assert (found.answer, found.proof) == (answer, proof)
    (row,) = (row for row in proposal.rows if row["arch"] == ["sm90"] and row["backends"] == ["FLASH_ATTN"])
    assert row["fa_version"] == ([2, 3, 4] if ok else [2, 3])


WIDTHS = st.integers(1, 40).map(lambda n: 8 * n) | st.integers(1, 300)


@settings(max_examples=40, deadline=None)
@given(WIDTHS, WIDTHS, WIDTHS)
def test_a_block_allows_what_was_proposed_and_takes_nothing_from_others(nope: int, rope: int, v: int) -> None:
    dims = MLADimensions(nope, rope, v)
    old = Matrix(DOCUMENT)
    if old.block_for(dims):
        with pytest.raises(NothingToAddError, match="there already"):
            propose.propose(old, "new", dims)
        return
    proposal = propose.propose(old, "new", dims)
    new = Matrix({**DOCUMENT, "matrix": {**DOCUMENT["matrix"], **proposal.document()}})
    assert allowed(new, dims) == proposed(proposal)
    for key in old.keys():  # noqa: SIM118 - not a dict
        assert new.lookup(*key) == old.lookup(*key)


# ---- into the file --------------------------------------------------------------------------------------------------

HEAD = "# a comment\nschema_version: 1\nmatrix:\n"
BLOCK = "  one:\n    dims: {qk_nope: 8, qk_rope: 8, v_head: 8}\n    note: |\n      two: lines\n\n      of text\n"
LINES = ["new:", "  dims: {}"]
ADDED = "\n  new:\n    dims: {}\n"
# what is in the file before and after the place
LAYOUTS = {
    "last": (HEAD + BLOCK, ""),
    "blank lines at the end": (HEAD + BLOCK, "\n\n"),
    "a comment at the end": (HEAD + BLOCK, "\n# the end\n"),
    "a comment in the block": (HEAD + BLOCK + "    # of the block\n", "# of the file\n"),
    "a list after it": (HEAD + BLOCK, "\n# why not\nnot_allowed:\n  - arch: [sm90]\n"),
    "before the version": ("matrix:  # rows\n" + BLOCK, "schema_version: 1\n"),
    "end of document": (HEAD + BLOCK, "...\n"),
    "quoted key": (HEAD.replace("matrix", '"matrix"') + BLOCK, ""),
    "BOM": ("\ufeffmatrix:\n" + BLOCK, "schema_version: 1\n"),
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(("before", "after"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_byte_that_was_there_stays(before: str, after: str, newline: str) -> None:
    def encoded(text: str) -> bytes:
        return text.replace("\n", newline).encode()

    source = SourceFile("matrix.yaml", encoded(before + after))
    assert propose.inserted(source, LINES) == encoded(before) + encoded(ADDED) + encoded(after)


def test_without_a_last_newline_and_with_a_wider_indent() -> None:
    text = "schema_version: 1\nmatrix:\n    one:\n      dims: {}"
    new = propose.inserted(SourceFile("m", text.encode()), LINES)
    assert new.decode() == f"{text}\n\n    new:\n      dims: {{}}\n"


@pytest.mark.parametrize("text", ["schema_version: 1\n", "matrix: {}\n", "{matrix: {a: 1}}\n", ""])
def test_a_file_without_a_place_is_refused(text: str) -> None:
    with pytest.raises(propose.ProposalError, match="by hand"):
        propose.inserted(SourceFile("m.yaml", text.encode()), LINES)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_add_writes_a_block_that_passes_check_and_changes_its_own_dims_only(
    data_folder: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = (data_folder / "matrix.yaml").read_text(encoding="utf-8")
    code, out, err = call(capsys, "add", config, "--matrix", str(data_folder))
    assert code == 0
    new = (data_folder / "matrix.yaml").read_text(encoding="utf-8")
    block = "".join(f"  {line}\n" for line in out.partition("\n\n")[0].splitlines())
    assert new == f"{old}\n{block}"
    assert '  sources: [{kind: config, ref: "New-MLA-7B:config.json"}]' in out
    assert "  padded, V to 128  flash-attn>=2.6.0" in out
    assert f"next: mla-prefill check --fix --matrix {data_folder}" in err
    code, out, _ = call(capsys, "check", str(data_folder))
    assert (code, out) == (0, "0 errors, 0 notices\n")
    code, out, _ = call(capsys, "diff", str(DATA_DIR), str(data_folder), "--format", "json")
    assert {tuple(change["dims"]) for change in json.loads(out)["changes"]} == {(96, 32, 96)}
    code, out, err = call(capsys, "add", config, "--matrix", str(data_folder))
    assert (code, out) == (1, "")
    assert "(96, 32, 96) is there already: block new_mla_7b" in err


def test_a_dry_run_writes_nothing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (DATA_DIR / "matrix.yaml").read_bytes()
    code, out, err = call(capsys, "add", config, "--dry-run", "--name", "mine", "--format", "json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["name"], answer["dims"]) == ("mine", [96, 32, 96])
    assert answer["block"].startswith("mine:\n  dims: {qk_nope: 96, qk_rope: 32, v_head: 96}\n")
    assert {cell["answer"] for cell in answer["cells"]} == {NATIVE, PADDED, HELD_BACK, IMPOSSIBLE}
    assert "added" not in err
    assert (DATA_DIR / "matrix.yaml").read_bytes() == before


def test_a_file_of_ones_own_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.yaml"
    for dims, name in (("96,32,96", "one"), ("224,32,256", "two")):
        arguments = ("--dims", dims, "--name", name, "--source", "vllm-project/vllm#48855")
        code, _, err = call(capsys, "add", "--output", str(path), *arguments)
        assert code == 0
        assert f"next: mla-prefill check --fix --extra {path}" in err
    assert path.read_text(encoding="utf-8").startswith("schema_version: 1\nmatrix:\n  one:\n    dims: ")
    assert list(load.load_matrix(extra=[path]).blocks)[-2:] == ["one", "two"]
    assert 'sources: [{kind: issue, ref: "vllm-project/vllm#48855"}]' in path.read_text(encoding="utf-8")
    assert call(capsys, "check", "--extra", str(path))[0] == 0


def test_the_name_and_the_reference_of_a_cached_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hub" / "models--my-org--My-Model-2" / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(NEW), encoding="utf-8")
    code, out, _ = call(capsys, "add", str(folder), "--dry-run")
    assert code == 0
    assert out.startswith("my_model_2:\n")
    assert 'ref: "my-org/My-Model-2@01234567:config.json"' in out


def test_a_second_geometry_is_proposed_where_it_alone_is_new(
    data_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "dots3_note.json").read_text(encoding="utf-8"))
    text = json.dumps(config)
    path = data_folder.parent / "dots4" / "config.json"
    path.parent.mkdir()
    path.write_text(text.replace('"swa_v_head_dim": 128', '"swa_v_head_dim": 192'), encoding="utf-8")
    code, out, _ = call(capsys, "add", str(path), "--matrix", str(data_folder), "--dry-run")
    assert code == 0
    assert "dims: {qk_nope: 192, qk_rope: 64, v_head: 192}" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([str(CONFIGS / "gpt_oss_20b.json")], "no kv_lora_rank"),
        ([str(CONFIGS / "minicpm3.json")], "(64, 32, 64) is there already: block minicpm3"),
        (["--dims", "64,64,128", "--name", "a", "--source", REF], "block mistral_small_4"),
    ],
)
def test_no_is_exit_1(capsys: pytest.CaptureFixture[str], data_folder: Path, arguments: list[str], says: str) -> None:
    code, out, err = call(capsys, "add", *arguments, "--matrix", str(data_folder))
    assert (code, out) == (1, "")
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a CONFIG"),
        (["--dims", "8,8,8"], "--name and --source"),
        (["--dims", "8,8", "--name", "a", "--source", REF], "three numbers"),
        (["--dims", "8,8,8", "--name", "My Model", "--source", REF], "is no name for a block"),
        (["--dims", "8,8,8", "--name", "minicpm3", "--source", REF], "has other dims, (64, 32, 64)"),
        (["/nowhere/config.json"], "/nowhere/config.json: cannot be read"),
        ([str(CONFIGS / "minicpm3.json"), "--dims", "8,8,8"], "states (64, 32, 64), not (8, 8, 8)"),
        (["--dims", "8,8,8", "--name", "a", "--source", REF, "--output", "/nowhere/a.yaml"], "cannot write /nowhere/a.yaml: No such file"),
        (["--dims", "8,8,8", "--name", "a", "--source", REF, "--matrix", "/nowhere"], "/nowhere"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    """And said before anything about where the block would go."""
    monkeypatch.setattr(load, "in_checkout", lambda: False)
    code, out, err = call(capsys, "add", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_an_installed_package_is_not_changed(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "in_checkout", lambda: False)
    code, out, err = call(capsys, "add", config)
    assert (code, out) == (2, "")
    for way_out in ("--output FILE", "--matrix capabilities/data", "--dry-run"):
        assert way_out in err


def test_a_matrix_in_flow_style_is_left_alone(
    data_folder: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data_folder / "matrix.yaml"
    plain = json.dumps({"schema_version": 1, "matrix": load_plain(path)})
    path.write_text(plain, encoding="utf-8")
    code, out, err = call(capsys, "add", config, "--matrix", str(data_folder))
    assert (code, out) == (2, "")
    assert "put the block there by hand" in err
    assert path.read_text(encoding="utf-8") == plain


def load_plain(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))["matrix"]


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed: it would build"
)
def test_build_without_flash_attn_4_says_so_and_writes_nothing(
    data_folder: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (data_folder / "matrix.yaml").read_bytes()
    code, out, err = call(capsys, "add", config, "--matrix", str(data_folder), "--build")
    assert (code, out) == (1, "")
    assert "--build: flash-attn-4 built nothing here" in err
    assert (data_folder / "matrix.yaml").read_bytes() == before
