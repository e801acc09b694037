"""Shared ground of the tests: the shipped matrix, and data folders to break."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mla_prefill.capabilities import Matrix, load_matrix
from mla_prefill.capabilities.load import DATA_DIR
from mla_prefill.selector import engine


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix()


@pytest.fixture(autouse=True)
def _no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests describe their machine; the variables of the one they run on must not leak in."""
    import os

    for name in list(os.environ):
        if name.startswith("MLA_PREFILL_"):
            monkeypatch.delenv(name)
    engine.clear()


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A copy of the shipped data, to be changed."""
    folder = tmp_path / "data"
    shutil.copytree(DATA_DIR, folder)
    return folder


@pytest.fixture
def edited(data_folder: Path) -> Callable[[str, str, str], Path]:
    """edited("matrix.yaml", old, new) -> the data folder with that one change."""

    def edit(name: str, old: str, new: str) -> Path:
        path = data_folder / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return data_folder

    return edit
