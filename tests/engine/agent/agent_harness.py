"""Real agents, real workers and a console of a few lines. Everything that is started here is ended here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from uvcc_engine.agent import socketpath
from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.run_files import files

PATIENCE_S = 500.0  # for a busy machine: what works comes in milliseconds
WORKER = Path(__file__).with_name("contract_worker.py")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look until it holds; the pause between looks is not what any test depends on."""
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.005)


class Console:
    """An attached console that remembers all it was sent."""

    def __init__(self, root: Path, *, hello: bool = True, **fields: Any) -> None:
        self._sock = socketpath.connect(root / "agent.sock", PATIENCE_S)
        self._buffer = LineBuffer()
        self._n = 0
        self.seen: list[dict[str, Any]] = []
        if hello:
            self.hello = self.ask(wire.HELLO, version=wire.VERSION, **fields)

    def post(self, op: str, nonce: str = "", **fields: Any) -> str:
        self._n += 1
        nonce = nonce or f"n{self._n}"
        self.send_raw(wire.encode({"op": op, "nonce": nonce, **fields}))
        return nonce

    def send_raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def ask(self, op: str, nonce: str = "", **fields: Any) -> dict[str, Any]:
        start = len(self.seen)
        nonce = self.post(op, nonce, **fields)
        return self.until(lambda m: m["op"] == wire.ACK and m["nonce"] == nonce, start=start)

    def until(self, wanted: Callable[[dict[str, Any]], bool], *, start: int = 0) -> dict[str, Any]:
        """The first message that is wanted, from ``start`` of those seen on."""
        at = start
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while at < len(self.seen):
                if wanted(self.seen[at]):
                    return self.seen[at]
                at += 1
            assert time.monotonic() < deadline, f"it never came; last seen: {self.seen[-5:]}"
            self._receive()

    def until_closed(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while self._receive():
                pass

    def _receive(self) -> bool:
        data = self._sock.recv(1 << 20)
        self.seen += [wire.decode(line) for line in self._buffer.feed(data)]
        return bool(data)

    def proc(self, coord: str, state: str, start: int = 0) -> dict[str, Any]:
        return self.until(lambda m: m["op"] == wire.PROC and m["coord"] == coord and m["state"] == state, start=start)

    def halted(self, stage: str, coord: str = "p0r0s0t0", start: int = 0) -> dict[str, Any]:
        return self.until(lambda m: m["op"] == wire.HALTED and m["stage"] == stage and m["coord"] == coord, start=start)

    def lines(self, src: str, run: str = "r") -> list[str]:
        found: list[str] = []
        for m in self.seen:
            if m["op"] == wire.LINES and m["src"] == src and m["run"] == run:
                found += m["lines"]
        return found

    def records(self, src: str, run: str = "r") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(src, run)]

    def cursors(self) -> dict[str, list[int]]:
        return {f"{m['run']}/{m['src']}": [m["ino"], m["off"]] for m in self.seen if m["op"] == wire.LINES}

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Pod:
    """A root with its agents. ``close`` ends every process that its state files name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *options: str, env: dict[str, str] | None = None, preload: str = "none") -> dict[str, Any]:
        """Start an agent; returns what it says of itself."""
        command = [sys.executable, "-m", "uvcc_engine.agent", "--root", str(self.root), "--preload", preload, *options]
        with (self.root.parent / "agent.err").open("a") as err:
            agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                cwd=self.root.parent,
            )
        assert agent.stdout is not None
        self.agents.append(agent)
        line = agent.stdout.readline()
        assert line, (self.root.parent / "agent.err").read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def console(self, **fields: Any) -> Console:
        return Console(self.root, **fields)

    def kill_agent(self) -> None:
        self.agents[-1].kill()
        self.agents[-1].wait()

    def spec(self, coord: str = "p0r0s0t0", run: str = "r", **changes: Any) -> dict[str, Any]:
        """A worker that writes the run contract; ``job`` tells it what to do (see contract_worker.py)."""
        replicas = 1 + int(coord.split("r")[1].split("s")[0])
        spec: dict[str, Any] = {"run": run, "kind": "command", "coord": coord, "topology": {"replicas": replicas}}
        return {**spec, "argv": [sys.executable, str(WORKER)], **changes}

    def run_dir(self, run: str = "r") -> Path:
        return self.root / "runs" / run

    def worker_id(self, coord: str = "p0r0s0t0", run: str = "r") -> ProcessId:
        return ProcessId.from_json(files.read_json(self.root / "state" / run / f"{coord}.json")["id"])

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
                try:
                    agent.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()
        for path in (self.root / "state").glob("*/*.json"):
            ProcessId.from_json(files.read_json(path)["id"]).send_group(signal.SIGKILL)


@contextlib.contextmanager
def pod_at(root: Path) -> Iterator[Pod]:
    pod = Pod(root)
    try:
        yield pod
    finally:
        pod.close()


def launched(pod: Pod, console: Console, *workers: dict[str, object], run: str = "r") -> dict[str, object]:
    return console.ask(wire.LAUNCH, run=run, workers=list(workers) or [pod.spec(run=run)])
