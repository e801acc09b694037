"""Checks for those who ask for them (``plan(..., validate=True)``); each error begins with the argument's name."""

from __future__ import annotations

from typing import Any

import torch
from mla_prefill.backends.base import Batch, PrefillPlan, lengths
from torch import Tensor


class ValidatedPlan(PrefillPlan):
    """A plan that checks what it is given and what the kernel returns. For tests, the main job and ``verify``."""

    __slots__ = ()

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, return_lse: bool = False) -> Any:
        """As ``PrefillPlan.run``.

        Raises:
            ValueError: an argument has a wrong shape, dtype, device or stride; the text begins with its name.
            KernelError: the kernel raised, or returned something of another shape or dtype.
        """
        adapter, tokens, keys = self.adapter, self.batch.starts_q[-1], self.batch.starts_k[-1]
        heads, qk, v_dim = adapter.num_heads, adapter.dims.qk_head_dim, adapter.dims.v_head_dim
        of_q, of_out = adapter.dtype, adapter.out_dtype
        _check_tensor("q", q, (tokens, heads, qk), "(query tokens, heads, qk_head_dim)", of_q, adapter.device)
        _check_tensor("k", k, (keys, heads, qk), "(key tokens, heads, qk_head_dim)", of_q, adapter.device)
        _check_tensor("v", v, (keys, heads, v_dim), "(key tokens, heads, v_head_dim)", of_q, adapter.device)
        if out is not None:
            what = "(query tokens, heads, v_head_dim)"
            _check_tensor("out", out, (tokens, heads, v_dim), what, of_out, adapter.device)
        answer: Any = super().run(q, k, v, out=out, return_lse=return_lse)
        result, lse = answer if return_lse else (answer, None)
        self._check_result("out", result, (tokens, heads, v_dim), of_out)
        if lse is not None:
            self._check_result("LSE", lse, (heads, tokens), torch.float32)
        return answer

    def _check_result(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise self.adapter.error(f"returned {name} {got}, not {shape} of {dtype}")


def check_batch(batch: Batch, device: torch.device) -> None:
    """Waits for the device.

    Raises:
        ValueError: an argument of ``plan`` is wrong; the text begins with its name.
    """
    _check_cu_seqlens("cu_seqlens_q", batch.cu_seqlens_q, batch.cu_seqlens_q_cpu, device)
    _check_cu_seqlens("cu_seqlens_k", batch.cu_seqlens_k, batch.cu_seqlens_k_cpu, device)
    sequences_q, sequences_k = len(batch.starts_q) - 1, len(batch.starts_k) - 1
    if sequences_q != sequences_k:
        raise ValueError(f"cu_seqlens_k: has {sequences_k} sequences, but cu_seqlens_q has {sequences_q}")
    _check_longest("max_seqlen_q", batch.max_seqlen_q, batch.starts_q)
    _check_longest("max_seqlen_k", batch.max_seqlen_k, batch.starts_k)
    if type(batch.causal) is not bool:
        raise ValueError(f"causal: must be True or False, got {batch.causal!r}")


def _check_cu_seqlens(name: str, tensor: Any, host_copy: Any, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name}: must be torch.int32, got {tensor.dtype}; use {name}.to(torch.int32)")
    if tensor.dim() != 1 or len(tensor) < 2 or not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, of shape (sequences + 1,), got {tuple(tensor.shape)}")
    _check_device(name, tensor, device)
    starts = tensor.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name}: must start at 0, got {starts[0]}")
    for sequence, length in enumerate(lengths(starts)):
        if length < 0:
            raise ValueError(f"{name}: must not decrease, but sequence {sequence} has length {length}")
    if host_copy is None:
        return
    if not isinstance(host_copy, Tensor) or host_copy.device.type != "cpu" or host_copy.tolist() != starts:
        raise ValueError(f"{name}_cpu: must be a copy of {name} on the CPU, a tensor")


def _check_longest(name: str, given: Any, starts: list[int]) -> None:
    longest = max(lengths(starts))
    if type(given) is not int:
        raise ValueError(f"{name}: must be a host int, got {type(given).__name__}; the longest sequence has {longest}")
    if given != longest:
        raise ValueError(f"{name}: is {given}, but the longest sequence has {longest}")


def _check_tensor(
    name: str, tensor: Any, shape: tuple[int, ...], meaning: str, dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: must have shape {meaning} = {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: must be {dtype}, as it was selected for, got {tensor.dtype}")
    _check_device(name, tensor, device)
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {tensor.stride()}")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: must be on {device}, where the kernel was loaded, got {tensor.device}")
