"""Adapters against the recorded signatures of the packages that they call, and, where there is a GPU, against those."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_prefill import Environment, MLADimensions, Request, load_matrix, select
from mla_prefill.backends import ADAPTERS, KernelError, calls, cudnn, flash_attn, load, planned_calls
from mla_prefill.backends.base import PrefillAdapter
from mla_prefill.capabilities.model import LseConvention
from mla_prefill.capabilities.versions import contains, split
from mla_prefill.selector import decide

from .backend_contract import (
    CHECKS,
    CUDA_CHECKS,
    Ragged,
    Subject,
    assert_close,
    check_id,
    context_chunk,
    cu_seqlens,
    new_tokens,
    out_is_written_and_returned,
    sequences_without_keys,
)
from .recorded_kernels import CASES, NEWEST, PACKAGES, RECORDS, Calls, Case, CuteInterface, Stage, parsed

DEEPSEEK_V3 = MLADimensions(128, 64, 128)
MISTRAL_SMALL_4 = MLADimensions(64, 64, 128)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(monkeypatch, tmp_path)
    yield stage
    stage.close()


@pytest.fixture(autouse=True)
def _every_log_line_again() -> None:
    planned_calls.log_fallback.cache_clear()
    planned_calls.planned_calls.cache_clear()


def loaded(
    kernel: str,
    distribution: str,
    dims: MLADimensions = DEEPSEEK_V3,
    dtype: str = "bfloat16",
    num_heads: int = 3,
    softmax_scale: float | None = None,
) -> PrefillAdapter:
    """A kernel of a given package, selected for an arch that it runs on, loaded on the CPU."""
    _, arch = PACKAGES[kernel, distribution]
    decision = select(Request(dims, dtype=dtype, backend=kernel), Environment(arch=arch))
    chosen = dataclasses.replace(decision.chosen, provider=distribution)
    decision = dataclasses.replace(decision, chosen=chosen)
    return load(decision, num_heads=num_heads, softmax_scale=softmax_scale, device="cpu")


def install(stage: Stage, case: Case) -> Calls:
    record, (installer, _) = RECORDS[case.distribution, case.version], PACKAGES[case.kernel, case.distribution]
    if record:
        stage.distribution(case.distribution, case.version)
    recorded = Calls()
    installer(stage, record, recorded)
    return recorded


def subject(stage: Stage, case: Case, dims: MLADimensions = DEEPSEEK_V3) -> Subject:
    install(stage, case)

    def make(dims, dtype, num_heads, softmax_scale=None):
        return loaded(case.kernel, case.distribution, dims, dtype, num_heads, softmax_scale)

    return Subject(make, dims, "bfloat16", "cpu")


def small_batch(adapter: PrefillAdapter, causal: bool = False) -> Ragged:
    return Ragged.random(adapter, [16, 33], None if causal else [50, 8], causal=causal)


# --- Every package that was recorded, called as it wants to be called. ---


def test_every_adapter_is_under_test() -> None:
    assert {kernel for kernel, _ in PACKAGES} == ADAPTERS.keys() - {"torch_math"}
    offered = {
        (kernel.name, provider.distribution)
        for kernel in load_matrix().kernels.values()
        for provider in kernel.providers
        if kernel.name != "torch_math"
    }
    assert PACKAGES.keys() == offered, "kernels.yaml names a provider that no adapter was tried with, or the reverse"


@pytest.mark.parametrize("check", CHECKS, ids=check_id)
@pytest.mark.parametrize("case", NEWEST, ids=str)
def test_the_contract_holds_behind_the_recorded_signature(
    stage: Stage, case: Case, check: Callable[[Subject], None]
) -> None:
    check(subject(stage, case))


@pytest.mark.parametrize("case", [case for case in CASES if case not in NEWEST], ids=str)
def test_older_versions_are_called_in_their_own_form(stage: Stage, case: Case) -> None:
    older = subject(stage, case)
    for check in (new_tokens, context_chunk, out_is_written_and_returned):
        if (case.kernel, check) == ("trtllm_ragged", out_is_written_and_returned):
            continue  # has a sequence without keys; see test_trtllm_without_host_lengths
        check(older)


@pytest.mark.parametrize("dims", [MISTRAL_SMALL_4, MLADimensions(192, 64, 256)], ids=str)
@pytest.mark.parametrize("case", [case for case in NEWEST if case.kernel in {"fa2", "fa3", "fa4"}], ids=str)
def test_equal_widths_are_never_padded(stage: Stage, case: Case, dims: MLADimensions) -> None:
    recorded = install(stage, case)
    adapter = loaded(case.kernel, case.distribution, dims)
    batch = small_batch(adapter)
    out = torch.empty(49, adapter.num_heads, dims.v_head_dim, dtype=torch.bfloat16)
    assert adapter.plan(batch.cu_q, batch.cu_k, 33, 50, causal=False).run(batch.q, batch.k, batch.v, out=out) is out
    (call,) = recorded.all
    value = call.get("v", call.get("value"))
    assert (value.data_ptr(), value.stride()) == (batch.v.data_ptr(), batch.v.stride()), "V was copied"


def test_split_kv_is_never_asked_for(stage: Stage) -> None:
    """C07: the ops' own default is a heuristic that asserts under load (vllm-project/vllm#58075)."""
    kernels = load_matrix().kernels
    assert all(dict(kernels[name].call) == {"num_splits": 1} for name in ("fa2", "fa3", "fa4"))
    for (distribution, version), record in RECORDS.items():
        for name, schema in record.get("ops", {}).items():
            arguments = {argument.name: argument for argument in parsed(f"recorded::{schema}").arguments}
            if "num_splits" in arguments and arguments["num_splits"].has_default_value():
                assert arguments["num_splits"].default_value == 0, (distribution, version, name)


