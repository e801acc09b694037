"""The ``mla-prefill`` command: results on stdout, progress on stderr, exit 0, 1 (a negative answer or findings) or 2.

The command line stands above capabilities, selector and backends, and imports what a command needs when it needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mla_prefill.capabilities.findings import MatrixError, nearest
from mla_prefill.capabilities.load import load_matrix

if TYPE_CHECKING:
    from mla_prefill import BatchShape, Decision, Environment, Matrix, MLADimensions, Request
    from mla_prefill.backends.job import JobResult

FINE, NEGATIVE, WRONG_USE = 0, 1, 2


class UsageError(ValueError):
    """Wrong usage or unreadable input: one line on stderr, exit 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        options = build_parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: not an error of ours
        return FINE
    except MatrixError as error:
        print(error, file=sys.stderr)
        return WRONG_USE
    except (UsageError, ValueError, OSError) as error:
        print(f"mla-prefill: {_one_line(error)}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("mla-prefill: interrupted", file=sys.stderr)
        return 130


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return " ".join(str(error).split())


# ---- arguments --------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mla-prefill",
        description="Which attention kernel may prefill an MLA model on this GPU, and why.",
        epilog="exit status: 0 fine, 1 a negative answer or findings, 2 wrong usage or unreadable input. "
        "Environment variables: MLA_PREFILL_BACKEND, MLA_PREFILL_FA_VERSION, MLA_PREFILL_DISABLE, MLA_PREFILL_MATRIX.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    command = _add(
        commands, "run", run, "select for this machine, run one chunked prefill, check it against float32 math"
    )
    _add_dims(command)
    _add_request(command)
    command.add_argument(
        "--heads", type=_positive, metavar="N", help="attention heads on this rank (default: the model's, else 16)"
    )
    command.add_argument(
        "--device", metavar="DEVICE", help="torch device such as cuda:1 or cpu (default: what the decision is for)"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the random batch (default 0)")
    _add_format(command)

    command = _add(commands, "select", select, "one decision, with every reason")
    _add_target(command)
    _add_dims(command)
    _add_request(command)
    command.add_argument(
        "--shape", metavar="SEQUENCESxLENGTH", help="the batch to choose for with --policy measured, such as 8x512"
    )
    command.add_argument(
        "--heads", type=_positive, metavar="N", help="with --shape: attention heads on this rank (default: the model's)"
    )
    command.add_argument("--graph", action="store_true", help="with --shape: it runs inside a CUDA graph")
    command.add_argument(
        "--explain", action="store_true", help="the whole story: chosen, turned down and why, what would be better"
    )
    _add_format(command)

    command = _add(commands, "dims", dims, "the MLA dims that a config.json states, or why it is not MLA")
    command.add_argument("config", metavar="CONFIG", help="config.json or params.json, or a folder that holds one")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "table", table, "the matrix for people")
    command.add_argument("--arch", action="append", metavar="ARCH", help="only this architecture (repeatable)")
    command.add_argument("--model", action="append", metavar="BLOCK", help="only this dims block (repeatable)")
    _add_matrix(command)
    _add_format(command, "text", "md", "json")

    command = _add(commands, "check", check, "everything CI validates in the data")
    command.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a data folder, or a file in place of its shipped namesake (default: the shipped data)",
    )
    command.add_argument("--fix", action="store_true", help="mend what is mechanical (modelines, the compiled form)")
    _add_format(command, "text", "json", "github", "sarif")

    command = _add(commands, "verify", verify, "run every allowed cell of this machine against float32 math")
    _add_cells(command)
    command.add_argument(
        "--dtype", action="append", metavar="DTYPE", help="only this dtype (repeatable; default: what is offered)"
    )
    command.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="SECONDS", help="limit for one cell (default 300)"
    )
    command.add_argument("--jobs", type=_positive, metavar="N", help="processes for each GPU (default: by CPU cores)")
    command.add_argument(
        "--build-only", action="store_true", help="build the cells for any architecture instead, without its GPU"
    )
    command.add_argument(
        "--arch", action="append", metavar="ARCH", help="with --build-only: only this architecture (repeatable)"
    )
    _add_output(command, "evidence record")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "bench", bench, "time the eligible kernels on this machine; profile, table and plot")
    _add_cells(command)
    command.add_argument("--quick", action="store_true", help="three shapes and fewer repetitions")
    command.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="limit for everything, spread evenly over the dims"
    )
    command.add_argument(
        "--layers", type=_positive, default=60, metavar="N", help="layers that share a plan's cost (default 60)"
    )
    _add_output(command, "profile")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "env", env, "architecture, packages, versions, import errors, overrides, fingerprint")
    command.add_argument(
        "--probe",
        action="store_true",
        help="import each installed kernel package in a child process and report what it raises",
    )
    _add_matrix(command)
    _add_format(command)
    return parser


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> None:
        from mla_prefill import __version__

        print(f"mla-prefill {__version__}")
        raise SystemExit(FINE)


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + "."
    )
    command.set_defaults(run=run)
    return command


