"""A real browser over the built site. ``pytest tests/site --site FOLDER``; without a folder the explorer alone is built.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and selenium.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import Matrix, load_matrix
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

ROOT = Path(__file__).parents[2]
QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
)  # fmt: skip

DRAWN = "return performance.getEntriesByName('drawn').length > 0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--site", type=Path, help="the folder of the built site")
    parser.addoption("--screenshots", type=Path, help="where pictures of the explorer go")


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix()


@pytest.fixture(scope="session")
def export() -> Any:
    sys.path.insert(0, str(ROOT / "docs/explorer"))
    return importlib.import_module("export")


@pytest.fixture(scope="session")
def explorer(
    pytestconfig: pytest.Config, export: Any, matrix: Matrix, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of the explorer."""
    site = pytestconfig.getoption("--site")
    if site:
        return Path(site).resolve() / "explorer"
    folder = tmp_path_factory.mktemp("explorer")
    export.write(folder, matrix)
    return folder


Open = Callable[..., webdriver.Chrome]


@pytest.fixture(scope="session")
def profile_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], webdriver.Chrome]:
    """profile_of_its_own() -> a browser that was never used."""
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("needs Chromium and chromedriver")

    def start() -> webdriver.Chrome:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for argument in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        return webdriver.Chrome(options=options, service=Service(chromedriver))

    return start


@pytest.fixture(scope="session")
def driver(profile_of_its_own: Callable[[], webdriver.Chrome]) -> Iterator[webdriver.Chrome]:
    with profile_of_its_own() as browser:
        yield browser


@pytest.fixture
def page(driver: webdriver.Chrome, explorer: Path) -> Iterator[Open]:
    """page("#gpu=H200", width=1280, dark=False) -> the explorer, opened anew. Fails on anything in the console."""

    def open_(query: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> webdriver.Chrome:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get("about:blank")
        driver.get(f"{explorer.as_uri()}/index.html{query}")
        WebDriverWait(driver, 10, 0.01).until(lambda d: d.execute_script(DRAWN))
        return driver

    yield open_
    assert [entry["message"] for entry in driver.get_log("browser")] == []
