"""What the data may be trusted with: order never decides, rows never take away, no cell changes unseen, no file harms."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill import Environment, Matrix, MLADimensions, Request, backends, load_matrix
from mla_prefill.backends import KernelError
from mla_prefill.capabilities import checks, load
from mla_prefill.capabilities.configs import read_config
from mla_prefill.capabilities.load import KINDS
from mla_prefill.capabilities.record_checks import LISTS
from mla_prefill.selector.engine import decide
from mla_prefill.selector.probe import probe


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record_decisions = module_of(Path(__file__).parent / "record_decisions.py")
DOCUMENT: dict[str, Any] = json.loads(load.COMPILED.read_text(encoding="utf-8"))
ARCHES = list(DOCUMENT["architectures"])
BLOCKS = list(DOCUMENT["matrix"])
KERNELS = DOCUMENT["kernels"]

# ---- order and addition ---------------------------------------------------------------------------------------------

FOREIGN = MLADimensions(72, 24, 88)  # in no block
requests = st.builds(
    lambda dims, dtype, fa_version, needs: Request(dims, dtype, fa_version, needs=needs),
    st.sampled_from([MLADimensions(*b["dims"].values()) for b in DOCUMENT["matrix"].values()] + [FOREIGN]),
    st.sampled_from(["bfloat16", "float16", "float8_e4m3fn"]),
    st.sampled_from([None, None, 2, 3, 4]),
    st.lists(st.sampled_from(list(DOCUMENT["features"])), max_size=2, unique=True),
)
environments = st.builds(
    lambda arch, installed: Environment(arch, installed),
    st.sampled_from(ARCHES),
    st.none()
    | st.fixed_dictionaries(
        {},
        optional={
            "flash-attn": st.sampled_from(["2.6.3", "2.8.3"]),
            "flash-attn-4": st.sampled_from(["4.0.0b8", "4.0.0b36"]),
            "flashinfer-python": st.sampled_from(["0.6.6", "0.7.4"]),
            "vllm": st.sampled_from(["0.19.0", "0.33.0"]),
            "torch": st.just("2.11.0"),
        },
    ),
)


def shuffled(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same rows in another order: blocks, rows, lists in rows, exceptions, architectures, models, limits."""
    chance = random.Random(seed)

    def mixed(items: list[Any]) -> list[Any]:
        return chance.sample(items, len(items))

    def row(raw: dict[str, Any]) -> dict[str, Any]:
        return {k: mixed(v) if isinstance(v, list) else v for k, v in mixed(list(raw.items()))}

    matrix = {
        n: {**b, "allow": [row(r) for r in mixed(b["allow"])]} for n, b in mixed(list(document["matrix"].items()))
    }
    kernels = {
        n: {**k, "limits": mixed(k["limits"]), "known_bad": mixed(k.get("known_bad", []))} for n, k in KERNELS.items()
    }
    orders = [{**o, "arch": mixed(o["arch"])} for o in mixed(document["orders"])]
    rest = {key: dict(mixed(list(document[key].items()))) for key in ("architectures", "models", "features")}
    return {
        **document,
        "matrix": matrix,
        "kernels": kernels,
        "orders": orders,
        **rest,
        "not_allowed": mixed(document["not_allowed"]),
    }


def told(decision: Any) -> list[Any]:
    return [(v.candidate, v.verdict, sorted(v.reasons, key=str), v.notes) for v in decision.verdicts]


@settings(max_examples=60, deadline=None)
@given(requests, environments, st.integers(0, 10**6))
def test_the_order_of_rows_and_entries_never_changes_a_decision(
    request_: Request, environment: Environment, seed: int
) -> None:
    ordered, mixed = (
        decide(request_, environment, SHIPPED),
        decide(request_, environment, Matrix(shuffled(DOCUMENT, seed))),
    )
    eligible = [v.candidate.kernel for v in ordered.verdicts if v.verdict != "rejected"]
    assert [v.candidate.kernel for v in mixed.verdicts if v.verdict != "rejected"] == eligible
    assert mixed.chosen == ordered.chosen
    # Reasons list architectures and widths as the sheet has them: the same ones, perhaps in another order.
    codes = {v.candidate.kernel: sorted(r.code for r in v.reasons) for v in ordered.verdicts}
    assert {v.candidate.kernel: sorted(r.code for r in v.reasons) for v in mixed.verdicts} == codes