def _add_format(command: argparse.ArgumentParser, *formats: str) -> None:
    choices = formats or ("text", "json")
    command.add_argument("--format", choices=choices, default=choices[0], help=f"output format (default {choices[0]})")


def _add_matrix(command: argparse.ArgumentParser) -> None:
    command.add_argument("--matrix", metavar="PATH", help="a matrix file or data folder in place of the shipped one")
    command.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="PATH",
        help="lay this file of rows over the matrix (repeatable)",
    )


def _add_dims(command: argparse.ArgumentParser) -> None:
    group = command.add_mutually_exclusive_group(required=True)
    group.add_argument("--dims", metavar="NOPE,ROPE,V", help="head dims qk_nope,qk_rope,v_head, for example 64,64,128")
    group.add_argument(
        "--model", metavar="NAME", help="a model family, checkpoint or dims block, for example mistral_small_4"
    )
    group.add_argument("--config", metavar="CONFIG", help="the model's config.json (or its folder)")


def _add_cells(command: argparse.ArgumentParser) -> None:
    """Which cells, by what is repeatable; nothing means all."""
    command.add_argument("--kernel", action="append", metavar="KERNEL", help="only this kernel (repeatable)")
    command.add_argument("--dims", action="append", metavar="NOPE,ROPE,V", help="only these head dims (repeatable)")
    command.add_argument("--model", action="append", metavar="NAME", help="only this model's dims (repeatable)")


def _add_output(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--output",
        metavar="FILE|DIR",
        help=f"where the {what} goes (default: the data folder of a writable checkout, else here)",
    )


def _add_target(command: argparse.ArgumentParser) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument("--gpu", metavar="NAME", help="a product such as H200 or L40S (default: this machine)")
    group.add_argument("--arch", metavar="ARCH", help="an architecture such as sm90, 9.0 or gfx942")
    command.add_argument(
        "--installed",
        action="append",
        metavar="DIST==VERSION",
        help="a kernel package of the target (repeatable; names all of them; "
        "default with --arch or --gpu: packages are no constraint)",
    )


def _add_request(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", default="bfloat16", metavar="DTYPE", help="bfloat16 (default), float16, float32 ..."
    )
    command.add_argument("--fa-version", type=int, metavar="N", help="pin the FlashAttention version: used or refused")
    command.add_argument("--backend", metavar="NAME", help="force a backend or kernel: used or refused")
    command.add_argument("--needs", default="", metavar="LIST", help="comma list of features, for example lse,out")
    command.add_argument(
        "--policy", choices=("default", "measured"), default="default", help="order of candidates (default: default)"
    )
    _add_matrix(command)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 4096, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


# ---- from options to values -------------------------------------------------------------------------------------


def _overrides() -> Any:
    from mla_prefill import Overrides

    return Overrides.from_environ()


def _matrix(options: argparse.Namespace) -> Matrix:
    path = options.matrix or _overrides().matrix
    return load_matrix(path, options.extra)


