"""The relay processes of this pod, one per engine run that asked for one.

A relay is ``python -m uvcc_engine.relay --config FILE`` in its own session; its configuration holds the tokens and is
readable by this user only. It writes ``ready.json`` with the ``url`` it serves once it does. ``relay/<run>/state.json``
lets another agent take it over.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.run_files import files

log = logging.getLogger(__name__)
READY: Final = "ready.json"
CONFIG: Final = "config.json"
MOST_RESTARTS: Final = 5
READY_S: Final = 30.0


@dataclass
class Relay:
    """One relay process. ``process`` is None if an earlier agent started it.

    ``again``: asked for while it was still ending, so it is started anew once it has ended.
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

    def alive(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            return False
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

    def _last_words(self) -> str:
        lines = (self.folder / "relay.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def save(self) -> None:
        value = {"run": self.run, "id": self.id.to_json(), "url": self.url}
        files.write_json(self.folder / "state.json", value, mode=0o600, durable=False)


class RelayTable:
    """All relays known here, by run."""

    def __init__(self, root: Path) -> None:
        self._root = root / "relay"
        self.known: dict[str, Relay] = {}

    def load(self) -> None:
        """Take over relays that an earlier agent started."""
        for path in sorted(self._root.glob("*/state.json")):
            try:
                found = files.read_json(path)
                who = ProcessId.from_json(found["id"])
                relay = Relay(str(found["run"]), path.parent, who, time.monotonic(), url=str(found["url"]))
            except (UnreadableError, KeyError):
                continue
            if who.alive():
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

    def restart(self, relay: Relay) -> bool:
        """Start a relay that died at the addresses it had; False if it was stopped, never served or dies too often."""
        if relay.stopping or not relay.url or relay.restarts >= MOST_RESTARTS:
            return False
        try:
            config = files.read_json(relay.folder / CONFIG)
            at = {"listen": relay.url.partition("://")[2]}
            if stream := files.read_json(relay.folder / READY).get("stream"):
                at["stream_listen"] = str(stream)
            files.write_json(relay.folder / CONFIG, config | at, mode=0o600)
            self._spawn(relay.run, relay.folder).restarts = relay.restarts + 1
        except UvccError as error:
            log.error("the relay of %s cannot be started again: %s", relay.run, error)
            return False
        return True

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
        relay = self.known[run] = Relay(run, folder, who, time.monotonic(), process)
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
        return sum(r.id.send_group(signal.SIGKILL if kill else signal.SIGTERM) for r in chosen)

    def reap(self) -> list[Relay]:
        """Relays that have ended since the last call; they are forgotten. Those asked for again are started."""
        ended = [r for r in self.known.values() if not r.alive()]
        for relay in ended:
            del self.known[relay.run]
            (relay.folder / "state.json").unlink(missing_ok=True)
            if relay.again:
                try:
                    self._spawn(relay.run, relay.folder)
                except UvccError as error:
                    log.error("the relay of %s cannot be started again: %s", relay.run, error)
        return [r for r in ended if not r.again]
