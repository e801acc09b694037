"""Thin adapters that run a decision: ``load`` imports the chosen kernel, and nothing before it imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from mla_prefill.backends.base import PrefillAdapter
    from mla_prefill.selector.decision import Decision

__all__ = ["KernelError", "load", "merge_attention_states"]

#: kernel -> "module:class" of its adapter in this folder; a string, so that listing imports nothing.
ADAPTERS = {
    "aiter": "aiter:Aiter",
    "cudnn": "cudnn:Cudnn",
    "fa2": "flash_attn:FlashAttention2",
    "fa3": "flash_attn:FlashAttention3",
    "fa4": "flash_attn:FlashAttention4",
    "flashinfer_cudnn": "flashinfer:FlashInfer",
    "flashinfer_cutlass": "flashinfer:FlashInfer",
    "flashinfer_fa2": "flashinfer:FlashInfer",
    "flashinfer_fa3": "flashinfer:FlashInfer",
    "tokenspeed_mla": "tokenspeed_mla:TokenspeedMLA",
    "torch_efficient": "torch_sdpa:TorchEfficient",
    "torch_math": "torch_sdpa:TorchMath",
    "trtllm_ragged": "trtllm_ragged:TrtllmRagged",
}


class KernelError(RuntimeError):
    """A kernel could not be imported, refused a batch, or raised; ``__cause__`` keeps what it raised."""


def load(
    decision: Decision,
    *,
    num_heads: int,
    softmax_scale: float | None = None,
    device: torch.device | str | None = None,
) -> PrefillAdapter:
    """The adapter of the kernel that ``decision`` chose; imports that kernel's package and no other.

    Args:
        decision: what ``select`` answered, with a chosen candidate.
        num_heads: heads of q on this rank; k and v have as many (MLA prefill is multi-head).
        softmax_scale: the factor on q k^T; None means ``qk_head_dim ** -0.5``.
        device: where q, k and v will be; None means the current device of the kind that the decision is for.

    Raises:
        KernelError: the kernel has no adapter, its package (or PyTorch) cannot be imported, or there is no such device.
        NoBackendError: the decision chose nothing.
        ValueError: an argument makes no sense.
    """
    require_torch()
    base = importlib.import_module("mla_prefill.backends.base")
    adapter: PrefillAdapter = base.load_adapter(decision, ADAPTERS, num_heads, softmax_scale, device)
    return adapter


def require_torch() -> None:
    """Imports PyTorch. Raises KernelError whatever a broken build raises: ImportError, OSError, SystemExit ..."""
    try:
        importlib.import_module("torch")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise KernelError(
            f"PyTorch is needed to run a kernel and cannot be imported ({type(error).__name__}: {error}). "
            "Install it with: pip install 'mla-prefill[torch]'"
        ) from error


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the results over each; see ``merge.merge_attention_states``."""
    from mla_prefill.backends import merge

    return merge.merge_attention_states(out_a, lse_a, out_b, lse_b, out)