@pytest.mark.parametrize("turned", [False, True])
def test_the_order_of_overlays_never_changes_a_decision(tmp_path: Path, turned: bool) -> None:
    text = "schema_version: 1\nmatrix:\n  {name}:\n    dims: {{qk_nope: {nope}, qk_rope: 32, v_head: 96}}\n"
    text += '    sources: [{{kind: measurement, ref: "our own run"}}]\n    allow:\n      - {row}\n'
    rows = {
        "one": (96, "{arch: [sm90], fa_version: [2, 4], backends: [FLASH_ATTN]}"),
        "two": (96, "{arch: [sm90], fa_version: 3, backends: [FLASH_ATTN]}"),
        "three": (64, "{arch: [sm90], backends: [TORCH_SDPA]}"),
    }
    paths = []
    for name, (nope, row) in rows.items():
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(text.format(name=name, nope=nope, row=row), encoding="utf-8")
    plain, other = load_matrix(extra=paths), load_matrix(extra=paths[::-1] if turned else paths[1:] + paths[:1])
    for nope in (96, 64):
        asked = Request((nope, 32, 96)), Environment("sm90")
        assert told(decide(*asked, plain)) == told(decide(*asked, other))


rows = st.one_of(
    st.fixed_dictionaries(
        {
            "arch": st.lists(st.sampled_from(ARCHES), min_size=1, max_size=4, unique=True),
            "fa_version": st.lists(st.sampled_from([2, 3, 4]), min_size=1, unique=True),
            "backends": st.just(["FLASH_ATTN"]),
            "@": st.just("added.yaml:1"),
        }
    ),
    st.fixed_dictionaries(
        {
            "arch": st.lists(st.sampled_from(ARCHES), min_size=1, max_size=4, unique=True),
            "backends": st.lists(
                st.sampled_from(sorted({k["backend"] for k in KERNELS.values()} - {"FLASH_ATTN"})),
                min_size=1,
                unique=True,
            ),
            "@": st.just("added.yaml:1"),
        }
    ),
)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([*BLOCKS, "new_block"]), requests, environments)
def test_adding_a_row_never_takes_another_answer_away(
    row: dict[str, Any], block: str, request_: Request, environment: Environment
) -> None:
    document = {**DOCUMENT, "matrix": dict(DOCUMENT["matrix"])}
    known = document["matrix"].get(
        block, {"dims": {"qk_nope": 72, "qk_rope": 24, "v_head": 88}, "allow": [], "@": "added.yaml:1"}
    )
    document["matrix"][block] = {**known, "allow": [*known["allow"], row]}
    before, after = decide(request_, environment, SHIPPED), decide(request_, environment, Matrix(document))
    kept = {v.candidate.kernel: v.candidate for v in after.verdicts if v.verdict != "rejected"}
    for verdict in before.verdicts:
        if verdict.verdict != "rejected":
            assert kept[verdict.candidate.kernel] == verdict.candidate
    if block == "new_block" and request_.dims != FOREIGN:
        assert told(after) == told(before)


SHIPPED = load_matrix()

# ---- no cell changes unseen -----------------------------------------------------------------------------------------


def test_decisions_are_those_that_were_reviewed(matrix: Matrix) -> None:
    golden = json.loads(record_decisions.GOLDEN.read_text(encoding="utf-8"))
    seen = record_decisions.snapshot(matrix)
    assert seen.keys() == golden.keys()
    changed = [
        f"{part}: {key}"
        for part in golden
        for key in {**golden[part], **seen[part]}
        if golden[part].get(key) != seen[part].get(key)
    ]
    assert not changed, (
        "decisions changed: run python tests/record_decisions.py, review the diff, write it into CHANGELOG.md"
    )


Mutation = tuple[str, Any, Any, Any, list[str], list[str]]  # label, container, key, new value, architectures, blocks
GONE = object()


def less(label: str, parent: Any, key: Any, arches: list[str], blocks: list[str]) -> Iterator[Mutation]:
    """A list without each of its items."""
    values = parent[key]
    for i, value in enumerate(values):
        rest = [v for j, v in enumerate(values) if j != i]
        where = [value] if key == "arch" else arches
        yield f"{label}.{key} without {value if isinstance(value, str | int) else i}", parent, key, rest, where, blocks


def mutations_of_the_matrix() -> Iterator[Mutation]:
    for name, block in DOCUMENT["matrix"].items():
        for width in block["dims"]:
            yield f"{name}.{width} + 8", block["dims"], width, block["dims"][width] + 8, ARCHES, [name]
        for i, row in enumerate(block["allow"]):
            label = f"{name} row {i}"
            for key in ("arch", "backends", "kernels", "requires"):
                if len(row.get(key, ())) > (key == "kernels"):  # an empty list of kernels means all of them
                    yield from less(label, row, key, row["arch"], [name])
            if isinstance(row.get("fa_version"), list):
                yield from less(label, row, "fa_version", row["arch"], [name])
        yield from less(name, block, "allow", ARCHES, [name])
    for i, entry in enumerate(DOCUMENT["not_allowed"]):
        yield f"not_allowed {i} reason", entry, "reason", "because", entry["arch"], BLOCKS
        for key in ("arch", "kernels", "dims"):
            if len(entry.get(key, ())) > 1:
                yield from less(f"not_allowed {i}", entry, key, entry["arch"], BLOCKS)
    yield from less("all", DOCUMENT, "not_allowed", ARCHES, BLOCKS)


