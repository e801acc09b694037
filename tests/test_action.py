"""CI for others: the composite action's own steps and the pre-commit hooks, run as a runner would, on a repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mla_prefill.cli import build_parser

ROOT = Path(__file__).parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
SITE = """schema_version: 1
matrix:
  our_model:
    dims: {qk_nope: 96, qk_rope: 32, v_head: 96}
    sources: [{kind: measurement, ref: "our own run"}]
    allow:
      - {arch: [sm90], fa_version: 4, backends: [FLASH_ATTN]}
"""


def git(*arguments: str, cwd: Path) -> None:
    who = ["-c", "user.name=ci", "-c", "user.email=ci@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of somebody else, with an overlay committed on main."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "site.yaml").write_text(SITE, encoding="utf-8")
    git("init", "-q", cwd=folder)
    git("add", ".", cwd=folder)
    git("commit", "-q", "-m", "rows of our own", cwd=folder)
    return folder


class Step:
    """A step of action.yml, run by bash with its inputs in the environment, as on a runner."""

    def __init__(self, name: str, repository: Path, **inputs: str) -> None:
        step = next(s for s in ACTION["runs"]["steps"] if s.get("name") == name)
        given = {**{key: value["default"] for key, value in ACTION["inputs"].items()}, **inputs}
        variables = {k: re.sub(r"\$\{\{ inputs\.(\S+) \}\}", lambda m: given[m[1]], v) for k, v in step["env"].items()}
        temporary = repository.parent / "runner"
        temporary.mkdir(exist_ok=True)
        files = {key: temporary / key for key in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
        environment = {
            **os.environ,
            **variables,
            "RUNNER_TEMP": str(temporary),
            **{k: str(v) for k, v in files.items()},
        }
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.summary, self.outputs = (f.read_text(encoding="utf-8") if f.exists() else "" for f in files.values())


def test_a_clean_overlay_passes(repository: Path) -> None:
    step = Step("Check", repository, extra="site.yaml")
    assert (step.code, step.out, step.err) == (0, "0 errors, 0 notices\n", "")


def test_what_is_wrong_is_annotated_at_its_line(repository: Path) -> None:
    (repository / "site.yaml").write_text(SITE.replace("sm90", "sm9"), encoding="utf-8")
    step = Step("Check", repository, extra="site.yaml")
    assert step.code == 1
    assert "::error file=site.yaml,line=7,col=17,title=X301::unknown architecture 'sm9'" in step.out


def test_changed_decisions_are_a_comment_and_no_failure(repository: Path) -> None:
    (repository / "site.yaml").write_text(SITE.replace("[sm90]", "[sm90, sm100]"), encoding="utf-8")
    step = Step("Compare", repository, extra="site.yaml", base="main")
    assert step.code == 0, step.err
    assert "changed=true" in step.outputs
    assert "sm100" in step.summary
    assert "sm90" not in step.summary


def test_formatting_changes_nothing(repository: Path) -> None:
    (repository / "site.yaml").write_text(SITE.replace("matrix:", "# ours\nmatrix:"), encoding="utf-8")
    step = Step("Compare", repository, extra="site.yaml", base="main")
    assert (step.code, step.summary) == (0, "No decision changes.\n"), step.err
    assert "changed=false" in step.outputs


def test_a_new_file_has_nothing_to_be_compared_with(repository: Path) -> None:
    (repository / "new.yaml").write_text(SITE, encoding="utf-8")
    step = Step("Compare", repository, extra="new.yaml", base="main")
    assert (step.code, step.summary) == (0, "`new.yaml` is new: nothing to compare it with.\n"), step.err


def test_a_matrix_of_ones_own_is_compared_as_a_whole(repository: Path) -> None:
    (repository / "matrix.yaml").write_text(SITE, encoding="utf-8")
    git("add", ".", cwd=repository)
    git("commit", "-q", "-m", "a matrix", cwd=repository)
    (repository / "matrix.yaml").write_text(SITE.replace("fa_version: 4", "fa_version: [3, 4]"), encoding="utf-8")
    step = Step("Compare", repository, path="matrix.yaml", base="main")
    assert step.code == 0, step.err
    assert "fa3" in step.summary


def test_a_revision_that_is_not_there_fails_with_one_line(repository: Path) -> None:
    step = Step("Compare", repository, path="site.yaml", base="no-such-branch")
    assert step.code != 0
    assert step.err.startswith("mla-prefill: no-such-branch:site.yaml")


def test_inputs_never_become_code() -> None:
    """Whatever an input holds reaches the shell through the environment."""
    assert not [step for step in ACTION["runs"]["steps"] if "${{" in step.get("run", "")]


def test_hooks_run_commands_that_exist() -> None:
    for hook in HOOKS:
        program, *arguments = hook["entry"].split()
        assert program == "mla-prefill"
        build_parser().parse_args([*arguments, "matrix.yaml"])
        assert re.search(hook["files"], "serving/matrix.yaml")
        assert not re.search(hook["files"], "serving/values.yaml")


def test_the_page_names_every_input_and_hook() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    for name in (*ACTION["inputs"], *ACTION["outputs"]):
        assert f"`{name}`" in page
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        yaml.safe_load(block)
    assert set(re.findall(r"- id: (mla-prefill-\w+)", page)) == {hook["id"] for hook in HOOKS}
