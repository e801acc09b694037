"""Drift: the kernel sheet and the matrix against what is installed, cell by cell.

FlashAttention 4 and FlashInfer are asked without importing them, by the rules that stand in their own files: a plain
function, a constant, a list of pairs. vLLM is imported, in a child process. No GPU is needed.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from mla_prefill.backends import packages
from mla_prefill.capabilities import versions
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.model import Architecture, Kernel, MLADimensions, Provider
from mla_prefill.selector.probe import fresh_python

#: Head widths that the rules of packages are asked for, and the dtype width they are asked with.
WIDTHS = range(8, 577, 8)
ELEMENT_BYTES = 2
TIMEOUT_S = 180
Pair = tuple[int, int]
Takes = Callable[[int, int, int], bool]  # (major version of the capability, qk, v) -> whether the package takes it


class Cell(NamedTuple):
    """One answer of ours beside the package's. ``dims``: head widths (qk, v), or a triple of the matrix."""

    subject: str
    arch: str
    dims: tuple[int, ...]
    ours: Any
    theirs: Any
    row: str

    @property
    def verdict(self) -> str:
        if self.ours == self.theirs:
            return "agrees"
        return ("wider" if self.ours else "narrower") if isinstance(self.ours, bool) else "order"


class Answer(NamedTuple):
    """One source and all cells it was asked for, or why it cannot be asked. ``beyond``: differences in
    widths that no block of the matrix has. ``unasked``: parts of the source that cannot tell.
    """

    source: str
    why_not: str | None = None
    cells: tuple[Cell, ...] = ()
    beyond: tuple[Cell, ...] = ()
    unasked: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.verdict != "agrees")


def drift(matrix: Matrix, report: Callable[[str], None]) -> list[Answer]:
    """Asks every source that is installed."""
    answers = [_ask(rule, matrix) for rule in RULES]
    report("importing vllm in a child process")
    return [*answers, _ask_vllm(matrix)]


# ---- rules that stand in a package's files ---------------------------------------------------------------------


class CannotAsk(Exception):
    """Why a source cannot be asked, in one line; never leaves this module."""


class Rule(NamedTuple):
    """Where a package says which (qk, v) a kernel takes. ``arch``: what the rule is about; None: all of the sheet's."""

    kernel: str
    distribution: str
    file: str
    symbol: str
    read: Callable[[str, str], Takes]
    arch: tuple[str, ...] | None = None

    @property
    def source(self) -> str:
        return f"{self.file}:{self.symbol}"


def _validator(text: str, symbol: str) -> Takes:
    """A function that raises AssertionError for what the kernel cannot take."""
    validate = _function(text, symbol, ("head_dim", "head_dim_v", "compute_capability", "alignment"))

    def takes(major: int, qk: int, v: int) -> bool:
        try:
            validate(qk, v, major, 16 // ELEMENT_BYTES)
        except AssertionError:
            return False
        return True

    return takes


def _predicate(text: str, symbol: str) -> Takes:
    supported = _function(text, symbol, ("head_dim_qk", "head_dim_vo"))
    return lambda major, qk, v: bool(supported(qk, v))


def _constant(text: str, symbol: str) -> Takes:
    """A module's constant, a set of pairs."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == symbol for t in node.targets):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            return _listed(ast.literal_eval(value))
    raise CannotAsk(f"this version has no {symbol}")


def _macro(text: str, symbol: str) -> Takes:
    """A C++ macro that compares both widths with numbers."""
    body = text.partition(f"#define {symbol}(")[2].partition("#define ")[0]
    return _listed((int(qk), int(v)) for qk, v in re.findall(r"head_dim_qk == (\d+) && head_dim_vo == (\d+)", body))


def _listed(pairs: Iterable[Pair]) -> Takes:
    known = frozenset(pairs)
    if not known:
        raise CannotAsk("this version lists no pairs there")
    return lambda major, qk, v: (qk, v) in known


def _function(text: str, symbol: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """A module-level function that needs nothing else of its module; the rest of the module is not run."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == symbol:
            node.decorator_list = []
            names: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), symbol, "exec"), names)
            found: Callable[..., Any] = names[symbol]
            if tuple(inspect.signature(found).parameters) != parameters:
                raise CannotAsk(f"{symbol} of this version has other parameters")
            return found
    raise CannotAsk(f"this version has no {symbol}")


