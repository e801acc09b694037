"""JSON Schema errors as findings with positions, near-miss hints and no noise from branches nobody meant."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mla_prefill.capabilities.findings import Finding, nearest
from mla_prefill.capabilities.source import MAX_FINDINGS, SourceFile

SCHEMA_DIR = Path(__file__).parent / "schema"
SCHEMA_VERSION = 1
#: (schema, SHA-256) of files without findings: a reload, or an overlay, leaves most files as they were.
_passed: set[tuple[str, bytes]] = set()
_TYPES = {"object": "a mapping", "array": "a list", "string": "a string", "integer": "a whole number", "null": "null"}


@functools.cache
def validator(name: str) -> Any:
    """The draft-07 validator of ``schema/<name>.schema.json``."""
    import jsonschema  # 70 ms to import; only checking needs it

    schema = json.loads((SCHEMA_DIR / f"{name}.schema.json").read_text(encoding="utf-8"))
    return jsonschema.Draft7Validator(schema)


def validate(source: SourceFile, name: str) -> list[Finding]:
    """Everything in ``source`` that its schema refuses."""
    content = (name, hashlib.sha256(source.raw).digest())
    if content in _passed:
        return []
    findings = _refused(source, name)
    if not findings:
        if len(_passed) >= 256:  # so that a process that reads ever other files does not grow
            _passed.clear()
        _passed.add(content)
    return findings


def _refused(source: SourceFile, name: str) -> list[Finding]:
    if not isinstance(source.data, dict):
        hint = f"the file must be a mapping with schema_version and {name}"
        return [source.finding((1, 1), "S203", f"expected a mapping, got {_say(source.data)}", hint)]
    version = source.data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        mark = source.locate(["schema_version"])
        message = f"schema_version {version!r} is not readable by this program"
        return [source.finding(mark, "S206", message, f"it reads schema_version {SCHEMA_VERSION}")]
    found = (f for error in validator(name).iter_errors(source.data) for f in _findings(source, error))
    return sorted(set(itertools.islice(found, MAX_FINDINGS)))


def _findings(source: SourceFile, error: Any) -> Iterator[Finding]:
    path = list(error.absolute_path)
    where = ".".join(map(str, path)) or "the top level"
    mark = source.locate(path)
    kind, expected, value = error.validator, error.validator_value, error.instance
    if kind in ("anyOf", "oneOf") and error.context:
        for chosen in _meant_branch(error):
            yield from _findings(source, chosen)
    elif kind == "additionalProperties":
        known = list(error.schema.get("properties", ()))
        for key in value:
            if key not in known:
                yield source.finding(
                    source.locate([*path, key], key=True),
                    "S201",
                    f"unknown key {key!r} in {where}",
                    nearest(key, known),
                )
    elif kind == "required":
        for key in expected:
            if key not in value:
                about = error.schema.get("properties", {}).get(key, {}).get("description", "")
                yield source.finding(
                    source.locate(path, key=True), "S202", f"{where} has no {key!r}", f"add {key}: {about}".rstrip(": ")
                )
    elif kind == "type":
        wanted = " or ".join(_TYPES.get(t, t) for t in ([expected] if isinstance(expected, str) else expected))
        hint = f'quote this value: "{value}"' if "string" in expected and isinstance(value, int | bool) else ""
        yield source.finding(mark, "S203", f"{where} must be {wanted}, got {_say(value)}", hint)
    elif kind in ("enum", "const"):
        allowed = expected if kind == "enum" else [expected]
        yield source.finding(mark, "S204", f"{where} cannot be {_say(value)}", nearest(value, map(str, allowed)))
    elif kind == "pattern":
        about = error.schema.get("description", "")
        yield source.finding(
            mark, "S205", f"{where}: {_say(value)} has the wrong form", about or f"expected {expected}"
        )
    else:
        message = f"{where}: {_short(error.message)}"
        about = "" if kind == "not" else error.schema.get("description", "")
        if kind in ("minimum", "maximum"):
            low, high = (error.schema.get(bound) for bound in ("minimum", "maximum"))
            about = f"write a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
        yield source.finding(mark, "S200", message, about)


def _meant_branch(error: Any) -> list[Any]:
    """The errors of the one alternative that the value was meant to be: right type, then fewest errors."""
    branches: dict[Any, list[Any]] = {}
    for child in error.context:
        branches.setdefault(child.schema_path[0], []).append(child)
    depth = len(error.absolute_path)

    def distance(children: list[Any]) -> tuple[bool, int]:
        wrong_type = any(c.validator == "type" and len(c.absolute_path) == depth for c in children)
        return wrong_type, len(children)

    return min(branches.values(), key=distance)


def _say(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else _short(repr(value) if isinstance(value, str) else str(value).lower())


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
