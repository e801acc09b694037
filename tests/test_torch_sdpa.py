"""TORCH_SDPA against float64 full attention, and everything that adapters share."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill import Environment, MLADimensions, NoBackendError, Request, load_matrix, select
from mla_prefill.backends import ADAPTERS, KernelError, base, load, torch_sdpa
from mla_prefill.backends.reference import reference_attention

from .backend_contract import CHECKS, CUDA_CHECKS, AdapterFactory, Ragged, Subject, assert_close, check_id, cu_seqlens

MISTRAL_SMALL_4 = MLADimensions(64, 64, 128)
DIMS = [
    MLADimensions(128, 64, 128),  # DeepSeek-V3: v narrower than qk
    MLADimensions(192, 64, 256),  # GLM-4.7-Flash: equal
    MLADimensions(256, 0, 256),  # GLM-5.3-Flash: no rope
    MLADimensions(64, 32, 64),  # MiniCPM3
    MLADimensions(12, 5, 31),  # of no model, and a multiple of nothing
    MLADimensions(8, 8, 48),  # v wider than qk
]
DTYPES = ["bfloat16", "float16", "float32"]


def torch_kernel(kernel: str, arch: str, device: str) -> AdapterFactory:
    """Loads one of PyTorch's kernels as a user does: forced, then loaded. Dims without a row borrow another's."""

    @cache
    def decide(dtype: str):
        environment = Environment(arch, installed={"torch": torch.__version__})
        return select(Request(MISTRAL_SMALL_4, dtype=dtype, backend=kernel), environment)

    def make(dims, dtype, num_heads, softmax_scale=None):
        decision = decide(dtype)
        decision = dataclasses.replace(decision, request=decision.request._replace(dims=dims))
        return load(decision, num_heads=num_heads, softmax_scale=softmax_scale, device=device)

    return make


torch_math = torch_kernel("torch_math", "cpu", "cpu")


@pytest.mark.parametrize("check", CHECKS, ids=check_id)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [MISTRAL_SMALL_4, DIMS[0]], ids=str)
def test_torch_math_keeps_the_contract(check: Callable[[Subject], None], dims: MLADimensions, dtype: str) -> None:
    check(Subject(torch_math, dims, dtype, "cpu"))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_torch_math_runs_any_dims(dims: MLADimensions, causal: bool) -> None:
    adapter = torch_math(dims, "float32", 2)
    batch = Ragged.random(adapter, [5, 0, 33], [17, 4, 40], causal=causal)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", CUDA_CHECKS, ids=check_id)
@pytest.mark.parametrize(("dims", "dtype"), [(DIMS[0], "bfloat16"), (DIMS[1], "float16"), (DIMS[3], "float32")])
@pytest.mark.parametrize("kernel", ["torch_math", "torch_efficient"])
def test_on_cuda(check: Callable[[Subject], None], dims: MLADimensions, dtype: str, kernel: str) -> None:
    check(Subject(torch_kernel(kernel, "sm90", "cuda"), dims, dtype, "cuda"))


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(lengths=lengths, causal=st.booleans(), heads=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_ragged_batch(lengths: list[tuple[int, int]], causal: bool, heads: int, seed: int) -> None:
    adapter = torch_math(MLADimensions(16, 8, 16), "float32", heads)
    batch = Ragged.random(adapter, *zip(*lengths, strict=True), causal=causal, seed=seed)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


@pytest.mark.parametrize("block_bytes", [1, 5_000, 100_000])
@pytest.mark.parametrize("causal", [True, False])
def test_torch_math_in_small_blocks(block_bytes: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of heads and of rows: only memory depends on their size."""
    adapter = torch_math(MLADimensions(16, 8, 16), "float32", 5)
    batch = Ragged.random(adapter, [29, 40, 3], [50, 12, 0], causal=causal)
    monkeypatch.setattr(torch_sdpa, "BLOCK_BYTES", block_bytes)
    assert_close(adapter, batch.run(adapter), batch.truth(adapter))


