"""Strict YAML: every surprise is a finding with its exact place. Cases C61 to C69 of the public reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mla_prefill.capabilities import checks
from mla_prefill.capabilities.findings import CODES
from mla_prefill.capabilities.load import DATA_DIR, KINDS
from mla_prefill.capabilities.source import MAX_BYTES, MAX_FINDINGS, SourceFile, parse

# text, the findings as (line, column, code), a part of the message or hint
TEXTS = [
    pytest.param(
        "a: 1\nb: {c: 1, d: 2, c: 3}\n", [(2, 17, "Y102")], "key 'c' of b occurs twice: line 2", id="C61 flow"
    ),
    pytest.param(
        "sm90:\n  - fa3: {x: 1}\n    deep:\n      fa3: 1\n      fa4: 2\n      fa3: 2\n",
        [(6, 7, "Y102")],
        "key 'fa3' of sm90.0.deep occurs twice: line 4 and line 6",
        id="C61 three levels deep",
    ),
    pytest.param(
        "".join(f"s{i}:\n  service: 1\n" for i in range(40)) + "last:\n  service: 1\n  service: 2\n",
        [(83, 3, "Y102")],
        "key 'service' of last occurs twice: line 82 and line 83",
        id="C69 the parent and both lines",
    ),
    pytest.param("layout: NO\n", [(1, 9, "Y104")], 'quote it if it is text: "NO"', id="C62 NO"),
    pytest.param(
        "state: on\nok: yes\n", [(1, 8, "Y104"), (2, 5, "Y104")], 'quote it if it is text: "on"', id="C62 on, yes"
    ),
    pytest.param("arch: [off]\n", [(1, 8, "Y104")], 'quote it if it is text: "off"', id="C62 off"),
    pytest.param("flag: True\n", [(1, 7, "Y104")], "quote", id="C62 booleans are true and false alone"),
    pytest.param("min_version: 3.10\n", [(1, 14, "Y104")], 'quote it if it is text: "3.10"', id="C63 3.10"),
    pytest.param(
        "cudnn: 9.20\ncap: 9.0\n", [(1, 8, "Y104"), (2, 6, "Y104")], 'quote it if it is text: "9.20"', id="C63 floats"
    ),
    pytest.param("a: 1:30\nb: 0100\nc: 1_000\nd: 0x1F\n", [(i, 4, "Y104") for i in (1, 2, 3, 4)], "1:30", id="numbers"),
    pytest.param("date: 2026-11-30\n", [(1, 7, "Y104")], "quote", id="dates"),
    pytest.param("", [(1, 1, "Y107")], "empty", id="C64 empty file"),
    pytest.param("# only\n# comments\n", [(1, 1, "Y107")], "empty", id="C64 only comments"),
    pytest.param("a: &x 1\nb: *x\n", [(1, 4, "Y103"), (2, 4, "Y103")], "anchor &x", id="anchor and alias"),
    pytest.param("<<: {a: 1}\n", [(1, 1, "Y103")], "<<", id="merge key"),
    pytest.param("a: !!python/object/apply:os.system [ls]\n", [(1, 4, "Y103")], "tag", id="tags are never honoured"),
    pytest.param("2: a\n", [(1, 1, "Y106")], 'write "2"', id="a number as a key"),
    pytest.param("? [a]\n: b\n", [(1, 3, "Y106")], "string", id="a list as a key"),
    pytest.param("a: 1\n---\nb: 2\n", [(2, 1, "Y108")], "second document", id="two documents"),
    pytest.param("a: [1\n", [(2, 1, "Y101")], "flow sequence", id="unclosed list"),
    pytest.param("a: b: c\n", [(1, 5, "Y101")], "mapping values", id="colon in a plain value"),
    pytest.param("a: 96.0\n", [(1, 4, "Y104")], 'if it is text: "96.0"; else write a plain whole number', id="a float"),
    pytest.param("a: off\n", [(1, 4, "Y104")], 'if it is text: "off"; else write false', id="a switch"),
    pytest.param("a: Null\n", [(1, 4, "Y104")], "else write null", id="nothing"),
    pytest.param("\tkey: 1\n", [(1, 1, "Y101")], "indent with spaces", id="tab"),
    pytest.param("a:\n  - 1\n  \t- 2\n", [(3, 3, "Y101")], "a tab before the text", id="tab after blanks"),
    pytest.param("a: b\n\tc: d\n", [(2, 1, "Y101")], "a tab before the text", id="tab before a key"),
    pytest.param("a:\r\n\t- 2\r\n", [(2, 1, "Y101")], "a tab before the text", id="tab, CRLF"),
    pytest.param("a: |\n  x\n  \ty\nb: c: d\n", [(4, 5, "Y101")], "mapping values", id="a tab that does no harm"),
    pytest.param("a:\n<<<<<<< HEAD\n  - 1\n", [(2, 1, "Y101")], "a merge conflict marker", id="conflict, ours"),
    pytest.param("a:\n  - 1\n=======\n  - 2\n", [(3, 1, "Y101")], "keep one of the two sides", id="conflict, between"),
    pytest.param("a: 1\n>>>>>>> main\n", [(2, 1, "Y101")], "a merge conflict marker", id="conflict, theirs"),
    pytest.param("a: 1\n||||||| base\n", [(2, 1, "Y101")], "a merge conflict marker", id="conflict, base"),
    pytest.param("a: \x07\n", [(1, 4, "Y101")], "U+0007", id="control character"),
    pytest.param("[" * 100, [(1, 33, "Y100")], "nesting", id="deep nesting"),
]


@pytest.mark.parametrize("loader", ["libyaml", "pure"])
@pytest.mark.parametrize(("text", "places", "says"), TEXTS)
def test_every_surprise_has_its_place(
    text: str, places: list[tuple[int, int, str]], says: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C66: libyaml and the pure parser, and so CI and run time, agree on every file."""
    if loader == "pure":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    findings = parse(SourceFile("f.yaml", text.encode()))
    assert [(f.line, f.column, f.code) for f in findings] == places
    assert says in "\n".join(map(str, findings))


