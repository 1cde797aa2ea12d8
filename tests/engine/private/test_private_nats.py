"""A whole private run over a real NATS server that is struck in the middle of it; the transcripts hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_kit import Fleet, Zygote, free_port, until

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.transcript.proof.bundle import assemble_folder
from uvcc_engine.transcript.proof.verifier import verify

BINARY = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(BINARY is None, reason="no nats-server on this machine")
pytest.importorskip("nats")

JOB = PrivateJob(steps=12, batch=64, checkpoint_every=4, test_rows=50, reveal=("loss", "accuracy"))
PATIENCE_S = 500.0
MOST_PUBLISHED = 400  # messages of half a megabyte: far more than sockets and the server's limit hold


class Broker:
    """A nats-server that can be killed and started again on the same port and store, with other settings."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.port = folder, free_port()
        self.settings = {"jetstream": {"store_dir": str(folder / "store")}, **settings}
        self.start()

    def start(self) -> None:
        config = self.folder / "nats.conf"
        config.write_text(json.dumps({"listen": f"127.0.0.1:{self.port}"} | self.settings))
        assert BINARY is not None
        self.process = subprocess.Popen([BINARY, "-c", str(config)], stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b"Server is ready" in line:
                break
        self.said = b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)


class Aborting:
    """A way to the broker whose connections can be reset, all at once."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._pairs.append((near, far))
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    @staticmethod
    def _pass(a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := a.recv(1 << 16):
                b.sendall(data)
        for end in (a, b):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._pairs)

    def abort(self) -> None:
        """Reset every connection in the middle of whatever it carries."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self.abort()


def links(port: int) -> list[dict[str, Any]]:
    return [{"kind": "nats", "nats_url": f"nats://127.0.0.1:{port}", "group": "test.full"} for _ in range(3)]


def at_epoch(fleet: Fleet, epoch: int) -> None:
    until(lambda: epoch in fleet.roots(0), PATIENCE_S, f"epoch {epoch}")


def verified(fleet: Fleet, folder: Path) -> bool:
    folder.mkdir()
    for p in range(3):
        name = f"transcript_p{p}r0s0t0"
        shutil.copytree(fleet.dir(p) / name, folder / name)
    shutil.copy(fleet.home(0) / "policy.json", folder / "policy.json")
    shutil.copy(fleet.home(0) / "signatures.json", folder / "policy_signatures.json")
    return verify(assemble_folder(folder)).level == "transcripts"


def killed(broker: Broker, fleet: Fleet, way: Aborting) -> None:
    at_epoch(fleet, 3)
    broker.kill()
    broker.start()


def aborted(broker: Broker, fleet: Fleet, way: Aborting) -> None:
    """Twelve times in a row, whatever each connection carries just then."""
    at_epoch(fleet, 2)
    for _ in range(12):
        until(lambda: way.open, PATIENCE_S, "a connection")
        way.abort()


def full(broker: Broker, fleet: Fleet, way: Aborting) -> None:
    """The stream takes no more for a while."""

    async def limited() -> None:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{broker.port}")
        jetstream = client.jetstream()
        config = (await jetstream.streams_info())[0].config
        whole = config.max_bytes
        await jetstream.update_stream(replace(config, max_bytes=20_000))
        full = lambda: any("is full: raise its max_bytes" in str(fleet.events(p, "relay_down")) for p in range(3))  # noqa: E731
        await asyncio.to_thread(until, full, PATIENCE_S, "a full stream")
        await jetstream.update_stream(replace(config, max_bytes=whole))
        await client.close()

    at_epoch(fleet, 2)
    asyncio.run(limited())


def slow(broker: Broker, fleet: Fleet, way: Aborting) -> None:
    """A worker reads nothing for a while; the server ends its connection when more than its limit waits there."""

    async def flooded() -> None:
        import nats

        client = await nats.connect(f"nats://127.0.0.1:{broker.port}")
        signs = await client.subscribe("uvccp.test_full.>")
        async for sign in signs.messages:
            if sign.subject.endswith(".1"):
                break
        await signs.unsubscribe()
        for _ in range(MOST_PUBLISHED):
            await client.publish(sign.subject, bytes(1 << 19))
            await client.flush(int(PATIENCE_S))
            if b"Slow Consumer" in broker.said:
                break
        await client.close()
        assert b"Slow Consumer" in broker.said

    at_epoch(fleet, 2)
    os.kill(fleet.pids[1], signal.SIGSTOP)  # its peers go on telling it that they are alive
    try:
        asyncio.run(flooded())
    finally:
        os.kill(fleet.pids[1], signal.SIGCONT)


@pytest.mark.ci("tests/engine/plane/test_plane_nats.py")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strike", [killed, aborted, full, slow])
def test_a_run_whose_broker_is_struck_goes_on_to_its_end_and_verifies(
    tmp_path: Path, zygote: Zygote, strike: Callable[[Broker, Fleet, Aborting], None]
) -> None:
    """Behind a full stream, or a connection that a server had ended as too slow, the parties waited for ever."""
    broker = Broker(tmp_path, **({"max_pending": 2 << 20} if strike is slow else {}))
    way = Aborting(broker.port)
    fleet = Fleet(tmp_path / "fleet", zygote, JOB, links(way.port if strike is aborted else broker.port))
    try:
        fleet.launch()
        strike(broker, fleet, way)
        assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    finally:
        way.close()
        broker.kill()
    assert verified(fleet, tmp_path / "verified")
    told = [e for p in range(3) for e in fleet.events(p, "relay_down")]
    assert told  # it was an outage, and was told
