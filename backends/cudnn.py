"""CUDNN: cuDNN's fused attention as a graph of its frontend (``cudnn.pygraph``), executed with each layer's tensors.

Run on an H200 with nvidia-cudnn-frontend 1.18.0, 1.24.0, 1.29.1 and 1.32.0, cuDNN 9.19; on other architectures from
source, not run. The frontend's own PyTorch op (``torch.ops.cudnn.sdpa_fwd``, from 1.29 on) builds the same kind of
graph, but cannot write into ``out``, works the offsets out anew in each layer, and keeps a graph for each length.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from mla_prefill.backends.base import Attention, Batch, PrefillAdapter
from mla_prefill.backends.calls import run_every_operation
from torch import Tensor

#: Graphs that an adapter keeps; the least recently used one goes first.
GRAPHS = 128

#: Bytes to which cuDNN wants q, k, v and out aligned, and each token and head in them.
ALIGNMENT = 16

#: How a graph's tensors are called when it is built and executed.
Q, K, V, OUT, LSE, LENGTHS_Q, LENGTHS_K, STARTS_Q, STARTS_K, STARTS_V, STARTS_OUT, STARTS_LSE = range(1, 13)


class _Handles(threading.local):
    """A thread's cuDNN handles, which threads cannot share: device index -> (the handle, the stream it is set to)."""

    def __init__(self) -> None:
        self.on: dict[int | None, tuple[Any, int]] = {}


_handles = _Handles()


