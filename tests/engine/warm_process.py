"""A process that has imported the worker and loaded its compiled loops; what workers are forked from is forked from it.

``warm_process.py SOCKET``: each connection gets a process of its own, whose standard input and output it becomes. Its
first line, of JSON, says which: the ``kind`` is a name in ``MAIN``, and ``env`` is added to its environment. The pid is
the first line of the answer. This process listens until its standard input ends, which is one pytest worker's; those
that it forked, for others too, go on to the end of theirs, and have the folder for as long.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import private_zygote
import rank_process
import torch

import uvcc_engine.worker.main  # noqa: F401  # imported here so that those that are forked need not
from uvcc_engine.bench.launch import fleet_forker

MAIN = {"zygote": private_zygote.main, "forker": fleet_forker.main, "rank": rank_process.main}


@functools.cache
def prepare_for_ranks() -> None:
    """Of a whole session's tests only those of trainings pay for it, and once."""
    rank_process.prepare()


def asked_for(connection: socket.socket) -> dict[str, Any]:
    """The first line of a connection: whoever asks writes it at once."""
    line = b""
    while not line.endswith(b"\n"):
        found = connection.recv(1)  # no more than that: the rest is the main function's to read
        if not found:
            raise EOFError
        line += found
    asked: dict[str, Any] = json.loads(line)
    return asked


def become(connection: socket.socket, asked: dict[str, Any]) -> None:
    """The process of one connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(asked["env"])
    main = MAIN[asked["kind"]]
    for target in (0, 1):
        os.dup2(connection.fileno(), target)
    connection.close()
    print(os.getpid(), flush=True)
    main()
    sys.stdout.flush()


def answer(connection: socket.socket, listener: socket.socket) -> None:
    """Fork the process of one connection, unless whoever asked is gone."""
    try:
        asked = asked_for(connection)
    except (EOFError, OSError):
        connection.close()
        return
    if asked["kind"] == "rank":
        prepare_for_ranks()
    gc.freeze()
    if os.fork() == 0:
        status = 70
        try:
            listener.close()
            become(connection, asked)
            status = 0
        finally:
            os._exit(status)
    connection.close()


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
        answer(connection, listener)


@contextlib.contextmanager
def nobody_asks(folder: Path) -> Iterator[None]:
    """Whoever wants a connection, or a process in the place of this one, holds this lock meanwhile."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def leave(listener: socket.socket, place: Path) -> None:
    """Answer who has asked already; the folder goes with the last one forked, unless another process has it by then."""
    asked: list[socket.socket] = []
    with nobody_asks(place.parent):
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                asked.append(listener.accept()[0])
        place.unlink(missing_ok=True)
    for connection in asked:
        connection.setblocking(True)
        answer(connection, listener)
    listener.close()
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all of them, as their ends are ignored
    with nobody_asks(place.parent):
        if not place.exists():
            shutil.rmtree(place.parent, ignore_errors=True)


def main() -> None:
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}.new")
        listener.listen(64)
        os.rename(f"{place}.new", place)  # from here on it answers
        serve(listener)
        leave(listener, place)


if __name__ == "__main__":
    main()