def _model(options: argparse.Namespace, matrix: Matrix) -> tuple[MLADimensions, int | None]:
    """(dims, attention heads where they are known) of --dims, --model or --config."""
    if options.dims is not None:
        return _typed_dims(options.dims), None
    if options.model is not None:
        return _named_model(options.model, matrix)
    from mla_prefill.capabilities.configs import ModelDims, read_config

    answer = read_config(options.config, matrix.families)
    if not isinstance(answer, ModelDims):
        raise _NegativeAnswerError(f"{options.config}: {answer.reason}")
    return answer.dims, answer.num_attention_heads


def _typed_dims(text: str) -> MLADimensions:
    from mla_prefill.capabilities.model import MLADimensions

    parts = text.replace(" ", "").strip("()").split(",")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise UsageError(f"--dims takes three numbers qk_nope,qk_rope,v_head such as 64,64,128; got {text!r}")
    return MLADimensions(*map(int, parts))


def _named_model(name: str, matrix: Matrix) -> tuple[MLADimensions, int | None]:
    from mla_prefill.capabilities.configs import UnknownModelError, find_model
    from mla_prefill.capabilities.model import MLADimensions

    if block := matrix.blocks.get(name):
        heads = (f.get("num_attention_heads") for f in matrix.families.values() if f.get("dims") == list(block.dims))
        return block.dims, next((h for h in heads if h), None)
    try:
        family = find_model(name, matrix.families)
    except UnknownModelError as error:
        raise UsageError(f"{error}; dims blocks: {', '.join(matrix.blocks)}") from None
    record = matrix.families[family]
    if record.get("dims") is None:
        why = record.get("reason") or record.get("note") or "they were not published"
        raise _NegativeAnswerError(f"{name} ({family}) has no known MLA dims: {why}; give its --config")
    return MLADimensions(*record["dims"]), record.get("num_attention_heads")


def _cells(options: argparse.Namespace, matrix: Matrix) -> tuple[list[str], list[MLADimensions]]:
    """(kernels, dims) of the repeatable --kernel, --dims and --model."""
    kernels: list[str] = options.kernel or []
    for kernel in kernels:
        if kernel not in matrix.kernels:
            raise UsageError(f"unknown kernel {kernel!r}; {nearest(kernel, matrix.kernels)}")
    wanted = [_typed_dims(text) for text in options.dims or []]
    wanted += [_named_model(name, matrix)[0] for name in options.model or []]
    return kernels, list(dict.fromkeys(wanted))


class _NegativeAnswerError(Exception):
    """The answer is no: on stderr, exit 1."""


def _request(options: argparse.Namespace, dims: MLADimensions, shape: BatchShape | None = None) -> Request:
    from mla_prefill import Request

    needs = [need.strip() for need in options.needs.split(",") if need.strip()]
    return Request(dims, options.dtype, options.fa_version, options.backend, needs, options.policy, shape)


def _shape(options: argparse.Namespace, heads: int | None) -> BatchShape | None:
    from mla_prefill import BatchShape

    if options.shape is None:
        if options.graph or options.heads:
            raise UsageError(f"{'--graph' if options.graph else '--heads'} goes with --shape SEQUENCESxLENGTH")
        return None
    sequences, _, length = options.shape.lower().partition("x")
    if not (sequences.isdecimal() and length.isdecimal() and max(len(sequences), len(length)) < 8):
        raise UsageError(f"--shape takes SEQUENCESxLENGTH such as 8x512, got {options.shape!r}")
    if not (heads := options.heads or heads):
        raise UsageError("--shape needs the attention heads on a rank as well: add --heads N")
    return BatchShape(int(sequences), int(length), heads, options.graph)


def _environment(options: argparse.Namespace, matrix: Matrix) -> Environment:
    from mla_prefill import Environment

    installed = _installed(options.installed, matrix)
    if options.gpu is None and options.arch is None:
        environment = Environment.detect(matrix.distributions)
        return environment if installed is None else environment.replace(installed=installed)
    arch = matrix.gpu(options.gpu) if options.gpu is not None else matrix.arch(options.arch)
    return Environment(arch, installed, None, _overrides(), options.gpu, "argument")