def mutations_of_limits() -> Iterator[Mutation]:
    """Each bound moved by one step, each line, architecture and condition taken away."""
    for name, kernel in KERNELS.items():
        for i, limit in enumerate(kernel["limits"]):
            label, arches, step = f"{name} limit {i}", limit["arch"][:1], limit["multiple_of"]
            for line in limit["widths"]:
                for side in ("qk", "v"):
                    yield from bounds(f"{label} {line}", line, side, step, arches)
                if "requires" in line:
                    yield from less(label, line, "requires", arches, BLOCKS)
            for key in ("arch", "widths", "requires", "dtypes"):
                if key in limit:
                    yield from less(label, limit, key, arches, BLOCKS)
            yield f"{label} multiple_of", limit, "multiple_of", 2 * step, arches, BLOCKS
            yield f"{label} pad_v", limit, "pad_v", not limit["pad_v"], arches, BLOCKS
            for key in limit.get("shared_memory", ()):
                yield f"{label} {key}", limit["shared_memory"], key, limit["shared_memory"][key] + 1, arches, BLOCKS


def bounds(label: str, line: dict[str, Any], side: str, step: int, arches: list[str]) -> Iterator[Mutation]:
    span = line[side]
    if span == "equal":
        yield f"{label} not equal", line, side, line["qk"], arches, BLOCKS
    elif isinstance(span, int):
        for by in (-step, step):
            yield f"{label} {side} {by:+}", line, side, span + by, arches, BLOCKS
    else:
        for end in span:
            for by in (-step, step):
                yield f"{label} {side}.{end} {by:+}", span, end, span[end] + by, arches, BLOCKS


def mutations_of_kernels() -> Iterator[Mutation]:
    for name, kernel in KERNELS.items():
        arches = sorted({arch for limit in kernel["limits"] for arch in limit["arch"]})
        for key in ("providers", "dtypes", "provides", "known_bad"):
            if key in kernel:
                yield from less(name, kernel, key, arches, BLOCKS)
        yield f"{name} causal", kernel, "causal", "top_left", arches[:1], BLOCKS[:1]
        for key, value in {"base": "10", "layout": "other", "no_keys": "nan", "rounded": True}.items():
            if kernel["lse"].get(key) != value:
                yield f"{name} lse {key}", kernel["lse"], key, value, arches[:1], BLOCKS[:1]
        if "fa_version" in kernel:
            yield f"{name} fa_version", kernel, "fa_version", kernel["fa_version"] + 1, arches[:1], BLOCKS[:1]
        for i, provider in enumerate(kernel["providers"]):
            served = [arch for arch in arches if arch in provider.get("arch", arches)]
            served = served[:: len(served) - 1 or 1]  # the first and the last: one may have conditions of its own
            for key in ("arch", "dtypes", "provides"):
                if key in provider:
                    yield from less(f"{name} provider {i}", provider, key, served, BLOCKS)
            for key, value in {
                "version": ">=0.1",
                "verified": ">=0.1",
                "distribution": "other",
                "module": "other",
            }.items():
                yield f"{name} provider {i} {key}", provider, key, value, served, BLOCKS
        for i, bad in enumerate(kernel.get("known_bad", ())):
            yield f"{name} known bad {i}", bad, "version", bad["version"] + ",!=9.9", bad["arch"][:1], BLOCKS
            for key in ("arch", "needs", "dtypes"):
                if key in bad:
                    yield from less(f"{name} known bad {i}", bad, key, bad["arch"][:1], BLOCKS)


def mutations_of_orders() -> Iterator[Mutation]:
    for i, order in enumerate(DOCUMENT["orders"]):
        label, kernels = f"order {i}", order["order"]
        for j in range(len(kernels) - 1):
            swapped = [*kernels[:j], kernels[j + 1], kernels[j], *kernels[j + 2 :]]
            yield f"{label} {kernels[j]} after {kernels[j + 1]}", order, "order", swapped, order["arch"], BLOCKS
        for key in ("arch", "order", "dims"):
            if key in order:
                yield from less(label, order, key, order["arch"], BLOCKS)
        for kernel in list(order.get("on_request", ())):
            yield f"{label} {kernel} automatically", order["on_request"], kernel, GONE, order["arch"], BLOCKS


