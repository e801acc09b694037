"""What all adapters share: the plan of a batch, and kernels' results brought to one convention.

To add a kernel, subclass ``PrefillAdapter``: import the package in ``load_kernel``, and in ``prepare`` return a
function that makes one call and hands back (out, lse) as the kernel gives them, in the given ``out`` if there is one.
Padding V, and the layout, base and empty rows of the LSE are done here, as the kernel sheet
(``capabilities/data/kernels.yaml``) says.
Then name the class in ``backends.ADAPTERS``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Literal, overload

import torch
from mla_prefill.backends import KernelError
from mla_prefill.capabilities.load import ENTRY_POINTS, importable
from mla_prefill.capabilities.model import Candidate, Kernel, LseConvention, MLADimensions, Provider
from mla_prefill.selector import detection
from mla_prefill.selector.engine import decide
from torch import Tensor

if TYPE_CHECKING:
    from mla_prefill.selector.decision import Decision

#: One call of a kernel: (q, k, v, out or None, whether the LSE is wanted) -> (out, LSE or None).
Attention = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool], "tuple[Tensor, Tensor | None]"]

LN_2 = math.log(2.0)


@dataclass(eq=False)
class Batch:
    """The ragged lengths that a plan was made for.

    ``cu_seqlens_*`` are int32 (sequences + 1,) on the device; ``max_seqlen_*`` are host integers. The ``*_cpu`` copies
    are the caller's, if it has them: without, whatever needs lengths on the host waits once for the device.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    cu_seqlens_q_cpu: Tensor | None = None
    cu_seqlens_k_cpu: Tensor | None = None

    @cached_property
    def starts_q(self) -> list[int]:
        """``cu_seqlens_q`` on the host; waits for the device unless the caller gave its copy."""
        known = self.cu_seqlens_q if self.cu_seqlens_q_cpu is None else self.cu_seqlens_q_cpu
        return list(known.tolist())

    @cached_property
    def starts_k(self) -> list[int]:
        """``cu_seqlens_k`` on the host; waits for the device unless the caller gave its copy."""
        if self.cu_seqlens_k is self.cu_seqlens_q:
            return self.starts_q
        known = self.cu_seqlens_k if self.cu_seqlens_k_cpu is None else self.cu_seqlens_k_cpu
        return list(known.tolist())

    @cached_property
    def rows_may_lack_keys(self) -> bool:
        """False where the host knows, without waiting for the device, that every query row attends to some key."""
        if self.causal and self.cu_seqlens_q is self.cu_seqlens_k:
            return False
        return not self._lengths_on_host or self._some_row_lacks_keys

    @property
    def _lengths_on_host(self) -> bool:
        return all(
            f"starts_{side}" in self.__dict__ or host_copy is not None or tensor.device.type == "cpu"
            for side, tensor, host_copy in (
                ("q", self.cu_seqlens_q, self.cu_seqlens_q_cpu),
                ("k", self.cu_seqlens_k, self.cu_seqlens_k_cpu),
            )
        )

    @property
    def _some_row_lacks_keys(self) -> bool:
        pairs = zip(lengths(self.starts_q), lengths(self.starts_k), strict=True)
        return any(q > k if self.causal else q > 0 and k == 0 for q, k in pairs)

    @cached_property
    def sequence_of_row(self) -> Tensor:
        """int64 (query tokens,) on the device: the sequence that a row of q belongs to. Needs lengths on the host."""
        rows = torch.tensor(lengths(self.starts_q))
        return torch.arange(len(rows)).repeat_interleave(rows).to(self.cu_seqlens_q.device)

    @cached_property
    def position_of_row(self) -> Tensor:
        """int64 (query tokens,) on the device: the place of a row of q in its sequence. Needs lengths on the host."""
        rows = torch.arange(self.starts_q[-1], device=self.cu_seqlens_q.device)
        return rows - self.cu_seqlens_q[self.sequence_of_row]

    @cached_property
    def rows_without_keys(self) -> Tensor | None:
        """bool (query tokens,) on the device: rows that attend to nothing; None where there is no such row."""
        if not self._some_row_lacks_keys:
            return None
        lengths_k = self.cu_seqlens_k.diff()
        if not self.causal:
            return (lengths_k == 0)[self.sequence_of_row]
        # Bottom-right: the last row sees every key, so the rows that q has more than k see none.
        surplus = self.cu_seqlens_q.diff() - lengths_k
        return self.position_of_row < surplus[self.sequence_of_row]


def lengths(starts: list[int]) -> list[int]:
    """The lengths of the sequences that begin at ``starts``; the last entry is the end."""
    return [end - start for start, end in itertools.pairwise(starts)]


