"""CUDNN: the cuDNN frontend's own PyTorch op for ragged batches, ``torch.ops.cudnn.sdpa_fwd`` (``cudnn.sdpa_torch``).

Read from nvidia-cudnn-frontend 1.29.1 and 1.32.0 (cudnn/sdpa/fwd/torch_op.py; 1.28 has no such op). Run on an
H200 with 1.32.0 and cuDNN 9.19. The frontend keeps a built graph for each (lengths, strides) that it meets, so batches
of new shapes are slow to begin.
"""

from __future__ import annotations

from functools import partial

from mla_prefill.backends.base import Attention, Batch, PrefillAdapter
from mla_prefill.backends.calls import registered_op
from torch import Tensor

#: The module whose import registers the op, its namespace, its name.
OP = ("cudnn.sdpa.fwd.torch_op", "cudnn", "sdpa_fwd")


class Cudnn(PrefillAdapter):
    """cuDNN's fused attention. It allocates its output, and returns the LSE as (tokens, heads, 1), natural log."""

    def load_kernel(self) -> None:
        self.writes_out = False
        self._op = registered_op(self, OP)

    def prepare(self, batch: Batch) -> Attention:
        call = partial(
            self._op,
            attn_scale=self.softmax_scale,
            is_causal=batch.causal,
            causal_bottom_right=batch.causal,  # without it the mask is top-left; not causal, it is refused
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_kv=batch.cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_kv=batch.max_seqlen_k,
        )

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            result, lse = call(q, k, v, return_lse=return_lse)
            return result, lse.squeeze(-1) if return_lse else None

        return attention
