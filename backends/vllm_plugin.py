"""The ``vllm.general_plugins`` entry point: decisions inside a vLLM engine, off unless MLA_PREFILL_VLLM asks for it.

- ``advise`` logs the setting that our decision means for this engine; what vLLM chooses stays as it is.
- ``veto`` adds our reasons to those of vLLM's own backends, so that its own loop moves on.
- ``supply`` puts our adapters into the CUSTOM slot, for ``-ac.mla_prefill_backend=CUSTOM``.

All three go through `register_mla_prefill_backend`, vLLM's documented way to override a backend. Nothing gets a new
name: such a member cannot be unpickled in a worker that has not loaded plugins yet. vLLM does not catch what a plugin
raises, so nothing here raises until `supply` loads and runs a kernel, where vLLM's own backends raise too; classes are
made when vLLM asks for them, since importing vLLM's own takes long.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from mla_prefill.backends import packages
from mla_prefill.capabilities import versions
from mla_prefill.capabilities.findings import nearest
from mla_prefill.selector import Decision, Environment, Request, decide
from mla_prefill.selector.decision import Verdict
from mla_prefill.selector.engine import matrix_in_force, matrix_of
from mla_prefill.selector.environment import VLLM_MODES

if TYPE_CHECKING:
    import torch
    from mla_prefill.backends.base import PrefillAdapter, PrefillPlan

VARIABLE = "MLA_PREFILL_VLLM"
#: The versions whose registry, selector and metadata this was tested against; on others it does nothing.
TESTED: str = packages.read()["vllm"]["tested"]
#: vLLM's member -> the kernels that it can be made to run.
MEMBERS: dict[str, list[str]] = packages.read()["vllm"]["runs"]
#: What every MLA prefill of vLLM needs: it merges the new tokens with the chunks of the context by their LSE.
NEEDS = ("lse", "context_chunk")
#: vLLM's FLASH_ATTN runs the build that vLLM ships, whatever else is installed (v1/attention/backends/fa_utils.py).
ENGINE = "vllm"

#: A child of vLLM's logger: what it says appears among vLLM's own lines without any set-up.
log = logging.getLogger("vllm.mla_prefill")
#: Name of a class that vLLM may ask this module for -> (mode, path of the class below it).
_classes: dict[str, tuple[str, str]] = {}


def register() -> None:
    """What vLLM calls in every process, perhaps more than once. Never raises."""
    mode = os.environ.get(VARIABLE, "").strip().lower()
    if not mode:
        return
    try:
        _register(mode)
    except Exception as error:
        log.warning("mla-prefill: the plugin does nothing here (%s: %s)", type(error).__name__, error)


def _register(mode: str) -> None:
    if mode not in VLLM_MODES:
        log.warning("mla-prefill: %s is %r and does nothing; %s", VARIABLE, mode, nearest(mode, VLLM_MODES))
        return
    version = engine_version()
    if not versions.contains(TESTED, version):
        log.warning(
            "mla-prefill: not tested with vLLM %s (tested: %s), so %s=%s does nothing", version, TESTED, VARIABLE, mode
        )
        return
    prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill")
    for name in ("CUSTOM",) if mode == "supply" else MEMBERS:
        member = prefill.MLAPrefillBackendEnum[name]
        path = f"{__name__}.{name}"
        below = prefill.MLAPrefillBackend if mode == "supply" else member.get_path()
        if below != path:  # else this process has loaded the plugin before
            _classes[name] = (mode, below if isinstance(below, str) else f"{below.__module__}.{below.__qualname__}")
            prefill.register_mla_prefill_backend(member, path)
    log.info("mla-prefill: %s=%s", VARIABLE, mode)


def __getattr__(name: str) -> Any:
    """The class of a member, made when vLLM resolves its path."""
    if name not in _classes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name, *_classes[name])


@functools.cache
def _made(name: str, mode: str, path: str) -> type:
    base = _resolved(path)
    made = _supplied(base) if mode == "supply" else _watched(base, name, mode)
    made.__module__, made.__name__, made.__qualname__ = __name__, name, name
    return made


def _resolved(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


# ---- advise and veto ------------------------------------------------------------------------------------------------


def _watched(base: Any, name: str, mode: str) -> type:
    """vLLM's own backend, whose check is told to us."""

    class Watched(base):  # type: ignore[misc]
        @classmethod
        def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
            reasons: list[str] = super().validate_configuration(device_capability, selector_config)
            try:
                question = _question(device_capability, selector_config)
                if question is None:
                    return reasons
                if mode == "veto":
                    return reasons + vetoes(name, *question, selector_config, vllm_can=not reasons)
                _say(advice(*question, selector_config))
            except Exception as error:
                _say(f"{VARIABLE}={mode} does nothing here ({type(error).__name__}: {error})", logging.WARNING)
            return reasons

    return Watched