# --- FA2: three call forms (deepspeedai/DeepSpeed#8022). ---

FLASH_ATTN = [record for (distribution, _), record in RECORDS.items() if distribution == "flash-attn"]


@pytest.mark.parametrize("record", FLASH_ATTN, ids=lambda record: record["version"])
def test_the_call_form_of_a_version_is_what_that_version_has(record: dict[str, Any]) -> None:
    (form,) = [form for form in flash_attn.FLASH_ATTN_FORMS if contains(form.versions, record["version"])]
    binding = record["bindings"]["flash_attn_2_cuda.varlen_fwd"]
    assert list(form.parameters) == [name.rstrip("_") for name in binding["parameters"]]
    assert len(binding["passed"]) == len(binding["parameters"])
    assert binding["returns"][0] == "out"
    assert binding["returns"][form.lse] == "softmax_lse"


def test_both_sides_of_the_change_are_recorded() -> None:
    results = {
        record["version"]: len(record["bindings"]["flash_attn_2_cuda.varlen_fwd"]["returns"]) for record in FLASH_ATTN
    }
    assert results["2.6.3"] == 8
    assert results["2.7.0.post2"] == 4


@pytest.mark.parametrize("version", ["2.8.4", "2.9.0", "3.0"])
def test_above_the_recorded_versions_the_public_function_is_called(stage: Stage, version: str) -> None:
    recorded = Calls()
    stage.distribution("flash-attn", version)
    PACKAGES["fa2", "flash-attn"][0](stage, RECORDS["flash-attn", "2.8.3"], recorded)
    adapter = loaded("fa2", "flash-attn")
    batch = small_batch(adapter)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))
    assert "return_attn_probs" in recorded.all[0]


# --- Ops by their schema. ---


def test_vllm_and_upstream_order_their_arguments_differently() -> None:
    """The reason for names: by position, upstream's call would give vLLM's op a chunk size for a softcap."""
    schemas = {
        (distribution, name): [argument.name for argument in parsed(f"recorded::{schema}").arguments]
        for (distribution, _), record in RECORDS.items()
        for name, schema in record.get("ops", {}).items()
    }
    vllm, upstream = schemas["vllm", "_vllm_fa3_C::fwd"], schemas["flash-attn-3", "flash_attn_3::fwd"]
    assert vllm != upstream
    assert set(flash_attn.PER_CALL) <= set(vllm) & set(upstream)


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ("fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? out, int new_thing) -> Tensor", "wants new_thing"),
        ("fwd(Tensor q, Tensor k, Tensor v) -> Tensor", "has no parameter out"),
    ],
)
def test_an_op_with_other_parameters_is_refused_by_name(stage: Stage, schema: str, missing: str) -> None:
    namespace, name = stage.op({"ops": {"made_up::fwd": schema}}, "made_up::fwd", lambda arguments: None)
    op = getattr(getattr(torch.ops, namespace), name).default
    with pytest.raises(TypeError, match=missing):
        calls.Entry.of_op(op, flash_attn.CONSTANTS, ("q", "k", "v", "out"))


# --- FlashInfer. ---


def flashinfer(stage: Stage, version: str, kernel: str = "flashinfer_fa3") -> tuple[Any, Calls]:
    recorded = install(stage, Case(kernel, "flashinfer-python", version))
    return loaded(kernel, "flashinfer-python", MISTRAL_SMALL_4), recorded


