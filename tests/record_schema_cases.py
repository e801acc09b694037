"""Writes tests/data/schemas/negative/*.json: every way to break one rule of one of our schemas, and what is said then.

    python tests/record_schema_cases.py

Each case is one change of the file of the same name in tests/data/schemas/positive: the lines that are replaced, what
stands there instead, and the findings, as "CODE line:column message". A case breaks one keyword of the schema; where
one change cannot break it alone, the case that breaks fewest is kept. Review the diff: it is what people will read.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from mla_prefill.capabilities import load_matrix
from mla_prefill.capabilities.load import KINDS, Sources
from mla_prefill.capabilities.record_checks import LISTS, check_records
from mla_prefill.capabilities.schema import SCHEMA_DIR, validate
from mla_prefill.capabilities.source import SourceFile, parse

FOLDER = Path(__file__).parent / "data" / "schemas"
SCHEMAS = (*KINDS, *LISTS)
#: Keywords that hold no rule of their own: what is below them does.
STRUCTURE = {"properties", "items", "anyOf", "oneOf", "allOf", "if", "then", "else", "not", "contains", "propertyNames"}
STRUCTURE |= {"definitions", "$ref", "$schema", "title", "description"}
Rule = tuple[str, str]  # where in the schema, and the keyword (with the key, for required)


def suffix(kind: str) -> str:
    return "json" if kind in LISTS else "yaml"


def positive(kind: str) -> str:
    return (FOLDER / "positive" / f"{kind}.{suffix(kind)}").read_text(encoding="utf-8")


def findings(kind: str, text: str) -> list[str]:
    """What `check` says of this text, where it stands in for a file of the kind."""
    source = SourceFile(f"{kind}.{suffix(kind)}", text.encode())
    if kind in LISTS:
        found = list(check_records(Sources({}, **{kind: [source]}), load_matrix()))
    else:
        found = parse(source) or validate(source, kind)
    return [f"{f.code} {f.line}:{f.column} {f.message}" for f in sorted(found)]


# ---- which rules there are, and which a document breaks -------------------------------------------------------------


def schema_of(kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMA_DIR / f"{kind}.schema.json").read_text(encoding="utf-8"))
    return schema


def schemas_within(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, schema) of a schema and of all below it."""
    yield path, schema
    for key in ("properties", "definitions"):
        for name, child in schema.get(key, {}).items():
            yield from schemas_within(child, f"{path}/{key}/{name}")
    for key in ("items", "additionalProperties", "propertyNames", "not", "if", "then", "else", "contains"):
        if isinstance(schema.get(key), dict):
            yield from schemas_within(schema[key], f"{path}/{key}")
    for key in ("anyOf", "oneOf", "allOf"):
        for i, child in enumerate(schema.get(key, ())):
            yield from schemas_within(child, f"{path}/{key}/{i}")


def rules(kind: str) -> set[Rule]:
    """Every rule of a schema; of `required`, one for each key."""
    found: set[Rule] = set()
    for path, schema in schemas_within(schema_of(kind)):
        for keyword, value in schema.items():
            if keyword == "required":
                found |= {(path, f"required {key}") for key in value}
            elif keyword not in STRUCTURE and not isinstance(value, dict):
                found.add((path, keyword))
    return found


def properties(kind: str) -> set[Rule]:
    """Every property that a document can have; one that is not {} is a rule against it."""
    found = ((path, schema.get("properties", {})) for path, schema in schemas_within(schema_of(kind)))
    return {(path, name) for path, children in found for name, child in children.items() if "not" not in child}


