"""Partial attention results joined: any split of the keys gives what the whole gives."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mla_prefill.backends import merge_attention_states
from mla_prefill.backends.reference import reference_attention
from torch import Tensor

from .backend_contract import cu_seqlens

TOKENS, HEADS, QK, V = 7, 3, 24, 16


def attention_over(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return reference_attention(
        q, k, v, cu_seqlens([len(q)]), cu_seqlens([len(k)]), causal=False, softmax_scale=QK**-0.5
    )


def random_state(seed: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, HEADS, V, generator=generator), torch.randn(HEADS, tokens, generator=generator)


@settings(deadline=None, max_examples=80)
@given(cuts=st.lists(st.integers(0, 50), max_size=6).map(sorted), seed=st.integers(0, 99))
def test_any_split_of_the_keys_equals_the_whole(cuts: list[int], seed: int) -> None:
    """Empty chunks at the start, in the middle and at the end included."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, HEADS, width, generator=generator) for n, width in ((TOKENS, QK), (50, QK), (50, V)))
    chunks = itertools.pairwise([0, *cuts, 50])
    partial = [attention_over(q, k[start:end], v[start:end]) for start, end in chunks]
    out, lse = reduce(lambda a, b: merge_attention_states(*a, *b), partial)
    whole, whole_lse = attention_over(q, k, v)
    torch.testing.assert_close(out, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(a=st.integers(0, 99), b=st.integers(0, 99))
def test_the_order_does_not_matter(a: int, b: int) -> None:
    first, second = random_state(a), random_state(b)
    torch.testing.assert_close(merge_attention_states(*first, *second), merge_attention_states(*second, *first))


@pytest.mark.parametrize("nothing", [-math.inf, math.inf], ids=["-inf", "+inf as FA2 writes it"])
@pytest.mark.parametrize("empty", ["a", "b", "both", "neither"])
def test_rows_without_keys(nothing: float, empty: str) -> None:
    """One side empty: the other side's row, bit for bit. Both: 0 and -inf, no NaN. Row 0 alone is concerned."""
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    for side, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if empty in (side, "both"):
            out[0], lse[:, 0] = 0.0, nothing
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    expected = {"a": (out_b[0], lse_b[:, 0]), "b": (out_a[0], lse_a[:, 0])}
    if empty in expected:
        assert torch.equal(out[0], expected[empty][0])
        assert torch.equal(lse[:, 0], expected[empty][1])
    if empty == "both":
        assert not out[0].any()
        assert (lse[:, 0] == -math.inf).all()
    torch.testing.assert_close(lse[:, 1:], torch.logaddexp(lse_a, lse_b)[:, 1:])
    assert out[1:].all()


def test_as_many_heads_as_tokens() -> None:
    """A swapped LSE shows no wrong shape here (vllm-project/vllm#57012): the weights must follow (heads, tokens)."""
    out_a, out_b = torch.ones(HEADS, HEADS, V), torch.zeros(HEADS, HEADS, V)
    lse_a, lse_b = torch.zeros(HEADS, HEADS), torch.zeros(HEADS, HEADS)
    lse_b[0, 2] = math.log(3.0)  # head 0, token 2: b weighs three times as much
    out, _ = merge_attention_states(out_a, lse_a, out_b, lse_b)
    expected = torch.full((HEADS, HEADS, V), 0.5)
    expected[2, 0] = 0.25
    torch.testing.assert_close(out, expected)


def test_natural_logarithms() -> None:
    """8 keys against 24: a quarter to three quarters. In base 2 it would be 1/10 to 9/10 (vllm-project/vllm#47079)."""
    ones, zeros = torch.ones(1, 1, V), torch.zeros(1, 1, V)
    out, lse = merge_attention_states(ones, torch.tensor([[math.log(8.0)]]), zeros, torch.tensor([[math.log(24.0)]]))
    torch.testing.assert_close(out, torch.full((1, 1, V), 0.25))
    torch.testing.assert_close(lse, torch.tensor([[math.log(32.0)]]))


def test_views_with_other_strides() -> None:
    """Padded outputs cut to v_head_dim, and a transposed LSE (vllm-project/vllm#42642)."""
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    expected = merge_attention_states(out_a, lse_a, out_b, lse_b)
    padded = torch.nn.functional.pad(out_b, (0, 8), value=math.nan)[..., :V]
    got = merge_attention_states(out_a, lse_a.t().contiguous().t(), padded, lse_b)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_computes_in_float32_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    out, lse = merge_attention_states(out_a.to(dtype), lse_a, out_b.to(dtype), lse_b)
    exact, _ = merge_attention_states(out_a.to(dtype).float(), lse_a, out_b.to(dtype).float(), lse_b)
    assert lse.dtype == torch.float32
    assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("into", ["new", "a", "b"])
def test_out_is_written_and_returned(into: str) -> None:
    """Over one of the inputs too: an engine merges chunk after chunk in place."""
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    expected, _ = merge_attention_states(out_a, lse_a, out_b, lse_b)
    out = {"new": torch.empty_like(out_a), "a": out_a, "b": out_b}[into]
    got, _ = merge_attention_states(out_a, lse_a, out_b, lse_b, out)
    assert got is out
    assert torch.equal(out, expected)


def test_inputs_are_left_alone() -> None:
    states = [*random_state(1), *random_state(2)]
    before = [tensor.clone() for tensor in states]
    merge_attention_states(*states)
    assert all(map(torch.equal, before, states))


def test_no_tokens() -> None:
    out, lse = merge_attention_states(*random_state(1, tokens=0), *random_state(2, tokens=0))
    assert out.shape == (0, HEADS, V)
    assert lse.shape == (HEADS, 0)


@pytest.mark.parametrize(
    ("argument", "shape", "says"),
    [
        ("lse_a", (TOKENS, HEADS), r"must have shape \(heads, tokens\) = \(3, 7\), got \(7, 3\)"),
        ("lse_b", (1, HEADS, TOKENS), r"must have shape \(heads, tokens\) = \(3, 7\), got \(1, 3, 7\)"),
        ("out_b", (TOKENS, HEADS, V + 8), r"must have out_a's shape \(7, 3, 16\), got \(7, 3, 24\)"),
        ("out", (1, HEADS, V), r"must have out_a's shape \(7, 3, 16\), got \(1, 3, 16\)"),
    ],
)
def test_a_wrong_shape_is_named(argument: str, shape: tuple[int, ...], says: str) -> None:
    arguments = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*random_state(1), *random_state(2)), strict=True))
    with pytest.raises(ValueError, match=f"^{argument}: {says}"):
        merge_attention_states(**{**arguments, argument: torch.zeros(shape)})
