"""A process that verifies cells one by one: JSON lines in on stdin, JSON lines out on stdout.

It is its own process because kernels crash and hang; ``backends.verify`` starts it, gives it cells and buries it.

    in    {"kernel": "fa4", "provider": "flash-attn-4", "dims": [64, 64, 128], "dtype": "bfloat16",
           "operation": "new_tokens"}
    out   {"hello": {"gpu": ..., "driver": ..., "torch": ..., "cuda": ..., "arch": "sm90"}}     once, at the start
          {"progress": "compiling ..."}                                                          any time
          {"result": {"ok": true, ...}, "healthy": true}                                         once for each cell
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from mla_prefill.backends import KernelError, graphs, load, records, trouble
from mla_prefill.backends.base import PrefillAdapter, PrefillPlan
from mla_prefill.backends.reference import reference_attention
from mla_prefill.capabilities.evidence import tolerance_of
from mla_prefill.capabilities.load import load_matrix
from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.model import MLADimensions
from mla_prefill.selector import detection
from mla_prefill.selector.decision import Decision
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import Request
from torch import Tensor

HEADS = 8
#: operation -> (lengths of q, lengths of k). The chunk has more keys than queries, fewer, and a sequence without keys.
LENGTHS = {
    "new_tokens": ((1, 130, 257, 64), (1, 130, 257, 64)),
    "context_chunk": ((5, 130, 64, 16), (300, 17, 512, 0)),
}
Report = Callable[[str], None]


def decision_for(matrix: Matrix, arch: str, cell: dict[str, Any]) -> Decision:
    """The decision for a cell as if it had been selected: the provider and the kernel are given, not chosen."""
    request = Request(MLADimensions(*cell["dims"]), cell["dtype"], backend=cell["kernel"])
    kernel = next(c for c in matrix.cells(arch, request.dims) if c.kernel.name == cell["kernel"])
    offer = next(o for o in kernel.offers if o.distribution == cell["provider"])
    return Decision(request, Environment(arch), arch, offer.installed, (), (), (), matrix)


class Tensors(NamedTuple):
    """One layer's inputs and their right results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Batch:
    """The ragged batch of an operation on one adapter; makes layers of other values for the same plan."""

    def __init__(self, adapter: PrefillAdapter, operation: str) -> None:
        self.adapter, self.causal = adapter, operation == "new_tokens"
        self.lengths_q, self.lengths_k = LENGTHS[operation]
        self.cu_q = self._starts(self.lengths_q)
        self.cu_k = self.cu_q if self.causal else self._starts(self.lengths_k)
        self._generator = torch.Generator(adapter.device).manual_seed(0)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.adapter.device)

    def _random(self, tokens: int, width: int) -> Tensor:
        shape = (tokens, self.adapter.num_heads, width)
        return torch.randn(shape, generator=self._generator, device=self.adapter.device).to(self.adapter.dtype)

    def layer(self) -> Tensors:
        """V is a strided slice, as kv_b_proj gives it."""
        dims, keys = self.adapter.dims, sum(self.lengths_k)
        q, k = self._random(sum(self.lengths_q), dims.qk_head_dim), self._random(keys, dims.qk_head_dim)
        v = self._random(keys, dims.qk_nope_head_dim + dims.v_head_dim)[..., dims.qk_nope_head_dim :]
        return Tensors(q, k, v, *self.truth(q, k, v))

    def truth(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.adapter.softmax_scale
        return reference_attention(q, k, v, self.cu_q, self.cu_k, causal=self.causal, softmax_scale=scale)

    def plan(self, *, validate: bool) -> PrefillPlan:
        longest_q, longest_k = max(self.lengths_q), max(self.lengths_k)
        return self.adapter.plan(self.cu_q, self.cu_k, longest_q, longest_k, causal=self.causal, validate=validate)


def verify_cell(decision: Decision, operation: str, report: Report) -> dict[str, Any]:
    """Runs one cell and says how it went.

    ``ok`` is true (right in every run), false (refused, raised or wrong), or None: the kernel could not be loaded, or
    the machine had trouble of its own, so nothing is known about the cell. ``refusal`` is the exact text.
    """
    start = time.perf_counter()
    try:
        adapter = load(decision, num_heads=HEADS)
    except KernelError as error:
        return {"ok": None, "refusal": records.one_line(error)}
    if type(adapter).warm_up is not PrefillAdapter.warm_up:
        report(f"{adapter.kernel.label}: the first call compiles")
    try:
        result = _compare(Batch(adapter, operation), operation)
    except Exception as error:  # a kernel may raise anything; its text is what the record is for
        text = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
        result = {"ok": None if trouble.raised(error) else False, "refusal": records.one_line(text)}
    return {**result, "seconds": round(time.perf_counter() - start, 2)}


def _compare(batch: Batch, operation: str) -> dict[str, Any]:
    """Two layers through one plan (a kernel's second call may take another path), then ``out=`` and a CUDA graph."""
    plan, layers = batch.plan(validate=True), (batch.layer(), batch.layer())
    errors = [_errors(plan.run(x.q, x.k, x.v, return_lse=True), x) for x in layers]
    dtype = batch.adapter.dtype
    if dtype == torch.bfloat16:
        layer = layers[1]
        out = layer.q.new_full(layer.out.shape, math.nan)
        answer = plan.run(layer.q, layer.k, layer.v, out=out, return_lse=True)
        errors.append(_errors(answer, layer))
        if answer[0].data_ptr() != out.data_ptr():
            return {"ok": False, "refusal": "out= was given, and another tensor came back"}
    error, lse_error = max(e.out for e in errors), max(e.lse for e in errors)
    tolerance = tolerance_of(str(dtype).removeprefix("torch."), batch.adapter.kernel.lse)
    result: dict[str, Any] = {"ok": True, "error": _rounded(error), "lse_error": _rounded(lse_error)}
    wrong = next((e.wrong for e in errors if e.wrong), None)
    if wrong is None and not error <= tolerance.out:
        wrong = f"wrong result: the error of out is {error:.2e}, at most {tolerance.out:.0e} is right"
    if wrong is None and not lse_error <= tolerance.lse:
        wrong = f"wrong result: the error of the LSE is {lse_error:.2e}, at most {tolerance.lse:.0e} is right"
    if wrong is not None:
        result |= {"ok": False, "refusal": wrong}
    elif operation == "new_tokens" and dtype == torch.bfloat16:
        result["cuda_graph"] = _in_a_cuda_graph(batch, tolerance.out)
    return result


class Errors(NamedTuple):
    """``out``: norm of the difference over the norm of the truth. ``lse``: the largest difference."""

    out: float
    lse: float
    wrong: str | None


def _errors(answer: tuple[Tensor, Tensor], truth: Tensors) -> Errors:
    out, lse = answer
    empty = truth.lse == -math.inf
    wrong = None
    if not torch.equal(lse == -math.inf, empty):
        wrong = "wrong result: the LSE of rows without keys is not -inf (or another row's is)"
    elif out[empty.t()].any():
        wrong = "wrong result: out is not 0 in rows without keys"
    difference = torch.where(lse == truth.lse, 0.0, (lse - truth.lse).abs())
    return Errors(float((out.float() - truth.out).norm() / truth.out.norm()), float(difference.max()), wrong)


def _rounded(error: float) -> float | None:
    return float(f"{error:.2e}") if math.isfinite(error) else None


def _in_a_cuda_graph(batch: Batch, tolerance: float) -> bool | str:
    """Captured once and replayed with other values: true, why it went wrong, or false where it is not claimed."""
    adapter = batch.adapter
    if adapter.device.type != "cuda" or "cuda_graph" not in adapter.candidate.provides:
        return False
    plan, layer = batch.plan(validate=False), batch.layer()
    try:
        graph, answer = graphs.captured(lambda: plan.run(layer.q, layer.k, layer.v, return_lse=True))
        layer.q.mul_(-0.5)
        layer.v.mul_(2)
        graph.replay()
        errors = _errors(answer, Tensors(*layer[:3], *batch.truth(*layer[:3])))
    except Exception as error:
        if trouble.raised(error):
            raise
        return records.one_line(error)
    if errors.wrong or not errors.out <= tolerance:
        return errors.wrong or f"wrong result after replay: the error of out is {errors.out:.2e}"
    return True


def healthy(device: torch.device) -> bool:
    """False once an asynchronous error has spoiled the process: every later call would report it again."""
    if device.type != "cuda":
        return True
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


def main() -> None:
    # Whatever a kernel or its compiler prints must not get between the JSON lines.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    setup = json.loads(sys.argv[1])
    matrix = load_matrix(setup["matrix"], setup["extra"])
    device = torch.device("cpu" if matrix.architectures[setup["arch"]].vendor == "cpu" else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here, so {setup['arch']} cannot be verified")
    here = setup["arch"] if device.type == "cpu" else matrix.arch(detection.architecture()[0])
    say(hello={**records.machine(device), "arch": here})
    for line in sys.stdin:
        cell = json.loads(line)
        result = verify_cell(
            decision_for(matrix, setup["arch"], cell), cell["operation"], lambda text: say(progress=text)
        )
        fine = healthy(device)
        say(result=result, healthy=fine)
        if not fine:
            return


if __name__ == "__main__":
    main()
