"""What would help: changes of environment or request, each of them tried before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator

from mla_prefill.capabilities import versions
from mla_prefill.selector.decision import Decision, Hint, Verdict
from mla_prefill.selector.engine import decide
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.request import Request

_CURABLE_BY_INSTALL = {
    "kernel-not-installed",
    "version-out-of-range",
    "known-bad",
    "dtype-unsupported",
    "feature-missing",
}
MAX_HINTS = 6


def hints(decision: Decision) -> tuple[Hint, ...]:
    """The hints that hold: applied, the named candidate becomes eligible."""
    found: dict[str, Hint] = {}
    for verdict in decision.verdicts:
        if verdict.verdict == "chosen":
            break  # what comes after the chosen one would not be better
        if verdict.verdict == "rejected":
            found.update((hint.text, hint) for hint in _for(decision, verdict))
    for verdict in decision.verdicts if decision.chosen is not None else ():
        if verdict.verdict == "rejected" and _before_chosen(decision, verdict):
            found.update((hint.text, hint) for hint in _for(decision, verdict))
    if decision.chosen is None:
        found.update((hint.text, hint) for hint in _nearest_dims(decision))
    return tuple(found.values())[:MAX_HINTS]


def _before_chosen(decision: Decision, verdict: Verdict) -> bool:
    order = decision.matrix.order_for(decision.arch, decision.request.dims)
    if order is None or decision.chosen is None or decision.chosen.kernel not in order.order:
        return False
    better = order.order[: order.order.index(decision.chosen.kernel)]
    return verdict.candidate.kernel in better


def _for(decision: Decision, verdict: Verdict) -> Iterator[Hint]:
    """Proposals for one rejected candidate; only those that make it eligible are given."""
    request, environment, kernel = decision.request, decision.environment, verdict.candidate.kernel
    codes = {reason.code for reason in verdict.reasons}
    proposals: list[tuple[str, Request, Environment]] = []
    if codes <= _CURABLE_BY_INSTALL and environment.packages is not None:
        for requirement in _requirements(decision, kernel):
            name, specifier = versions.split(requirement)
            version = versions.floor(specifier) or "0"
            installed = {**(environment.installed or {}), name: version}
            changed = environment.replace(installed=installed)
            proposals.append((f"install {requirement} for {verdict.candidate.backend}/{kernel}", request, changed))
    if codes == {"kernel-import-failed"}:
        broken = dict(environment.import_errors)
        for cell in decision.matrix.cells(decision.arch, request.dims):
            if cell.kernel.name == kernel:
                names = [offer.distribution for offer in cell.offers]
                left = {name: text for name, text in broken.items() if name not in names}
                repaired = [name for name in names if name in broken]
                text = f"reinstall {', '.join(repaired)} for the PyTorch at hand: {verdict.candidate.backend}/{kernel}"
                proposals.append((text, request, environment.replace(import_errors=left)))
    if "disabled-by-user" in codes:
        overrides = environment.overrides._replace(disable=())
        proposals.append((f"unset MLA_PREFILL_DISABLE for {kernel}", request, environment.replace(overrides=overrides)))
    if codes == {"dtype-unsupported"}:
        for dtype in verdict.candidate.dtypes:
            proposals.append(
                (f"dtype {dtype} for {verdict.candidate.backend}/{kernel}", _with(request, dtype=dtype), environment)
            )
    if codes == {"feature-missing"}:
        dropped = tuple(n for n in request.needs if n in verdict.candidate.provides)
        missing = ", ".join(sorted(set(request.needs) - set(dropped)))
        proposals.append((f"do without {missing}: {kernel}", _with(request, needs=dropped), environment))
    if codes == {"not-requested"} and decision.chosen is None:
        backend = verdict.candidate.backend
        changed = _with(request, backend=kernel, fa_version=None)
        proposals.append((f"ask for {backend}/{kernel} (or for nothing in particular)", changed, environment))
    for text, changed_request, changed_environment in proposals:
        if _eligible(kernel, decision, changed_request, changed_environment):
            yield Hint(text, kernel, changed_request, changed_environment)
            return


def _requirements(decision: Decision, kernel: str) -> list[str]:
    for cell in decision.matrix.cells(decision.arch, decision.request.dims):
        if cell.kernel.name == kernel:
            return [offer.requirement for offer in cell.offers]
    return []


def _eligible(kernel: str, decision: Decision, request: Request, environment: Environment) -> bool:
    again = decide(request, environment, decision.matrix)
    return any(v.candidate.kernel == kernel and v.verdict in ("chosen", "eligible") for v in again.verdicts)


def _nearest_dims(decision: Decision) -> Iterator[Hint]:
    """The closest dims of the matrix for which this same question has an answer."""
    request, matrix = decision.request, decision.matrix

    def distance(name: str) -> int:
        return sum(abs(a - b) for a, b in zip(matrix.blocks[name].dims, request.dims, strict=True))

    if matrix.block_for(request.dims) is not None:
        return
    for name in sorted(matrix.blocks, key=distance):
        changed = _with(request, dims=matrix.blocks[name].dims)
        if decide(changed, decision.environment, matrix).chosen is not None:
            text = f"the nearest dims with a backend here are {changed.dims} ({name}); add a block for {request.dims}"
            yield Hint(text, name, changed, decision.environment)
            return


def _with(request: Request, **changes: object) -> Request:
    return Request(**{**request._asdict(), **changes})  # type: ignore[arg-type]
