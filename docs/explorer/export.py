"""The matrix explorer and its data: what the engine answers, taken apart so that a page only has to look it up.

    python docs/explorer/export.py FOLDER [--matrix PATH] [--extra PATH]

writes the page with script, style and data in it, and the YAML files as pages with a line anchor each.

Packages combine without end, but the engine judges each one on its own. So what is exported of a kernel is what the
engine says with no package, with packages no constraint, and with each single package in each version of interest; the
page puts a combination together as the engine does: the first package without a reason against it, the first kernel
without one. Features are asked for in any combination, too: what is exported is which of them a kernel lacks, and the
answers for each set of those that decide more than that (`_deciding`). A preferred feature is answered as the engine
does it, by asking whether a kernel stays eligible where it is needed. Widths that no block names are exported as
regions of the plane (`regions`), a timing profile as the orders it leads to (`timings`). ``tests/site`` holds the page
to ``select --format json``, cell by cell.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mla_prefill import Environment, Matrix, MLADimensions, Request, load_matrix
from mla_prefill.capabilities import versions
from mla_prefill.capabilities.load import DATA_DIR, DATA_LABEL, KINDS
from mla_prefill.capabilities.matrix import BRANDS
from mla_prefill.capabilities.model import DTYPES, MAX_HEAD_DIM, Kernel
from mla_prefill.selector.decision import COMPUTES_IN, Verdict
from mla_prefill.selector.engine import decide
from mla_prefill.selector.hints import CURED_BY_AN_INSTALL, MAX_HINTS, tried
from mla_prefill.selector.reasons import MEANINGS, Reason
from packaging.version import Version
from regions import Condition, Pair, conditions, samples, tree
from timings import DEFAULT_ORDER, Timings, devices

HERE = Path(__file__).parent
#: Texts that depend on the whole decision and not on one kernel.
TEXTS = {
    "lower-priority": Reason("lower-priority", "{kernel}", "{chosen}", "{arch}", None).message,
    "install": "install {requirement} for {label}",
    "ask": "ask for {label}",
    "ask_install": "ask for {label} and install {requirement}",
    "dtype": "use dtype {dtype}: {label}",
    "ask_dtype": "ask for {label} and use dtype {dtype}",
    "without": "do without {missing}: {label}",
    "ask_without": "ask for {label} and do without {missing}",
    "default_order": DEFAULT_ORDER + "{why}",
    "timed_with": "{note}; timed with {packages}",
    "preferred": "{arch}, where {lacks} is preferred",
    "unmet": "{wish} is preferred, but {label} for {dims} on {arch} is without{stays}: {why}",
    "stays": ", so q, k and v stay in {dtype}",
    "nobody": "no kernel provides it",
    "nearest": "the nearest dims with a backend here are {near} ({block}); for {dims} add a block",
}
#: Versions that people have and no rule names: common ones, and one below every floor.
WIDESPREAD = {
    "flash-attn": ("2.8.3",),
    "vllm": ("0.33.0",),
    "tokenspeed-mla": ("2.0.4",),
    "flashinfer-python": ("0.2.14",),
}
_VERSION = re.compile(r"[<>=!~]=?\s*([0-9][^,\s\"']*)")


class Table:
    """Values by number, each kept once."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        return list(self._numbers)


