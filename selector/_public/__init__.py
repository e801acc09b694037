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
    from mla_prefill.backends import KernelError, load, load_measured, merge_attention_states
    from mla_prefill.capabilities.configs import ConfigError, UnknownModelError
    from mla_prefill.capabilities.propose import NothingToAddError as NothingToAddError
    from mla_prefill.capabilities.propose import ProposalError as ProposalError
    from mla_prefill.capabilities.revisions import RevisionError as RevisionError

#: Public names of modules that a query does not need -> where they are. Those whose modules read YAML are not in
#: ``__all__``: ``import *`` would load it.
_LATER = {
    "ConfigError": "capabilities.configs",
    "KernelError": "backends",
    "NothingToAddError": "capabilities.propose",
    "ProposalError": "capabilities.propose",
    "RevisionError": "capabilities.revisions",
    "UnknownModelError": "capabilities.configs",
    "load": "backends",
    "load_measured": "backends",
    "merge_attention_states": "backends",
}

__all__ = [
    "BatchShape",
    "Candidate",
    "ConfigError",
    "Decision",
    "Environment",
    "EnvironmentVariableError",
    "GroupDecision",
    "GroupError",
    "KernelError",
    "MLADimensions",
    "Matrix",
    "MatrixError",
    "NoBackendError",
    "NotMLAError",
    "Overrides",
    "Reason",
    "Request",
    "RequestError",
    "UnknownModelError",
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
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"mla_prefill.{_LATER[name]}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("mla-prefill")
    from mla_prefill.selector import renamed

    if (now := renamed.name(name)) is not None:
        return globals()[now] if now in globals() else __getattr__(now)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
