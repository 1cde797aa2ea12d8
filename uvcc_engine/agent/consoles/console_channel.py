"""One attached console: its socket, what waits to be sent to it, and the runs it watches."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.consoles.tail import LineBatch, RunTail, Skipped
from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.contract.agent_protocol import agent_messages as told
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import ProtocolError

QUEUE_BYTES: Final = 4 << 20
LOST_BYTES: Final = 32 << 20
_LEAST_ROOM: Final = 64 << 10


class Console:
    """Acknowledgements and reports always go out; file lines only while the queue has room for them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.greeted = False
        self.holder = ""
        self.lease_s = 0.0
        self.ended = False
        self.owed = 0
        self._in = LineBuffer()
        self._out = bytearray()
        self._seq = 0
        self._tails: dict[str, RunTail] = {}
        self._cursors: dict[str, tuple[int, int]] = {}

    def receive(self) -> list[dict[str, Any]]:
        """Commands that have arrived whole. Sets ``ended`` when the console has closed its side."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            self.ended = True
            self._out.clear()
            return []
        if not data:
            self.ended = True
            return []
        commands = []
        for line in self._in.feed(data):
            try:
                commands.append(wire.decode(line))
            except ValueError:
                raise ProtocolError(f"not a command: {line[:80]!r}", "send one JSON object a line") from None
        return commands

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message that must not be lost."""
        self._out += wire.encode(message)
        if len(self._out) > LOST_BYTES:
            self.ended = True  # it has not read for long; it will come back with its cursors
            self._out.clear()
        self.flush()

    def offer(self, message: Mapping[str, Any]) -> None:
        """Send if there is room, else leave it out: the next one of its kind says more."""
        if self.room() > _LEAST_ROOM:
            self.send(message)

    def flush(self) -> None:
        """Send what the socket takes now."""
        while self._out:
            try:
                sent = self.sock.send(memoryview(self._out)[: 1 << 18])
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                self._out.clear()
                return
            del self._out[:sent]

    @property
    def waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._out)

    def room(self) -> int:
        return max(0, QUEUE_BYTES - len(self._out))

    def learn_cursors(self, cursors: Mapping[str, tuple[int, int]]) -> None:
        """Remember ``run/file`` -> (inode, offset) for later watching."""
        self._cursors |= cursors

    def watch(self, run: str, directory: Path) -> None:
        """Begin (again) to stream a run's files from the cursors known."""
        if run in self._tails:
            self._tails.pop(run).close()
        prefix = f"{run}/"
        cursors = {k.removeprefix(prefix): v for k, v in self._cursors.items() if k.startswith(prefix)}
        self._tails[run] = RunTail(directory, cursors)

    def unwatch(self, run: str) -> None:
        """Stop streaming a run's files and forget how far they were read: the console knows best what it took."""
        if run in self._tails:
            self._tails.pop(run).close()
        for key in [k for k in self._cursors if k.startswith(f"{run}/")]:
            del self._cursors[key]

    def watches(self) -> Iterable[str]:
        return tuple(self._tails)

    def stream(self, run: str, *, finished: bool) -> None:
        """Send what is new in a watched run's files, as far as there is room."""
        room = self.room()
        if run not in self._tails or room <= _LEAST_ROOM or self.ended:
            return
        for found in self._tails[run].poll(room, finished=finished):
            if isinstance(found, LineBatch):
                self._lines(run, found)
            elif isinstance(found, Skipped):
                self.send(told.to_json(told.Dropped(run=run, src=found.src, n=found.n)))
            else:
                self.send(told.to_json(told.Rewind(run=run, src=found.src, reason=found.reason)))

    def _lines(self, run: str, batch: LineBatch) -> None:
        self._cursors[f"{run}/{batch.src}"] = (batch.ino, batch.off)
        self._seq += 1
        at = round(time.time(), 3)
        lines = told.Lines(
            run=run, src=batch.src, ino=batch.ino, off=batch.off, lines=batch.lines, seq=self._seq, ts=at
        )
        self.send(told.to_json(lines))

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self.sock.close()