def test_torch_math_does_not_hold_all_scores() -> None:
    """16384 queries and keys: all scores would be 1 GiB. The largest operation allocates 64 MiB at most."""
    adapter = torch_math(MLADimensions(8, 0, 8), "float32", 1)
    tokens = 16384
    batch = Ragged.random(adapter, [tokens], None, causal=True)
    with torch.profiler.profile(profile_memory=True) as profile:
        batch.run(adapter)
    largest = max(event.self_cpu_memory_usage / event.count for event in profile.key_averages())
    assert largest <= 64 * 2**20


# --- torch_efficient has no kernel for the CPU; its call can be held to the real operator's schema all the same. ---


@pytest.mark.parametrize("causal", [True, False])
def test_torch_efficient_call_fits_the_operator(causal: bool) -> None:
    """On the meta device the operator checks names and types and infers shapes: (sequences, heads, padded) LSE."""
    adapter = torch_kernel("torch_efficient", "sm90", "meta")(DIMS[0], "bfloat16", 4)
    cu_q, cu_k = cu_seqlens([5, 40]), cu_seqlens([7, 90])
    plan = adapter.plan(
        cu_q.to("meta"), cu_k.to("meta"), 40, 90, causal=causal, cu_seqlens_q_cpu=cu_q, cu_seqlens_k_cpu=cu_k
    )
    q, k = (torch.empty(n, 4, 192, dtype=torch.bfloat16, device="meta") for n in (45, 97))
    v = torch.empty(97, 4, 256, dtype=torch.bfloat16, device="meta")[..., 128:]
    out, lse = plan.run(q, k, v, return_lse=True)
    assert (out.shape, out.dtype) == ((45, 4, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((4, 45), torch.float32)


def test_torch_efficient_is_not_for_the_cpu() -> None:
    with pytest.raises(KernelError, match=r"TORCH_SDPA/torch_efficient \(torch 2.*no kernel for the CPU"):
        torch_kernel("torch_efficient", "sm90", "cpu")(DIMS[0], "bfloat16", 4)


# --- What kernels differ in, and no caller should see. ---

KERNELS = load_matrix().kernels


class Oracle(base.PrefillAdapter):
    """Exact attention, returned as the kernel sheet says that some kernel returns it."""

    def load_kernel(self) -> None:
        """Nothing to import."""

    def prepare(self, batch: base.Batch) -> base.Attention:
        # FA3 has another convention and FA4 before b10 crashed without any key: no kernel is asked then.
        assert batch.max_seqlen_q > 0
        assert batch.max_seqlen_k > 0

        def attention(q, k, v, out, return_lse):
            result, lse = reference_attention(
                q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, causal=batch.causal, softmax_scale=self.softmax_scale
            )
            lse = self._as_the_kernel_has_it(lse, result, batch) if return_lse else None
            result = result.to(q.dtype)
            return result if out is None else out.copy_(result), lse

        return attention

    def _as_the_kernel_has_it(self, lse, out, batch):
        empty = lse == -torch.inf
        if self.lse.no_keys == "undefined":
            out[empty.t()] = torch.nan
        lse = lse.masked_fill(empty, {"-inf": -torch.inf, "+inf": torch.inf, "undefined": 12345.0}[self.lse.no_keys])
        lse = lse / {"e": 1.0, "2": base.LN_2}[self.lse.base]
        if self.lse.layout == "tokens_heads":
            return lse.t().contiguous()
        if self.lse.layout == "batch_heads_padded":
            parts = lse.split(base.lengths(batch.starts_q), dim=1)
            rows = -(-batch.max_seqlen_q // 32) * 32
            return torch.stack([torch.nn.functional.pad(p, (0, rows - p.shape[1]), value=torch.nan) for p in parts])
        return lse


def oracle(kernel: str, pad_v_to: int | None = None) -> AdapterFactory:
    def make(dims, dtype, num_heads, softmax_scale=None):
        inner = torch_math(dims, dtype, num_heads, softmax_scale)
        fields = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
        lse = KERNELS[kernel].lse
        fields["candidate"] = dataclasses.replace(inner.candidate, lse=lse, pad_v_to=pad_v_to)
        return Oracle(**fields)

    return make


@pytest.mark.parametrize("check", CHECKS, ids=check_id)
@pytest.mark.parametrize("kernel", sorted(name for name, kernel in KERNELS.items() if kernel.lse))
def test_every_declared_lse_convention_becomes_ours(check: Callable[[Subject], None], kernel: str) -> None:
    check(Subject(oracle(kernel), MLADimensions(16, 8, 16), "float32", "cpu"))


@pytest.mark.parametrize("check", CHECKS, ids=check_id)
def test_padded_v_shows_nowhere(check: Callable[[Subject], None]) -> None:
    """V padded 128 -> 192 as fa2 needs it, long contexts in chunks included (vllm-project/vllm#42642)."""
    check(Subject(oracle("fa2", pad_v_to=192), DIMS[0], "bfloat16", "cpu"))


@pytest.mark.parametrize(("v_head_dim", "width", "outcome"), [(8, 16, "runs"), (16, 16, "runs"), (16, 8, "refused")])
def test_v_is_padded_and_never_cut(v_head_dim: int, width: int, outcome: str) -> None:
    """vllm-project/vllm#50060: a negative pad cuts."""
    seen = []

    def kernel(q, k, v, out, return_lse):
        seen.append(v)
        return v.clone(), None

    if outcome == "refused":
        with pytest.raises(ValueError, match="V has width 16 and cannot be padded to 8"):
            base.with_padded_v(kernel, v_head_dim, width)
        return
    v = torch.randn(3, 2, v_head_dim)
    out, _ = base.with_padded_v(kernel, v_head_dim, width)(v, v, v, None, False)
    assert seen[0].shape == (3, 2, width)
    assert not seen[0][..., v_head_dim:].any()
    assert torch.equal(out, v)


def test_a_kernel_without_lse_says_so() -> None:
    adapter = oracle("fa2")(MISTRAL_SMALL_4, "float32", 2)
    adapter.lse = None
    adapter.prepare = lambda batch: lambda q, k, v, out, return_lse: (v, None)
    batch = Ragged.random(adapter, [3], None, causal=True)
    assert batch.plan(adapter).run(batch.q, batch.k, batch.v).shape == (3, 2, 128)
    with pytest.raises(KernelError, match="no LSE"):
        batch.run(adapter)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "causal", "expected"),
    [
        ([3, 2], None, True, False),
        ([3, 2], [3, 2], True, False),
        ([3, 2], [3, 1], True, True),
        ([3, 2], [3, 1], False, False),
        ([3, 2], [3, 0], False, True),
        ([3, 0], [3, 0], False, False),
    ],
)
def test_rows_without_keys_are_known_ahead(lengths_q, lengths_k, causal, expected) -> None:
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_q if lengths_k is None else cu_seqlens(lengths_k)
    assert base.Batch(cu_q, cu_k, 3, 3, causal).rows_may_lack_keys is expected
    # Somewhere else than on the host nobody knows without waiting, except that new tokens see themselves.
    far = base.Batch(cu_q.to("meta"), cu_k.to("meta"), 3, 3, causal)
    assert far.rows_may_lack_keys
    near = base.Batch(cu_q.to("meta"), cu_k.to("meta"), 3, 3, causal, cu_q, cu_k)
    assert near.rows_may_lack_keys is expected
    same = cu_q.to("meta")
    assert base.Batch(same, same, 3, 3, True).rows_may_lack_keys is False


# --- Wrong arguments. ---

GOOD_PLAN = {
    "cu_seqlens_q": cu_seqlens([5, 40]),
    "cu_seqlens_k": cu_seqlens([7, 90]),
    "max_seqlen_q": 40,
    "max_seqlen_k": 90,
    "causal": False,
}


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("cu_seqlens_q", [0, 5, 45], "must be a tensor, got list"),
        ("cu_seqlens_q", cu_seqlens([5, 40]).long(), "must be torch.int32, got torch.int64"),
        ("cu_seqlens_q", cu_seqlens([5, 40]).reshape(1, -1), r"of shape \(sequences \+ 1,\), got \(1, 3\)"),
        ("cu_seqlens_q", cu_seqlens([]), r"of shape \(sequences \+ 1,\), got \(1,\)"),
        ("cu_seqlens_q", cu_seqlens([5, 40]) + 1, "must start at 0, got 1"),
        ("cu_seqlens_q", cu_seqlens([50, -10]), "must not decrease, but sequence 1 has length -10"),
        ("cu_seqlens_q", cu_seqlens([5, 40]).to("meta"), "must be on cpu"),
        ("cu_seqlens_k", cu_seqlens([7, 90, 1]), "has 3 sequences, but cu_seqlens_q has 2"),
        ("max_seqlen_q", 39, "is 39, but the longest sequence has 40"),
        ("max_seqlen_k", 91, "is 91, but the longest sequence has 90"),
        ("max_seqlen_k", torch.tensor(90), "must be a host int, got Tensor"),
        ("causal", 1, "must be True or False, got 1"),
        ("cu_seqlens_k_cpu", cu_seqlens([7, 91]), "must be a copy of cu_seqlens_k on the CPU"),
    ],
)
def test_a_validated_plan_names_the_argument(argument: str, value: object, says: str) -> None:
    adapter = torch_math(MISTRAL_SMALL_4, "float32", 2)
    with pytest.raises(ValueError, match=f"^{argument}: .*{says}"):
        adapter.plan(**{**GOOD_PLAN, argument: value}, validate=True)


