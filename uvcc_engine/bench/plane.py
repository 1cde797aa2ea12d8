"""``bench plane``: what the message plane carries, held against a plain asyncio TCP echo in the same run.

Relay rows store every message on its own, durably (SQLite WAL, synchronous=FULL), and deliver it to another process;
direct rows are sealed and exactly once, party to party, large messages held against two processes that only seal, send
and open (``machine_sealed_loop``). ``--faults`` runs the soak instead.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from uvcc_engine.bench.launch.plane_links import RelayProcess, direct_links, relay
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine import calibration
from uvcc_engine.contract.machine.benchrows import Row, held, row, to_json, to_text
from uvcc_engine.contract.machine.calibration import BenchBar
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.contract.run_files import files
from uvcc_engine.relay import binary

_PARTY: Final = [sys.executable, "-m", "uvcc_engine.bench.party.plane_party"]
_MIB: Final = 1 << 20
_IDLE: Final = 192
_LIMIT_S: Final = 180
SEALED_SHARE: Final = 0.7
"""That a direct link must carry of what two processes seal, send and open that do nothing else."""
BARS: Final[calibration.BenchBars] = {
    ("relay_http_1k", "rate"): BenchBar(3000, "python", at_least=True),
    ("relay_stream_1k", "rate"): BenchBar(20_000, "python", at_least=True),
    ("relay_stream_1m", "rate"): BenchBar(200, "copy", at_least=True),
    ("direct_rtt_1k", "p50"): BenchBar(120, "python"),
    ("relay_idle_192", "share"): BenchBar(0.05, "python"),
    ("relay_idle_192", "p99"): BenchBar(0.05, "python"),
    ("soak_lost", "share"): BenchBar(0),
    ("soak_twice", "share"): BenchBar(0),
}


def pair(roles: tuple[str, str], config: dict[str, Any]) -> dict[str, float]:
    """Run two roles as processes; returns what both found."""
    with tempfile.TemporaryDirectory(prefix="uvcc-bench-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        processes = [subprocess.Popen([*_PARTY, role, str(path)], stdout=subprocess.PIPE) for role in roles]
        texts = [p.communicate(timeout=_LIMIT_S)[0] for p in processes]
    if any(p.returncode for p in processes):
        raise UvccError(f"a process of the benchmark ({' and '.join(roles)}) failed")
    return dict(kv for text in texts for kv in json.loads(text).items())


# -- references --------------------------------------------------------------------------------------------------------


async def _echo_rate(port: int, size: int, count: int, window: int) -> float:
    """Messages per second through the echo with ``window`` of them under way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body, free = os.urandom(size), asyncio.Semaphore(window)

    async def send() -> None:
        for _ in range(count):
            await free.acquire()
            writer.write(body)
            await writer.drain()

    begun = time.perf_counter()
    sending = asyncio.create_task(send())
    for _ in range(count):
        await reader.readexactly(size)
        free.release()
    await sending
    taken = time.perf_counter() - begun
    writer.close()
    return count / taken


