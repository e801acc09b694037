"""The commands that keep the data true: check, drift."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mla_prefill.cli_options import FINE, NEGATIVE, matrix_of, overrides, progress

if TYPE_CHECKING:
    from mla_prefill.capabilities.findings import Finding


def check(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities import checks, fixes, load
    from mla_prefill.capabilities.report import FORMATS

    findings = []
    asked = overrides().matrix
    paths = [*options.paths, *options.matrix] or ([asked] if asked else [])
    if not paths:
        _tell_which_copy()
    at_once: list[list[str] | None] = [*load.together(paths)]
    for path in at_once or [None]:
        if options.fix:
            for fixed in fixes.fix(path, options.extra):
                progress(f"fixed {fixed}")
        findings += checks.check_path(path, options.extra)
        if path is None and not options.extra and not any(f.severity == "error" for f in findings):
            findings += _pages(options.fix)
    print(FORMATS[options.format](findings))
    return NEGATIVE if any(f.severity == "error" for f in findings) else FINE


def _tell_which_copy() -> None:
    """In a checkout, whoever installed it without -e has an installed copy checked, and changes the other."""
    from mla_prefill.capabilities.load import DATA_DIR, DATA_LABEL

    here = Path(DATA_LABEL)
    if (here / "matrix.yaml").is_file() and here.resolve() != DATA_DIR.resolve():
        progress(f"note: this checks the installed copy, {DATA_DIR}; for the checkout here: mla-prefill check {here}")


def _pages(fix: bool) -> list[Finding]:
    """The generated pages of a checkout, held to the compiled matrix; they name reasons, which only we know here."""
    from mla_prefill.capabilities import pages
    from mla_prefill.capabilities.load import load_matrix
    from mla_prefill.selector.reasons import CURES, MEANINGS, REASONS

    wanted = pages.sections(load_matrix(), [(code, MEANINGS[code], CURES[code]) for code in REASONS])
    if fix:
        for fixed in pages.rewrite(wanted):
            progress(f"fixed {fixed}")
    return list(pages.stale(wanted))


def drift(options: argparse.Namespace) -> int:
    import json

    from mla_prefill.backends import drift as drifts

    answers = drifts.drift(matrix_of(options), progress)
    print(json.dumps(drifts.as_dict(answers), indent=2) if options.format == "json" else drifts.as_text(answers))
    return NEGATIVE if any(answer.differences for answer in answers) else FINE
