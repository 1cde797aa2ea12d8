"""Forwards one TCP port to an address and holds every byte back for a while, both ways.

``python delay_proxy.py HOST:PORT SECONDS`` prints the port it listens on and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys


async def hold_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """Copy until the end of ``reader``; what came together leaves together, ``delay`` seconds later."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()
    under_way = 0

    def leave(data: bytes) -> None:
        nonlocal under_way
        under_way -= 1
        writer.write(data)
        sent.set()

    while data := await reader.read(1 << 16):
        under_way += 1
        loop.call_later(delay, leave, data)
    while under_way:
        sent.clear()
        await sent.wait()
    writer.close()


async def main(target: str, delay: float) -> None:
    host, _, port = target.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()  # its dialler tries again
            return
        await asyncio.gather(hold_back(reader, back, delay), hold_back(there, writer, delay), return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
