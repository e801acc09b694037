"""Strict YAML to plain data in which every value knows its line and column.

One pass over the parser's events (libyaml where PyYAML has it, the pure parser otherwise): no constructor runs, no tag
is honoured, and nothing recursive can exhaust the stack. What YAML 1.1 and 1.2 read differently (``no``, ``1:30``,
``2.10``, ``0100``, dates) is a finding that asks for quotes, so every tool agrees on what a file says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from mla_prefill.capabilities.findings import MAX_BYTES, Finding, read_bytes

MAX_DEPTH = 32
#: Characters of a finding's message: what it quotes may be megabytes long.
MAX_TEXT = 1000
#: As many findings as a person can use from one file; a file of another kind could give millions.
MAX_FINDINGS = 200

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_AMBIGUOUS = re.compile(
    r"""(?xi) \A (?:
      y|yes|n|no|on|off                                     # YAML 1.1 booleans
    | true|false|null                                       # other cases than true, false, null
    | [-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:e[-+]?[0-9]+)?      # floats, octals, 1_000, +1
    | [-+]?\.[0-9]+ | [-+]?\.(?:inf|nan)
    | 0[xob][0-9a-f_]+
    | [-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9]*)?       # base 60
    | \d{4}-\d\d?-\d\d?(?:[Tt\ ].*)?                        # dates
    | = | <<
    ) \Z"""
)
#: What YAML 1.1 takes for the end of a line, PyYAML's marks too: more than "\n".
_LINE_END = re.compile("(?<=[\n\x85\u2028\u2029])|(?<=\r)(?!\n)")
_CONFLICT = re.compile(r"(<{7}|\|{7}|>{7})(?= |\Z)|={7}\Z")
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None, "~": None, "": None}

Mark = tuple[int, int]


class Map(dict[str, Any]):
    """A mapping that knows where each key and value stands: ``marks[key] = (key mark, value mark)``."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: dict[str, tuple[Mark, Mark]] = {}


class Seq(list[Any]):
    """A sequence that knows where each item stands."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Mark] = []


class SourceFile:
    """One file: its label in findings, its bytes, and (after `parse`) its data."""

    def __init__(self, label: str, raw: bytes) -> None:
        self.label = label
        self.raw = raw
        self.data: Any = None

    def finding(self, mark: Mark, code: str, message: str, hint: str = "", **more: Any) -> Finding:
        return Finding(self.label, mark[0], mark[1], code, _bounded(message), _bounded(hint), **more)

    def locate(self, path: Sequence[str | int], *, key: bool = False) -> Mark:
        """Line and column (1-based) of the value at ``path``, or of its key; of the nearest parent if it is absent."""
        node, mark = self.data, (1, 1)
        for i, step in enumerate(path):
            if isinstance(node, Map) and step in node.marks:
                key_mark, value_mark = node.marks[str(step)]
                mark = key_mark if key and i == len(path) - 1 else value_mark
                node = node[str(step)]
            elif isinstance(node, Seq) and isinstance(step, int) and step < len(node):
                mark, node = node.marks[step], node[step]
            else:
                break
        return mark

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The text as its reader counts lines, each with its line break; without a byte order mark."""
        return tuple(_LINE_END.split(self.raw.decode("utf-8-sig")))

    def at_path(self, path: Sequence[str | int]) -> Any:
        """The value at ``path``."""
        node = self.data
        for step in path:
            node = node[step]
        return node

    def at(self, *path: str | int) -> str:
        """``label:line`` of the key at ``path``: the provenance that a row carries."""
        return f"{self.label}:{self.locate(path, key=True)[0]}"