def vetoes(
    member: str, request: Request, environment: Environment, selector_config: Any, vllm_can: bool = True
) -> list[str]:
    """Our reasons against what vLLM would run as ``member``, in vLLM's form: a list of texts, empty if eligible."""
    against = _against(member, request, environment)
    if not against:
        return []
    # Except on a few architectures vLLM has one candidate only: its error is then the last thing that a user sees.
    setting = _best_setting(_of_vllm(request, environment), selector_config)
    ways = ["unset it to let vLLM try" if vllm_can else None, setting, _by_supply(request, environment)]
    way_out = ", or ".join(way for way in ways if way) or "nothing that was tried helps"
    return [f"mla-prefill: {against} (a veto of {VARIABLE}: {way_out})"]


def _against(member: str, request: Request, environment: Environment) -> str:
    kernel: str | None = MEMBERS[member][0]
    if member == "FLASH_ATTN":
        version, kernels = flash_attn_version(request), matrix_of(environment).kernels
        kernel = next((k for k in MEMBERS[member] if kernels[k].fa_version == version), None)
    if kernel is None:
        return "vLLM has no FlashAttention version to run here (flash_attn_version, or its build)"
    reasons = _verdict(kernel, request, of_the_engine(environment)).reasons
    texts = [f"{reason.code}: {reason.message}" for reason in reasons if reason.code != "lower-priority"]
    return f"{kernel}: {'; '.join(texts)}" if texts else ""


def advice(request: Request, environment: Environment, selector_config: Any) -> str:
    """The setting of vLLM that our decision means here, as one line."""
    decision = _of_vllm(request, environment)
    what = f"dims {request.dims}, {request.dtype}, {decision.arch}"
    if setting := _best_setting(decision, selector_config):
        return f"{what}: {setting}"
    supply = _by_supply(request, environment)
    return f"{what}: no setting of vLLM's own backends fits" + (f"; {supply}" if supply else "")


def _of_vllm(request: Request, environment: Environment) -> Decision:
    return decide(request, of_the_engine(environment), matrix_of(environment))


def _by_supply(request: Request, environment: Environment) -> str | None:
    """The way to what `supply` would run, where there is something."""
    chosen = decide(request, environment, matrix_of(environment)).chosen
    way = f"{VARIABLE}=supply with -ac.mla_prefill_backend=CUSTOM"
    return f"{way} for {chosen.backend}/{chosen.kernel}" if chosen else None


def _best_setting(decision: Decision, selector_config: Any) -> str | None:
    """How to make vLLM run the best candidate that it would run."""
    for verdict in decision.verdicts:
        if verdict.verdict != "rejected" and (setting := _setting(verdict, decision.request, selector_config)):
            return f"{setting} (row {verdict.candidate.source})"
    return None


def _setting(verdict: Verdict, request: Request, selector_config: Any) -> str | None:
    """How to make vLLM run this candidate; None where it would not."""
    candidate = verdict.candidate
    if candidate.kernel not in MEMBERS.get(candidate.backend, ()):
        return None
    setting = f"-ac.mla_prefill_backend={candidate.backend}"
    try:
        own = _resolved(_classes[candidate.backend][1])
    except ImportError:
        return None
    if own.validate_configuration(_platform().get_device_capability(), selector_config):
        return None
    if candidate.fa_version is None:
        return setting
    if flash_attn_version(request) == candidate.fa_version:
        return f"{setting} (FlashAttention {candidate.fa_version} is what it runs here)"
    if flash_attn_version(request, candidate.fa_version) == candidate.fa_version:
        return f"{setting} -ac.flash_attn_version={candidate.fa_version}"
    return None


@functools.lru_cache(maxsize=1024)
def _say(text: str, level: int = logging.INFO) -> None:
    """Each line once a process: vLLM asks again for every layer and every worker."""
    log.log(level, "mla-prefill: %s", text)


# ---- what the engine is ---------------------------------------------------------------------------------------------


def engine_version() -> str:
    return str(importlib.import_module("vllm").__version__)


def _platform() -> Any:
    return importlib.import_module("vllm.platforms").current_platform


def _question(device_capability: Any, selector_config: Any) -> tuple[Request, Environment] | None:
    """The request and environment of this engine; None on platforms that were not looked at.

    The architecture is vLLM's answer: asking CUDA ourselves would initialise it before vLLM forks its workers. ROCm's
    capabilities look like NVIDIA's (gfx942 is 9.4), so the platform is asked first.
    """
    platform = _platform()
    if platform.is_cuda() and device_capability is not None:
        arch = f"{device_capability.major}.{device_capability.minor}"
    elif platform.is_cpu():
        arch = "cpu"
    else:
        return None
    dims = selector_config.mla_dimensions
    triple = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
    if not any(triple):  # vLLM asks once before it knows the model
        return None
    # The matrix in force, since vLLM asks for every layer and reading one takes long.
    environment = Environment.detect(matrix_in_force().distributions, arch)
    return Request(triple, selector_config.dtype, needs=NEEDS), environment


def of_the_engine(environment: Environment) -> Environment:
    """With vLLM, whatever the name of its package, and without those that its backends do not look at: FLASH_ATTN is
    what vLLM ships.
    """
    kernels = matrix_of(environment).kernels
    others = {p.distribution for name in MEMBERS["FLASH_ATTN"] for p in kernels[name].providers}
    installed = {name: version for name, version in (environment.installed or {}).items() if name not in others}
    return environment.replace(installed={**installed, ENGINE: engine_version()})


