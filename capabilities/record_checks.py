"""Rules about records: evidence and timing profiles are readable, and evidence does not contradict the sheets.

They run in `check` only. A load decides nothing by records, so it does not stop for one.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

from mla_prefill.capabilities import evidence, profiles, versions
from mla_prefill.capabilities.evidence import Item
from mla_prefill.capabilities.findings import MAX_BYTES, Finding, nearest
from mla_prefill.capabilities.load import Sources
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.model import DTYPES, MLADimensions
from mla_prefill.capabilities.schema import validator
from mla_prefill.capabilities.source import SourceFile

Findings = Iterator[Finding]
#: What a file of each kind lists, one entry a line as it is written.
LISTS = {"evidence": "cells", "measured": "readings"}
#: A file of another kind would give a finding for every entry.
MAX_FINDINGS = 20


def check_records(sources: Sources, matrix: Matrix) -> Findings:
    """Every finding about records."""
    for label in sources.no_files:
        yield Finding(label, 1, 1, "X360", "not a regular file, so no record is read from it", "move or rename it")
    for kind, files in (("evidence", sources.evidence), ("measured", sources.measured)):
        for source in files:
            yield from itertools.islice(_unreadable(source, kind, matrix), MAX_FINDINGS)
    for item in evidence.items(sources.evidence):
        yield from _contradictions(item, matrix)


def _unreadable(source: SourceFile, kind: str, matrix: Matrix) -> Findings:
    """Malformed, or about a kernel or architecture that nobody declared."""
    again = "write it anew with mla-prefill " + ("verify" if kind == "evidence" else "bench")
    if len(source.raw) > MAX_BYTES:
        yield source.finding((1, 1), "X360", f"larger than {MAX_BYTES // 2**20} MiB", again)
        return
    try:
        record = evidence.read_json(source.raw)
    except json.JSONDecodeError as error:
        yield source.finding((error.lineno, error.colno), "X360", f"not readable JSON: {error.msg}", again)
        return
    except (ValueError, RecursionError) as error:
        yield source.finding((1, 1), "X360", f"not readable JSON: {error}", again)
        return
    wrong = False
    for path, message, hint in _refused(source.raw, kind):
        wrong = True
        where = ".".join(map(str, path)) or "the top level"
        yield source.finding((_line(source, kind, path), 1), "X360", f"{where}: {message}", hint or again)
    if wrong:
        return
    for path, what, name, known in _names(record, kind, matrix):
        wrong = True
        mark = (_line(source, kind, path), 1)
        yield source.finding(mark, "X360", f"unknown {what} {name!r}", nearest(name, known))
    for number, entry in enumerate(record[LISTS[kind]]):
        if problem := _wrong_dims(entry):
            wrong = True
            yield source.finding((_line(source, kind, [LISTS[kind], number]), 1), "X360", problem, again)
    if wrong:
        return
    for number, problem in _no_versions(record[LISTS[kind]], record["packages"]):
        yield source.finding((_line(source, kind, [LISTS[kind], number]), 1), "X360", problem, again)
    if kind == "measured":
        try:
            profiles.read(source.label, source.raw)
        except ValueError as error:
            yield source.finding((1, 1), "X360", str(error), again)


@functools.lru_cache(maxsize=32)  # the same records are beside many sheets: of several files, revisions, proposals
def _refused(raw: bytes, kind: str) -> list[tuple[list[Any], str, str | None]]:
    """(path, message, what to do) of what the schema refuses in a record that can be read."""
    refused = itertools.islice(validator(kind).iter_errors(evidence.read_json(raw)), MAX_FINDINGS)
    return [(list(r.absolute_path), r.message[:160], r.schema.get("description")) for r in refused]


def _names(record: dict[str, Any], kind: str, matrix: Matrix) -> Iterator[tuple[list[Any], str, str, list[str]]]:
    """(path, what it is, the name, the known ones) of each name that nobody declared."""
    arches, kernels = list(matrix.architectures), list(matrix.kernels)
    if record.get("arch", arches[0]) not in arches:
        yield ["arch"], "architecture", record["arch"], arches
    for number, entry in enumerate(record[LISTS[kind]]):
        at = [LISTS[kind], number]
        if entry["kernel"] not in kernels:
            yield at, "kernel", entry["kernel"], kernels
        elif (provider := entry.get("provider")) is not None:
            known = [versions.canonical(p.distribution) for p in matrix.kernels[entry["kernel"]].providers]
            if provider not in known:
                yield at, f"provider of {entry['kernel']}", provider, known
        if entry.get("arch", arches[0]) not in arches:
            yield at, "architecture", entry["arch"], arches
        if entry.get("dtype", DTYPES[0]) not in DTYPES:
            yield at, "dtype", entry["dtype"], list(DTYPES)


def _wrong_dims(entry: dict[str, Any]) -> str | None:
    try:
        dims = MLADimensions(*entry["dims"])
    except ValueError as error:
        return str(error)
    widths = (entry.get("qk", dims.qk_head_dim), entry.get("v", dims.v_head_dim))
    if widths == (dims.qk_head_dim, dims.v_head_dim):
        return None
    return f"{dims} has qk {dims.qk_head_dim} and v {dims.v_head_dim}, the entry says qk {widths[0]} and v {widths[1]}"


def _no_versions(entries: list[dict[str, Any]], packages: dict[str, str]) -> Iterator[tuple[int, str]]:
    """(the first entry, what is wrong) of each provider without a version: what is of no version proves nothing."""
    first = {entry.get("provider"): number for number, entry in reversed(list(enumerate(entries)))}
    for provider, number in first.items():
        if provider is not None and not versions.contains("", packages.get(provider, "")):
            said = f"{packages[provider]!r}, which is no version" if provider in packages else "none"
            yield number, f"packages must have the version of {provider}, whose build this was; it has {said}"


def _contradictions(item: Item, matrix: Matrix) -> Findings:
    """What failed where a row or the kernel sheet says it runs, and what ran where the sheet says it cannot."""
    cell = evidence.cell_of(item, matrix)
    if cell is None or item.source is None:
        return
    mark = (_line(item.source, "evidence", ["cells", item.number]), 1)
    if evidence.contradicts(item, matrix):
        said = f"{item} failed: {item.cell.get('refusal') or 'no reason is on record'}"
        if cell.allowed:
            hint = f"{cell.candidate.source} allows it: remove it there or bound its versions (requires)"
            yield item.source.finding(mark, "X361", said, hint)
        else:
            hint = f"no row allows it, yet {cell.kernel.source} holds it possible"
            yield item.source.finding(mark, "X362", said, hint, severity="notice")
    elif wrong := evidence.wrong_result(item, matrix):
        yield item.source.finding(mark, "X360", f"{item} is {wrong}", "write it anew with mla-prefill verify")
    elif item.cell["ok"] and cell.fit is None:
        where = cell.limit.source if cell.limit else cell.kernel.source
        message = f"{item} is {item.record['level']}, though the kernel sheet says it cannot be"
        yield item.source.finding(mark, "X362", message, f"see {where}", severity="notice")
    elif item.cell["ok"] and not evidence.is_offered(item, matrix):
        provider, dtype = item.cell.get("provider"), item.cell.get("dtype")
        mine = [o for o in cell.offers if o.distribution == provider and dtype in (None, *o.installed.dtypes)]
        version = item.record.get("packages", {}).get(provider)
        ranges = [offer.distribution + offer.specifier for offer in mine]
        # What went well with a version that is known to be bad has not gone stale.
        if ranges and version and not any(versions.contains(offer.specifier, version) for offer in mine):
            message = f"{item} proves nothing any more: the kernel sheet offers {', '.join(ranges)}"
            yield item.source.finding(mark, "X363", message, "run mla-prefill verify again", severity="notice")
    graph = item.cell.get("cuda_graph")
    if isinstance(graph, str) and evidence.is_offered(item, matrix, "cuda_graph"):
        message = f"{item} does not run in a CUDA graph: {graph}"
        hint = f"{cell.kernel.source} promises cuda_graph: take it out there, or add a known_bad entry with needs"
        if cell.allowed:  # a request that needs it would get this
            yield item.source.finding(mark, "X361", message, hint)
        else:
            yield item.source.finding(mark, "X362", message, hint, severity="notice")


def _line(source: SourceFile, kind: str, path: list[Any]) -> int:
    """The line of an entry of the file's list; 1 for anything else."""
    key = LISTS[kind]
    return _lines(source.raw, key)[path[1]] if len(path) > 1 and path[0] == key else 1


@functools.lru_cache(maxsize=32)
def _lines(raw: bytes, key: str) -> list[int]:
    """The line of each entry of a list at the top level."""
    text = raw.decode("utf-8", "replace")
    at = text.find("[", text.find(f'"{key}"')) + 1
    decoder, line, counted = json.JSONDecoder(), 1, 0
    lines: list[int] = []
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        if text[at] == "]":
            return lines
        line, counted = line + text.count("\n", counted, at), at
        lines.append(line)
        _, at = decoder.raw_decode(text, at)
