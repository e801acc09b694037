"""The commands that measure: verify and bench."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_prefill.cli_options import (
    FINE,
    NEGATIVE,
    UsageError,
    cells,
    matrix_of,
    overrides,
    progress,
)

if TYPE_CHECKING:
    from mla_prefill import Matrix
    from mla_prefill.backends.verify import Wanted


def verify(options: argparse.Namespace) -> int:
    from mla_prefill.backends import require_torch
    from mla_prefill.backends import verify as sweep

    matrix = matrix_of(options)
    if options.arch and not options.build_only:
        raise UsageError("--arch goes with --build-only: without it, verify runs on the GPU at hand")
    from mla_prefill import Environment
    from mla_prefill.selector.request import dtype_name

    require_torch()
    from mla_prefill.backends import records

    records.check_target("evidence", options.output)
    wanted = sweep.Wanted(*cells(options, matrix), [dtype_name(d) for d in options.dtype or ()])
    if options.build_only:
        return _build(options, matrix, wanted)
    path = options.output

    def save(so_far: dict[str, Any]) -> None:
        nonlocal path
        path = sweep.written(so_far, path)  # the first time a name that is free, then the same file again

    record = sweep.verify(
        matrix,
        Environment.detect(matrix.distributions),
        wanted,
        setup={"matrix": options.matrix or overrides().matrix, "extra": options.extra},
        timeout_s=options.timeout,
        jobs=options.jobs,
        report=progress,
        save=save,
    )
    print(json.dumps(record, indent=2) if options.format == "json" else sweep.table(record))
    save(record)
    progress(f"evidence: {path}")
    return FINE if sweep.all_fine(record) else NEGATIVE


def _build(options: argparse.Namespace, matrix: Matrix, wanted: Wanted) -> int:
    """Builds instead of runs; needs no GPU."""
    from mla_prefill.backends import builds
    from mla_prefill.backends import verify as sweep

    if options.jobs is not None:
        raise UsageError("--jobs is for a run on GPUs; --build-only compiles in as many processes as it may")
    if cannot := [kernel for kernel in wanted.kernels if kernel not in builds.KERNELS]:
        raise UsageError(f"--build-only does not build {', '.join(cannot)}, only {', '.join(builds.KERNELS)}")
    arches = [matrix.arch(arch) for given in options.arch or () for arch in given.split(",")] or None
    missing: list[str] = []
    how = builds.Building(progress, wanted, options.timeout, missing.append)
    proven = builds.prove(matrix, arches, how, lambda so_far: _keep_all(so_far, options.output))
    if options.format == "json":
        print(json.dumps(proven, indent=2))
    else:
        for record in proven:
            print(sweep.build_table(record))
    _keep_all(proven, options.output)
    if not proven:
        missing.append("nothing could be built, and no installed binary could be asked")
    else:
        missing += sweep.not_proven(proven, arches or (), wanted.kernels)
    for text in missing:
        progress(f"mla-prefill: not proven: {text}")
    return NEGATIVE if missing or not all(map(sweep.all_built, proven)) else FINE


def _keep_all(proven: list[dict[str, Any]], output: str | None) -> None:
    """Each record in a file of its own; one that cannot be written costs no other."""
    from mla_prefill.backends import verify as sweep

    lost = []
    for number, record in enumerate(proven):
        try:
            progress(f"evidence: {sweep.written(record, output, beside=number > 0)}")
        except ValueError as error:
            lost.append(str(error))
    if lost:
        raise UsageError("; ".join(lost))


def bench(options: argparse.Namespace) -> int:
    from mla_prefill import Environment
    from mla_prefill.backends import require_torch

    require_torch()
    from mla_prefill.backends import bench as timing
    from mla_prefill.backends import plot, records
    from mla_prefill.capabilities.profiles import Profile

    matrix = matrix_of(options)
    kernels, wanted = cells(options, matrix)
    records.check_target("measured", options.output, ".svg")
    environment = Environment.detect(matrix.distributions)
    arch = matrix.architectures[matrix.arch(environment.arch)]
    path, stem = options.output, f"{environment.device or arch.id} {timing.today()}"

    def save(so_far: dict[str, Any]) -> None:
        nonlocal path
        path = records.keep("measured", stem, records.lined(so_far, "readings"), path)  # as in verify

    result = timing.Bench(
        matrix,
        environment,
        timing.grid_for(arch.vendor != "cpu", options.quick),
        kernels=kernels,
        dims=wanted,
        layers=options.layers,
        budget_s=options.budget,
        command=timing.command(options.quick, options.layers, kernels, wanted),
        report=progress,
        save=save,
    ).run()
    for text in result.skipped:
        progress(f"skipped: {text}")
    if not result.profile["readings"]:
        progress("mla-prefill: nothing could be timed")
        return NEGATIVE
    profile = Profile("this profile", result.profile)
    lost = timing.losses(profile, matrix, environment)
    if options.format == "json":
        print(json.dumps({"profile": result.profile, "skipped": result.skipped, "losses": timing.as_dicts(lost)}))
    else:
        print(timing.table(profile), timing.summary(profile, lost), sep="\n\n")
    save(result.profile)
    picture = Path(path).with_suffix(".svg")
    records.write(picture, plot.svg(profile))
    progress(f"profile: {path}, plot: {picture}")
    return FINE
