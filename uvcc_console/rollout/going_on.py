"""Whether a run that failed in training goes on by itself, as often as its profile's ``limits.resumes`` says.

Only behind what may pass: a worker that was killed, a pod or peer that went silent. What a worker itself gave up for (a
proof that does not hold, a setting, a full disk) would come again, or somebody has to look at it: that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.plan.own_resumes import order, ordered
from uvcc_console.rollout.context import PassingError
from uvcc_engine.contract.errors import UnreachableError, UvccError

PAUSE_S: Final = 10.0
LONGEST_PAUSE_S: Final = 300.0


@dataclass
class GoingOn:
    """How often this run may go on by itself, and how often it has (``taken``), under whichever conductor.

    ``commit`` writes into the journal, from which the conductor takes the order as it takes everybody's.
    """

    most: int
    commit: Callable[[ev.Event], object]
    pause_s: float = PAUSE_S
    taken: int = 0

    def replay(self, events: Iterable[ev.Event]) -> None:
        """What the journal tells of before this process."""
        self.taken = sum(map(ordered, events))

    def pause(self, error: UvccError) -> float | None:
        """How many seconds after this failure the run goes on, twice as many each time; None where it does not."""
        if self.taken >= self.most or not isinstance(error, PassingError | UnreachableError):
            return None
        return min(self.pause_s * 2.0**self.taken, LONGEST_PAUSE_S)

    @property
    def words(self) -> str:
        """``2 of 3``: which time the next one would be."""
        return f"{self.taken + 1} of {self.most}"

    def order(self) -> None:
        """Tell the operator, and order the resume."""
        text = f"it goes on by itself from the last common checkpoint ({self.words})"
        self.taken += 1
        self.commit(ev.Alert(level="warn", name="goes_on", text=text, hint="uvcc logs says why it had failed"))
        self.commit(order())
