"""Findings: what is wrong in a file, where, and what to do. One list for people, CI and editors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One problem at ``path:line:column`` (1-based), with a stable code and a hint. ``notice`` never fails a check."""

    path: str
    line: int
    column: int
    code: str
    message: str
    hint: str = ""
    severity: str = "error"
    fixable: bool = False

    def __str__(self) -> str:
        text = f"{self.path}:{self.line}:{self.column}: {self.code} {self.message}"
        return f"{text}\n    {self.hint}" if self.hint else text

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class MatrixError(ValueError):
    """The data cannot be used. ``findings`` holds every problem of every file, not only the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(sorted(findings))
        super().__init__("\n".join(map(str, self.findings)))


#: Every code with its title; the generated docs page and the SARIF rules come from here.
CODES: dict[str, str] = {
    "Y100": "the file is too large or too deeply nested",
    "Y101": "the file is not readable YAML",
    "Y102": "a key occurs twice in one mapping",
    "Y103": "anchors, aliases, merge keys and tags are not used here",
    "Y104": "a plain value that YAML 1.1 and 1.2 read differently",
    "Y105": "the file is not UTF-8",
    "Y106": "a key is not a string",
    "Y107": "the file is empty",
    "Y108": "the file holds more than one document",
    "S200": "the file does not match its schema",
    "S201": "unknown key",
    "S202": "a required key is missing",
    "S203": "wrong type",
    "S204": "not one of the allowed values",
    "S205": "the text has the wrong form",
    "S206": "schema_version is not one this program reads",
    "X301": "unknown architecture",
    "X302": "unknown kernel",
    "X303": "unknown backend",
    "X304": "no kernel has this FlashAttention version",
    "X305": "unknown dims block",
    "X306": "unknown feature",
    "X307": "unknown dtype",
    "X308": "unknown distribution",
    "X309": "unknown model family",
    "X310": "a cell is allowed twice",
    "X311": "a row that can never be reached",
    "X312": "two blocks have the same dims",
    "X313": "a name, product or spelling belongs to two architectures",
    "X314": "two limits of one kernel for the same architecture",
    "X320": "allowed, but the kernel cannot run it",
    "X321": "the kernel can run it, but no row allows it",
    "X322": "an exception that excuses nothing",
    "X323": "allowed in one place, not allowed in another",
    "X330": "empty version range",
    "X331": "a bound that leaves out the pre-releases this package publishes",
    "X332": "not a version range",
    "X340": "a kernel has no place in the order of an architecture",
    "X341": "a kernel that cannot run there has a place in the order",
    "X342": "the orders of an architecture are not exactly one",
    "X343": "an order for some dims that changes nothing",
    "X350": "a model's dims have no block",
    "X351": "dims have no backend on an architecture",
    "X360": "a record that cannot be used",
    "X361": "evidence contradicts a row",
    "X362": "evidence contradicts the kernel sheet",
    "X380": "the compiled form does not match its sources",
    "X381": "the editor modeline is missing",
    "X382": "architectures are not in their order",
    "X383": "a generated page is out of date",
}


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint that names the closest known value, or the known ones where nothing is close."""
    names = [str(k) for k in known]
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(str(name).lower(), list(lowered), n=1, cutoff=0.5)
    if close:
        return f"did you mean {lowered[close[0]]}?"
    shown = ", ".join(sorted(names)[:24])
    return f"known: {shown}{', ...' if len(names) > 24 else ''}"
