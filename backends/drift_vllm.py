"""What an installed vLLM says about MLA prefill, as one line of JSON: the child process of `drift`.

python -m mla_prefill.backends.drift_vllm '{"capabilities": [[9, 0]], "dims": [[128, 64, 128]], "backends": [...]}'
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

_MODULES = (
    "torch",
    "vllm",
    "vllm.platforms.interface",
    "vllm.v1.attention.backends.fa_utils",
    "vllm.v1.attention.backends.mla.prefill.base",
    "vllm.v1.attention.backends.mla.prefill.registry",
    "vllm.v1.attention.backends.mla.prefill.selector",
)
#: What vLLM's module of FLASH_ATTN imports from its own module of kernels.
_KERNELS = ("compile_flash_attn_varlen_func_from_specs",)


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """``takes``: "MAJOR.MINOR DIMS" -> backend -> bool; ``orders``: the same key -> backends, best first; ``unasked``:
    backend -> why it cannot tell.
    """
    try:
        torch, vllm, platforms, kernels, base, registry, selector = map(importlib.import_module, _MODULES)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        return {"why_not": "not installed" if missing == "vllm" else f"no module {missing}: another version, or broken"}
    except Exception as error:
        return {"why_not": f"importing it raises {type(error).__name__}: {' '.join(str(error).split())}"}

    for kernel in _KERNELS:  # a build for the CPU leaves them out; the rules do not need them
        if not hasattr(kernels, kernel):
            setattr(kernels, kernel, None)
    classes: dict[str, Any] = {}
    unasked: dict[str, str] = {}
    for member in registry.MLAPrefillBackendEnum:
        if member.name in question["backends"]:
            try:
                classes[member.name] = member.get_class()
            except Exception as error:  # a backend of another platform, or a broken one
                unasked[member.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    takes: dict[str, dict[str, bool]] = {}
    orders: dict[str, list[str]] = {}
    for major, minor in question["capabilities"]:
        capability = platforms.DeviceCapability(major, minor)
        for triple in question["dims"]:
            key, dims = f"{major}.{minor} {','.join(map(str, triple))}", base.MLADimensions(**_named(triple))
            takes[key] = _takes(classes, capability, dims, unasked)
            config = selector.MLAPrefillSelectorConfig(torch.bfloat16, dims)
            orders[key] = _order(platforms.Platform, classes, capability, config)
    return {"version": vllm.__version__, "takes": takes, "orders": orders, "unasked": unasked}


def _named(triple: list[int]) -> dict[str, int]:
    return dict(zip(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), triple, strict=True))


def _takes(classes: dict[str, Any], capability: Any, dims: Any, unasked: dict[str, str]) -> dict[str, bool]:
    found = {}
    for name, backend in classes.items():
        try:
            found[name] = bool(
                backend.supports_compute_capability(capability) and backend.supports_mla_dimensions(dims)
            )
        except Exception as error:  # a check that asks its own platform, which is not here
            unasked[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return found


def _order(platform: Any, classes: dict[str, Any], capability: Any, config: Any) -> list[str]:
    """The backends in the order in which vLLM tries them: each refuses, and is noted."""
    tried: list[str] = []

    class Asked(platform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return capability

    def refuse(name: str) -> Any:
        def validate_configuration(cls: Any, *_: Any) -> list[str]:
            tried.append(name)
            return ["asked for the order only"]

        return classmethod(validate_configuration)

    before = {name: backend.__dict__.get("validate_configuration") for name, backend in classes.items()}
    for name, backend in classes.items():
        backend.validate_configuration = refuse(name)
    try:
        Asked.get_mla_prefill_backend_cls(config)
    except (ValueError, AttributeError):
        pass
    finally:
        for name, backend in classes.items():
            if before[name] is None:
                del backend.validate_configuration
            else:
                backend.validate_configuration = before[name]
    return tried


if __name__ == "__main__":
    print(json.dumps(ask(json.loads(sys.argv[1]))))
