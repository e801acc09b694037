"""What an installed vLLM says about MLA prefill, as one line of JSON: the child process of `drift`.

python -m mla_prefill.backends.drift_vllm '{"capabilities": [[9, 0]], "dims": [[128, 64, 128]], "backends": [...]}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

#: What vLLM's module of FLASH_ATTN imports from its own module of kernels.
_KERNELS = ("compile_flash_attn_varlen_func_from_specs",)


def ask(question: dict[str, Any]) -> dict[str, Any]:
    """``takes``: "MAJOR.MINOR DIMS" -> backend -> bool; ``orders``: the same key -> backends, best first; ``unasked``:
    backend -> why it cannot tell.
    """
    try:
        import torch
        import vllm
        import vllm.v1.attention.backends.fa_utils as kernels
        from vllm.platforms.interface import DeviceCapability, Platform
        from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
        from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
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
    for member in MLAPrefillBackendEnum:
        if member.name in question["backends"]:
            try:
                classes[member.name] = member.get_class()
            except Exception as error:  # a backend of another platform, or a broken one
                unasked[member.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    takes: dict[str, dict[str, bool]] = {}
    orders: dict[str, list[str]] = {}
    for major, minor in question["capabilities"]:
        capability = DeviceCapability(major, minor)
        for triple in question["dims"]:
            key, dims = f"{major}.{minor} {','.join(map(str, triple))}", MLADimensions(**_named(triple))
            takes[key] = _takes(classes, capability, dims, unasked)
            orders[key] = _order(Platform, classes, capability, MLAPrefillSelectorConfig(torch.bfloat16, dims))
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
        return classmethod(lambda cls, *_: tried.append(name) or ["asked for the order only"])

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