def mutations_of_architectures() -> Iterator[Mutation]:
    for name, arch in DOCUMENT["architectures"].items():
        for key in ("products", "spellings"):
            if key in arch:
                yield from less(name, arch, key, [name], BLOCKS)
        for key, value in {"vendor": "other", "capability": "1.0", "shared_memory_bytes": 1024}.items():
            yield f"{name} {key}", arch, key, value, [name], BLOCKS


PARTS: dict[str, Callable[[], Iterator[Mutation]]] = {
    "matrix": mutations_of_the_matrix,
    "limits": mutations_of_limits,
    "kernels": mutations_of_kernels,
    "orders": mutations_of_orders,
    "architectures": mutations_of_architectures,
}


@pytest.mark.parametrize("part", PARTS)
def test_no_cell_of_the_data_changes_unseen(part: str) -> None:
    """Each cell flipped, each bound moved, each order swapped: the reviewed decisions differ (or the data breaks)."""
    unseen, count = [], 0
    before: dict[Any, Any] = {}
    for label, container, key, value, arches, blocks in PARTS[part]():
        count += 1
        where = (tuple(arches), tuple(blocks))
        if where not in before:
            before[where] = record_decisions.snapshot(SHIPPED, arches, blocks)
        old = container.get(key, GONE) if isinstance(container, dict) else container[key]
        container.pop(key) if value is GONE else container.update({key: value})
        try:
            after = None
            with suppress(Exception):  # what cannot even be compiled is seen
                after = record_decisions.snapshot(Matrix(DOCUMENT), arches, blocks)
        finally:
            container.pop(key, None) if old is GONE else container.update({key: old})
        if after == before[where]:
            unseen.append(label)
    assert unseen == []
    assert count > 20


# ---- no file harms --------------------------------------------------------------------------------------------------

MIB = 2**20
HEAD = "schema_version: 1\n"
#: Damaged content: name -> bytes, for a YAML file with this top-level key.
DAMAGED: dict[str, Callable[[str], bytes]] = {
    "deep flow lists": lambda key: f"{HEAD}{key}: ".encode() + b"[" * 100_000,
    "deep flow mappings": lambda key: f"{HEAD}{key}: ".encode() + b"{a: " * 100_000,
    "deep blocks": lambda key: f"{HEAD}{key}:\n".encode() + b"".join(b" " * i + b"a:\n" for i in range(1, 2000)),
    "a huge scalar": lambda key: f"{HEAD}{key}: ".encode() + b"x" * (7 * MIB),
    "a huge quoted scalar": lambda key: f'{HEAD}{key}: "'.encode() + b"x" * (7 * MIB) + b'"',
    "a huge name": lambda key: f"{HEAD}{key}:\n  ".encode() + b"x" * (7 * MIB) + b": {a: 1}",
    "a number of a million digits": lambda key: f"{HEAD}{key}: ".encode() + b"9" * MIB,
    "twenty thousand names": lambda key: (
        f"{HEAD}{key}:\n".encode() + b"".join(b"  k%d: {a: 1}\n" % i for i in range(20_000))
    ),
    "a billion laughs": lambda key: b"a: &a [x, x]\n" + b"".join(b"k%d: &k%d [*a, *a]\n" % (i, i) for i in range(50)),
    "not UTF-8": lambda key: f"{HEAD}{key}: ".encode() + bytes(range(128, 256)),
    "NUL": lambda key: f"{HEAD}{key}: ".encode() + b"\0" * 1000,
    "50 MB": lambda key: f"{HEAD}{key}: {{a: 1}}\n".encode() + b"# comment\n" * (5 * MIB),
    "tags": lambda key: f"{HEAD}{key}: !!python/object/apply:os.system ['touch pwned']\n".encode(),
    "JSON of another kind": lambda key: json.dumps({"a": [1, {"b": None}]}).encode(),
}
#: The same for a record: a JSON file with a list of entries.
DAMAGED_JSON: dict[str, Callable[[str], bytes]] = {
    "deep lists": lambda key: b"[" * 100_000,
    "deep mappings": lambda key: b'{"a":' * 100_000,
    "a huge scalar": lambda key: b'{"schema_version": "' + b"x" * (7 * MIB) + b'"}',
    "a number of a million digits": lambda key: b'{"schema_version": ' + b"9" * MIB + b"}",
    "infinity": lambda key: b'{"schema_version": 1e999, "a": NaN}',
    "not UTF-8": lambda key: b'{"a": "' + bytes(range(128, 256)),
    "lone surrogates": lambda key: b'{"a": "\\ud800"}',
    "50 MB": lambda key: b'{"schema_version": 1, "a": [' + b"1," * (25 * MIB) + b"1]}",
    "a hundred thousand wrong entries": lambda key: (
        f'{{"schema_version": 1, "{key}": ['.encode() + b"{},\n" * 100_000 + b"{}]}"
    ),
    "a huge name": lambda key: f'{{"schema_version": 1, "{key}": [{{"kernel": "'.encode() + b"x" * (7 * MIB) + b'"}]}',
}
# Runs every check, counts findings, and is held to memory and processor time by the kernel.
CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from mla_prefill.capabilities import checks, load_matrix, MatrixError
findings = checks.check_path(sys.argv[1])
assert findings and all(len(str(f)) < 3000 for f in findings) and len(findings) < 1000, len(findings)
try:
    load_matrix(sys.argv[1]).profiles