class Export:
    """One matrix, asked through the engine."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.packages = {name: _versions(matrix, name) for name in self._distributions()}
        self.features = sorted(matrix.features)
        self.deciding = _deciding(matrix)
        self.strings, self.reasons, self.states = Table(), Table(), Table()
        self.variants, self.records, self.conditions, self.trees = Table(), Table(), Table(), Table()
        self._providers = {name: _providers(kernel) for name, kernel in matrix.kernels.items()}
        self._planes: dict[Hashable, tuple[list[Condition], dict[Pair, Hashable]]] = {}
        self._machines = list(self._machines_of_one_package())

    def _distributions(self) -> list[str]:
        kernels = self.matrix.kernels.values()
        return list(dict.fromkeys(versions.canonical(p.distribution) for k in kernels for p in k.providers))

    def data(self) -> dict[str, Any]:
        """Everything that the page looks up. Numbers point into ``strings``, ``reasons`` and the other tables."""
        matrix = self.matrix
        arches = matrix.architectures.values()
        cells = {a.id: {b.name: self._cells(a.id, b.dims) for b in matrix.blocks.values()} for a in arches}
        others = {a.id: self._other_cells(a.id) for a in arches}
        return {
            "fingerprint": matrix.fingerprint,
            "schema_version": matrix.schema_version,
            "max_hints": MAX_HINTS,
            "texts": TEXTS,
            "widths": _widths(),
            "brands": list(BRANDS),
            "cured": sorted(CURED_BY_AN_INSTALL),
            "meanings": MEANINGS,
            "architectures": {a.id: [a.name, list(a.products), list(a.spellings)] for a in arches},
            "kernels": [[k.name, k.backend, k.fa_version, self._without(k.provides)] for k in matrix.kernels.values()],
            "fa_versions": list(matrix.fa_versions),
            "dtypes": list(DTYPES),
            "features": [[name, matrix.features[name], COMPUTES_IN.get(name)] for name in self.features],
            "deciding": [self.features.index(name) for name in self.deciding],
            "packages": list(self.packages.items()),
            "blocks": {b.name: list(b.dims) for b in matrix.blocks.values()},
            "models": dict(_models(matrix)),
            "cells": cells,
            "others": others,
            "conditions": self.conditions.values,
            "trees": self.trees.values,
            "records": self.records.values,
            "variants": self.variants.values,
            "states": self.states.values,
            "reasons": self.reasons.values,
            "strings": self.strings.values,
            "devices": devices(matrix),
            "profiles": [Timings(matrix, profile, self.packages).data() for profile in matrix.profiles],
        }

    # ---- where ----------------------------------------------------------------------------------------------------

    def _cells(self, arch: str, dims: MLADimensions) -> list[Any]:
        """[how many kernels have a place in the order, where the order stands, the records in that order]."""
        records = self._records(arch, dims)
        return [*self._order(arch, dims), [records[cell.kernel.name] for cell in self.matrix.cells(arch, dims)]]

    def _order(self, arch: str, dims: MLADimensions) -> tuple[int, int]:
        order = self.matrix.order_for(arch, dims)
        return (len(order.order), self.strings(order.source)) if order else (0, -1)

    def _other_cells(self, arch: str) -> list[Any]:
        """`_cells` for dims without a block: of each kernel [its tree, the records at the leaves, the record of each
        pair of widths that something was proven for].
        """
        kernels = self.matrix.kernels.values()
        proven = {kernel.name: sorted(self.matrix.proven_pairs(kernel.name, arch)) for kernel in kernels}
        planes: dict[str, dict[Pair, Hashable]] = {}  # apart from the proven pairs
        known: dict[str, dict[Hashable, int]] = {kernel.name: {} for kernel in kernels}
        for kernel in kernels:
            plane = self._plane(kernel, arch)[1]
            planes[kernel.name] = {pair: which for pair, which in plane.items() if pair not in proven[kernel.name]}
            pairs = {which: pair for pair, which in planes[kernel.name].items()}
            for pair in (*proven[kernel.name], *pairs.values()):
                if self._class(kernel, arch, pair) not in known[kernel.name]:
                    records = self._records(arch, self._without_block(*pair))
                    for other in kernels:
                        known[other.name].setdefault(self._class(other, arch, pair), records[other.name])
        found = []
        some = self._without_block(1, 1)
        for kernel in (cell.kernel for cell in self.matrix.cells(arch, some)):
            plane, of_class = planes[kernel.name], known[kernel.name]
            leaves = list(dict.fromkeys(plane.values()))
            regions = {pair: leaves.index(which) for pair, which in plane.items()}
            walk = self.trees(tree(self._plane(kernel, arch)[0], regions, self.conditions))
            of_pair = {f"{qk} {v}": of_class[self._class(kernel, arch, (qk, v))] for qk, v in proven[kernel.name]}
            found.append([walk, [of_class[which, ()] for which in leaves], of_pair])
        return [*self._order(arch, some), found]

    def _plane(self, kernel: Kernel, arch: str) -> tuple[list[Condition], dict[Pair, Hashable]]:
        """The conditions of the kernel sheet, and what it says of pairs of widths from every region."""
        limit, smem = self.matrix.limit(kernel.name, arch), self.matrix.architectures[arch].shared_memory_bytes
        bad = [entry for entry in kernel.known_bad if arch in entry.arch]
        key = (kernel.name, id(limit), smem, tuple(map(id, bad)))
        if key not in self._planes:
            cuts = conditions(limit, [line for entry in bad for line in entry.widths], smem) if limit else []
            self._planes[key] = cuts, {pair: self._said(kernel, arch, pair) for pair in samples(cuts)}
        return self._planes[key]

    def _said(self, kernel: Kernel, arch: str, pair: Pair) -> Hashable:
        """What the kernel sheet says of a pair of widths."""
        dims = next(_splits(*pair))
        fit = self.matrix.fit(kernel.name, arch, dims)
        return fit and (fit.pad_v_to is not None, fit.requires), *(b.concerns(arch, dims) for b in kernel.known_bad)

    def _class(self, kernel: Kernel, arch: str, pair: Pair) -> tuple[Hashable, Hashable]:
        """Where the sheet says the same of two pairs, and the records prove the same, the engine says the same."""
        if pair not in self.matrix.proven_pairs(kernel.name, arch):
            return self._said(kernel, arch, pair), ()
        where = (kernel.name, arch, next(_splits(*pair)))
        builds = ((), *((package,) for package in self._providers[kernel.name]))
        proofs = (tuple(self.matrix.evidence(*where, *build).values()) for build in builds)
        return self._said(kernel, arch, pair), tuple(proofs)

    def _without_block(self, qk: int, v: int) -> MLADimensions:
        """Dims with these widths that no block has."""
        return next(dims for dims in _splits(qk, v) if self.matrix.block_for(dims) is None)

    # ---- what the engine says -------------------------------------------------------------------------------------

    def _ask(self, arch: str, request: Request, installed: dict[str, str] | None) -> dict[str, Verdict]:
        decision = decide(request, Environment(arch, installed), self.matrix)
        return {verdict.candidate.kernel: verdict for verdict in decision.verdicts}

    def _records(self, arch: str, dims: MLADimensions) -> dict[str, int]:
        """kernel -> the number of everything the engine says about it."""
        pinned = [self._ask(arch, Request(dims, fa_version=pin), None) for pin in (None, *self.matrix.fa_versions)]
        bare = self._ask(arch, Request(dims), {})
        everything = self._ask(arch, Request(dims, needs=self.features), {})
        answers = [[self._variants(arch, dims, dtype, needs) for needs in _subsets(self.deciding)] for dtype in DTYPES]
        records = {}
        for number, name in enumerate(self.matrix.kernels):
            c = bare[name].candidate
            if c.pad_v_to not in (None, dims.qk_head_dim):
                raise ValueError(f"{name} pads V of {dims} to {c.pad_v_to}: the explorer knows padding to qk only")
            unasked = [[r for r in verdicts[name].reasons if r.code == "not-requested"] for verdicts in pinned]
            lacks, text = self._lacks(everything[name], c.provides, arch, dims)
            record = (
                number,
                int(c.pad_v_to is not None),
                self.strings(c.source),
                self._runs(bare[name]),
                tuple(self._reasons(reasons, arch, dims) for reasons in unasked),
                lacks,
                text,
                tuple(tuple(variants[name] for variants in of_dtype) for of_dtype in answers),
            )
            records[name] = self.records(record)
        return records

    def _lacks(
        self, asked_for_all: Verdict, provides: frozenset[str], arch: str, dims: MLADimensions
    ) -> tuple[tuple[int, ...], int]:
        """(the features that a kernel lacks in whatever build; the reason, in whose text they are left open)."""
        lacking = tuple(name for name in self.features if name not in provides)
        for reason in asked_for_all.reasons:
            if reason.code == LACKING and reason.actual == lacking:
                (number,) = self._reasons([reason._replace(actual="{missing}")], arch, dims)
                return tuple(map(self.features.index, lacking)), number
        return (), -1

    def _variants(self, arch: str, dims: MLADimensions, dtype: str, needs: tuple[str, ...]) -> dict[str, int]:
        """kernel -> the answers in one dtype for these of the deciding features: (reasons whatever is installed, but
        for features that it lacks; the reason without any package; what follows where packages are no constraint, and
        what where it lacks a feature; the same of each package by version; the install that would help).
        """
        request = Request(dims, dtype, needs=needs)
        lacking = Request(dims, dtype, needs={*needs, *self.features} - ({*self.deciding} - {*needs}))
        free, bare, free_lacking, bare_lacking = (
            self._ask(arch, *asked) for asked in ((request, None), (request, {}), (lacking, None), (lacking, {}))
        )
        own = {name: [r for r in _against(verdict) if r.code != MISSING] for name, verdict in bare.items()}
        always = {name: [r for r in own[name] if r.code != LACKING] for name in own}
        missing = {name: [r for r in _against(verdict) if r.code == MISSING] for name, verdict in bare.items()}

        def rest(name: str, verdict: Verdict) -> tuple[Any, ...]:
            tail = _against(verdict)[len(own[name]) :]
            return self._reasons(tail, arch, dims), tuple(map(self.strings, verdict.notes)), self._runs(verdict)

        def rest_lacking(name: str) -> tuple[int, ...]:
            of_the_kernel = sum(r.code != MISSING for r in _against(bare_lacking[name]))
            return self._reasons(_against(free_lacking[name])[of_the_kernel:], arch, dims)

        offers: dict[str, dict[str, list[int]]] = {name: {} for name in bare}
        for installed in self._machines:
            for name, verdict in self._ask(arch, request, installed).items():
                for package in self._providers[name]:
                    offered = missing[name] and all(r.code != MISSING for r in verdict.reasons)
                    if package in installed and offered:
                        passed = int(verdict.candidate.provider == package)
                        state = self.states((passed, *rest(name, verdict)))
                        offers[name].setdefault(package, []).append(state)
        names = list(self.packages)
        return {
            name: self.variants(
                (
                    self._reasons(always[name], arch, dims),
                    self._reasons(missing[name], arch, dims),
                    rest(name, free[name]),
                    rest_lacking(name),
                    tuple(
                        (names.index(package), tuple(offers[name][package]))
                        for package in self._providers[name]
                        if package in offers[name]
                    ),
                    self._cure(name, arch, request) if missing[name] and not own[name] else -1,
                )
            )
            for name in bare
        }

    def _machines_of_one_package(self) -> Iterator[dict[str, str]]:
        """Every version of every package, on machines that have at most one package for each kernel."""
        together: list[list[str]] = []
        rivals: dict[str, set[str]] = {name: set() for name in self.packages}
        for packages in self._providers.values():
            for name in packages:
                rivals[name].update(packages)
        for name in self.packages:
            group = next((group for group in together if rivals[name].isdisjoint(group)), None)
            if group is None:
                together.append([name])
            else:
                group.append(name)
        for group in together:
            for i in range(max(len(self.packages[name]) for name in group)):
                yield {name: self.packages[name][i] for name in group if i < len(self.packages[name])}

    def _cure(self, kernel: str, arch: str, request: Request) -> int:
        """The requirement that the engine proposes to install for this kernel, tried; -1: none helps."""
        forced = Request(**{**request._asdict(), "backend": kernel})
        asked = decide(forced, Environment(arch, {}), self.matrix)
        verdict = next(v for v in asked.verdicts if v.candidate.kernel == kernel)
        for hint in tried(asked, verdict):
            return self.strings(hint.text.removeprefix("install ").rpartition(" for ")[0])
        return -1

    # ---- numbers for values ---------------------------------------------------------------------------------------

    def _reasons(self, reasons: Iterable[Reason], arch: str, dims: MLADimensions) -> tuple[int, ...]:
        """Reasons by number; what differs with the question alone is left open in their texts."""
        found = []
        for reason in reasons:
            text = reason.message.replace(str(dims), "{dims}")
            text = text.replace(f"(qk {dims.qk_head_dim}, v {dims.v_head_dim})", "{pair}")
            text = re.sub(rf"\bon {arch}\b", "on {arch}", text)
            source = -1 if reason.source is None else self.strings(reason.source)
            found.append(self.reasons((reason.code, self.strings(text), source)))
        return tuple(found)

    def _runs(self, verdict: Verdict) -> tuple[Any, ...]:
        """How the candidate would run: proof, requirements, dtypes, what it was proven with, features that it lacks."""
        c = verdict.candidate
        requires, dtypes = tuple(map(self.strings, c.requires)), tuple(map(DTYPES.index, c.dtypes))
        return self.strings(c.proof), requires, dtypes, self.strings(c.proven), self._without(c.provides)

    def _without(self, provides: frozenset[str]) -> int:
        """The features that are not provided: the sum of 2^i over them."""
        return sum(1 << i for i, name in enumerate(self.features) if name not in provides)


MISSING, LACKING = "kernel-not-installed", "feature-missing"


def _against(verdict: Verdict) -> list[Reason]:
    """What speaks against the kernel itself, however it is asked for."""
    return [r for r in verdict.reasons if r.code not in ("not-requested", "lower-priority")]


def _versions(matrix: Matrix, distribution: str) -> list[str]:
    """The versions of a package at which an answer can change, and those that were timed."""
    found = set()
    for kernel in matrix.kernels.values():
        requirements = [r for limit in kernel.limits for r in limit.requires]
        requirements += [r for limit in kernel.limits for width in limit.widths for r in width.requires]
        requirements += [r for block in matrix.blocks.values() for row in block.rows for r in row.requires]
        requirements += [bad.distribution + bad.version for bad in kernel.known_bad]
        requirements += [p.distribution + of for p in kernel.providers for of in (p.version, p.verified)]
        for requirement in requirements:
            name, specifier = versions.split(requirement)
            if name == distribution:
                found.update(_VERSION.findall(specifier))
    found.update(p.packages[distribution] for p in matrix.profiles if distribution in p.packages)
    found.update(WIDESPREAD.get(distribution, ()))
    distinct = {Version(version): version for version in sorted(found or {"1"}, key=len)}
    return [distinct[version] for version in sorted(distinct)]


def _models(matrix: Matrix) -> Iterator[tuple[str, list[int]]]:
    """What people may type -> dims: blocks, families, checkpoints."""
    for name, family in matrix.families.items():
        if family.get("dims"):
            for alias in (name, *family.get("checkpoints", ())):
                yield alias, family["dims"]
    for block in matrix.blocks.values():
        yield block.name, list(block.dims)


def _providers(kernel: Kernel) -> list[str]:
    """Its packages in the order in which the kernel sheet prefers them."""
    return [versions.canonical(provider.distribution) for provider in kernel.providers]


def _deciding(matrix: Matrix) -> list[str]:
    """The features that decide more than whether a kernel has them: some package's build lacks them, or a defect
    strikes those who need them.
    """
    found: set[str] = set()
    for kernel in matrix.kernels.values():
        for provider in kernel.providers:
            found |= kernel.provides - (kernel.provides if provider.provides is None else provider.provides)
        for bad in kernel.known_bad:
            found.update(bad.needs)
    return sorted(found)


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """All subsets; the place of each is the sum of 2^i over its members."""
    return [tuple(name for i, name in enumerate(names) if bits >> i & 1) for bits in range(1 << len(names))]


def _widths() -> dict[str, Any]:
    """What the engine says of widths that no head can have."""

    def said(*dims: Any) -> str:
        try:
            MLADimensions(*dims)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{dims} are dims")

    return {
        "names": list(MLADimensions._fields),
        "most": MAX_HEAD_DIM,
        "outside": said(-1, 0, 1).replace(MLADimensions._fields[0], "{name}").replace("-1", "{value}"),
        "no_number": said("{value}", 0, 1).replace(MLADimensions._fields[0], "{name}"),
        "zero": said(0, 0, 0).replace("= 0", "= {qk}", 1).replace("= 0", "= {v}", 1),
    }


def _splits(qk: int, v: int) -> Iterator[MLADimensions]:
    """Every triple with these widths."""
    for rope in range(max(0, qk - MAX_HEAD_DIM), min(qk, MAX_HEAD_DIM) + 1):
        yield MLADimensions(qk - rope, rope, v)


# ---- files ----------------------------------------------------------------------------------------------------------

_LINK = re.compile(r"\b([\w.-]+/[\w.-]+)(?:#(\d+)|@([\w.-]+):([\w./-]+))")


def source_page(path: Path) -> str:
    """A YAML file as a page with an anchor for each line, its references to GitHub as links."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = _LINK.sub(_linked, html.escape(line, quote=False))
        lines.append(f'<span id="L{number}"><a href="#L{number}">{number:4}</a> {text}</span>')
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{path.name}</title>',
            '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="../explorer.css">',
            f'<body class="source"><h1>{DATA_LABEL}/{path.name}</h1><pre>{"".join(lines)}</pre></html>',
            "",
        ]
    )


