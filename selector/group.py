"""One decision for many ranks: what every process of a `torch.distributed` group can run.

Every rank states its environment in one exchange; then each works out the same answer for itself. torch is not
imported here: a group exists only where something else has loaded it.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, overload

from mla_prefill.capabilities.matrix import Matrix, UnknownNameError
from mla_prefill.capabilities.model import Candidate
from mla_prefill.selector.decision import Decision, Hint, NoBackendError, Verdict
from mla_prefill.selector.engine import decide, here, matrix_of, require_types, select
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.reasons import Reason
from mla_prefill.selector.request import Request

T = TypeVar("T")


class GroupError(RuntimeError):
    """The ranks cannot be compared: other questions, other matrices, or a rank that cannot state its environment.

    Every rank of the group gets it with the same text, which names the ranks; only where the exchange itself fails is
    it each rank's own.
    """


@dataclass(frozen=True)
class GroupDecision(Decision):
    """The answer that every rank of a group gets, field by field.

    ``environment`` and ``arch`` are those of the first rank; a reason that does not hold everywhere names its ranks.
    ``ranks`` has each rank with its own answer, as if it were alone.
    """

    ranks: tuple[tuple[int, Decision], ...] = ()

    @property
    def hints(self) -> tuple[Hint, ...]:
        """What would help, rank by rank; each was tried on the rank that it names."""
        alike = _by_value((own.environment, rank) for rank, own in self.ranks)
        decisions = {own.environment: own for _, own in self.ranks}
        tried: dict[str, Hint] = {}
        helped: list[tuple[str, int]] = []
        for environment, ranks in alike.items():
            own = decisions[environment]
            # Where nothing fits all, what a rank chose for itself is no help: every candidate is worth having.
            for hint in (own if self.chosen else replace(own, chosen=None)).hints:
                tried.setdefault(hint.text, hint)
                helped += [(hint.text, rank) for rank in ranks]
        return tuple(
            tried[text]._replace(text=f"{_named(sorted(ranks))}: {text}") for text, ranks in _by_value(helped).items()
        )

    def one_line(self) -> str:
        where = f"{len(self.ranks)} ranks: {_spread((d.arch, rank) for rank, d in self.ranks)}"
        if self.chosen is None:
            return f"mla-prefill: no backend for {self.request.dims} {self.request.dtype} that fits {where}"
        return f"{super().one_line()}; agreed by {where}"


@overload
def select_for_group(
    request: Request,
    group: Any = ...,
    *,
    environment: Environment | None = ...,
    matrix: Matrix | None = ...,
    per_rank: Literal[False] = ...,
) -> Decision: ...
@overload
def select_for_group(
    request: Request,
    group: Any = ...,
    *,
    environment: Environment | None = ...,
    matrix: Matrix | None = ...,
    per_rank: Literal[True],
) -> tuple[Decision, ...]: ...
def select_for_group(
    request: Request,
    group: Any = None,
    *,
    environment: Environment | None = None,
    matrix: Matrix | None = None,
    per_rank: bool = False,
) -> Decision | tuple[Decision, ...]:
    """The best candidate that is eligible on every rank: one backend, kernel, V padding, package and version.

    A collective: every rank of the group calls it, with the same request. It costs one ``all_gather_object`` of a few
    hundred bytes a rank and is not cached; call it once at start. With NCCL each rank has a GPU of its own, by
    ``torch.cuda.set_device`` or ``device_id`` of ``init_process_group``.
    Without an initialised ``torch.distributed``, or in a group of one, it is `select`.

    Where the ranks' own orders differ (GPUs of two kinds), the candidate whose worst place on any rank is best wins;
    then the sum of places, then the first rank's order.

    Args:
        request: the question, the same on every rank.
        group: a ``torch.distributed`` process group; None: the default one.
        environment: what this rank contributes; None: this machine.
        matrix: None: the one in force, as for `select`.
        per_rank: every rank's own answer instead, in the order of the group's ranks; ``chosen`` is None for a rank
            that has no backend.

    Raises:
        NoBackendError: nothing is eligible on every rank; its text says which ranks lack what. The same on all ranks.
        GroupError: ranks asked different questions, have different matrices or mla-prefill versions, or could not read
            their environment or matrix. The same on all ranks.
    """
    if not _is_distributed(group):
        if not per_rank:
            return select(request, environment, matrix)
        environment = here() if environment is None else environment
        return (decide(request, environment, matrix_of(environment) if matrix is None else matrix),)
    cause: Exception | None = None
    try:
        require_types(request, environment, matrix)
        with _on_its_device(group):
            environment = here() if environment is None else environment
        matrix = matrix_of(environment) if matrix is None else matrix
        mine = _Statement(request, environment, _version(), matrix.fingerprint)
        pickle.dumps(mine)
    except Exception as error:  # raised below, after the exchange: the others wait in it
        cause, mine = error, _Statement(None, None, "", "", f"{type(error).__name__}: {error}")
    statements = _exchange(mine, group)
    try:
        _require_comparable(statements)
        assert matrix is not None  # a rank without one has said so, and nobody gets here
        own = tuple((rank, _decide_on(rank, said, matrix)) for rank, said in statements)
    except GroupError as error:
        raise error from cause
    if per_rank:
        return tuple(decision for _, decision in own)
    decision = _agree(own)
    if decision.chosen is None:
        raise NoBackendError(decision)
    return decision


# ---- the exchange ---------------------------------------------------------------------------------------------------


class _Statement(NamedTuple):
    """What a rank tells the others. Without an environment, ``failure`` says why."""

    request: Request | None
    environment: Environment | None
    version: str
    fingerprint: str
    failure: str | None = None


def _is_distributed(group: Any) -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    if dist.get_rank(group) < 0:
        raise GroupError("this process is not in the group; call select_for_group on the group's own ranks only")
    return bool(dist.get_world_size(group) > 1)


def _exchange(mine: _Statement, group: Any) -> list[tuple[int, _Statement]]:
    """(global rank, what it said) of the whole group, in the group's order."""
    dist: Any = sys.modules["torch.distributed"]
    said: list[Any] = [None] * dist.get_world_size(group)
    try:
        with _on_its_device(group):
            dist.all_gather_object(said, mine, group=group)
    except RuntimeError as error:
        why = next(iter(str(error).strip().splitlines()), "no message")
        raise GroupError(
            f"the ranks could not exchange what they have ({type(error).__name__}: {why}){_cure(str(error))}"
        ) from error
    return list(zip(dist.get_process_group_ranks(group), said, strict=True))


