"""Full attention by its definition: the oracle that every kernel is held to. Slow, large, and easy to read."""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each sequence on its own, with all scores in memory.

    Args:
        q: (query tokens, heads, qk_head_dim).
        k: (key tokens, heads, qk_head_dim).
        v: (key tokens, heads, v_head_dim).
        cu_seqlens_q: integers (sequences + 1,).
        cu_seqlens_k: integers (sequences + 1,).
        causal: aligned bottom-right: the last query of a sequence sees all its keys.
        softmax_scale: the factor on q k^T.
        dtype: what to compute in. float32 is exact only while PyTorch may not use TF32 for it (the default);
            float64 always is.

    Returns:
        out (query tokens, heads, v_head_dim) and LSE (heads, query tokens, natural log), both of ``dtype``. A row
        without keys has out 0 and LSE -inf.
    """
    outs, lses = [], []
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    previous_q, previous_k = next(starts)
    for end_q, end_k in starts:
        sequence_q = q[previous_q:end_q].to(dtype)
        sequence_k = k[previous_k:end_k].to(dtype)
        sequence_v = v[previous_k:end_k].to(dtype)
        previous_q, previous_k = end_q, end_k

        scores = torch.einsum("qhd,khd->hqk", sequence_q, sequence_k) * softmax_scale
        if causal:
            num_q, num_k = len(sequence_q), len(sequence_k)
            last_key = torch.arange(num_q, device=q.device) + (num_k - num_q)
            visible = torch.arange(num_k, device=q.device) <= last_key[:, None]
            scores = scores.masked_fill(~visible, -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        outs.append(torch.einsum("hqk,khd->qhd", weights, sequence_v))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)
