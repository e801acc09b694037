"""Trouble of the machine: memory, disk, network, tools, signals from outside. It says nothing about a kernel.

What failed so is not tried to the end (``ok`` null) and no evidence against the kernel.
"""

from __future__ import annotations

import signal

#: By these a process ends itself: a crash of what it runs. Any other signal came from outside (SIGKILL: out of memory).
OWN_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,
)
#: What libraries and tools say: PyTorch, CUDA and its driver API, C++, the system, nvcc about a killed compiler.
SIGNS = ("out of memory", "bad_alloc", "no space left on device", "quota exceeded", "died due to signal 9")


def told(text: str) -> bool:
    """Whether an error's text is about the machine."""
    return any(sign in text.lower() or sign.replace(" ", "_") in text.lower() for sign in SIGNS)


def raised(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, is of the machine.

    An OSError is: a full disk, a download, no compiler. But a bare one without a number is the dynamic loader's, about
    a library that the package lacks or that does not match: a fact about the package, as an ImportError is.
    """
    while error is not None:
        of_the_loader = type(error) is OSError and error.errno is None
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and not of_the_loader) or told(str(error)):
            return True
        error = error.__cause__
    return False


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