@pytest.mark.parametrize("directive", ["", "%YAML 1.1\n---\n", "%YAML 1.2\n---\n"])
def test_a_version_directive_changes_nothing(directive: str) -> None:
    """C66: `on` is refused and `true` is a boolean, whatever the file says it is."""
    source = SourceFile("f.yaml", f"{directive}a: on\nb: true\nc: null\nd: 'no'\ne: -3\nf: '3.10'\n".encode())
    assert [f.code for f in parse(source)] == ["Y104"]
    assert source.data == {"a": "on", "b": True, "c": None, "d": "no", "e": -3, "f": "3.10"}


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbfa: 1\r\nb: x\r\n", b"a: 1\nb: x\n"], ids=["BOM and CRLF", "plain"])
def test_bom_and_line_ends_do_not_matter(raw: bytes) -> None:
    source = SourceFile("f.yaml", raw)
    assert parse(source) == []
    assert source.data == {"a": 1, "b": "x"}
    assert source.locate(["b"]) == (2, 4)
    assert source.locate(["b"], key=True) == (2, 1)


def test_other_encodings_are_named() -> None:
    [finding] = parse(SourceFile("f.yaml", "a: 1\nb: ü\n".encode("latin-1")))
    assert (finding.line, finding.column, finding.code) == (2, 4, "Y105")
    [finding] = parse(SourceFile("f.yaml", "a: 1\n".encode("utf-16")))
    assert finding.code == "Y105"


