"""``pods_200_cpu``: what 200 pods that log 10 lines a second each cost the process that follows them.

The pods are one process with an SSH server, in which every connection is answered as an agent would. What is measured
is everything the conductor does with them: 200 SSH connections, agent channels, translation to events, the journal.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncssh

from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import python
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.rollout import ingest
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.decoder import Decoder
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.benchrows import Row, row

PODS, LINES_PER_S, BATCH_S = 200, 10, 0.1
RUN = "bench.full"
KEY, HOST = "client_key", "host_key"


async def _agent(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Acknowledge every command; once a run is watched, send its lines in batches as an agent's ticks do."""
    rest, feeding = b"", None
    try:
        while data := await process.stdin.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                message = wire.decode(line)
                process.stdout.write(wire.encode({"op": wire.ACK, "nonce": message["nonce"], "ok": True}))
                if message["op"] == wire.WATCH:
                    feeding = asyncio.create_task(_feed(process))
    except (asyncssh.Error, OSError):
        pass  # the console has gone
    finally:
        if feeding is not None:
            feeding.cancel()
        process.exit(0)


async def _feed(process: asyncssh.SSHServerProcess[bytes]) -> None:
    text = "step {} rank 0 all_reduce bucket 25.0 MiB in 3.14 ms, waiting for nobody, and what else a trainer says"
    sent, off, start = 0, 0, time.monotonic()
    while True:
        await asyncio.sleep(BATCH_S)
        due = int((time.monotonic() - start) * LINES_PER_S) - sent
        lines = [text.format(sent + k) for k in range(due)]
        if not lines:
            continue
        sent, off = sent + due, off + sum(len(line) + 1 for line in lines)
        place = {"op": wire.LINES, "run": RUN, "src": "worker_p0r0s0t0.log", "ino": 1, "off": off, "seq": sent}
        process.stdout.write(wire.encode({**place, "ts": round(time.time(), 3), "lines": lines}))


async def _pods(folder: Path) -> None:
    """Serve until standard input ends; says its port first."""
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[str(folder / HOST)],
        authorized_client_keys=str(folder / f"{KEY}.pub"),
        process_factory=_agent,
        encoding=None,
    )
    sys.stdout.write(f"{server.get_port()}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


async def _follow(folder: Path, port: int, pods: int, seconds: float, windows: int) -> None:
    """Follow that many pods as the conductor does; says the share of a core and the lines it took in each window."""
    bus = Bus(Journal(folder / JOURNAL, source="conductor"))
    following = asyncio.create_task(bus.run())
    key = asyncssh.read_private_key(str(folder / KEY))
    ingesting, clients, taken = [], [], [0]

    def count(event: ev.Event) -> None:
        taken[0] += len(event.lines) if isinstance(event, ev.LogLines) else 0

    bus.listen(count)
    for i in range(pods):
        name = f"p{i % 3}r{i // 3}"
        bus.commit(ev.PodChanged(pod=name, party=i % 3, replica=i // 3, provider="bench", state="agent"))
        client = AgentClient(PodLink(name, f"bench@127.0.0.1:{port}", key))
        member = Member(name, PodRequest(name, i % 3, i // 3), agent=client)
        member.decoders[RUN] = Decoder(name, RUN, "full", f"{name}s0t0")
        ingesting.append(asyncio.create_task(ingest.run(bus, member)))
        clients.append(client)
    await asyncio.gather(*(client.start(patience_s=120) for client in clients))
    await asyncio.gather(*(client.watch(RUN) for client in clients))
    await asyncio.sleep(1.0)
    told = []
    for _ in range(windows):
        lines, cpu, wall = taken[0], time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        lasted = time.monotonic() - wall
        told.append(
            {"share": (time.process_time() - cpu) / lasted, "lines": taken[0] - lines, "seconds": lasted},
        )
    sys.stdout.write(json.dumps(told) + "\n")
    for task in (*ingesting, following):
        task.cancel()


def bench(runs: int = 3, *, pods: int = PODS, seconds: float = 5.0, least: float = 0.9) -> list[Row]:
    """The row. Raises UvccError if less than the share ``least`` of the pods' lines arrived."""
    with scratch() as folder:
        for name in (KEY, HOST):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(str(folder / name))
            key.write_public_key(str(folder / f"{name}.pub"))
        shares = _shares(folder, pods, seconds, least, runs)
    return [row("pods_200_cpu", "share", "core", shares, 0.40)]


def _shares(folder: Path, pods: int, seconds: float, least: float, windows: int) -> list[float]:
    module = "uvcc_console.bench.pods"
    (folder / JOURNAL).unlink(missing_ok=True)
    with subprocess.Popen(
        python("-m", module, "pods", str(folder)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().decode().strip()
        args = ("-m", module, "follow", str(folder), port, str(pods), str(seconds), str(windows))
        told = subprocess.run(python(*args), check=True, capture_output=True, text=True).stdout
        server.communicate(b"")
    found: list[dict[str, Any]] = json.loads(told.splitlines()[-1])
    rate = sum(w["lines"] for w in found) / sum(w["seconds"] for w in found)
    if rate < least * pods * LINES_PER_S:
        raise UvccError(f"{rate:.0f} of {pods * LINES_PER_S} lines a second arrived", "this machine is overloaded")
    return [float(w["share"]) for w in found]


def main() -> None:
    """``pods FOLDER`` serves, ``follow FOLDER PORT PODS SECONDS WINDOWS`` is measured."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "pods":
        asyncio.run(_pods(folder))
    else:
        asyncio.run(_follow(folder, int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])))


if __name__ == "__main__":
    main()
