"""How long an operator's hold is open: Esc releases it and F9 makes a halt of it. Pure."""

from __future__ import annotations

from typing import Final

from uvcc_console.core.snapshot import Snapshot

HOLD_S: Final = 3.0  # a hold becomes a halt after this long


def holding(snap: Snapshot, now: float) -> float | None:
    """Seconds left in which Esc releases and F9 commits; None when no hold of an operator is open."""
    h = snap.halt
    if h.mode != "hold" or h.drill or not h.nonce:
        return None
    left = h.asked + HOLD_S - now
    return left if left > 0 else None
