"""A relay that moves to another place while a run goes on.

A relay is no party to anything: it keeps frames until they are taken, and what it loses is sent again. So a run needs
only to be told where the relay is now. The agent writes that into ``link.json`` of the run directory; whoever uses the
relay looks there twice a second, goes to the new place, and everything that the peers have not acknowledged themselves
is sent again. What arrives twice is known by its sequence number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec, RelayPlace
from uvcc_engine.contract.run_files.eventlog import Notice
from uvcc_engine.plane.links.auto import RelayPath
from uvcc_engine.plane.links.link import Arrival, LinkWrapper, no_work

LOOK_S: Final = 0.5
_RETRY_S: Final = 1.0


class RelayLocator:
    """Where the relay is: what the link says, until ``path`` says otherwise."""

    def __init__(self, link: LinkSpec, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._seen: tuple[int, int] | None = None
        self._next_look = 0.0
        self.link = link

    def moved(self) -> bool:
        """Whether ``link`` has changed since the last call; looks at the file twice a second at most."""
        now = self._clock()
        if self._path is None or now < self._next_look:
            return False
        self._next_look = now + LOOK_S
        try:
            found = os.stat(self._path)
        except OSError:
            return False
        if (found.st_ino, found.st_mtime_ns) == self._seen:
            return False
        self._seen = found.st_ino, found.st_mtime_ns
        told, before = RelayPlace.of(self._path), self.link
        self.link = before.at(told)
        return any(getattr(self.link, name) != getattr(before, name) for name in told.to_json())


class RelocatingLink(LinkWrapper[RelayPath]):
    """Implements ``auto.RelayPath`` over whatever ``make`` makes of a link's settings, anew wherever the relay goes."""

    def __init__(
        self,
        make: Callable[[LinkSpec], RelayPath],
        first: RelayPath,
        at: RelayLocator,
        peers: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(first)
        self._make, self._at, self._peers, self._clock = make, at, tuple(peers), clock
        self._due = False
        self._retry_at = 0.0
        self._trouble = ""
        self._resets: list[int] = []
        self._notices: list[Notice] = []

    def _follow(self) -> None:
        """Go where the relay is now; tried again every second if it does not answer there yet."""
        now = self._clock()
        if now < self._retry_at:
            return
        try:
            self._due = self._at.moved() or self._due
            if not self._due:
                return
            fresh = self._make(self._at.link)
        except UvccError as error:
            self._retry_at = now + _RETRY_S
            if error.what != self._trouble:
                self._trouble = error.what
                self._notices.append(Notice("relay_down", {"url": self._at.link.relay_url, "why": error.what}))
            return
        self._due, self._trouble = False, ""
        self._notices += [*self._inner.notices(), Notice("relay_moved", {"url": self._at.link.relay_url})]
        self._inner.close()
        self._inner = fresh
        self._resets += self._peers

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        self._follow()
        return self._inner.exchange(wait, src, meanwhile)

    def resets(self) -> list[int]:
        found, self._resets = self._resets + self._inner.resets(), []
        return found

    def notices(self) -> list[Notice]:
        found, self._notices = self._notices + self._inner.notices(), []
        return found

    def down_s(self) -> float:
        return self._inner.down_s()

    def away_s(self) -> float:
        return self._inner.down_s()
