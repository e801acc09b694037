"""What must hold at the base: the dims that this project started from, head-dim rules, public bug reports."""

from __future__ import annotations

import pytest
from mla_prefill.capabilities import Matrix, MLADimensions

DEEPSEEK = MLADimensions(128, 64, 128)
GLM = MLADimensions(192, 64, 256)
MISTRAL_S4 = MLADimensions(64, 64, 128)
GLM_NOPE = MLADimensions(256, 0, 256)
MINICPM3 = MLADimensions(64, 32, 64)
GIGACHAT3 = MLADimensions(128, 64, 192)
DOTS3_SWA = MLADimensions(192, 64, 128)

# vllm-project/vllm#48855 (C01): accepted dims by FlashAttention version, on an H200; FA4 for GLM is beyond it.
VLLM_48855 = [
    (2, DEEPSEEK),
    (2, GLM),
    (2, MISTRAL_S4),
    (3, DEEPSEEK),
    (3, GLM),
    (3, MISTRAL_S4),
    (4, DEEPSEEK),
    (4, MISTRAL_S4),
]


@pytest.mark.parametrize(("fa_version", "dims"), VLLM_48855)
def test_flash_attn_takes_the_dims_of_vllm_48855_on_hopper(
    matrix: Matrix, fa_version: int, dims: MLADimensions
) -> None:
    assert matrix.allowed("sm90", fa_version, dims)[0] == "FLASH_ATTN"


@pytest.mark.parametrize(("fa_version", "dims"), VLLM_48855)
def test_the_matrix_itself_puts_no_condition_on_them(matrix: Matrix, fa_version: int, dims: MLADimensions) -> None:
    rows = [
        row
        for kernel in matrix.kernels.values()
        if kernel.fa_version == fa_version
        for row in matrix.rows_for("sm90", dims, kernel)
    ]
    assert rows
    assert all(not row.requires for row in rows)


@pytest.mark.parametrize(
    ("dims", "padded"),
    [(DEEPSEEK, 192), (GLM, None), (MISTRAL_S4, None), (GLM_NOPE, None), (MINICPM3, 96), (DOTS3_SWA, 256)],
)
def test_v_is_padded_for_fa2_alone_and_only_where_widths_differ(
    matrix: Matrix, dims: MLADimensions, padded: int | None
) -> None:
    (fa2,) = [c for c in matrix.lookup("sm90", 2, dims) if c.fa_version == 2]
    (fa4,) = [c for c in matrix.lookup("sm90", 4, dims) if c.fa_version == 4]
    assert (fa2.pad_v_to, fa4.pad_v_to) == (padded, None)


@pytest.mark.parametrize(
    ("arch", "requires"),
    [
        ("sm90", "flash-attn-4>=4.0.0b5"),
        ("sm100", "flash-attn-4>=4.0.0b11"),
        ("sm103", "flash-attn-4>=4.0.0b15"),
    ],
)
def test_fa4_for_glm_states_the_build_it_needs(matrix: Matrix, arch: str, requires: str) -> None:
    (fa4,) = [c for c in matrix.lookup(arch, 4, GLM) if c.fa_version == 4]
    assert fa4.requires == (requires,)


