"""``uvcc bench ssh``: 500 SSH connections to 200 pods, as the console opens them, and what they hold.

The pods are one process with an SSH server on 200 ports. A process of its own opens the connections, each with one
command, keeps all of them open and says how long that took and what memory it has then. Beside it, as what is held
against, the same number of bare connections of the SSH library, without the console's pins, limits and reconnects.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import asyncssh

from uvcc_console.bench.scratch import scratch
from uvcc_console.bench.terminal import python
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.benchrows import Row, row

PODS, LINKS = 200, 500
AT_ONCE = 64
KEY, HOST = "client_key", "host_key"
PATIENT = Timeouts(connect=60.0, login=60.0, operation=60.0, keepalive_s=0.0)
MODULE = "uvcc_console.bench.ssh_links"


async def _answer(process: asyncssh.SSHServerProcess[str]) -> None:
    process.stdout.write("here\n")
    process.exit(0)


async def _serve(folder: Path, pods: int) -> None:
    """Serve until standard input ends; says its ports first."""
    ports = []
    for _ in range(pods):
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[str(folder / HOST)],
            authorized_client_keys=str(folder / f"{KEY}.pub"),
            process_factory=_answer,
        )
        ports.append(server.get_port())
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


async def _connect(folder: Path, ports: list[int], links: int, bare: bool) -> None:
    """Open so many connections, keep them, and say what that took."""
    key = asyncssh.read_private_key(str(folder / KEY))
    narrow = asyncio.Semaphore(AT_ONCE)
    kept: list[object] = []

    async def one(n: int) -> None:
        port = ports[n % len(ports)]
        async with narrow:
            if bare:
                connection = await asyncssh.connect("127.0.0.1", port, client_keys=[key], known_hosts=None, config=None)
                said = str((await connection.run("true")).stdout).strip()
                kept.append(connection)
            else:
                link = PodLink(f"p{n}", f"bench@127.0.0.1:{port}", key, timeouts=PATIENT)
                said = await link.sh("true")
                kept.append(link)
        if said != "here":
            raise UvccError(f"a pod answered {said[:40]!r}")

    began = time.monotonic()
    await asyncio.gather(*(one(n) for n in range(links)))
    took = time.monotonic() - began
    sys.stdout.write(json.dumps({"seconds": took, "mib": _peak_mib(), "links": len(kept)}) + "\n")
    sys.stdout.flush()


def _peak_mib() -> float:
    """The most memory that this program had. What getrusage says counts the process that it was forked from as well."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def bench(runs: int = 3, *, pods: int = PODS, links: int = LINKS) -> list[Row]:
    """The rows. Raises UvccError where not every connection came up."""
    with scratch() as folder:
        for name in (KEY, HOST):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(str(folder / name))
            key.write_public_key(str(folder / f"{name}.pub"))
        own = [_one(folder, pods, links, "own") for _ in range(runs)]
        bare = _one(folder, pods, links, "bare")
    return [
        row("ssh_500", "seconds", "s", [seconds for seconds, _ in own], bare[0]),
        row("ssh_500", "bytes", "MiB", [mib for _, mib in own], bare[1]),
    ]


def _one(folder: Path, pods: int, links: int, how: str) -> tuple[float, float]:
    serving = python("-m", MODULE, "pods", str(folder), str(pods))
    with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        ports = server.stdout.readline().decode().strip()
        command = python("-m", MODULE, how, str(folder), ports, str(links))
        told = subprocess.run(command, capture_output=True, text=True)
        server.communicate(b"")
    if told.returncode:
        raise UvccError(f"not every connection came up: {told.stderr[-300:]}", "is this machine overloaded?")
    found = json.loads(told.stdout.splitlines()[-1])
    if found["links"] != links:
        raise UvccError(f"{found['links']} of {links} connections came up")
    return float(found["seconds"]), float(found["mib"])


def main() -> None:
    """``pods FOLDER N`` serves, ``own|bare FOLDER PORTS N`` is measured."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "pods":
        asyncio.run(_serve(folder, int(sys.argv[3])))
    else:
        asyncio.run(_connect(folder, json.loads(sys.argv[3]), int(sys.argv[4]), what == "bare"))


if __name__ == "__main__":
    main()
