"""FA4 without the Python in front of its compiled function: a call is recorded once, then repeated with other tensors.

``flash_attn.cute`` spends about 60 us a call on finding out which compiled function to run with which arguments. Both
are the same for all layers of a batch, so the first run of a batch goes through the public function while something
stands in for ``_flash_attn_fwd.compile_cache`` and keeps what is taken from it and called. Later runs call that
function with their own q, k, v, out and LSE in the same places.

That rests on names and an order that are private to flash-attn-4, so

* it is done only for the versions that the kernel sheet names (``planned_call`` of the provider);
* a recorded call is used only if its first five arguments are the very tensors q, k, v, out and LSE of that run (a
  tensor that FA4 copied for its alignment is not), and the others are the batch's own cu_seqlens, numbers or nothing
  (from 257 sequences on FA4 adds tensors worked out from cu_seqlens, which a replayed CUDA graph would find outdated);
* the first time that a compile key is met, the direct call must reproduce the public function's result bit for bit;
* it is repeated only for tensors with the recorded strides; the compiled function itself refuses pointers that are not
  aligned to 16 bytes before it launches anything (it was compiled with that check), and asking for them here would cost
  as much again;
* a batch whose first run shows a difference is logged once; it, and what the compiled function refuses, goes through
  the public function.

Under CUDA graph capture nothing is proven, since that waits for the device: run or warm up the same operation before.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from mla_prefill.backends.base import Attention, Batch, distribution_version
from mla_prefill.capabilities import versions
from torch import Tensor

logger = logging.getLogger(__name__)

#: Bytes to which FA4 wants pointers aligned; it copies a tensor that is not (cute_dsl_utils.py: maybe_contiguous).
ALIGNMENT = 16

#: How the first arguments of a compiled function are called here, in their order.
TENSORS = ("q", "k", "v", "out", "LSE")


class CannotPlan(Exception):
    """Why a call is not repeated directly; never leaves this module."""


class Recorded(NamedTuple):
    """One call of a compiled function."""

    key: Hashable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Planned(NamedTuple):
    """What to repeat: the compiled function, what follows q, k, v, out and LSE, and the shapes of out and LSE."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    out: tuple[int, ...]
    lse: tuple[int, ...]


class CacheTap:
    """Stands in for FA4's cache of compiled functions: hands everything on, and keeps what one thread calls."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._thread = threading.get_ident()
        self.calls: list[Recorded] = []

    def __contains__(self, key: Hashable) -> bool:
        return key in self._cache

    def __setitem__(self, key: Hashable, function: Callable[..., Any]) -> None:
        self._cache[key] = function

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        function: Callable[..., Any] = self._cache[key]
        if threading.get_ident() != self._thread:
            return function

        def recording(*arguments: Any) -> Any:
            self.calls.append(Recorded(key, function, arguments))
            return function(*arguments)

        return recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class Observed(NamedTuple):
    """A run through the public function: what it was given, and what it returned."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    result: Tensor
    lse: Tensor | None


class PlannedCalls:
    """The planned calls of a process.

    Args:
        forward: ``flash_attn.cute.interface._flash_attn_fwd``, for its ``compile_cache``.
    """

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._lock = threading.Lock()
        #: (compile key, heads, whether out is contiguous) -> whether the direct call gave the public function's bits.
        self._proven: dict[Hashable, bool] = {}

    def of_batch(self, public: Attention, batch: Batch) -> Attention:
        """The attention of a batch: planned from its second run on, ``public`` in the first and where it must be."""
        planned: dict[Hashable, Planned | None] = {}

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            layout = (return_lse, q.stride(), k.stride(), v.stride(), None if out is None else out.stride())
            call = planned.get(layout)
            if call is not None:
                try:
                    return repeat(call, q, k, v, out, return_lse)
                except ValueError as refusal:  # before a launch, such as for alignment, which the public one mends
                    log_fallback(str(refusal).split(" when calling:")[0])
                    return public(q, k, v, out, return_lse)
            if layout in planned:
                return public(q, k, v, out, return_lse)
            with self._recording() as tap:
                result, lse = public(q, k, v, None, return_lse)
            call = self._plan(tap.calls, batch, Observed(q, k, v, out, result, lse))
            if call is not None or not is_capturing(q):  # after a capture, a run may prove what the capture could not
                planned[layout] = call
            return result if out is None else out.copy_(result), lse

        return attention

    @contextmanager
    def _recording(self) -> Iterator[CacheTap]:
        with self._lock:
            cache = self._forward.compile_cache
            tap = CacheTap(cache)
            self._forward.compile_cache = tap
            try:
                yield tap
            finally:
                self._forward.compile_cache = cache

    def _plan(self, calls: list[Recorded], batch: Batch, run: Observed) -> Planned | None:
        """The direct call that does what the recorded one did, once proven; None, with a log line, if there is none."""
        try:
            planned = direct_call(calls, batch, run)
            self._prove((calls[0].key, run.q.shape[1], run.out is None or run.out.is_contiguous()), planned, run)
        except Exception as difference:
            log_fallback(str(difference) if isinstance(difference, CannotPlan) else repr(difference))
            return None
        return planned

    def _prove(self, key: Hashable, planned: Planned, run: Observed) -> None:
        if key not in self._proven:
            if is_capturing(run.q):
                raise CannotPlan("not proven before CUDA graph capture; run or warm up the same operation first")
            again, lse = repeat(planned, run.q, run.k, run.v, run.out, run.lse is not None)
            self._proven[key] = same_bits(run.result, again) and same_bits(run.lse, lse)
        if not self._proven[key]:
            raise CannotPlan("a direct call did not give the bits of the public function")


