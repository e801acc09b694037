"""Kernel packages as recorded in ``data/signatures``, installed into a test with exact attention behind them.

What a call may look like comes from the records: Python functions bind their arguments to the recorded signature, ops
are registered with PyTorch under their recorded schema, C++ bindings take exactly as many arguments by position. What a
call returns (LSE base, layout, rows without keys, an ignored stride) is what kernels.yaml says of the kernel. So an
adapter that passes here calls its kernel as the package wants it, and reads the result as the kernel means it.
"""

from __future__ import annotations

import inspect
import itertools
import json
import keyword
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from mla_prefill.backends import cudnn, flash_attn, torch_sdpa, trtllm_ragged
from mla_prefill.backends.reference import reference_attention
from packaging.version import Version
from torch import Tensor

#: (distribution, version) -> its record, old versions before new ones.
RECORDS: dict[tuple[str, str], dict[str, Any]] = {}
_paths = (Path(__file__).parent / "data" / "signatures").glob("*.json")
for _record in sorted((json.loads(path.read_text("utf-8")) for path in _paths), key=lambda r: Version(r["version"])):
    RECORDS[_record["distribution"], _record["version"]] = _record

#: What packages call the same things.
SPELLINGS = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "out": ("out",),
    "cu_seqlens_q": ("cu_seqlens_q", "cum_seq_lens_q", "cum_seq_q", "qo_indptr"),
    "cu_seqlens_k": ("cu_seqlens_k", "cu_seqlens_kv", "cum_seq_lens_kv", "cum_seq_lens", "cum_seq_k", "kv_indptr"),
    "max_seqlen_q": ("max_seqlen_q", "max_q_len", "max_seq_len_q", "max_q"),
    "max_seqlen_k": ("max_seqlen_k", "max_seqlen_kv", "max_kv_len", "max_seq_len", "max_k"),
    "softmax_scale": ("softmax_scale", "attn_scale", "bmm1_scale", "sm_scale", "scale"),
    "causal": ("causal", "is_causal"),
}

#: Parameters that would change the result: they may have these values and no other.
HARMLESS = {
    "num_splits": (1, None),  # None: PyTorch, whose FA2 splits only paged or single-query batches
    "window_left": (-1,),
    "window_size_left": (-1, None),
    "window_size_right": (-1, None),
    "window_size": ((-1, -1), (-1, -1, 0), (None, None), None),
    "softcap": (0.0,),
    "logits_soft_cap": (0.0, None),
    "dropout_p": (0.0,),
    "p_dropout": (0.0,),
    "attention_chunk": (0, None),
    "bmm2_scale": (1.0,),
    "o_sf_scale": (1.0,),
    "sm_margin": (0,),
    "cp_world_size": (1,),
    "cp_rank": (0,),
    "only_qv": (False,),
    "zero_tensors": (False,),
    "seqused_q": (None,),
    "seqused_k": (None,),
    "block_table": (None,),
    "page_table": (None,),
    "qv": (None,),
    "q_v": (None,),
}


class Result(NamedTuple):
    """Attention as no kernel returns it yet: natural log, (heads, tokens), and the rows that have no keys."""

    out: Tensor
    lse: Tensor
    empty: Tensor


