"""Findings: what is wrong in a file, where, and what to do. One list for people, CI and editors."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

#: More of a file is never read.
MAX_BYTES = 8 * 1024 * 1024


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """A file's content, and one byte more than ``limit`` where it is longer.

    Raises:
        OSError: it cannot be read, or is no regular file: a pipe or a device may never end, or never begin.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file; copy what it holds into one", str(path))
    with path.open("rb") as file:
        return file.read(limit + 1)


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


#: Every code with its title; the generated docs page and the SARIF rules come from here and from ADVICE.
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
    "X315": "a file of a kind that cannot be laid over the matrix",
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
    "X344": "two orders for the same architecture and dims",
    "X350": "a model's dims have no block",
    "X351": "dims have no backend on an architecture",
    "X360": "a record that cannot be used",
    "X361": "evidence contradicts a row",
    "X362": "evidence contradicts the kernel sheet",
    "X363": "evidence has gone stale",
    "X380": "the compiled form does not match its sources",
    "X381": "the editor modeline is missing",
    "X382": "architectures are not in their order",
    "X383": "a generated page is out of date",
    "X384": "rows are not in their order",
}

#: Code -> what to do about it, for the docs page and for code scanning.
ADVICE: dict[str, str] = {
    "Y100": "Split it; no data file here needs 8 MiB or 32 levels",
    "Y101": "Mend the syntax at the place named",
    "Y102": "Keep one of the two",
    "Y103": "Write the value out",
    "Y104": 'Quote it: `"9.0"`, `"no"`',
    "Y105": "Save it as UTF-8",
    "Y106": "Quote it, or name the key",
    "Y107": "Write its top-level key, or remove the file",
    "Y108": "Keep one; remove the `---`",
    "S200": "Follow the description in the hint",
    "S201": "Take the key that the hint names",
    "S202": "Add it",
    "S203": "Write the type named; a version or capability is text, so quote it",
    "S204": "Take one of the values in the hint",
    "S205": "Follow the description in the hint",
    "S206": "Use a release that reads it",
    "X301": "Take an id of architectures.yaml, or add the architecture there",
    "X302": "Take a kernel of kernels.yaml",
    "X303": "Take a backend of kernels.yaml",
    "X304": "Take 2, 3 or 4",
    "X305": "Take a block of matrix.yaml",
    "X306": "Take a feature of kernels.yaml, or describe it there",
    "X307": "Write it as PyTorch does: `bfloat16`",
    "X308": "Take a provider of kernels.yaml, as pip spells it",
    "X309": "Take a family of models.yaml",
    "X310": "Remove one of the two rows",
    "X311": "Give FLASH_ATTN rows an `fa_version`, others none; or widen `kernels`",
    "X312": "Add the rows to the first block",
    "X313": "Keep it with one",
    "X314": "Merge them into one entry",
    "X315": "Put it in place of its namesake: `--matrix FILE`, or a whole data folder",
    "X320": "Remove the architecture from the row; if the kernel can after all, its limits and their source come first",
    "X321": "Add a row, or say why not under `not_allowed`",
    "X322": "Remove what it names: the kernel sheet holds none of it possible",
    "X323": "Narrow the row or the `not_allowed` entry",
    "X330": "Turn the bounds round, or take out the clause that excludes the rest",
    "X331": "Write the bound as a pre-release: `>=4.0.0b5`",
    "X332": "Write PEP 440 (`>=2.6,<3`), or PEP 508 with the name before it",
    "X340": "Add it to `order`, or to `on_request` with the reason",
    "X341": "Remove it from the order",
    "X342": "Keep one order without `dims` for each architecture",
    "X343": "Remove it: the order without `dims` says the same",
    "X344": "Keep one of the two",
    "X350": "Add a block to matrix.yaml, or mend the family's dims",
    "X351": "Add a row, or say why not under `not_allowed`",
    "X360": "Write it anew with `mla-prefill verify` or `bench`, or remove it",
    "X361": "Remove the row or bound its versions with `requires`, or for a CUDA graph take `cuda_graph` out of what "
    "the kernel provides; or remove a record that is out of date",
    "X362": "Correct the kernel's limits, with the record as their source",
    "X363": "Run `mla-prefill verify` again with a version that is offered, or remove the record",
    "X380": "Run `mla-prefill check --fix`",
    "X381": "Run `mla-prefill check --fix`",
    "X382": "Run `mla-prefill check --fix`; by hand where the list takes several lines",
    "X383": "Run `mla-prefill check --fix`",
    "X384": "Run `mla-prefill check --fix`; by hand where the hint says why it cannot",
}


def _folded(name: str) -> str:
    return re.sub("[-_. ]", "", name.lower())


def _is_near_miss(name: str, known: str) -> bool:
    """Whether one letter differs; or they begin alike, and two letters differ or they end alike (`FLASH_ATTENTION`)."""
    parts = difflib.SequenceMatcher(None, name, known, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for tag, a, b, c, d in parts if tag != "equal")
    return changed == 1 or (name[0] == known[0] and (changed == 2 or name[-1] == known[-1]))


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint that names the known value that was misspelled; the known ones where the name is another word."""
    names, asked = [str(k) for k in known], _folded(str(name)[:100])
    folded = {_folded(n): n for n in names}
    close = difflib.get_close_matches(asked, list(folded), n=3, cutoff=0.66)
    if meant := next((n for n in close if _is_near_miss(asked, n)), None):
        return f"did you mean {folded[meant]}?"
    shown = ", ".join(sorted(names)[:24])
    return f"known: {shown}{', ...' if len(names) > 24 else ''}"