#: How packages state a rule -> what reads it.
_FORMS = {"validator": _validator, "predicate": _predicate, "macro": _macro, "constant": _constant}
RULES = tuple(
    Rule(
        row["kernel"],
        row["distribution"],
        row["file"],
        row["symbol"],
        _FORMS[row["form"]],
        tuple(row["arch"]) if "arch" in row else None,
    )
    for row in packages.read()["rules"]
)


def _ask(rule: Rule, matrix: Matrix) -> Answer:
    name = f"{rule.distribution}: {rule.source}"
    kernel = matrix.kernels.get(rule.kernel)
    offers = (p for p in kernel.providers if versions.canonical(p.distribution) == rule.distribution) if kernel else ()
    provider = next(iter(offers), None)
    if kernel is None or provider is None:
        return Answer(name, f"the kernel sheet has no {rule.kernel} of {rule.distribution}")
    try:
        package = distribution(rule.distribution)
        name = f"{rule.distribution} {package.version}: {rule.source}"
        takes = rule.read(Path(str(package.locate_file(rule.file))).read_text(encoding="utf-8"), rule.symbol)
        cells = list(_cells(rule, kernel, provider, package.version, takes, matrix))
    except PackageNotFoundError:
        return Answer(name, "not installed")
    except FileNotFoundError:
        return Answer(name, "this version has no such file")
    except (CannotAsk, OSError, SyntaxError, ValueError, TypeError, NameError) as error:
        return Answer(name, " ".join(str(error).split()))
    known = {(block.dims.qk_head_dim, block.dims.v_head_dim) for block in matrix.blocks.values()}
    inside = tuple(cell for cell in cells if cell.dims in known)
    beyond = tuple(cell for cell in cells if cell.dims not in known and cell.verdict != "agrees")
    return Answer(name, None, inside, beyond)


def _cells(
    rule: Rule, kernel: Kernel, provider: Provider, version: str, takes: Takes, matrix: Matrix
) -> Iterator[Cell]:
    for arch in rule.arch or provider.arch or kernel.arch:
        limit, major = matrix.limit(kernel.name, arch), _capability(matrix.architectures[arch])[0]
        if limit is None or takes(major, 1 << 20, 1 << 20):
            continue  # a rule that takes anything says nothing about this architecture
        for qk in WIDTHS:
            for v in WIDTHS:
                fit = limit.fit(qk, v, matrix.architectures[arch].shared_memory_bytes)
                ours = fit is not None and fit.pad_v_to is None and _runs(provider, fit.requires, version)
                yield Cell(kernel.name, arch, (qk, v), ours, takes(major, qk, v), limit.source)


def _runs(provider: Provider, requires: tuple[str, ...], version: str) -> bool:
    """Whether this version of the provider is one that the sheet says runs it."""
    name = versions.canonical(provider.distribution)
    ranges = (provider.version, *(range_ for about, range_ in map(versions.split, requires) if about == name))
    return all(versions.contains(range_, version) for range_ in ranges)


def _capability(architecture: Architecture) -> tuple[int, int]:
    major, _, minor = (architecture.capability or "0.0").partition(".")
    return int(major), int(minor)


# ---- vLLM ---------------------------------------------------------------------------------------------------------


