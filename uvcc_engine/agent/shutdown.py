"""The end of an agent: workers first, then the zygote, then the relays; each TERM, after its grace KILL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Final

from uvcc_engine.agent.consoles.command_front import Key
from uvcc_engine.agent.processes.relays import RelayTable
from uvcc_engine.agent.processes.workers import WorkerTable

RELAY_GRACE_S: Final = 3.0
KILL_PATIENCE_S: Final = 10.0


class Shutdown:
    """Begins with TERM to every live worker's process group. ``keys`` are the commands that wait for the end."""

    def __init__(self, workers: WorkerTable, relays: RelayTable, grace_s: float) -> None:
        self.keys: list[Key] = []
        self._workers = workers
        self._relays = relays
        now = time.monotonic()
        self._kill_at, self._end_at = now + grace_s, now + grace_s + KILL_PATIENCE_S
        self._ended = self._signal_workers(signal.SIGTERM)
        self._killed = 0
        self._zygote_ended = self._relays_told = False

    def advance(self, end_zygote: Callable[[], None]) -> bool:
        """Go as far as possible without waiting; True when nothing is left, or what is left does not die."""
        now = time.monotonic()
        live = self._workers.live()
        if live and now >= self._kill_at and not self._killed:
            self._killed = self._signal_workers(signal.SIGKILL)
        if live and now < self._end_at:
            return False
        if not self._zygote_ended:
            self._zygote_ended = True
            end_zygote()  # which may bring up a worker that nobody knew of
            return False
        if self._relays.known and not self._relays_told:
            self._relays_told, self._kill_at = True, now + RELAY_GRACE_S
            self._relays.stop()
        self._relays.reap()
        if self._relays.known and now >= self._kill_at:
            self._relays.stop(kill=True)
        return not self._relays.known or now >= self._end_at

    def outcome(self) -> dict[str, Any]:
        """Fields of the acknowledgement."""
        left = [w.id.pid for w in self._workers.live()] + [r.id.pid for r in self._relays.known.values()]
        fields: dict[str, Any] = {"ok": not left, "ended": self._ended, "killed": self._killed}
        if left:
            fields |= {"error": f"processes {left} do not die", "hint": "look at the pod by hand"}
        return fields

    def _signal_workers(self, number: int) -> int:
        live = self._workers.live()
        for worker in live:
            worker.id.send_group(number)
        return len(live)
