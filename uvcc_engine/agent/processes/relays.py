"""The relay processes of this pod, one per engine run that asked for one.

A relay is ``python -m uvcc_engine.relay --config FILE`` in its own session; its configuration holds the tokens and is
readable by this user only. It writes ``ready.json`` with the ``url`` it serves once it does. ``relay/<run>/state.json``
lets another agent take it over.

One that served and ended unasked is started again where it was: at once the first time, after growing pauses while its
lives stay short, and until it has not served for as long as its workers wait. Its disk may be full for a while, or its
port in somebody else's use.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.run_files import files

log = logging.getLogger(__name__)
READY: Final = "ready.json"
CONFIG: Final = "config.json"
LONGEST_PAUSE_S: Final = 60.0
LONG_LIFE_S: Final = 600.0  # the end of one that lived so long is a new trouble
GIVE_UP_S: Final = 900.0  # without a relay that serves: nobody waits any more
READY_S: Final = 120.0


@dataclass
class Relay:
    """One relay process. ``process`` is None if an earlier agent started it.

    ``again``: asked for while it was still ending, so it is started anew once it has ended. ``place``: where it served
    before it had to be started again, ``restarts`` times in short lives; ``served``: when it, or the one before it,
    was last known to serve. ``why``: how it ended.
    """

    run: str
    folder: Path
    id: ProcessId
    since: float
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    stopping: bool = False
    again: bool = False
    restarts: int = 0
    place: str = ""
    served: float = 0.0
    why: str = ""

    def alive(self) -> bool:
        if self.process is not None:  # a child's end is what can be collected: only that tells how it ended
            return self.process.poll() is None
        return self.id.alive()

    def look(self) -> bool:
        """Whether it serves by now. Raises UvccError with its last words if it has ended or takes too long."""
        if self.stopping:
            return False  # whoever goes there is turned away
        if self.url:
            return True
        ready = self.folder / READY
        if ready.exists():
            self.url = str(files.read_json(ready).get("url", ""))
            self.save()
            return True
        if not self.alive() or time.monotonic() - self.since > READY_S:
            raise UvccError(f"the relay did not start: {self._last_words()}", "see relay.log on the pod")
        return False

    def end(self, now: float) -> None:
        """Note how it ended, and what that means for the next one."""
        code = None if self.process is None else self.process.poll()
        if code is not None and code < 0:
            self.why = f"killed by signal {-code}"
        else:
            self.why = self._last_words()
        if self.url:
            self.place, self.served = self.url, now
            if now - self.since > LONG_LIFE_S:
                self.restarts = 0

    def told(self) -> dict[str, Any]:
        """What an event says of its end."""
        return {"url": self.place, "restarts": self.restarts, "why": self.why}

    @property
    def pause_s(self) -> float:
        """How long after its end the next one is started."""
        return 0.0 if not self.restarts else min(2.0 ** (self.restarts - 1), LONGEST_PAUSE_S)

    def _last_words(self) -> str:
        try:
            lines = (self.folder / "relay.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return "no log"
        return lines[-1][:300] if lines else "no output"

    def save(self) -> None:
        """Leave word for another agent; a disk that is full ends no relay for that."""
        value = {"run": self.run, "id": self.id.to_json(), "url": self.url}
        try:
            files.write_json(self.folder / "state.json", value, mode=0o600, durable=False)
        except UvccError as error:
            log.warning("another agent would not find the relay of %s: %s", self.run, error)


class RelayTable:
    """All relays known here, by run."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root / "relay", clock
        self.known: dict[str, Relay] = {}
        self._due: dict[str, tuple[float, Relay]] = {}  # when the next one is started, after which

    def load(self, needed: Callable[[str], object]) -> None:
        """Take over relays that an earlier agent started. One that ended with it is found to have ended, and started
        again, if its run is still ``needed`` here."""
        for path in sorted(self._root.glob("*/state.json")):
            try:
                found = files.read_json(path)
                who = ProcessId.from_json(found["id"])
                relay = Relay(str(found["run"]), path.parent, who, self._clock(), url=str(found["url"]))
            except (UnreadableError, KeyError):
                continue
            if who.alive() or needed(relay.run):
                self.known[relay.run] = relay

    def start(self, run: str, config: Mapping[str, Any]) -> Relay:
        """Start the relay of a run, or find the one that runs. Raises UvccError."""
        known = self.known.get(run)
        ending = known is not None and known.stopping and known.alive()
        if known is not None and known.alive() and not ending:
            return known
        folder = self._root / files.checked_run_id(run)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_json(folder / CONFIG, {**config, "ready_file": READY}, mode=0o600)
        if known is not None and ending:
            known.again = True
            return known
        return self._spawn(run, folder)

    def revive(self, ended: Sequence[Relay]) -> tuple[list[Relay], list[Relay]]:
        """Start again those that ended unasked, each in its time: (what was started now, what is given up).

        Given up is what never served, and what has not served for too long.
        """
        started: list[Relay] = []
        given_up: list[Relay] = []
        for relay in ended:
            if not relay.stopping:
                self._plan(relay, given_up)
        for run, (at, relay) in tuple(self._due.items()):
            if run in self.known:
                del self._due[run]  # somebody asked for it meanwhile
            elif self._clock() >= at:
                del self._due[run]
                try:
                    self._restart(relay)
                    started.append(relay)
                except UvccError as error:
                    relay.restarts, relay.why = relay.restarts + 1, str(error)
                    self._plan(relay, given_up)
        return started, given_up

    def _plan(self, relay: Relay, given_up: list[Relay]) -> None:
        now = self._clock()
        if relay.place and now - relay.served <= GIVE_UP_S:
            self._due[relay.run] = now + relay.pause_s, relay
        else:
            given_up.append(relay)

    def _restart(self, relay: Relay) -> None:
        """Start a relay at the addresses that it had. Raises UvccError."""
        config = files.read_json(relay.folder / CONFIG)
        at = {"listen": relay.place.partition("://")[2]}
        ready = relay.folder / READY
        if ready.exists() and (stream := files.read_json(ready).get("stream")):
            at["stream_listen"] = str(stream)
        if config | at != config:
            files.write_json(relay.folder / CONFIG, config | at, mode=0o600)
        fresh = self._spawn(relay.run, relay.folder)
        fresh.restarts, fresh.place, fresh.served = relay.restarts + 1, relay.place, relay.served

    def _spawn(self, run: str, folder: Path) -> Relay:
        (folder / READY).unlink(missing_ok=True)
        command = [sys.executable, "-m", "uvcc_engine.relay", "--config", os.fspath(folder / CONFIG)]
        try:
            with (folder / "relay.log").open("ab") as out:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, start_new_session=True
                )
        except OSError as error:
            raise UvccError(f"cannot start the relay: {error.strerror}", "check memory and disk of the pod") from error
        who = ProcessId.of(process.pid)
        if who is None:
            process.wait()
            raise UvccError("the relay ended at once", "see relay.log on the pod")
        relay = self.known[run] = Relay(run, folder, who, self._clock(), process)
        relay.save()
        return relay

    def look(self) -> None:
        """Note the addresses of relays that have begun to serve."""
        for relay in self.known.values():
            if not relay.url and not relay.stopping and (relay.folder / READY).exists():
                relay.look()

    def stop(self, run: str | None = None, *, kill: bool = False) -> int:
        """End one relay or all; returns how many were there."""
        chosen = [r for r in self.known.values() if run in (None, r.run)]
        for relay in chosen:
            relay.stopping, relay.again = True, False
        for name in tuple(self._due):
            if run in (None, name):
                del self._due[name]
        return sum(r.id.send_group(signal.SIGKILL if kill else signal.SIGTERM) for r in chosen)

    def reap(self) -> list[Relay]:
        """Relays that have ended since the last call; they are forgotten. Those asked for again are started."""
        ended = [r for r in self.known.values() if not r.alive()]
        for relay in ended:
            del self.known[relay.run]
            relay.end(self._clock())
            (relay.folder / "state.json").unlink(missing_ok=True)
            if relay.again:
                try:
                    self._spawn(relay.run, relay.folder)
                except UvccError as error:
                    log.error("the relay of %s cannot be started again: %s", relay.run, error)
        return [r for r in ended if not r.again]