def _cure(why: str) -> str:
    """By torch's own words; where they say neither, the error stands alone."""
    if "Numpy" in why:
        return "; torch.distributed exchanges objects with the help of NumPy: install it on every rank"
    if "NCCL" in why:
        own = "torch.cuda.set_device(local_rank), or device_id= of init_process_group"
        return f". With NCCL each rank needs a GPU of its own: {own}"
    return ""


def _on_its_device(group: Any) -> AbstractContextManager[object]:
    """The device that the group was bound to: NCCL moves objects through the current one, which is 0 unless set."""
    torch: Any = sys.modules["torch"]
    bound = getattr(torch.distributed.group.WORLD if group is None else group, "bound_device_id", None)
    return nullcontext() if bound is None else torch.cuda.device(bound)


def _version() -> str:
    from importlib.metadata import version

    return version("mla-prefill")


def _require_comparable(statements: Sequence[tuple[int, _Statement]]) -> None:
    """Raises `GroupError` unless everybody asked the same question of the same matrix."""
    failures = [(said.failure, rank) for rank, said in statements if said.failure is not None]
    if failures:
        raise GroupError(f"ranks that cannot take part: {_spread(failures)}")
    for what, todo, of in _COMPARED:
        values = [(of(said), rank) for rank, said in statements]
        if len(dict(values)) > 1:
            raise GroupError(f"ranks {what}: {_spread(values)}; {todo}")


#: What has to be the same on all ranks: how a difference is told, what to do about it, and where it is.
_COMPARED: tuple[tuple[str, str, Callable[[_Statement], str]], ...] = (
    ("asked different questions", "give all of them the same Request", lambda said: str(_asked(said).to_dict())),
    ("run different versions of mla-prefill", "install the same one everywhere", lambda said: said.version),
    (
        "have different matrices",
        "set MLA_PREFILL_MATRIX to the same files, or reload() them, everywhere (mla-prefill env prints a fingerprint)",
        lambda said: said.fingerprint[:16],
    ),
)


def _asked(said: _Statement) -> Request:
    assert said.request is not None  # a rank without one has failed, and nobody gets here
    return said.request


def _decide_on(rank: int, said: _Statement, matrix: Matrix) -> Decision:
    assert said.environment is not None
    try:
        return decide(_asked(said), said.environment, matrix)
    except UnknownNameError as error:
        raise GroupError(f"rank {rank}: {error}") from error


# ---- the agreement --------------------------------------------------------------------------------------------------


