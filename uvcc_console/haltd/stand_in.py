"""Notices while nobody conducts a run: who keeps its pods' leases then is the only one left to tell of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet import pulse
from uvcc_console.runs import notices, notify
from uvcc_console.runs.notices import Note, SoleSender
from uvcc_engine.contract.errors import UvccError

log = logger(__name__)
OVERLAP_S: Final = 10.0  # what a conductor had not told when it died is at most so old
BACK_S: Final = 5.0  # so long after its return, when it has looked at the run, a conductor has its place back


class StandIn:
    """Looks at the run as its conductor does, and hands on what is new once that one has died.

    A conductor that moves again has its place back. One that is frozen keeps it: what came meanwhile is told by
    itself if it goes on, or from here once it is killed.
    """

    def __init__(self, run_dir: Path) -> None:
        self._sender: SoleSender | None = None
        self._waiting: list[tuple[float, Note]] = []
        self._now = 0.0
        self._until = float("-inf")  # in a conductor's place
        self._notifier = notify.Notifier(notices.void, lambda note: self._waiting.append((self._now, note)))
        try:
            way = notices.outside(notify.operators_program(), lambda text: log.warning("%s", text))
        except UvccError as e:  # its conductor has told so in the journal
            log.warning("nobody is notified: %s", e)
        else:
            self._sender = SoleSender(run_dir, way) if way is not None else None

    def look(self, s: Snapshot, conductor: str, now: float) -> None:
        """See what is new. ``conductor``: how it is (``pulse``); ``now``: the wall clock in seconds."""
        if self._sender is None:
            return
        self._now = now
        if s.ended:  # who ends a run tells of that
            self._waiting.clear()
            self._sender.close()
            return
        self._notifier.look(s, now)
        if conductor == pulse.DEAD:
            self._until = now + BACK_S
        if self._waiting and (now <= self._until or self._sender.held) and self._sender.claim():
            waiting, self._waiting = self._waiting, []
            for _, note in waiting:
                self._sender(note)
        elif conductor != pulse.FROZEN:  # a console has the place, or threads of the dead one still hold it
            self._waiting = [(at, note) for at, note in self._waiting if now - at < OVERLAP_S]
        if now > self._until and conductor == pulse.MOVING:
            self._sender.close()

    def close(self) -> None:
        """Let another one take over."""
        if self._sender is not None:
            self._sender.close()
