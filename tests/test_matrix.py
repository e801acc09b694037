"""The compiled lookup against a brute-force reading of the rows, overlays, and names in every accepted spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill.capabilities import Matrix, MatrixError, MLADimensions, UnknownNameError, load, load_matrix
from mla_prefill.capabilities.load import DATA_DIR

RAW: dict[str, Any] = {
    kind: yaml.safe_load((DATA_DIR / f"{kind}.yaml").read_text(encoding="utf-8"))[key]
    for kind, key in load.KINDS.items()
}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def brute_force(
    raw: dict[str, Any], arch: str, fa_version: int | None, dims: MLADimensions
) -> list[tuple[str, str, int | None]]:
    """(backend, kernel, V padding) of every allowed kernel in priority order, read straight from the YAML.

    Written without the compiler: rows, then the kernel sheet's own words, then the order.
    """
    qk, v = dims.qk_nope_head_dim + dims.qk_rope_head_dim, dims.v_head_dim
    allowed = {}
    names = []
    for name, block in raw["matrix"].items():
        if tuple(block["dims"].values()) != tuple(dims):
            continue
        names.append(name)
        for row in block["allow"]:
            if arch not in row["arch"]:
                continue
            for kernel, sheet in raw["kernels"].items():
                if sheet["backend"] not in row["backends"] or kernel not in row.get("kernels", [kernel]):
                    continue
                if "fa_version" in sheet and not (
                    sheet["fa_version"] in as_list(row.get("fa_version")) and sheet["fa_version"] == fa_version
                ):
                    continue
                ran, pad = runs(raw, sheet, arch, qk, v)
                if ran:
                    allowed[kernel] = (sheet["backend"], kernel, pad)
    orders = [o for o in raw["priorities"] if arch in o["arch"]]
    special = [o for o in orders if set(o.get("dims", [])) & set(names)]
    plain = [o for o in orders if "dims" not in o]
    order = (special or plain)[0]
    placed = [k for k in order["order"] if k in allowed]
    return [allowed[k] for k in placed + [k for k in raw["kernels"] if k in allowed and k not in placed]]


def runs(raw: dict[str, Any], sheet: dict[str, Any], arch: str, qk: int, v: int) -> tuple[bool, int | None]:
    for limit in sheet["limits"]:
        if arch not in limit["arch"]:
            continue
        if takes(raw, limit, arch, qk, v):
            return True, None
        if limit.get("pad_v") and v < qk and takes(raw, limit, arch, qk, qk):
            return True, qk
    return False, None


def takes(raw: dict[str, Any], limit: dict[str, Any], arch: str, qk: int, v: int) -> bool:
    step = limit.get("multiple_of", 1)
    if qk % step or v % step:
        return False
    memory, have = limit.get("shared_memory"), raw["architectures"][arch].get("shared_memory_bytes")
    if memory and have and memory["per_qk"] * qk + memory["per_v"] * v > have:
        return False

    def within(width: int, bounds: Any) -> bool:
        if isinstance(bounds, int):
            return width == bounds
        return bounds.get("min", 0) <= width <= bounds.get("max", width)

    return any(
        within(qk, line["qk"]) and (v == qk if line["v"] == "equal" else within(v, line["v"]))
        for line in limit["widths"]
    )


def answer(matrix: Matrix, arch: str, fa_version: int | None, dims: MLADimensions) -> list[tuple[str, str, int | None]]:
    return [(c.backend, c.kernel, c.pad_v_to) for c in matrix.lookup(arch, fa_version, dims)]


def test_every_key_of_the_declared_axes_equals_the_rows(matrix: Matrix) -> None:
    keys = list(matrix.keys())
    assert len(keys) == len(matrix.blocks) * len(matrix.architectures) * 4
    for arch, fa_version, dims in keys:
        assert answer(matrix, arch, fa_version, dims) == brute_force(RAW, arch, fa_version, dims), (
            arch,
            fa_version,
            dims,
        )


ARCHES = list(RAW["architectures"])
FA_KERNELS = {2: "fa2", 3: "fa3", 4: "fa4"}
OTHERS = [b for b in dict.fromkeys(k["backend"] for k in RAW["kernels"].values()) if b != "FLASH_ATTN"]


@st.composite
def random_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A random matrix over the shipped kernel sheet; what it allows need not be possible."""
    widths = st.sampled_from([0, 32, 64, 96, 128, 192, 256])
    blocks = {}
    for i in range(draw(st.integers(1, 4))):
        dims = {"qk_nope": draw(widths), "qk_rope": draw(widths), "v_head": draw(widths)}
        if not (dims["qk_nope"] + dims["qk_rope"] and dims["v_head"]):
            continue
        if any(b["dims"] == dims for b in blocks.values()):
            continue
        rows: list[dict[str, Any]] = []
        for _ in range(draw(st.integers(0, 4))):
            arch = draw(st.lists(st.sampled_from(ARCHES), min_size=1, max_size=4, unique=True))
            if draw(st.booleans()):
                fa = draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, unique=True))
                rows.append({"arch": arch, "fa_version": fa, "backends": ["FLASH_ATTN"]})
            else:
                rows.append(
                    {"arch": arch, "backends": draw(st.lists(st.sampled_from(OTHERS), min_size=1, unique=True))}
                )
        blocks[f"block{i}"] = {"dims": dims, "allow": rows}
    return blocks