def _linked(match: re.Match[str]) -> str:
    repository, issue, commit, file = match.groups()
    where = f"issues/{issue}" if issue else f"blob/{commit}/{file}"
    return f'<a href="https://github.com/{repository}/{where}">{match[0]}</a>'


def page(data: str) -> str:
    """The explorer in one file, so that no answer waits for a second one to be read."""
    text = (HERE / "index.html").read_text(encoding="utf-8")
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("explorer.css", "explorer.js"))
    for tag, content in (
        ('<link rel="stylesheet" href="explorer.css">', f"<style>\n{style}</style>"),
        ('<script src="explorer.js"></script>', f"<script>\n{script}</script>"),
        ('"application/json"></script>', '"application/json">' + data.replace("</", r"<\/") + "</script>"),
    ):
        head, found, tail = text.partition(tag)
        if not found:
            raise ValueError(f"index.html has no {tag}")
        text = head + content + tail
    return text


def write(folder: Path, matrix: Matrix) -> None:
    """The explorer, ready to be opened from the file system."""
    (folder / "source").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(HERE / "explorer.css", folder / "explorer.css")  # for the source pages
    (folder / "index.html").write_text(
        page(json.dumps(Export(matrix).data(), separators=(",", ":"), ensure_ascii=False)), encoding="utf-8"
    )
    for kind in KINDS:
        (folder / "source" / f"{kind}.yaml.html").write_text(source_page(DATA_DIR / f"{kind}.yaml"), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the matrix explorer into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--matrix", metavar="PATH")
    parser.add_argument("--extra", action="append", default=[], metavar="PATH")
    options = parser.parse_args()
    write(options.folder, load_matrix(options.matrix, options.extra))


if __name__ == "__main__":
    main()