@pytest.mark.parametrize(
    ("version", "convention"),
    [
        ("0.6.14", LseConvention("2", "tokens_heads", "-inf")),
        ("0.7.4", LseConvention("e", "heads_tokens", "-inf")),
    ],
)
def test_flashinfer_is_asked_for_our_lse_where_it_can_give_it(stage: Stage, version: str, convention: Any) -> None:
    adapter, _ = flashinfer(stage, version)
    assert adapter.lse == convention


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in PACKAGES if kernel.startswith("flashinfer")])
def test_the_kernel_names_the_sub_backend(stage: Stage, kernel: str) -> None:
    """Never ``auto``: which LSE base comes back would depend on its choice (flashinfer-ai/flashinfer#4485)."""
    adapter, _ = flashinfer(stage, "0.7.4", kernel)
    assert adapter._new_wrapper().backend == kernel.removeprefix("flashinfer_")


def test_a_wrapper_is_reused_when_its_plan_is_gone_and_not_before(stage: Stage) -> None:
    adapter, recorded = flashinfer(stage, "0.7.4")
    batch = small_batch(adapter)
    kept = batch.plan(adapter)
    batch.plan(adapter)  # dropped at once
    gc.collect()
    batch.plan(adapter)
    first, second, third = (call["self"] for call in recorded.all)
    assert first is not second
    assert second is third
    assert_close(adapter, kept.run(batch.q, batch.k, batch.v, return_lse=True), batch.truth(adapter))


def test_host_copies_are_handed_on_where_flashinfer_takes_them(stage: Stage) -> None:
    adapter, recorded = flashinfer(stage, "0.7.4")
    cu_q, cu_k = cu_seqlens([16, 33]), cu_seqlens([50, 8])
    adapter.plan(cu_q, cu_k, 33, 50, causal=False, cu_seqlens_q_cpu=cu_q.clone(), cu_seqlens_k_cpu=None)
    assert torch.equal(recorded.all[0]["qo_indptr_cpu"], cu_q)
    assert recorded.all[0]["kv_indptr_cpu"] is None


def test_a_plan_that_would_overrun_cutlass_is_refused(stage: Stage) -> None:
    """FlashInfer writes past its buffers instead (prefill.py: 131072 work items)."""
    adapter, _ = flashinfer(stage, "0.7.4", "flashinfer_cutlass")
    adapter.num_heads = 128
    tokens = 256 * 1024
    adapter.plan(cu_seqlens([tokens]), cu_seqlens([8]), tokens, 8, causal=False)
    with pytest.raises(KernelError, match="262145 query tokens in 2 or more batches"):
        adapter.plan(cu_seqlens([tokens + 1]), cu_seqlens([8]), tokens + 1, 8, causal=False)


# --- cuDNN. ---

CUDNN = Case("cudnn", "nvidia-cudnn-frontend", "1.32.0")


def cudnn_adapter(stage: Stage) -> tuple[PrefillAdapter, Callable[[], int]]:
    """The adapter, and how many graphs were built so far."""
    recorded = install(stage, CUDNN)
    return loaded("cudnn", "nvidia-cudnn-frontend"), lambda: sum("graph" in call for call in recorded.all)


def test_batches_of_other_lengths_share_a_graph(stage: Stage) -> None:
    """Building one takes 45 ms: lengths, and the tokens of an LSE, are rounded up to powers of two."""
    adapter, built = cudnn_adapter(stage)
    for lengths, graphs in (
        ([100, 65], 1),
        ([128, 7], 1),
        ([66, 120], 1),
        ([129, 1], 2),
        ([100, 65, 1], 3),
        ([64, 64], 4),
    ):
        batch = Ragged.random(adapter, lengths, causal=True)
        got = batch.run(adapter)
        assert_close(adapter, got, batch.truth(adapter))
        assert built() == graphs, lengths
    batch.plan(adapter).run(batch.q, batch.k, batch.v)
    assert built() == 5, "without the LSE it is another graph"


def test_a_plan_works_its_offsets_out_once(stage: Stage) -> None:
    adapter, built = cudnn_adapter(stage)
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    for _ in range(3):
        plan.run(batch.q, batch.k, batch.v)
    assert built() == 1
    contiguous = plan.run(batch.q, batch.k, batch.v.contiguous())
    assert built() == 2, "other strides of V are another graph"
    assert torch.equal(contiguous, plan.run(batch.q, batch.k, batch.v))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("wrong", ["pointer", "token stride", "head stride"])
def test_what_cudnn_would_fault_on_is_copied(stage: Stage, name: str, wrong: str) -> None:
    adapter, _ = cudnn_adapter(stage)
    batch = small_batch(adapter)
    given = {"q": batch.q, "k": batch.k, "v": batch.v, "out": torch.empty(49, 3, 128, dtype=torch.bfloat16)}
    shape, strides = given[name].shape, given[name].contiguous().stride()
    memory = torch.empty(2 * given[name].numel() + 8, dtype=torch.bfloat16)
    token, head, _ = strides
    good = memory.as_strided(shape, strides)
    bad = {
        "pointer": memory.as_strided(shape, strides, 4),
        "token stride": memory.as_strided(shape, (token + 4, head, 1)),
        "head stride": memory.as_strided(shape, (token + 16, head + 4, 1)),
    }[wrong]
    plan = batch.plan(adapter)
    for view in (good, bad, good):  # with a plan that knows these strides, and with one that does not yet
        tensors = {**given, name: view.copy_(given[name])}
        got, lse = plan.run(**tensors, return_lse=True)
        assert got is tensors["out"]
        assert_close(adapter, (got, lse), batch.truth(adapter))
        assert_close(adapter, batch.plan(adapter).run(**tensors, return_lse=True), batch.truth(adapter))