def _ask_vllm(matrix: Matrix) -> Answer:
    """Backends, capability checks and orders of an installed vLLM, against the matrix (policy, not physics)."""
    arches = {name: _capability(a) for name, a in matrix.architectures.items() if a.vendor == "nvidia" and a.capability}
    dims = list(dict.fromkeys(block.dims for block in matrix.blocks.values()))
    question = {"capabilities": list(arches.values()), "dims": dims, "backends": matrix.backends}
    # vLLM itself is asked: our own plugin stays out.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MLA_PREFILL_")}
    try:
        arguments = ("-m", "mla_prefill.backends.drift_vllm", json.dumps(question))
        done = fresh_python(*arguments, timeout_s=TIMEOUT_S, environ=environ)
        said = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Answer("vllm", f"importing took longer than {TIMEOUT_S} s")
    except (ValueError, IndexError):
        return Answer("vllm", (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    if "why_not" in said:
        return Answer("vllm", said["why_not"])
    name = f"vllm {said['version']}: vllm/v1/attention/backends/mla/prefill"
    unasked = tuple(f"{backend}: {why}" for backend, why in said["unasked"].items())
    return Answer(name, None, tuple(_vllm_cells(matrix, said, arches, dims)), unasked=unasked)


def _vllm_cells(
    matrix: Matrix, said: dict[str, Any], arches: dict[str, tuple[int, int]], dims: list[MLADimensions]
) -> Iterator[Cell]:
    for arch, capability in arches.items():
        for triple in dims:
            key = f"{capability[0]}.{capability[1]} {','.join(map(str, triple))}"
            allowed = {
                cell.kernel.backend: cell.row.source for cell in reversed(matrix.cells(arch, triple)) if cell.row
            }
            for backend, takes in said["takes"][key].items():
                if arch in _shipped_for(matrix, backend, arches):
                    row = allowed.get(backend) or _nearest_row(matrix, triple)
                    yield Cell(backend, arch, triple, backend in allowed, takes, row)
            order = matrix.order_for(arch, triple)
            names = [matrix.kernels[k].backend for k in order.order] if order else []
            theirs = [b for b in said["orders"].get(key, ()) if b in names and said["takes"][key].get(b)]
            if order and theirs:
                ours = [b for b in dict.fromkeys(names) if b in theirs]
                yield Cell("order", arch, triple, " ".join(ours), " ".join(theirs), order.source)


def _shipped_for(matrix: Matrix, backend: str, arches: Iterable[str]) -> set[str]:
    """Where vLLM has code for a backend: its lists do not say (FLASH_ATTN is offered on 7.5 and fails there)."""
    kernels = [kernel for kernel in matrix.kernels.values() if kernel.backend == backend]
    own = [p for kernel in kernels for p in kernel.providers if versions.canonical(p.distribution) == "vllm"]
    return {arch for provider in own for arch in provider.arch or ()} if own else set(arches)


def _nearest_row(matrix: Matrix, dims: MLADimensions) -> str:
    block = matrix.block_for(dims)
    return block.source if block else ""


# ---- telling ------------------------------------------------------------------------------------------------------

_SAYS = {
    "wider": "we allow it, it does not",
    "narrower": "it allows it, we do not",
    "order": "another order",
}


def as_dict(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Plain data of all answers; cells that agree are counted, the others listed."""
    return [
        {
            "source": answer.source,
            "why_not": answer.why_not,
            "agrees": len(answer.cells) - len(answer.differences),
            "differences": [_plain(cell) for cell in answer.differences],
            "beyond": [_plain(cell) for cell in answer.beyond],
            "unasked": list(answer.unasked),
        }
        for answer in answers
    ]


def _plain(cell: Cell) -> dict[str, Any]:
    return {"verdict": cell.verdict, **cell._asdict(), "dims": list(cell.dims)}


def as_text(answers: Iterable[Answer]) -> str:
    """All answers for people: a paragraph a source, a line a difference, architectures put together; and the sum."""
    answers = list(answers)
    return "\n\n".join(["\n".join(_lines(answer)) for answer in answers] + [_summary(answers)])


def _summary(answers: list[Answer]) -> str:
    asked = [answer for answer in answers if not answer.why_not]
    if asked:
        differ = sum(len(answer.differences) for answer in asked)
        return f"{len(asked)} of {len(answers)} sources compared; cells that differ: {differ or 'none'}"
    wanted = ", ".join(dict.fromkeys([*(rule.distribution for rule in RULES), "vllm"]))
    return f"nothing was compared: it takes one of {wanted}"


def _lines(answer: Answer) -> Iterator[str]:
    yield answer.source
    if answer.why_not:
        yield f"  cannot be asked: {answer.why_not}"
        return
    yield f"  agrees in {len(answer.cells) - len(answer.differences)} of {len(answer.cells)} cells"
    yield from (f"  cannot be asked for {why}" for why in answer.unasked)
    for cells in _alike(answer.differences):
        cell, arches = cells[0], ", ".join(cell.arch for cell in cells)
        detail = f": {cell.theirs}, ours {cell.ours}" if cell.verdict == "order" else ""
        what = f"{cell.subject} {_shown(cell.dims)} on {arches}: {_SAYS[cell.verdict]}{detail}"
        yield f"  {cell.verdict:8}  {what}  [{cell.row}]"
    by_rule: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in answer.beyond:
        by_rule.setdefault((cell.verdict, cell.subject, cell.arch), []).append(cell)
    for (verdict, subject, arch), cells in by_rule.items():
        some = ", ".join(_shown(cell.dims) for cell in cells[:4]) + (", ..." if len(cells) > 4 else "")
        yield f"  beyond the matrix, {verdict}: {subject} on {arch} in {len(cells)} pairs: {some}  [{cells[0].row}]"


def _alike(cells: Iterable[Cell]) -> Iterable[list[Cell]]:
    """Cells that differ in their architecture alone, put together."""
    groups: dict[Cell, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell._replace(arch=""), []).append(cell)
    return groups.values()


def _shown(dims: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, dims))})"