class Layout(NamedTuple):
    """What a graph takes: the strides (token, head, 1) of each tensor, and of a head in the LSE, if it is wanted."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    lse: int | None


class Bound(NamedTuple):
    """A graph for the batch of a plan: (operands, scratch, handle), where operands are q, k, v, out, the LSE if it is
    wanted, and the lengths and offsets; and the shapes of what it needs besides."""

    execute: Callable[[tuple[Tensor, ...], Tensor, Any], None]
    ragged: tuple[Tensor, ...]
    out: tuple[int, int, int]
    lse: tuple[int, int] | None
    workspace: int


class Cudnn(PrefillAdapter):
    """cuDNN's fused attention; a graph also says where the LSE goes, so it comes as (heads, tokens).

    Building a graph takes 45 ms, a second where cuDNN compiles a kernel for it. Lengths are only bounds in it, and
    longer ones cost nothing (H200, 16 batches: 0.93 to 1.07 of the time), so they are rounded up to powers of two, and
    batches of as many sequences share graphs. Empty sequences, to round their number too, would cost up to 9 %. The
    tokens of an LSE are a stride in the graph, so they are rounded as well; what is returned is a copy, but where that
    changed nothing.

    A plan works the offsets out in its first run, since only then the strides of V are known. So it is run once before
    it is captured in a CUDA graph, and kept as long as that is.
    """

    def load_kernel(self) -> None:
        self._cudnn = self.import_module("cudnn")
        self._io = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}[self.dtype]
        self._in_order = "tensor_uids" in inspect.signature(self._cudnn.pygraph.execute).parameters
        self._graph, self._building = lru_cache(GRAPHS)(self._build), threading.Lock()

    def prepare(self, batch: Batch) -> Attention:
        bound: dict[tuple[Any, ...], Bound] = {}
        current_handle = self._handle

        def attention(
            q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
        ) -> tuple[Tensor, Tensor | None]:
            seen = (return_lse, q.stride(), k.stride(), v.stride(), None if out is None else out.stride())
            call = bound.get(seen)
            if call is None:
                if not all(map(is_readable, (q, k, v) if out is None else (q, k, v, out))):
                    return with_copies(attention, q, k, v, out, return_lse)
                call = bound[seen] = self._bind(batch, q, k, v, out, return_lse)
            pointers = q.data_ptr() | k.data_ptr() | v.data_ptr() | (0 if out is None else out.data_ptr())
            if pointers % ALIGNMENT:
                return with_copies(attention, q, k, v, out, return_lse)
            execute, ragged, shape, lse_shape, scratch_bytes = call
            result = q.new_empty(shape) if out is None else out
            scratch, handle = q.new_empty(scratch_bytes, dtype=torch.uint8), current_handle()
            if lse_shape is None:
                execute((q, k, v, result, *ragged), scratch, handle)
                return result, None
            lse = q.new_empty(lse_shape, dtype=torch.float32)
            execute((q, k, v, result, lse, *ragged), scratch, handle)
            tokens, columns = shape[0], lse_shape[1]
            return result, lse if tokens == columns else torch.narrow_copy(lse, 1, 0, tokens)  # one launch

        return attention

    def warm_up(self, report: Callable[[str], None] | None = None) -> None:
        """Compiles what cuDNN compiles for these dims and dtype: the same for all lengths, a second each."""
        run_every_operation(self, (16,), report)

    def _bind(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool) -> Bound:
        """The graph for a batch and such tensors, and where in each of them the sequences begin."""
        self._check_not_capturing()
        for name, tensor in {"q": q, "k": k, "v": v, "out": q if out is None else out}.items():
            if (tensor.dtype, tensor.device) != (self.dtype, self.device):  # the graph is given pointers alone
                raise self.error(f"was given {name} in {tensor.dtype} on {tensor.device}")
        tokens, heads, width = len(q), self.num_heads, self.dims.v_head_dim
        columns = power_of_two(tokens) if return_lse else None
        of_out = (heads * width, width, 1) if out is None else out.stride()
        layout = Layout(q.stride(), k.stride(), v.stride(), of_out, columns)
        starts_q, starts_k = batch.cu_seqlens_q.long(), batch.cu_seqlens_k.long()
        ragged = {
            LENGTHS_Q: batch.cu_seqlens_q.diff(),
            LENGTHS_K: batch.cu_seqlens_k.diff(),
            STARTS_Q: starts_q * layout.q[0],
            STARTS_K: starts_k * layout.k[0],
            STARTS_V: starts_k * layout.v[0],
            STARTS_OUT: starts_q * layout.out[0],
        }
        if columns is not None:
            ragged[STARTS_LSE] = starts_q
        bounds = (power_of_two(batch.max_seqlen_q), power_of_two(batch.max_seqlen_k))
        try:
            with self._building:  # else threads build the same graph side by side
                graph = self._graph(len(starts_q) - 1, *bounds, batch.causal, layout)
        except Exception as error:
            raise self.error("refused the batch", error) from error
        uids = (Q, K, V, OUT, *(() if columns is None else (LSE,)), *ragged)
        return Bound(
            partial(graph.execute, tensor_uids=uids) if self._in_order else partial(by_uid, graph.execute, uids),
            tuple(tensor.view(-1, 1, 1, 1) for tensor in ragged.values()),
            out=(tokens, heads, width),
            lse=None if columns is None else (heads, columns),
            workspace=max(1, graph.get_workspace_size()),  # an empty tensor has no address
        )

    def _build(self, sequences: int, max_q: int, max_k: int, causal: bool, layout: Layout) -> Any:
        cudnn, heads = self._cudnn, self.num_heads
        types = cudnn.data_type
        io, real = getattr(types, self._io), types.FLOAT
        handle = self._handle()
        graph = cudnn.pygraph(handle=handle, io_data_type=io, intermediate_data_type=real, compute_data_type=real)

        def per_sequence(uid: int, count: int, data_type: Any) -> Any:
            return graph.tensor(dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type, uid=uid)

        def given(uid: int, starts: int, length: int, width: int, strides: tuple[int, ...]) -> Any:
            described = {"dim": [sequences, heads, length, width], "stride": per_head(length, strides)}
            tensor = graph.tensor(**described, data_type=io, uid=uid)
            tensor.set_ragged_offset(per_sequence(starts, sequences + 1, types.INT64))
            return tensor

        def wanted(tensor: Any, uid: int, starts: int, width: int, stride: list[int], data_type: Any) -> None:
            tensor.set_uid(uid).set_output(True).set_data_type(data_type)
            tensor.set_dim([sequences, heads, max_q, width]).set_stride(stride)
            tensor.set_ragged_offset(per_sequence(starts, sequences + 1, types.INT64))

        alignment = cudnn.diagonal_alignment
        out, lse = graph.sdpa(
            q=given(Q, STARTS_Q, max_q, self.dims.qk_head_dim, layout.q),
            k=given(K, STARTS_K, max_k, self.dims.qk_head_dim, layout.k),
            v=given(V, STARTS_V, max_k, self.dims.v_head_dim, layout.v),
            attn_scale=self.softmax_scale,
            generate_stats=layout.lse is not None,
            use_padding_mask=True,
            seq_len_q=per_sequence(LENGTHS_Q, sequences, types.INT32),
            seq_len_kv=per_sequence(LENGTHS_K, sequences, types.INT32),
            diagonal_alignment=alignment.BOTTOM_RIGHT if causal else alignment.TOP_LEFT,
            diagonal_band_right_bound=0 if causal else None,
        )
        wanted(out, OUT, STARTS_OUT, self.dims.v_head_dim, per_head(max_q, layout.out), io)
        if layout.lse is not None:
            wanted(lse, LSE, STARTS_LSE, 1, [heads * layout.lse, layout.lse, 1, 1], real)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph

    def _check_not_capturing(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise self.error("has to run a plan once, in this thread and with such tensors, before that is captured")

    def _handle(self) -> Any:
        """This thread's handle, on the current stream."""
        index = self.device.index
        # torch.cuda.current_stream would make a Stream first: over 4 us on a host that executes the graph in 24.
        stream = torch._C._cuda_getCurrentRawStream(index)
        handle, set_to = _handles.on.get(index, (None, None))
        if set_to != stream:  # cuDNN asks the driver several things each time that it is set
            if handle is None:
                self._check_not_capturing()
                with torch.cuda.device(self.device):
                    handle = self._cudnn.create_handle()
            self._cudnn.set_stream(handle=handle, stream=stream)
            _handles.on[index] = (handle, stream)
        return handle


def by_uid(
    execute: Callable[..., None], uids: tuple[int, ...], operands: tuple[Tensor, ...], scratch: Tensor, handle: Any
) -> None:
    """The only form of frontends that know no ``tensor_uids``; in those that do, it costs 8 us more."""
    execute(dict(zip(uids, operands, strict=True)), scratch, handle)


def per_head(length: int, strides: tuple[int, ...]) -> list[int]:
    """Strides of (sequence, head, token, width); the first is nominal, since offsets say where a sequence begins."""
    token, head, last = strides
    return [length * token, head, token, last]


def is_readable(tensor: Tensor) -> bool:
    """Whether cuDNN can read or write (tokens, heads, width) where it is; it would fault, not refuse."""
    token, head, last = tensor.stride()
    return last == 1 and (tensor.data_ptr() | (token | head) * tensor.itemsize) % ALIGNMENT == 0


def with_copies(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The same with copies of what cuDNN cannot read, and with an output of its own."""
    q, k, v = (t if is_readable(t) else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
    result, lse = attention(q, k, v, None, return_lse)
    return result if out is None else out.copy_(result), lse


def power_of_two(length: int) -> int:
    """The next one that is not smaller."""
    return 1 << (length - 1).bit_length()
