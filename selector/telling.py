"""Telling an engine's log what was decided, through the standard library: logger ``mla_prefill``, each thing once.

One INFO line for the choice, a DEBUG line for each rejection; where nothing has imported ``logging`` nobody listens to
either, and a cold query is spared the 5 ms of importing it. A WARNING for each preferred feature that is not provided,
and for a package's unverified version. Remembered answers are not told later: asking the logger would cost as much as
finding one.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_prefill.selector.decision import Decision

LOGGER = "mla_prefill"
#: Beyond this what was told is forgotten, and told again when it recurs.
MAX_TOLD = 1024
_told: dict[Hashable, object] = {}


def decision(decision: Decision) -> None:
    """Says what was chosen, what to be warned of, and at DEBUG level why not the others."""
    warnings, unmet = decision.warnings, decision.unmet
    for text in warnings[: len(warnings) - len(unmet)]:
        warning("%s", text)
    for wish, text in zip(unmet, warnings[len(warnings) - len(unmet) :], strict=True):
        # An engine asks for each layer: what matters is the kind of layer, what was asked, and what came of it.
        kernel = decision.chosen and decision.chosen.kernel
        warning("%s", text, once=(decision.arch, decision.request.dims, wish, kernel))
    if (logging := sys.modules.get("logging")) is None:
        return
    log = logging.getLogger(LOGGER)
    # The matrix counts too: after a reload the same choice may have other reasons against the rest.
    told = (decision.request, decision.environment, decision.chosen, decision.matrix.fingerprint)
    if not log.isEnabledFor(logging.INFO) or not _first(told):
        return
    log.info("%s", decision.one_line().removeprefix("mla-prefill: "))
    if log.isEnabledFor(logging.DEBUG):
        for verdict in decision.rejected:
            log.debug("not %s: %s", verdict.candidate.kernel, "; ".join(r.message for r in verdict.reasons))


def warning(text: str, *arguments: object, once: Hashable = None) -> None:
    """Something that an operator should mend; the standard library prints it where no logging is set up.

    ``once`` is what tells it from another one, where that is not the text.
    """
    import logging

    if _first(once or (text, *map(str, arguments))):
        logging.getLogger(LOGGER).warning(text, *arguments)


def clear() -> None:
    """Forgets what was told."""
    _told.clear()


def _first(what: Hashable) -> bool:
    if what in _told:
        return False
    if len(_told) >= MAX_TOLD:
        _told.clear()
    mine = object()
    return _told.setdefault(what, mine) is mine  # one operation: of two threads one is first
