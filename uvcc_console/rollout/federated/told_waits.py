"""Says for whom this domain waits, since when and for how long still, so that no wait of minutes is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

from uvcc_console.core.log import logger
from uvcc_engine.contract.errors import PeerLostError, UnreachableError
from uvcc_engine.contract.job.topology import PARTIES

log = logger(__name__)
T = TypeVar("T")
AGAIN_S: Final = 0.5
AFTER_S: Final = 5.0
"""A wait so short is not told of: three domains are never at the same place at the same moment."""
EACH_S: Final = 60.0
"""After so long it is told once more, with the time that is left."""


class ToldWait:
    """One wait. ``what``: what those who are waited for have not done yet, as in "has not ... after 60 s". ``now`` and
    ``end`` are of the caller's clock."""

    def __init__(
        self,
        tell: Callable[[str], None],
        what: str,
        now: float,
        end: float,
        after_s: float = AFTER_S,
        wall: Callable[[], datetime] = partial(datetime.now, UTC),
    ) -> None:
        self._tell, self._what, self._end = tell, what, end
        self._since = f"{wall():%H:%M:%S} UTC"
        self._due, self._names = now + after_s, ""

    def look(self, names: str, now: float) -> None:
        """For these it is waited now: tell it if that changed, or was told long ago."""
        changed = bool(self._names) and names != self._names
        if not names or (now < self._due and not changed):
            return
        self._names, self._due = names, now + EACH_S
        left = max(0.0, self._end - now)
        self._tell(f"waits for {names} since {self._since} (not {self._what} yet), {left:.0f} s more at most")


async def all_domains(
    look: Callable[[], dict[int, T]], what: str, wait_s: float, tell: Callable[[str], None]
) -> dict[int, T]:
    """Look, again and again, until all three are there. A rendezvous that does not answer is asked again.

    Raises PeerLostError naming who is missing once they had their time.
    """
    began = time.monotonic()
    waiting, found = ToldWait(tell, what, began, began + wait_s), dict[int, T]()
    while len(found) < PARTIES:
        try:
            found = await asyncio.to_thread(look)
        except UnreachableError as e:
            log.warning("the rendezvous: %s", e)
        if len(found) < PARTIES:
            late = [p for p in range(PARTIES) if p not in found]
            names = ", ".join(f"P{p}'s domain" for p in late)
            if (now := time.monotonic()) > began + wait_s:
                told = f"{names} has not {what} after {wait_s:.0f} s"
                raise PeerLostError(told, "ask its operator, then begin the next attempt", party=late[0])
            waiting.look(names, now)
            await asyncio.sleep(AGAIN_S)
    return dict(sorted(found.items()))