@pytest.mark.parametrize(
    ("argument", "value", "says"),
    [
        ("q", torch.zeros(44, 2, 128), r"\(query tokens, heads, qk_head_dim\) = \(45, 2, 128\), got \(44, 2, 128\)"),
        ("q", torch.zeros(45, 2, 128).half(), "must be torch.float32, as it was selected for, got torch.float16"),
        ("k", torch.zeros(97, 1, 128), r"\(key tokens, heads, qk_head_dim\) = \(97, 2, 128\), got \(97, 1, 128\)"),
        ("k", torch.zeros(97, 128, 2).transpose(1, 2), "the last dimension must be contiguous"),
        ("v", torch.zeros(97, 2, 64), r"\(key tokens, heads, v_head_dim\) = \(97, 2, 128\), got \(97, 2, 64\)"),
        ("v", torch.zeros(97, 2, 128, device="meta"), "must be on cpu, where the kernel was loaded, got meta"),
        ("v", None, "must be a tensor, got NoneType"),
        ("out", torch.zeros(45, 256), r"\(query tokens, heads, v_head_dim\) = \(45, 2, 128\), got \(45, 256\)"),
    ],
)
def test_a_validated_run_names_the_argument(argument: str, value: object, says: str) -> None:
    plan = torch_math(MISTRAL_SMALL_4, "float32", 2).plan(**GOOD_PLAN, validate=True)
    good = {"q": torch.zeros(45, 2, 128), "k": torch.zeros(97, 2, 128), "v": torch.zeros(97, 2, 128)}
    plan.run(**good)
    with pytest.raises(ValueError, match=f"^{argument}: .*{says}"):
        plan.run(**{**good, argument: value})