def test_a_huge_file_is_refused_before_it_is_parsed() -> None:
    [finding] = parse(SourceFile("f.yaml", b"a: 1\n" * (MAX_BYTES // 5 + 1)))
    assert finding.code == "Y100"


def test_findings_of_one_file_are_bounded() -> None:
    assert len(parse(SourceFile("f.yaml", b"- no\n" * 10_000))) == MAX_FINDINGS


@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_no_bytes_raise(raw: bytes) -> None:
    source = SourceFile("f.yaml", raw)
    findings = parse(source)
    assert all(f.code in CODES and f.line >= 1 and f.column >= 1 for f in findings)
    assert findings or source.data is not None or raw.strip() in (b"null", b"~", b"''") or source.data is None


@given(
    st.recursive(
        st.integers(-5, 5) | st.booleans() | st.text("abc: -#'\"", max_size=6),
        lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("abcd", min_size=1, max_size=3), v, max_size=3),
        max_leaves=12,
    )
)
def test_what_is_written_quoted_is_read_back(value: object) -> None:
    source = SourceFile("f.yaml", yaml.safe_dump({"root": value}, default_style='"').encode())
    findings = parse(source)
    # default_style quotes and tags non-strings; only those tags may be objected to
    assert {f.code for f in findings} <= {"Y103"}


# ---- schema -----------------------------------------------------------------------------------------------------


def edit_and_check(folder: Path) -> list[str]:
    return [str(f).replace(str(folder) + "/", "") for f in checks.check_path(folder) if f.severity == "error"]


# file, old text, new text, the finding's start, a part of the rest
EDITS = [
    pytest.param(
        "matrix.yaml",
        "schema_version: 1",
        "schema_version: 1\nextra: 2",
        "S201 unknown key 'extra'",
        "",
        id="C64 top-level key",
    ),
    pytest.param(
        "matrix.yaml",
        "v_head: 128}",
        "v_heads: 128}",
        "S201 unknown key 'v_heads'",
        "did you mean v_head?",
        id="misspelled key",
    ),
    pytest.param("matrix.yaml", "v_head: 128}", "v_heads: 128}", "S202", "'v_head'", id="and what is missing"),
    pytest.param(
        "matrix.yaml",
        "qk_nope: 64",
        "qk_nope: -64",
        "S200",
        "write a whole number of at least 0 and at most 4096",
        id="negative dims",
    ),
    pytest.param("matrix.yaml", "qk_nope: 64", "qk_nope: '64'", "S203", "whole number", id="dims as text"),
    pytest.param(
        "kernels.yaml",
        "backend: FLASH_ATTN",
        "backend: FLASH_ATTENTION",
        "S204",
        "did you mean FLASH_ATTN?",
        id="backend",
    ),
    pytest.param("kernels.yaml", "v: equal}", "v: equals}", "S20", "equal", id="C65 only the meant branch"),
    pytest.param(
        "matrix.yaml", "schema_version: 1", "schema_version: 2", "S206", "schema_version 1", id="a newer schema"
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "code", "says"), EDITS)
def test_schema_errors_have_a_place_and_a_hint(edited, name: str, old: str, new: str, code: str, says: str) -> None:  # type: ignore[no-untyped-def]
    folder = edited(name, old, new)
    lines = (folder / name).read_text().split("\n")
    line = next(i for i, text in enumerate(lines, 1) if new.split("\n")[-1] in text)
    findings = edit_and_check(folder)
    assert any(f.startswith(f"{name}:{line}:") and code in f and says in f for f in findings), findings


def test_findings_of_all_files_come_in_one_run(data_folder: Path) -> None:
    for kind in KINDS:
        path = data_folder / f"{kind}.yaml"
        path.write_text(path.read_text(encoding="utf-8") + "\nunknown_top: 1\n", encoding="utf-8")
    found = [f.path for f in checks.check_path(data_folder) if f.code == "S201"]
    assert sorted(Path(p).stem for p in found) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "42\n", "null\n"])
def test_a_file_of_another_shape_is_one_finding(data_folder: Path, kind: str, text: str) -> None:
    (data_folder / f"{kind}.yaml").write_text(text)
    [finding] = [f for f in checks.check_path(data_folder) if f.severity == "error"]
    assert finding.path.endswith(f"{kind}.yaml")
    assert finding.code in ("S203", "Y107")


def test_the_shipped_files_are_clean() -> None:
    assert [str(f) for f in checks.check_path() if f.severity == "error"] == []


def test_the_shipped_files_are_read_alike_by_plain_yaml() -> None:
    """C66: nothing in our files means something else to another YAML 1.1 tool."""
    for kind in KINDS:
        raw = (DATA_DIR / f"{kind}.yaml").read_bytes()
        source = SourceFile(kind, raw)
        assert parse(source) == []
        assert yaml.safe_load(raw) == source.data
