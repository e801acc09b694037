"""FLASH_ATTN: FlashAttention 2, 3 and 4, from every package that offers one.

Read from: flash-attn 2.6.0 to 2.8.3.post2 (csrc/flash_attn/flash_api.cpp, flash_attn_interface.py), PyTorch 2.13's
schemas, vLLM 0.26 and 0.33 (vllm_flash_attn), flash-attn-3 at 0251105a (hopper/), fa3-fwd 0.0.1 and 0.0.3,
sglang-kernel 0.4.9 (sgl_kernel/flash_attn.py), flash-attn-4 b5 to b36 (flash_attn/cute/interface.py); their signatures
are recorded in tests/data/signatures. Run on an H200 were PyTorch's FA2, fa3-fwd and flash-attn-4; flash-attn,
flash-attn-3, vLLM's copies and sglang-kernel are from source, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mla_prefill.backends.base import Attention, Batch, PrefillAdapter, distribution_version
from mla_prefill.backends.calls import Entry, registered_op, run_every_operation
from mla_prefill.backends.planned_calls import PlannedCalls, planned_calls
from mla_prefill.capabilities.versions import contains
from torch import Tensor

#: What parameters of FlashAttention's ops get besides the batch, by the names of their schemas. Optional ones are None.
#: What the kernel sheet has as ``call`` comes on top.
CONSTANTS = {
    "p_dropout": 0.0,
    "zero_tensors": False,
    "return_softmax": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "only_qv": False,
}

#: What each batch or call sets, in the ops' own names.
PER_CALL = (
    *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "is_causal"),
)

#: distribution -> (module whose import registers the op, namespace, op).
FA2_OPS = {"vllm": ("vllm.vllm_flash_attn", "_vllm_fa2_C", "varlen_fwd")}
FA3_OPS = {
    "flash-attn-3": ("flash_attn_interface", "flash_attn_3", "fwd"),
    "fa3-fwd": ("fa3_fwd_interface", "fa3_fwd", "fwd"),
    "vllm": ("vllm.vllm_flash_attn", "_vllm_fa3_C", "fwd"),
    "sglang-kernel": ("sgl_kernel.flash_attn", "sgl_kernel", "fwd"),
}


@dataclass(frozen=True)
class CallForm:
    """How some versions of a package take a call: parameters by position, and where in the results the LSE is."""

    versions: str
    parameters: tuple[str, ...]
    lse: int


_HEAD = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_TAIL = (
    *("block_table", "alibi_slopes", "max_seqlen_q", "max_seqlen_k", "p_dropout", "softmax_scale", "zero_tensors"),
    *("is_causal", "window_size_left", "window_size_right", "softcap", "return_softmax", "gen"),
)

#: ``flash_attn_2_cuda.varlen_fwd``: 2.6.1 put leftpad_k in, 2.7.0 took four of eight results away
#: (deepspeedai/DeepSpeed#8022). Other versions are called through the package's public function.
FLASH_ATTN_FORMS = (
    CallForm(">=2.6.0,<2.6.1", (*_HEAD, *_TAIL), lse=5),
    CallForm(">=2.6.1,<2.7.0", (*_HEAD, "leftpad_k", *_TAIL), lse=5),
    CallForm(">=2.7.0,<2.8.4", (*_HEAD, "leftpad_k", *_TAIL), lse=1),
)


class _FlashAttention(PrefillAdapter):
    """Common to the versions: calls by position through an ``Entry``."""

    def _batch(self, batch: Batch) -> dict[str, Any]:
        return {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "cu_seqlens_k": batch.cu_seqlens_k,
            "max_seqlen_q": batch.max_seqlen_q,
            "max_seqlen_k": batch.max_seqlen_k,
            "softmax_scale": self.softmax_scale,
        }

    def _registered(self, ops: dict[str, tuple[str, str, str]]) -> Entry:
        return Entry.of_op(registered_op(self, ops[self.provider.distribution]), self._constants(), PER_CALL)

    def _constants(self) -> dict[str, Any]:
        return CONSTANTS | dict(self.kernel.call)

    def _through(self, entry: Entry, batch: Batch, lse: int) -> Attention:
        call = entry.bound(**self._batch(batch), is_causal=batch.causal)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            results = call(q, k, v, out)
            return results[0], results[lse]

        return attention


class FlashAttention2(_FlashAttention):
    """FA2: the package's C++ binding, PyTorch's own op, or the op of vLLM's copy."""

    def load_kernel(self) -> None:
        #: The call of a batch; which one depends on where FA2 comes from.
        self._call: Callable[[Batch], Attention]
        if self.provider.distribution in FA2_OPS:
            self._call = partial(self._through, self._registered(FA2_OPS), lse=1)
        elif self.provider.distribution == "torch":
            self._load_torch()
        else:
            self._load_package()

    def prepare(self, batch: Batch) -> Attention:
        return self._call(batch)

    def _load_package(self) -> None:
        version = distribution_version(self.provider.distribution) or ""
        form = next((form for form in FLASH_ATTN_FORMS if contains(form.versions, version)), None)
        if form is None:
            public = self.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
            self._call = partial(self._through_public, public)
        else:
            binding = self.import_module("flash_attn_2_cuda").varlen_fwd
            arguments = {name: self._constants().get(name) for name in form.parameters}
            self._call = partial(self._through, Entry(binding, arguments), lse=form.lse)

    def _through_public(self, public: Callable[..., Any], batch: Batch) -> Attention:
        call = partial(public, **self._batch(batch), causal=batch.causal)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            if return_lse:
                result, lse, *_ = call(q=q, k=k, v=v, return_attn_probs=True)
            else:
                result, lse = call(q=q, k=k, v=v), None
            return result if out is None else out.copy_(result), lse

        return attention

    def _load_torch(self) -> None:
        self._forward = torch.ops.aten._flash_attention_forward.default
        in_place = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)  # torch 2.13 has it
        self._into = None if in_place is None else in_place.default
        self._call = self._through_torch

    def _through_torch(self, batch: Batch) -> Attention:
        forward, into, scale = self._forward, self._into, self.softmax_scale
        # cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask
        ragged = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k, 0.0, batch.causal)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            if out is not None and into is not None:
                return out, into(out, q, k, v, *ragged, False, scale=scale)
            result, lse, *_ = forward(q, k, v, *ragged, False, scale=scale)
            return result if out is None else out.copy_(result), lse

        return attention


