"""What is shipped, what gets imported when, and which way dependencies point."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path

import mla_prefill
import pytest
from mla_prefill import Matrix

ROOT = Path(__file__).parent.parent
#: Folder -> import name, deepest folder first: ``selector/_public`` is the import root.
PACKAGES = {
    "selector/_public": "mla_prefill",
    "selector": "mla_prefill.selector",
    "capabilities": "mla_prefill.capabilities",
    "backends": "mla_prefill.backends",
}
#: Import name -> the packages of ours that it may import. The root (public names, command line) may import all.
MAY_IMPORT = {
    "mla_prefill.capabilities": {"mla_prefill.capabilities"},
    "mla_prefill.selector": {"mla_prefill.capabilities", "mla_prefill.selector"},
    "mla_prefill.backends": {"mla_prefill.capabilities", "mla_prefill.selector", "mla_prefill.backends"},
    "mla_prefill": {*PACKAGES.values()},
}
GENERIC_NAMES = {"selector", "backends", "capabilities"}


@pytest.fixture(scope="module")
def kernel_modules(matrix: Matrix) -> set[str]:
    """PyTorch and every package that a kernel comes from: seconds to import, or not there at all."""
    return {p.module.partition(".")[0] for kernel in matrix.kernels.values() for p in kernel.providers} | {"torch"}


def shipped_path(tracked: str) -> str | None:
    """Where a file of the repository belongs in the wheel; None for what is not part of a package."""
    for folder, name in PACKAGES.items():
        if tracked.startswith(f"{folder}/"):
            return name.replace(".", "/") + tracked.removeprefix(folder)
    return None


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files of this checkout that git knows or would add."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: a ``build`` folder left in the checkout would slip files of yesterday into it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl"))


def test_the_wheel_holds_exactly_the_files_of_the_packages(wheel: Path, tracked: list[str]) -> None:
    """A folder missing from pyproject.toml is left out without a word, while an editable install imports it happily."""
    wanted = {path for name in tracked if (path := shipped_path(name))}
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped == wanted
    assert {"mla_prefill/py.typed", "mla_prefill/capabilities/data/compiled.json"} <= shipped


def test_the_wheel_carries_licence_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in texts["LICENSE"]
    assert "mla-prefill = mla_prefill.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]


# ---- what gets imported, seen from a fresh interpreter ------------------------------------------------------------


def loaded_by(statements: str, cwd: Path) -> set[str]:
    """The names in sys.modules of a fresh interpreter after it ran ``statements``."""
    script = f"{statements}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_no_module_gets_a_generic_name(tmp_path: Path, tracked: list[str]) -> None:
    """``import selector`` would give a second copy of everything, with enums and classes that compare unequal."""
    ours = [name for file in tracked if (name := module_name(file)) and not name.endswith("__main__")]
    loaded = loaded_by("\n".join(f"import {name}" for name in ours), tmp_path)
    assert loaded.issuperset(ours)
    assert {name.partition(".")[0] for name in loaded} & GENERIC_NAMES == set()


@pytest.mark.parametrize(
    "question",
    [
        "import mla_prefill",
        "from mla_prefill import Environment, Request, select; select(Request((64, 64, 128)), Environment('sm90'))",
        "from mla_prefill import Environment, Request, select\n"
        "select(Request((64, 64, 128)), Environment('sm90', {'flash-attn': '2.8.3'})).explain()",
        "from mla_prefill import Environment; Environment.detect()",
        "from mla_prefill.cli import main; main(['select', '--gpu', 'H200', '--model', 'mistral_small_4'])",
        "from mla_prefill.cli import main; main(['table'])",
    ],
)
def test_a_query_imports_no_kernel_and_reads_no_yaml(question: str, tmp_path: Path, kernel_modules: set[str]) -> None:
    loaded = {name.partition(".")[0] for name in loaded_by(question, tmp_path)}
    assert loaded & (kernel_modules | {"yaml", "jsonschema", "numpy"}) == set()


def test_every_error_is_a_public_name_and_none_costs_an_import(
    modules: dict[str, tuple[str, ast.Module]], tmp_path: Path, kernel_modules: set[str]
) -> None:
    """Of the three packages: what the command line raises, it catches."""
    errors = {
        node.name
        for package, tree in modules.values()
        if package != "mla_prefill"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_")
    }
    assert {name for name in mla_prefill.__all__ if name.endswith("Error")} <= errors
    loaded = {name.partition(".")[0] for name in loaded_by(f"from mla_prefill import {', '.join(errors)}", tmp_path)}
    assert loaded & kernel_modules == set()
    assert all(issubclass(getattr(mla_prefill, name), Exception) for name in errors)


# ---- which way dependencies point ---------------------------------------------------------------------------------


def module_name(tracked: str) -> str | None:
    path = shipped_path(tracked)
    if path is None or not path.endswith(".py"):
        return None
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def package_of(module: str) -> str | None:
    """The package of ours that holds a module or a name in it."""
    for package in sorted(PACKAGES.values(), key=len, reverse=True):
        if module == package or module.startswith(f"{package}."):
            return package
    return None


def imported(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    """Every name that import statements among ``nodes`` ask for, relative ones resolved."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def when_loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those in functions, nor those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from when_loaded(node)


@pytest.fixture(scope="module")
def modules(tracked: list[str]) -> dict[str, tuple[str, ast.Module]]:
    """Module -> (its package, its syntax tree)."""
    found = {}
    for file in tracked:
        if name := module_name(file):
            package = next(p for folder, p in PACKAGES.items() if file.startswith(f"{folder}/"))
            found[name] = (package, ast.parse((ROOT / file).read_text(encoding="utf-8"), file))
    return found


def test_dependencies_point_one_way(modules: dict[str, tuple[str, ast.Module]]) -> None:
    """capabilities <- selector <- backends, inside functions too; only type checkers may look the other way."""
    wrong = []
    for module, (package, tree) in modules.items():
        for_types = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for child in ast.walk(node)
        }
        statements = [node for node in ast.walk(tree) if id(node) not in for_types]
        targets = {(name, package_of(name)) for name in imported(statements, package)}
        wrong += [(module, name) for name, target in targets if target and target not in MAY_IMPORT[package]]
    assert wrong == []


def test_only_adapters_import_torch_when_loaded(
    modules: dict[str, tuple[str, ast.Module]], kernel_modules: set[str]
) -> None:
    """Not even they import their kernel: ``load`` does, and says what went wrong."""
    wrong = []
    for module, (package, tree) in modules.items():
        adapter = package == "mla_prefill.backends" and module != package
        allowed = {"torch"} if adapter else set()
        names = {name.partition(".")[0] for name in imported(when_loaded(tree), package)}
        wrong += [(module, name) for name in names & kernel_modules - allowed]
    assert wrong == []


# ---- the two commands that a newcomer types -----------------------------------------------------------------------


def readme_commands() -> list[str]:
    """The one-line commands of the README that start from nothing but Python."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv ")]


def test_ci_runs_the_command_of_the_readme() -> None:
    """``.ci/run`` takes its test command out of the README, so there is exactly one to find."""
    run, test = readme_commands()
    assert run.endswith("mla-prefill run --model mistral_small_4")
    pattern = re.search("grep -x '(.*)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert pattern
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.fullmatch(pattern[1], line)] == [test]


def test_constraints_pin_every_package_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9.]*(; python_version .+)?", pin)] == []
