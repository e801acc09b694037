"""The commands that ask: select, run, dims, table, env."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from typing import TYPE_CHECKING

from mla_prefill.capabilities.findings import MatrixError, nearest
from mla_prefill.capabilities.load import load_matrix
from mla_prefill.cli_options import (
    FINE,
    NEGATIVE,
    WRONG_USE,
    UsageError,
    decision_of,
    environment_of,
    matrix_of,
    model,
    one_line,
    progress,
    request_of,
    shape_of,
)

if TYPE_CHECKING:
    from mla_prefill import Decision
    from mla_prefill.backends.job import JobResult


def select(options: argparse.Namespace) -> int:
    matrix = matrix_of(options)
    wanted, heads = model(options, matrix)
    request = request_of(options, wanted, shape_of(options, heads))
    decision = decision_of(request, environment_of(options, matrix), matrix)
    if options.format == "json":
        print(json.dumps(decision.to_dict(), indent=2))
    elif options.explain or decision.chosen is None:
        print(decision.explain())
    else:
        print(_decision_text(decision))
    return FINE if decision.chosen else NEGATIVE


def _decision_text(decision: Decision) -> str:
    remarks = [*map("note: {}".format, decision.notes), *map("warning: {}".format, decision.warnings)]
    return "\n".join([decision.one_line().removeprefix("mla-prefill: "), *remarks])


def run(options: argparse.Namespace) -> int:
    from mla_prefill import Environment
    from mla_prefill.backends import require_torch

    matrix = matrix_of(options)
    wanted, heads = model(options, matrix)
    arch = "cpu" if options.device == "cpu" else None
    environment = Environment.detect(matrix.distributions, arch)
    decision = decision_of(request_of(options, wanted), environment, matrix)
    if decision.chosen is None:
        print(
            json.dumps({"decision": decision.to_dict(), "result": None}, indent=2)
            if options.format == "json"
            else decision.explain()
        )
        return NEGATIVE
    warnings.filterwarnings("ignore", module="cutlass")  # what a JIT says of its own arguments
    require_torch()
    from mla_prefill.backends.job import run_chunked_prefill

    result = run_chunked_prefill(
        decision, num_heads=options.heads or heads or 16, seed=options.seed, device=options.device, report=progress
    )
    if options.format == "json":
        print(json.dumps({"decision": decision.to_dict(), "result": result.to_dict()}, indent=2))
    else:
        print(_decision_text(decision), _job_text(result), sep="\n")
    return FINE if result.ok else NEGATIVE


def _job_text(result: JobResult) -> str:
    """What an operator wants of the main job: did it run, was it right, how fast."""
    batch = f"{len(result.sequences)} sequences, {result.new_tokens} new tokens over {result.context_tokens} of context"
    return "\n".join(
        [
            f"backend  {result.backend}, kernel {result.kernel} from {result.provider} on {result.device}",
            f"batch    {batch}, {result.num_heads} heads, {result.dtype}",
            f"error    {result.error:.2e} of out (at most {result.tolerance:.0e}), "
            f"{result.lse_error:.2e} of LSE (at most {result.lse_tolerance:.0e}), against float32 full attention",
            f"speed    {result.tokens_per_second:,.0f} tokens per second in one layer ({result.seconds * 1e3:.2f} ms)",
            "right" if result.ok else "WRONG: the error is above its tolerance",
        ]
    )


def dims(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities.configs import ModelDims, read_config

    matrix = matrix_of(options)
    answer = read_config(options.config, matrix.families)
    if not isinstance(answer, ModelDims):
        print(
            json.dumps(answer.to_dict(), indent=2)
            if options.format == "json"
            else f"{'not MLA' if answer.to_dict()['is_mla'] is False else 'cannot tell'}: {answer.reason}"
        )
        return NEGATIVE
    block = matrix.block_for(answer.dims)
    if options.format == "json":
        print(json.dumps(answer.to_dict(block.name if block else None), indent=2))
        return FINE
    print(f"dims {answer.dims}  (qk {answer.dims.qk_head_dim}, v {answer.dims.v_head_dim})  from {answer.location}")
    print(f"block {block.name if block else 'none: no row of the matrix has these dims yet'}")
    print(f"heads {answer.num_attention_heads or 'not stated'}, kv_lora_rank {answer.kv_lora_rank or 'not stated'}")
    for other in answer.other_dims:
        print(f"also {other.dims} on layers {', '.join(map(str, other.layers)) if other.layers else 'not stated'}")
    for note in answer.notes:
        print(f"note: {note}")
    return FINE


def table(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities import tables

    matrix = matrix_of(options)
    arches = [matrix.arch(a) for a in options.arch] if options.arch else list(matrix.architectures)
    blocks = options.model or list(matrix.blocks)
    for name in blocks:
        if name not in matrix.blocks:
            raise UsageError(f"unknown dims block {name!r}; {nearest(name, matrix.blocks)}")
    if options.format == "json":
        print(json.dumps(tables.as_json(matrix, arches, blocks), indent=2))
        return FINE
    rows = tables.support_rows(matrix, arches, blocks)
    if options.format == "text":
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(tables.columns(rows, tables.HEADER, width))
    else:
        print(tables.markdown(rows, tables.HEADER))
    return FINE


def env(options: argparse.Namespace) -> int:
    """Reports whatever is wrong with our variables, and then fails: who pastes it has a problem to show."""
    from mla_prefill import Environment, Overrides
    from mla_prefill.selector import report as reports
    from mla_prefill.selector.probe import probe

    overrides, wrong = Overrides.read()
    try:
        matrix = load_matrix(options.matrix or overrides.matrix, options.extra)
    except (MatrixError, OSError) as error:
        if options.matrix or not overrides.matrix:
            raise
        wrong["MLA_PREFILL_MATRIX"] = f"{one_line(error)}; this report goes by the shipped one"
        matrix = load_matrix(None, options.extra)
    wrong.update(reports.refused(overrides, matrix))
    here = Environment.detect(matrix.distributions, overrides=overrides)
    notes: dict[str, list[str]] = {}
    if options.probe:
        errors, notes = probe(matrix, here.installed or {}, progress)
        here = here.replace(import_errors=errors)
    report = reports.report(here, matrix, notes, wrong)
    if options.format == "json":
        print(json.dumps(report, indent=2))
    else:
        print(reports.report_text(report))
    for text in wrong.values():
        progress(f"mla-prefill: {text}")
    return WRONG_USE if wrong else FINE
