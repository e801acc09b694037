"""Thin adapters that run a decision: ``load`` imports the chosen kernel, and nothing before it imports torch."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from mla_prefill.backends.base import PrefillAdapter
    from mla_prefill.backends.measured import MeasuredPrefill
    from mla_prefill.selector.decision import Decision

__all__ = ["KernelError", "load", "load_measured", "merge_attention_states"]

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
    if not hasattr(decision, "verdicts"):
        raise TypeError(f"load takes what select answered, a Decision, got {type(decision).__name__}")
    require_torch()
    base = importlib.import_module("mla_prefill.backends.base")
    adapter: PrefillAdapter = base.load_adapter(decision, ADAPTERS, num_heads, softmax_scale, device)
    return adapter


def load_measured(
    decision: Decision,
    *,
    num_heads: int,
    softmax_scale: float | None = None,
    device: torch.device | str | None = None,
    graph: bool = False,
) -> MeasuredPrefill:
    """Every kernel that is the fastest for some batch, by the timing profile of this GPU; each plan takes one of them.

    Used like what ``load`` gives. Where no profile applies (``decision.notes`` says why) there is the chosen kernel
    alone. ``Request(backend="FLASH_ATTN", policy="measured")`` keeps the choice among FlashAttention's versions.

    Args:
        decision: what ``select`` answered to a request with ``policy="measured"``.
        num_heads, softmax_scale, device: as in ``load``.
        graph: the plans are to run inside CUDA graphs, where only device time counts.

    Raises:
        KernelError, NoBackendError, ValueError: as ``load``, for each of the kernels; ValueError for another policy.
            Leave a kernel out with ``MLA_PREFILL_DISABLE``.
    """
    if decision.request.policy != "measured":
        raise ValueError(f'load_measured takes a decision with policy="measured", this has {decision.request.policy!r}')
    from mla_prefill.selector.measured import fastest_by_shape

    chosen, fastest = decision.kernel.name, fastest_by_shape(decision, graph)
    wanted = {chosen, *fastest.values()}
    candidates = [verdict.candidate for verdict in decision.verdicts if verdict.candidate.kernel in wanted]
    arguments: dict[str, Any] = {"num_heads": num_heads, "softmax_scale": softmax_scale, "device": device}
    adapters = {c.kernel: load(dataclasses.replace(decision, chosen=c), **arguments) for c in candidates}
    measured = importlib.import_module("mla_prefill.backends.measured")
    prefill: MeasuredPrefill = measured.MeasuredPrefill(adapters, chosen, fastest)
    return prefill


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
