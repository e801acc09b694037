"""What several adapters need to make a call: arguments by position from names, one given ``out``, a warm-up batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mla_prefill.backends.base import Attention, PrefillAdapter
from torch import Tensor

#: The calls that serving makes: (causal, return_lse) of new tokens with and without a context, and of a context chunk.
OPERATIONS = ((True, False), (True, True), (False, True))


@dataclass(frozen=True)
class Entry:
    """An entry point that takes its arguments by position, described by their names.

    Ops and C++ bindings are cheapest called by position, and their order differs from package to package (vLLM's copy
    of FA3 has two arguments fewer in the middle and four more at the end). Here the names decide: ``arguments`` holds,
    in order, each parameter and what it gets where the batch does not say otherwise.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    @classmethod
    def of_op(cls, op: torch._ops.OpOverload, values: Mapping[str, Any], per_call: Iterable[str]) -> Entry:
        """A registered op, read from its own schema.

        Args:
            op: such as ``torch.ops.fa3_fwd.fwd.default``.
            values: what parameters get, by name; names that the op does not have are left out.
            per_call: parameters that each batch or call sets.

        Raises:
            TypeError: the op lacks one of ``per_call``, or has a mandatory parameter that nothing is known about.
        """
        arguments: dict[str, Any] = dict.fromkeys(per_call)
        schema = {argument.name: argument for argument in op._schema.arguments}
        if unknown := arguments.keys() - schema.keys():
            raise TypeError(f"{op} has no parameter {', '.join(sorted(unknown))}: {op._schema}")
        for name, argument in schema.items():
            if name in values or name in arguments:
                continue
            if not argument.has_default_value() and argument.type.kind() != "OptionalType":
                raise TypeError(f"{op} wants {name}, which this adapter does not know: {op._schema}")
        defaults = {name: argument.default_value for name, argument in schema.items()}
        return cls(op, {name: values.get(name, default) for name, default in defaults.items()})

    def bound(self, **batch: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Any]:
        """The call of one batch: a function of q, k, v and out, which the entry point's results come from."""
        arguments = [batch.get(name, value) for name, value in self.arguments.items()]
        names = list(self.arguments)
        at_q, at_k, at_v, at_out = (names.index(name) for name in ("q", "k", "v", "out"))
        function = self.function

        def call(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Any:
            now = arguments.copy()
            now[at_q], now[at_k], now[at_v], now[at_out] = q, k, v, out
            return function(*now)

        return call


def registered_op(adapter: PrefillAdapter, place: tuple[str, str, str]) -> torch._ops.OpOverload:
    """An op that a package registers with PyTorch: (module whose import registers it, namespace, name)."""
    module, namespace, name = place
    adapter.import_module(module)
    op: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return op


def with_contiguous_out(inner: Attention) -> Attention:
    """For kernels that take ``out`` only (or read its strides nowhere) when it is contiguous."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        if out is None or out.is_contiguous():
            return inner(q, k, v, out, return_lse)
        result, lse = inner(q, k, v, None, return_lse)
        return out.copy_(result), lse

    return attention


def run_every_operation(
    adapter: PrefillAdapter, lengths: Iterable[int], report: Callable[[str], None] | None = None
) -> None:
    """Runs each of ``OPERATIONS`` on one sequence of each length, so that a JIT compiles now and not in a request."""
    random = torch.Generator(adapter.device).manual_seed(0)

    def randn(tokens: int, width: int) -> Tensor:
        shape = (tokens, adapter.num_heads, width)
        return torch.randn(shape, generator=random, device=adapter.device).to(adapter.dtype)

    dims = adapter.dims
    for length in lengths:
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=adapter.device)
        q, k = randn(length, dims.qk_head_dim), randn(length, dims.qk_head_dim)
        v = randn(length, dims.qk_nope_head_dim + dims.v_head_dim)[..., dims.qk_nope_head_dim :]
        for causal, return_lse in OPERATIONS:
            if report is not None:
                what = "new tokens" if causal else "context chunk"
                lse = "with LSE" if return_lse else "without LSE"
                report(f"{adapter.kernel.label}: compiling dims {dims}, {what}, {lse}, sequences of {length}")
            adapter.plan(cu_seqlens, cu_seqlens, length, length, causal=causal).run(q, k, v, return_lse=return_lse)
