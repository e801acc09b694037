"""ROCM_AITER_FA: AMD's AITER, ``aiter.flash_attn_varlen_func``; V may be narrower than Q and K.

Read from amd-aiter 0.1.7.post2.dev18 and ROCm/aiter at e4048607 (aiter/ops/mha.py), and from vLLM 0.33's use of it.
From source, not run.
"""

from __future__ import annotations

from functools import partial

from mla_prefill.backends.base import Attention, Batch, PrefillAdapter
from mla_prefill.backends.calls import with_contiguous_out
from torch import Tensor


class Aiter(PrefillAdapter):
    """AITER chooses among its assembly, CK and FlyDSL kernels by itself."""

    def load_kernel(self) -> None:
        self._function = self.import_module("aiter").flash_attn_varlen_func

    def prepare(self, batch: Batch) -> Attention:
        call = partial(
            self._function,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.cu_seqlens_k,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            softmax_scale=self.softmax_scale,
            causal=batch.causal,
        )

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            answer = call(q=q, k=k, v=v, out=out, return_lse=return_lse)
            return answer if return_lse else (answer, None)

        return with_contiguous_out(attention)
