"""Joining partial attention results: what chunked prefill does after every context chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the results over each.

    Args:
        out_a: (tokens, heads, v_head_dim), any strides.
        lse_a: (heads, tokens), natural log; -inf (or a kernel's +inf) in rows without keys.
        out_b: as ``out_a``.
        lse_b: as ``lse_a``.
        out: (tokens, heads, v_head_dim) to write into; may be ``out_a`` or ``out_b`` themselves.

    Returns:
        The merged out in ``out_a``'s dtype (or in ``out``), and its LSE, float32 (heads, tokens), so that chunk after
        chunk can be merged. Computed in float32. A row without keys on both sides has out 0 and LSE -inf.

    Raises:
        ValueError: an argument has another shape; the text begins with its name.

    +inf read as "no keys" is vLLM's rule too (v1/attention/ops/merge_attn_states.py).
    """
    _check_shapes(out_a, lse_a, out_b, lse_b, out)
    lse_a, lse_b = _without_plus_infinity(lse_a), _without_plus_infinity(lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.masked_fill(lse == -math.inf, 0.0)  # else -inf - -inf where both are empty
    weight_a, weight_b = ((part - finite).exp_().t().unsqueeze(-1) for part in (lse_a, lse_b))
    merged = (out_a.float() * weight_a).addcmul_(out_b.float(), weight_b)
    if out is not None:
        return out.copy_(merged), lse
    return merged.to(out_a.dtype), lse


def _without_plus_infinity(lse: Tensor) -> Tensor:
    return lse.float().nan_to_num(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor | None) -> None:
    tokens, heads = out_a.shape[:2]
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != (heads, tokens):
            raise ValueError(f"{name}: must have shape (heads, tokens) = {(heads, tokens)}, got {tuple(lse.shape)}")
    for name, other in (("out_b", out_b), ("out", out)):
        if other is not None and other.shape != out_a.shape:
            raise ValueError(f"{name}: must have out_a's shape {tuple(out_a.shape)}, got {tuple(other.shape)}")
