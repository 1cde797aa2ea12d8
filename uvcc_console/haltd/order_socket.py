"""The sidecar's front door: a halt asked for here needs no journal, so neither a full disk nor a lock delays it.

A local socket in the run's folder, which only its owner can enter. One JSON object a line: a request in
(``{nonce, mode, by, drill, reason}``), ``{"taken": nonce}`` back, then every event of the halt as the sidecar notes it
(``{"kind", "ts", "data"}``). The journal follows when it can.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from uvcc_console.core import events as ev
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.contract.machine.shortpath import short
from uvcc_engine.contract.run_files import control

if TYPE_CHECKING:
    import asyncio

SOCKET: Final = "halt.sock"
_LINE: Final = 64 << 10
_TAKEN_S: Final = 2.0


def parse(line: bytes) -> ev.HaltRequested | None:
    """A request as it came in; None for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("mode") not in control.MODES:
        return None
    texts = [found.get(name, "") for name in ("nonce", "by", "reason")]
    if not all(isinstance(text, str) and len(text) <= 500 for text in texts) or not texts[0]:
        return None
    return ev.HaltRequested(
        nonce=texts[0], mode=found["mode"], by=texts[1] or "halt", drill=found.get("drill") is True, reason=texts[2]
    )


class OrderServer:
    """The listening end, in the sidecar's event loop. ``asked`` is called with every request, before it is answered."""

    def __init__(self, run_dir: Path, asked: Callable[[ev.HaltRequested], None]) -> None:
        self._run_dir = run_dir
        self._asked = asked
        self._server: asyncio.Server | None = None
        self._listening: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Listen. A socket that an earlier sidecar left is replaced. Raises OSError."""
        import asyncio  # whoever only asks is spared it: an order leaves a tenth of a second earlier

        (self._run_dir / SOCKET).unlink(missing_ok=True)
        with short(self._run_dir / SOCKET) as path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.bind(path)
        (self._run_dir / SOCKET).chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_LINE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._listening.add(writer)
        try:
            while line := await reader.readline():
                request = parse(line)
                if request is None:
                    break
                self._asked(request)
                _send(writer, {"taken": request.nonce})
        except (OSError, ValueError):
            pass  # it left, or sent a line without end
        finally:
            self._listening.discard(writer)
            writer.close()

    def publish(self, events: Sequence[ev.Event]) -> None:
        """Tell everybody who listens what has just been noted."""
        for event in events:
            for writer in list(self._listening):
                _send(writer, {"kind": event.kind, "ts": event.ts, "data": ev.to_json(event)})

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
            (self._run_dir / SOCKET).unlink(missing_ok=True)
        for writer in list(self._listening):
            writer.close()


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing() and writer.transport.get_write_buffer_size() < 1 << 20:
        with contextlib.suppress(OSError):
            writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class OrderClient:
    """The asking end: blocking to connect and ask (a few milliseconds), then polled."""

    def __init__(self, run_dir: Path) -> None:
        """Connect. Raises UnreachableError if no sidecar listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._rest = b""
        self.closed = False
        try:
            self._socket.settimeout(_TAKEN_S)
            with short(run_dir / SOCKET) as path:
                self._socket.connect(path)
        except OSError as e:
            self._socket.close()
            raise UnreachableError(f"no halt sidecar listens: {e}") from e

    def ask(self, request: ev.HaltRequested) -> list[ev.Event]:
        """Hand a request over; returns once the sidecar has acted on it. Raises UnreachableError if it does not."""
        try:
            self._socket.settimeout(_TAKEN_S)
            self._socket.sendall(json.dumps(ev.to_json(request)).encode() + b"\n")
            seen: list[ev.Event] = []
            taken = False
            while not taken:
                for message in self._lines(self._socket.recv(1 << 16)):  # what came with the receipt counts as well
                    taken = taken or message.get("taken") == request.nonce
                    seen += _event(message)
            return seen + self.poll()
        except OSError as e:
            self.closed = True
            raise UnreachableError(f"the halt sidecar does not answer: {e}", "uvcc halt starts another") from e

    def poll(self) -> list[ev.Event]:
        """What has been said since; sets ``closed`` when the sidecar has gone."""
        found: list[ev.Event] = []
        self._socket.settimeout(0)
        try:
            while True:
                for message in self._lines(self._socket.recv(1 << 16)):
                    found += _event(message)
        except BlockingIOError:
            return found
        except OSError:
            self.closed = True
            return found

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        if not data:
            raise ConnectionResetError("it hung up")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [m for m in map(_decoded, lines) if m is not None]

    def close(self) -> None:
        self._socket.close()


def _decoded(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _event(message: dict[str, Any]) -> list[ev.Event]:
    data, ts = message.get("data"), message.get("ts")
    if not isinstance(data, dict) or not isinstance(ts, int | float):
        return []
    event = ev.from_json(str(message.get("kind")), float(ts), data)
    return [event] if event is not None and not isinstance(event, ev.LinesMalformed) else []


def ask(run_dir: Path, request: ev.HaltRequested) -> bool:
    """Ask the run's sidecar and hang up; False if none listens: then the journal is the way."""
    try:
        line = OrderClient(run_dir)
    except UnreachableError:
        return False
    try:
        line.ask(request)
        return True
    except UnreachableError:
        return False
    finally:
        line.close()
