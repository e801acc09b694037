"""mla-prefill: which attention kernel may prefill an MLA model on this GPU, and why.

    from mla_prefill import MLADimensions, Request, select

    decision = select(Request(dims=MLADimensions(64, 64, 128)))
    print(decision.explain())

Importing this imports neither torch nor a kernel nor a YAML reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_prefill.capabilities import Candidate, Matrix, MatrixError, MLADimensions, UnknownNameError, load_matrix
from mla_prefill.selector import (
    BatchShape,
    Decision,
    Environment,
    EnvironmentVariableError,
    GroupDecision,
    GroupError,
    NoBackendError,
    NotMLAError,
    Overrides,
    Reason,
    Request,
    RequestError,
    clear,
    reload,
    select,
    select_for_group,
)

if TYPE_CHECKING:
    from mla_prefill.backends import load, load_measured, merge_attention_states

__all__ = [
    "BatchShape",
    "Candidate",
    "Decision",
    "Environment",
    "EnvironmentVariableError",
    "GroupDecision",
    "GroupError",
    "MLADimensions",
    "Matrix",
    "MatrixError",
    "NoBackendError",
    "NotMLAError",
    "Overrides",
    "Reason",
    "Request",
    "RequestError",
    "UnknownNameError",
    "__version__",
    "clear",
    "load",
    "load_matrix",
    "load_measured",
    "merge_attention_states",
    "reload",
    "select",
    "select_for_group",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "load_measured", "merge_attention_states"):
        from mla_prefill import backends

        return getattr(backends, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("mla-prefill")
    from mla_prefill.selector import renamed

    if (now := renamed.name(name)) is not None:
        return globals()[now] if now in globals() else __getattr__(now)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