class FlashAttention3(_FlashAttention):
    """FA3: the registered op behind the public function, which costs a third of it on the host."""

    def load_kernel(self) -> None:
        self._entry = self._registered(FA3_OPS)

    def prepare(self, batch: Batch) -> Attention:
        return self._through(self._entry, batch, lse=1)


class FlashAttention4(_FlashAttention):
    """FA4: a planned call where it was proven (``planned_calls``), else the public function, by keyword."""

    def load_kernel(self) -> None:
        self._planned: PlannedCalls | None = None
        if self.provider.distribution == "vllm":
            interface = self.import_module("vllm.vllm_flash_attn.flash_attn_interface")
            self._call = partial(self._vllm, interface.flash_attn_varlen_func)
        else:
            interface = self.import_module("flash_attn.cute.interface")
            self._call = partial(self._package, interface.flash_attn_varlen_func)
            self._planned = planned_calls(interface, self.provider.planned_call) if self.provider.planned_call else None

    def prepare(self, batch: Batch) -> Attention:
        public = self._call(batch)
        return public if self._planned is None else self._planned.of_batch(public, batch)

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Compiles each operation for queries that fit into one tile, into one stage of two tiles (sm100), and into
        neither: what is compiled depends on that. Kinds that are the same on this architecture are compiled once.
        """
        run_every_operation(self, (16, 200, 1024), report)

    def _package(self, public: Callable[..., Any], batch: Batch) -> Attention:
        call = partial(public, **self._batch(batch), causal=batch.causal, **dict(self.kernel.call))

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            result, lse = call(q=q, k=k, v=v, return_lse=return_lse)
            return result if out is None else out.copy_(result), lse

        return attention

    def _vllm(self, public: Callable[..., Any], batch: Batch) -> Attention:
        call = partial(public, **self._batch(batch), causal=batch.causal, fa_version=4, **dict(self.kernel.call))

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            if not return_lse:
                return call(q=q, k=k, v=v, out=out), None
            result, lse = call(q=q, k=k, v=v, out=out, return_softmax_lse=True)
            return result, lse

        return attention