class PrefillPlan:
    """One batch, ready to run in every layer. Made by ``PrefillAdapter.plan``; no gradients."""

    __slots__ = ("_attention", "adapter", "batch")

    def __init__(self, adapter: PrefillAdapter, batch: Batch, attention: Attention) -> None:
        self.adapter = adapter
        self.batch = batch
        self._attention = attention

    @overload
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = ..., return_lse: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = ..., return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = ..., return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of one layer.

        Args:
            q: (query tokens, heads, qk_head_dim).
            k: (key tokens, heads, qk_head_dim).
            v: (key tokens, heads, v_head_dim); may be a strided slice, such as a part of kv_b_proj's output.
            out: (query tokens, heads, v_head_dim) to write into, or None for a new contiguous tensor.
            return_lse: also return the log-sum-exp of the scaled scores.

        Returns:
            out, or (out, lse) with lse float32 (heads, query tokens), natural log, contiguous (as vLLM's
            merge_attn_states.cu reads it). A row without keys has out 0 and lse -inf.

        Raises:
            KernelError: the kernel raised; its exception is the cause.
        """
        try:
            result, lse = self._attention(q, k, v, out, return_lse)
        except KernelError:
            raise
        except Exception as error:
            raise self.adapter.error("failed", error) from error
        if not return_lse:
            return result
        if lse is None:
            raise self.adapter.error("returned no LSE, which the request did not ask for (needs: lse)")
        return result, lse


@dataclass(eq=False)
class PrefillAdapter(ABC):
    """One kernel, loaded for one model's heads on one device."""

    candidate: Candidate
    kernel: Kernel
    provider: Provider
    dims: MLADimensions
    #: Of q, k and v: ``Decision.compute_dtype``.
    dtype: torch.dtype
    #: Of out: 16 bit also where q, k and v are FP8, since no kernel of the sheet writes FP8.
    out_dtype: torch.dtype
    num_heads: int
    softmax_scale: float
    device: torch.device

    def __post_init__(self) -> None:
        #: How this kernel returns its LSE; ``load_kernel`` may replace it where a version can be asked for another.
        self.lse: LseConvention | None = self.candidate.lse
        try:
            self.load_kernel()
        except KernelError:
            raise
        except Exception as error:
            raise self.error("cannot be loaded", error) from error

    @abstractmethod
    def load_kernel(self) -> None:
        """Imports the kernel (``self.import_module``) and keeps its lowest stable entry point."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Attention:
        """The kernel's call for this batch, with everything that layers share worked out.

        V arrives padded where the candidate says so (``out`` is then None). Results are the kernel's own:
        ``self.lse`` states their convention. There is at least one query and one key in the batch.
        """

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:  # noqa: B027 - most kernels come compiled
        """Compiles what the kernel would compile in its first calls; ``report`` gets a line before each wait."""

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
        """Prepares one batch, once for all layers.

        Args:
            cu_seqlens_q: int32 (sequences + 1,) on the device: the start of each sequence's queries, then the end.
            cu_seqlens_k: the same for keys. The same tensor as ``cu_seqlens_q`` for new tokens.
            max_seqlen_q: the longest sequence of queries; a host integer.
            max_seqlen_k: the longest sequence of keys; a host integer.
            causal: True for new tokens (aligned bottom-right in each sequence), False for a context chunk.
            validate: check these arguments, and q, k, v and out in every run (waits for the device).
            cu_seqlens_q_cpu: a copy on the host, where the caller has one; saves some kernels a wait.
            cu_seqlens_k_cpu: the same for keys.

        Raises:
            ValueError: with ``validate``, an argument is wrong; the text begins with its name.
            KernelError: the kernel refused the batch.
        """
        batch = Batch(
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, cu_seqlens_q_cpu, cu_seqlens_k_cpu
        )
        plan_class: type[PrefillPlan] = PrefillPlan
        if validate:
            from mla_prefill.backends import validation

            validation.check_batch(batch, self.device)
            plan_class = validation.ValidatedPlan
        return plan_class(self, batch, self._attention(batch))

    def _attention(self, batch: Batch) -> Attention:
        if batch.max_seqlen_q == 0 or batch.max_seqlen_k == 0:
            # Kernels disagree here (+inf, a crash, an early return), and there is nothing to compute.
            return nothing_to_attend(self.dims.v_head_dim, self.out_dtype)
        try:
            attention = self.prepare(batch)
        except KernelError:
            raise
        except Exception as error:
            raise self.error("refused the batch", error) from error
        return self._normalised(attention, batch)

    def _normalised(self, attention: Attention, batch: Batch) -> Attention:
        if self.candidate.pad_v_to is not None:
            attention = with_padded_v(attention, self.dims.v_head_dim, self.candidate.pad_v_to)
        elif self.out_dtype != self.dtype:
            attention = with_new_out(attention, self.dims.v_head_dim, self.out_dtype)
        return attention if self.lse is None else with_natural_lse(attention, self.lse, batch)

    def import_module(self, name: str) -> ModuleType:
        """A module of the provider; whatever its import raises becomes a ``KernelError`` that names it."""
        try:
            return importlib.import_module(name)
        except Exception as error:  # undefined symbols, missing CUDA libraries, a DSL of another version ...
            failed = self.error(f"cannot be imported (module {name})", error)
            raise KernelError(
                f"{failed}. `mla-prefill env --probe` looks closer; to choose among the other packages, give select an "
                f"environment.replace(import_errors={{{self.provider.distribution!r}: ...}})"
            ) from error

    def error(self, what: str, cause: BaseException | None = None) -> KernelError:
        """The one text for everything that goes wrong in a kernel: which, from where, for what, and why."""
        packages = dict.fromkeys((self.provider.distribution, "torch"))
        versions = ", ".join(f"{name} {distribution_version(name) or 'of unknown version'}" for name in packages)
        text = (
            f"{self.kernel.label} ({versions}) {what}; dims {self.dims}, {self.num_heads} heads, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )
        return KernelError(text if cause is None else f"{text}: {type(cause).__name__}: {cause}")


# --- One convention for all kernels. Each wrapper is put around the call once, at plan time, and only where needed. ---


def nothing_to_attend(v_head_dim: int, dtype: torch.dtype) -> Attention:
    """The answer where no sequence has keys (or none has queries): out 0, LSE -inf."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, _ = q.shape
        out = q.new_zeros(tokens, heads, v_head_dim, dtype=dtype) if out is None else out.zero_()
        return out, q.new_full((heads, tokens), -math.inf, dtype=torch.float32) if return_lse else None

    return attention


