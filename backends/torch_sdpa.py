"""TORCH_SDPA: attention by PyTorch alone, for machines and dims that no other kernel takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from mla_prefill.backends.base import Attention, Batch, PrefillAdapter
from torch import Tensor

#: Bytes of float32 scores, and besides them of float32 K and V, that ``torch_math`` holds at a time.
BLOCK_BYTES = 16 * 2**20

#: ``custom_mask_type`` of ``aten::_efficient_attention_forward`` (torch/nn/attention/bias.py: CausalVariant).
NO_MASK, CAUSAL_BOTTOM_RIGHT = 0, 2


class TorchMath(PrefillAdapter):
    """Plain operations, computed in float32: any device and any dims, in bounded memory."""

    def load_kernel(self) -> None:
        """Nothing to import: it is written below."""

    def prepare(self, batch: Batch) -> Attention:
        sequences = list(zip(_slices(batch.starts_q), _slices(batch.starts_k), strict=True))
        v_head_dim, scale, causal = self.dims.v_head_dim, self.softmax_scale, batch.causal

        @torch.no_grad()
        def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool) -> tuple[Tensor, Tensor]:
            tokens, heads, _ = q.shape
            out = q.new_empty(tokens, heads, v_head_dim) if out is None else out
            lse = q.new_empty(heads, tokens, dtype=torch.float32)
            for rows, keys in sequences:
                _attend(q[rows], k[keys], v[keys], out[rows], lse[:, rows], scale, causal)
            return out, lse

        return attention


class TorchEfficient(PrefillAdapter):
    """PyTorch's memory-efficient kernel (CUTLASS) with ragged lengths: unequal dims without padding, any CUDA GPU."""

    def load_kernel(self) -> None:
        if self.device.type == "cpu":
            raise self.error("has no kernel for the CPU; torch_math has")

    def prepare(self, batch: Batch) -> Attention:
        op = torch.ops.aten._efficient_attention_forward.default
        scale, mask = self.softmax_scale, CAUSAL_BOTTOM_RIGHT if batch.causal else NO_MASK
        # bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, custom_mask_type
        lengths = (batch.max_seqlen_q, batch.max_seqlen_k)
        ragged = (None, batch.cu_seqlens_q, batch.cu_seqlens_k, *lengths, 0.0, mask)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            result, lse, *_ = op(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), *ragged, return_lse, scale=scale)
            result = result.squeeze(0)
            return result if out is None else out.copy_(result), lse if return_lse else None

        return attention


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool) -> None:
    """One sequence, written into ``out`` (rows, heads, v_head_dim) and ``lse`` (heads, rows).

    Blocks of heads bound the float32 copies of K and V, blocks of rows bound the scores.
    """
    num_rows, heads, _ = q.shape
    num_keys = len(k)
    # Bottom-right: row i sees the first (num_keys - num_rows) + i + 1 keys, so the rows before this one see none.
    first = max(0, num_rows - num_keys) if causal or num_keys == 0 else 0
    out[:first].zero_()
    lse[:, :first] = -math.inf
    heads_at_once = _fitting(heads, num_keys * (k.shape[-1] + v.shape[-1]))
    rows_at_once = _fitting(num_rows, num_keys * heads_at_once)
    for some in _blocks(0, heads if first < num_rows else 0, heads_at_once):
        k32 = k[:, some].permute(1, 2, 0).float()
        v32 = v[:, some].transpose(0, 1).float()
        for rows in _blocks(first, num_rows, rows_at_once):
            q32 = q[rows, some].transpose(0, 1).float()
            seen = num_keys - num_rows + rows.stop if causal else num_keys
            scores = (q32 * scale) @ k32[..., :seen]
            if causal:
                size = rows.stop - rows.start
                later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
                scores[..., seen - size :].masked_fill_(later, -math.inf)
            highest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(-1, keepdim=True)
            out[rows, some] = (weights @ v32[:, :seen]).div_(total).transpose(0, 1)
            lse[some, rows] = total.log_().add_(highest).squeeze(-1)


def _fitting(wanted: int, floats_each: int) -> int:
    """As many as fit into a block of float32, at least one."""
    return max(1, min(wanted, BLOCK_BYTES // (4 * max(1, floats_each))))


def _blocks(start: int, end: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, end)) for first in range(start, end, size))


def _slices(starts: list[int]) -> Iterator[slice]:
    return itertools.starmap(slice, itertools.pairwise(starts))