@pytest.mark.parametrize(
    ("name", "dtype"), [("q", torch.float16), ("k", torch.float16), ("v", torch.float32), ("out", torch.float32)]
)
def test_cudnn_is_given_no_other_dtype(stage: Stage, name: str, dtype: torch.dtype) -> None:
    """The graph would read 16 bit of whatever it is; without ``validate``, no other check is made."""
    adapter, _ = cudnn_adapter(stage)
    batch = small_batch(adapter)
    tensors = {"q": batch.q, "k": batch.k, "v": batch.v, "out": torch.empty(49, 3, 128, dtype=torch.bfloat16)}
    tensors[name] = tensors[name].to(dtype)
    plan = adapter.plan(batch.cu_q, batch.cu_k, 33, 50, causal=False)
    with pytest.raises(KernelError, match=f"was given {name} in {dtype} on cpu"):
        plan.run(**tensors)


def test_threads_build_a_graph_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, built = cudnn_adapter(stage)
    batch = small_batch(adapter)

    def takes_a_while(graph: Any) -> None:
        time.sleep(0.05)
        graph.done.append("check_support")

    monkeypatch.setattr(sys.modules["cudnn"].pygraph, "check_support", takes_a_while, raising=False)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: batch.run(adapter), range(8)))
    assert built() == 1
    assert all(torch.equal(out, answers[0][0]) for out, _ in answers)


