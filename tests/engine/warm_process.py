"""A process that has imported the worker and loaded its compiled loops; what workers are forked from is forked from it.

``warm_process.py SOCKET``: each connection gets a process of its own, whose standard input and output it becomes. Its
first line, of JSON, says which: the ``kind`` is a name in ``MAIN``, and ``env`` is added to its environment. The pid is
the first line of the answer. This process ends when its standard input does; those that it forked go on to the end of
theirs.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

import private_zygote
import torch

import uvcc_engine.worker.main  # noqa: F401  # imported here so that those that are forked need not
from uvcc_engine.bench.launch import fleet_forker

MAIN = {"zygote": private_zygote.main, "forker": fleet_forker.main}


def become(connection: socket.socket) -> None:
    """The process of one connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line = b""
    while not line.endswith(b"\n"):
        line += connection.recv(1)  # no more than that: the rest is the main function's to read
    asked = json.loads(line)
    os.environ.update(asked["env"])
    main = MAIN[asked["kind"]]
    for target in (0, 1):
        os.dup2(connection.fileno(), target)
    connection.close()
    print(os.getpid(), flush=True)
    main()
    sys.stdout.flush()


def serve(listener: socket.socket) -> None:
    """Until nobody holds the other end of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    ready = False
    while True:
        found, _, _ = select.select([0, listener], [], [])
        if 0 in found:
            return
        connection, _ = listener.accept()
        ready = ready or private_zygote.prepared()  # nothing is compiled yet where no worker ever ran
        gc.freeze()
        if os.fork() == 0:
            status = 70
            try:
                listener.close()
                become(connection)
                status = 0
            finally:
                os._exit(status)
        connection.close()


def main() -> None:
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen(64)
        os.rename(f"{place}.new", place)  # from here on it answers
        serve(listener)
    shutil.rmtree(place.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
