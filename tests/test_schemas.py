"""Every part of our own schemas: positive files that meet every property, negative cases that break every rule alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from mla_prefill.capabilities import schema
from mla_prefill.capabilities.findings import CODES, Finding
from mla_prefill.capabilities.report import as_sarif
from mla_prefill.capabilities.source import SourceFile, parse


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = module_of(Path(__file__).parent / "record_schema_cases.py")


def cases_of(kind: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((record.FOLDER / "negative" / f"{kind}.json").read_text(encoding="utf-8"))
    return cases


def text_of(kind: str, case: dict[str, Any]) -> str:
    """The positive file with the case's lines in place of its own."""
    lines = record.positive(kind).splitlines()
    lines[case["line"] - 1 : case["line"] - 1 + case["lines"]] = case["write"]
    return "\n".join(lines) + "\n"


def parsed(kind: str, text: str) -> Any:
    return json.loads(text) if kind in record.LISTS else yaml.safe_load(text)


@pytest.mark.parametrize("kind", record.SCHEMAS)
def test_our_schemas_are_schemas_themselves(kind: str) -> None:
    jsonschema.Draft7Validator.check_schema(record.schema_of(kind))


@pytest.mark.parametrize("kind", record.SCHEMAS)
def test_the_positive_file_is_clean_and_meets_every_property(kind: str) -> None:
    text = record.positive(kind)
    assert record.findings(kind, text) == []
    watch = record.Watch(kind)
    assert watch.errors(parsed(kind, text)) == 0
    assert watch.met == record.properties(kind)


def test_a_file_that_passed_is_not_held_to_its_schema_again(monkeypatch: pytest.MonkeyPatch) -> None:
    text = record.positive("matrix")
    assert record.findings("matrix", text) == []
    monkeypatch.setattr(schema, "validator", lambda name: 1 / 0)
    assert record.findings("matrix", text) == []
    with pytest.raises(ZeroDivisionError):  # other bytes, so the validator is asked
        record.findings("matrix", text + "# changed\n")
    source = SourceFile("matrix.yaml", text.encode())
    assert parse(source) == []
    with pytest.raises(ZeroDivisionError):  # another schema
        schema.validate(source, "models")


@pytest.mark.parametrize("kind", record.SCHEMAS)
def test_every_rule_is_broken_by_a_case(kind: str) -> None:
    assert {tuple(case["breaks"].split(" ", 1)) for case in cases_of(kind)} == record.rules(kind)


@pytest.mark.parametrize("kind", record.SCHEMAS)
def test_each_case_breaks_its_rule_and_is_told_at_its_place(kind: str) -> None:
    watch = record.Watch(kind)
    for case in cases_of(kind):
        text = text_of(kind, case)
        assert watch.errors(parsed(kind, text)) > 0
        assert tuple(case["breaks"].split(" ", 1)) in watch.refused, case
        assert record.findings(kind, text) == case["finds"] != [], case
        place = case["finds"][0].split()[1].split(":")[0]
        last = case["line"] + max(len(case["write"]), 1)
        assert 1 <= int(place) <= last, case


# ---- SARIF ----------------------------------------------------------------------------------------------------------


def test_sarif_is_as_its_schema_says() -> None:
    """The parts of SARIF 2.1.0 that we write, as a schema of their own: no package at hand ships the official one."""
    schema = json.loads((record.FOLDER / "sarif-2.1.0-subset.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    found = [
        Finding(f"a b/{code}.yaml", i, i, code, f"{code}: \N{BULLET}", "hint", "error" if i % 2 else "notice")
        for i, code in enumerate(CODES, 1)
    ]
    for findings in ([], found):
        log = json.loads(as_sarif(findings))
        jsonschema.validate(log, schema, cls=jsonschema.Draft7Validator)
        run = log["runs"][0]
        assert [run["tool"]["driver"]["rules"][r["ruleIndex"]]["id"] for r in run["results"]] == [
            r["ruleId"] for r in run["results"]
        ]
        assert len({rule["id"] for rule in run["tool"]["driver"]["rules"]}) == len(CODES)
