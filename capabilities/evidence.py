"""Evidence: records of what was really built or run, and the proof level of a cell that follows from them.

A record file (``data/evidence/*.json``) is written by ``mla-prefill verify``::

    {"schema_version": 1, "level": "run", "gpu": ..., "packages": {...},
     "cells": [{"kernel": "fa4", "arch": "sm90", "qk": 192, "v": 128, "pad_v_to": null, "ok": true, ...}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_prefill.capabilities.source import SourceFile

#: From weakest to strongest. ``contradicted``: a record shows the cell failing.
LEVELS = ("source", "built", "run", "measured")


def cells(files: Iterable[SourceFile]) -> Iterable[tuple[SourceFile, str, dict[str, Any]]]:
    """(file, level, cell) of every record."""
    for source in files:
        record = json.loads(source.raw)
        for cell in record["cells"]:
            yield source, record["level"], cell


def proofs(files: Iterable[SourceFile]) -> dict[str, str]:
    """``"kernel arch qk v"`` -> the strongest level on record; any failing record contradicts the cell."""
    best: dict[str, str] = {}
    failed: set[str] = set()
    for _, level, cell in cells(files):
        key = f"{cell['kernel']} {cell['arch']} {cell['qk']} {cell['v']}"
        if not cell["ok"]:
            failed.add(key)
        elif LEVELS.index(level) > LEVELS.index(best.get(key, "source")):
            best[key] = level
    best.update(dict.fromkeys(failed, "contradicted"))
    return dict(sorted(best.items()))
