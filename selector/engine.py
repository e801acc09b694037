"""Selection: a pure function of request, environment and matrix.

Every constraint of every kernel is evaluated in the order of `reasons.REASONS`; no reasons means eligible.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.findings import MatrixError, nearest
from mla_prefill.capabilities.load import load_matrix
from mla_prefill.capabilities.matrix import Cell, Matrix, Offer, UnknownNameError
from mla_prefill.capabilities.model import Candidate
from mla_prefill.selector import renamed, telling
from mla_prefill.selector.decision import Constraint, Decision, NoBackendError, Verdict
from mla_prefill.selector.environment import VARIABLES, VISIBLE_DEVICES, Environment, Overrides
from mla_prefill.selector.reasons import Reason
from mla_prefill.selector.request import Request, RequestError

#: Decisions are small, and an engine asks a handful of questions. Who asks more than this starts anew.
CACHE_SIZE = 1024
_V = TypeVar("_V")


class _State:
    """Everything remembered between questions. It is replaced as a whole, so no thread ever sees half of a change."""

    def __init__(self, in_force: Matrix | None = None, path: str | None = None) -> None:
        self.in_force = in_force  # what `reload` was given; None: the environment's
        self.path = path
        self.epoch = object()
        self.answers: dict[Any, Decision] = {}
        self.here: dict[Any, Environment] = {}
        self.matrices: dict[str | None, Matrix] = {}


_state = _State()
#: Held while something is worked out, read or replaced. A fork waits for it: what a thread of the parent has half
#: imported or locked would stay so in the child for ever. Reentrant, since a signal's handler may `reload` meanwhile.
_working = threading.RLock()
os.register_at_fork(before=_working.acquire, after_in_parent=_working.release, after_in_child=_working.release)


def select(request: Request, environment: Environment | None = None, matrix: Matrix | None = None) -> Decision:
    """The backend for this request, with every reason against the others.

    Pure given all three arguments. Without ``environment`` it is this machine with its environment variables (read
    again whenever one of them changes); without ``matrix`` the one in force (see `reload`), what MLA_PREFILL_MATRIX
    names, or the shipped one. Answers are remembered; safe in threads and after fork. Each distinct decision is told
    once to the logger ``mla_prefill``.

    Raises:
        NoBackendError: nothing is eligible; it carries the decision.
        UnknownNameError: the request or an override names a backend, FA version or feature that nobody declared.
        MatrixError, OSError, EnvironmentVariableError: what was to be read cannot be used.
        RequestError, TypeError: the arguments are no request, environment and matrix.
    """
    state = _state
    # Where the machine is asked for, its answer hangs on the variables, and on what `clear` forgets.
    key: Any = (request, environment) if environment is not None else (request, state.epoch, *map(_raw_get, _READ))
    try:
        decision = (state if matrix is None else matrix).answers.get(key)
    except (AttributeError, TypeError):
        require_types(request, environment, matrix)
        raise
    if decision is None:
        with _working:
            decision = _asked_first(request, environment, matrix, state, key)
        telling.decision(decision)  # not under the lock: logging has one of its own, which a fork takes too
    if decision.chosen is None:
        raise NoBackendError(decision)
    return decision


def _asked_first(
    request: Request, environment: Environment | None, matrix: Matrix | None, state: _State, key: Any
) -> Decision:
    require_types(request, environment, matrix)
    if environment is None:
        environment = here(state)
        # The answer is not this machine's for good where a variable was changed meanwhile, or GPUs differ and another
        # one may become the current one.
        if environment.gpus_differ or key != (request, state.epoch, *map(_raw_get, _READ)):
            key = (request, environment)
    answers: dict[Any, Decision] = (state if matrix is None else matrix).answers
    decision = decide(request, environment, matrix_of(environment, state) if matrix is None else matrix)
    return _remember(answers, key, decision, CACHE_SIZE)


def require_types(request: Any, environment: Any, matrix: Any) -> None:
    """Raises RequestError or TypeError for what no question can be asked with."""
    if not isinstance(request, Request):
        raise RequestError(f"select takes a Request such as Request((64, 64, 128)), got {request!r}")
    if not (environment is None or isinstance(environment, Environment)):
        raise TypeError(f'environment must be an Environment such as Environment("sm90"), got {environment!r}')
    if not (matrix is None or isinstance(matrix, Matrix)):
        raise TypeError(f"matrix must be what load_matrix gives, such as load_matrix(path), got {matrix!r}")


def reload(path: str | Path | None = None) -> Matrix:
    """Reads the matrix again and puts it in force for every later question that names none; returns it.

    All or nothing: a matrix that cannot be read or fails its checks is logged (each failure once) and raised, and the
    one in force stays. Questions that are being answered meanwhile get the old one.

    Args:
        path: a matrix file or data folder, which from now on beats MLA_PREFILL_MATRIX. None: the one in force again.

    Raises:
        MatrixError, OSError: it cannot be used.
    """
    global _state
    with _working:  # of two reloads the later one wins
        given = _state.path if path is None else os.path.abspath(path)  # the working directory may change
        variable = Overrides.from_environ().matrix
        failure: MatrixError | OSError | None = None
        try:
            fresh = load_matrix(given) if given else _load_named(variable)
        except (MatrixError, OSError) as error:
            failure = error
        else:
            state = _State(fresh if given else None, given)
            state.matrices[given or variable] = fresh
            _state = state
    time.sleep(0)  # a lock is not fair: whoever waits for it gets it now, and not after many reloads in a row
    if failure is not None:
        # Its text alone: a log record that holds the error would hold all that was read.
        source = given or variable or "the shipped one"
        telling.warning("the matrix in force stays: %s cannot be used: %s", source, str(failure))
        try:
            raise failure
        finally:
            del failure  # it holds this frame, which would hold it
    return fresh


def clear() -> None:
    """Forgets decisions, the detected machine, matrices and what `reload` put in force."""
    global _state
    with _working:
        _state = _State()
        telling.clear()


# Reading variables through os.environ costs 0.5 us each, more than a remembered decision. The mapping underneath costs
# a tenth; where an interpreter has no such thing, os.environ itself is asked.
_raw_get = getattr(os.environ, "_data", os.environ).get
_encode = os.environ.encodekey if hasattr(os.environ, "_data") else str
#: Every variable that an answer about this machine hangs on.
_READ = tuple(map(_encode, (*VARIABLES, *renamed.VARIABLES, *VISIBLE_DEVICES)))


def here(state: _State | None = None) -> Environment:
    """This machine, detected once, and again when one of the variables changes, or always where its GPUs differ."""
    state = state or _state
    key = tuple(map(_raw_get, _READ))
    environment = state.here.get(key)
    if environment is None:
        environment = Environment.detect(matrix_in_force(state).distributions)
        if not environment.gpus_differ and key == tuple(map(_raw_get, _READ)):
            environment = _remember(state.here, key, environment, 16)
    return environment


def matrix_in_force(state: _State | None = None) -> Matrix:
    """The matrix for questions about this machine."""
    return matrix_named(Overrides.from_environ().matrix, state)


def matrix_of(environment: Environment, state: _State | None = None) -> Matrix:
    """The matrix for a question that names none."""
    return matrix_named(environment.overrides.matrix, state)


def matrix_named(path: str | None, state: _State | None = None) -> Matrix:
    """The matrix that `reload` put in force, else the one that a variable names, or the shipped one."""
    state = state or _state
    if state.in_force is not None:
        return state.in_force
    matrix = state.matrices.get(path)
    return _remember(state.matrices, path, _load_named(path), 16) if matrix is None else matrix


def _load_named(path: str | None) -> Matrix:
    """What the variable names, which a file that is not there cannot tell."""
    try:
        return load_matrix(path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} (MLA_PREFILL_MATRIX={path})", error.filename) from error


def _remember(cache: dict[Any, _V], key: Any, value: _V, size: int) -> _V:
    """Keeps a value, and gives every thread the same one. No lock: each step is one operation of the dictionary."""
    if len(cache) >= size:
        cache.clear()
    return cache.setdefault(key, value)


class _Asked(NamedTuple):
    """What narrows the choice after arguments have beaten overrides."""

    backend: str | None
    fa_version: int | None
    disable: tuple[str, ...]
    constraints: tuple[Constraint, ...]
    notes: tuple[str, ...]


def decide(request: Request, environment: Environment, matrix: Matrix) -> Decision:
    """`select` without cache and without raising: ``chosen`` is None where nothing is eligible."""
    require_types(request, environment, matrix)
    asked = _asked(request, environment, matrix)
    notes: tuple[str, ...] = asked.notes
    try:
        arch = matrix.arch(environment.arch)
    except UnknownNameError as unknown:  # hardware newer than the matrix is no error: no kernel runs there yet
        arch = environment.arch
        notes += (str(unknown),)
    installed = environment.installed
    errors = dict(environment.import_errors)
    cells = matrix.cells(arch, request.dims)
    weighed = [_weigh(cell, request, arch, asked, installed, errors) for cell in cells]
    if request.prefers:
        weigh = partial(_weigh, arch=arch, asked=asked, installed=installed, errors=errors)
        weighed = [
            v if v.reasons else _granting(v, cell, request, weigh) for v, cell in zip(weighed, cells, strict=True)
        ]
    eligible = [verdict for verdict in weighed if not verdict.reasons]
    order = matrix.order_for(arch, request.dims)
    source = order.source if order else None
    if request.policy == "measured":
        from mla_prefill.selector import measured  # profiles are read only for who asks for them

        eligible, source, more = measured.ordered(eligible, request, environment, arch, matrix, source)
        notes += more
    # The one exception to the order: what provides a preferred feature comes first, the most wanted feature deciding.
    eligible.sort(key=lambda verdict: [wish not in verdict.candidate.provides for wish in request.prefers])
    chosen = eligible[0].candidate if eligible else None
    verdicts = [verdict._replace(verdict="chosen") for verdict in eligible[:1]]
    for verdict in eligible[1:]:
        reason = _lower(verdict.candidate, eligible[0].candidate, request, arch, source)
        verdicts.append(verdict._replace(verdict="eligible", reasons=(reason,)))
    verdicts += [verdict for verdict in weighed if verdict.reasons]
    return Decision(request, environment, arch, chosen, tuple(verdicts), asked.constraints, notes, matrix)


def _granting(verdict: Verdict, cell: Cell, request: Request, weigh: Callable[[Cell, Request], Verdict]) -> Verdict:
    """An eligible kernel as it provides what is preferred, where asking for that as a need leaves it eligible."""
    refused = set()
    for wish in request.prefers:
        needing = request._replace(needs=tuple(sorted((*request.needs, wish))))
        if (granting := weigh(cell, needing)).reasons:
            refused.add(wish)  # it may have the feature, and be known bad with it
        else:
            verdict, request = granting, needing
    candidate = verdict.candidate
    return verdict._replace(candidate=replace(candidate, provides=candidate.provides - refused))


def _lower(candidate: Candidate, first: Candidate, request: Request, arch: str, source: str | None) -> Reason:
    """Why an eligible candidate is not the chosen one: the order, or a preferred feature that it lacks."""
    lacks = [wish for wish in request.prefers if wish in first.provides and wish not in candidate.provides]
    where = f"{arch}, where {', '.join(lacks)} is preferred" if lacks else arch
    return Reason("lower-priority", candidate.kernel, first.kernel, where, None if lacks else source)


def _asked(request: Request, environment: Environment, matrix: Matrix) -> _Asked:
    backend, fa_version, overrides = request.backend, request.fa_version, environment.overrides
    constraints = []
    if backend is not None:
        constraints.append(Constraint("backend", backend, "argument"))
    if fa_version is not None:
        constraints.append(Constraint("fa_version", fa_version, "argument"))
    # An argument beats the variable for the same thing, and one for the other thing where both cannot hold.
    notes = []
    argument = constraints[0] if constraints else None
    for name, value, variable in (
        ("backend", overrides.backend, "MLA_PREFILL_BACKEND"),
        ("fa_version", overrides.fa_version, "MLA_PREFILL_FA_VERSION"),
    ):
        if value is None:
            continue
        given = {"backend": request.backend, "fa_version": request.fa_version}[name]
        if given is not None:
            if given != value:
                notes.append(f"{variable}={value} is not used: the request asks for {name} {given}")
            continue
        both: dict[str, Any] = {"backend": backend, "fa_version": fa_version, name: value}
        if argument is not None and not _can_hold(matrix, **both):
            notes.append(f"{variable}={value} is not used: the request asks for {argument.name} {argument.value}")
            continue
        backend, fa_version = both["backend"], both["fa_version"]
        constraints.append(Constraint(name, value, f"environment variable {variable}"))
    if overrides.disable:
        constraints.append(
            Constraint("disable", ", ".join(overrides.disable), "environment variable MLA_PREFILL_DISABLE")
        )
    for name, features in (("needs", request.needs), ("prefers", request.prefers)):
        if features:
            constraints.append(Constraint(name, ", ".join(features), "argument"))
    asked = _Asked(backend, fa_version, overrides.disable, tuple(constraints), tuple(notes))
    _require_known(asked, request, matrix)
    return asked


def _can_hold(matrix: Matrix, backend: Any, fa_version: Any) -> bool:
    """Whether some kernel of this backend (or this kernel) has this FlashAttention version."""
    named = [k for k in matrix.kernels.values() if backend in (k.backend, k.name)]
    return any(k.fa_version == fa_version for k in named) or not named


def _require_known(asked: _Asked, request: Request, matrix: Matrix) -> None:
    names = (*matrix.backends, *matrix.kernels)
    origins = {c.name: c.origin for c in asked.constraints}
    for what, given in (("backend", () if asked.backend is None else (asked.backend,)), ("disable", asked.disable)):
        for name in given:
            if name not in names:
                if gone := renamed.BACKENDS.get(name):
                    raise UnknownNameError(f"backend {name} ({origins[what]}) was {gone}")
                unknown = f"unknown backend {name!r} ({origins[what]}), which this matrix does not support"
                raise UnknownNameError(f"{unknown}; {nearest(name, names)}")
    if asked.fa_version is not None and asked.fa_version not in matrix.fa_versions:
        known = ", ".join(map(str, matrix.fa_versions))
        raise UnknownNameError(
            f"no kernel has FlashAttention version {asked.fa_version} ({origins['fa_version']}); known: {known}"
        )
    for feature in (*request.needs, *request.prefers):
        if feature not in matrix.features:
            raise UnknownNameError(f"unknown feature {feature!r}; {nearest(feature, matrix.features)}")
    if None not in (asked.backend, asked.fa_version) and not _can_hold(matrix, asked.backend, asked.fa_version):
        raise UnknownNameError(
            f"{asked.backend} ({origins['backend']}) has no FlashAttention version {asked.fa_version} "
            f"({origins['fa_version']}); give one of the two"
        )


def _weigh(
    cell: Cell,
    request: Request,
    arch: str,
    asked: _Asked,
    installed: dict[str, str] | None,
    errors: dict[str, str],
) -> Verdict:
    """Every reason against one kernel, and the candidate as this environment would run it."""
    kernel, candidate = cell.kernel, cell.candidate
    subject = f"FA{kernel.fa_version}" if kernel.fa_version else kernel.name
    reasons: list[Reason] = []
    notes: tuple[str, ...] = ()
    if (asked.fa_version is not None and kernel.fa_version != asked.fa_version) or (
        asked.backend is not None and asked.backend not in (kernel.backend, kernel.name)
    ):
        wanted = "the request is for " + (asked.backend or f"FlashAttention {asked.fa_version}")
        reasons.append(Reason("not-requested", subject, wanted, kernel.backend, None))
    elif cell.order is not None and cell.on_request is not None and asked.backend is None and asked.fa_version is None:
        policy = f"on {arch} it is used on request only (policy: {cell.on_request})"
        reasons.append(Reason("not-requested", subject, policy, kernel.backend, cell.order.source))
    if disabled := tuple(name for name in asked.disable if name in (kernel.backend, kernel.name)):
        reasons.append(
            Reason("disabled-by-user", subject, "MLA_PREFILL_DISABLE=" + ",".join(disabled), kernel.name, None)
        )
    if cell.limit is None:
        reasons.append(Reason("arch-unsupported", subject, kernel.arch, arch, kernel.source))
        return Verdict(candidate, "rejected", tuple(reasons))
    if cell.fit is None:
        pair = f"(qk {request.dims.qk_head_dim}, v {request.dims.v_head_dim})"
        reasons.append(Reason("dims-unsupported", subject, f"{cell.limit} on {arch}", pair, cell.limit.source))
    elif cell.row is None:
        why, source = _why_not(cell)
        reasons.append(Reason("no-rule", subject, why, f"{request.dims} on {arch}", source))
    if request.dtype not in candidate.dtypes:
        reasons.append(Reason("dtype-unsupported", subject, candidate.dtypes, request.dtype, cell.limit.source))
    if missing := tuple(need for need in request.needs if need not in candidate.provides):
        reasons.append(Reason("feature-missing", subject, candidate.provides, missing, kernel.source))
    if cell.fit is not None:
        stated = {reason.code for reason in reasons}
        offer, against = _offer(cell, request, subject, arch, installed, errors)
        reasons += [reason for reason in against if reason.code not in stated]
        if offer is not None:
            candidate = offer.described if installed is None else offer.installed
            if offer.known_bad:
                candidate = replace(candidate, requires=(offer.requirement_for(request.dtype, request.needs),))
            notes = _notes(offer, installed)
    return Verdict(candidate, "rejected" if reasons else "eligible", tuple(reasons), notes)


def _why_not(cell: Cell) -> tuple[str, str | None]:
    """The reason and place on record; for most cells nobody has written a row yet, and there is none."""
    return (cell.not_allowed.reason, cell.not_allowed.source) if cell.not_allowed else ("deny by default", None)


def _offer(
    cell: Cell, request: Request, subject: str, arch: str, installed: dict[str, str] | None, errors: dict[str, str]
) -> tuple[Offer | None, list[Reason]]:
    """The first provider without reasons against it; else the reasons against those that are at hand."""
    source = cell.kernel.source
    if not cell.offers:
        shipped = tuple(dict.fromkeys(a for p in cell.kernel.providers for a in p.arch or ()))
        return None, [Reason("arch-unsupported", subject, f"{', '.join(shipped)} as packages ship it", arch, source)]
    against: list[Reason] = []
    for offer in cell.offers:
        version = None
        if installed is not None:
            version = installed.get(offer.distribution)
            if version is None:
                continue
        reasons = _against(offer, version, request, subject, errors)
        if not reasons:
            return offer, []
        against += reasons
    if not against:
        wanted = " or ".join(offer.requirement_for(request.dtype, request.needs) for offer in cell.offers)
        against = [Reason("kernel-not-installed", subject, wanted, None, cell.offers[0].provider.source)]
    return None, against


def _against(offer: Offer, version: str | None, request: Request, subject: str, errors: dict[str, str]) -> list[Reason]:
    """Everything against one provider, installed at ``version`` (None: packages are no constraint)."""
    name, source, runs = offer.distribution, offer.provider.source, offer.described
    reasons: list[Reason] = []
    if request.dtype not in runs.dtypes:
        reasons.append(Reason("dtype-unsupported", f"{subject} of {name}", runs.dtypes, request.dtype, source))
    if request.needs and (missing := tuple(need for need in request.needs if need not in runs.provides)):
        reasons.append(Reason("feature-missing", f"{subject} of {name}", runs.provides, missing, source))
    if version is not None:
        if name in errors:
            reasons.append(Reason("kernel-import-failed", subject, errors[name], f"{name} {version}", source))
        if not versions.contains(offer.specifier, version):
            reasons.append(Reason("version-out-of-range", subject, name + offer.specifier, version, source))
    for bad in offer.known_bad:
        if not bad.matters(request.dtype, request.needs):
            continue
        # Without installed versions only a defect of every version counts; a bounded one shows in `requires`.
        every = version is None and versions.covers(bad.version, offer.specifier)
        if every or (version is not None and versions.contains(bad.version, version)):
            reasons.append(Reason("known-bad", subject, bad.reason, f"{name}{bad.version or ' (all)'}", bad.source))
    return reasons


def _notes(offer: Offer, installed: dict[str, str] | None) -> tuple[str, ...]:
    verified = offer.provider.verified
    if installed is None or not verified or versions.contains(verified, installed[offer.distribution]):
        return ()
    version = installed[offer.distribution]
    return (f"unverified version: {offer.distribution} {version}; this sheet was checked with {verified}",)
