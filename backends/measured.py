"""The kernel that a timing profile of this GPU has as the fastest, chosen anew for each batch.

``select`` answers once, before any batch is known; which kernel is the fastest hangs on the batch. On an H200 FA4 wins
most shapes, and FA3 many short sequences with many heads (docs/measured.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from mla_prefill.backends import validation
from mla_prefill.backends.base import Batch, PrefillAdapter, PrefillPlan, lengths
from mla_prefill.capabilities.profiles import Shape
from mla_prefill.selector.measured import nearest
from torch import Tensor


class MeasuredPrefill:
    """Used like one adapter; each plan is made by the adapter that its batch is fastest with.

    Args:
        adapters: kernel -> its adapter, for the chosen kernel and each that is the fastest somewhere.
        chosen: the kernel for what no profile times: context chunks, and everything where ``fastest`` is empty.
        fastest: timed shape of new tokens -> kernel.
    """

    def __init__(self, adapters: Mapping[str, PrefillAdapter], chosen: str, fastest: Mapping[Shape, str]) -> None:
        self.adapters, self.chosen, self.fastest = dict(adapters), chosen, dict(fastest)
        self._nearest = functools.lru_cache(maxsize=1024)(functools.partial(nearest, tuple(fastest)))

    @property
    def device(self) -> torch.device:
        """Where q, k and v are to be."""
        return self.adapters[self.chosen].device

    @property
    def num_heads(self) -> int:
        """Heads of q, k and v."""
        return self.adapters[self.chosen].num_heads

    def adapter_for(self, new_tokens: list[int]) -> PrefillAdapter:
        """The adapter for sequences with these numbers of new tokens, by the nearest timed shape."""
        if not (self.fastest and new_tokens):
            return self.adapters[self.chosen]
        shape = Shape.of(new_tokens, self.num_heads)
        return self.adapters[self.fastest[self._nearest(shape)]]

    def plan(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        causal: bool,
        validate: bool = False,
        cu_seqlens_q_cpu: Tensor | None = None,
        cu_seqlens_k_cpu: Tensor | None = None,
    ) -> PrefillPlan:
        """As ``PrefillAdapter.plan``; ``plan.adapter.kernel.name`` says which kernel it took.

        The choice needs the lengths on the host: without ``cu_seqlens_q_cpu`` it waits once for the device.
        """
        adapter = self.adapters[self.chosen]
        if validate:  # before the choice reads them
            given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, cu_seqlens_q_cpu, cu_seqlens_k_cpu)
            validation.check_batch(Batch(*given), self.device)
        if causal and self.fastest:
            if cu_seqlens_q_cpu is None:
                cu_seqlens_q_cpu = cu_seqlens_q.cpu()
                if cu_seqlens_k is cu_seqlens_q:
                    cu_seqlens_k_cpu = cu_seqlens_q_cpu
            adapter = self.adapter_for(lengths(cu_seqlens_q_cpu.tolist()))
        return adapter.plan(
            *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            causal=causal,
            validate=validate,
            cu_seqlens_q_cpu=cu_seqlens_q_cpu,
            cu_seqlens_k_cpu=cu_seqlens_k_cpu,
        )

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Compiles what the kernels would compile in their first calls; ``report`` gets a line before each wait."""
        for adapter in self.adapters.values():
            adapter.warm_up(report)
