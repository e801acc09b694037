"""TOKENSPEED_MLA: the CuTe DSL prefill kernel of tokenspeed-mla.

Read from tokenspeed-mla 0.1.8, 0.2.22 and 2.0.4 (tokenspeed_mla/mla_prefill.py, __init__.py) and from vLLM 0.33's use
of it. From source, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mla_prefill.backends.base import Attention, Batch, PrefillAdapter
from mla_prefill.backends.calls import run_every_operation, with_contiguous_out
from torch import Tensor


class TokenspeedMLA(PrefillAdapter):
    """Inputs are made contiguous: a strided V gave wrong output without a word (vLLM 0.33, on 0.1.8)."""

    def load_kernel(self) -> None:
        # Not from the package itself: that hides an ImportError behind a function which raises it at its first call.
        self._function = self.import_module("tokenspeed_mla.mla_prefill").tokenspeed_mla_prefill

    def prepare(self, batch: Batch) -> Attention:
        call = partial(
            self._function,
            seq_lens=batch.cu_seqlens_k.diff(),
            cum_seq_lens=batch.cu_seqlens_k,
            max_seq_len=batch.max_seqlen_k,
            batch_size=len(batch.cu_seqlens_q) - 1,
            softmax_scale=self.softmax_scale,
            is_causal=batch.causal,
            cum_seq_lens_q=batch.cu_seqlens_q,
            max_seq_len_q=batch.max_seqlen_q,
            enable_pdl=False,
        )

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            answer = call(
                query=q.contiguous(), key=k.contiguous(), value=v.contiguous(), out=out, return_lse=return_lse
            )
            return answer if return_lse else (answer, None)

        return with_contiguous_out(attention)

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Compiles each operation (1.5 to 2 minutes each, by the package's own note)."""
        run_every_operation(self, (16,), report)
