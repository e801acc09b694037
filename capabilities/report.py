"""Findings as text, JSON, GitHub annotations and SARIF 2.1.0."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from mla_prefill.capabilities.findings import ADVICE, CODES, Finding


def as_text(findings: Sequence[Finding]) -> str:
    return "\n".join([*map(str, findings), summary(findings)])


def as_json(findings: Sequence[Finding]) -> str:
    return json.dumps({"findings": [f.to_dict() for f in findings], "summary": summary(findings)}, indent=2)


def as_github(findings: Sequence[Finding]) -> str:
    """Workflow commands that annotate the lines of a pull request."""
    return "\n".join([*map(_annotation, findings), summary(findings)])


def _annotation(finding: Finding) -> str:
    level = "error" if finding.severity == "error" else "notice"
    message = _escape(finding.message + (f"\n{finding.hint}" if finding.hint else ""))
    path = _escape(finding.path).replace(":", "%3A").replace(",", "%2C")
    place = f"file={path},line={finding.line},col={finding.column},title={finding.code}"
    return f"::{level} {place}::{message}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def as_sarif(findings: Sequence[Finding]) -> str:
    """One SARIF run, for code scanning."""
    rules = [
        {"id": code, "shortDescription": {"text": title}, "help": {"text": ADVICE[code]}}
        for code, title in CODES.items()
    ]
    index = {code: i for i, code in enumerate(CODES)}
    results = [
        {
            "ruleId": f.code,
            "ruleIndex": index[f.code],
            "level": "error" if f.severity == "error" else "note",
            "message": {"text": f.message + (f" ({f.hint})" if f.hint else "")},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(f.path.replace("\\", "/"))},
                        "region": {"startLine": f.line, "startColumn": f.column},
                    }
                }
            ],
        }
        for f in findings
    ]
    driver: dict[str, Any] = {"name": "mla-prefill", "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(log, indent=2)


def summary(findings: Sequence[Finding]) -> str:
    errors = sum(f.severity == "error" for f in findings)
    notices = len(findings) - errors
    fixable = sum(f.fixable for f in findings)
    text = f"{errors} error{'' if errors == 1 else 's'}, {notices} notice{'' if notices == 1 else 's'}"
    return text + (f"; {fixable} fixable with check --fix" if fixable else "")


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
