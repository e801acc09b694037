"""The documentation site: ``sphinx-build -W -b html docs docs/_build``.

The README, the contributing guide and the changelog are pages of the site as they are; the command line and the API
pages are made from the code; the explorer asks the engine (``explorer/export.py``).
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import mla_prefill
from mla_prefill.cli import build_parser

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "_generated"
sys.path.insert(0, str(DOCS / "explorer"))

project = "mla-prefill"
release = mla_prefill.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "explorer"]
default_role = "py:obj"  # `select` in a docstring
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
html_theme = "furo"
html_title = "mla-prefill"
html_show_copyright = False

#: Files above this folder that are pages of the site -> their page.
PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def links_within(text: str, origin: Path, page: Path) -> str:
    """Markdown from ``origin``, its relative links pointing where the site has what they name.

    What is no page of the site, such as the licence, keeps its text and loses its link.
    """

    def link(match: re.Match[str]) -> str:
        target, anchor = match[2], match[3] or ""
        if not target:
            return match[0]
        there = (origin.parent / target).resolve()
        if there.parent == ROOT and there.name in PAGES:
            there = GENERATED / PAGES[there.name]
        if DOCS not in there.parents:
            return match[1]
        return f"[{match[1]}]({os.path.relpath(there, page.parent)}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)", link, text)


def command_line() -> str:
    """The help of every command, as the parser prints it."""
    os.environ["COLUMNS"] = "100"
    parser = build_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    parts = [f"# Command line\n\n```text\n{parser.format_help()}```\n"]
    parts += [f"## {name}\n\n```text\n{command.format_help()}```\n" for name, command in commands.items()]
    return "\n".join(parts)


def api() -> str:
    """Every public name of the installed package, and what `load` returns."""
    public = {name: getattr(mla_prefill, name) for name in mla_prefill.__all__}
    classes = [name for name, value in public.items() if inspect.isclass(value)]
    errors = [name for name in classes if issubclass(public[name], Exception)]
    functions = [name for name, value in public.items() if callable(value) and name not in classes]
    groups = {
        "Functions": [f".. autofunction:: {name}\n" for name in functions],
        "Classes": [f".. autoclass:: {name}\n   :members:\n" for name in classes if name not in errors],
        "Errors": [f".. autoclass:: {name}\n" for name in errors],
    }
    if importlib.util.find_spec("torch"):  # their signatures name its types
        groups["What load returns"] = [
            ".. currentmodule:: mla_prefill.backends.base\n",
            ".. autoclass:: PrefillAdapter()\n   :members: plan, warm_up\n",
            ".. autoclass:: PrefillPlan()\n   :members: run\n",
        ]
    parts = ["# API\n"]
    for title, directives in groups.items():
        entries = "\n".join([".. currentmodule:: mla_prefill\n", *directives])
        parts.append(f"## {title}\n\n```{{eval-rst}}\n{entries}\n```\n")
    return "\n".join(parts)


def say_nothing_of_fields(_: Any, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Python documents the fields of a named tuple by their number."""
    if lines and lines[0].startswith("Alias for field number"):
        lines[:] = []


def write_pages(_: Any) -> None:
    GENERATED.mkdir(exist_ok=True)
    made = {"command-line.md": command_line(), "api.md": api()}
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        made[name] = links_within(text, ROOT / source, GENERATED / name)
    for name, text in made.items():
        page = GENERATED / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def mend_links(app: Any, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    if GENERATED not in page.parents:
        source[0] = links_within(source[0], page, page)


def write_explorer(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        import export

        export.write(Path(app.outdir) / "explorer", mla_prefill.load_matrix())


def setup(app: Any) -> None:
    app.connect("builder-inited", write_pages, priority=100)
    app.connect("source-read", mend_links)
    app.connect("autodoc-process-docstring", say_nothing_of_fields)
    app.connect("build-finished", write_explorer)
