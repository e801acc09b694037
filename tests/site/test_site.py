"""The built site: links lead somewhere, pages name what exists, and the numbers on them are those of the profile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mla_prefill
import pytest
from mla_prefill import Environment, Matrix
from mla_prefill.backends import bench
from mla_prefill.cli import build_parser
from selenium.webdriver.common.by import By

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(pytestconfig: pytest.Config) -> Path:
    folder = pytestconfig.getoption("--site")
    if folder is None:
        pytest.skip("needs the built site: --site FOLDER")
    return Path(folder).resolve()


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> Iterator[str]:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchored = target in pages and "explorer/index.html" not in str(target)  # its anchors are questions
            if not target.exists() or (anchored and parts.fragment and parts.fragment not in pages[target].anchors):
                yield f"{path.relative_to(site)}: {link}"


def test_links_lead_somewhere(site: Path) -> None:
    assert list(broken(site)) == []


def test_links_that_the_explorer_makes_lead_somewhere(site: Path) -> None:
    script = (ROOT / "docs/explorer/explorer.js").read_text(encoding="utf-8")
    for page, anchor in re.findall(r'"\.\./(\w+\.html)#([\w-]+)"', script):
        assert anchor in Page(site / page).anchors


def test_every_page_is_in_the_navigation(site: Path) -> None:
    linked = {urlsplit(link).path for link in Page(site / "index.html").links}
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert name == "index.html" or name in linked or name.startswith("_build/"), name


def test_every_command_and_public_name_has_its_place(site: Path) -> None:
    commands = {name for action in build_parser()._actions for name in (action.choices or ())}
    assert commands <= Page(site / "_generated/command-line.html").anchors
    names = {f"mla_prefill.{name}" for name in mla_prefill.__all__ if name != "__version__"}
    names |= {"mla_prefill.backends.base.PrefillAdapter.plan", "mla_prefill.backends.base.PrefillPlan.run"}
    assert names <= Page(site / "_generated/api.html").anchors
    api = (site / "_generated/api.html").read_text(encoding="utf-8")
    assert "Alias for field" not in api
    assert '"field-odd">Type<' not in api, "what a property's docstring has before a colon is taken for its type"


#: Options of other programs that the pages name: pip, pytest.
OTHERS_OPTIONS = {"--extra-index-url", "--no-deps", "--site"}


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/support").glob("*.md")],
    ids=lambda p: p.name,
)
def test_pages_name_commands_and_options_that_exist(page: Path) -> None:
    (commands,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    options = {option for command in commands.values() for option in command._option_string_actions}
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - options - OTHERS_OPTIONS == set()
    for command, rest in re.findall(r"(?:^\$ |`)mla-prefill ([a-z]+)([^`\n#]*)", text, re.MULTILINE):
        assert command in commands
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) <= set(commands[command]._option_string_actions)


def test_the_index_leads_to_the_explorer(site: Path, page: Any) -> None:
    browser = page()
    browser.get((site / "index.html").as_uri())
    browser.find_element(By.PARTIAL_LINK_TEXT, "Matrix explorer").click()
    assert browser.find_element(By.CSS_SELECTOR, "#answer h2").text == "FLASH_ATTN / fa4"
    browser.find_element(By.CSS_SELECTOR, "#answer .source").click()
    assert browser.execute_script("return document.querySelector(':target').textContent").strip()


# ---- measured.md -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> str:
    return (ROOT / "docs/measured.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def profile(matrix: Matrix, measured: str) -> Any:
    """The one that the page is about, not the newest."""
    return next(p for p in matrix.profiles if p.label in measured)


def test_measured_speedup(measured: str, profile: Any) -> None:
    faster, text = bench.speedups(profile), " ".join(measured.split())
    mean, (worst, dims, shape) = bench.geometric_mean([ratio for ratio, _, _ in faster]), faster[0]
    assert f"fa4 is {mean:.2f} times as fast as fa3 in the geometric mean of the {len(faster)} shapes" in text
    assert f"at worst {worst:.2f} times, with {shape.sequences} sequences of {shape.length} tokens" in text
    assert f"and {shape.heads} heads in {dims}" in text
    called = {(r.kernel, r.dims, r.lengths, r.heads): r.eager_us for r in profile.readings}
    unplanned = [called[("fa3", *shape)] / time for (kernel, *shape), time in called.items() if kernel == "fa4"]
    assert f"({bench.geometric_mean(unplanned):.2f} without planning" in text


def test_measured_loss(measured: str, profile: Any, matrix: Matrix) -> None:
    machine = Environment(
        profile.arch, {p: profile.packages[p] for p in profile.providers.values()}, device=profile.gpu
    )
    lost = {(loss.choice, loss.graph): loss.loss for loss in bench.losses(profile, matrix, machine)}
    section = measured.partition("## Time lost by the choice")[2]
    stated = re.findall(r"^\| .* \| ([\d.]+) % \| ([\d.]+) % \|$", section, re.MULTILINE)
    rows = ("default", "fixed fa3", "measured", "measured, other shapes")
    for choice, cells in zip(rows, stated, strict=True):
        for text, graph in zip(cells, (False, True), strict=True):
            assert float(text) == pytest.approx(100 * lost[choice, graph], abs=0.5 * 10 ** -len(text.partition(".")[2]))


def test_measured_throughput(measured: str, profile: Any) -> None:
    header = re.search(r"^\| dims \| (.*) \|$", measured, re.MULTILINE)
    assert header
    for row in re.findall(r"^\| (\(\d+, \d+, \d+\)) \| (.*) \|$", measured, re.MULTILINE):
        for kernel, text in zip(header[1].split(" | "), row[1].split(" | "), strict=True):
            speeds = [
                bench.tflops(r.dims, r.lengths, r.heads) / r.eager_us * 1e6
                for r in profile.readings
                if r.kernel == kernel and str(r.dims) == row[0]
            ]
            assert text == (f"{max(speeds):.0f}" if speeds else "-")
