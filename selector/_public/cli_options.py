"""From the command line's options to values: a matrix, dims, a request, an environment."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from mla_prefill.capabilities.findings import nearest
from mla_prefill.capabilities.load import load_matrix

if TYPE_CHECKING:
    from mla_prefill import BatchShape, Decision, Environment, Matrix, MLADimensions, Request

FINE, NEGATIVE, WRONG_USE = 0, 1, 2


class UsageError(ValueError):
    """Wrong usage or unreadable input: one line on stderr, exit 2."""


def overrides() -> Any:
    from mla_prefill import Overrides

    return Overrides.from_environ()


def matrix_of(options: argparse.Namespace) -> Matrix:
    path = options.matrix or overrides().matrix
    return load_matrix(path, options.extra)


def model(options: argparse.Namespace, matrix: Matrix) -> tuple[MLADimensions, int | None]:
    """(dims, attention heads where they are known) of --dims, --model or --config."""
    if options.dims is not None:
        return typed_dims(options.dims), None
    if options.model is not None:
        return _named_model(options.model, matrix)
    from mla_prefill.capabilities.configs import ModelDims, read_config

    answer = read_config(options.config, matrix.families)
    if not isinstance(answer, ModelDims):
        raise NegativeAnswerError(f"{options.config}: {answer.reason}")
    for other in answer.other_dims:
        layers = f"{len(other.layers)} layers" if other.layers else "some layers"
        progress(f"note: {layers} have other dims: ask with --dims {','.join(map(str, other.dims))}")
    return answer.dims, answer.num_attention_heads


def typed_dims(text: str) -> MLADimensions:
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
        raise NegativeAnswerError(f"{name} ({family}) has no known MLA dims: {why}; give its --config")
    if "second_geometry" in record:
        progress(f"note: some layers of {name} have other dims; give its --config to see them")
    return MLADimensions(*record["dims"]), record.get("num_attention_heads")


def cells(options: argparse.Namespace, matrix: Matrix) -> tuple[list[str], list[MLADimensions]]:
    """(kernels, dims) of the repeatable --kernel, --dims and --model."""
    kernels: list[str] = options.kernel or []
    for kernel in kernels:
        if kernel not in matrix.kernels:
            raise UsageError(f"unknown kernel {kernel!r}; {nearest(kernel, matrix.kernels)}")
    wanted = [typed_dims(text) for text in options.dims or []]
    wanted += [_named_model(name, matrix)[0] for name in options.model or []]
    return kernels, list(dict.fromkeys(wanted))


class NegativeAnswerError(Exception):
    """The answer is no: on stderr, exit 1."""


def request_of(options: argparse.Namespace, dims: MLADimensions, shape: BatchShape | None = None) -> Request:
    from mla_prefill import Request

    needs, prefers = ([f.strip() for f in text.split(",") if f.strip()] for text in (options.needs, options.prefers))
    return Request(dims, options.dtype, options.fa_version, options.backend, needs, options.policy, shape, prefers)


def shape_of(options: argparse.Namespace, heads: int | None) -> BatchShape | None:
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
    shape = BatchShape(int(sequences), int(length), heads, options.graph)
    if options.policy != "measured":
        raise UsageError("--shape goes with --policy measured: the default order does not depend on it")
    return shape


def environment_of(options: argparse.Namespace, matrix: Matrix) -> Environment:
    from mla_prefill import Environment

    installed = _installed(options.installed, matrix)
    if options.gpu is None and options.arch is None:
        environment = Environment.detect(matrix.distributions)
        return environment if installed is None else environment.replace(installed=installed)
    arch = matrix.gpu(options.gpu) if options.gpu is not None else matrix.arch(options.arch)
    return Environment(arch, installed, None, overrides(), options.gpu, "argument")


def _installed(given: list[str] | None, matrix: Matrix) -> dict[str, str] | None:
    from mla_prefill.capabilities.versions import canonical
    from packaging.version import InvalidVersion, Version

    if given is None:
        return None
    if given == ["none"]:
        return {}
    installed: dict[str, str] = {}
    for text in given:
        name, equals, version = text.partition("==")
        name = canonical(name.strip())
        if not equals:
            raise UsageError(f"--installed takes DIST==VERSION such as flash-attn==2.8.3, or none alone; got {text!r}")
        if name not in matrix.distributions:
            raise UsageError(
                f"--installed {text}: no kernel comes from {name!r}; {nearest(name, matrix.distributions)}"
            )
        try:
            version = str(Version(version.strip()))
        except InvalidVersion:
            raise UsageError(f"--installed {text}: {version!r} is not a version such as 2.8.3") from None
        if installed.setdefault(name, version) != version:
            raise UsageError(f"--installed names {name} twice, {installed[name]} and {version}; give one of the two")
    return installed


def decision_of(request: Request, environment: Environment, matrix: Matrix) -> Decision:
    """The decision, chosen or not."""
    from mla_prefill.selector.engine import decide

    return decide(request, environment, matrix)


def progress(text: str) -> None:
    if sys.stderr is not None:  # `2>&-`
        with contextlib.suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """An error as one line for stderr."""
    if isinstance(error, OSError) and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return " ".join(str(error).split())