def _agree(own: tuple[tuple[int, Decision], ...]) -> GroupDecision:
    """One decision from all ranks' own. Only packages that every rank has in the same version count."""
    first = own[0][1]
    shared = _shared_packages([decision.environment for _, decision in own])
    agreeing = [_with_packages(decision, shared) for _, decision in own]
    merged = sorted(
        (_merged(verdict.candidate.kernel, own, agreeing) for verdict in first.verdicts), key=lambda item: item[0]
    )
    best = merged[0][1]
    chosen = None if best.reasons else best.candidate
    verdicts = tuple(_ranked(verdict, best, first) for _, verdict in merged)
    constraints = _told(
        ((constraint, rank) for rank, decision in own for constraint in decision.constraints),
        len(own),
        lambda constraint, ranks: constraint._replace(origin=f"{constraint.origin} on {ranks}"),
    )
    notes = tuple(dict.fromkeys(note for decision in agreeing for note in decision.notes))
    return GroupDecision(
        first.request, first.environment, first.arch, chosen, verdicts, constraints, notes, first.matrix, own
    )


def _shared_packages(environments: Sequence[Environment]) -> dict[str, str] | None:
    """Packages that every rank has in the same version; where packages are no constraint, a rank has all."""
    stated = [set(environment.packages) for environment in environments if environment.packages is not None]
    return dict(set.intersection(*stated)) if stated else None


def _with_packages(decision: Decision, packages: dict[str, str] | None) -> Decision:
    environment = decision.environment
    if environment.installed == packages:
        return decision
    return decide(decision.request, environment.replace(installed=packages), decision.matrix)


def _merged(
    kernel: str, own: Sequence[tuple[int, Decision]], agreeing: Sequence[Decision]
) -> tuple[tuple[int, ...], Verdict]:
    """(sort key, one kernel's verdict for all ranks): every rank's reasons, or else what it runs as everywhere."""
    reasons = _told(
        (
            (reason, rank)
            for rank, decision in own
            for reason in _verdict(decision, kernel).reasons
            if reason.code != "lower-priority"
        ),
        len(own),
        lambda reason, ranks: reason._replace(subject=f"{reason.subject} on {ranks}"),
    )
    found = [_verdict(decision, kernel) for decision in agreeing]
    if not reasons and (any(v.verdict == "rejected" for v in found) or len({_runs_as(v.candidate) for v in found}) > 1):
        at_hand = _spread((_described(_verdict(decision, kernel).candidate, decision), rank) for rank, decision in own)
        wanted = "the same package and version on every rank"
        reasons = (Reason("version-out-of-range", kernel, wanted, at_hand, None),)
    places = [decision.verdicts.index(verdict) for decision, verdict in zip(agreeing, found, strict=True)]
    order = (1, places[0]) if reasons else (0, max(places), sum(places), places[0])
    notes = tuple(dict.fromkeys(note for verdict in found for note in verdict.notes))
    return order, Verdict(found[0].candidate, "rejected" if reasons else "eligible", reasons, notes)


def _ranked(verdict: Verdict, best: Verdict, first: Decision) -> Verdict:
    if verdict.reasons:
        return verdict
    if verdict is best:
        return verdict._replace(verdict="chosen")
    order = first.matrix.order_for(first.arch, first.request.dims)
    subject, winner = verdict.candidate.kernel, best.candidate.kernel
    reason = Reason("lower-priority", subject, winner, "this group", order.source if order else None)
    return verdict._replace(reasons=(reason,))


def _verdict(decision: Decision, kernel: str) -> Verdict:
    return next(verdict for verdict in decision.verdicts if verdict.candidate.kernel == kernel)


def _runs_as(candidate: Candidate) -> tuple[int | None, str | None]:
    """What has to be the same on all ranks, besides the kernel."""
    return (candidate.pad_v_to, candidate.provider)


def _described(candidate: Candidate, decision: Decision) -> str:
    version = (decision.environment.installed or {}).get(candidate.provider or "", "")
    pad = f" with V padded to {candidate.pad_v_to}" if candidate.pad_v_to else ""
    return f"{candidate.provider or 'any package'} {version}".rstrip() + pad


# ---- naming ranks ---------------------------------------------------------------------------------------------------


def _by_value(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """Value -> the ranks that have it, in order of appearance."""
    found: dict[T, list[int]] = {}
    for value, rank in pairs:
        ranks = found.setdefault(value, [])
        if rank not in ranks[-1:]:
            ranks.append(rank)
    return found


def _told(pairs: Iterable[tuple[T, int]], size: int, on: Callable[[T, str], T]) -> tuple[T, ...]:
    """Each value once: as it is where all ``size`` ranks have it, else ``on(value, "ranks 1, 2")``."""
    by_value = _by_value(pairs)
    return tuple(value if len(ranks) == size else on(value, _named(ranks)) for value, ranks in by_value.items())


def _spread(pairs: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{value} ({_named(ranks)})" for value, ranks in _by_value(pairs).items())


def _named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
