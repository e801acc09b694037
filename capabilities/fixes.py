"""What ``check --fix`` mends: only mechanical things, each file written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mla_prefill.capabilities import checks, load
from mla_prefill.capabilities.findings import Finding
from mla_prefill.capabilities.row_order import Misplaced, move
from mla_prefill.capabilities.source import SourceFile

MODELINE = "# yaml-language-server: $schema=../schema/{kind}.schema.json\n"


def fix(path: str | Path | Sequence[str] | None, extra: Sequence[str | Path] = ()) -> Iterator[str]:
    """Mends the data at ``path`` (see `load.gather`) or, where overlays are given, these; names what changed."""
    sources = load.gather(path, extra)
    findings = [f for f in checks.check(sources) if f.fixable]
    misplaced = list(checks.misplaced_rows(checks.Sheets(sources))) if any(f.code == "X384" for f in findings) else []
    for kind, source, target in _own(sources, load.named(path), extra):
        if not (own := [f for f in findings if f.path == source.label]):
            continue
        write(target, mended(source, kind, own, [rows for file, rows in misplaced if file is source]))
        yield str(target)
    if path is None and not extra:
        errors, matrix = checks.judged(load.gather(), notices=False)
        if matrix and not errors and checks.compiled_form_is_current(matrix):
            write(load.COMPILED, load.compiled_text(matrix).encode())
            yield str(load.COMPILED)


def _own(
    sources: load.Sources, paths: Sequence[Path], extra: Sequence[str | Path]
) -> Iterator[tuple[str, SourceFile, Path]]:
    """(kind, file, where it is) of what the caller named: the sheets it is checked against are not its to change."""
    if extra:
        yield from ((kind, source, Path(p)) for (kind, source), p in zip(sources.overlays, extra, strict=True))
        return
    for kind, source in sources.files.items():
        if not any(path.is_file() for path in paths):
            yield kind, source, sources.folder / f"{kind}.yaml"
        elif Path(source.label) in paths:
            yield kind, source, Path(source.label)


def mended(source: SourceFile, kind: str, findings: Sequence[Finding], misplaced: Iterable[Misplaced] = ()) -> bytes:
    """The file's bytes with architectures and rows in order and a modeline; nothing else moves."""
    lines = list(source.lines)
    for finding in sorted(findings, reverse=True):
        if finding.code == "X382":
            line, start = lines[finding.line - 1], finding.column - 1
            end = line.index("]", start) + 1
            lines[finding.line - 1] = line[:start] + finding.hint.removeprefix("write ") + line[end:]
    movable = {(finding.line, finding.column) for finding in findings if finding.code == "X384"}
    for rows in misplaced:
        if rows.marks(source)[0] in movable:
            move(lines, source.at_path(rows.path), rows.order)
    modeline = any(finding.code == "X381" for finding in findings)
    head = MODELINE.format(kind=kind) if modeline else "\ufeff" if source.raw.startswith(b"\xef\xbb\xbf") else ""
    return "".join([head, *lines]).encode()


def write(path: Path, content: bytes) -> None:
    """Replaces a file, or what a link leads to, in one step: a reader sees the old content or the new, never half.

    Raises ValueError where it cannot be written.
    """
    target = path.resolve()
    try:
        file = tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False)  # noqa: SIM115
        try:
            with file:
                file.write(content)
            os.chmod(file.name, target.stat().st_mode & 0o777 if target.exists() else 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    except OSError as error:  # it names the temporary file, which nobody asked for
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
