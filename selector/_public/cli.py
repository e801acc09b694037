"""The ``mla-prefill`` command: results on stdout, progress on stderr, exit 0, 1 (a negative answer or findings) or 2.

The command line stands above capabilities, selector and backends, and imports what a command needs when it needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from mla_prefill.capabilities.findings import MatrixError, nearest
from mla_prefill.capabilities.load import load_matrix
from mla_prefill.capabilities.model import DTYPES
from mla_prefill.cli_options import (
    FINE,
    NEGATIVE,
    WRONG_USE,
    NegativeAnswerError,
    UsageError,
    one_line,
    overrides,
    progress,
)
from mla_prefill.selector.environment import VARIABLES


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # No option of ours is a number: "--dims -1,2,3" has a value, and the command says what is wrong with it.
        self._negative_number_matcher = re.compile(r"-\d")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An option that a command does not have is told before what the command misses."""
        options = self._option_string_actions if self._subparsers is None else ()
        for option in (text.partition("=")[0] for text in itertools.takewhile("--".__ne__, args or ())):
            if options and option.startswith("--") and not any(known.startswith(option) for known in options):
                self.error(f"unknown option {option}; {nearest(option, options)}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"unknown {value!r}; {nearest(value, action.choices)}")

    def format_help(self) -> str:
        """With the features that the shipped kernel sheet has, where a command takes some."""
        if "--needs" in self._option_string_actions:
            self.epilog = f"features: {', '.join(load_matrix().features)}"
        return super().format_help()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        with _Stdout(sys.stdout) as stdout, contextlib.redirect_stdout(stdout):
            options = build_parser().parse_args(arguments)
            module, _, name = options.run.partition(":")
            if name != "env":  # which reports what is wrong with our variables; every other command stops at it
                overrides()
            code: int = getattr(importlib.import_module(f"mla_prefill.{module}"), name)(options)
        return code
    except NegativeAnswerError as answer:
        progress(f"mla-prefill: {answer}")
        return NEGATIVE
    except RuntimeError as error:
        from mla_prefill.backends import KernelError

        if not isinstance(error, KernelError):
            raise
        progress(f"mla-prefill: {one_line(error)}")
        return NEGATIVE
    except MatrixError as error:
        progress(str(error))
        return WRONG_USE
    except (UsageError, ValueError, OSError) as error:
        progress(f"mla-prefill: {one_line(error)}")
        return WRONG_USE
    except KeyboardInterrupt:
        progress("mla-prefill: interrupted")
        return 130


class _Stdout(io.TextIOBase):
    """Standard output whose reader may leave, or that is closed (`>&-`): the exit code is the answer's all the same.

    Its end flushes the stream and leaves it open.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._do(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def _do(self, act: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            act(self._stream)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # or Python tries once more at its end
            if not isinstance(error, BrokenPipeError):
                raise UsageError(f"cannot write the output: {error.strerror}") from None


# ---- arguments --------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mla-prefill",
        description="Which attention kernel may prefill an MLA model on this GPU, and why.",
        epilog="exit status: 0 fine, 1 a negative answer or findings, 2 wrong usage or unreadable input. "
        f"Environment variables: {', '.join(VARIABLES)}.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    command = _add(
        commands,
        "run",
        "cli_ask:run",
        "select here, run one chunked prefill, check it against float32 math",
    )
    _add_dims(command)
    _add_request(command)
    command.add_argument(
        "--heads", type=_positive, metavar="N", help="attention heads on this rank (default: the model's, else 16)"
    )
    command.add_argument(
        "--device", metavar="DEVICE", help="torch device such as cuda:1 or cpu (default: what the decision is for)"
    )
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the random batch (default 0)")
    _add_format(command)

    command = _add(commands, "select", "cli_ask:select", "one decision, with every reason")
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

    command = _add(commands, "dims", "cli_ask:dims", "the MLA dims that a config.json states, or why it is not MLA")
    command.add_argument("config", metavar="CONFIG", help="config.json or params.json, or a folder that holds one")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "table", "cli_ask:table", "the matrix for people")
    command.add_argument("--arch", action="append", metavar="ARCH", help="only this architecture (repeatable)")
    command.add_argument("--model", action="append", metavar="BLOCK", help="only this dims block (repeatable)")
    _add_matrix(command)
    _add_format(command, "text", "md", "json")

    command = _add(commands, "check", "cli_data:check", "everything CI validates in the data")
    command.add_argument(
        "paths",
        type=_path,
        nargs="*",
        metavar="PATH",
        help="a data folder, or files in place of their shipped namesakes (default: the shipped data)",
    )
    command.add_argument(
        "--matrix",
        type=_path,
        action="append",
        default=[],
        metavar="PATH",
        help="the same as PATH, as other commands have it",
    )
    command.add_argument(
        "--extra",
        type=_path,
        action="append",
        default=[],
        metavar="PATH",
        help="lay this file of rows, orders or models over it (repeatable)",
    )
    command.add_argument(
        "--fix", action="store_true", help="mend what is mechanical: modelines, lists, the compiled form, docs pages"
    )
    _add_format(command, "text", "json", "github", "sarif")

    command = _add(
        commands, "add", "cli_change:add", "write the block of a new model's dims, proposed from the kernel sheet"
    )
    command.add_argument("config", nargs="?", metavar="CONFIG", help="config.json or params.json, or its folder")
    command.add_argument("--name", metavar="NAME", help="of the block (default: the model family's, or the folder's)")
    command.add_argument("--dims", metavar="NOPE,ROPE,V", help="without CONFIG, or which of several that it states")
    command.add_argument("--source", metavar="REF", help="where the dims can be read (default: the CONFIG)")
    command.add_argument(
        "--build", action="store_true", help="compile FA4 for every architecture first (needs flash-attn-4, no GPU)"
    )
    command.add_argument("--output", type=_path, metavar="FILE", help="put it into a file of your own, for --extra")
    command.add_argument("--dry-run", action="store_true", help="show it, write nothing")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "diff", "cli_change:diff", "decisions that change between two matrices or git revisions")
    command.add_argument("old", metavar="OLD", help="a data folder, a file, a git revision, or REVISION:PATH")
    command.add_argument("new", metavar="NEW", nargs="?", help="the same (default: the shipped data)")
    command.add_argument("--overlay", action="store_true", help="OLD and NEW are files to lay over the shipped data")
    _add_format(command, "text", "md", "json")

    command = _add(commands, "drift", "cli_data:drift", "the data against installed kernel packages and vLLM")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "verify", "cli_gpu:verify", "run every allowed cell of this machine against float32 math")
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

    command = _add(commands, "bench", "cli_gpu:bench", "time the eligible kernels here; profile, table and plot")
    _add_cells(command)
    command.add_argument("--quick", action="store_true", help="fewer shapes and repetitions")
    command.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="limit for everything, spread evenly over the dims"
    )
    command.add_argument(
        "--layers", type=_positive, default=60, metavar="N", help="layers that share a plan's cost (default 60)"
    )
    _add_output(command, "profile")
    _add_matrix(command)
    _add_format(command)

    command = _add(commands, "env", "cli_ask:env", "architecture, packages, import errors, overrides, fingerprint")
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


def _add(commands: Any, name: str, run: str, help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + "."
    )
    command.set_defaults(run=run)
    return command


def _add_format(command: argparse.ArgumentParser, *formats: str) -> None:
    choices = formats or ("text", "json")
    command.add_argument("--format", choices=choices, default=choices[0], help=f"output format (default {choices[0]})")


def _add_matrix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--matrix", type=_path, metavar="PATH", help="a matrix file or data folder in place of the shipped one"
    )
    command.add_argument(
        "--extra",
        type=_path,
        action="append",
        default=[],
        metavar="PATH",
        help="lay this file of rows, orders or models over the matrix (repeatable)",
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
        type=_path,
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
        help="a kernel package of the target (repeatable; names all of them, each once; 'none': there is none; "
        "default with --arch or --gpu: packages are no constraint)",
    )


def _add_request(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help=f"{', '.join(DTYPES)} (default bfloat16)")
    command.add_argument("--fa-version", type=int, metavar="N", help="pin the FlashAttention version: used or refused")
    command.add_argument("--backend", metavar="NAME", help="force a backend or kernel: used or refused")
    command.add_argument("--needs", default="", metavar="LIST", help="comma list of features (below), such as lse,out")
    command.add_argument(
        "--prefers", default="", metavar="LIST", help="comma list of features to have if possible, most wanted first"
    )
    command.add_argument(
        "--policy", choices=("default", "measured"), default="default", help="order of candidates (default: default)"
    )
    _add_matrix(command)


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must name a file or folder, got ''")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 4096, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or int(text) >= 2**64:  # what PyTorch takes
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**64 - 1, got {text[:40]!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds
