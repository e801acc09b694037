"""What a model needs: dims, dtype, features, and what the caller insists on."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_prefill.capabilities.findings import nearest
from mla_prefill.capabilities.model import DTYPES, MLADimensions, whole
from mla_prefill.capabilities.profiles import Shape

if TYPE_CHECKING:
    from mla_prefill.capabilities.configs import ModelDims
    from mla_prefill.capabilities.matrix import Matrix

POLICIES = ("default", "measured")
#: Tokens; no sequence is longer than what an int32 of ``cu_seqlens`` counts.
LONGEST = 2**31
_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

#: vLLM's names for backends that exist there alone, or that stand for whatever a plugin supplies.
_VLLM_ONLY = ("CUSTOM", "CPU", "ZEN_CPU")


class RequestError(ValueError):
    """A request that says something no request can say. One line, with the nearest valid value."""


class NotMLAError(RequestError):
    """The model, or this layer of it, has no MLA prefill (or its config cannot tell): nothing to select."""


class _Shape(NamedTuple):
    sequences: int
    length: int
    heads: int
    graph: bool


class BatchShape(_Shape):
    """The batch that ``policy="measured"`` is to choose for.

    Args:
        sequences: how many.
        length: new tokens of each; for mixed lengths their root mean square (`BatchShape.of` works it out).
        heads: attention heads on this rank.
        graph: it runs inside a CUDA graph, where only device time counts.

    Raises:
        RequestError: not positive whole numbers.
    """

    __slots__ = ()

    def __new__(cls, sequences: int, length: int, heads: int, graph: bool = False) -> BatchShape:
        numbers = []
        for name, value in (("sequences", sequences), ("length", length), ("heads", heads)):
            number = whole(value)
            if number is None or number < 1:
                raise RequestError(f"shape: {name} must be a positive whole number, got {value!r}")
            numbers.append(number)
        sequences, length, heads = numbers
        return super().__new__(cls, sequences, length, heads, bool(graph))

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, graph: bool = False) -> BatchShape:
        """The shape of a batch with these lengths of new tokens. Raises RequestError for what is no such list."""
        try:
            tokens = [operator.index(length) for length in lengths]
        except TypeError:
            tokens = [-1]
        if not tokens:
            raise RequestError("shape: a batch has at least one sequence")
        if not all(0 <= length < LONGEST for length in tokens):
            given = f"{lengths!r}"[:80]
            raise RequestError(f"shape: lengths must be whole numbers of tokens such as [512, 128], got {given}")
        return cls(*Shape.of(tokens, heads), graph)


class _Fields(NamedTuple):
    dims: MLADimensions
    dtype: str
    fa_version: int | None
    backend: str | None
    needs: tuple[str, ...]
    policy: str
    shape: BatchShape | None
    prefers: tuple[str, ...]


class Request(_Fields):
    """One question to `select`. Immutable, hashable at C speed; two equal requests get one cached answer.

    Args:
        dims: `MLADimensions`, or a triple (qk_nope, qk_rope, v_head).
        dtype: of q, k and v: a torch dtype or its name, ``bf16`` and the like included.
        fa_version: pins FlashAttention to this version: used or refused, never replaced.
        backend: forces a backend (or one of its kernels): used or refused, never replaced.
        needs: features the kernel must provide: ``lse``, ``out``, ``fp8_query`` ... (see ``Matrix.features``).
        policy: ``default`` (the reviewed order) or ``measured`` (a timing profile of this GPU where one applies).
        shape: the batch to choose for under ``measured``; without, the kernel that is best over all measured shapes.
        prefers: features it should provide, most wanted first: what provides them comes before the order of priority,
            and ``Decision.warnings`` says why one is not met.
        phase: only ``prefill`` is answered.

    Raises:
        RequestError: a value that cannot be meant, with the nearest valid one.
    """

    __slots__ = ()

    def __new__(
        cls,
        dims: MLADimensions | Iterable[int],
        dtype: Any = "bfloat16",
        fa_version: int | None = None,
        backend: str | None = None,
        needs: Iterable[str] = (),
        policy: str = "default",
        shape: BatchShape | None = None,
        prefers: Iterable[str] = (),
        *,
        phase: str = "prefill",
    ) -> Request:
        if phase != "prefill":
            raise RequestError(f"phase {phase!r}: this matrix answers prefill only; decode kernels have other limits")
        if policy not in POLICIES:
            raise RequestError(f"unknown policy {policy!r}; {nearest(policy, POLICIES)}")
        if fa_version is not None and whole(fa_version) is None:
            raise RequestError(f"fa_version must be a whole number such as 3, got {fa_version!r}")
        if shape is not None and not isinstance(shape, BatchShape):
            raise RequestError(f"shape must be a BatchShape such as BatchShape(8, 512, heads=16), got {shape!r}")
        needs = tuple(sorted(_features("needs", needs)))
        return super().__new__(
            cls,
            _dims(dims),
            dtype_name(dtype),
            whole(fa_version),
            None if backend is None else str(backend),
            needs,
            policy,
            shape,
            tuple(wish for wish in _features("prefers", prefers) if wish not in needs),
        )

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | Any,
        layer: int | None = None,
        *,
        matrix: Matrix | None = None,
        **request: Any,
    ) -> Request:
        """The request of a model, from its config.

        The ``dtype`` that a config names is that of its weights, which engines override: give it where it is not
        bfloat16.

        Args:
            config: a ``config.json`` or its folder, its content, or a transformers config.
            layer: the decoder layer, numbered from 0. Needed where the layers have several geometries.
            matrix: whose model families to go by; None: those of the matrix in force.
            request: the other arguments of `Request`.

        Raises:
            NotMLAError: the model or this layer runs ordinary attention, or the config cannot tell.
            RequestError: several geometries and no ``layer``, or a value that cannot be meant.
            ConfigError: not readable, or it holds what no model has.
        """
        from mla_prefill.capabilities.configs import ModelDims, read_config
        from mla_prefill.selector.engine import matrix_in_force

        answer = read_config(config, (matrix or matrix_in_force()).families)
        if not isinstance(answer, ModelDims):
            raise NotMLAError(answer.reason)
        return cls(_dims_of_layer(answer, layer), **request)

    @classmethod
    def from_vllm(cls, vllm_config: Any, layer: int | None = None, **request: Any) -> Request:
        """The request of a vLLM engine: its model, its dtype, and what its MLA layers need of a prefill.

        A backend or FlashAttention version that vLLM was told to use is forced here too. Where it was told to quantise
        the query for an FP8 KV cache (``use_prefill_query_quantization``), an FP8 query is preferred and not needed, as
        vLLM goes on in 16 bit without. Arguments in ``request`` beat what the configuration says.

        Args:
            vllm_config: a ``vllm.config.VllmConfig``.
            layer: as in `from_config`.

        Raises:
            NotMLAError, RequestError, ConfigError: as `from_config`.
        """
        try:
            model, attention = vllm_config.model_config, vllm_config.attention_config
            uses_mla, hf_config, dtype = model.use_mla, model.hf_config, model.dtype
            fp8_cache = vllm_config.cache_config.cache_dtype.startswith("fp8")
            fp8_query = fp8_cache and attention.use_prefill_query_quantization
            told, fa_version = attention.mla_prefill_backend, attention.flash_attn_version
        except AttributeError as error:
            given = f"{type(vllm_config).__module__}.{type(vllm_config).__qualname__}"
            raise RequestError(
                f"from_vllm takes the vllm.config.VllmConfig of an engine with a model, got {given}: {error}"
            ) from None
        if not uses_mla:
            raise NotMLAError("vLLM runs this model with ordinary attention (no MLA, or VLLM_MLA_DISABLE is set)")
        backend = getattr(told, "name", None)
        backend = None if backend in _VLLM_ONLY else backend
        asked = {
            "dtype": dtype,
            "needs": ["lse", "context_chunk"],
            "prefers": ["fp8_query"] if fp8_query else [],
            "backend": backend,
            "fa_version": fa_version if backend in (None, "FLASH_ATTN") else None,
        }
        return cls.from_config(hf_config, layer, **{**asked, **request})

    def to_dict(self) -> dict[str, Any]:
        """The ``request`` part of the JSON of `mla-prefill select`; ``shape`` and ``prefers`` only where given."""
        plain = {**self._asdict(), "dims": list(self.dims), "needs": list(self.needs)}
        shape, prefers = plain.pop("shape"), plain.pop("prefers")
        given = {"shape": shape and shape._asdict(), "prefers": list(prefers)}
        return plain | {name: value for name, value in given.items() if value}


def _features(name: str, given: Any) -> tuple[str, ...]:
    """The features of ``needs`` or ``prefers``, each once, as given."""
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (None,)
    if not all(isinstance(feature, str) for feature in listed):
        raise RequestError(f"{name} must be a list of features such as ['lse'], got {given!r}")
    return tuple(dict.fromkeys(listed))


def _dims(dims: MLADimensions | Iterable[int]) -> MLADimensions:
    if isinstance(dims, MLADimensions):
        return dims
    values = tuple(dims) if isinstance(dims, Iterable) and not isinstance(dims, str) else ()
    if len(values) != 3:
        raise RequestError(f"dims are three numbers qk_nope, qk_rope, v_head; got {dims!r}")
    try:
        return MLADimensions(*values)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _dims_of_layer(model: ModelDims, layer: int | None) -> MLADimensions:
    """The dims of one layer; without a layer those of all MLA layers, if they have the same."""
    geometries = ((model.dims, model.layers), *((other.dims, other.layers) for other in model.other_dims))
    if layer is None:
        if len({dims for dims, _ in geometries}) > 1:
            shown = " and ".join(f"{dims} on {_layers(layers)}" for dims, layers in geometries)
            raise RequestError(f"the layers of this model have {shown}: say which layer")
        return model.dims
    number = whole(layer)
    if number is None or number < 0:
        raise RequestError(f"layer must be a whole number from 0, got {layer!r}")
    for dims, layers in geometries:
        if layers is not None and number in layers:
            return dims
    open_to_all = [dims for dims, layers in geometries if layers is None]
    if not open_to_all:
        shown = "; ".join(_layers(layers) for _, layers in geometries)
        raise NotMLAError(f"layer {layer} has no MLA attention; those that do: {shown}")
    if len(geometries) > 1:
        raise NotMLAError(f"the config does not say which dims layer {layer} has; give dims instead")
    return open_to_all[0]


def _layers(layers: Sequence[int] | None) -> str:
    return "layers that the config does not name" if layers is None else f"layers {', '.join(map(str, layers))}"


def dtype_name(dtype: Any) -> str:
    """PyTorch's name of a dtype given as a torch dtype, a name or a usual short form."""
    name = str(dtype).removeprefix("torch.").lower()
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise RequestError(f"unknown dtype {dtype!r}; {nearest(name, (*DTYPES, *_DTYPE_ALIASES))}")
    return name