def flash_attn_version(request: Request, asked: int | None = None) -> int | None:
    """The FlashAttention version that vLLM runs for these dims; with ``asked``, if it were told to use that one."""
    fa_utils = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    config = importlib.import_module("vllm.config")
    ask = functools.partial(
        fa_utils.get_flash_attn_version, head_size=request.dims.qk_head_dim, head_size_v=request.dims.v_head_dim
    )
    current = config.get_current_vllm_config_or_none()
    if asked is None:
        version = ask()
    elif current is None or not _flash_attn_supports(asked):
        return None
    else:
        changed = copy.copy(current)
        changed.attention_config = copy.copy(current.attention_config)
        changed.attention_config.flash_attn_version = asked
        with config.set_current_vllm_config(changed):
            version = ask()
    return None if version is None else int(version)


def _flash_attn_supports(version: int) -> bool:
    """Whether the build has it for this GPU; asking for another one makes vLLM log an error."""
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    return bool(interface.is_fa_version_supported(version))


def _verdict(kernel: str, request: Request, environment: Environment) -> Verdict:
    """What stands against this kernel. The environment's overrides count; the policy's order does not."""
    forced = environment.overrides.backend is not None or environment.overrides.fa_version is not None
    asked = request if forced else Request(**{**request._asdict(), "backend": kernel})
    verdicts = decide(asked, environment, matrix_of(environment)).verdicts
    return next(verdict for verdict in verdicts if verdict.candidate.kernel == kernel)


# ---- supply ---------------------------------------------------------------------------------------------------------


def _supplied(base: Any) -> type:
    """A full MLA prefill backend over our adapters."""

    class Supplied(base):  # type: ignore[misc]
        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @classmethod
        def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
            try:
                question = _question(device_capability, selector_config)
                if question is None:
                    return ["mla-prefill: this platform, or a model without MLA dims, is none of its business"]
                decision = decide(*question, matrix_of(question[1]))
                _say(decision.one_line().removeprefix("mla-prefill: "))
                if decision.chosen is not None:
                    return []
                return [f"{v.candidate.kernel}: {'; '.join(r.message for r in v.reasons)}" for v in decision.verdicts]
            except Exception as error:
                return [f"mla-prefill: {type(error).__name__}: {error}"]

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._plans: dict[int, PrefillPlan] = {}
            self._adapter = _adapter(self)

        def supports_out(self) -> bool:
            return True

        def prepare_metadata(self, prefill_metadata: Any) -> None:
            """One plan for the new tokens and one a chunk of the context, for all layers."""
            super().prepare_metadata(prefill_metadata)
            starts, longest = prefill_metadata.query_start_loc, prefill_metadata.max_query_len
            host = _starts(prefill_metadata.query_lens_cpu)
            plan = self._adapter.plan
            self._new_tokens = plan(
                starts, starts, longest, longest, causal=True, cu_seqlens_q_cpu=host, cu_seqlens_k_cpu=host
            )
            context = prefill_metadata.chunked_context
            self._plans = {
                chunk.index: plan(
                    chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len, causal=False
                )
                for chunk in (context.chunks if context else ())
            }

        def run_prefill_new_tokens(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            return_softmax_lse: bool,
            out: torch.Tensor | None = None,
            output_scale: torch.Tensor | None = None,
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            """out (tokens, heads, v_head_dim), with the LSE float32 (heads, tokens), natural log, where asked for."""
            assert output_scale is None, "supports_quant_output is False"
            return self._new_tokens.run(q, k, v, out=out, return_lse=return_softmax_lse)

        def run_prefill_context_chunk(
            self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """As `run_prefill_new_tokens`, over one chunk of the context, without a mask."""
            return self._plans[chunk.index].run(q, k, v, out=out, return_lse=True)

    return Supplied


def _adapter(backend: Any) -> PrefillAdapter:
    """The adapter of one instance; vLLM makes one a layer, a few ms each, and runs those of its builders."""
    from mla_prefill.backends import load
    from mla_prefill.selector import NoBackendError

    selector = importlib.import_module("vllm.v1.attention.backends.mla.prefill.selector")
    dims = selector.MLADimensions(
        qk_nope_head_dim=backend.qk_nope_head_dim,
        qk_rope_head_dim=backend.qk_rope_head_dim,
        v_head_dim=backend.v_head_dim,
    )
    config = selector.MLAPrefillSelectorConfig(dtype=backend.vllm_config.model_config.dtype, mla_dimensions=dims)
    question = _question(_platform().get_device_capability(), config)
    if question is None:
        raise ValueError("mla-prefill supplies prefill on CUDA and CPU platforms, to models with MLA dims")
    decision = decide(*question, matrix_of(question[1]))
    if decision.chosen is None:
        raise NoBackendError(decision)
    return load(decision, num_heads=backend.num_heads, softmax_scale=backend.scale, device=_platform().device_type)


def _starts(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """int32 (sequences + 1,) on the host, from the lengths that vLLM keeps there."""
    import torch

    if lengths is None:
        return None
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
