"""The commands around a change of the matrix: add proposes one, diff shows what it does to decisions."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_prefill.capabilities.source import SourceFile
from mla_prefill.cli_options import (
    FINE,
    NEGATIVE,
    NegativeAnswerError,
    UsageError,
    one_line,
    overrides,
    progress,
    typed_dims,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_prefill import Matrix, MLADimensions
    from mla_prefill.capabilities.load import Sources
    from mla_prefill.capabilities.propose import Proposal


def diff(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities.load import gather
    from mla_prefill.selector import diff as differences

    base = gather() if options.overlay else None
    old, new = (_matrix(options.old, base), _matrix(options.new, base))
    changes = list(differences.diff(old, new))
    if options.format == "json":
        fingerprints = {"old": {"fingerprint": old.fingerprint}, "new": {"fingerprint": new.fingerprint}}
        print(json.dumps({**fingerprints, "changes": [change.to_dict() for change in changes]}, indent=2))
    elif changes:
        print({"text": differences.text, "md": differences.markdown}[options.format](changes))
    return NEGATIVE if changes else FINE


def _matrix(text: str | None, base: Sources | None) -> Matrix:
    """Raises MatrixError with the findings of sources that do not pass their checks."""
    from mla_prefill.capabilities import checks, load
    from mla_prefill.capabilities.revisions import sources_of

    if text is None and base is not None:
        return load.load_matrix()
    return checks.require_clean(sources_of(text, base))


def add(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities import checks, fixes, load, propose
    from mla_prefill.capabilities.matrix import Matrix

    sources = load.gather(options.matrix or overrides().matrix, options.extra)
    path, target = _target(options, sources)
    matrix = checks.require_clean(sources)
    try:
        dims, name, ref = _model(options, matrix)
        proposal = propose.propose(matrix, name, dims)
        _refuse_installed(options, path)
        records = _build(proposal, matrix.document) if options.build else []
    except (propose.NothingToAddError, NegativeAnswerError) as error:
        progress(f"mla-prefill: {error}")
        return NEGATIVE
    if records:  # what did not build is not proposed any more, what did has its proof level
        sources.evidence += [SourceFile("this build", json.dumps(record).encode()) for record in records]
        proposal = propose.propose(Matrix(load.document(sources)), name, dims)
    new = propose.added(sources, target, proposal.block(ref))
    if not options.dry_run:
        fixes.write(path, new.raw)
    if options.format == "json":
        print(json.dumps({"file": str(path), "written": not options.dry_run, **proposal.to_dict(ref)}, indent=2))
    else:
        print(*proposal.block(ref), "", proposal.table(), sep="\n")
    if not options.dry_run:
        progress(f"added {name} to {path}")
        _keep(records, path)
        _next_steps(options, proposal, path)
    return FINE


def _target(options: argparse.Namespace, sources: Sources) -> tuple[Path, SourceFile]:
    """The file that the block goes to, on disk and in the sources (where an overlay that exists is put)."""
    from mla_prefill.capabilities import load, propose
    from mla_prefill.capabilities.source import read_file

    if options.output:
        path = Path(options.output)
        if not path.exists():
            return path, SourceFile(str(path), propose.NEW_FILE)
        overlay = next((s for _, s in sources.overlays if s.label == str(path)), None) or read_file(path)
        if overlay not in (source for _, source in sources.overlays):
            sources.overlays.append((load.kind_of(overlay, path), overlay))
        return path, overlay
    matrix = sources.files["matrix"]
    given = options.matrix or overrides().matrix
    if given and matrix.label == str(Path(given)):
        return Path(given), matrix
    return sources.folder / "matrix.yaml", matrix


def _refuse_installed(options: argparse.Namespace, path: Path) -> None:
    from mla_prefill.capabilities import load

    if path.parent == load.DATA_DIR and not load.in_checkout() and not options.dry_run:
        raise UsageError(
            "the shipped matrix is part of an installed package: give --output FILE for a file of your own, "
            f"--matrix {load.DATA_LABEL} in a checkout, or --dry-run"
        )


def _model(options: argparse.Namespace, matrix: Matrix) -> tuple[MLADimensions, str, str]:
    """(dims, name, reference) of the new block, from the options and the config."""
    from mla_prefill.capabilities.configs import ModelDims, read_config

    asked = typed_dims(options.dims) if options.dims else None
    if options.config is None:
        if asked is None or not options.name or not options.source:
            raise UsageError("give a CONFIG, or --dims with --name and --source")
        return asked, options.name, options.source
    found = read_config(options.config, matrix.families)
    if not isinstance(found, ModelDims):
        raise NegativeAnswerError(f"{options.config}: {found.reason}")
    stated = [found.dims, *(other.dims for other in found.other_dims)]
    if asked and asked not in stated:
        raise UsageError(f"{options.config} states {' and '.join(map(str, stated))}, not {asked}")
    new = [dims for dims in stated if not matrix.block_for(dims)]
    dims = asked or next(iter(new), found.dims)
    for note in (
        *found.notes,
        *(f"{other} has no block either; name it with --dims" for other in new if other != dims),
    ):
        progress(f"note: {note}")
    model, ref = _origin(Path(options.config))
    family = found.family if found.family not in matrix.blocks else None
    name = options.name or family or re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    return dims, name, options.source or ref


def _origin(path: Path) -> tuple[str, str]:
    """(model, reference) of a config: by its folder, its own name, or owner/model@revision in a Hugging Face cache."""
    from mla_prefill.capabilities.configs import FILE_NAMES

    if not path.is_dir() and path.name not in FILE_NAMES:
        return path.stem, path.name
    folder, file = (path, FILE_NAMES[0]) if path.is_dir() else (path.parent, path.name)
    *_, cached, snapshots, revision = ("", "", *folder.absolute().parts)
    if snapshots == "snapshots" and cached.startswith("models--"):
        model = cached.removeprefix("models--").replace("--", "/", 1)
        return model.rpartition("/")[2], f"{model}@{revision[:8]}:{file}"
    return folder.resolve().name, f"{folder.resolve().name}:{file}"


def _build(proposal: Proposal, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Evidence records of the new cells, built for every architecture at once."""
    from mla_prefill.capabilities.matrix import Matrix

    try:
        from mla_prefill.backends import builds
    except ImportError as error:
        raise NegativeAnswerError(f"--build needs PyTorch and flash-attn-4: {one_line(error)}") from None
    records = builds.prove(Matrix({**document, "matrix": proposal.document()}), None, builds.Building(progress))
    if not any(cell["kernel"] == "fa4" for record in records for cell in record["cells"]):
        raise NegativeAnswerError(
            "--build: flash-attn-4 built nothing here (see above); without --build it is added unproven"
        )
    return [{**record, "command": "mla-prefill add --build"} for record in records]


def _keep(records: list[dict[str, Any]], path: Path) -> None:
    """Evidence lies beside the data that it is about."""
    if records:
        from mla_prefill.backends import verify as sweep

        folder = path.parent / "evidence" if (path.parent / "kernels.yaml").exists() else path.parent
        for record in records:
            progress(f"evidence: {sweep.written(record, folder)}")


def _next_steps(options: argparse.Namespace, proposal: Proposal, path: Path) -> None:
    from mla_prefill.capabilities.load import DATA_DIR

    shipped = path.parent == DATA_DIR
    where = f" --extra {path}" if options.output else "" if shipped else f" --matrix {options.matrix or path}"
    dims = ",".join(map(str, proposal.dims))
    steps = [f"mla-prefill check --fix{where}", f"mla-prefill select --arch sm90 --dims {dims}{where} --explain"]
    steps += [] if options.build else [f"mla-prefill verify --build-only{where}"]
    steps += [] if options.source else [f"edit sources in {path}: where can others read the dims?"]
    steps += ["add the family to models.yaml (docs/add-a-model.md)"] if shipped else []
    for i, step in enumerate(steps):
        progress(f"{'next: ' if i == 0 else '      '}{step}")