def _bounded(text: str) -> str:
    """A text that a person can read, whatever stands in the file."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def read_file(path: Path, label: str | None = None) -> SourceFile:
    """Reads one file, hardly more than `MAX_BYTES` of it. Raises OSError where the path cannot be read."""
    return SourceFile(label or str(path), read_bytes(path))


def parse(source: SourceFile) -> list[Finding]:
    """Fills ``source.data`` and returns what is wrong with the text. Data is None where nothing usable was read."""
    if len(source.raw) > MAX_BYTES:
        return [source.finding((1, 1), "Y100", f"the file is larger than {MAX_BYTES // 2**20} MiB", "split it")]
    try:
        text = source.raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = source.raw.count(b"\n", 0, error.start) + 1
        column = error.start - (source.raw.rfind(b"\n", 0, error.start) + 1) + 1
        byte = source.raw[error.start]
        return [source.finding((line, column), "Y105", f"byte 0x{byte:02x} is not UTF-8", "save the file as UTF-8")]
    reader = _Reader(source)
    try:
        reader.read(text)
    except _GiveUpError:
        pass
    except yaml.YAMLError as error:
        mark = _error_mark(error, text)
        reader.report(*(_slip(source.lines, mark[0]) or (mark, "Y101", _error_text(error))))
    return reader.findings


class _GiveUpError(Exception):
    """Nothing after this point can be read sensibly."""


class _Reader:
    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.findings: list[Finding] = []
        self._stack: list[tuple[Map | Seq, str | None, Mark]] = []  # container, pending key, mark of that key

    def report(self, mark: Mark, code: str, message: str, hint: str = "") -> None:
        self.findings.append(self.source.finding(mark, code, message, hint))
        if len(self.findings) >= MAX_FINDINGS:
            raise _GiveUpError

    def read(self, text: str) -> None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            at: Any = event.start_mark
            mark = (at.line + 1, at.column + 1)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.report(mark, "Y108", "a second document starts here", "keep one document in a file")
                    return
            elif isinstance(event, yaml.AliasEvent):
                self.report(mark, "Y103", f"alias *{event.anchor}", "write the value out")
                self._add(None, mark)
            elif isinstance(event, yaml.ScalarEvent):
                self._refuse_properties(event, mark)
                self._scalar(event, mark)
            elif isinstance(event, yaml.CollectionStartEvent):
                self._refuse_properties(event, mark)
                self._open(Map() if isinstance(event, yaml.MappingStartEvent) else Seq(), mark)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._stack.pop()
        if self.source.data is None and not self.findings:
            self.report((1, 1), "Y107", "the file is empty", "see the header comment of a shipped file for its keys")

    def _refuse_properties(self, event: Any, mark: Mark) -> None:
        if event.anchor:
            self.report(mark, "Y103", f"anchor &{event.anchor}", "write the value out where it is needed")
        if event.tag:
            self.report(mark, "Y103", f"tag {event.tag}", "remove the tag")

    def _scalar(self, event: Any, mark: Mark) -> None:
        value: Any = event.value
        if self._expects_key():
            if not event.style and (value == "<<" or _INTEGER.match(value) or _AMBIGUOUS.match(value)):
                code = "Y103" if value == "<<" else "Y106"
                self.report(mark, code, f"key {value} is not a plain string", f'write "{value}": ...')
            self._key(value, mark)
            return
        if not event.style:  # plain; libyaml says "", the pure parser None
            if value in _CONSTANTS:
                value = _CONSTANTS[value]
            elif _INTEGER.match(value):
                value = int(value)
            elif _AMBIGUOUS.match(value):
                hint = f'quote it if it is text: "{value}"; else write {_plainly(value)}'
                self.report(mark, "Y104", f"{value} reads differently in YAML 1.1 and 1.2", hint)
        self._add(value, mark)

    def _expects_key(self) -> bool:
        return bool(self._stack) and isinstance(self._stack[-1][0], Map) and self._stack[-1][1] is None

    def _key(self, key: str, mark: Mark) -> None:
        parent = self._stack[-1][0]
        assert isinstance(parent, Map)
        if key in parent:
            first = parent.marks[key][0]
            where = self._path() or "the top level"
            message = f"key {key!r} of {where} occurs twice: line {first[0]} and line {mark[0]}"
            self.report(mark, "Y102", message, "keep one of them")
        self._stack[-1] = (parent, key, mark)

    def _add(self, value: Any, mark: Mark) -> None:
        if not self._stack:
            self.source.data = value
            return
        parent, key, key_mark = self._stack[-1]
        if isinstance(parent, Seq):
            parent.append(value)
            parent.marks.append(mark)
        elif key is None:
            self.report(mark, "Y106", "a key must be a string", "use a plain word as the key")
            raise _GiveUpError
        else:
            if key not in parent:
                parent[key] = value
                parent.marks[key] = (key_mark, mark)
            self._stack[-1] = (parent, None, mark)

    def _open(self, container: Map | Seq, mark: Mark) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self.report(mark, "Y100", f"more than {MAX_DEPTH} levels of nesting", "no file here needs more than ten")
            raise _GiveUpError
        self._add(container, mark)
        self._stack.append((container, None, mark))

    def _path(self) -> str:
        steps: list[str] = []
        for container, key, _ in self._stack[:-1]:
            steps.append(str(len(container) - 1) if isinstance(container, Seq) else self._last_key(container, key))
        return ".".join(steps)

    @staticmethod
    def _last_key(container: Map, key: str | None) -> str:
        return key if key is not None else next(reversed(container), "")


def _plainly(value: str) -> str:
    """What is written instead of an ambiguous value that is no text."""
    word = value.lower()
    if word in ("y", "yes", "on", "true"):
        return "true"
    return "false" if word in ("n", "no", "off", "false") else "null" if word == "null" else "a plain whole number"


def _slip(lines: Sequence[str], number: int) -> tuple[Mark, str, str, str] | None:
    """The commonest slips, of which YAML's own message says something else, perhaps lines later."""
    for line, text in enumerate(lines[:number], 1):
        if _CONFLICT.match(text.rstrip()):
            return (line, 1), "Y101", "a merge conflict marker", "keep one of the two sides, without the markers"
    indent = re.match(r"\s*", lines[number - 1] if number <= len(lines) else "")
    if indent and (column := indent[0].find("\t") + 1):
        return (number, column), "Y101", "a tab before the text", "indent with spaces"
    return None


def _error_mark(error: yaml.YAMLError, text: str) -> Mark:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return (mark.line + 1, mark.column + 1)
    position = getattr(error, "position", None)
    if isinstance(position, int):
        before = text[:position]
        return (before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)
    return (1, 1)


def _error_text(error: yaml.YAMLError) -> str:
    character = getattr(error, "character", None)
    if character is not None:
        code = ord(character) if isinstance(character, str) else character
        return f"character U+{code:04X} is not allowed in YAML"
    problem = getattr(error, "problem", None) or str(error).split("\n")[0]
    context = getattr(error, "context", None)
    return f"{context}: {problem}" if context else str(problem)
