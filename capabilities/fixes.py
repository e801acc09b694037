"""What ``check --fix`` mends: only mechanical things, each file written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mla_prefill.capabilities import checks, load

MODELINE = "# yaml-language-server: $schema=../schema/{kind}.schema.json\n"


def fix(path: Path | None) -> Iterator[str]:
    """Mends the data at ``path`` (None: the shipped data) and names each file that changed."""
    sources = load.gather(path)
    folder = load.DATA_DIR if path is None else path
    for kind, source in sources.files.items():
        if path is not None and not path.is_dir() and source.label != str(path):
            continue  # a single file is checked against the shipped ones, which are not its to change
        if not source.raw.removeprefix(b"\xef\xbb\xbf").startswith(checks.MODELINE):
            target = path if path is not None and path.is_file() else folder / f"{kind}.yaml"
            write(target, MODELINE.format(kind=kind).encode() + source.raw.removeprefix(b"\xef\xbb\xbf"))
            yield str(target)
    if path is None:
        sources = load.gather()
        if not checks.check(sources, notices=False) and checks.compiled_form_is_current(sources):
            write(load.COMPILED, load.compiled_text(sources).encode())
            yield str(load.COMPILED)


def write(path: Path, content: bytes) -> None:
    """Replaces a file in one step: a reader sees the old content or the new, never half of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(content)
    try:
        os.chmod(file.name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