except MatrixError as error:
    assert len(str(error)) < 10**6
print(len(findings))
"""


def checked(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (folder / "pwned").exists()


@pytest.mark.parametrize("what", DAMAGED)
def test_no_damaged_sheet_harms(data_folder: Path, what: str) -> None:
    """Findings, in bounded time and memory: every sheet at once, since each is read before any is judged."""
    for kind, key in KINDS.items():
        (data_folder / f"{kind}.yaml").write_bytes(DAMAGED[what](key))
    checked(data_folder)


@pytest.mark.parametrize("kind", KINDS)
def test_no_truncated_sheet_harms(data_folder: Path, kind: str) -> None:
    path = data_folder / f"{kind}.yaml"
    raw = path.read_bytes()
    for at in random.Random(0).sample(range(len(raw)), 3):
        path.write_bytes(raw[:at])
        checks.check_path(data_folder)  # findings or none, never an exception
        path.write_bytes(raw[:at] + bytes([random.Random(at).randrange(256)]) + raw[at + 1 :])
        checks.check_path(data_folder)


@pytest.mark.parametrize("what", DAMAGED_JSON)
def test_no_damaged_record_harms(data_folder: Path, what: str) -> None:
    for kind, key in LISTS.items():
        (data_folder / kind / "damaged.json").write_bytes(DAMAGED_JSON[what](key))
    checked(data_folder)


@pytest.mark.parametrize("what", DAMAGED_JSON)
def test_no_damaged_config_harms(tmp_path: Path, what: str, matrix: Matrix) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(DAMAGED_JSON[what]("architectures"))
    try:
        said = str(read_config(path, matrix.families).to_dict())
    except ValueError as error:
        said = str(error)
    assert len(said) < 3000


# ---- nothing is imported because a file says so -----------------------------------------------------------------------


@pytest.fixture
def foreign(data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Matrix:
    """A matrix whose sheet lets torch_math come from a module that lies on the path and tells when it is imported."""
    code = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
    (tmp_path / "site_kernels.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = data_folder / "kernels.yaml"
    head, torch_math, rest = path.read_text(encoding="utf-8").partition("\n  torch_math:")
    path.write_text(head + torch_math + rest.replace("module: torch\n", "module: site_kernels\n", 1), encoding="utf-8")
    matrix = load_matrix(data_folder)
    assert matrix.kernels["torch_math"].providers[0].module == "site_kernels"
    return matrix


def test_a_module_that_only_a_file_names_is_not_imported(foreign: Matrix, tmp_path: Path) -> None:
    installed = {"torch": version("torch")}
    decision = decide(Request(MLADimensions(64, 64, 128), backend="torch_math"), Environment("cpu", installed), foreign)
    with pytest.raises(
        KernelError, match=r"'site_kernels' by .*kernels.yaml:.*the shipped kernel sheet does not name it"
    ):
        backends.load(decision, num_heads=1, device="cpu")
    assert "only the matrix at hand names site_kernels" in probe(foreign, installed, str).errors["torch"]
    assert not (tmp_path / "imported").exists()


def test_a_module_that_an_installed_package_registers_is(foreign: Matrix, tmp_path: Path) -> None:
    info = tmp_path / "site_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-kernels\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{load.ENTRY_POINTS}]\ntorch_math = site_kernels\n", encoding="utf-8")
    assert load.importable(["site_kernels", "torch", "os"]) == {"site_kernels": True, "torch": True, "os": False}
    installed = {"torch": version("torch")}
    decision = decide(Request(MLADimensions(64, 64, 128), backend="torch_math"), Environment("cpu", installed), foreign)
    backends.load(decision, num_heads=1, device="cpu")