def compiled(blocks: dict[str, Any]) -> Matrix:
    """A Matrix over the shipped sheets with these blocks (unchecked: random rows allow impossible cells too)."""
    document = json.loads(load.COMPILED.read_text(encoding="utf-8"))
    for name, block in blocks.items():
        block["@"] = f"random.yaml:{name}"
        for row in block["allow"]:
            row["@"] = "random.yaml:1"
    return Matrix({**document, "matrix": blocks})


@settings(max_examples=40, deadline=None)
@given(random_rows(), st.randoms())
def test_random_matrices_equal_brute_force_whatever_the_order_of_rows(blocks: dict[str, Any], random: Any) -> None:
    raw = {**RAW, "matrix": blocks}
    matrix = compiled(blocks)
    shuffled = {
        name: {**blocks[name], "allow": random.sample(blocks[name]["allow"], len(blocks[name]["allow"]))}
        for name in random.sample(list(blocks), len(blocks))
    }
    other = compiled(shuffled)
    for arch, fa_version, dims in matrix.keys():  # noqa: SIM118 - not a dict
        expected = brute_force(raw, arch, fa_version, dims)
        assert answer(matrix, arch, fa_version, dims) == expected
        assert answer(other, arch, fa_version, dims) == expected


def test_a_key_nobody_declared_is_empty_and_leaves_nothing_behind(matrix: Matrix) -> None:
    dims = MLADimensions(64, 64, 128)
    assert matrix.lookup("sm90", 4, MLADimensions(8, 8, 8)) == ()
    assert matrix.lookup("sm_90a", 4, dims) == matrix.lookup("sm90", 4, dims)
    with pytest.raises(UnknownNameError):  # a typing error is not "nothing allowed"
        matrix.lookup("sm999", 4, dims)
    assert matrix.lookup("sm90", 7, dims) == ()
    before = len(matrix._table)
    for width in range(8, 800, 8):
        matrix.lookup("sm90", 4, MLADimensions(width, 8, 8))
    assert len(matrix._table) == before


def test_the_lookup_says_what_a_candidate_needs(matrix: Matrix) -> None:
    deepseek, glm = matrix.blocks["deepseek_v3"].dims, matrix.blocks["glm_4_7_flash"].dims
    [fa2] = [c for c in matrix.lookup("sm90", 2, deepseek) if c.kernel == "fa2"]
    assert fa2.pad_v_to == 192
    [fa4] = [c for c in matrix.lookup("sm100", 4, glm) if c.kernel == "fa4"]
    assert fa4.requires == ("flash-attn-4>=4.0.0b11",)
    assert fa4.source.startswith("capabilities/data/matrix.yaml:")
    assert fa4.lse is not None
    assert (fa4.lse.base, fa4.lse.layout, fa4.lse.no_keys) == ("e", "heads_tokens", "-inf")


OVERLAY = """schema_version: 1
matrix:
  our_model:
    dims: {qk_nope: 96, qk_rope: 32, v_head: 96}
    sources: [{kind: measurement, ref: "our own run"}]
    allow:
      - {arch: [sm90], fa_version: 4, backends: [FLASH_ATTN]}
  deepseek_v3:
    dims: {qk_nope: 128, qk_rope: 64, v_head: 128}
    sources: [{kind: measurement, ref: "our own run"}]
    allow:
      - {arch: [sm120], fa_version: 4, backends: [FLASH_ATTN]}
"""


def test_an_overlay_adds_rows_and_every_answer_says_where_from(tmp_path: Path, matrix: Matrix) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(OVERLAY)
    ours = load_matrix(extra=[path])
    [candidate] = ours.lookup("sm90", 4, MLADimensions(96, 32, 96))
    assert candidate.source == f"{path}:7"
    deepseek = MLADimensions(128, 64, 128)
    assert ours.lookup("sm90", 4, deepseek) == matrix.lookup("sm90", 4, deepseek)
    added = set(ours.lookup("sm120", 4, deepseek)) - set(matrix.lookup("sm120", 4, deepseek))
    assert [(c.kernel, c.source) for c in added] == [("fa4", f"{path}:12")]
    assert ours.fingerprint != matrix.fingerprint


