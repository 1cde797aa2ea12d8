"""The agent's side of the zygote: asks for forks, hears of starts and exits, starts another zygote if one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes import zygote
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files import files


class Spawner:
    """Owns the zygote process. ``facts`` is what it said about its imports; empty while they run."""

    def __init__(self, root: Path, preload: Sequence[str], give_way: int = 0) -> None:
        self._root = root
        self._preload = tuple(preload)
        self._give_way = give_way
        self._buffer = LineBuffer()
        self._out = b""
        self.facts: dict[str, Any] = {}
        self.running = False
        self.sock: socket.socket
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Fork a zygote; it begins to import at once."""
        self._buffer, self._out, self.facts = LineBuffer(), b"", {}
        self.sock, self.pid = zygote.start(self._preload, os.fspath(self._root), self._give_way)
        self.running = True

    def launch(self, spec: WorkerSpec) -> None:
        """Ask for one worker; it is forked as soon as the imports are done."""
        log = os.fspath(Path(spec.dir) / files.log_name(spec.coord))
        self._out += json.dumps({"fork": spec.to_json(), "log": log}).encode() + b"\n"
        self.flush()

    @property
    def waiting(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Send what the zygote takes now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]

    def receive(self) -> list[dict[str, Any]] | None:
        """The zygote's reports; None if it has died."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        reports = [json.loads(line) for line in self._buffer.feed(data)]
        for report in reports:
            if report.get("ready"):
                self.facts = report
        return reports

    def close(self) -> None:
        """End the zygote and reap it. Its workers, if any are left, go on."""
        if not self.running:
            return
        self.running = False
        self.sock.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
