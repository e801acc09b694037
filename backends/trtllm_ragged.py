"""TRTLLM_RAGGED: TensorRT-LLM's kernels through ``flashinfer.prefill.trtllm_ragged_attention_deepseek``.

Read from flashinfer-python 0.6.6, 0.6.14, 0.6.18.post1, 0.7.1 and 0.7.4 (flashinfer/prefill.py,
csrc/trtllm_fmha_kernel_launcher.cu) and from vLLM 0.33's use of it. From source, not run.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial

import torch
from mla_prefill.backends.base import Attention, Batch, PrefillAdapter, lengths
from mla_prefill.backends.calls import with_contiguous_out
from mla_prefill.backends.flashinfer import workspace
from torch import Tensor

#: What vLLM gives these kernels; the statistics that an LSE needs are taken from it, so they come on top here.
SCRATCH_BYTES = 394 * 2**20

#: The launcher rounds the longest query up to this many rows, 8 bytes each, for every head and sequence.
STATISTICS_ROWS = 256


class TrtllmRagged(PrefillAdapter):
    """Ragged prefill of the sm100 family. The kernel reads q as packed, whatever its strides say."""

    def load_kernel(self) -> None:
        self._function = self.import_module("flashinfer.prefill").trtllm_ragged_attention_deepseek
        self._host_lengths = "q_seq_lens_cpu" in inspect.signature(self._function).parameters
        if self._host_lengths and self.lse is not None:  # with them, FlashInfer itself sees to sequences without keys
            self.lse = replace(self.lse, no_keys="-inf")

    def prepare(self, batch: Batch) -> Attention:
        sequences = len(batch.starts_q) - 1
        call = partial(
            self._function,
            workspace_buffer=workspace(self.device, SCRATCH_BYTES + self._statistics_bytes(batch, sequences)),
            seq_lens=batch.cu_seqlens_k.diff(),
            max_q_len=batch.max_seqlen_q,
            max_kv_len=batch.max_seqlen_k,
            bmm1_scale=self.softmax_scale,
            bmm2_scale=1.0,
            o_sf_scale=1.0,
            batch_size=sequences,
            window_left=-1,
            cum_seq_lens_q=batch.cu_seqlens_q,
            cum_seq_lens_kv=batch.cu_seqlens_k,
            enable_pdl=False,
            is_causal=batch.causal,
            **self._lengths_if_some_are_zero(batch),
        )

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            answer = call(query=q.contiguous(), key=k, value=v, out=out, return_lse=return_lse)
            return answer if return_lse else (answer, None)

        return with_contiguous_out(attention)

    def _statistics_bytes(self, batch: Batch, sequences: int) -> int:
        rows = -(-batch.max_seqlen_q // STATISTICS_ROWS) * STATISTICS_ROWS
        return 8 * self.num_heads * sequences * rows

    def _lengths_if_some_are_zero(self, batch: Batch) -> dict[str, Tensor]:
        """Without these copies, sequences without queries or keys spoil the results (sgl-project/sglang#22688); with
        them, every call looks at them on the host, so they are given only where they are needed.
        """
        lengths_q, lengths_k = lengths(batch.starts_q), lengths(batch.starts_k)
        if all(lengths_q) and all(lengths_k):
            return {}
        if not self._host_lengths:
            raise ValueError(
                "some sequences have no queries or no keys, which trtllm_ragged_attention_deepseek gets wrong in this "
                "version (it has no kv_seq_lens_cpu); use a newer flashinfer-python, or leave such sequences out"
            )
        as_tensor = partial(torch.tensor, dtype=torch.int32)
        return {"q_seq_lens_cpu": as_tensor(lengths_q), "kv_seq_lens_cpu": as_tensor(lengths_k)}
