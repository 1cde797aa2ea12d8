"""How a program of ours ended that said nothing, in words that an operator can act on."""

from __future__ import annotations

import signal
from typing import Final

_SIGNALS: Final = {
    signal.SIGKILL: "SIGKILL: most often the system had no memory left",
    signal.SIGTERM: "SIGTERM: somebody stopped it, or this program with it",
    signal.SIGINT: "SIGINT: it was interrupted at the keyboard",
    signal.SIGHUP: "SIGHUP: its terminal was closed",
}


def ended_how(what: str, returncode: int) -> str:
    """``what`` ended by itself with a code, or by a signal: which, and what that usually means."""
    if returncode >= 0:
        return f"{what} ended with exit code {returncode} and said nothing"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"{what} was ended by signal {-returncode}"
    return f"{what} was ended by {_SIGNALS.get(number, number.name)}"