def _installed(given: list[str] | None, matrix: Matrix) -> dict[str, str] | None:
    from mla_prefill.capabilities.versions import canonical
    from packaging.version import InvalidVersion, Version

    if given is None:
        return None
    installed = {}
    for text in given:
        name, equals, version = text.partition("==")
        name = canonical(name.strip())
        if not equals:
            raise UsageError(f"--installed takes DIST==VERSION such as flash-attn==2.8.3, got {text!r}")
        if name not in matrix.distributions:
            raise UsageError(
                f"--installed {text}: no kernel comes from {name!r}; {nearest(name, matrix.distributions)}"
            )
        try:
            installed[name] = str(Version(version.strip()))
        except InvalidVersion:
            raise UsageError(f"--installed {text}: {version!r} is not a version such as 2.8.3") from None
    return installed


def _decide(request: Request, environment: Environment, matrix: Matrix) -> Decision:
    """The decision, chosen or not."""
    from mla_prefill.selector.engine import decide

    return decide(request, environment, matrix)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- commands ---------------------------------------------------------------------------------------------------


def select(options: argparse.Namespace) -> int:
    matrix = _matrix(options)
    try:
        wanted, heads = _model(options, matrix)
    except _NegativeAnswerError as error:
        _progress(f"mla-prefill: {error}")
        return NEGATIVE
    request = _request(options, wanted, _shape(options, heads))
    decision = _decide(request, _environment(options, matrix), matrix)
    if options.format == "json":
        print(json.dumps(decision.to_dict(), indent=2))
    elif options.explain or decision.chosen is None:
        print(decision.explain())
    else:
        print(decision.one_line().removeprefix("mla-prefill: "), *map("note: {}".format, decision.notes), sep="\n")
    return FINE if decision.chosen else NEGATIVE


def run(options: argparse.Namespace) -> int:
    from mla_prefill import Environment
    from mla_prefill.backends import KernelError

    matrix = _matrix(options)
    try:
        wanted, heads = _model(options, matrix)
    except _NegativeAnswerError as error:
        _progress(f"mla-prefill: {error}")
        return NEGATIVE
    arch = "cpu" if options.device == "cpu" else None
    environment = Environment.detect(matrix.distributions, arch)
    decision = _decide(_request(options, wanted), environment, matrix)
    if decision.chosen is None:
        print(
            json.dumps({"decision": decision.to_dict(), "result": None}, indent=2)
            if options.format == "json"
            else decision.explain()
        )
        return NEGATIVE
    warnings.filterwarnings("ignore", module="cutlass")  # what a JIT says of its own arguments
    try:
        from mla_prefill.backends.job import run_chunked_prefill  # imports torch, which may be broken in any way

        result = run_chunked_prefill(
            decision, num_heads=options.heads or heads or 16, seed=options.seed, device=options.device, report=_progress
        )
    except (KernelError, ImportError) as error:
        _progress(f"mla-prefill: {_one_line(error)}")
        return NEGATIVE
    if options.format == "json":
        print(json.dumps({"decision": decision.to_dict(), "result": result.to_dict()}, indent=2))
    else:
        print(decision.one_line().removeprefix("mla-prefill: "))
        print(_job_text(result))
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

    matrix = _matrix(options)
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

    matrix = _matrix(options)
    arches = [matrix.arch(a) for a in options.arch] if options.arch else list(matrix.architectures)
    blocks = options.model or list(matrix.blocks)
    for name in blocks:
        if name not in matrix.blocks:
            raise UsageError(f"unknown dims block {name!r}; {nearest(name, matrix.blocks)}")
    if options.format == "json":
        print(json.dumps(tables.as_json(matrix, arches, blocks), indent=2))
    else:
        draw = tables.columns if options.format == "text" else tables.markdown
        print(draw(tables.support_rows(matrix, arches, blocks), tables.HEADER))
    return FINE


