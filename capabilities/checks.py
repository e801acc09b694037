"""Every rule that CI holds the data to, one small function each.

Names come first: a rule of the second group may rely on every reference being known. All findings of all files are
reported in one run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.findings import Finding, MatrixError, nearest
from mla_prefill.capabilities.load import (
    COMPILED,
    DATA_LABEL,
    KINDS,
    OVERLAYS,
    Sources,
    compiled_text,
    document,
    gather,
)
from mla_prefill.capabilities.matrix import Cell, Matrix, dims_of, fold_arch, fold_product
from mla_prefill.capabilities.model import DTYPES, Block, MLADimensions
from mla_prefill.capabilities.row_order import Misplaced, obstacles, place, ranks
from mla_prefill.capabilities.schema import validate
from mla_prefill.capabilities.source import SourceFile, parse
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

Path = tuple[str | int, ...]
MODELINE = b"# yaml-language-server: $schema="
#: Lists beside the five sheets' own: what rules call them -> the kind of file and the key there.
LISTS = {"not_allowed": ("matrix", "not_allowed")}
#: Where architectures are listed.
SORTED = "matrix.allow not_allowed priorities kernels.limits kernels.providers kernels.known_bad"
Findings = Iterator[Finding]


class Sheets:
    """The parsed files, with iterators over what rules look at: (file, path, value)."""

    #: What they compile to; there once every name is known.
    matrix: Matrix

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def top(self, kind: str) -> Iterator[tuple[SourceFile, str, Any]]:
        """``kind`` is one of KINDS or of LISTS."""
        wanted, key = LISTS.get(kind) or (kind, KINDS[kind])
        for found, source in self.sources.all():
            if found == wanted and key in source.data:
                yield source, key, source.data[key]

    def items(self, kind: str, *below: str) -> Iterator[tuple[SourceFile, Path, Any]]:
        """Each entry of a file, or of the lists ``below`` each entry (``items("kernels", "limits")``)."""
        for source, key, content in self.top(kind):
            entries: Iterable[tuple[Any, Any]] = content.items() if isinstance(content, dict) else enumerate(content)
            for name, entry in entries:
                found: list[tuple[Path, Any]] = [((key, name), entry)]
                for step in below:
                    found = [((*p, step, i), child) for p, e in found for i, child in enumerate(e.get(step) or ())]
                for path, value in found:
                    yield source, path, value

    def listed(self, kind: str, *below: str) -> Iterator[tuple[SourceFile, Path, Any]]:
        """The values of the list (or scalar, or mapping keys) that ``below`` ends in."""
        *lists, leaf = below
        for source, path, entry in self.items(kind, *lists):
            values = entry.get(leaf)
            if isinstance(values, list):
                yield from ((source, (*path, leaf, i), v) for i, v in enumerate(values))
            elif isinstance(values, dict):
                yield from ((source, (*path, leaf, k), k) for k in values)
            elif values is not None:
                yield source, (*path, leaf), values

    def names(self, kind: str) -> list[str]:
        return [name for _, _, content in self.top(kind) for name in content]

    @cached_property
    def kernels(self) -> dict[str, Any]:
        return {name: raw for _, _, content in self.top("kernels") for name, raw in content.items()}

    @cached_property
    def rows(self) -> list[tuple[SourceFile, Path, Any, MLADimensions, list[str]]]:
        """(file, path, row, dims, kernels that the row's backends, fa_version and kernels name)."""
        found = []
        for source, path, row in self.items("matrix", "allow"):
            fa_versions = _listed(row.get("fa_version", []))
            named = [
                name
                for name, kernel in self.kernels.items()
                if kernel["backend"] in row["backends"]
                and ("fa_version" not in kernel or kernel["fa_version"] in fa_versions)
                and (not row.get("kernels") or name in row["kernels"])
            ]
            found.append((source, path, row, dims_of(source.data["matrix"][path[1]]), named))
        return found

    def stated(self, field: str) -> dict[Any, None]:
        """The values of one field of the kernels, each once."""
        return dict.fromkeys(kernel[field] for kernel in self.kernels.values() if field in kernel)

    def requirements(self) -> Iterator[tuple[SourceFile, Path, str]]:
        """Every PEP 508 string."""
        for below in (("limits", "requires"), ("limits", "widths", "requires"), ("known_bad", "version")):
            yield from self.listed("kernels", *below)
        yield from self.listed("matrix", "allow", "requires")


def check(sources: Sources, *, notices: bool = True) -> list[Finding]:
    """All findings, in file order. Errors in an early stage end it there: later rules would only repeat them.

    Without ``notices`` it is what a load needs: errors of the five files, nothing about records.
    """
    return judged(sources, notices=notices)[0]


def judged(sources: Sources, *, notices: bool) -> tuple[list[Finding], Matrix | None]:
    """`check`, with the matrix that it made of them, if it came that far."""
    matrix = None
    findings = list(overlays_are_of_a_kind(sources))
    if not findings:
        for _, source in sources.all():
            findings += parse(source)
    if not findings:
        for kind, source in sources.all():
            findings += validate(source, kind)
    if not findings:
        sheets = Sheets(sources)
        for rule in NAME_RULES:
            findings += rule(sheets)
        if not findings:
            matrix = sheets.matrix = Matrix(document(sources), sources.folder)
            for rule in MEANING_RULES + (NOTICE_RULES if notices else ()):
                findings += rule(sheets)
            if notices:
                from mla_prefill.capabilities.record_checks import check_records

                findings += check_records(sources, matrix)
    return sorted(set(findings)), matrix


def check_path(
    path: str | FilePath | Sequence[str] | None = None, extra: Sequence[str | FilePath] = ()
) -> list[Finding]:
    """`check` of a data folder, of files in place of their shipped namesakes, or of the shipped data (with its
    compiled form). Raises OSError where a path cannot be read."""
    sources = gather(path, extra)
    findings, matrix = judged(sources, notices=True)
    if path is None and extra:  # whoever checks an overlay can do nothing about the shipped data
        shipped = {source.label for source in sources.files.values()}
        findings = [f for f in findings if f.severity == "error" or f.path not in shipped]
    if path is None and not extra and matrix and not any(f.severity == "error" for f in findings):
        findings += compiled_form_is_current(matrix)
    return findings


def compiled_form_is_current(shipped: Matrix) -> list[Finding]:
    """The compiled form beside the shipped data says exactly what its sources say."""
    current = COMPILED.read_bytes() if COMPILED.exists() else b""
    if current == compiled_text(shipped).encode():
        return []
    message = "the compiled form was not made from these sources" if current else "there is no compiled form"
    label = f"{DATA_LABEL}/{COMPILED.name}"
    return [Finding(label, 1, 1, "X380", message, "run: mla-prefill check --fix", fixable=True)]


def overlays_are_of_a_kind(sources: Sources) -> Findings:
    for kind, source in sources.overlays:
        if kind not in OVERLAYS:
            hint = f"put it in place of the shipped {kind}.yaml: --matrix FILE, or a whole data folder"
            message = f"a file of {kind} cannot be laid over the matrix: rows, orders and models can"
            yield source.finding((1, 1), "X315", message, hint)


def require_clean(sources: Sources) -> Matrix:
    """The matrix of these sources. Raises MatrixError with every error."""
    findings, matrix = judged(sources, notices=False)
    if findings or matrix is None:
        raise MatrixError(findings)
    return matrix


# ---- names ------------------------------------------------------------------------------------------------------


def _unknown(values: Iterable[tuple[SourceFile, Path, Any]], known: Sequence[Any], code: str, what: str) -> Findings:
    for source, path, value in values:
        if value not in known:
            mark = source.locate(path, key=path[-1] == value)  # a mapping's key rather than a value
            yield source.finding(mark, code, f"unknown {what} {value!r}", nearest(value, known))


#: Code, what is named, where it is named, and what is declared.
REFERENCES: tuple[tuple[str, str, str, Callable[[Sheets], Iterable[Any]]], ...] = (
    (
        "X301",
        "architecture",
        "kernels.limits.arch kernels.providers.arch kernels.known_bad.arch "
        "matrix.allow.arch not_allowed.arch priorities.arch",
        lambda sheets: sheets.names("architectures"),
    ),
    (
        "X302",
        "kernel",
        "matrix.allow.kernels not_allowed.kernels priorities.order priorities.on_request",
        lambda sheets: sheets.kernels,
    ),
    ("X303", "backend", "matrix.allow.backends", lambda sheets: sheets.stated("backend")),
    ("X304", "FlashAttention version", "matrix.allow.fa_version", lambda sheets: sorted(sheets.stated("fa_version"))),
    (
        "X306",
        "feature",
        "kernels.provides kernels.providers.provides kernels.known_bad.needs",
        lambda sheets: (name for source, _, _ in sheets.top("kernels") for name in source.data.get("features", {})),
    ),
    (
        "X307",
        "dtype",
        "kernels.dtypes kernels.providers.dtypes kernels.limits.dtypes kernels.known_bad.dtypes",
        lambda _: DTYPES,
    ),
    ("X309", "model family", "models.like", lambda sheets: sheets.names("models")),
)


def names_are_declared(sheets: Sheets) -> Findings:
    for code, what, places, declared in REFERENCES:
        known = list(declared(sheets))
        for named in places.split():
            yield from _unknown(sheets.listed(*named.split(".")), known, code, what)


def dims_blocks_are_declared(sheets: Sheets) -> Findings:
    for kind in ("priorities", "not_allowed"):
        listed = (item for item in sheets.listed(kind, "dims") if _beside_the_matrix(item[0], sheets))
        yield from _unknown(listed, sheets.names("matrix"), "X305", "dims block")


def _beside_the_matrix(source: SourceFile, sheets: Sheets) -> bool:
    """False for a shipped file beside a matrix of somebody else's: what it says of blocks not there has no effect."""
    folder, of_matrix = (file.label.rpartition("/")[0] for file in (source, sheets.sources.files["matrix"]))
    return folder != DATA_LABEL or of_matrix == DATA_LABEL


def requirements_are_readable(sheets: Sheets) -> Findings:
    """Requirements are PEP 508 strings about a declared provider's distribution."""
    known = {versions.canonical(p["distribution"]) for k in sheets.kernels.values() for p in k["providers"]}
    for source, path, text in sheets.requirements():
        try:
            name, _ = versions.split(text)
        except ValueError as error:
            yield source.finding(source.locate(path), "X332", str(error), "write NAME>=VERSION")
            continue
        if name not in known:
            yield source.finding(source.locate(path), "X308", f"no kernel comes from {name!r}", nearest(name, known))
    for leaf in ("version", "verified"):
        for source, path, text in sheets.listed("kernels", "providers", leaf):
            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                hint = "write a PEP 440 range such as >=2.6,<3"
                yield source.finding(source.locate(path), "X332", f"{text!r} is not a version range", hint)


def names_belong_to_one_architecture(sheets: Sheets) -> Findings:
    """Compared as they are looked up: without case, blanks and brands, and spellings beside the ids themselves."""
    for leaf, fold in (("products", fold_product), ("spellings", fold_arch)):
        owner = {fold(name): name for name in sheets.names("architectures")} if leaf == "spellings" else {}
        for source, path, name in sheets.listed("architectures", leaf):
            first = owner.setdefault(fold(str(name)), str(path[1]))
            if first != path[1]:
                message = f"{name!r} already belongs to {first}"
                yield source.finding(source.locate(path), "X313", message, "keep it with one architecture")


def limits_are_unique(sheets: Sheets) -> Findings:
    seen: set[tuple[Any, str]] = set()
    for source, path, arch in sheets.listed("kernels", "limits", "arch"):
        if (path[1], arch) in seen:
            message = f"{path[1]} already has limits for {arch}"
            yield source.finding(source.locate(path), "X314", message, "merge the two limits")
        seen.add((path[1], arch))


def blocks_have_distinct_dims(sheets: Sheets) -> Findings:
    named: dict[Any, tuple[str, SourceFile]] = {}
    by_name: dict[Any, MLADimensions] = {}
    for source, path, block in sheets.items("matrix"):
        mark = source.locate([*path, "dims"])
        try:
            dims = dims_of(block)
        except ValueError as error:
            yield source.finding(mark, "X312", str(error), "state the dims of a real model")
            continue
        first, file = named.setdefault(dims, (str(path[1]), source))
        if file is source and first != path[1]:
            yield source.finding(mark, "X312", f"{path[1]} has the dims of {first}", f"add the rows to {first}")
        if by_name.setdefault(path[1], dims) != dims:
            message = f"{path[1]} is {by_name[path[1]]} in another file, {dims} here"
            yield source.finding(mark, "X312", message, "give this block another name")


# ---- meaning ----------------------------------------------------------------------------------------------------


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def rows_reach_a_kernel(sheets: Sheets) -> Findings:
    """A backend with FlashAttention kernels needs ``fa_version``; one without cannot use it."""
    with_fa = {kernel["backend"] for kernel in sheets.kernels.values() if "fa_version" in kernel}
    for source, path, row, _, named in sheets.rows:
        for i, backend in enumerate(row["backends"]):
            mark = source.locate([*path, "backends", i])
            if backend in with_fa and "fa_version" not in row:
                message = f"{backend} is allowed without saying for which FlashAttention version"
                yield source.finding(mark, "X311", message, "add fa_version: [2, 3, 4] or the ones that run")
            elif backend not in with_fa and "fa_version" in row:
                message = f"{backend} has no FlashAttention version, so this row never applies as written"
                yield source.finding(mark, "X311", message, f"move {backend} to a row without fa_version")
            elif not any(sheets.kernels[name]["backend"] == backend for name in named):
                message = f"no kernel of {backend} is left by kernels and fa_version"
                yield source.finding(mark, "X311", message, "remove the row or widen it")


def cells_are_allowed_once(sheets: Sheets) -> Findings:
    seen: dict[tuple[MLADimensions, str, str], str] = {}
    for source, path, row, dims, named in sheets.rows:
        for i, arch in enumerate(row["arch"]):
            for kernel in named:
                here = f"{source.label}:{source.locate([*path, 'arch', i])[0]}"
                first = seen.setdefault((dims, arch, kernel), here)
                if first != here or row["arch"].index(arch) != i:
                    mark = source.locate([*path, "arch", i])
                    yield source.finding(
                        mark, "X310", f"{kernel} on {arch} for {dims} is already allowed at {first}", "remove one"
                    )
                    break


def allowed_cells_can_run(sheets: Sheets) -> Findings:
    """Allowed but impossible: the row names a kernel that the kernel sheet says cannot take the dims there."""
    matrix = sheets.matrix
    for source, path, row, dims, named in sheets.rows:
        for i, arch in enumerate(row["arch"]):
            mark = source.locate([*path, "arch", i])
            for backend in row["backends"]:
                kernels = [n for n in named if matrix.kernels[n].backend == backend]
                able = [n for n in kernels if matrix.fit(n, arch, dims)]
                # Of a backend without versions any one kernel is enough; a stated FA version or kernel must run.
                stated = bool(row.get("kernels")) or any(matrix.kernels[n].fa_version for n in kernels)
                for name in kernels if stated else [] if able else kernels[:1]:
                    if name not in able:
                        limit = matrix.limit(name, arch)
                        why = f"it takes {limit}" if limit else f"it has no limits for {arch}"
                        hint = f"{why} ({limit.source if limit else matrix.kernels[name].source})"
                        message = f"{backend}/{name} cannot run {_pair(dims)} on {arch}"
                        yield source.finding(mark, "X320", message, hint)


def _own_blocks(sheets: Sheets) -> Iterator[tuple[SourceFile, Path, Block]]:
    """The blocks of the matrix itself. An overlay says what one site wants: what it leaves out is no gap."""
    for source, path, _ in sheets.items("matrix"):
        if source is sheets.sources.files["matrix"]:
            yield source, path, sheets.matrix.blocks[str(path[1])]


def possible_cells_are_allowed(sheets: Sheets) -> Findings:
    """Possible but not allowed, and nobody says why: an opportunity, not an error."""
    matrix = sheets.matrix
    for source, path, block in _own_blocks(sheets):
        missing: dict[str, list[str]] = defaultdict(list)
        for arch in matrix.architectures:
            for cell in matrix.cells(arch, block.dims):
                if _possible(cell) and cell.row is None and cell.not_allowed is None:
                    proof = cell.candidate.proof
                    missing[cell.kernel.name].append(arch if proof == "source" else f"{arch} ({proof})")
        for kernel, arches in missing.items():
            what = f"{matrix.kernels[kernel].label} can run {_pair(block.dims)} on {', '.join(arches)}"
            message = f"{what}, but no row allows it"
            hint = "add a row, or say why not under not_allowed"
            yield source.finding(source.locate(path, key=True), "X321", message, hint, severity="notice")


def _possible(cell: Cell) -> bool:
    return bool(cell.fit and cell.offers)


def exceptions_are_needed(sheets: Sheets) -> Findings:
    """Each arch, kernel and block of a not_allowed entry excuses something that is possible, and that no row allows."""
    matrix = sheets.matrix
    overlays = {source.label for _, source in sheets.sources.overlays}
    for source, path, entry in sheets.items("not_allowed"):
        foreign = overlays - {source.label}  # rows laid over a file do not make it wrong
        possible: set[tuple[str, str]] = set()
        for block in (matrix.blocks[name] for name in entry.get("dims") or matrix.blocks):
            for arch in entry["arch"]:
                for cell in matrix.cells(arch, block.dims):
                    if cell.kernel.name not in entry["kernels"] or not _possible(cell):
                        continue
                    possible |= {("arch", arch), ("kernels", cell.kernel.name), ("dims", block.name)}
                    if cell.row is not None and cell.row.source.rpartition(":")[0] not in foreign:
                        mark = source.locate([*path, "arch", entry["arch"].index(arch)])
                        message = f"{cell.kernel.name} on {arch} for {block.dims} is not allowed, it says here"
                        hint = f"{cell.row.source} allows it: narrow one of the two"
                        yield source.finding(mark, "X323", message, hint)
        for leaf in ("arch", "kernels", "dims"):
            for i, name in enumerate(entry.get(leaf, ())):
                if (leaf, name) not in possible:
                    mark = source.locate([*path, leaf, i])
                    message = f"nothing is excused for {name}: the kernel sheet holds none of it possible"
                    yield source.finding(mark, "X322", message, "remove it from the entry")


def every_block_has_a_backend(sheets: Sheets) -> Findings:
    """Architectures where a block has no backend at all, unless not_allowed says why for all that could run."""
    matrix = sheets.matrix
    for source, path, block in _own_blocks(sheets):
        without = []
        for arch in matrix.architectures:
            cells = matrix.cells(arch, block.dims)
            if not any(c.allowed for c in cells) and not all(c.not_allowed for c in cells if _possible(c)):
                without.append(arch)
        if without:
            message = f"{block.name} has no backend on {', '.join(without)}"
            hint = "add a row, or say why not under not_allowed"
            yield source.finding(source.locate(path, key=True), "X351", message, hint, severity="notice")


def special_orders_differ(sheets: Sheets) -> Findings:
    """An order for some dims says something else than what holds without it: as a rule the architecture's plain one."""
    plain = {a: raw for _, _, raw in sheets.items("priorities") if "dims" not in raw for a in raw["arch"]}
    special: dict[tuple[str, str], Any] = {}
    for source, path, raw in sheets.items("priorities"):
        keys = [(arch, name) for arch in raw["arch"] for name in raw.get("dims", ())]
        without = [special.get((arch, name), plain.get(arch, {})) for arch, name in keys]
        special.update(dict.fromkeys(keys, raw))
        if keys and all(_choice(raw) == _choice(other) for other in without):
            mark = source.locate([*path, "order"])
            yield source.finding(
                mark, "X343", f"the order without dims of {', '.join(raw['arch'])} is the same", "remove it"
            )


def _choice(order: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    return order.get("order", []), order.get("on_request", {})


def lists_are_sorted(sheets: Sheets) -> Findings:
    """Architectures stand in the order of architectures.yaml: decisions do not depend on it, diffs and readers do."""
    rank = ranks(sheets.names("architectures"))
    for lists in SORTED.split():
        for source, path, entry in sheets.items(*lists.split(".")):
            listed = entry.get("arch", [])
            if (ordered := sorted(listed, key=lambda name: rank[name])) != listed:
                hint = f"write [{', '.join(ordered)}]"
                mark = source.locate([*path, "arch"])
                message = "architectures are not in the order of architectures.yaml"
                fixable = _is_one_line_list(source, mark)
                yield source.finding(mark, "X382", message, hint, severity="notice", fixable=fixable)


def misplaced_rows(sheets: Sheets) -> Iterator[tuple[SourceFile, Misplaced]]:
    """Each list of rows that is not in order, with its file."""
    kernels, arches, blocks = ranks(sheets.kernels), ranks(sheets.names("architectures")), ranks(sheets.names("matrix"))
    lists: dict[tuple[SourceFile, Path], list[Any]] = defaultdict(list)
    for source, path, row, _, named in sheets.rows:
        lists[source, path[:-1]].append(place(named, _listed(row.get("fa_version", [])), row["arch"], kernels, arches))
    for source, path, entry in sheets.items("not_allowed"):
        dims = [blocks[name] for name in entry.get("dims", ()) if name in blocks]
        lists[source, path[:-1]].append((*place(entry["kernels"], (), entry["arch"], kernels, arches), dims))
    for (source, path), places in lists.items():
        order = sorted(range(len(places)), key=places.__getitem__)
        if order != list(range(len(places))):
            yield source, Misplaced(path, order)


def rows_are_in_order(sheets: Sheets) -> Findings:
    """Rows stand by kernel, FlashAttention version and architecture (see `row_order`): for readers and diffs, too."""
    by_file: dict[SourceFile, list[Misplaced]] = defaultdict(list)
    for source, rows in misplaced_rows(sheets):
        by_file[source].append(rows)
    for source, lists in by_file.items():
        for rows, obstacle in zip(lists, obstacles(source, lists), strict=True):
            mark, comes_first = rows.marks(source)
            message = "rows are not in order: by kernel as in kernels.yaml, then fa_version, then arch"
            hint = f"the row of line {comes_first[0]} comes before this one"
            hint += f"; move it by hand, since {obstacle}" if obstacle else ""
            yield source.finding(mark, "X384", message, hint, severity="notice", fixable=not obstacle)


def _is_one_line_list(source: SourceFile, mark: tuple[int, int]) -> bool:
    line = source.lines[mark[0] - 1][mark[1] - 1 :]
    return line.startswith("[") and "]" in line


def _pair(dims: MLADimensions) -> str:
    return f"{dims} = (qk {dims.qk_head_dim}, v {dims.v_head_dim})"


def version_ranges_hold_a_version(sheets: Sheets) -> Findings:
    ranges = [(source, path, text, versions.split(text)[1]) for source, path, text in sheets.requirements()]
    for leaf in ("version", "verified"):
        ranges += [(*found, found[-1]) for found in sheets.listed("kernels", "providers", leaf)]
    for source, path, text, specifier in ranges:
        if _is_empty(specifier):
            yield source.finding(source.locate(path), "X330", f"{text!r} holds no version", _why_empty(specifier))
    for source, path, row, dims, named in sheets.rows:
        for requirement in row.get("requires", ()):
            name, specifier = versions.split(requirement)
            for kernel, provider in ((k, p) for k in named for p in sheets.matrix.kernels[k].providers):
                same = versions.canonical(provider.distribution) == name
                told = _is_empty(specifier) or _is_empty(provider.version)
                if same and not told and _is_empty(provider.version, specifier):
                    message = f"{requirement!r} and {kernel}'s own {provider.version!r} exclude each other"
                    mark = source.locate([*path, "requires"])
                    yield source.finding(mark, "X330", message, f"for {dims}: see {provider.source}")


def _is_empty(*specifiers: str) -> bool:
    return versions.intersect(specifiers) is None


def _why_empty(specifier: str) -> str:
    """The first two clauses that no version satisfies together, or the one that none satisfies."""
    clauses = [clause.strip() for clause in specifier.split(",")]
    for clause in filter(_is_empty, clauses):
        return f"no version satisfies {clause}"
    for one, other in itertools.combinations(clauses, 2):
        if _is_empty(one, other):
            return f"{one} and {other} exclude each other"
    return "its clauses together exclude every version"


def bounds_admit_prereleases(sheets: Sheets) -> Findings:
    """A bare ``>=4`` leaves out 4.0.0b36: refused for packages whose known versions are pre-releases."""
    texts = [(s, p, *versions.split(t)) for s, p, t in sheets.requirements()]
    for source, path, provider in sheets.items("kernels", "providers"):
        if "version" in provider:
            name = versions.canonical(provider["distribution"])
            texts.append((source, (*path, "version"), name, provider["version"]))
    beta = {name for _, _, name, spec in texts for s in SpecifierSet(spec) if _prerelease(s.version)}
    for source, path, name, spec in texts:
        for clause in SpecifierSet(spec):
            if name in beta and clause.operator == ">=" and not _prerelease(clause.version):
                hint = f"write >={clause.version}b0"
                message = f">={clause.version} leaves out the pre-releases that {name} publishes"
                yield source.finding(source.locate(path), "X331", message, hint)


def _prerelease(version: str) -> bool:
    try:
        return Version(version.removesuffix(".*")).pre is not None
    except InvalidVersion:
        return False


def orders_name_what_runs(sheets: Sheets) -> Findings:
    """Every kernel has one place in each order of an architecture it runs on, and none in any other."""
    matrix = sheets.matrix
    for source, path, raw in sheets.items("priorities"):
        placed = [*raw["order"], *raw.get("on_request", {})]
        for i, arch in enumerate(raw["arch"]):
            for name in matrix.kernels:
                if matrix.limit(name, arch) and name not in placed:
                    message = f"{name} runs on {arch} but is not in its order"
                    hint = "add it to order, or to on_request with the reason"
                    yield source.finding(source.locate([*path, "arch", i]), "X340", message, hint)
        for j, name in enumerate(placed):
            if not any(matrix.limit(name, arch) for arch in raw["arch"]):
                at = (*path, "order", j) if j < len(raw["order"]) else (*path, "on_request")
                yield source.finding(source.locate(at), "X341", f"{name} runs on none of {raw['arch']}", "remove it")
            if placed.index(name) != j:
                mark = source.locate((*path, "order", placed.index(name)))
                yield source.finding(mark, "X341", f"{name} has two places", "keep one")


def architectures_have_one_order(sheets: Sheets) -> Findings:
    """Exactly one for all dims, and at most one for each dims; an overlay may have its own, and two may not differ."""
    dims = {name: block.dims for name, block in sheets.matrix.blocks.items()}
    first: dict[Any, tuple[SourceFile, Path]] = {}
    for source, path, raw in sheets.items("priorities"):
        laid_over = source is not sheets.sources.files["priorities"]
        for (i, arch), name in itertools.product(enumerate(raw["arch"]), raw.get("dims", (None,))):
            file, other = first.setdefault((arch, dims.get(name, name), laid_over), (source, path))
            if (file, other) != (source, path):
                code, what = ("X344", f"{name} on {arch}") if name else ("X342", arch)
                message = f"{what} has a second order; the first is at {file.at(*other)}"
                yield source.finding(source.locate([*path, "arch", i]), code, message, "keep one of the two")
    for source, path, _ in sheets.items("architectures"):
        if not {(path[1], None, False), (path[1], None, True)} & first.keys():
            mark = source.locate(path, key=True)
            yield source.finding(mark, "X342", f"{path[1]} has no order", "add it to an order of priorities.yaml")


def models_have_a_block(sheets: Sheets) -> Findings:
    known = {dims_of(block) for _, _, block in sheets.items("matrix")}
    for source, path, family in sheets.items("models"):
        dims = family.get("dims") if _beside_the_matrix(source, sheets) else None
        if dims is not None and family.get("is_mla", True) and tuple(dims) not in known:
            message = f"{path[1]} has dims {tuple(dims)}, which no block of the matrix has"
            yield source.finding(source.locate([*path, "dims"]), "X350", message, "add a block for them")


def files_name_their_schema(sheets: Sheets) -> Findings:
    for kind, source in sheets.sources.files.items():
        if not source.raw.removeprefix(b"\xef\xbb\xbf").startswith(MODELINE):
            hint = f"first line: # yaml-language-server: $schema=../schema/{kind}.schema.json"
            yield source.finding((1, 1), "X381", "no editor modeline", hint, severity="notice", fixable=True)


Rule = Callable[[Sheets], Iterable[Finding]]
NAME_RULES: tuple[Rule, ...] = (
    names_are_declared,
    dims_blocks_are_declared,
    requirements_are_readable,
    names_belong_to_one_architecture,
    limits_are_unique,
    blocks_have_distinct_dims,
)
MEANING_RULES: tuple[Rule, ...] = (
    rows_reach_a_kernel,
    cells_are_allowed_once,
    allowed_cells_can_run,
    version_ranges_hold_a_version,
    bounds_admit_prereleases,
    orders_name_what_runs,
    architectures_have_one_order,
    models_have_a_block,
)
NOTICE_RULES: tuple[Rule, ...] = (
    possible_cells_are_allowed,
    exceptions_are_needed,
    every_block_has_a_backend,
    special_orders_differ,
    lists_are_sorted,
    rows_are_in_order,
    files_name_their_schema,
)
