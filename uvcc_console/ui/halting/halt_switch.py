"""What a press of F9 means. Pure: times, the snapshot and the rhythm of the keys come in, a decision goes out.

The first press holds (it can be undone), a second one commits, and a hold nobody released commits by itself in
``haltd``. Terminals tell neither key releases nor repeats, so rhythm is all there is: keys closer than 20 ms are pasted
or scripted, F9 again within 150 ms is a repeating key and not a second decision.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.ui.halting.keyboard import PASTE_GAP_S
from uvcc_console.ui.judging.view import holding, unknown_after_halt

SECOND_PRESS_S = 0.150
REPEAT_S = 0.120
AFTER_PASTE_S = 0.3
PASTE_WAIT_S = 0.15  # a guarded key acts when no other key follows it for so long, on a busy machine too


class Cadence:
    """The rhythm of the keyboard: how many keys in a row came faster than fingers can.

    Keys are noted as they come in, and may wait before they are acted on: ``begin`` says which one that is.
    """

    def __init__(self) -> None:
        self.last = float("-inf")
        self.burst = 0
        self.count = 0
        self._fast = float("-inf")
        self._own = 0
        self.followed = False  # whether another key was pressed soon behind the one that is acted on

    def note(self, at: float) -> int:
        """A key arrived at ``at`` (monotonic seconds, taken by the input thread); its place in a run of fast ones."""
        self.burst = self.burst + 1 if at - self.last < PASTE_GAP_S else 0
        self.last = at
        self.count += 1
        if self.burst:
            self._fast = time.monotonic()
        return self.burst

    def begin(self, burst: int, followed: bool) -> None:
        """A key is acted on now that ``note`` gave this place, and that another one followed soon, or none did yet."""
        self._own, self.followed = burst, followed

    @property
    def pasted(self) -> bool:
        """Whether the key that is acted on, or the newest one, came too soon after the one before."""
        return self._own > 0 or self.burst > 0

    @property
    def just_pasted(self) -> bool:
        """Whether pasted keys were noted a moment ago: what they set off comes after all of them were noted."""
        return time.monotonic() - self._fast < AFTER_PASTE_S


@dataclass(frozen=True, slots=True)
class Decision:
    """mode: hold | halt | release, or empty when nothing is sent; ``why`` is for the operator."""

    mode: str = ""
    nonce: str = ""
    why: str = ""


class HaltSwitch:
    """Turns presses of F9 and Esc into decisions."""

    def __init__(self) -> None:
        self._pressed = float("-inf")

    def press(self, at: float, now: float, snap: Snapshot, burst: int) -> Decision:
        """F9 at monotonic time ``at`` and wall time ``now``, ``burst`` keys after the start of a run of fast ones."""
        gap, self._pressed = at - self._pressed, at
        h = snap.halt
        open_hold = bool(h.nonce) and h.mode == "hold" and not h.drill
        if snap.status == "halted" and any(unknown_after_halt(snap, pod) for pod in h.acks):
            return Decision("halt", h.nonce) if gap >= SECOND_PRESS_S else Decision()
        if snap.ended:
            return Decision(why=f"nothing to halt: the run has ended ({snap.status.replace('_', ' ')})")
        if snap.no_halt:
            return Decision(why=f"nothing can be halted there: {snap.no_halt}")
        if snap.status == "halted":
            return Decision(why=f"halted already, {snap.detail}")
        if burst >= 2 and gap >= SECOND_PRESS_S:
            return Decision(why="F9 inside pasted text is ignored: press it again")
        if h.nonce and h.mode == "halt" and not h.drill:
            return Decision(why=f"HALT is under way, asked by {h.by}")
        if open_hold:
            if gap < SECOND_PRESS_S:
                return Decision(why="")
            return Decision("halt", h.nonce)
        if gap < SECOND_PRESS_S:
            return Decision(why="")  # the journal has not answered the first press yet
        return Decision("hold", secrets.token_hex(8))

    def release(self, now: float, snap: Snapshot) -> Decision:
        """Esc: undo a hold that has not become a halt."""
        if holding(snap, now) is None:
            return Decision()
        return Decision("release", snap.halt.nonce)