# The table of head-dim rules: pair -> what a kernel does. N native, P192 V padded to 192, X refused.
PAIRS = [
    (192, 128),
    (256, 256),
    (128, 128),
    (96, 64),
    (256, 128),
    (192, 192),
    (64, 64),
    (128, 256),
    (92, 64),
    (320, 256),
]
RULES = [
    ("fa2", "sm80", "P192 N N P96 P256 N N X X X"),
    ("fa2", "sm90", "P192 N N P96 P256 N N X X X"),
    ("fa2", "sm121", "P192 N N P96 P256 N N X X X"),
    ("fa2", "gfx942", "P192 N N P96 P256 N N X X X"),
    ("fa3", "sm90", "N N N P96 P256 N N X X X"),
    ("fa3", "sm80", "P192 X N P96 X N N X X X"),
    ("fa4", "sm80", "N N N N N N N N X X"),
    ("fa4", "sm86", "N X N N X N N N X X"),
    ("fa4", "sm89", "N X N N X N N N X X"),
    ("fa4", "sm90", "N N N N N N N N X X"),
    ("fa4", "sm100", "N N N N X X N X X X"),
    ("fa4", "sm103", "N N N N X X N X X X"),
    ("fa4", "sm110", "N N N N X X N X X X"),
    ("fa4", "sm120", "N X N N X N N N X X"),
    ("flashinfer_fa3", "sm90", "N N N X X X N X X X"),
    ("flashinfer_cutlass", "sm100", "N X N X X X N X X X"),
    ("flashinfer_cutlass", "sm110", "N X N X X X N X X X"),
    ("trtllm_ragged", "sm100", "N N N X X X X X X X"),
    ("tokenspeed_mla", "sm103", "N X N X X X N X X X"),
    ("aiter", "gfx950", "N N N N N N N N X X"),
    ("torch_efficient", "sm90", "N N N N N N N N X N"),
    ("torch_math", "cpu", "N N N N N N N N N N"),
]


@pytest.mark.parametrize(
    ("kernel", "arch", "qk", "v", "rule"),
    [
        (kernel, arch, qk, v, rule)
        for kernel, arch, rules in RULES
        for (qk, v), rule in zip(PAIRS, rules.split(), strict=True)
    ],
)
def test_head_dim_rules(matrix: Matrix, kernel: str, arch: str, qk: int, v: int, rule: str) -> None:
    limit = matrix.limit(kernel, arch)
    assert limit is not None
    fit = limit.fit(qk, v, matrix.architectures[arch].shared_memory_bytes)
    said = "X" if fit is None else f"P{fit.pad_v_to}" if fit.pad_v_to else "N"
    assert said == rule


def _kernels(matrix: Matrix, arch: str, dims: MLADimensions) -> dict[str, int | None]:
    """Allowed kernel -> V padding, whatever FlashAttention version is at hand."""
    return {c.kernel: c.pad_v_to for fa in (None, *matrix.fa_versions) for c in matrix.lookup(arch, fa, dims)}


def test_c03_equal_192_goes_to_fa2_not_to_fa4_on_datacenter_blackwell(matrix: Matrix) -> None:
    assert matrix.allowed("sm100", 2, GIGACHAT3)[0] == "FLASH_ATTN"
    assert "FLASH_ATTN" not in matrix.allowed("sm100", 4, GIGACHAT3)
    limit = matrix.limit("fa4", "sm100")
    assert limit is not None
    assert str(limit).startswith("qk 8..128, v 8..128; qk 192, v 128; qk 256, v 256")


@pytest.mark.parametrize(
    ("arch", "kernel", "padded"),
    [("sm90", "fa4", None), ("sm100", "fa4", None), ("sm90", "fa3", 96), ("sm80", "fa2", 96)],
)
def test_c05_minicpm3_runs_on_every_flash_attention(matrix: Matrix, arch: str, kernel: str, padded: int | None) -> None:
    assert _kernels(matrix, arch, MINICPM3)[kernel] == padded


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_c05_kernels_with_fixed_pairs_refuse_minicpm3(matrix: Matrix, arch: str) -> None:
    for kernel in ("trtllm_ragged", "flashinfer_cutlass", "tokenspeed_mla"):
        assert matrix.fit(kernel, arch, MINICPM3) is None
    assert not {"TRTLLM_RAGGED", "FLASHINFER", "TOKENSPEED_MLA"} & set(matrix.allowed(arch, None, MINICPM3))


@pytest.mark.parametrize("arch", ["sm120", "sm121"])
def test_c10_no_datacenter_kernel_on_workstation_blackwell(matrix: Matrix, arch: str) -> None:
    kernels = _kernels(matrix, arch, DEEPSEEK)
    assert kernels["fa2"] == 192
    assert not {"trtllm_ragged", "flashinfer_cutlass", "tokenspeed_mla"} & set(kernels)
    assert {"trtllm_ragged", "flashinfer_cutlass", "tokenspeed_mla"} <= set(_kernels(matrix, "sm100", DEEPSEEK))


