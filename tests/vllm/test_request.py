"""Request.from_vllm and from_config on vLLM's and transformers' own configuration objects."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from mla_prefill import NotMLAError, Request
from transformers import AutoConfig
from vllm.config import AttentionConfig, CacheConfig, ModelConfig, VllmConfig

CONFIGS = Path(__file__).parent.parent / "data" / "hf_configs"
DEEPSEEK = (128, 64, 128)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """model(name, **arguments of ModelConfig) -> vLLM's view of a public config."""

    def build(name: str, dtype: str = "bfloat16") -> ModelConfig:
        shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
        return ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype=dtype, max_model_len=1024)

    return build


@pytest.mark.parametrize(
    ("name", "dims"), [("deepseek_v3", DEEPSEEK), ("glm_4_7_flash", (192, 64, 256)), ("kimi_k2", DEEPSEEK)]
)
def test_dims_dtype_and_needs(model: Any, name: str, dims: tuple[int, int, int]) -> None:
    config = VllmConfig(model_config=model(name, "float16"))
    assert Request.from_vllm(config) == Request(dims, "float16", needs=["lse", "context_chunk"])
    assert Request.from_vllm(config, needs=[], dtype="bfloat16") == Request(dims)


def test_what_vllm_was_told_is_asked_here_too(model: Any) -> None:
    deepseek = model("deepseek_v3")

    def told(**attention: Any) -> Request:
        return Request.from_vllm(VllmConfig(model_config=deepseek, attention_config=AttentionConfig(**attention)))

    assert told(mla_prefill_backend="TRTLLM_RAGGED").backend == "TRTLLM_RAGGED"
    assert told(flash_attn_version=3).fa_version == 3
    assert told(flash_attn_version=3, mla_prefill_backend="FLASH_ATTN").fa_version == 3
    assert told(flash_attn_version=3, mla_prefill_backend="FLASHINFER").fa_version is None  # it has no such version
    assert told(mla_prefill_backend="CUSTOM").backend is None


@pytest.mark.parametrize(("cache", "quantized"), [("fp8", True), ("fp8", False), ("auto", True)])
def test_a_quantised_query_is_preferred(model: Any, cache: str, quantized: bool) -> None:
    config = VllmConfig(
        model_config=model("deepseek_v3"),
        attention_config=AttentionConfig(use_prefill_query_quantization=quantized),
        cache_config=CacheConfig(cache_dtype=cache),
    )
    request = Request.from_vllm(config)
    prefers = ("fp8_query",) if cache == "fp8" and quantized else ()
    assert (request.needs, request.prefers) == (("context_chunk", "lse"), prefers)


@pytest.mark.parametrize("name", ["minicpm3", "gpt_oss_20b"])
def test_what_vllm_does_not_run_as_mla(model: Any, name: str) -> None:
    with pytest.raises(NotMLAError, match="vLLM runs this model with ordinary attention"):
        Request.from_vllm(VllmConfig(model_config=model(name)))


@pytest.mark.parametrize(
    ("name", "dims"), [("deepseek_v3", DEEPSEEK), ("minicpm3", (64, 32, 64)), ("glm_4_7_flash", (192, 64, 256))]
)
def test_a_transformers_config(tmp_path: Path, name: str, dims: tuple[int, int, int]) -> None:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    assert Request.from_config(AutoConfig.from_pretrained(tmp_path)) == Request(dims)
