"""From files to a `Matrix`: gathering, the normalised document, its compiled form, and `load_matrix`."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_prefill.capabilities.matrix import Matrix

if TYPE_CHECKING:  # a query answered from the compiled form reads no YAML, so it need not import PyYAML
    from mla_prefill.capabilities.source import SourceFile

DATA_DIR = Path(__file__).parent / "data"
DATA_LABEL = "capabilities/data"
COMPILED = DATA_DIR / "compiled.json"
#: The group of entry points by which an installed package names the module of a kernel of its own.
ENTRY_POINTS = "mla_prefill.backends"
#: File stem -> its top-level key. Also the order in which files are hashed.
KINDS = {
    "architectures": "architectures",
    "kernels": "kernels",
    "matrix": "matrix",
    "priorities": "orders",
    "models": "models",
}
#: What a file may be that is laid over a matrix. The other two hold facts, which one site does not have to itself.
OVERLAYS = ("matrix", "priorities", "models")
#: Where the document keeps the place of an item, under the key "@".
_PLACED = (
    ("kernels", "*"),
    ("kernels", "*", "providers", "*"),
    ("kernels", "*", "limits", "*"),
    ("kernels", "*", "known_bad", "*"),
    ("matrix", "*"),
    ("matrix", "*", "allow", "*"),
    ("not_allowed", "*"),
    ("orders", "*"),
)


@dataclass
class Sources:
    """The files one matrix is made of: one of each kind, and overlays of rows, orders or models."""

    files: dict[str, SourceFile]
    overlays: list[tuple[str, SourceFile]] = field(default_factory=list)
    evidence: list[SourceFile] = field(default_factory=list)
    measured: list[SourceFile] = field(default_factory=list)
    folder: Path = DATA_DIR
    no_files: list[str] = field(default_factory=list)  # labels of what is named as a record and is no file

    def all(self) -> Iterator[tuple[str, SourceFile]]:
        """(kind, file) of everything, overlays last."""
        yield from self.files.items()
        yield from self.overlays

    def fingerprint(self) -> str:
        blobs = [(kind, source.raw) for kind, source in self.all()]
        records = [("evidence", self.evidence), ("measured", self.measured)]
        return _fingerprint(blobs + [(kind, source.raw) for kind, sources in records for source in sources])


def _fingerprint(blobs: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for kind, raw in blobs:
        digest.update(f"{kind}\0{len(raw)}\0".encode())
        digest.update(raw)
    return digest.hexdigest()


def _records(folder: Path, kind: str) -> list[Path]:
    """The JSON files of ``evidence`` or ``measured``: no folder or pipe of such a name, which `check` reports."""
    return [path for path in _named_as_records(folder, kind) if path.is_file()]


def _named_as_records(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("*.json"))


def shipped_fingerprint() -> str:
    """The fingerprint of the data folder as it stands on disk: a few file reads, no parsing."""
    blobs = [(kind, (DATA_DIR / f"{kind}.yaml").read_bytes()) for kind in KINDS]
    kinds = ("evidence", "measured")
    return _fingerprint(blobs + [(kind, path.read_bytes()) for kind in kinds for path in _records(DATA_DIR, kind)])


def in_checkout() -> bool:
    """Whether the shipped data lies in a checkout, where it is there to be changed."""
    return (DATA_DIR.parent.parent / "pyproject.toml").is_file()


def together(paths: Iterable[str]) -> list[list[str]]:
    """Which of these are judged at once: each folder alone; files of different kinds beside each other, those of one
    folder where a kind is there twice. Raises OSError: a path cannot be read.
    """
    from mla_prefill.capabilities.source import read_file

    alone = [[path] for path in paths if Path(path).is_dir()]
    files = [(kind_of(read_file(Path(path)), Path(path)), path) for path in paths if [path] not in alone]
    if len({kind for kind, _ in files}) == len(files):
        return [*alone, [path for _, path in files]] if files else alone
    groups: dict[tuple[Path, int], list[str]] = {}
    for i, (kind, path) in enumerate(files):
        earlier = [kind for kind, other in files[:i] if Path(other).parent == Path(path).parent].count(kind)
        groups.setdefault((Path(path).parent, earlier), []).append(path)
    return alone + list(groups.values())


def gather(path: str | Path | Sequence[str] | None = None, extra: Sequence[str | Path] = ()) -> Sources:
    """Reads (but does not parse) the files that make a matrix.

    Args:
        path: None for the shipped data, a folder with all five files, or one file (or several of different kinds) that
            stands in for its namesake among the shipped data.
        extra: files of rows, orders or models to lay over it.

    Raises:
        OSError: a path cannot be read.
    """
    from mla_prefill.capabilities.source import read_file

    folder, label = DATA_DIR, DATA_LABEL
    replaced: dict[str, SourceFile] = {}
    for chosen in named(path):
        if chosen.is_dir():
            folder, label = chosen, str(chosen)
        else:
            source = read_file(chosen)
            replaced[kind_of(source, chosen)] = source
    files = {kind: replaced.get(kind) or read_file(folder / f"{kind}.yaml", f"{label}/{kind}.yaml") for kind in KINDS}
    if folders := [str(p) for p in extra if Path(p).is_dir()]:
        raise IsADirectoryError(errno.EISDIR, "a folder; only files are laid over, --matrix takes a folder", folders[0])
    overlays = [(kind_of(source, Path(p)), source) for p in extra for source in [read_file(Path(p))]]
    evidence, measured = (
        [read_file(p, f"{label}/{kind}/{p.name}") for p in _records(folder, kind)] for kind in ("evidence", "measured")
    )
    no_files = [
        f"{label}/{kind}/{p.name}"
        for kind in ("evidence", "measured")
        for p in _named_as_records(folder, kind)
        if not p.is_file()
    ]
    return Sources(files, overlays, evidence, measured, folder, no_files)


def named(path: str | Path | Sequence[str] | None) -> list[Path]:
    """The paths in what `gather` takes."""
    return [] if path is None else [Path(path)] if isinstance(path, str | Path) else list(map(Path, path))


def kind_of(source: SourceFile, path: Path) -> str:
    """Which of the five files this is: by its name, else by a top-level key at the start of a line, else a matrix."""
    if path.stem in KINDS:
        return path.stem
    lines = {line.split(b":", 1)[0].strip() for line in source.raw[: 1 << 20].splitlines() if line[:1].isalpha()}
    return next((kind for kind, key in KINDS.items() if key.encode() in lines), "matrix")


def document(sources: Sources) -> dict[str, Any]:
    """The normalised, JSON-able content of checked sources: what `Matrix` is built from, and the compiled form."""
    from mla_prefill.capabilities.evidence import proofs
    from mla_prefill.capabilities.profiles import readable

    merged: dict[str, Any] = {"schema_version": 1, "fingerprint": sources.fingerprint()}
    for kind, source in sources.all():
        key = KINDS[kind]
        content = _plain(source, source.data[key], (key,))
        if key not in merged:
            merged[key] = content
        elif kind == "matrix":
            for name, block in content.items():
                known = merged[key].setdefault(name, block)
                if known is not block:
                    known["allow"] = known["allow"] + block["allow"]
        elif kind == "priorities":
            merged[key] = merged[key] + content  # of two for the same arch and dims the later one counts
        else:
            merged[key] = {**merged[key], **content}
        if kind == "matrix":
            why_not = _plain(source, source.data.get("not_allowed", []), ("not_allowed",))
            merged["not_allowed"] = merged.get("not_allowed", []) + why_not
        if kind == "kernels":
            merged["features"] = dict(source.data.get("features", {}))
    merged["measured"] = [[source.label, Path(source.label).name] for source in sources.measured]
    merged["proof"] = {}
    merged["proof"] = proofs(sources.evidence, readable(sources.measured), Matrix(merged))
    return merged


def _plain(source: SourceFile, node: Any, path: tuple[str | int, ...]) -> Any:
    """Plain dicts and lists of a node, with "@" (file:line) on the items that answers refer to."""
    if isinstance(node, dict):
        plain = {key: _plain(source, value, (*path, key)) for key, value in node.items()}
        if any(_matches(path, pattern) for pattern in _PLACED):
            plain["@"] = source.at(*path)
        return plain
    if isinstance(node, list):
        return [_plain(source, value, (*path, i)) for i, value in enumerate(node)]
    return node


def _matches(path: tuple[str | int, ...], pattern: tuple[str, ...]) -> bool:
    return len(path) == len(pattern) and all(p in ("*", step) for p, step in zip(pattern, path, strict=True))


def load_matrix(path: str | Path | None = None, extra: Sequence[str | Path] = ()) -> Matrix:
    """Reads, validates, cross-checks and compiles a matrix.

    The shipped data is answered from its compiled form, which parses no YAML and validates nothing twice, as long as
    that form was made from exactly these sources; a changed source is read in full.

    Args:
        path: None for the shipped data, a data folder, or one file in place of its shipped namesake.
        extra: overlays: files of rows, orders or models with the same checks; an answer says which file it is from.

    Raises:
        MatrixError: with every finding of every file.
        OSError: a path cannot be read.
    """
    if path is None and not extra and (compiled := _read_compiled()) is not None:
        return Matrix(compiled, DATA_DIR)
    from mla_prefill.capabilities.checks import require_clean

    return require_clean(gather(path, extra))


def importable(modules: Iterable[str]) -> dict[str, bool]:
    """Which modules of a kernel sheet may be imported: those that the shipped sheet names, and those that an installed
    package registers as entry points of the group ``mla_prefill.backends``. No YAML file alone makes anything be
    imported, whoever wrote it.
    """
    shipped, asked = _shipped_modules(), dict.fromkeys(modules)
    registered: set[str] = set()
    if not shipped.issuperset(asked):
        from importlib.metadata import entry_points  # reads every installed package's metadata

        registered = {entry.module for entry in entry_points(group=ENTRY_POINTS)}
    return {module: module in shipped or module in registered for module in asked}


@functools.cache
def _shipped_modules() -> frozenset[str]:
    return frozenset(provider.module for kernel in load_matrix().kernels.values() for provider in kernel.providers)


def _read_compiled() -> dict[str, Any] | None:
    try:
        compiled: dict[str, Any] = json.loads(COMPILED.read_bytes())
    except (OSError, ValueError):
        return None
    return compiled if compiled.get("fingerprint") == shipped_fingerprint() else None


def compiled_text(shipped: Matrix) -> str:
    """The text of ``compiled.json``."""
    return json.dumps(shipped.document, separators=(",", ":"), sort_keys=False) + "\n"
