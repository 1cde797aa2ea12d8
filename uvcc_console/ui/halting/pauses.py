"""No thread with an order in its hands waits long for a busy screen: not for its turn, not for a collection of garbage.

Python's collector looks through everything that was made, and nothing runs meanwhile: measured under a storm of pastes
and resizes on two busy cores, that stopped F9 for 0.4 to 2.5 s. So what was there before the first picture is left out
of it, and the long collections, which it makes whenever it likes, are made here, when nobody presses keys. What refers
to nothing but itself is rare on this screen (dialogs, tasks); all else is freed at once, as ever.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.001  # after so long the thread that draws lets another one go on
YOUNG: Final = 2_000  # objects more than were freed: these are looked through, in a millisecond or two
MIDDLE: Final = 10  # so many of those, and all that came since the last one of its own are
NEVER: Final = 1 << 30
# after how many seconds without a key a long one is made, by how many blocks of memory more there are than after the
# last (a million of them: some 100 MB); a hold that is open is never disturbed
PATIENCE: Final = ((50_000, 10.0), (1_000_000, 1.0), (4_000_000, 0.0))


class Pauses:
    """Decides when the long collections are made. ``clock``: monotonic seconds, as the keys bear them; ``blocks``: how
    many pieces of memory are in use."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        blocks: Callable[[], int] = sys.getallocatedblocks,
        collect: Callable[[], int] = gc.collect,
    ) -> None:
        self._clock, self._blocks, self._collect = clock, blocks, collect
        self._base = -1

    def look(self, last_key: float, free: bool) -> bool:
        """Collect if this is a good moment; True when it was. ``free``: no hold is open."""
        if self._base < 0:  # the first picture is there
            self._collect()
            gc.freeze()
        else:
            grown, calm = self._blocks() - self._base, self._clock() - last_key
            if not free or not any(grown >= blocks and calm >= seconds for blocks, seconds in PATIENCE):
                return False
            self._collect()
        self._base = self._blocks()
        return True


@contextmanager
def orders_first() -> Iterator[Pauses]:
    """While a run is on the screen, threads take short turns and long collections are made by what this gives."""
    turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(TURN_S)
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        yield Pauses()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(turn)
