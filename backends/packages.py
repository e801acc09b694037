"""What was read in packages and engines, as data with sources: where machine code and rules are, what is run."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def read() -> dict[str, Any]:
    """``capabilities/data/packages.json``."""
    file = resources.files("mla_prefill.capabilities") / "data" / "packages.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
