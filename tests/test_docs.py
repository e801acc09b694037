"""The documentation says what the program does: examples are run, lists are compared."""

from __future__ import annotations

import json
import logging
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_prefill import Environment, Request, load_matrix, select
from mla_prefill.capabilities.load import KINDS
from mla_prefill.capabilities.schema import SCHEMA_DIR
from mla_prefill.cli import build_parser, main
from mla_prefill.selector.environment import VARIABLES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


def table(page: str, heading: str, columns: int) -> list[tuple[str, ...]]:
    """The first cells of each line of the table under a heading, backticks removed."""
    section = text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split(" | ")[:columns]) for line in lines]


# ---- lists ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_data_is_described(kind: str) -> None:
    schema = json.loads((SCHEMA_DIR / f"{kind}.schema.json").read_text(encoding="utf-8"))
    described = set(re.findall(r"`([a-z_]+)", text_of("docs/matrix.md")))
    assert set(properties(schema)) - described == set()


def properties(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for part in schema.values():
            yield from properties(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from properties(part)


def test_the_readme_lists_every_command() -> None:
    commands = {name for action in build_parser()._actions for name in (action.choices or ())}
    assert {cells[0].split()[0].strip("`") for cells in table("README.md", "Commands", 1)} >= commands


@pytest.mark.parametrize("page", ["README.md", "docs/selecting.md"])
def test_every_environment_variable_is_listed(page: str) -> None:
    assert set(re.findall(r"`(MLA_PREFILL_\w+)`", text_of(page))) == set(VARIABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        path = page.parent / target[0] if target[0] else page
        assert path.exists(), target
        if anchor := target[1].removeprefix("#"):
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


# ---- examples -------------------------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """Without line numbers and fingerprint, which any edit of the data moves."""
    return re.sub(r"(?<=\.yaml:)\d+|(?<=^matrix )[0-9a-f]+", "N", text, flags=re.MULTILINE)


def test_the_readme_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("README.md", "console") if block.count("\n") > 2)
    command, _, output = example.partition("\n")
    assert main(shlex.split(command.removeprefix("$ mla-prefill "))) == 0
    assert shown(output) == shown(capsys.readouterr().out)


def batch(device: str) -> dict[str, Any]:
    """A batch as the pages describe it: 32 heads, sequences of 3 and 4 tokens, with 2 and 5 tokens of context."""
    starts, context = (torch.tensor(s, dtype=torch.int32, device=device) for s in ([0, 3, 7], [0, 2, 7]))
    q, k, v = (torch.randn(7, 32, 128, dtype=torch.bfloat16, device=device) for _ in range(3))
    names: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    names |= {"cu_seqlens_context": context, "max_seqlen_context": 5, "k_context": k, "v_context": v}
    return names | {"q": q, "k": k, "v": v}


@pytest.fixture
def _levels() -> Iterator[None]:
    yield
    logging.getLogger("mla_prefill").setLevel(logging.NOTSET)  # whatever a page sets


@pytest.mark.usefixtures("_levels")
@pytest.mark.parametrize("page", ["README.md", "docs/selecting.md", "docs/engine.md"])
def test_python_examples_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = json.dumps(str(ROOT / "tests" / "data" / "hf_configs" / "mistral_small_4.json"))
    names = batch("cpu")
    for block in blocks(page, "python"):
        if "load(" in block:
            names["decision"] = select(Request((64, 64, 128)), Environment("cpu", {"torch": torch.__version__}))
        exec(block.replace('device="cuda"', 'device="cpu"').replace('"path/to/config.json"', config), names)
    assert names["out"].shape == names["v"].shape
    assert names["lse"].shape == (32, 7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_graph_example_replays() -> None:
    names = batch("cuda")
    (block,) = (block for block in blocks("docs/engine.md", "python") if "graph.replay()" in block)
    exec("from mla_prefill import Request, load, select\n" + block, names)
    first = names["out"].clone()
    names["v"].mul_(2)
    names["graph"].replay()
    torch.testing.assert_close(names["out"], first * 2)


def test_the_json_of_select_is_the_real_one() -> None:
    """But for the fingerprint; of the candidates one is shown."""
    (block,) = blocks("docs/selecting.md", "json")
    shown = json.loads(block)
    real = select(Request((64, 64, 128), backend="FLASH_ATTN"), Environment("sm90"), load_matrix()).to_dict()
    (candidate,) = shown.pop("candidates")
    assert candidate in real.pop("candidates")
    shown["matrix"]["fingerprint"] = real["matrix"]["fingerprint"]
    assert shown == real


def test_the_block_of_the_readme_is_a_valid_overlay(tmp_path: Path) -> None:
    (block,) = blocks("README.md", "yaml")
    path = tmp_path / "my_model.yaml"
    path.write_text(block, encoding="utf-8")
    chosen = select(Request((96, 32, 96)), Environment("sm90"), load_matrix(extra=[path])).chosen
    assert chosen is not None
    assert chosen.backend == "FLASH_ATTN"


def test_the_block_of_the_docs_is_valid(tmp_path: Path) -> None:
    """Under another name and with dims that no shipped block has."""
    (block,) = blocks("docs/matrix.md", "yaml")
    block = block.replace("mistral_small_4", "site_model").replace(
        "qk_nope: 64, qk_rope: 64", "qk_nope: 56, qk_rope: 72"
    )
    path = tmp_path / "site.yaml"
    path.write_text("schema_version: 1\nmatrix:\n" + textwrap.indent(block, "  "), encoding="utf-8")
    assert "site_model" in load_matrix(extra=[path]).blocks