def check(options: argparse.Namespace) -> int:
    from mla_prefill.capabilities import checks, fixes
    from mla_prefill.capabilities.report import FORMATS

    findings = []
    for path in options.paths or [None]:
        if options.fix:
            for fixed in fixes.fix(Path(path) if path else None):
                _progress(f"fixed {fixed}")
        findings += checks.check_path(path)
    print(FORMATS[options.format](findings))
    return NEGATIVE if any(f.severity == "error" for f in findings) else FINE


def verify(options: argparse.Namespace) -> int:
    from mla_prefill.backends import KernelError
    from mla_prefill.backends import verify as sweep

    matrix = _matrix(options)
    if options.build_only:
        return _build(options, matrix)
    if options.arch:
        raise UsageError("--arch goes with --build-only: without it, verify runs on the GPU at hand")
    from mla_prefill import Environment
    from mla_prefill.selector.request import dtype_name

    try:
        wanted = sweep.Wanted(*_cells(options, matrix), [dtype_name(d) for d in options.dtype or ()])
        record = sweep.verify(
            matrix,
            Environment.detect(matrix.distributions),
            wanted,
            setup={"matrix": options.matrix or _overrides().matrix, "extra": options.extra},
            timeout_s=options.timeout,
            jobs=options.jobs,
            report=_progress,
        )
    except (KernelError, _NegativeAnswerError) as error:
        _progress(f"mla-prefill: {_one_line(error)}")
        return NEGATIVE
    print(json.dumps(record, indent=2) if options.format == "json" else sweep.table(record))
    _progress(f"evidence: {sweep.written(record, options.output)}")
    return FINE if sweep.all_fine(record) else NEGATIVE


def _build(options: argparse.Namespace, matrix: Matrix) -> int:
    """Builds instead of runs; needs no GPU."""
    from mla_prefill.backends import builds
    from mla_prefill.backends import verify as sweep

    arches = [matrix.arch(arch) for given in options.arch or () for arch in given.split(",")] or None
    proven = builds.prove(matrix, arches, _progress)
    if options.format == "json":
        print(json.dumps(proven, indent=2))
    for record in proven:
        if options.format == "text":
            print(sweep.build_table(record))
        _progress(f"evidence: {sweep.written(record, options.output)}")
    if not proven:
        _progress("mla-prefill: nothing could be built, and no installed binary could be asked")
    return FINE if proven and all(map(sweep.all_built, proven)) else NEGATIVE


def bench(options: argparse.Namespace) -> int:
    from mla_prefill import Environment
    from mla_prefill.backends import bench as timing
    from mla_prefill.backends import plot, records
    from mla_prefill.capabilities.profiles import Profile

    matrix = _matrix(options)
    try:
        kernels, wanted = _cells(options, matrix)
    except _NegativeAnswerError as error:
        _progress(f"mla-prefill: {error}")
        return NEGATIVE
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
        report=_progress,
        save=lambda profile: records.write(path, records.lined(profile, "readings")),
    ).run()
    for text in result.skipped:
        _progress(f"skipped: {text}")
    if not result.profile["readings"]:
        _progress("mla-prefill: nothing could be timed")
        return NEGATIVE
    profile = Profile(str(path), result.profile)
    lost = timing.losses(profile, matrix, environment)
    if options.format == "json":
        print(json.dumps({"profile": result.profile, "skipped": result.skipped, "losses": timing.as_dicts(lost)}))
    else:
        print(timing.table(profile), timing.summary(profile, lost), sep="\n\n")
    records.write(path.with_suffix(".svg"), plot.svg(profile))
    _progress(f"profile: {path}, plot: {path.with_suffix('.svg')}")
    return FINE


def env(options: argparse.Namespace) -> int:
    from mla_prefill import Environment
    from mla_prefill.selector import environment as variables
    from mla_prefill.selector.probe import probe

    matrix = _matrix(options)
    here = Environment.detect(matrix.distributions)
    if options.probe:
        here = here.replace(import_errors=probe(matrix, here.installed or {}, _progress))
    report = variables.report(here, matrix)
    if options.format == "json":
        print(json.dumps(report, indent=2))
    else:
        print(variables.report_text(report))
    return FINE