async def _echo_trip(port: int, count: int) -> float:
    """Median round trip of 1 KiB in seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body, times = os.urandom(1024), []
    for _ in range(count):
        begun = time.perf_counter()
        writer.write(body)
        await reader.readexactly(1024)
        times.append(time.perf_counter() - begun)
    writer.close()
    return statistics.median(times)


@contextmanager
def echo() -> Iterator[int]:
    """A running echo process; yields its port."""
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        f.write(b"{}")
        f.flush()
        process = subprocess.Popen([*_PARTY, "echo", f.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.communicate("", timeout=10)


def disk_rate(size: int = _MIB, count: int = 64) -> float:
    """Bytes per second of sequential writes, each made durable in groups of 4 MiB: what a store can do at best."""
    body = os.urandom(size)
    with tempfile.NamedTemporaryFile(prefix="uvcc-bench-") as f:
        begun = time.perf_counter()
        for n in range(count):
            f.write(body)
            if (n + 1) * size % (4 << 20) == 0:
                f.flush()
                files.sync_data(f.fileno())
        return size * count / (time.perf_counter() - begun)


def sealing_rate(count: int = 50) -> float:
    """Bytes per second of AES-128-GCM on one core, at best."""
    cipher, body, nonce, best = AESGCM(bytes(16)), bytes(_MIB), bytes(12), float("inf")
    for _ in range(count):
        begun = time.perf_counter()
        cipher.encrypt(nonce, body, None)
        best = min(best, time.perf_counter() - begun)
    return _MIB / best


# -- rows --------------------------------------------------------------------------------------------------------------


def _through(config: dict[str, Any]) -> float:
    """Messages per second from the first enqueue to the last delivery."""
    found = pair(("produce", "consume"), config)
    return float(config["count"] / (found["ended"] - found["begun"]))


def relay_rows(runs: int, small: int, large: int) -> Iterator[Row]:
    with echo() as port:
        per_s = asyncio.run(_echo_rate(port, 1024, 20_000, 256))
        mb_s = asyncio.run(_echo_rate(port, _MIB, 200, 8)) * _MIB / 1e6
    for name, kind, count in (("relay_http_1k", "relay", small // 4), ("relay_stream_1k", "stream", small)):
        with relay() as running:
            config = {"links": running.links(kind), "size": 1024, "count": count}
            found = [_through(config) for _ in range(runs)]
        yield row(name, "rate", "msg/s", found, per_s)
    disk = [disk_rate() / 1e6 for _ in range(runs)]
    with relay() as running:
        config = {"links": running.links("stream"), "size": _MIB, "count": large}
        found = [_through(config) * _MIB / 1e6 for _ in range(runs)]
    yield row("relay_stream_1m", "rate", "MB/s", found, mb_s)
    yield row("disk_fsync_1m", "rate", "MB/s", disk)


def direct_rows(runs: int, trips: int, large: int) -> Iterator[Row]:
    with echo() as port:
        trip = asyncio.run(_echo_trip(port, trips))
        mb_s = asyncio.run(_echo_rate(port, _MIB, 200, 8)) * _MIB / 1e6
    found, bare = [], []
    for _ in range(runs):  # in turn: which cores two processes have changes both alike
        bare.append(pair(("open_in", "seal_out"), {"port": ports(1)[0], "size": _MIB, "count": large}))
        found.append(pair(("push", "pull"), {"links": direct_links(), "size": _MIB, "count": large}))
    yield row("machine_aes", "rate", "MB/s", [sealing_rate() / 1e6])
    loop = row("machine_sealed_loop", "rate", "MB/s", [f["rate"] / 1e6 for f in bare], mb_s)
    yield loop
    direct = row("direct_1m", "rate", "MB/s", [f["rate"] / 1e6 for f in found], loop.value)
    yield held(direct, SEALED_SHARE * loop.value, at_least=True)
    found = [pair(("ping", "pong"), {"links": direct_links(), "count": trips}) for _ in range(runs)]
    yield row("direct_rtt_1k", "p50", "us", [f["p50"] * 1e6 for f in found], trip * 1e6)
    yield row("direct_rtt_1k", "p99", "us", [f["p99"] * 1e6 for f in found], trip * 1e6)


async def _idle(running: RelayProcess, seconds: float) -> tuple[float, list[float]]:
    """(share of one core that the relay takes for idle pollers, seconds per enqueue beside them)."""
    host, port = running.url.removeprefix("http://").split(":")

    def request(party: int, box: int, wait_ms: int, item: bytes) -> bytes:
        items = [binary.Item(2, binary.STORE, 0, item, bytes(1024))] if item else []
        body = b"".join(binary.request_pieces(box, 1, wait_ms, 1 << 20 if wait_ms else 0, [], items))
        head = f"POST {binary.PATH} HTTP/1.1\r\nhost: relay\r\nauthorization: Bearer {running.tokens[party]}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    pollers = []
    for box in range(_IDLE):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request(1, box, 60_000, b""))
        pollers.append((reader, writer))
    await asyncio.sleep(1.0)
    before, begun = running.cpu_s(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = (running.cpu_s() - before) / (time.perf_counter() - begun)
    reader, writer = await asyncio.open_connection(host, int(port))
    times = []
    for n in range(200):
        begun = time.perf_counter()
        writer.write(request(0, n % _IDLE, 0, os.urandom(16)))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        times.append(time.perf_counter() - begun)
        await asyncio.sleep(0.005)
    for _, w in pollers:
        w.close()
    writer.close()
    return share, sorted(times)


def idle_rows(runs: int, seconds: float) -> Iterator[Row]:
    shares, tails = [], []
    for _ in range(runs):
        with relay() as running:
            share, times = asyncio.run(_idle(running, seconds))
        shares.append(share)
        tails.append(times[int(len(times) * 0.99)])
    yield row("relay_idle_192", "share", "core", shares)
    yield row("relay_idle_192", "p99", "seconds", tails)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    made = RaisingParser(prog="uvcc-engine bench plane", description=__doc__)
    made.add_argument("--json", action="store_true", help="one array of rows")
    made.add_argument("--runs", type=natural, default=3)
    made.add_argument("--quick", action="store_true", help="fewer messages: to see that it works")
    made.add_argument("--only", choices=("relay", "direct", "idle"), help="these rows alone")
    made.add_argument("--faults", action="store_true", help="the soak: every fault on, relay killed again and again")
    made.add_argument("--workers", type=natural, default=24, help="soak: workers in all")
    made.add_argument("--messages", type=int, default=200_000, help="soak: messages in all")
    made.add_argument("--kills", type=int, default=10, help="soak: how often the relay is killed -9")
    made.add_argument("--seed", type=int, default=1, help="soak: seed of the faults")
    args = made.parse_args(argv)
    speed = calibration.measure()
    if args.faults:
        from uvcc_engine.bench.scenarios.plane_soak import soak

        rows = soak(args.workers, args.messages, args.kills, args.seed)
    else:
        scale = 10 if args.quick else 1
        parts: dict[str, Callable[[], Iterator[Row]]] = {
            "relay": lambda: relay_rows(args.runs, 40_000 // scale, 300 // scale),
            "direct": lambda: direct_rows(args.runs, 5000 // scale, 2000 // scale),
            "idle": lambda: idle_rows(args.runs, 10.0 / scale),
        }
        rows = [r for name, part in parts.items() if args.only in (None, name) for r in part()]
    rows = calibration.with_bars(rows, BARS, speed)
    print(to_json(rows) if args.json else to_text(rows))
    return 0
