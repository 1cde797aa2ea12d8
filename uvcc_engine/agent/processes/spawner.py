"""The agent's side of the zygote: asks for forks, hears of starts and exits, starts another zygote if one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes import zygote
from uvcc_engine.agent.processes.zygote_messages import ForkRequest, ImportsDone, ZygoteReport, encode, parse_report
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.records import Malformed

log = logging.getLogger(__name__)


class Spawner:
    """Owns the zygote process. ``imports`` is what it said about them; None while they run."""

    def __init__(self, root: Path, preload: Sequence[str], give_way: int = 0) -> None:
        self._root = root
        self._preload = tuple(preload)
        self._give_way = give_way
        self._buffer = LineBuffer()
        self._out = b""
        self.imports: ImportsDone | None = None
        self.running = False
        self.sock: socket.socket
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Fork a zygote; it begins to import at once."""
        self._buffer, self._out, self.imports = LineBuffer(), b"", None
        self.sock, self.pid = zygote.start(self._preload, os.fspath(self._root), self._give_way)
        self.running = True

    def launch(self, spec: WorkerSpec) -> None:
        """Ask for one worker; it is forked as soon as the imports are done."""
        self._out += encode(ForkRequest(spec, os.fspath(Path(spec.dir) / files.log_name(spec.coord))))
        self.flush()

    @property
    def waiting(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Send what the zygote takes now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]

    def receive(self) -> list[ZygoteReport] | None:
        """The zygote's reports; None if it has died. A line that is none is logged and passed over."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        reports: list[ZygoteReport] = []
        for line in self._buffer.feed(data):
            report = parse_report(line)
            if isinstance(report, Malformed):
                log.error("the zygote sent %s", report.why)
                continue
            if isinstance(report, ImportsDone):
                self.imports = report
            reports.append(report)
        return reports

    def told(self) -> dict[str, Any]:
        """What consoles are told of the imports; empty while they run."""
        return self.imports.to_json() if self.imports is not None else {}

    def close(self) -> None:
        """End the zygote, and reap it if it is our child. Its workers, if any are left, go on."""
        if not self.running:
            return
        self.running = False
        self.sock.close()  # with which it ends by itself
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
