"""One process of the plane's benchmark: ``-m uvcc_engine.bench.party.plane_party ROLE CONFIG`` prints one line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.plane import frame as fr
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.connect import open_link, open_plane
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.plane.timing import Outgoing
from uvcc_engine.transcript.signing.identity import Identity

SID: Final = hashlib.sha256(b"bench plane").digest()
_SMALL: Final = 1024
_BATCH: Final = 64
_NONCE, _TAG = 12, 16  # bytes, of AES-GCM


def identity(party: int) -> Identity:
    """A fixed identity: the benchmark protects nothing."""
    return Identity(hashlib.sha256(b"sign%d" % party).digest(), hashlib.sha256(b"agree%d" % party).digest())


def plane(config: dict[str, Any], party: int) -> LivePlane:
    peers = {p: identity(p).public for p in (0, 1)}
    return open_plane(
        party=party,
        coord=f"p{party}r0s0t0",
        sid_sub=SID,
        identity=identity(party),
        peers=peers,
        link=LinkSpec.from_json(config["links"][party]),
        recorder=None,
        state_dir=Path(os.devnull),
        on_event=lambda name, fields: None,
    )


def ping(config: dict[str, Any]) -> dict[str, float]:
    """Round trips of 1 KiB, sealed: p50 and p99 in seconds."""
    link, body, times = plane(config, 0), os.urandom(_SMALL), []
    for op in range(config["count"]):
        begun = time.perf_counter()
        link.send(1, Tag(op // 64, 0, op, 1), body)
        link.recv(1, Tag(op // 64, 0, op, 1))
        times.append(time.perf_counter() - begun)
    link.close()
    warm = sorted(times[len(times) // 5 :])
    return {"p50": statistics.median(warm), "p99": warm[int(len(warm) * 0.99)]}


def pong(config: dict[str, Any]) -> dict[str, float]:
    link = plane(config, 1)
    for op in range(config["count"]):
        tag = Tag(op // 64, 0, op, 1)
        link.send(0, tag, link.recv(0, tag))
    link.close()
    return {}


def push(config: dict[str, Any]) -> dict[str, float]:
    link, body = plane(config, 0), os.urandom(config["size"])
    for op in range(config["count"]):
        link.send(1, Tag(op // 64, 0, op, 1), body)
    link.recv(1, Tag(0, 1, 0, 1))
    link.close()
    return {}


def pull(config: dict[str, Any]) -> dict[str, float]:
    """Bytes per second of sealed messages, after the first."""
    link, size = plane(config, 1), config["size"]
    link.recv(0, Tag(0, 0, 0, 1))
    begun = time.perf_counter()
    for op in range(1, config["count"]):
        link.recv(0, Tag(op // 64, 0, op, 1))
    rate = size * (config["count"] - 1) / (time.perf_counter() - begun)
    link.send(0, Tag(0, 1, 0, 1), b"")
    link.close()
    return {"rate": rate}


def produce(config: dict[str, Any]) -> dict[str, float]:
    """Store frames of ``size`` bytes in the relay, each a message of its own; ends when all are durable."""
    link = open_link(0, SID, LinkSpec.from_json(config["links"][0]), (1,))
    body = os.urandom(config["size"] - fr.HEADER_BYTES)
    aad = fr.pack_header(fr.DATA, 0, 1, fr.sid64(SID), 0, 0, 0, 0, len(body))
    head = fr.finish(aad, body)
    batch = max(1, min(_BATCH, (4 << 20) // config["size"]))
    seq, session = 0, int.from_bytes(os.urandom(8), "little")
    begun = time.time()
    while seq < config["count"]:
        if link.ready(1):
            for _ in range(min(batch, config["count"] - seq)):
                link.send(1, Outgoing((head, body), config["size"], 0, (session, 0, seq, 0)))
                seq += 1
        link.exchange(0.0 if link.ready(1) else 1.0, None)
    while link.unconfirmed():
        link.exchange(1.0, None)
    link.close()
    return {"begun": begun}


def consume(config: dict[str, Any]) -> dict[str, float]:
    """Take ``count`` messages and acknowledge them."""
    link = open_link(1, SID, LinkSpec.from_json(config["links"][1]), (0,))
    found = 0
    while found < config["count"]:
        found += len(link.exchange(1.0, 0))
    ended = time.time()
    link.exchange(0.0, 0)
    link.close()
    return {"ended": ended}


def echo(config: dict[str, Any]) -> dict[str, float]:
    """The reference: a plain asyncio TCP echo. Announces its port, ends with its standard input."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def body() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
        server.close()

    asyncio.run(body())
    return {}


def seal_out(config: dict[str, Any]) -> dict[str, float]:
    """The physical limit of ``push``: seal, and write to a socket, and nothing else."""
    cipher, body = AESGCM(bytes(16)), os.urandom(config["size"])
    sealed = bytearray(len(body) + _TAG)
    with _connected(config["port"]) as at:
        for number in range(config["count"]):
            cipher.encrypt_into(number.to_bytes(_NONCE, "little"), body, None, sealed)
            at.sendall(sealed)
        at.recv(1)
    return {}


def _connected(port: int, patience_s: float = 30.0) -> socket.socket:
    """A connection to the other process, which may not listen yet."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def open_in(config: dict[str, Any]) -> dict[str, float]:
    """The physical limit of ``pull``: read from a socket and open, in place. Bytes per second, after the first."""
    cipher, sealed = AESGCM(bytes(16)), memoryview(bytearray(config["size"] + _TAG))
    body, begun = bytearray(config["size"]), 0.0
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", config["port"]))
        listening.listen(1)
        at, _ = listening.accept()
    with at:
        for number in range(config["count"]):
            got = 0
            while got < len(sealed):
                got += at.recv_into(sealed[got:])
            cipher.decrypt_into(number.to_bytes(_NONCE, "little"), sealed, None, body)
            begun = begun or time.perf_counter()
        taken = time.perf_counter() - begun
        at.send(b".")
    return {"rate": config["size"] * (config["count"] - 1) / taken}


ROLES: Final[dict[str, Callable[[dict[str, Any]], dict[str, float]]]] = {
    f.__name__: f for f in (ping, pong, push, pull, seal_out, open_in, produce, consume, echo)
}


if __name__ == "__main__":
    keep_freed_memory()  # as a worker does
    print(json.dumps(ROLES[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text()))))
