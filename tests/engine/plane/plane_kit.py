"""What the plane's tests share: identities, a relay in a thread, planes of three parties."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.relay import config as relay_config
from uvcc_engine.relay import server
from uvcc_engine.transcript.signing.identity import Identity

SID = hashlib.sha256(b"subsession").digest()
GROUP = "run-1"
DAY = datetime.timedelta(days=1)


def identity(party: int) -> Identity:
    """A fixed identity per party."""
    return Identity(hashlib.sha256(b"sign%d" % party).digest(), hashlib.sha256(b"agree%d" % party).digest())


IDENTITIES = {p: identity(p) for p in range(3)}
PUBLIC = {p: i.public for p, i in IDENTITIES.items()}


class Log:
    """A recorder and an event sink that remember everything."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, Any, bytes]] = []
        self.foreseen: list[tuple[int, Any, bytes]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.seen = threading.Event()
        self.waits = 0

    def record(self, direction: int, peer: int, tag: Any, payload: Any) -> None:
        self.records.append((direction, peer, tag, bytes(payload)))

    def hash_ahead(self, peer: int, tag: Any, payload: memoryview) -> None:
        self.foreseen.append((peer, tuple(tag), bytes(payload)))

    def catch_up(self) -> None:
        self.waits += 1

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))
        self.seen.set()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [f for n, f in self.events if n == name]


def kill(plane: LivePlane) -> None:
    """End a plane as SIGKILL does: its sockets close, and nobody hears a word of it."""
    with plane._lock:
        plane._closed.set()
        plane._link.close()
    plane._background.join()


@contextlib.contextmanager
def standing_still(plane: LivePlane) -> Iterator[None]:
    """Nobody looks after a plane, as when its process is stopped: what comes is taken by the system alone."""
    with plane._lock:
        yield


def free_port() -> int:
    return ports(1)[0]


def direct_links() -> list[dict[str, Any]]:
    """Link settings of three parties on this host."""
    peers = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(3))}
    return [{"kind": "direct", "listen": peers[str(p)], "peers": peers} for p in range(3)]


def token(party: int, group: str = GROUP) -> str:
    return f"secret-token-of-{party}-in-{group}"


def relay_settings(folder: Path, **more: Any) -> dict[str, Any]:
    credentials = [{"party": p, "group": GROUP, "token": token(p)} for p in range(3)]
    return {"db": "relay.db", "ready_file": "ready.json", "credentials": credentials} | more


def write_private(path: Path, text: str) -> Path:
    path.write_text(text)
    os.chmod(path, 0o600)
    return path


@contextlib.contextmanager
def relay_thread(folder: Path, **more: Any) -> Iterator[str]:
    """A relay in this process; yields its URL."""
    settings = relay_config.from_json(relay_settings(folder, **more), folder)
    started, stop = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def body() -> None:
        async with server.serving(settings) as running:
            found["url"], found["stop"] = running.url, running.stop
            found["loop"] = asyncio.get_running_loop()
            started.set()
            await running.finished()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
        stop.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(120)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"])
        thread.join(120)
        assert stop.is_set()


def relay_links(folder: Path, url: str, kind: str = "relay") -> list[dict[str, Any]]:
    for p in range(3):
        write_private(folder / f"token{p}", token(p))
    return [{"kind": kind, "relay_url": url, "token_file": str(folder / f"token{p}"), "group": GROUP} for p in range(3)]


def certificate(folder: Path) -> Path:
    """A self-signed certificate of this host in ``cert.pem``, its key in ``key.pem``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    now, here = datetime.datetime.now(datetime.UTC), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - DAY, now + DAY)
    made = made.add_extension(x509.SubjectAlternativeName([here]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(secret)
    (folder / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    return folder / "cert.pem"


def make_plane(
    party: int,
    link: dict[str, Any],
    log: Log,
    *,
    sid: bytes = SID,
    state: Path | None = None,
    moves: Path | None = None,
) -> LivePlane:
    return open_plane(
        party=party,
        coord=f"p{party}r0s0t0",
        sid_sub=sid,
        identity=IDENTITIES[party],
        peers=PUBLIC,
        link=LinkSpec.from_json(link),
        recorder=log,
        state_dir=state or Path(os.devnull),
        on_event=log.event,
        moves=moves,
    )


def run_parties(*bodies: Callable[[], Any]) -> list[Any]:
    """Run one body per thread; returns their results, raises the first failure."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [f.result(120) for f in [pool.submit(b) for b in bodies]]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