def test_an_overlay_is_held_to_the_same_checks(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(OVERLAY.replace("v_head: 96", "v_head: 96, v: 1").replace("sm120", "sm12"))
    with pytest.raises(MatrixError) as raised:
        load_matrix(extra=[path])
    assert all(f.path == str(path) for f in raised.value.findings)
    path.write_text(OVERLAY.replace("[sm120], fa_version: 4", "[sm90], fa_version: 4"))
    with pytest.raises(MatrixError, match=r"already allowed at capabilities/data/matrix.yaml:\d+"):
        load_matrix(extra=[path])


@pytest.mark.parametrize(
    ("spelling", "arch"),
    [
        ("sm90", "sm90"), ("sm_90", "sm90"), ("sm_90a", "sm90"), ("SM90", "sm90"), ("9.0", "sm90"),
        ("sm_103", "sm103"), ("sm_103a", "sm103"), ("sm_103f", "sm103"), ("10.3", "sm103"),
        ("sm_110", "sm110"), ("12.1", "sm121"), ("cpu", "cpu"),
        ("gfx942:sramecc+:xnack-", "gfx942"), ("gfx950:some-new-feature+", "gfx950"), ("gfx90a", "gfx90a"),
    ],
)  # fmt: skip
def test_architectures_in_every_spelling(matrix: Matrix, spelling: str, arch: str) -> None:
    """C11: three spellings of sm_103, one architecture. C19: AMD feature suffixes are no part of the name."""
    assert matrix.arch(spelling) == arch


def test_amd_is_never_taken_for_nvidia(matrix: Matrix) -> None:
    """gfx950 reports capability 9.5 through PyTorch: that is no Hopper and no NVIDIA architecture at all."""
    with pytest.raises(UnknownNameError):
        matrix.arch("9.5")
    assert matrix.architectures["gfx950"].vendor == "amd"


@pytest.mark.parametrize(
    ("product", "arch"),
    [("H200", "sm90"), ("NVIDIA H200", "sm90"), ("h100", "sm90"), ("L40S", "sm89"), ("B300", "sm103"), ("MI300X", "gfx942"), ("AMD Instinct MI355X", "gfx950"), ("RTX 4090", "sm89"), ("NVIDIA GeForce RTX 4090", "sm89"), ("RTX PRO 6000", "sm120"), ("NVIDIA H100 80GB HBM3", "sm90"), ("NVIDIA A100-SXM4-80GB", "sm80"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "sm89"), ("NVIDIA RTX 6000 Ada Generation", "sm89"), ("Tesla T4", "sm75"), ("Tesla V100-SXM2-16GB", "sm70"), ("NVIDIA Thor", "sm110")],
)  # fmt: skip
def test_products(matrix: Matrix, product: str, arch: str) -> None:
    assert matrix.gpu(product) == arch


def test_unknown_names_get_the_nearest_one(matrix: Matrix) -> None:
    with pytest.raises(UnknownNameError, match="did you mean sm90"):
        matrix.arch("sm_9")
    with pytest.raises(UnknownNameError, match="did you mean H200"):
        matrix.gpu("H2000")


def test_a_gpu_and_an_architecture_are_told_apart(matrix: Matrix) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown architecture 'H100'; it is a GPU of sm90: --gpu H100"):
        matrix.arch("H100")
    with pytest.raises(UnknownNameError, match=r"unknown GPU 'sm_90a'; it is an architecture: --arch sm_90a"):
        matrix.gpu("sm_90a")


@pytest.mark.parametrize(
    "dims", [(-1, 64, 128), (0, 0, 64), (64, 64, 0), (10**12, 0, 64), ("64", 64, 64), (64.0, 0, 64), (True, 64, 64)]
)
def test_nonsense_dims_are_refused(dims: Any) -> None:
    with pytest.raises(ValueError, match=r"head|must be"):
        MLADimensions(*dims)


@given(st.sampled_from(sorted(RAW["kernels"])), st.sampled_from(ARCHES), st.integers(8, 600), st.integers(8, 600))
def test_v_is_padded_only_when_it_is_narrower(kernel: str, arch: str, qk: int, v: int) -> None:
    """C41: padding adds columns, it never cuts them."""
    fit = SHIPPED.fit(kernel, arch, MLADimensions(qk, 0, v))
    ran, pad = runs(RAW, RAW["kernels"][kernel], arch, qk, v)
    assert (fit is not None, fit.pad_v_to if fit else None) == (ran, pad)
    if fit and fit.pad_v_to is not None:
        assert v < fit.pad_v_to == qk


SHIPPED = load_matrix()