class Watch:
    """A validator that notes which rules refuse something and which properties are met."""

    def __init__(self, kind: str) -> None:
        schema = schema_of(kind)
        paths = {id(child): path for path, child in schemas_within(schema)}
        self.refused: set[Rule] = set()
        self.met: set[Rule] = set()

        def watched(keyword: str, check: Any) -> Any:
            def run(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
                path = paths.get(id(schema), "")
                if keyword == "properties" and isinstance(instance, dict):
                    self.met |= {(path, name) for name in value if name in instance}
                errors = list(check(validator, value, instance, schema) or ())
                if keyword == "required" and isinstance(instance, dict):
                    self.refused |= {(path, f"required {key}") for key in value if key not in instance}
                elif errors:
                    self.refused.add((path, keyword))
                yield from errors

            return run

        base = jsonschema.Draft7Validator
        keywords = {name: watched(name, check) for name, check in base.VALIDATORS.items()}
        self.validator = jsonschema.validators.extend(base, keywords)(schema)

    def errors(self, document: Any) -> int:
        self.refused, self.met = set(), set()
        return len(list(self.validator.iter_errors(document)))


# ---- breaking one rule ----------------------------------------------------------------------------------------------


def changes(document: Any) -> Iterator[Any]:
    """Documents with one thing changed: every value replaced, emptied, doubled, removed, every mapping given more."""
    yield ["text"]
    for path in list(paths_in(document)):
        value = at(document, path)
        for new in instead(value):
            yield changed(document, path, lambda parent, key, new=new: parent.__setitem__(key, new))
        if path and isinstance(at(document, path[:-1]), dict):
            yield changed(document, path, lambda parent, key: parent.pop(key))
            yield changed(document, path, lambda parent, key: renamed(parent, key, "Not A Name"))


def instead(value: Any) -> Iterator[Any]:
    yield from (["text"], {"surplus": 1}, "!!", "", 1.5, True, None, 7)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (-1, 0, 1, 99999)
    elif isinstance(value, list):
        yield from ([], value + value[:1], value + [value[0] if value else 1] * 3, value[:-1])
    elif isinstance(value, dict):
        yield from ({}, {**value, "surplus": 1}, {**value, "fa_version": 2}, {**value, "capability": "9.0"})


def paths_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths_in(child, (*path, key))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def changed(document: Any, path: tuple[Any, ...], change: Any) -> Any:
    copy = json.loads(json.dumps(document))
    change(at(copy, path[:-1]), path[-1])
    return copy


def renamed(mapping: dict[str, Any], key: str, name: str) -> None:
    items = [(name if k == key else k, v) for k, v in mapping.items()]
    mapping.clear()
    mapping.update(items)


def text_of(kind: str, document: Any) -> str:
    if kind in LISTS:
        return json.dumps(document, indent=1) + "\n"
    return yaml.safe_dump(document, sort_keys=False, width=1000)


def replaced(old: list[str], new: list[str]) -> tuple[int, int, list[str]]:
    """The one run of lines that differs: its first line and how many (1-based), and what stands there instead."""
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    edits = [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in blocks if tag != "equal"]
    first, last = edits[0], edits[-1]
    return first[0] + 1, last[1] - first[0], new[first[2] : last[3]]


def cases(kind: str) -> list[dict[str, Any]]:
    """One case for each rule that a change can break, the one that breaks fewest others."""
    text = positive(kind)
    document = json.loads(text) if kind in LISTS else yaml.safe_load(text)
    assert text_of(kind, document) == text, f"{kind}: write the positive file as it is dumped"
    watch, best = Watch(kind), dict[Rule, tuple[int, int, Any]]()
    assert watch.errors(document) == 0, findings(kind, text)
    allowed = watch.refused  # alternatives that were not meant refuse even a good document
    for number, candidate in enumerate(changes(document)):
        errors = watch.errors(candidate)
        for rule in watch.refused if errors else ():
            rank = (len(watch.refused - allowed), number)
            if rule not in best or rank < best[rule][:2]:
                best[rule] = (*rank, candidate)
    found = []
    for rule in sorted(rules(kind) & best.keys()):
        new = text_of(kind, best[rule][2])
        line, count, lines = replaced(text.splitlines(), new.splitlines())
        said = findings(kind, new)
        found.append({"breaks": " ".join(rule), "line": line, "lines": count, "write": lines, "finds": said})
    return found


def main() -> None:
    (FOLDER / "negative").mkdir(exist_ok=True)
    for kind in SCHEMAS:
        found = cases(kind)
        lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in found)
        (FOLDER / "negative" / f"{kind}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        missing = rules(kind) - {tuple(case["breaks"].split(" ", 1)) for case in found}
        print(
            f"{kind}: {len(found)} cases", *sorted(map(" ".join, missing)), sep="\n    not broken: " if missing else " "
        )


if __name__ == "__main__":
    main()