def with_padded_v(inner: Attention, v_head_dim: int, width: int) -> Attention:
    """Runs ``inner`` on V zero-padded to ``width`` and cuts the result back; out is contiguous all the same.

    Raises:
        ValueError: V is wider already. A negative pad would cut V silently (vllm-project/vllm#50060).
    """
    if width < v_head_dim:
        raise ValueError(f"V has width {v_head_dim} and cannot be padded to {width}: padding never cuts")

    def attention(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        padded = torch.nn.functional.pad(v, (0, width - v_head_dim))
        result, lse = inner(q, k, padded, None, return_lse)
        result = result[..., :v_head_dim]
        return result.contiguous() if out is None else out.copy_(result), lse

    return attention


def with_new_out(inner: Attention, v_head_dim: int, dtype: torch.dtype) -> Attention:
    """For q, k and v in another dtype than out, which kernels that make out themselves may give theirs."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, v_head_dim, dtype=dtype) if out is None else out
        return inner(q, k, v, out, return_lse)

    return attention


def with_natural_lse(inner: Attention, convention: LseConvention, batch: Batch) -> Attention:
    """Brings the LSE to (heads, tokens), natural log, -inf for rows without keys; and out to 0 in those rows."""
    convert = _lse_conversion(convention, batch)
    empty = batch.rows_without_keys if convention.no_keys == "undefined" and batch.rows_may_lack_keys else None
    fix_infinity = convention.no_keys == "+inf" and batch.rows_may_lack_keys
    if convert is None and empty is None and not fix_infinity:
        return inner

    def attention(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        result, lse = inner(q, k, v, out, return_lse)
        if empty is not None:
            result.masked_fill_(empty[:, None, None], 0.0)
        if not return_lse or lse is None:
            return result, None
        if convert is not None:
            lse = convert(lse)
        if empty is not None:
            lse.masked_fill_(empty, -math.inf)
        if fix_infinity:  # one launch; a comparison and a fill would be two
            lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)
        return result, lse

    return attention


def _lse_conversion(convention: LseConvention, batch: Batch) -> Callable[[Tensor], Tensor] | None:
    """None where the kernel's layout and base are ours."""
    scale = {"e": 1.0, "2": LN_2}[convention.base]
    if convention.layout == "heads_tokens":
        return None if scale == 1.0 else lambda lse: lse.mul_(scale)
    # Contiguous results, in one launch.
    if convention.layout == "tokens_heads":
        if scale == 1.0:
            return lambda lse: lse.t().contiguous()
        return lambda lse: torch.mul(lse.t(), scale, out=lse.new_empty(lse.shape[::-1]))
    if convention.layout == "batch_heads_padded":  # (sequences, heads, max_seqlen_q or more)
        packed = _packed_lse(batch)
        return packed if scale == 1.0 else lambda lse: packed(lse).mul_(scale)
    raise ValueError(f"no such LSE layout: {convention.layout}")


def _packed_lse(batch: Batch) -> Callable[[Tensor], Tensor]:
    """(sequences, heads, padded length) to (heads, tokens)."""
    if len(batch.starts_q) == 2:
        tokens = batch.starts_q[-1]
        return lambda lse: lse.squeeze(0) if lse.shape[2] == tokens else torch.narrow_copy(lse.squeeze(0), 1, 0, tokens)
    sequence, position, index = batch.sequence_of_row, batch.position_of_row, None

    def packed(lse: Tensor) -> Tensor:
        nonlocal index
        _, heads, padded = lse.shape
        if index is None:
            index = (sequence * (heads * padded) + position).expand(heads, -1)
        # A head's rows begin `padded` after those of the one before, so counted from there a token's place is the same.
        rows = lse.as_strided((heads, lse.numel() - (heads - 1) * padded), (padded, 1))
        return rows.gather(1, index)

    return packed


# --- Loading. ---


def load_adapter(
    decision: Decision,
    adapters: Mapping[str, str],
    num_heads: int,
    softmax_scale: float | None,
    device: torch.device | str | None,
) -> PrefillAdapter:
    """See ``backends.load``."""
    kernel, request = decision.kernel, decision.request
    assert decision.chosen is not None  # decision.kernel raised NoBackendError otherwise
    if type(num_heads) is not int or num_heads < 1:
        raise ValueError(f"num_heads must be a positive whole number, got {num_heads!r}")
    if softmax_scale is None:
        softmax_scale = request.dims.qk_head_dim**-0.5
    if not (isinstance(softmax_scale, numbers.Real) and math.isfinite(softmax_scale) and float(softmax_scale) > 0):
        raise ValueError(f"softmax_scale must be a positive number, got {softmax_scale!r}")
    path = adapters.get(kernel.name)
    if path is None:
        known = ", ".join(sorted(adapters))
        raise KernelError(f"{kernel.label} has no adapter in this release; kernels with one: {known}")
    candidate = _installed_here(decision, kernel)
    provider = next(p for p in kernel.providers if p.distribution == candidate.provider)
    if not importable([provider.module])[provider.module]:
        raise KernelError(
            f"{kernel.label} comes from module {provider.module!r} by {provider.source}; the shipped kernel sheet does "
            "not name it, and nothing is imported because a file asks for it. An installed package can register its "
            f"module as an entry point of the group {ENTRY_POINTS}"
        )
    module_name, class_name = path.split(":")
    adapter_class = getattr(importlib.import_module(f"mla_prefill.backends.{module_name}"), class_name)
    dtype = _torch_dtype(decision.compute_dtype or request.dtype)
    if device is None:
        device = "cpu" if decision.matrix.architectures[decision.arch].vendor == "cpu" else "cuda"
    adapter: PrefillAdapter = adapter_class(
        candidate=candidate,
        kernel=kernel,
        provider=provider,
        dims=request.dims,
        dtype=dtype,
        out_dtype=_out_dtype(dtype, request.dtype),
        num_heads=num_heads,
        softmax_scale=float(softmax_scale),
        device=_resolved_device(device),
    )
    return adapter


def distribution_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_here(decision: Decision, kernel: Kernel) -> Candidate:
    """The decision's candidate; where packages were no constraint, as those that are installed here provide it."""
    assert decision.chosen is not None
    if decision.chosen.provider is not None:
        if distribution_version(decision.chosen.provider) is None:
            raise KernelError(f"{kernel.label} needs {decision.chosen.provider}, which is not installed")
        return decision.chosen
    packages = detection.installed(decision.matrix.distributions)
    again = decide(decision.request, decision.environment.replace(installed=packages), decision.matrix)
    (verdict,) = (verdict for verdict in again.verdicts if verdict.candidate.kernel == kernel.name)
    if verdict.verdict == "rejected":
        why = "; ".join(reason.message for reason in verdict.reasons)
        raise KernelError(
            f"{kernel.label} was chosen without regard to packages, and those installed here lack it: {why}"
        )
    return verdict.candidate


def _out_dtype(dtype: torch.dtype, asked: str) -> torch.dtype:
    """FP8 inputs give out in the model's own dtype, in bfloat16 where that is FP8 too."""
    if dtype.itemsize > 1:
        return dtype
    model = _torch_dtype(asked)
    return model if model.itemsize > 1 else torch.bfloat16


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is not one that this PyTorch has ({torch.__version__})")
    return dtype


def _resolved_device(device: torch.device | str) -> torch.device:
    """With an index, so that it compares equal to a tensor's device."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {device!r} is not one: {str(error).splitlines()[0]}") from error
    if resolved.type != "cuda":
        return resolved
    if not torch.cuda.is_available():
        raise KernelError(f"torch {torch.__version__} sees no GPU, so nothing can be loaded on {resolved}")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
