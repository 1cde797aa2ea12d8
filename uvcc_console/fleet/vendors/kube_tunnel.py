"""A port of a pod through its cluster's API server: ``pods/portforward`` over a WebSocket.

One WebSocket carries one connection, in this process: no port is opened on this machine, and nothing has to be kept
running beside the console. Each message begins with the number of its channel: 0 is the data of the port, 1 its errors;
the first on each repeats the port.

``python -m`` this module is OpenSSH's ProxyCommand for such a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from uvcc_console.core.log import logger
from uvcc_console.fleet.vendors import kubeconfig
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log = logger(__name__)

DOMAIN: Final = "pod.kubernetes"
CONNECT_S: Final = 15.0
BLOCK: Final = 65536
_PROTOCOL: Final = "v4.channel.k8s.io"
_HOST: Final = re.compile(rf"([a-z0-9][a-z0-9.-]{{0,252}})\.([a-z0-9][a-z0-9-]{{0,62}})\.{re.escape(DOMAIN)}")
_pumps: set[asyncio.Task[None]] = set()
_clusters: dict[tuple[str, str, str], kubeconfig.Cluster] = {}


def host_of(pod: str, namespace: str) -> str:
    """What stands for the pod's host in its address."""
    return f"{pod}.{namespace}.{DOMAIN}"


def jump_of(fleet: Mapping[str, Any], address: str) -> str:
    """The way to this address; empty for one that is no pod of a cluster."""
    host = address.rpartition("@")[2].rpartition(":")[0]
    return way(fleet) if _HOST.fullmatch(host) else ""


def way(fleet: Mapping[str, Any]) -> str:
    return f"kubernetes:{fleet.get('context', '')}|{fleet.get('kubeconfig', '')}"


def needed() -> None:
    """Raises ConfigError where the extra is not installed."""
    if importlib.util.find_spec("websockets") is None:
        raise ConfigError("pods of Kubernetes are reached over WebSockets", "pip install 'uvcc[kubernetes]'")


async def _open(where: str, host: str, port: int) -> ClientConnection:
    needed()
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus, WebSocketException

    found = _HOST.fullmatch(host)
    if found is None or not 0 < port < 65536:
        raise UnreachableError(f"{clean(host)[:120]}:{port} is no pod of a cluster")
    context, _, file = where.partition("|")
    asked = (context, file, found[2])
    cluster = _clusters[asked] if asked in _clusters else _clusters.setdefault(asked, kubeconfig.find(*asked))
    token = await cluster.who.token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = (
        f"ws{cluster.server.removeprefix('http')}/api/v1/namespaces/{found[2]}/pods/{found[1]}/portforward?ports={port}"
    )
    try:
        return await connect(
            url,
            ssl=cluster.tls,
            additional_headers=headers,
            subprotocols=[_PROTOCOL],  # type: ignore[list-item]
            compression=None,
            open_timeout=CONNECT_S,
            max_size=1 << 24,
            proxy=True if cluster.tls is not None else None,
        )
    except InvalidStatus as e:
        status = e.response.status_code
        body = clean((e.response.body or b"").decode(errors="replace"))[:200]
        hints = {401: "log in to the cluster anew", 403: "pods/portforward has to be allowed", 404: "the pod is gone"}
        what = f"the cluster does not lead to {found[1]}: {status} {body}".rstrip()
        raise UnreachableError(what, hints.get(status, "is the pod running?")) from e
    except (WebSocketException, TimeoutError) as e:
        raise ConnectionError(f"the cluster's API server at {cluster.server}: {type(e).__name__} {e}") from e


async def through(where: str, host: str, port: int) -> socket.socket:
    """One end of a pair of sockets; the other is pumped to and from the pod until either side ends."""
    web = await _open(where, host, port)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=theirs)
    task = asyncio.create_task(_pump(web, reader, writer, port))
    _pumps.add(task)
    task.add_done_callback(_pumps.discard)
    return ours


async def _pump(web: ClientConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    up = asyncio.create_task(_up(web, reader))
    down = asyncio.create_task(_down(web, writer, port))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (up, down):
            task.cancel()
        for end in await asyncio.gather(up, down, return_exceptions=True):
            if isinstance(end, Exception):
                log.info("a tunnel to a pod has ended: %s", end)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await web.close()


async def _up(web: ClientConnection, reader: asyncio.StreamReader) -> None:
    while data := await reader.read(BLOCK):
        await web.send(b"\x00" + data)


async def _down(web: ClientConnection, writer: asyncio.StreamWriter, port: int) -> None:
    greeted = {0: False, 1: False}
    async for message in web:
        data = message if isinstance(message, bytes) else message.encode()
        channel = data[0] if data else -1
        if channel not in greeted:
            raise ConnectionError(f"the API server sent something on channel {channel}")
        if not greeted[channel]:
            greeted[channel] = True
            if data[1:] != port.to_bytes(2, "little"):
                raise ConnectionError("the API server leads to another port")
        elif channel == 1:
            log.warning("a pod's port is not reached: %s", clean(data[1:].decode(errors="replace"))[:300])
            return
        else:
            writer.write(data[1:])
            await writer.drain()


async def _proxy(where: str, host: str, port: int) -> None:
    """Standard input and output as the connection."""
    web = await _open(where, host, port)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    await _pump(web, reader, asyncio.StreamWriter(transport, protocol, reader, loop), port)


if __name__ == "__main__":
    try:
        asyncio.run(_proxy(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except (UvccError, OSError) as e:
        sys.exit(f"uvcc: {e}")