@dataclass
class Calls:
    """What a stand-in was called with, by the names of its own parameters."""

    all: list[dict[str, Any]] = field(default_factory=list)

    def attend(self, arguments: Mapping[str, Any]) -> Result:
        """Exact attention over recorded arguments; refuses values that would make a real kernel do something else."""
        self.all.append(dict(arguments))
        for name, allowed in HARMLESS.items():
            assert arguments.get(name, allowed[0]) in allowed, f"{name} = {arguments[name]!r}"
        given = {name: spelled(arguments, *spellings) for name, spellings in SPELLINGS.items()}
        for side in "qk":
            starts = given[f"cu_seqlens_{side}"]
            assert starts.dtype == torch.int32
            longest = given[f"max_seqlen_{side}"]
            assert longest is None or (type(longest) is int and longest == int(starts.diff().max()))
        out, lse = reference_attention(
            *(given[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
            causal=given["causal"],
            softmax_scale=given["softmax_scale"],
        )
        out = out.to(given["q"].dtype)
        if given["out"] is not None:
            out = given["out"].copy_(out)
        return Result(out, lse.float(), lse[0] == -math.inf)


def spelled(arguments: Mapping[str, Any], *names: str) -> Any:
    return next((arguments[name] for name in names if name in arguments), None)


# --- From a record to something that can be called. ---


def signature(record: dict[str, Any], name: str) -> inspect.Signature:
    """A recorded Python signature; defaults that are no literals stay text."""
    parameters = []
    for entry in record["functions"][name]["parameters"]:
        default = entry.get("default", inspect.Parameter.empty)
        if isinstance(default, str):
            default = literal(default)
        kind = getattr(inspect.Parameter, entry.get("kind", "POSITIONAL_OR_KEYWORD"))
        parameters.append(inspect.Parameter(entry["name"], kind, default=default))
    return inspect.Signature(parameters)


def literal(text: str) -> Any:
    try:
        return eval(text, {"__builtins__": {}})
    except NameError:
        return text


def function(record: dict[str, Any], name: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function with a recorded signature; ``body`` gets the bound arguments, defaults included."""
    recorded = signature(record, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = recorded.bind(*args, **kwargs)
        bound.apply_defaults()
        return body(bound.arguments)

    call.__signature__ = recorded  # type: ignore[attr-defined]
    return call


def parsed(schema: str) -> torch.FunctionSchema:
    return torch._C.parse_schema(schema)


class Stage:
    """Where recorded packages are installed: distributions, modules and ops that go away with the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch = monkeypatch
        self._folder = folder
        self._libraries: list[torch.library.Library] = []
        monkeypatch.syspath_prepend(folder)

    def close(self) -> None:
        for library in self._libraries:
            library._destroy()

    def distribution(self, name: str, version: str) -> None:
        info = self._folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")

    def module(self, name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        self._patch.setitem(sys.modules, name, module)
        return module

    def op(self, record: dict[str, Any], name: str, body: Callable[[dict[str, Any]], Any]) -> tuple[str, str]:
        """Registers a recorded op in a namespace of its own: it meets neither the real one nor another test's."""
        namespace = f"recorded_{len(RECORDED_NAMESPACES)}_{name.split('::')[0]}"
        RECORDED_NAMESPACES.append(namespace)
        library = torch.library.Library(namespace, "DEF")
        library.define(record["ops"][name])
        return namespace, self._implement(library, name.split("::")[1], body)

    def aten(self, name: str, body: Callable[[dict[str, Any]], Any]) -> None:
        """Gives one of PyTorch's own CUDA-only ops a CPU implementation; its schema is this PyTorch's."""
        self._implement(torch.library.Library("aten", "IMPL"), name, body)

    def _implement(self, library: torch.library.Library, name: str, body: Callable[[dict[str, Any]], Any]) -> str:
        self._libraries.append(library)
        schema = getattr(getattr(torch.ops, library.ns), name).default._schema
        defaults = {argument.name: argument.default_value for argument in schema.arguments}

        def call(*args: Any, **kwargs: Any) -> Any:  # PyTorch leaves out trailing arguments that equal their default
            return body({**defaults, **dict(zip(defaults, args, strict=False)), **kwargs})

        library.impl(name, call, "CPU")
        return name

    def replace(self, target: Any, name: str, value: Any) -> None:
        self._patch.setattr(target, name, value)

    def replace_item(self, target: dict[str, Any], name: str, value: Any) -> None:
        self._patch.setitem(target, name, value)


RECORDED_NAMESPACES: list[str] = []


# --- How each kernel returns what it computed. ---


def fa2_lse(result: Result) -> Tensor:
    return result.lse.masked_fill(result.empty, math.inf)


def undefined(result: Result, lse: Tensor) -> Tensor:
    """Whatever was in memory: rows without keys hold NaN, in ``out`` as well."""
    result.out[result.empty] = math.nan
    return lse.masked_fill(result.empty, math.nan)


def log2_by_token(lse: Tensor) -> Tensor:
    return (lse / math.log(2.0)).t().contiguous()


# --- Installing a recorded package for a kernel. ---

Installer = Callable[[Stage, dict[str, Any], Calls], None]


def flash_attn_package(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    recorded = record["bindings"]["flash_attn_2_cuda.varlen_fwd"]
    names = [name.rstrip("_") for name in recorded["parameters"]]

    def varlen_fwd(*args: Any) -> list[Tensor]:
        result = calls.attend(dict(zip(names, args, strict=True)))
        returned = {"out": result.out, "softmax_lse": fa2_lse(result)}
        return [returned.get(name, result.out.new_empty(0)) for name in recorded["returns"]]

    stage.module("flash_attn_2_cuda", varlen_fwd=varlen_fwd)

    def public(arguments: dict[str, Any]) -> Any:
        result = calls.attend(arguments)
        return (result.out, fa2_lse(result), None) if arguments["return_attn_probs"] else result.out

    interface = "flash_attn.flash_attn_interface"
    stage.module(interface, flash_attn_varlen_func=function(record, f"{interface}:flash_attn_varlen_func", public))


def vllm_fa2(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def varlen_fwd(arguments: dict[str, Any]) -> list[Tensor]:
        result = calls.attend(arguments)
        return [result.out, fa2_lse(result)]

    stage.module("vllm.vllm_flash_attn")
    place = stage.op(record, "_vllm_fa2_C::varlen_fwd", varlen_fwd)
    stage.replace_item(flash_attn.FA2_OPS, "vllm", ("vllm.vllm_flash_attn", *place))


def torch_fa2(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def forward(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
        result = calls.attend(arguments)
        nothing = result.out.new_empty(0)
        return result.out, fa2_lse(result), nothing, nothing.clone(), nothing.clone()

    stage.aten("_flash_attention_forward", forward)
    if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):
        stage.aten("_flash_attention_forward_no_dropout_inplace", lambda arguments: fa2_lse(calls.attend(arguments)))


def fa3(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def fwd(arguments: dict[str, Any]) -> Any:
        result = calls.attend(arguments)
        rest = [result.out.new_empty(0), result.out.new_empty(0)]
        returned = (result.out, result.lse, *rest)
        return list(returned) if record["distribution"] == "vllm" else returned

    module, namespace, name = flash_attn.FA3_OPS[record["distribution"]]
    stage.module(module)
    place = stage.op(record, f"{namespace}::{name}", fwd)
    stage.replace_item(flash_attn.FA3_OPS, record["distribution"], (module, *place))


def fa4(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def public(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        result = calls.attend(arguments)
        return result.out, result.lse if arguments["return_lse"] else None

    interface = "flash_attn.cute.interface"
    stage.module(interface, flash_attn_varlen_func=function(record, f"{interface}:flash_attn_varlen_func", public))


def vllm_fa4(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def public(arguments: dict[str, Any]) -> Any:
        assert arguments["fa_version"] == 4
        result = calls.attend(arguments)
        return (result.out, result.lse) if arguments["return_softmax_lse"] else result.out

    interface = "vllm.vllm_flash_attn.flash_attn_interface"
    stage.module(interface, flash_attn_varlen_func=function(record, f"{interface}:flash_attn_varlen_func", public))


def flashinfer(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    name = "flashinfer.prefill:BatchPrefillWithRaggedKVCacheWrapper"

    def construct(arguments: dict[str, Any]) -> None:
        arguments["self"].backend = arguments["backend"]
        assert arguments["kv_layout"] == "NHD"

    def plan(arguments: dict[str, Any]) -> None:
        arguments["self"].planned = arguments
        calls.all.append(arguments)

    def run(arguments: dict[str, Any]) -> Any:
        wrapper = arguments["self"]
        assert arguments["out"] is None or arguments["out"].is_contiguous()
        assert arguments["q"].dtype == wrapper.planned["q_data_type"]
        result = calls.attend({**wrapper.planned, **arguments})
        if not arguments["return_lse"]:
            return result.out
        lse = undefined(result, result.lse) if wrapper.backend == "cudnn" else result.lse
        base, layout = arguments.get("lse_base", "log2"), arguments.get("lse_layout", "NH")
        lse = lse / math.log(2.0) if base == "log2" else lse
        return result.out, lse.t().contiguous() if layout == "NH" else lse

    wrapper = type(
        "BatchPrefillWithRaggedKVCacheWrapper",
        (),
        {
            "__init__": function(record, f"{name}.__init__", construct),
            "plan": function(record, f"{name}.plan", plan),
            "run": function(record, f"{name}.run", run),
        },
    )
    stage.module("flashinfer.prefill", BatchPrefillWithRaggedKVCacheWrapper=wrapper)


def trtllm(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def ragged(arguments: dict[str, Any]) -> Any:
        assert arguments["query"].is_contiguous(), "the launcher passes no strides of q"
        assert arguments["out"] is None or arguments["out"].is_contiguous()
        heads, sequences = arguments["query"].shape[1], arguments["batch_size"]
        statistics = 8 * heads * sequences * arguments["max_q_len"]
        assert arguments["workspace_buffer"].numel() >= statistics + trtllm_ragged.SCRATCH_BYTES
        assert torch.equal(arguments["seq_lens"], arguments["cum_seq_lens_kv"].diff())
        result = calls.attend(arguments)
        lse = result.lse
        lengths = [arguments[name].diff() for name in ("cum_seq_lens_q", "cum_seq_lens_kv")]
        if any((some == 0).any() for some in lengths):
            mirrors = [arguments.get(name) for name in ("q_seq_lens_cpu", "kv_seq_lens_cpu")]
            if None in mirrors:
                result.out.fill_(math.nan)  # a batch with such sequences is undefined as a whole
            else:
                assert all(map(torch.equal, mirrors, lengths))
        return (result.out, log2_by_token(lse)) if arguments["return_lse"] else result.out

    name = "flashinfer.prefill:trtllm_ragged_attention_deepseek"
    stage.module("flashinfer.prefill", trtllm_ragged_attention_deepseek=function(record, name, ragged))


def cudnn_frontend(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    """A graph that holds the tensors which it is executed with to what it was told of them when it was built."""
    taken = record["imported"]["cudnn"]
    steps = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")

    class Described:
        """A tensor of a graph."""

        def __init__(self, **told: Any) -> None:
            self.told = told

        def __getattr__(self, setter: str) -> Callable[[Any], Described]:
            assert len(taken[f"tensor.{setter}"]) == 2

            def tell(value: Any) -> Described:
                self.told[setter.removeprefix("set_")] = value
                return self

            return tell

        def uids(self) -> set[int]:
            return {self.told["uid"]} | (
                {self.told["ragged_offset"].told["uid"]} if "ragged_offset" in self.told else set()
            )

    class Graph:
        def __init__(self, **given: Any) -> None:
            assert given.keys() <= set(taken["pygraph.__init__"])
            self.done: list[str] = []
            calls.all.append({"graph": self})

        def tensor(self, **given: Any) -> Described:
            assert given.keys() <= set(taken["pygraph.tensor"])
            return Described(**given)

        def sdpa(self, **given: Any) -> tuple[Described, Described]:
            assert given.keys() <= set(taken["pygraph.sdpa"])
            self.node, self.out, self.lse = given, Described(), Described()
            return self.out, self.lse

        def __getattr__(self, step: str) -> Callable[..., None]:
            assert step in steps

            def take(*given: Any) -> None:
                assert len(given) == len(taken[f"pygraph.{step}"]) - 1 or step in (
                    "create_execution_plans",
                    "build_plans",
                )
                self.done.append(step)

            return take

        def get_workspace_size(self) -> int:
            return 16

        def execute(self, tensors: Any, workspace: Tensor, handle: object, tensor_uids: Any = None) -> None:
            assert handle == "a handle"
            if tensor_uids is not None:
                tensors = dict(zip(tensor_uids, tensors, strict=True))
            assert tuple(self.done) == steps
            assert workspace.numel() >= 16
            node, outputs = self.node, [self.out, *([self.lse] if self.node["generate_stats"] else [])]
            inputs = [value for value in node.values() if isinstance(value, Described)]
            assert tensors.keys() == set().union(*(tensor.uids() for tensor in (*inputs, *outputs)))

            def starts(tensor: Described, actual: Tensor) -> Tensor:
                """cu_seqlens, from where a tensor's sequences begin, in elements."""
                offsets, (token, head, width) = tensors[tensor.told["ragged_offset"].told["uid"]], actual.stride()
                sequences, heads, longest, wide = tensor.told["dim"]
                assert (offsets.dtype, offsets.shape) == (torch.int64, (sequences + 1, 1, 1, 1))
                assert tensor.told["stride"][1:] == [head, token, width]
                if actual.dtype != torch.float32:  # it would fault
                    assert actual.data_ptr() % 16 == token * 2 % 16 == head * 2 % 16 == 0
                    assert width == 1
                assert [heads, wide] == list(actual.shape[1:])
                found = offsets.flatten() // token
                assert torch.equal(found * token, offsets.flatten())
                assert longest >= found.diff().max()
                return found.int()

            q, k, v, out = (tensors[t.told["uid"]] for t in (node["q"], node["k"], node["v"], self.out))
            cu_q, cu_k = starts(node["q"], q), starts(node["k"], k)
            assert torch.equal(cu_q, starts(self.out, out))
            assert torch.equal(cu_k, starts(node["v"], v))
            assert node["use_padding_mask"]
            for cu, tensor in ((cu_q, node["seq_len_q"]), (cu_k, node["seq_len_kv"])):
                lengths = tensors[tensor.told["uid"]]
                assert lengths.dtype == torch.int32
                assert torch.equal(lengths, cu.diff().view(-1, 1, 1, 1))
            masks = {("top left", None): False, ("bottom right", 0): True}
            causal = masks[node["diagonal_alignment"], node["diagonal_band_right_bound"]]
            ragged = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal, "softmax_scale": node["attn_scale"]}
            result = calls.attend({"q": q, "k": k, "v": v, "out": out, **ragged})
            lse = undefined(result, result.lse)
            if node["generate_stats"]:
                buffer = tensors[self.lse.told["uid"]]
                assert torch.equal(cu_q, starts(self.lse, buffer.t().unsqueeze(-1)))
                buffer.fill_(math.nan)[:, : len(q)] = lse

    in_order = taken["pygraph.execute"][4:] == ["override_uids", "override_shapes", "override_strides", "tensor_uids"]
    if not in_order:
        execute = Graph.execute
        Graph.execute = lambda graph, tensors, workspace, handle: execute(graph, tensors, workspace, handle)
    assert taken["pygraph.execute"][2:4] == ["workspace", "handle"]
    assert taken["create_handle"] == []
    assert taken["set_stream"] == ["handle", "stream"]
    stage.module(
        "cudnn",
        pygraph=Graph,
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32", INT32="int32", INT64="int64"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
    )
    stage.replace(cudnn.Cudnn, "_handle", lambda adapter: "a handle")


def torch_efficient(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    """PyTorch's own op, whose adapter asks for a GPU."""

    def forward(arguments: dict[str, Any]) -> tuple[Any, ...]:
        assert arguments["bias"] is None
        masks = {0: False, 2: True}  # CausalVariant: 1 is top-left
        given = {name: arguments[name].squeeze(0) for name in ("query", "key", "value")}
        result = calls.attend({**arguments, **given, "causal": masks[arguments["custom_mask_type"]], "out": None})
        starts, longest = arguments["cu_seqlens_q"].tolist(), -(-arguments["max_seqlen_q"] // 32) * 32
        lse = torch.full((len(starts) - 1, result.lse.shape[0], longest), math.nan)
        for row, (start, end) in zip(lse, itertools.pairwise(starts), strict=True):
            row[:, : end - start] = undefined(result, result.lse)[:, start:end]
        lse = lse if arguments["compute_log_sumexp"] else lse.new_empty(0)
        return result.out.unsqueeze(0), lse, lse.new_empty(0), lse.new_empty(0), 0, 0

    stage.replace(torch_sdpa.TorchEfficient, "load_kernel", lambda adapter: None)
    stage.aten("_efficient_attention_forward", forward)


def tokenspeed(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def prefill(arguments: dict[str, Any]) -> Any:
        for name in ("query", "key", "value"):
            assert arguments[name].is_contiguous(), "strides are not read"
        assert arguments["out"] is None or arguments["out"].is_contiguous()
        result = calls.attend(arguments)
        return (result.out, result.lse.t().contiguous()) if arguments["return_lse"] else result.out

    name = "tokenspeed_mla.mla_prefill:tokenspeed_mla_prefill"
    stage.module("tokenspeed_mla.mla_prefill", tokenspeed_mla_prefill=function(record, name, prefill))


def aiter(stage: Stage, record: dict[str, Any], calls: Calls) -> None:
    def public(arguments: dict[str, Any]) -> Any:
        result = calls.attend(arguments)
        lse = undefined(result, result.lse)
        return (result.out, lse) if arguments["return_lse"] else result.out

    name = "aiter.ops.mha:flash_attn_varlen_func"
    stage.module("aiter", flash_attn_varlen_func=function(record, name, public))


#: (kernel, distribution) -> (how a record of it is installed, an arch that the kernel runs on).
PACKAGES: dict[tuple[str, str], tuple[Installer, str]] = {
    ("fa2", "flash-attn"): (flash_attn_package, "sm80"),
    ("fa2", "vllm"): (vllm_fa2, "sm80"),
    ("fa2", "torch"): (torch_fa2, "sm80"),
    ("torch_efficient", "torch"): (torch_efficient, "sm90"),
    ("fa3", "flash-attn-3"): (fa3, "sm90"),
    ("fa3", "fa3-fwd"): (fa3, "sm90"),
    ("fa3", "vllm"): (fa3, "sm90"),
    ("fa3", "sglang-kernel"): (fa3, "sm90"),
    ("fa4", "flash-attn-4"): (fa4, "sm90"),
    ("fa4", "vllm"): (vllm_fa4, "sm90"),
    ("flashinfer_fa2", "flashinfer-python"): (flashinfer, "sm90"),
    ("flashinfer_fa3", "flashinfer-python"): (flashinfer, "sm90"),
    ("flashinfer_cutlass", "flashinfer-python"): (flashinfer, "sm100"),
    ("flashinfer_cudnn", "flashinfer-python"): (flashinfer, "sm100"),
    ("trtllm_ragged", "flashinfer-python"): (trtllm, "sm100"),
    ("cudnn", "nvidia-cudnn-frontend"): (cudnn_frontend, "sm90"),
    ("tokenspeed_mla", "tokenspeed-mla"): (tokenspeed, "sm100"),
    ("aiter", "amd-aiter"): (aiter, "gfx942"),
}

#: PyTorch needs no record: its own schemas are at hand.
RECORDS["torch", torch.__version__.split("+")[0]] = {}


class Case(NamedTuple):
    """A kernel and a recorded version of a package that offers it."""

    kernel: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.distribution}-{self.version}"


#: All of them; only the versions in which a kernel's call means what the adapter takes it to mean (FlashInfer's cuDNN
#: sub-backend counted offsets in elements before 0.7.1).
CASES = [
    Case(kernel, distribution, version)
    for kernel, distribution in PACKAGES
    for recorded, version in RECORDS
    if recorded == distribution
    and (kernel, version) not in {("flashinfer_cudnn", v) for v in ("0.6.6", "0.6.14", "0.6.18.post1")}
]

#: The last version of each.
NEWEST = list({case[:2]: case for case in CASES}.values())


# --- FA4's interface as far as a planned call sees it. ---


class AuxData(NamedTuple):
    tensors: Any = None
    scalars: Any = None


def as_taken(tensor: Tensor) -> Tensor:
    """What FA4 hands on: a copy where the memory is not aligned."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor.detach()


class CuteInterface:
    """``flash_attn.cute.interface`` of a recorded version: the public function finds a compiled function in
    ``_flash_attn_fwd.compile_cache`` and calls it with the arguments, in the order, that its source names.
    """

    def __init__(self, record: dict[str, Any], calls: Calls, arch: str = "sm90") -> None:
        self.calls = calls
        self.public_runs = 0
        self.compiled = 0
        #: What tests change to make a planned call wrong: the names that the source's expressions are evaluated with.
        self.extra: dict[str, Any] = {}
        self.copies_of: set[str] = set()
        self.noise = 0.0
        parts = record["lists"]["_flash_attn_fwd:call_args"]
        first, descale, block_sparse, sm100, others = parts
        self._expressions = (
            [*first, *descale, *block_sparse, *sm100] if arch == "sm100" else [*first, *block_sparse, *others]
        )
        name = "flash_attn.cute.interface:flash_attn_varlen_func"
        self.flash_attn_varlen_func = function(record, name, self._public)
        self._flash_attn_fwd = SimpleNamespace(compile_cache={})

    def _public(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        self.public_runs += 1
        q, v = arguments["q"], arguments["v"]
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, v.shape[2])
        lse = q.new_empty(heads, tokens, dtype=torch.float32) if arguments["return_lse"] else None
        passed = {name: as_taken(arguments[name]) for name in "qkv"}
        passed.update({name: arguments[name].clone() for name in self.copies_of})
        identifiers = {part for text in self._expressions for part in re.findall(r"[A-Za-z_]\w*", text)}
        names = {
            **dict.fromkeys(identifiers - set(keyword.kwlist)),
            **{f"{name}_call": tensor for name, tensor in passed.items()},
            **arguments,
            "out": out,
            "lse": lse,
            "is_split_kv": False,
            "AuxData": AuxData,
            **self.extra,
        }
        one_tile = arguments["max_seqlen_q"] <= 128
        key = (q.dtype, q.shape[2], v.shape[2], arguments["causal"], lse is None, one_tile)
        cache = self._flash_attn_fwd.compile_cache
        if key not in cache:
            cache[key] = self._compile(arguments["causal"])
        cache[key](*[eval(text, {}, names) for text in self._expressions])
        return out, lse

    def _compile(self, causal: bool) -> Callable[..., None]:
        self.compiled += 1
        expressions = self._expressions
        runs = 0

        def compiled(*args: Any) -> None:
            nonlocal runs
            runs += 1
            if any(tensor.data_ptr() % 16 for tensor in args[:4]):
                raise ValueError(
                    "Misaligned Tensor data on argument"
                )  # its words; tests/test_builds.py has the real one
            given = dict(zip(expressions, args, strict=True))
            names = {f"{name}_call": name for name in "qkv"}
            arguments = {names.get(text, text): value for text, value in given.items()}
            result = self.calls.attend({**arguments, "causal": causal, "out": args[3]})
            result.out.add_(self.noise * runs)
            if args[4] is not None:
                args[4].copy_(result.lse)

        return compiled
