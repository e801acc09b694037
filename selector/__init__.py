"""Selection: requests, environments, decisions."""

from __future__ import annotations

from mla_prefill.selector.decision import Constraint, Decision, Hint, NoBackendError, Verdict
from mla_prefill.selector.engine import clear, decide, reload, select
from mla_prefill.selector.environment import Environment, EnvironmentVariableError, Overrides
from mla_prefill.selector.group import GroupDecision, GroupError, select_for_group
from mla_prefill.selector.reasons import Reason
from mla_prefill.selector.request import BatchShape, NotMLAError, Request, RequestError

__all__ = [
    "BatchShape",
    "Constraint",
    "Decision",
    "Environment",
    "EnvironmentVariableError",
    "GroupDecision",
    "GroupError",
    "Hint",
    "NoBackendError",
    "NotMLAError",
    "Overrides",
    "Reason",
    "Request",
    "RequestError",
    "Verdict",
    "clear",
    "decide",
    "reload",
    "select",
    "select_for_group",
]
