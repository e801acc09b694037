"""The sources of a matrix as they are somewhere else: a path, or a revision of a git repository.

A revision is read through git's object store into memory: nothing is checked out, no file is touched.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

from mla_prefill.capabilities.findings import MAX_BYTES
from mla_prefill.capabilities.load import DATA_LABEL, KINDS, Sources, gather, kind_of
from mla_prefill.capabilities.source import SourceFile, read_file

RECORDS = ("evidence", "measured")


class RevisionError(ValueError):
    """Neither a path nor something that git knows. One line."""


def sources_of(text: str | None, base: Sources | None = None) -> Sources:
    """The sources that a path, a revision (``main``) or a path in one (``main:site/matrix.yaml``) stands for.

    Args:
        text: a data folder, or a file in place of its shipped namesake; in a revision, ``capabilities/data`` unless it
            names another. None: the shipped data.
        base: lays the one file that ``text`` names over these, instead of putting it in place of its namesake.

    Raises:
        RevisionError, OSError: there is no such thing, or it cannot be read.
    """
    if text is None or (text and Path(text).exists()):
        if base is None:
            return gather(text)
        path = Path(text or "")
        return _laid_over(base, kind_of(file := read_file(path), path), file)
    revision, colon, inside = text.partition(":")
    inside = inside if colon else DATA_LABEL
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not revision or found is None:
        raise RevisionError(f"{text}: no such file or folder, and no revision of a git repository here")
    where = f"{found.decode().strip()}:{inside.rstrip('/')}"
    kind = _git("cat-file", "-t", where)
    if kind is None:
        raise RevisionError(f"{text}: revision {revision} has no {inside}; name another as {revision}:PATH")
    label = f"{revision}:{inside.rstrip('/')}"
    if kind.strip() == b"tree":
        if base is not None:
            raise RevisionError(f"{text}: a folder cannot be laid over the matrix; name a file as {revision}:PATH")
        return _folder(label, _git("archive", "--format=tar", where) or b"")
    file = SourceFile(label, (_git("cat-file", "blob", where) or b"")[: MAX_BYTES + 1])
    kind_name = kind_of(file, Path(inside))
    if base is not None:
        return _laid_over(base, kind_name, file)
    sources = gather()
    sources.files[kind_name] = file
    return sources


def _laid_over(base: Sources, kind: str, file: SourceFile) -> Sources:
    return Sources(dict(base.files), [*base.overlays, (kind, file)], base.evidence, base.measured, base.folder)


def _folder(label: str, archive: bytes) -> Sources:
    """A data folder out of ``git archive``: members are read, never extracted."""
    contents: dict[PurePosixPath, SourceFile] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (stream := tar.extractfile(member)):
                contents[PurePosixPath(member.name)] = SourceFile(f"{label}/{member.name}", stream.read(MAX_BYTES + 1))
    if missing := [f"{kind}.yaml" for kind in KINDS if PurePosixPath(f"{kind}.yaml") not in contents]:
        raise RevisionError(f"{label} is no data folder: it has no {missing[0]}")
    files = {kind: contents[PurePosixPath(f"{kind}.yaml")] for kind in KINDS}
    evidence, measured = (
        [file for path, file in sorted(contents.items()) if path.parent.name == kind and path.suffix == ".json"]
        for kind in RECORDS
    )
    return Sources(files, [], evidence, measured)


def _git(*arguments: str) -> bytes | None:
    """What git answers; None where it says no or there is none."""
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout
    except (OSError, ValueError, subprocess.CalledProcessError):  # ValueError: a NUL byte
        return None
