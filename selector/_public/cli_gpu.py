"""The commands that measure: verify and bench."""

from __future__ import annotations

import argparse
import json
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
    if options.build_only:
        return _build(options, matrix)
    path = options.output

    def save(so_far: dict[str, Any]) -> None:
        nonlocal path
        path = sweep.written(so_far, path)  # the first time a name that is free, then the same file again

    wanted = sweep.Wanted(*cells(options, matrix), [dtype_name(d) for d in options.dtype or ()])
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
    progress(f"evidence: {path}")
    return FINE if sweep.all_fine(record) else NEGATIVE


def _build(options: argparse.Namespace, matrix: Matrix) -> int:
    """Builds instead of runs; needs no GPU."""
    from mla_prefill.backends import builds
    from mla_prefill.backends import verify as sweep

    arches = [matrix.arch(arch) for given in options.arch or () for arch in given.split(",")] or None
    proven = builds.prove(matrix, arches, progress)
    if options.format == "json":
        print(json.dumps(proven, indent=2))
    for record in proven:
        if options.format == "text":
            print(sweep.build_table(record))
        progress(f"evidence: {sweep.written(record, options.output)}")
    if not proven:
        progress("mla-prefill: nothing could be built, and no installed binary could be asked")
    return FINE if proven and all(map(sweep.all_built, proven)) else NEGATIVE


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
    path = records.target("measured", f"{environment.device or arch.id} {timing.today()}", options.output)
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
        save=lambda profile: records.write(path, records.lined(profile, "readings")),
    ).run()
    for text in result.skipped:
        progress(f"skipped: {text}")
    if not result.profile["readings"]:
        progress("mla-prefill: nothing could be timed")
        return NEGATIVE
    profile = Profile(str(path), result.profile)
    lost = timing.losses(profile, matrix, environment)
    if options.format == "json":
        print(json.dumps({"profile": result.profile, "skipped": result.skipped, "losses": timing.as_dicts(lost)}))
    else:
        print(timing.table(profile), timing.summary(profile, lost), sep="\n\n")
    records.write(path.with_suffix(".svg"), plot.svg(profile))
    progress(f"profile: {path}, plot: {path.with_suffix('.svg')}")
    return FINE