@pytest.mark.parametrize(
    ("dims", "trtllm"),
    [(DEEPSEEK, True), (GLM, True), (MISTRAL_S4, True), (GLM_NOPE, False), (GIGACHAT3, False), (DOTS3_SWA, False)],
)
def test_c02_trtllm_ragged_by_triple_not_by_width(matrix: Matrix, dims: MLADimensions, trtllm: bool) -> None:
    assert ("TRTLLM_RAGGED" in matrix.allowed("sm103", None, dims)) is trtllm


@pytest.mark.parametrize("dims", [GLM, GLM_NOPE])
def test_c02_flashinfer_serves_256_without_cutlass(matrix: Matrix, dims: MLADimensions) -> None:
    kernels = _kernels(matrix, "sm103", dims)
    assert "flashinfer_cutlass" not in kernels
    assert "flashinfer_fa2" in kernels
    assert matrix.fit("flashinfer_cutlass", "sm103", dims) is None


def test_c12_fa4_on_thor_is_held_back_by_policy_not_by_the_kernel(matrix: Matrix) -> None:
    (fa4,) = [c for c in matrix.cells("sm110", DEEPSEEK) if c.kernel.name == "fa4"]
    assert fa4.allowed
    assert fa4.on_request is not None
    assert "FLASH_ATTN" not in matrix.allowed("sm110", 4, GLM)


def test_c41_v_is_never_cut_to_fit(matrix: Matrix) -> None:
    for kernel in matrix.kernels.values():
        for limit in kernel.limits:
            for qk, v in ((64, 256), (128, 192), (192, 256)):
                fit = limit.fit(qk, v, None)
                assert fit is None or fit.pad_v_to is None


@pytest.mark.parametrize(
    ("kernel", "arch", "dims", "version", "needs"),
    [
        ("fa4", "sm100", DEEPSEEK, "vllm>=0.18,<0.20", ()),  # C43
        ("fa4", "sm103", DEEPSEEK, "flash-attn-4>=4.0.0b5,<4.0.0b15", ()),  # C11
        ("fa4", "sm100", GLM, "flash-attn-4>=4.0.0b11,<4.0.0b36", ("context_chunk",)),
        ("trtllm_ragged", "sm100", DEEPSEEK, "flashinfer-python>=0.6.6,<0.6.18", ("context_chunk",)),  # C42
        ("flashinfer_fa2", "sm75", GLM, "flashinfer-python>=0.6.10,<0.6.16", ()),
    ],
)
def test_known_defects_are_bounded(
    matrix: Matrix, kernel: str, arch: str, dims: MLADimensions, version: str, needs: tuple[str, ...]
) -> None:
    bad = {
        (f"{entry.distribution}{entry.version}", entry.needs)
        for entry in matrix.kernels[kernel].known_bad
        if entry.concerns(arch, dims)
    }
    assert (version, needs) in bad


def test_every_block_runs_somewhere_on_every_architecture_but_volta(matrix: Matrix) -> None:
    for block in matrix.blocks.values():
        without = [arch for arch in matrix.architectures if not _kernels(matrix, arch, block.dims)]
        assert without == ["sm70"]


def test_every_lse_has_a_convention(matrix: Matrix) -> None:  # C37
    assert {k.name for k in matrix.kernels.values() if "lse" in k.provides and k.lse is None} == set()
    assert {k.name for k in matrix.kernels.values() if k.lse and k.lse.base == "2"} == {
        "flashinfer_fa2",
        "flashinfer_fa3",
        "flashinfer_cutlass",
        "flashinfer_cudnn",
        "trtllm_ragged",
    }


def test_a_kernel_provides_whatever_one_of_its_packages_does(matrix: Matrix) -> None:
    for kernel in matrix.kernels.values():
        for provider in kernel.providers:
            assert (provider.provides or frozenset()) <= kernel.provides, provider.distribution
            assert set(provider.dtypes or ()) <= set(kernel.dtypes), provider.distribution
