"""The answer: what was chosen, every reason against the others, and what would make it better."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_prefill.capabilities.matrix import Matrix
from mla_prefill.capabilities.model import Candidate, Kernel
from mla_prefill.selector.environment import Environment
from mla_prefill.selector.reasons import Reason
from mla_prefill.selector.request import Request

#: Features that have a kernel compute in another dtype than that of the request, which is then its output's.
COMPUTES_IN = {"fp8_query": "float8_e4m3fn"}


class Verdict(NamedTuple):
    """One candidate and the reasons against it. Eligible means: no reasons, or only ``lower-priority``."""

    candidate: Candidate
    verdict: str
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    @property
    def unasked(self) -> str | None:
        """What the question was for, where this is something else (``not-requested``)."""
        return next((str(reason.expected) for reason in self.reasons if reason.code == "not-requested"), None)

    def to_dict(self) -> dict[str, Any]:
        c = self.candidate
        return {
            "backend": c.backend,
            "kernel": c.kernel,
            "fa_version": c.fa_version,
            "verdict": self.verdict,
            "pad_v_to": c.pad_v_to,
            "requires": list(c.requires),
            "proof": c.proof,
            "proven": c.proven,
            "reasons": [r.to_dict() for r in self.reasons],
            "notes": list(self.notes),
        }


class Constraint(NamedTuple):
    """Something that narrowed the choice, and where it came from: ``argument`` or an environment variable."""

    name: str
    value: Any
    origin: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.origin})"


class Hint(NamedTuple):
    """What would make a rejected candidate eligible; it was tried before it is said."""

    text: str
    candidate: str
    request: Request
    environment: Environment


@dataclass(frozen=True)
class Decision:
    """A complete, immutable answer. ``verdicts`` has every kernel of the kernel sheet, best first."""

    request: Request
    environment: Environment
    arch: str
    chosen: Candidate | None
    verdicts: tuple[Verdict, ...]
    constraints: tuple[Constraint, ...]
    notes: tuple[str, ...]
    matrix: Matrix = field(repr=False)

    @property
    def compute_dtype(self) -> str | None:
        """The dtype that the chosen candidate computes in, which q, k and v are to have; None without one."""
        if self.chosen is None:
            return None
        request = self.request
        met = (*request.needs, *(wish for wish in request.prefers if wish not in self.unmet))
        return next((COMPUTES_IN[feature] for feature in met if feature in COMPUTES_IN), request.dtype)

    @property
    def unmet(self) -> tuple[str, ...]:
        """The features of ``Request.prefers`` that the chosen candidate does not provide."""
        provided = self.chosen.provides if self.chosen else frozenset(self.request.prefers)
        return tuple(wish for wish in self.request.prefers if wish not in provided)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A version of the chosen kernel's package that nobody checked; then what is computed in place of each of
        `unmet`, and what speaks against each kernel that could. A line each.
        """
        remarks = next((verdict.notes for verdict in self.verdicts if verdict.verdict == "chosen"), ())
        if not self.unmet:
            return remarks
        from mla_prefill.selector.hints import why_unmet  # evaluates the engine again

        return (*remarks, *(why_unmet(self, wish) for wish in self.unmet))

    @property
    def rejected(self) -> tuple[Verdict, ...]:
        """Every other candidate with its reasons, eligible ones (``lower-priority``) included."""
        return tuple(v for v in self.verdicts if v.verdict != "chosen")

    @property
    def kernel(self) -> Kernel:
        """The kernel sheet's entry of the chosen candidate."""
        if self.chosen is None:
            raise NoBackendError(self)
        return self.matrix.kernels[self.chosen.kernel]

    @property
    def hints(self) -> tuple[Hint, ...]:
        """Installs and versions that would make a better candidate eligible, each tried."""
        from mla_prefill.selector.hints import hints  # evaluates the engine again; only explaining needs it

        return hints(self)

    def one_line(self) -> str:
        """The decision in one short line, for an engine to put into any later error."""
        if self.chosen is None:
            return f"mla-prefill: no backend for {self.request.dims} {self.request.dtype} on {self.arch}"
        c = self.chosen
        provider = f" from {c.provider} {(self.environment.installed or {}).get(c.provider, '')}" if c.provider else ""
        how = f", V padded to {c.pad_v_to}" if c.pad_v_to else ""
        how += f", computes in {self.compute_dtype}" if self.compute_dtype != self.request.dtype else ""
        how += f", without {', '.join(self.unmet)}" if self.unmet else ""
        why = f"; {', '.join(map(str, self.constraints))}" if self.constraints else ""
        return (
            f"mla-prefill: {c.backend}/{c.kernel}{provider.rstrip()} for {self.request.dims} {self.request.dtype} on "
            f"{self.arch}{how} (row {c.source}{why})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `mla-prefill select`, whose keys and codes are stable; messages are for people."""
        return {
            "request": self.request.to_dict(),
            "arch": self.arch,
            "chosen": self.chosen.to_dict() if self.chosen else None,
            "candidates": [v.to_dict() for v in self.verdicts],
            "constraints": [c._asdict() for c in self.constraints],
            "notes": list(self.notes),
            "compute_dtype": self.compute_dtype,
            "unmet": list(self.unmet),
            "warnings": list(self.warnings),
            "hints": [h.text for h in self.hints],
            "matrix": {"fingerprint": self.matrix.fingerprint, "schema_version": self.matrix.schema_version},
        }

    def explain(self) -> str:
        """The whole story for people: what was chosen, what was turned down and why, what would be better."""
        request = self.request
        block = self.matrix.block_for(request.dims)
        name = f" ({block.name})" if block else ""
        lines = [f"dims {request.dims}{name}, {request.dtype}, on {self.arch} {self._machine()}".rstrip()]
        lines += [f"  asked: {c}" for c in self.constraints]
        lines += ["", *self._chosen_lines(), "", "turned down:", *self._rejected_lines()]
        if hints := self.hints:
            lines += ["", "what would change it:" if self.chosen else "what would help:"]
            lines += [f"  {hint.text}" for hint in hints]
        lines += [f"note: {note}" for note in self.notes] + [f"warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, "", f"matrix {self.matrix.fingerprint[:16]}"])

    def _rejected_lines(self) -> list[str]:
        """Each rejected kernel with its reasons; those that were not asked for share a line at the end."""
        width = max((len(v.candidate.kernel) for v in self.rejected), default=0)
        lines: list[str] = []
        for verdict in self._asked_for():
            texts = [f"{r.code}: {r.message}" + (f"  [{r.source}]" if r.source else "") for r in verdict.reasons]
            head = f"  {verdict.candidate.kernel:{width}}  "
            lines += [(head if i == 0 else " " * len(head)) + text for i, text in enumerate((*texts, *verdict.notes))]
        return [*lines, *self._unasked_lines()]

    def _asked_for(self) -> list[Verdict]:
        """The rejected ones but those that a forced backend or version leaves out."""
        return [v for v in self.rejected if not (self.constraints and v.unasked)]

    def _unasked_lines(self) -> list[str]:
        unasked: dict[str, list[str]] = {}
        for verdict in self.rejected:
            if self.constraints and verdict.unasked:
                unasked.setdefault(verdict.unasked, []).append(verdict.candidate.kernel)
        return [f"  not-requested ({what}): {', '.join(kernels)}" for what, kernels in unasked.items()]

    def _machine(self) -> str:
        environment = self.environment
        parts = [environment.device or "", environment.detected_by]
        parts.append("packages are no constraint" if environment.packages is None else "")
        return "(" + ", ".join(p for p in parts if p) + ")"

    def _chosen_lines(self) -> list[str]:
        c = self.chosen
        if c is None:
            return ["no backend is eligible"]
        lines = [
            f"chosen: {c.backend} with kernel {c.kernel}"
            + (f" (FlashAttention {c.fa_version})" if c.fa_version else "")
        ]
        if c.provider:
            lines.append(f"  provider: {c.provider} {(self.environment.installed or {}).get(c.provider, '')}".rstrip())
        if c.requires:
            lines.append(f"  requires: {', '.join(c.requires)}")
        lines.append(f"  computes in: {self.compute_dtype}")
        lines.append(f"  V: {'zero-padded to ' + str(c.pad_v_to) if c.pad_v_to else 'as it is'}")
        lines.append(f"  proof: {c.proof}{f' ({c.proven})' if c.proven else ''}   row: {c.source}")
        order = self.matrix.order_for(self.arch, self.request.dims)
        if order and self.request.policy != "measured":  # there a note says what the order rests on
            met = [wish for wish in self.request.prefers if wish not in self.unmet]
            lines.append(f"  order: {', '.join(met) + ' is preferred, then ' if met else ''}{order.source}")
        return lines


class NoBackendError(LookupError):
    """No candidate is eligible. ``decision`` has every reason; the text names the nearest ways out, each tried."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        super().__init__(decision)

    def __str__(self) -> str:
        decision = self.decision
        lines = [f"{decision.one_line().removeprefix('mla-prefill: ')}"]
        lines += [f"  asked: {c}" for c in decision.constraints]
        for verdict in decision._asked_for():
            lines.append(f"  {verdict.candidate.kernel}: " + "; ".join(r.message for r in verdict.reasons))
        lines += decision._unasked_lines()
        lines += [f"  try: {hint.text}" for hint in decision.hints]
        lines += [f"  note: {note}" for note in decision.notes]
        return "\n".join(lines)
