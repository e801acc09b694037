"""Why a kernel was not chosen: one catalogue of codes, and texts made from the data that decided."""

from __future__ import annotations

from typing import Any, NamedTuple

#: code -> how its text is made. The order is the order in which constraints are evaluated.
REASONS: dict[str, str] = {
    "not-requested": "{subject} was not asked for: {expected}",
    "disabled-by-user": "{subject} is disabled by {expected}",
    "arch-unsupported": "{subject} runs on {expected}, not on {actual}",
    "dims-unsupported": "{subject} takes {expected}; got {actual}",
    "no-rule": "no row allows {subject} for {actual}: {expected}",
    "dtype-unsupported": "{subject} computes in {expected}, not in {actual}",
    "feature-missing": "{subject} provides {expected}, not {actual}",
    "kernel-not-installed": "{subject} is not installed; it comes with {expected}",
    "kernel-import-failed": "{actual} is installed for {subject} but cannot be imported: {expected}",
    "version-out-of-range": "{subject} needs {expected}; installed is {actual}",
    "known-bad": "{subject} is known bad here: {expected} (versions {actual})",
    "lower-priority": "{expected} comes before {subject} on {actual}",
}

#: For the generated docs page: what each code means and what to do about it.
MEANINGS: dict[str, str] = {
    "not-requested": "Another backend or FlashAttention version was asked for, or this kernel is used on request only.",
    "disabled-by-user": "MLA_PREFILL_DISABLE or the environment's overrides name it.",
    "arch-unsupported": "The kernel, or every package that provides it, has no code for this architecture.",
    "dims-unsupported": "The kernel cannot take this (qk, v) pair, natively or with V padded.",
    "no-rule": "The kernel could run it, but no row of the matrix allows it: deny by default.",
    "dtype-unsupported": "The kernel, or every installed build of it, does not compute in this dtype.",
    "feature-missing": "Something in Request.needs is not provided.",
    "kernel-not-installed": "None of the packages that provide it is installed.",
    "kernel-import-failed": "A package that provides it is installed, and importing it raises.",
    "version-out-of-range": "The installed version cannot run this cell.",
    "known-bad": "This version is known to give wrong results or to crash for this cell.",
    "lower-priority": "It is eligible; another candidate comes first.",
}

#: What to do about each.
CURES: dict[str, str] = {
    "not-requested": "Ask for it by name: `--backend`",
    "disabled-by-user": "Unset the variable",
    "arch-unsupported": "Nothing on this GPU",
    "dims-unsupported": "Another kernel; the text says what it takes",
    "no-rule": "[Add a row](../CONTRIBUTING.md#a-models-dims), or lay your own over the matrix",
    "dtype-unsupported": "Another dtype, or another package",
    "feature-missing": "Do without it, or another kernel",
    "kernel-not-installed": "Install one of those named",
    "kernel-import-failed": "Reinstall it for the PyTorch at hand; `mla-prefill env --probe` shows the error",
    "version-out-of-range": "Install a version in the range named",
    "known-bad": "Install a version outside the range named",
    "lower-priority": "Nothing, or ask for it by name",
}


class Reason(NamedTuple):
    """One reason against one kernel: a code, what was expected, what was found, and the row that says so."""

    code: str
    subject: str
    expected: Any
    actual: Any
    source: str | None

    @property
    def message(self) -> str:
        """The text, derived from the data."""
        return REASONS[self.code].format(subject=self.subject, expected=_text(self.expected), actual=_text(self.actual))

    def to_dict(self) -> dict[str, str | None]:
        return {"code": self.code, "message": self.message, "source": self.source}


def _text(value: Any) -> str:
    if isinstance(value, tuple | list | frozenset | set) and not hasattr(value, "_fields"):
        items = [str(v) for v in (sorted(value) if isinstance(value, frozenset | set) else value)]
        return ", ".join(items) if items else "nothing"
    return str(value)
