"""FLASHINFER: ``BatchPrefillWithRaggedKVCacheWrapper`` with one of its sub-backends, planned once a batch.

Read from flashinfer-python 0.6.6, 0.6.14, 0.6.18.post1, 0.7.1 and 0.7.4 (flashinfer/prefill.py, csrc/batch_prefill*.cu,
csrc/fmha_cutlass_sm100.cu). The fa2, fa3 and cudnn sub-backends were run on an H200; cutlass is from source, not run.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mla_prefill.backends.base import Attention, Batch, PrefillAdapter, lengths
from mla_prefill.backends.calls import run_every_operation, with_contiguous_out
from torch import Tensor

#: What FlashInfer recommends for the temporary results of its split-KV kernels.
WORKSPACE_BYTES = 128 * 2**20

#: kernel -> (query tokens of a tile, tiles x heads of a plan): the planner writes one entry each into buffers of that
#: size and does not look at their end (flashinfer-python 0.7.4: prefill.py, _CUTLASS_PLAN_QO_TILE_SIZE).
PLAN_LIMITS = {"flashinfer_cutlass": (256, 131072)}

_workspaces: dict[torch.device, Tensor] = {}


def workspace(device: torch.device, size: int) -> Tensor:
    """At least ``size`` bytes of scratch, one buffer a device: what is in it is needed only while a kernel runs."""
    buffer = _workspaces.get(device)
    if buffer is None or buffer.numel() < size:
        buffer = _workspaces[device] = torch.zeros(size, dtype=torch.uint8, device=device)
    return buffer


class FlashInfer(PrefillAdapter):
    """``flashinfer_fa2``, ``_fa3``, ``_cutlass`` and ``_cudnn``: the kernel's name says which sub-backend.

    A plan keeps its wrapper until it is dropped; then the next batch gets it, since each holds 8 MiB of pinned memory.
    A CUDA graph therefore needs its plan to be kept.
    """

    def load_kernel(self) -> None:
        wrapper = self.import_module("flashinfer.prefill").BatchPrefillWithRaggedKVCacheWrapper
        sub_backend = self.kernel.name.removeprefix("flashinfer_")
        self._new_wrapper = partial(
            wrapper, workspace(self.device, WORKSPACE_BYTES), kv_layout="NHD", backend=sub_backend
        )
        self._idle: list[tuple[Any, torch.cuda.Event | None]] = []
        self._host_copies = "qo_indptr_cpu" in inspect.signature(wrapper.plan).parameters  # from 0.7.4 on
        self._lse_form: dict[str, str] = {}
        if self.lse is not None and "lse_base" in inspect.signature(wrapper.run).parameters:  # from 0.7.1 on
            self._lse_form = {"lse_base": "ln", "lse_layout": "HN"}
            self.lse = replace(self.lse, base="e", layout="heads_tokens")

    def prepare(self, batch: Batch) -> Attention:
        self._check_plan_limit(batch)
        wrapper = self._idle_wrapper()
        wrapper.plan(
            qo_indptr=batch.cu_seqlens_q,
            kv_indptr=batch.cu_seqlens_k,
            num_qo_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim_qk=self.dims.qk_head_dim,
            head_dim_vo=self.dims.v_head_dim,
            causal=batch.causal,
            sm_scale=self.softmax_scale,
            q_data_type=self.dtype,
            o_data_type=self.out_dtype,
            **self._host_indptr(batch),
        )
        run = partial(wrapper.run, **self._lse_form)

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            answer = run(q, k, v, out=out, return_lse=return_lse)
            return answer if return_lse else (answer, None)

        weakref.finalize(attention, self._idle.append, (wrapper, self._planned())).atexit = False
        return with_contiguous_out(attention)

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Builds the sub-backend's module for these dims and dtype, where it is not there yet (1 to 2 minutes)."""
        run_every_operation(self, (16,), report)

    def _host_indptr(self, batch: Batch) -> dict[str, Tensor | None]:
        if not self._host_copies:
            return {}
        return {"qo_indptr_cpu": batch.cu_seqlens_q_cpu, "kv_indptr_cpu": batch.cu_seqlens_k_cpu}

    def _idle_wrapper(self) -> Any:
        if not self._idle:
            return self._new_wrapper()
        wrapper, planned = self._idle.pop()
        if planned is not None:  # its copy of the last plan to the device may still read the pinned memory
            planned.synchronize()
        return wrapper

    def _planned(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def _check_plan_limit(self, batch: Batch) -> None:
        if self.kernel.name not in PLAN_LIMITS:
            return
        tile, most = PLAN_LIMITS[self.kernel.name]
        tiles = self.num_heads * sum(-(-length // tile) for length in lengths(batch.starts_q))
        if tiles > most:
            raise ValueError(
                f"{tiles} tiles of {tile} query tokens and one head, but a plan of this kernel holds {most}; "
                f"run the {batch.starts_q[-1]} query tokens in {-(-tiles // most)} or more batches"
            )