@functools.cache
def planned_calls(interface: ModuleType, proven: tuple[str, ...]) -> PlannedCalls | None:
    """For ``flash_attn.cute.interface``; None, with one log line, where installed versions are not the proven ones.

    Args:
        proven: requirements such as ``flash-attn-4==4.0.0b36``, which must all hold.
    """
    reason = unproven(proven)
    forward = getattr(interface, "_flash_attn_fwd", None)
    if reason is None and not hasattr(forward, "compile_cache"):
        reason = "flash_attn.cute.interface has no _flash_attn_fwd.compile_cache"
    if reason is not None:
        log_fallback(reason)
        return None
    return PlannedCalls(forward)


def direct_call(calls: list[Recorded], batch: Batch, run: Observed) -> Planned:
    """What to repeat of a recorded run.

    Raises:
        CannotPlan: something in it is not known to be the same in the next layer.
    """
    if len(calls) != 1:
        raise CannotPlan(f"the public function called {len(calls)} compiled functions, not one")
    head, rest = calls[0].arguments[: len(TENSORS)], calls[0].arguments[len(TENSORS) :]
    for name, given, passed in zip(TENSORS, (run.q, run.k, run.v, run.result, run.lse), head, strict=True):
        if not same_tensor(given, passed):
            raise CannotPlan(f"the compiled function got another {name} than the public function (a copy?)")
    if run.out is not None:
        check_out(run.out)
    tokens, heads, _ = run.q.shape
    repeated = tuple(repeatable(value, batch) for value in rest)
    return Planned(calls[0].function, repeated, out=(tokens, heads, run.v.shape[2]), lse=(heads, tokens))


def repeat(
    planned: Planned, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """One direct call of the compiled function. Shapes are those of the batch's first run: asking costs 0.2 us more."""
    function, rest, out_shape, lse_shape = planned
    if out is None:
        out = q.new_empty(out_shape)
    lse = q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None
    function(q, k, v, out, lse, *rest)
    return out, lse


def repeatable(value: Any, batch: Batch) -> Any:
    """An argument after the first five, if it may be repeated: nothing, a number, or the batch's own cu_seqlens."""
    if isinstance(value, Tensor):
        for own in (batch.cu_seqlens_q, batch.cu_seqlens_k):
            if same_tensor(own, value):
                return own
        raise CannotPlan("the compiled function got a tensor that was worked out from this batch")
    if isinstance(value, tuple):
        if any(item is not None for item in value):
            raise CannotPlan(f"the compiled function got {type(value).__name__} with contents")
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise CannotPlan(f"the compiled function got a {type(value).__name__}")


def same_tensor(given: Tensor | None, passed: object) -> bool:
    """The same memory, seen in the same way."""
    if given is None or not isinstance(passed, Tensor):
        return given is passed
    return (given.data_ptr(), given.shape, given.stride(), given.dtype) == (
        *(passed.data_ptr(), passed.shape, passed.stride(), passed.dtype),
    )


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bit for bit, NaN included. Waits for the device."""
    if a is None or b is None:
        return a is b
    as_integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(as_integer), b.view(as_integer))


def check_out(out: Tensor) -> None:
    """What FA4 itself asks of ``out`` (cute_dsl_utils.py: validate_output_layout)."""
    *outer, last = out.stride()
    if last != 1 or any(stride == 0 or stride * out.element_size() % ALIGNMENT for stride in outer):
        raise CannotPlan(f"out has strides {out.stride()}, which the compiled function does not take")
    if out.data_ptr() % ALIGNMENT:
        raise CannotPlan(f"out is not aligned to {ALIGNMENT} bytes")


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def unproven(proven: Iterable[str]) -> str | None:
    """Which installed version is not a proven one; None where all are."""
    for requirement in proven:
        distribution, specifier = versions.split(requirement)
        installed = distribution_version(distribution)
        if installed is None or not versions.contains(specifier, installed):
            return f"{distribution} {installed or 'is not installed'} was not proven, only {specifier}"
    return None


@functools.lru_cache(maxsize=256)
def log_fallback(reason: str) -> None:
    """One line for each reason in a process."""
    logger.warning("FLASH_ATTN/fa4 is called through its public function, not by a planned call: %s", reason)
