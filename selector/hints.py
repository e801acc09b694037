"""What would help: changes of environment or request, each of them tried before it is proposed.

And why a preferred feature is not provided.
"""

from __future__ import annotations

from collections.abc import Iterator

from mla_prefill.capabilities import versions
from mla_prefill.capabilities.matrix import Offer
from mla_prefill.selector.decision import COMPUTES_IN, Decision, Hint, Verdict
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import Request

MAX_HINTS = 6
CURED_BY_AN_INSTALL = {
    "kernel-not-installed",
    "version-out-of-range",
    "known-bad",
    "dtype-unsupported",
    "feature-missing",
}
Proposal = tuple[str, Request, Environment]


def hints(decision: Decision) -> tuple[Hint, ...]:
    """The hints that hold: applied, the named candidate becomes eligible. At most `MAX_HINTS`, best candidate first."""
    found = [hint for wish in decision.unmet for hint in _granted(decision, wish)]
    found += [hint for verdict in _worth_having(decision) for hint in tried(decision, verdict)]
    if decision.chosen is None:
        found += _nearest_dims(decision)
    distinct: dict[tuple[Request, Environment], Hint] = {}
    for hint in found:  # one change helps many candidates; it is told for the best one
        distinct.setdefault((hint.request, hint.environment), hint)
    return tuple(distinct.values())[:MAX_HINTS]


def why_unmet(decision: Decision, wish: str) -> str:
    """Why a preferred feature is not provided: the reasons against each kernel that can provide it at all."""
    request, kernels, chosen = decision.request, decision.matrix.kernels, decision.kernel
    needing = {verdict.candidate.kernel: verdict for verdict in _needing(decision, wish).verdicts}
    against = [
        reason.message
        for verdict in decision.verdicts
        if wish in kernels[verdict.candidate.kernel].provides
        for reason in (verdict if verdict.verdict == "rejected" else needing[verdict.candidate.kernel]).reasons
    ]
    stays = f", so q, k and v stay in {decision.compute_dtype}" if wish in COMPUTES_IN else ""
    why = "; ".join(against) or "no kernel provides it"
    return f"{wish} is preferred, but {chosen.label} for {request.dims} on {decision.arch} is without{stays}: {why}"


def _needing(decision: Decision, wish: str) -> Decision:
    """The same question with a wish as a need, beside the earlier wishes that are met."""
    request = decision.request
    earlier = request.prefers[: request.prefers.index(wish)]
    needed = (*request.needs, *(other for other in earlier if other not in decision.unmet), wish)
    return decide(_changed(request, needs=needed), decision.environment, decision.matrix)


def _granted(decision: Decision, wish: str) -> Iterator[Hint]:
    """What would let the chosen kernel itself provide a wish: changes of the environment, never of the question."""
    again = _needing(decision, wish)
    for verdict in again.verdicts:
        if verdict.candidate.kernel == decision.kernel.name and verdict.verdict == "rejected":
            for hint in tried(again, verdict):
                if hint.request == again.request:
                    yield hint._replace(request=decision.request)


def _worth_having(decision: Decision) -> list[Verdict]:
    """The rejected candidates that would be better than what was chosen: what was asked for, then best first."""
    rejected = sorted((v for v in decision.verdicts if v.verdict == "rejected"), key=lambda v: v.unasked is not None)
    order = decision.matrix.order_for(decision.arch, decision.request.dims)
    if decision.chosen is None or order is None or decision.chosen.kernel not in order.order:
        return rejected
    better = order.order[: order.order.index(decision.chosen.kernel)]
    return [v for v in rejected if v.candidate.kernel in better or not v.candidate.provides.isdisjoint(decision.unmet)]


def tried(decision: Decision, verdict: Verdict) -> Iterator[Hint]:
    """The first proposal that makes this candidate eligible, if any does."""
    kernel = verdict.candidate.kernel
    for text, request, environment in _proposals(decision, verdict):
        again = decide(request, environment, decision.matrix)
        if any(v.candidate.kernel == kernel and v.verdict in ("chosen", "eligible") for v in again.verdicts):
            yield Hint(text, kernel, request, environment)
            return


def _proposals(decision: Decision, verdict: Verdict) -> Iterator[Proposal]:
    """What could cure all reasons against this candidate together."""
    request, environment, candidate = decision.request, decision.environment, verdict.candidate
    name = f"{candidate.backend}/{candidate.kernel}"
    codes = {reason.code for reason in verdict.reasons}
    offers = _offers(decision, candidate.kernel)
    ask, which = "", f": {name}"
    if "not-requested" in codes:
        codes.remove("not-requested")
        overrides = environment.overrides._replace(backend=None, fa_version=None)
        request = _changed(request, backend=candidate.kernel, fa_version=None)
        environment = environment.replace(overrides=overrides)
        ask = f"ask for {name}"
        if not codes:
            yield ask, request, environment
            return
        ask, which = f"{ask} and ", ""
    if codes <= CURED_BY_AN_INSTALL and environment.packages is not None:
        for offer in offers:
            requirement = offer.requirement_for(request.dtype, request.needs)
            version = versions.floor(versions.split(requirement)[1]) or "0"
            installed = {**(environment.installed or {}), offer.distribution: version}
            text = f"{ask}install {requirement}" + ("" if ask else f" for {name}")
            yield text, request, environment.replace(installed=installed)
    if codes == {"kernel-import-failed"}:
        broken = dict(environment.import_errors)
        repaired = [offer.distribution for offer in offers if broken.pop(offer.distribution, None)]
        text = f"{ask}reinstall {', '.join(repaired)} for the PyTorch at hand{which}"
        yield text, request, environment.replace(import_errors=broken)
    if codes == {"disabled-by-user"}:
        overrides = environment.overrides._replace(disable=())
        yield f"{ask}unset MLA_PREFILL_DISABLE{which}", request, environment.replace(overrides=overrides)
    if codes == {"dtype-unsupported"}:
        for dtype in candidate.dtypes:
            yield f"{ask}use dtype {dtype}{which}", _changed(request, dtype=dtype), environment
    if codes == {"feature-missing"}:
        kept = tuple(need for need in request.needs if need in candidate.provides)
        missing = ", ".join(sorted(set(request.needs) - set(kept)))
        yield f"{ask}do without {missing}{which}", _changed(request, needs=kept), environment


def _offers(decision: Decision, kernel: str) -> tuple[Offer, ...]:
    cells = decision.matrix.cells(decision.arch, decision.request.dims)
    return next(cell.offers for cell in cells if cell.kernel.name == kernel)


def _nearest_dims(decision: Decision) -> Iterator[Hint]:
    """The closest dims of the matrix for which this same question has an answer."""
    request, matrix = decision.request, decision.matrix
    if matrix.block_for(request.dims) is not None:
        return
    nearest = sorted(
        matrix.blocks.values(), key=lambda b: sum(abs(x - y) for x, y in zip(b.dims, request.dims, strict=True))
    )
    for block in nearest:
        changed = _changed(request, dims=block.dims)
        if decide(changed, decision.environment, matrix).chosen is not None:
            text = (
                f"the nearest dims with a backend here are {block.dims} ({block.name}); for {request.dims} add a block"
            )
            yield Hint(text, block.name, changed, decision.environment)
            return


def _changed(request: Request, **changes: object) -> Request:
    return Request(**{**request._asdict(), **changes})
