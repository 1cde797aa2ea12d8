"""The links that benchmarks measure: a relay process of their own, and sockets between two parties."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent.processes.relays import READY
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.free_ports import ports

_GROUP: Final = "bench"


class RelayProcess:
    """A relay in a folder of its own. ``links`` are the settings of the three parties."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        tokens = {p: os.urandom(16).hex() for p in range(PARTIES)}
        credentials = [{"party": p, "group": _GROUP, "token": t} for p, t in tokens.items()]
        settings = {"db": "relay.db", "ready_file": READY, "stream_listen": "127.0.0.1:0"}
        self._config = folder / "relay.json"
        for path, text in [
            (self._config, json.dumps(settings | {"credentials": credentials} | more)),
            *((folder / f"token{p}", t) for p, t in tokens.items()),
        ]:
            path.touch(mode=0o600)
            path.write_text(text)
        self.tokens = tokens
        self.start()

    def start(self) -> None:
        ready = self.folder / READY
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, "-m", "uvcc_engine.relay", "--config", str(self._config)])
        while not ready.exists():
            if self.process.poll() is not None:
                raise UvccError("the relay of the benchmark did not start")
            time.sleep(0.02)
        found = json.loads(ready.read_text())
        self.url, self.stream = str(found["url"]), str(found["stream"])

    def links(self, kind: str) -> list[dict[str, Any]]:
        common = {"kind": kind, "relay_url": self.url, "stream": self.stream, "group": _GROUP}
        return [common | {"token_file": str(self.folder / f"token{p}")} for p in range(PARTIES)]

    def cpu_s(self) -> float:
        """Processor seconds so far (Linux)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@contextmanager
def relay(**more: Any) -> Iterator[RelayProcess]:
    with tempfile.TemporaryDirectory(prefix="uvcc-bench-") as folder:
        running = RelayProcess(Path(folder), **more)
        try:
            yield running
        finally:
            running.stop()


def direct_links() -> list[dict[str, Any]]:
    """Link settings of two parties on this host."""
    peers = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(2))}
    return [{"kind": "direct", "listen": peers[str(p)], "peers": peers} for p in range(2)]
