"""The bridge between a console's SSH channel and the agent's socket: ``python -m uvcc_engine.agent.attach --root DIR``.

Standard library only. It copies bytes both ways without looking at them; neither direction can block the other, so a
HALT gets through while the console reads slowly. If the agent is not there it says so in one line of JSON on standard
error and exits with 5.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from pathlib import Path

from uvcc_engine.agent import socketpath
from uvcc_engine.agent.socketpath import NAME as SOCKET
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.raising_parser import RaisingParser

CHUNK = 1 << 18
QUEUE = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Attach standard input and output to the agent of ``--root`` until either side ends."""
    parser = RaisingParser(prog="python -m uvcc_engine.agent.attach", description="bridge to a pod's agent")
    parser.add_argument("--root", default=os.path.expanduser("~/.uvcc"), help="the agent's directory")
    try:
        root = Path(parser.parse_args(argv).root)
    except ConfigError as error:
        print(json.dumps({"op": "error", "error": error.what, "hint": error.hint}), file=sys.stderr)
        return error.exit_code
    try:
        sock = socketpath.connect(root / SOCKET, 10.0)
    except OSError as error:
        what = f"no agent answers in {root}: {error.strerror or error}"
        print(json.dumps({"op": "error", "error": what, "hint": "start it: uvcc-engine agent"}), file=sys.stderr)
        return 5
    _copy(sock)
    return 0


def _copy(sock: socket.socket) -> None:
    sock.setblocking(False)
    os.set_blocking(1, False)
    to_agent, to_console = bytearray(), bytearray()
    console_open, agent_open, shut = True, True, False
    try:
        while agent_open or to_console:
            reads = [0] if console_open and len(to_agent) < QUEUE else []
            reads += [sock.fileno()] if agent_open and len(to_console) < QUEUE else []
            writes = [sock.fileno()] if to_agent and agent_open else []
            writes += [1] if to_console else []
            readable, writable, _ = select.select(reads, writes, [])
            if 0 in readable:
                data = os.read(0, CHUNK)
                console_open = bool(data)
                to_agent += data
            if sock.fileno() in writable:
                del to_agent[: sock.send(to_agent)]
            if not console_open and not to_agent and not shut:
                sock.shutdown(socket.SHUT_WR)
                shut = True
            if sock.fileno() in readable:
                data = sock.recv(CHUNK)
                agent_open = bool(data)
                to_console += data
            if 1 in writable:
                del to_console[: os.write(1, to_console)]
    except (BrokenPipeError, ConnectionResetError):
        return  # one side is gone, and so is the reason to be here
    finally:
        sock.close()
        os.set_blocking(1, True)


if __name__ == "__main__":
    sys.exit(main())
