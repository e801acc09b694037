"""Which decisions differ between two matrices.

What counts is what a question can be answered with: candidates in their order, how each runs and which versions of
which packages run it, and which one is chosen. Comments, the order of rows and blocks, sources, notes and proof levels
change no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mla_prefill.capabilities import tables
from mla_prefill.capabilities.matrix import Cell, Matrix
from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import Request

NONE = "none"
#: What is compared of one candidate, in the words of an answer.
Facts = dict[str, str]


class Choice(NamedTuple):
    """Who is chosen, packages being no constraint, with FlashAttention pinned to ``fa_version`` (None: not pinned)."""

    fa_version: int | None
    old: str
    new: str


class Change(NamedTuple):
    """What differs for one architecture and dims.

    ``status`` is ``new``, ``gone`` or empty: whether both matrices have a block of these dims.
    ``keys`` are the FlashAttention versions at hand (None: without any) for which the lookup differs; ``changed`` has
    (candidate, fact, old, new); ``order`` is empty where only the candidates themselves differ.
    """

    dims: MLADimensions
    block: str
    status: str
    arch: str
    keys: tuple[int | None, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[tuple[str, str, str, str], ...]
    order: tuple[tuple[str, ...], tuple[str, ...]] | tuple[()]
    chosen: tuple[Choice, ...]

    @property
    def effect(self) -> tuple[Any, ...]:
        """Everything but the architecture: equal effects share a line."""
        return (self.dims, *self[4:])

    def to_dict(self) -> dict[str, Any]:
        changed = [dict(zip(("candidate", "what", "old", "new"), entry, strict=True)) for entry in self.changed]
        order = dict(zip(("old", "new"), map(list, self.order), strict=False)) or None
        return {
            **self._asdict(),
            "dims": list(self.dims),
            "changed": changed,
            "order": order,
            "chosen": [choice._asdict() for choice in self.chosen],
        }


def diff(old: Matrix, new: Matrix) -> Iterator[Change]:
    """Every change, by dims and architecture, in the order of the new matrix."""
    dims = dict.fromkeys(block.dims for matrix in (new, old) for block in matrix.blocks.values())
    arches = dict.fromkeys((*new.architectures, *old.architectures))
    for triple in dims:
        for arch in arches:
            if change := _change(old, new, arch, triple):
                yield change


def _change(old: Matrix, new: Matrix, arch: str, dims: MLADimensions) -> Change | None:
    before, after = _candidates(old, arch, dims), _candidates(new, arch, dims)
    if list(before.items()) == list(after.items()):
        return None
    both = [name for name in after if name in before]
    facts = ((name, fact, before[name].get(fact, ""), after[name].get(fact, "")) for name in both for fact in _FACTS)
    reordered = [name for name in before if name in after] != both
    chosen = (Choice(fa, _chosen(old, arch, dims, fa), _chosen(new, arch, dims, fa)) for fa in _pins(old, new))
    block = new.block_for(dims) or old.block_for(dims)
    return Change(
        dims=dims,
        block=block.name if block else "",
        status="new" if not old.block_for(dims) else "gone" if not new.block_for(dims) else "",
        arch=arch,
        keys=tuple(fa for fa in _pins(old, new) if _at_hand(before, fa) != _at_hand(after, fa)),
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(entry for entry in facts if entry[2] != entry[3]),
        order=(tuple(before), tuple(after)) if reordered else (),
        chosen=tuple(choice for choice in chosen if choice.old != choice.new),
    )


_FACTS = ("fa_version", "V", "needs", "dtypes", "features", "LSE", "known bad", "on request only")


def _candidates(matrix: Matrix, arch: str, dims: MLADimensions) -> dict[str, Facts]:
    """The allowed candidates in their order, with all that decides about each."""
    if arch not in matrix.architectures:
        return {}
    return {cell.kernel.label: _facts(cell) for cell in matrix.cells(arch, dims) if cell.allowed}


def _facts(cell: Cell) -> Facts:
    c, lse = cell.candidate, cell.candidate.lse
    offers = cell.offers
    bad = (f"{o.distribution}{b.version}{_narrowed(b.dtypes, b.needs)}" for o in offers for b in o.known_bad)
    return {
        "fa_version": str(c.fa_version or ""),
        "V": f"padded to {c.pad_v_to}" if c.pad_v_to else "as it is",
        "needs": " or ".join(o.distribution + o.specifier for o in offers) or "no package ships it",
        "dtypes": _each([(o.distribution, o.described.dtypes) for o in offers], c.dtypes),
        "features": _each([(o.distribution, sorted(o.described.provides)) for o in offers], sorted(c.provides)),
        "LSE": f"{lse.base} {lse.layout} {lse.no_keys}{' rounded' * lse.rounded}" if lse else NONE,
        "known bad": ", ".join(bad) or NONE,
        "on request only": NONE if cell.on_request is None else "yes",
    }


def _narrowed(dtypes: Sequence[str], needs: Sequence[str]) -> str:
    return f" with {', '.join((*dtypes, *needs))}" if dtypes or needs else ""


def _each(offers: Iterable[tuple[str, Sequence[str]]], usual: Sequence[str]) -> str:
    """What most packages have, then those that differ."""
    odd = [f"{', '.join(values)} of {name}" for name, values in offers if list(values) != list(usual)]
    return "; ".join([", ".join(usual), *odd])


def _pins(*matrices: Matrix) -> tuple[int | None, ...]:
    return (None, *sorted({fa for matrix in matrices for fa in matrix.fa_versions}))


def _at_hand(candidates: dict[str, Facts], fa_version: int | None) -> list[tuple[str, Facts]]:
    """`Matrix.lookup` in these words."""
    return [(name, facts) for name, facts in candidates.items() if facts["fa_version"] in ("", str(fa_version))]


def _chosen(matrix: Matrix, arch: str, dims: MLADimensions, fa_version: int | None) -> str:
    if fa_version is not None and fa_version not in matrix.fa_versions:
        return NONE
    decision = decide(Request(dims, fa_version=fa_version), Environment(arch), matrix)
    return f"{decision.chosen.backend}/{decision.chosen.kernel}" if decision.chosen else NONE


# ---- for people -----------------------------------------------------------------------------------------------------


def text(changes: Iterable[Change]) -> str:
    """Grouped by dims, architectures with equal changes together; empty where nothing changes."""
    lines: list[str] = []
    for title, groups in _grouped(changes).items():
        lines += ["", title] if lines else [title]
        for arches, change in groups:
            lines += [f"  {arches}", *(f"    {line}" for line in (*_choices(change), *_details(change)))]
    return "\n".join(lines)


def markdown(changes: Iterable[Change]) -> str:
    """For a pull request; empty where nothing changes."""
    parts = []
    for title, groups in _grouped(changes).items():
        rows = [(arches, _broken(_choices(change)), _broken(_details(change))) for arches, change in groups]
        parts.append(f"### {title}\n\n" + tables.markdown(rows, ("arch", "chosen", "candidates")))
    return "\n\n".join(["## Decisions that change", *parts]) if parts else ""


def _grouped(changes: Iterable[Change]) -> dict[str, list[tuple[str, Change]]]:
    groups: dict[tuple[Any, ...], list[Change]] = {}
    for change in changes:
        groups.setdefault(change.effect, []).append(change)
    titled: dict[str, list[tuple[str, Change]]] = {}
    for same in groups.values():
        arches = ", ".join(change.arch for change in same)
        title = f"{same[0].block} {same[0].dims}" + (same[0].status and f", {same[0].status}")
        titled.setdefault(title, []).append((arches, same[0]))
    return titled


def _choices(change: Change) -> list[str]:
    pinned = {choice.fa_version: (choice.old, choice.new) for choice in change.chosen}
    lines = [f"chosen: {' -> '.join(pinned[None])}"] if None in pinned else []
    return lines + [f"with FlashAttention {fa}: {old} -> {new}" for fa, (old, new) in pinned.items() if fa is not None]


def _details(change: Change) -> list[str]:
    lines = [f"{sign} {', '.join(names)}" for sign, names in (("+", change.added), ("-", change.removed)) if names]
    lines += [f"{name}, {what}: {old} -> {new}" for name, what, old, new in change.changed]
    return lines + ([f"order: {' -> '.join(', '.join(names) for names in change.order)}"] if change.order else [])


def _broken(lines: Iterable[str]) -> str:
    return "<br>".join(lines)
