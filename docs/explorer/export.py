"""The matrix explorer and its data: what the engine answers, taken apart so that a page only has to look it up.

    python docs/explorer/export.py FOLDER [--matrix PATH] [--extra PATH]

writes page, script, style, ``data.js``, and the YAML files as pages with a line anchor each.

Packages combine without end, but the engine judges each one on its own. So what is exported of a kernel is what the
engine says with no package, with packages no constraint, and with each single package in each version of interest; the
page puts a combination together as the engine does: the first package without a reason against it, the first kernel
without one. Widths that no block names are exported as classes: multiples of `STEP` for which the kernel sheet says the
same. ``tests/site`` holds the page to ``select --format json``, cell by cell.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
from collections.abc import Hashable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mla_prefill import Environment, Matrix, MLADimensions, Request, load_matrix
from mla_prefill.capabilities import versions
from mla_prefill.capabilities.load import DATA_DIR, DATA_LABEL, KINDS
from mla_prefill.capabilities.model import DTYPES, Fit, Kernel, Limit
from mla_prefill.capabilities.profiles import Profile
from mla_prefill.selector.decision import Verdict
from mla_prefill.selector.engine import decide
from mla_prefill.selector.hints import _CURED_BY_AN_INSTALL, MAX_HINTS, _tried
from mla_prefill.selector.reasons import MEANINGS, Reason
from packaging.version import Version

HERE = Path(__file__).parent
#: Widths outside the blocks: multiples of `STEP` up to `WIDEST`, wider than any MLA head so far.
STEP, WIDEST = 8, 512
#: Texts that depend on the whole decision and not on one kernel.
TEXTS = {
    "lower-priority": Reason("lower-priority", "{kernel}", "{chosen}", "{arch}", None).message,
    "install": "install {requirement} for {label}",
    "ask": "ask for {label}",
    "ask_install": "ask for {label} and install {requirement}",
    "dtype": "use dtype {dtype}: {label}",
    "ask_dtype": "ask for {label} and use dtype {dtype}: {label}",
    "nearest": "the nearest dims with a backend here are {near} ({block}); for {dims} add a block",
}
#: Versions that people have and no rule names.
WIDESPREAD = {"flash-attn": ("2.8.3",), "vllm": ("0.33.0",), "tokenspeed-mla": ("2.0.4",)}
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
        self.packages = {name: _versions(matrix, name) for name in matrix.distributions}
        self.strings, self.reasons, self.states = Table(), Table(), Table()
        self.variants, self.records, self.grids = Table(), Table(), Table()
        self._machines = list(self._machines_of_one_package())
        self._widths = [(qk, v) for qk in range(STEP, WIDEST + 1, STEP) for v in range(STEP, WIDEST + 1, STEP)]
        self._fits: dict[tuple[int, int | None], list[Fit | None]] = {}

    def data(self) -> dict[str, Any]:
        """Everything that the page looks up. Numbers point into ``strings``, ``reasons`` and the other tables."""
        matrix = self.matrix
        arches = matrix.architectures.values()
        cells = {a.id: {b.name: self._cells(a.id, b.dims) for b in matrix.blocks.values()} for a in arches}
        others = {a.id: self._other_cells(a.id) for a in arches}
        return {
            "fingerprint": matrix.fingerprint,
            "schema_version": matrix.schema_version,
            "step": STEP,
            "widest": WIDEST,
            "max_hints": MAX_HINTS,
            "texts": TEXTS,
            "cured": sorted(_CURED_BY_AN_INSTALL),
            "meanings": MEANINGS,
            "architectures": {a.id: [a.name, list(a.products), list(a.spellings)] for a in arches},
            "kernels": [[k.name, k.backend, k.fa_version] for k in matrix.kernels.values()],
            "fa_versions": list(matrix.fa_versions),
            "dtypes": list(DTYPES),
            "packages": list(self.packages.items()),
            "blocks": {b.name: list(b.dims) for b in matrix.blocks.values()},
            "models": dict(_models(matrix)),
            "cells": cells,
            "others": others,
            "grids": self.grids.values,
            "records": self.records.values,
            "variants": self.variants.values,
            "states": self.states.values,
            "reasons": self.reasons.values,
            "strings": self.strings.values,
            "profiles": list(map(_profile, matrix.profiles)),
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
        """`_cells` for dims without a block: of each kernel [grid of classes, the record of each class]."""
        classes = {kernel.name: list(self._classes(kernel, arch)) for kernel in self.matrix.kernels.values()}
        known: dict[str, dict[Hashable, int]] = {name: {} for name in classes}
        for i, (qk, v) in enumerate(self._widths):
            if any(of_pair[i] not in known[name] for name, of_pair in classes.items()):
                records = self._records(arch, self._without_block(qk, v))
                for name, of_pair in classes.items():
                    known[name].setdefault(of_pair[i], records[name])
        some = self._without_block(STEP, STEP)
        kernels = []
        for cell in self.matrix.cells(arch, some):
            numbers = {which: number for number, which in enumerate(known[cell.kernel.name])}
            grid = ((numbers[which], len(list(run))) for which, run in groupby(classes[cell.kernel.name]))
            runs = " ".join(f"{number}x{length}" for number, length in grid)
            kernels.append([self.grids(runs), list(known[cell.kernel.name].values())])
        return [*self._order(arch, some), kernels]

    def _classes(self, kernel: Kernel, arch: str) -> Iterator[Hashable]:
        """What the sheets say of each pair of widths; where they say the same, the engine does."""
        limit = self.matrix.limit(kernel.name, arch)
        fits = self._fits_of(limit, self.matrix.architectures[arch].shared_memory_bytes)
        bad = [entry for entry in kernel.known_bad if arch in entry.arch]
        packages = [versions.canonical(provider.distribution) for provider in kernel.providers]
        for (qk, v), fit in zip(self._widths, fits, strict=True):
            dims = MLADimensions(qk, 0, v)
            proof = self.matrix.proof(kernel.name, arch, dims)
            proofs = [] if proof == "source" else [self.matrix.proof(kernel.name, arch, dims, p) for p in packages]
            yield fit, tuple(entry.concerns(arch, dims) for entry in bad), proof, *proofs

    def _fits_of(self, limit: Limit | None, smem: int | None) -> list[Fit | None]:
        key = (id(limit), smem)
        if key not in self._fits:
            self._fits[key] = [limit.fit(qk, v, smem) if limit else None for qk, v in self._widths]
        return self._fits[key]

    def _without_block(self, qk: int, v: int) -> MLADimensions:
        """Dims with these widths that no block has."""
        every = (MLADimensions(qk - rope, rope, v) for rope in range(qk + 1))
        return next(dims for dims in every if self.matrix.block_for(dims) is None)

    # ---- what the engine says -------------------------------------------------------------------------------------

    def _ask(
        self, arch: str, dims: MLADimensions, dtype: str, installed: dict[str, str] | None, pin: int | None = None
    ) -> dict[str, Verdict]:
        decision = decide(Request(dims, dtype, pin), Environment(arch, installed), self.matrix)
        return {verdict.candidate.kernel: verdict for verdict in decision.verdicts}

    def _records(self, arch: str, dims: MLADimensions) -> dict[str, int]:
        """kernel -> the number of everything the engine says about it."""
        pinned = [self._ask(arch, dims, DTYPES[0], None, pin) for pin in (None, *self.matrix.fa_versions)]
        bare = self._ask(arch, dims, DTYPES[0], {})
        by_dtype = [self._variants(arch, dims, dtype) for dtype in DTYPES]
        records = {}
        for number, name in enumerate(self.matrix.kernels):
            c = bare[name].candidate
            unasked = [[r for r in verdicts[name].reasons if r.code == "not-requested"] for verdicts in pinned]
            record = (
                number,
                c.pad_v_to or 0,
                self.strings(c.source),
                self._runs(bare[name]),
                tuple(self._reasons(reasons, arch, dims) for reasons in unasked),
                tuple(variants[name] for variants in by_dtype),
            )
            records[name] = self.records(record)
        return records

    def _variants(self, arch: str, dims: MLADimensions, dtype: str) -> dict[str, int]:
        """kernel -> the answers in one dtype: (reasons whatever is installed; the reason without any package; what
        follows where packages are no constraint; the same of each package by version; the install that would help).
        """
        free, bare = self._ask(arch, dims, dtype, None), self._ask(arch, dims, dtype, {})
        always = {name: [r for r in _against(verdict) if r.code != MISSING] for name, verdict in bare.items()}
        missing = {name: [r for r in _against(verdict) if r.code == MISSING] for name, verdict in bare.items()}

        def rest(name: str, verdict: Verdict) -> tuple[Any, ...]:
            tail = _against(verdict)[len(always[name]) :]
            notes = tuple(map(self.strings, verdict.notes))
            return self._reasons(tail, arch, dims), notes, self._runs(verdict)

        offers: dict[str, dict[str, list[int]]] = {name: {} for name in bare}
        for installed in self._machines:
            for name, verdict in self._ask(arch, dims, dtype, installed).items():
                for package in self._providers(name):
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
                    tuple(
                        (names.index(package), tuple(offers[name][package]))
                        for package in self._providers(name)
                        if package in offers[name]
                    ),
                    self._cure(name, arch, dims, dtype) if missing[name] and not always[name] else -1,
                )
            )
            for name in bare
        }

    def _providers(self, kernel: str) -> list[str]:
        """Its packages in the order in which the kernel sheet prefers them."""
        return [versions.canonical(provider.distribution) for provider in self.matrix.kernels[kernel].providers]

    def _machines_of_one_package(self) -> Iterator[dict[str, str]]:
        """Every version of every package, on machines that have at most one package for each kernel."""
        together: list[list[str]] = []
        rivals: dict[str, set[str]] = {name: set() for name in self.packages}
        for packages in map(self._providers, self.matrix.kernels):
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

    def _cure(self, kernel: str, arch: str, dims: MLADimensions, dtype: str) -> int:
        """The requirement that the engine proposes to install for this kernel, tried; -1: none helps."""
        asked = decide(Request(dims, dtype, backend=kernel), Environment(arch, {}), self.matrix)
        verdict = next(v for v in asked.verdicts if v.candidate.kernel == kernel)
        for hint in _tried(asked, verdict):
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
        """How the candidate would run: proof, requirements, dtypes."""
        c = verdict.candidate
        return self.strings(c.proof), tuple(map(self.strings, c.requires)), tuple(map(DTYPES.index, c.dtypes))


MISSING = "kernel-not-installed"


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


def _profile(profile: Profile) -> dict[str, Any]:
    """TFLOP/s, eager and in a graph, by dims, shape and kernel."""
    times: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for reading in profile.readings:
        d, flops = reading.dims, sum(n * n for n in reading.lengths) * reading.heads / 1e6
        flops *= d.qk_head_dim + d.v_head_dim
        alike = len(set(reading.lengths)) == 1
        length = f"x{reading.lengths[0]}" if alike else f" mixed to {max(reading.lengths)}"
        shape = f"{len(reading.lengths)}{length}"
        speed = [round(flops / us, 1) if us else None for us in (reading.eager_us, reading.graph_us)]
        times.setdefault(str(d), {}).setdefault(f"{shape}, {reading.heads} heads", {})[reading.kernel] = speed
    packages = {profile.providers[k]: profile.packages.get(profile.providers[k]) for k in profile.providers}
    return {
        "label": profile.label, "gpu": profile.gpu, "arch": profile.arch, "dtype": profile.dtype,
        "date": profile.date, "packages": packages, "times": times,
    }  # fmt: skip


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


def write(folder: Path, matrix: Matrix) -> None:
    """The explorer, ready to be opened from the file system."""
    (folder / "source").mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "explorer.js", "explorer.css"):
        shutil.copyfile(HERE / name, folder / name)
    data = json.dumps(Export(matrix).data(), separators=(",", ":"), ensure_ascii=False)
    (folder / "data.js").write_text(f"window.MATRIX = {data};\n", encoding="utf-8")
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
