"""The commands that keep the data true: check."""

from __future__ import annotations

import argparse
from pathlib import Path

from mla_prefill.cli_options import FINE, NEGATIVE, progress


def check(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities import checks, fixes
    from mla_prefill.capabilities.report import FORMATS

    findings = []
    for path in [*options.paths, *options.matrix] or [None]:
        if options.fix:
            for fixed in fixes.fix(Path(path) if path else None, options.extra):
                progress(f"fixed {fixed}")
        findings += checks.check_path(path, options.extra)
    print(FORMATS[options.format](findings))
    return NEGATIVE if any(f.severity == "error" for f in findings) else FINE