def test_a_validated_run_checks_what_the_kernel_returns() -> None:
    """The swap that a table of (tokens, heads) and (heads, tokens) kernels invites (vllm-project/vllm#57012)."""
    adapter = oracle("fa2")(MISTRAL_SMALL_4, "float32", 5)
    adapter.prepare = lambda batch: lambda q, k, v, out, lse: (v, torch.zeros(251, 5))
    batch = Ragged.random(adapter, [251], None, causal=True)
    with pytest.raises(KernelError, match=r"returned LSE \(251, 5\) of torch.float32, not \(5, 251\)"):
        batch.run(adapter)


def test_a_raising_kernel_is_named_and_its_exception_kept() -> None:
    plan = torch_math(DIMS[0], "bfloat16", 2).plan(**GOOD_PLAN)
    with pytest.raises(KernelError) as caught:
        plan.run(torch.zeros(45, 2, 100), torch.zeros(97, 2, 192), torch.zeros(97, 2, 128))
    text = str(caught.value)
    assert text.startswith(f"TORCH_SDPA/torch_math (torch {torch.__version__.partition('+')[0]}")
    assert "dims (128, 64, 128), 2 heads, bfloat16 on cpu: RuntimeError: " in text
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text  # verify hands it from process to process


# --- Loading. ---


