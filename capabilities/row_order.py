"""The order of a block's rows: by kernel as kernels.yaml has them, then FlashAttention version, then architecture.

No decision depends on it. Readers and diffs do, and two people who add the same rows write the same lines.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mla_prefill.capabilities.source import Mark, Seq, SourceFile, parse

_DASH = re.compile(r"( *)- +\Z")
_BREAKS = "\n\r\x85\u2028\u2029"
#: Why rows stay where they are.
_NO_LINES = "the rows do not each begin a line with their dash"
_WHOSE = "whose a comment or blank line is cannot be told"
_ENDINGS = "their lines end in different ways"
_READS_OTHERWISE = "the file would read otherwise"


def place(
    kernels: Iterable[str],
    fa_versions: Iterable[int],
    arches: Iterable[str],
    kernel_ranks: Mapping[str, int],
    arch_ranks: Mapping[str, int],
) -> tuple[int, list[int], list[int]]:
    """What rows are sorted by: the first kernel that a row names, its FlashAttention versions, its architectures."""
    first = min((kernel_ranks[name] for name in kernels), default=len(kernel_ranks))
    return first, sorted(fa_versions), sorted(arch_ranks[name] for name in arches)


def ranks(names: Iterable[str]) -> dict[str, int]:
    """Each name with its number."""
    return {name: i for i, name in enumerate(names)}


class Misplaced(NamedTuple):
    """A list of rows out of order: where it is, and which row comes first, second ..."""

    path: tuple[str | int, ...]
    order: list[int]

    def marks(self, source: SourceFile) -> tuple[Mark, Mark]:
        """Where the first row is that stands in another's place, and where that other one is."""
        place, row = next((i, j) for i, j in enumerate(self.order) if i != j)
        return source.locate([*self.path, place]), source.locate([*self.path, row])


def obstacles(source: SourceFile, lists: Sequence[Misplaced]) -> list[str]:
    """Why `move` cannot put each of these lists in order, "" where it can: tried, and what comes of it read again."""
    lines = list(source.lines)
    why_not = [move(lines, source.at_path(rows.path), rows.order) for rows in lists]
    again = SourceFile(source.label, "".join(lines).encode())
    changed = [_READS_OTHERWISE] * len(lists)
    if parse(again):
        return changed
    for rows in itertools.compress(lists, (not why for why in why_not)):
        new, old = again.at_path(rows.path), source.at_path(rows.path)
        if new != [old[i] for i in rows.order]:
            return changed
        new[:] = old
    return why_not if again.data == source.data else changed


def move(lines: list[str], rows: Seq, order: Sequence[int]) -> str:
    """Puts the rows of one list into ``order``, each with the comment lines right above it; nothing else moves.

    Args:
        lines: of the whole file (`SourceFile.lines`), changed in place; there are as many afterwards.
        rows: the list as it was read.
        order: which row comes first, second ...

    Returns:
        "", or with nothing changed why not: rows that do not start lines of their own, lines that end in different
        ways, blank lines or differently indented comments between the rows, a comment at an end that moves.
    """
    starts = [line - 1 for line, _ in rows.marks]
    dashes = {m[1] if (m := _DASH.match(lines[line - 1][: column - 1])) else None for line, column in rows.marks}
    indent = dashes.pop()
    if dashes or indent is None or len(set(starts)) < len(starts):
        return _NO_LINES
    end = starts[-1] + 1
    for i in range(end, len(lines)):
        if _is_remark(lines[i]):
            continue
        if not lines[i].startswith(f"{indent} "):
            break
        end = i + 1
    owned = [_with_comments(lines, starts[0], start, indent) for start in starts]
    region = [lines[a:b] for a, b in zip(owned, [*owned[1:], end], strict=True)]
    breaks = [line[len(line.rstrip(_BREAKS)) :] for piece in region for line in piece]
    above, below = lines[starts[0] - 1], lines[end] if end < len(lines) else ""
    ambiguous = (
        any(_is_remark(piece[-1]) for piece in region)
        or (order[0] != 0 and _is_remark(above) and above.strip())
        or (order[-1] != len(order) - 1 and below.startswith(f"{indent}") and _is_remark(below) and below.strip())
    )
    if ambiguous:
        return _WHOSE
    if len(set(breaks[:-1]) | {breaks[-1] or breaks[0]}) > 1:
        return _ENDINGS
    moved = [line.rstrip(_BREAKS) for i in order for line in region[i]]
    lines[owned[0] : end] = map("".join, zip(moved, breaks, strict=True))
    return ""


def _with_comments(lines: Sequence[str], first: int, start: int, indent: str) -> int:
    """Where a row starts with the comments right above it that are indented as its dash is; the first one has none."""
    while start > first and lines[start - 1].startswith(f"{indent}#"):
        start -= 1
    return start


def _is_remark(line: str) -> bool:
    """Blank or a comment."""
    return not line.strip() or line.lstrip(" ").startswith("#")