def test_a_graph_that_cudnn_refuses_is_told_as_that(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, _ = cudnn_adapter(stage)
    batch = small_batch(adapter)

    def refuse(graph: Any) -> None:
        raise RuntimeError("GRAPH_NOT_SUPPORTED")

    monkeypatch.setattr(sys.modules["cudnn"].pygraph, "check_support", refuse, raising=False)
    with pytest.raises(KernelError, match=r"nvidia-cudnn-frontend 1\.32\.0.*refused the batch.*GRAPH_NOT_SUPPORTED"):
        batch.run(adapter)


def test_a_plan_is_not_bound_while_a_graph_is_captured(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it works out would be memory of the captured graph, not filled before that is replayed."""
    adapter, built = cudnn_adapter(stage)
    batch = small_batch(adapter)
    plan = adapter.plan(batch.cu_q, batch.cu_k, 33, 50, causal=False)
    plan.run(batch.q, batch.k, batch.v)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    adapter.device = torch.device("cuda", 0)
    plan.run(batch.q, batch.k, batch.v)
    with pytest.raises(
        KernelError, match="has to run a plan once, in this thread and with such tensors, before that is"
    ):
        plan.run(batch.q, batch.k, batch.v, return_lse=True)
    assert built() == 1


def test_each_thread_and_device_has_a_handle_on_its_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    handles, set_to, streams = iter("abc"), [], {0: 70, 1: 71}
    frontend = SimpleNamespace(
        create_handle=lambda: next(handles), set_stream=lambda *, handle, stream: set_to.append((handle, stream))
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cudnn, "_handles", cudnn._Handles())
    first, second = (
        SimpleNamespace(_cudnn=frontend, device=torch.device("cuda", index), _check_not_capturing=lambda: None)
        for index in (0, 1)
    )
    assert [cudnn.Cudnn._handle(adapter) for adapter in (first, second, first)] == ["a", "b", "a"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cudnn.Cudnn._handle, first).result() == "c"
    streams[0] = 90
    assert cudnn.Cudnn._handle(first) == "a"
    assert set_to == [("a", 70), ("b", 71), ("c", 70), ("a", 90)], "once for each, and again where it changed"


def test_the_real_frontend_takes_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks a graph before it needs cuDNN itself."""
    frontend = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    monkeypatch.setattr(cudnn.Cudnn, "_handle", lambda adapter: None)

    class Checked(Exception):
        """What comes next needs cuDNN."""

    class Graph(frontend.pygraph):
        def validate(self) -> None:
            super().validate()
            raise Checked

    monkeypatch.setattr(frontend, "pygraph", Graph)
    adapter = loaded("cudnn", "nvidia-cudnn-frontend")
    layout = cudnn.Layout((576, 192, 1), (576, 192, 1), (768, 256, 1), (384, 128, 1), 256)
    for causal in (True, False):
        with pytest.raises(Checked):
            adapter._build(2, 128, 128, causal, layout)


# --- TRT-LLM. ---


@pytest.mark.parametrize("version", ["0.6.6", "0.6.14"])
def test_trtllm_without_host_lengths(stage: Stage, version: str) -> None:
    """Refused before the kernel spoils the batch (sgl-project/sglang#22688); all others run."""
    older = subject(stage, Case("trtllm_ragged", "flashinfer-python", version))
    new_tokens(older)
    with pytest.raises(KernelError, match=r"refused the batch.*it has no kv_seq_lens_cpu"):
        sequences_without_keys(older)


def test_trtllm_gets_lengths_only_where_some_are_zero(stage: Stage) -> None:
    recorded = install(stage, Case("trtllm_ragged", "flashinfer-python", "0.7.4"))
    adapter = loaded("trtllm_ragged", "flashinfer-python")
    for lengths_k in ([50, 8], [50, 0]):
        Ragged.random(adapter, [16, 33], lengths_k, causal=False).run(adapter)
    full, some_empty = recorded.all
    assert full["kv_seq_lens_cpu"] is None
    assert some_empty["kv_seq_lens_cpu"].tolist() == [50, 0]


def test_a_strided_q_reaches_trtllm_contiguous(stage: Stage) -> None:
    """The launcher passes no strides of q: it would read the neighbours of every row."""
    install(stage, Case("trtllm_ragged", "flashinfer-python", "0.7.4"))
    adapter = loaded("trtllm_ragged", "flashinfer-python")
    batch = small_batch(adapter)
    wide = torch.cat([batch.q, batch.q], dim=-1)[..., : adapter.dims.qk_head_dim]
    got = batch.plan(adapter).run(wide, batch.k, batch.v, return_lse=True)
    assert_close(adapter, got, batch.truth(adapter))


@pytest.mark.parametrize("case", NEWEST, ids=str)
def test_out_may_be_a_slice(stage: Stage, case: Case) -> None:
    """Some kernels read no strides of out; then the result is copied."""
    install(stage, case)
    adapter = loaded(case.kernel, case.distribution)
    batch = small_batch(adapter)
    wide = torch.full((49, adapter.num_heads, 2 * adapter.dims.v_head_dim), 7.0, dtype=torch.bfloat16)
    out = wide[..., : adapter.dims.v_head_dim]
    got, lse = batch.plan(adapter).run(batch.q, batch.k, batch.v, out=out, return_lse=True)
    assert got.data_ptr() == wide.data_ptr()
    assert_close(adapter, (out, lse), batch.truth(adapter))
    assert (wide[..., adapter.dims.v_head_dim :] == 7.0).all()


# --- What goes wrong is said once, with everything that one needs to know. ---


def test_a_stub_that_hides_its_import_error_is_found_at_loading(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """``from tokenspeed_mla import tokenspeed_mla_prefill`` succeeds all the same, and raises in the first request."""
    stage.distribution("tokenspeed-mla", "2.0.4")
    stage.module("tokenspeed_mla", tokenspeed_mla_prefill=lambda *args, **kwargs: None)
    with pytest.raises(
        KernelError, match=r"TOKENSPEED_MLA/tokenspeed_mla \(tokenspeed-mla 2\.0\.4, torch .*mla_prefill"
    ):
        loaded("tokenspeed_mla", "tokenspeed-mla")


@pytest.mark.parametrize(
    ("kernel", "dtype", "arch", "loads"),
    [  # what is installed: fa3-fwd 0.0.3 (bf16 only), flash-attn 2.8.3 (not on sm87), vllm 0.33.0
        ("fa3", "bfloat16", "sm90", "fa3-fwd 0.0.3"),
        ("fa3", "float16", "sm90", "vllm 0.33.0"),
        ("fa2", "bfloat16", "sm86", "flash-attn 2.8.3"),
        ("fa2", "bfloat16", "sm87", "vllm 0.33.0"),
        ("trtllm_ragged", "bfloat16", "sm100", "TRTLLM_RAGGED/trtllm_ragged was chosen without regard to packages"),
    ],
)
def test_a_decision_without_packages_loads_one_that_offers_it(
    stage: Stage, kernel: str, dtype: str, arch: str, loads: str
) -> None:
    """Not the first that is there: it may lack the dtype, the architecture or the version."""
    for distribution, version in (("fa3-fwd", "0.0.3"), ("flash-attn", "2.8.3"), ("vllm", "0.33.0")):
        stage.distribution(distribution, version)
    with pytest.raises(KernelError, match=re.escape(loads)):  # none of them can really be imported
        load(select(Request(DEEPSEEK_V3, dtype=dtype, backend=kernel), Environment(arch)), num_heads=2, device="cpu")


# --- FP8: q, k and v in it, out in 16 bit. ---


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    ("kernel", "distribution", "version", "asked", "out_dtype"),
    [
        ("flashinfer_cutlass", "flashinfer-python", "0.7.4", {"needs": ["fp8_query", "lse"]}, torch.bfloat16),
        ("trtllm_ragged", "flashinfer-python", "0.7.4", {"needs": ["fp8_query", "lse"]}, torch.bfloat16),
        (
            "flashinfer_cutlass",
            "flashinfer-python",
            "0.7.4",
            {"needs": ["fp8_query"], "dtype": "float16"},
            torch.float16,
        ),
        ("trtllm_ragged", "flashinfer-python", "0.7.4", {"prefers": ["fp8_query"]}, torch.bfloat16),
        ("trtllm_ragged", "flashinfer-python", "0.7.4", {"dtype": "fp8"}, torch.bfloat16),
        ("tokenspeed_mla", "tokenspeed-mla", "2.0.4", {"needs": ["fp8_query"]}, torch.bfloat16),
    ],
)
def test_fp8_inputs(
    stage: Stage,
    kernel: str,
    distribution: str,
    version: str,
    asked: dict[str, Any],
    out_dtype: torch.dtype,
    validate: bool,
) -> None:
    recorded = install(stage, Case(kernel, distribution, version))
    decision = select(Request(DEEPSEEK_V3, backend=kernel, **asked), Environment("sm100", {distribution: version}))
    adapter = load(decision, num_heads=3, device="cpu")
    assert (adapter.dtype, adapter.out_dtype) == (FP8, out_dtype)
    batch = small_batch(adapter)
    assert batch.q.dtype == FP8
    plan = adapter.plan(batch.cu_q, batch.cu_k, 33, 50, causal=False, validate=validate)
    assert plan.run(batch.q, batch.k, batch.v).dtype == out_dtype
    given = torch.empty(49, 3, 128, dtype=out_dtype)
    assert plan.run(batch.q, batch.k, batch.v, out=given) is given
    assert recorded.all[0].get("q_data_type", FP8) == FP8
    assert recorded.all[0].get("o_data_type", out_dtype) == out_dtype
    if validate:
        with pytest.raises(ValueError, match=r"q: must be torch.float8_e4m3fn"):
            plan.run(batch.q.to(torch.bfloat16), batch.k, batch.v)
        with pytest.raises(ValueError, match="out: must be"):
            plan.run(batch.q, batch.k, batch.v, out=given.to(FP8))
    nothing = adapter.plan(batch.cu_q, torch.zeros_like(batch.cu_k), 33, 0, causal=False)
    assert nothing.run(batch.q, batch.k[:0], batch.v[:0]).dtype == out_dtype


def test_a_kernel_that_raises_is_named(stage: Stage) -> None:
    def out_of_memory(arguments: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    record = RECORDS["fa3-fwd", "0.0.3"]
    stage.distribution("fa3-fwd", "0.0.3")
    stage.module("fa3_fwd_interface")
    place = stage.op(record, "fa3_fwd::fwd", out_of_memory)
    stage.replace_item(flash_attn.FA3_OPS, "fa3-fwd", ("fa3_fwd_interface", *place))
    adapter = loaded("fa3", "fa3-fwd")
    batch = small_batch(adapter)
    with pytest.raises(
        KernelError, match=r"FLASH_ATTN/fa3 \(fa3-fwd 0\.0\.3.*\(128, 64, 128\).*out of memory"
    ) as error:
        batch.run(adapter)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


# --- FA4's planned calls. ---

(PROVIDER,) = (p for p in load_matrix().kernels["fa4"].providers if p.planned_call)
PROVEN = {name: specifier.removeprefix("==") for name, specifier in map(split, PROVIDER.planned_call)}


def fa4(stage: Stage, versions: dict[str, str] = PROVEN, arch: str = "sm90") -> tuple[PrefillAdapter, CuteInterface]:
    interface = CuteInterface(RECORDS["flash-attn-4", PROVEN["flash-attn-4"]], Calls(), arch)
    for distribution, version in versions.items():
        stage.distribution(distribution, version)
    stage.module(
        "flash_attn.cute.interface",
        flash_attn_varlen_func=interface.flash_attn_varlen_func,
        _flash_attn_fwd=interface._flash_attn_fwd,
    )
    return loaded("fa4", "flash-attn-4"), interface


def test_planned_versions_are_recorded() -> None:
    first = RECORDS["flash-attn-4", PROVEN["flash-attn-4"]]["lists"]["_flash_attn_fwd:call_args"][0]
    assert first[:3] == ["q_call", "k_call", "v_call"]
    assert first[3].startswith("out")
    assert first[4].endswith("lse")


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize("return_lse", [True, False])
def test_the_second_layer_calls_the_compiled_function_directly(stage: Stage, arch: str, return_lse: bool) -> None:
    adapter, interface = fa4(stage, arch=arch)
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    answers = [plan.run(batch.q, batch.k, batch.v, return_lse=return_lse) for _ in range(3)]
    assert interface.public_runs == 1
    for again in answers[1:]:
        for first, other in zip(*(answer if return_lse else (answer,) for answer in (answers[0], again)), strict=True):
            assert torch.equal(first, other)
            assert first.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("check", CHECKS, ids=check_id)
def test_planned_calls_keep_the_contract(stage: Stage, check: Callable[[Subject], None]) -> None:
    fa4(stage)

    def make(dims, dtype, num_heads, softmax_scale=None):
        return loaded("fa4", "flash-attn-4", dims, dtype, num_heads, softmax_scale)

    check(Subject(make, DEEPSEEK_V3, "bfloat16", "cpu"))


def test_a_planned_call_sees_new_values_and_other_batches(stage: Stage) -> None:
    adapter, interface = fa4(stage)
    for lengths_q, lengths_k in (([16, 33], [50, 8]), ([7], [20]), ([200, 1], [3, 300])):
        batch = Ragged.random(adapter, lengths_q, lengths_k, causal=False, seed=len(lengths_q))
        plan = batch.plan(adapter)
        for factor in (1.0, 0.5, -2.0):
            scaled = dataclasses.replace(batch, q=batch.q * factor)
            got = plan.run(scaled.q, scaled.k, scaled.v, return_lse=True)
            assert_close(adapter, got, scaled.truth(adapter))
    assert interface.public_runs == 3


def test_each_layout_has_its_own_planned_call(stage: Stage) -> None:
    adapter, interface = fa4(stage)
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    for v in (batch.v, batch.v.contiguous(), batch.v, batch.v.contiguous()):
        got = plan.run(batch.q, batch.k, v, return_lse=True)
        assert_close(adapter, got, batch.truth(adapter))
    assert interface.public_runs == 2


def shifted(tensor: Any) -> Any:
    """The same values, two bytes past an aligned address."""
    there = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return there.as_strided(tensor.shape, tensor.contiguous().stride(), 1).copy_(tensor)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_misaligned_tensor_goes_through_the_public_function(stage: Stage, name: str) -> None:
    """FA4 copies it there; its compiled function refuses it."""
    adapter, interface = fa4(stage)
    assert_misaligned_is_right(adapter, name)
    assert interface.public_runs == 2


def assert_misaligned_is_right(adapter: PrefillAdapter, name: str) -> None:
    batch = small_batch(adapter)
    given = {"q": batch.q, "k": batch.k, "v": batch.v.contiguous(), "out": batch.q.new_empty((*batch.q.shape[:2], 128))}
    plan = batch.plan(adapter)
    plan.run(**given)
    expected = plan.run(**given).clone()
    given[name] = shifted(given[name])
    assert given[name].data_ptr() % planned_calls.ALIGNMENT
    assert torch.equal(plan.run(**given), expected)
    assert torch.equal(given["out"], expected)


def test_out_is_written_by_the_planned_call(stage: Stage) -> None:
    adapter, interface = fa4(stage)
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    for _ in range(2):
        out = torch.full((49, adapter.num_heads, 128), math.nan, dtype=torch.bfloat16)
        assert plan.run(batch.q, batch.k, batch.v, out=out) is out
        assert (out.double() - batch.truth(adapter)[0]).norm() / out.double().norm() < 4e-3
    assert interface.public_runs == 1


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"noise": 1.0}, "did not give the bits"),
        ({"copies_of": {"v"}}, "got another v"),
        ({"extra": {"cu_total_m_blocks": torch.zeros(3, dtype=torch.int32)}}, "worked out from this batch"),
        ({"extra": {"AuxData": lambda *args: (torch.zeros(1),)}}, "with contents"),
        ({"extra": {"learnable_sink": object()}}, "got a object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_whatever_differs_falls_back_with_one_log_line(
    stage: Stage, caplog: pytest.LogCaptureFixture, spoil: dict[str, Any], reason: str
) -> None:
    adapter, interface = fa4(stage)
    vars(interface).update(spoil)
    with caplog.at_level(logging.WARNING, "mla_prefill"):
        for _ in range(2):
            batch = small_batch(adapter)
            plan = batch.plan(adapter)
            for _ in range(3):
                plan.run(batch.q, batch.k, batch.v, return_lse=True)
    assert interface.public_runs == 6
    (line,) = caplog.messages
    assert reason in line


@pytest.mark.parametrize(
    ("distribution", "version", "told"),
    [
        ("flash-attn-4", "4.0.0b37", "flash-attn-4 4.0.0b37 was not proven"),
        ("nvidia-cutlass-dsl", "4.9.0", "4.9.0 was not"),
    ],
)
def test_other_versions_are_called_through_the_public_function(
    stage: Stage, caplog: pytest.LogCaptureFixture, distribution: str, version: str, told: str
) -> None:
    with caplog.at_level(logging.WARNING, "mla_prefill"):
        adapter, interface = fa4(stage, {**PROVEN, distribution: version})
        loaded("fa4", "flash-attn-4")
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    for _ in range(3):
        assert_close(adapter, plan.run(batch.q, batch.k, batch.v, return_lse=True), batch.truth(adapter))
    assert interface.public_runs == 3
    (line,) = caplog.messages
    assert told in line


def test_the_cache_is_put_back_even_if_the_kernel_raises(stage: Stage) -> None:
    adapter, interface = fa4(stage)
    cache = interface._flash_attn_fwd.compile_cache
    batch = small_batch(adapter)
    interface.copies_of = None  # makes the public function raise
    with pytest.raises(KernelError):
        batch.run(adapter)
    assert interface._flash_attn_fwd.compile_cache is cache


def test_nothing_is_proven_during_graph_capture(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing waits for the device, which a capture forbids; a later run may prove it, then captures use it."""
    adapter, interface = fa4(stage)
    batch = small_batch(adapter)
    plan = batch.plan(adapter)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "mla_prefill"):
        patch.setattr(planned_calls, "is_capturing", lambda tensor: True)
        plan.run(batch.q, batch.k, batch.v)
        plan.run(batch.q, batch.k, batch.v)
    assert interface.public_runs == 2
    assert "before CUDA graph capture" in caplog.messages[0]
    plan.run(batch.q, batch.k, batch.v)
    plan.run(batch.q, batch.k, batch.v)
    assert interface.public_runs == 3
    other = batch.plan(adapter)
    with monkeypatch.context() as patch:
        patch.setattr(planned_calls, "is_capturing", lambda tensor: True)
        other.run(batch.q, batch.k, batch.v)
        other.run(batch.q, batch.k, batch.v)
    assert interface.public_runs == 4, "proven: the capture's first run is recorded, its second planned"


def test_calls_of_other_threads_are_not_recorded() -> None:
    tap = planned_calls.CacheTap({"key": lambda *args: args})
    assert tap["key"](1) == (1,)
    thread = threading.Thread(target=lambda: tap["key"](2))
    thread.start()
    thread.join()
    assert [call.arguments for call in tap.calls] == [(1,)]


def test_nothing_is_compiled_after_warm_up(stage: Stage) -> None:
    adapter, interface = fa4(stage)
    lines: list[str] = []
    adapter.warm_up(lines.append)
    assert len(lines) == len(set(lines)) == 3 * len(calls.OPERATIONS)
    assert interface.compiled == 2 * len(calls.OPERATIONS), "by whether all queries fit into one tile"
    for lengths_q in ([16, 33], [300]):
        for causal, return_lse in calls.OPERATIONS:
            batch = Ragged.random(adapter, lengths_q, None, causal=causal)
            batch.plan(adapter).run(batch.q, batch.k, batch.v, return_lse=return_lse)
    assert interface.compiled == 2 * len(calls.OPERATIONS)


# --- On a GPU: every installed kernel, in every dims triple that the matrix allows it. ---


def gpu_cases() -> list[Any]:
    """(kernel, dims, dtype) of what this machine can run."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        return [pytest.param(None, None, None, marks=skip, id="no-cuda-device")]
    matrix, environment = load_matrix(), Environment.detect()
    cases = []
    for block in matrix.blocks.values():
        for dtype in ("bfloat16", "float16"):
            decision = decide(Request(block.dims, dtype=dtype), environment, matrix)
            eligible = {v.candidate.kernel for v in decision.verdicts if v.verdict in ("chosen", "eligible")}
            for kernel in sorted(eligible - {"torch_efficient", "torch_math"}):  # those are test_torch_sdpa's
                cases.append(pytest.param(kernel, block.dims, dtype, id=f"{kernel}-{block.name}-{dtype}"))
    return cases


@pytest.mark.gpu
@pytest.mark.parametrize("check", CUDA_CHECKS, ids=check_id)
@pytest.mark.parametrize(("kernel", "dims", "dtype"), gpu_cases())
def test_on_cuda(kernel: str, dims: MLADimensions, dtype: str, check: Callable[[Subject], None]) -> None:
    def make(dims, dtype, num_heads, softmax_scale=None):
        decision = select(Request(dims, dtype=dtype, backend=kernel))
        return load(decision, num_heads=num_heads, softmax_scale=softmax_scale, device="cuda")

    check(Subject(make, dims, dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_misaligned_on_cuda(name: str) -> None:
    """FA4 by a planned call, whose compiled function does not take it."""
    decision = select(Request(DEEPSEEK_V3, backend="fa4"))
    assert_misaligned_is_right(load(decision, num_heads=4, device="cuda"), name)