def cpu_decision():
    return select(Request(MISTRAL_SMALL_4), Environment(arch="cpu"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_heads": 0}, "num_heads must be a positive whole number, got 0"),
        ({"num_heads": "16"}, "num_heads must be a positive whole number, got '16'"),
        ({"num_heads": 2, "softmax_scale": float("nan")}, "softmax_scale must be a positive number, got nan"),
        ({"num_heads": 2, "device": "gpu"}, "device 'gpu' is not one"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load(cpu_decision(), **arguments)


def test_loading_is_for_the_arch_of_the_decision() -> None:
    adapter = load(cpu_decision(), num_heads=2)
    assert adapter.device == torch.device("cpu")
    assert adapter.softmax_scale == 128**-0.5
    adapter.warm_up()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_decision_needs_a_gpu() -> None:
    decision = select(Request(MISTRAL_SMALL_4, backend="TORCH_SDPA"), Environment(arch="sm90"))
    with pytest.raises(KernelError, match="sees no GPU, so nothing can be loaded on cuda"):
        load(decision, num_heads=2)


def test_a_package_that_is_not_installed() -> None:
    decision = cpu_decision()
    chosen = dataclasses.replace(decision.chosen, provider="flash-attn")
    with pytest.raises(KernelError, match="TORCH_SDPA/torch_math needs flash-attn, which is not installed"):
        load(dataclasses.replace(decision, chosen=chosen), num_heads=2)


def test_a_decision_without_a_choice() -> None:
    with pytest.raises(NoBackendError):
        load(dataclasses.replace(cpu_decision(), chosen=None), num_heads=2)


def test_a_kernel_without_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ADAPTERS, "torch_math")
    with pytest.raises(KernelError, match=r"TORCH_SDPA/torch_math has no adapter in this release; .*torch_efficient"):
        load(cpu_decision(), num_heads=2)


def test_an_import_that_raises_anything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self):
        self.import_module("flash_attn_of_another_torch")

    monkeypatch.setattr(torch_sdpa.TorchMath, "load_kernel", broken)
    with pytest.raises(KernelError, match=r"cannot be imported .*ModuleNotFoundError: .*flash_attn_of_another_torch"):
        load(cpu_decision(), num_heads=2)
    monkeypatch.setattr(torch_sdpa.TorchMath, "load_kernel", lambda self: torch.ops.fa3_fwd.fwd)
    with pytest.raises(KernelError, match=r"cannot be loaded; .*AttributeError"):
        load(cpu_decision(), num_heads=2)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, mla_prefill.backends as b; b.load, b.KernelError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_loading_says_what_to_install() -> None:
    """A module of None in sys.modules is how Python itself marks an import as impossible."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mla_prefill import Environment, MLADimensions, Request, select\n"
        "from mla_prefill.backends import KernelError, load\n"
        "try: load(select(Request(MLADimensions(64, 64, 128)), Environment(arch='cpu')), num_heads=2)\n"
        "except KernelError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'mla-prefill[torch]'" in done.stdout
