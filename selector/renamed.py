"""What has changed its name or was removed: whoever still uses the old one is told what replaced it.

Old names of environment variables are obeyed with a warning, old names in Python with a DeprecationWarning. What was
removed without a successor, and backends that are gone, say so and name the way out. All three tables start empty.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple

from mla_prefill.selector import telling


class Renamed(NamedTuple):
    """``now`` is the new name (None: removed), ``since`` the version of the change, ``instead`` advice if removed."""

    now: str | None
    since: str
    instead: str = ""

    def __str__(self) -> str:
        if self.now is not None:
            return f"renamed in version {self.since}: use {self.now}"
        return f"removed in version {self.since}" + (f"; {self.instead}" if self.instead else "")


#: Old name -> what became of it.
NAMES: dict[str, Renamed] = {}
VARIABLES: dict[str, Renamed] = {}
BACKENDS: dict[str, Renamed] = {}


def name(old: str) -> str | None:
    """The present name of something in ``mla_prefill``; None where the name never existed.

    Raises:
        AttributeError: it was removed.
    """
    changed = NAMES.get(old)
    if changed is None:
        return None
    if changed.now is None:
        raise AttributeError(f"mla_prefill.{old} was {changed}")
    warnings.warn(f"mla_prefill.{old} was {changed}", DeprecationWarning, stacklevel=3)
    return changed.now


def variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """``environ`` with old variables under their present names; each use is told once.

    Raises:
        ValueError: an old and the present variable say different things.
    """
    used = {old: changed for old, changed in VARIABLES.items() if old in environ}
    if not used:
        return environ
    current = {key: value for key, value in environ.items() if key not in used}
    for old, changed in used.items():
        telling.warning("environment variable %s was %s", old, changed)
        if changed.now is not None and current.setdefault(changed.now, environ[old]) != environ[old]:
            raise ValueError(f"{old} and {changed.now} differ; {old} was {changed}")
    return current
