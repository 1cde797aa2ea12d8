"""A process that has imported torch; the zygotes of local pods are forked from it, and need not import it themselves.

``preloaded_server.py SOCKET SECONDS BLANKS``, with blanks where a fork's command line shall be shown. It is run as a
file: nothing of the engine that started it is shared, since each pod has a copy of the engine of its own. It computes
nothing and holds nothing that a pod must not see. Each connection brings one request and four open files: standard
input, output and error of the fork, and its agent. The fork takes the agent's environment over, also where the system
shows it, for by that a pod's processes are known. This process ends when its socket is gone or its time is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

SHARED: Final = (
    "torch",
    "torch.distributed.device_mesh",
    "numpy",
    "numba",
    "numba.core.caching",
    "starlette.applications",
    "httpx",
    "httptools",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.hkdf",
    "safetensors.torch",
    "google_crc32c",
    "blake3",
)
"""What workers take from other packages; all others together take a process half a second."""
LOOK_S: Final = 0.5
PATIENCE_S: Final = 5.0  # for the whole of a request that has begun
LONGEST: Final = 1 << 20
_FILES: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36


def main() -> int:
    place, life_s = sys.argv[1], float(sys.argv[2])
    end = time.monotonic() + life_s
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks, and their orphans
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.socket(socket.AF_UNIX) as listener:
        early = os.path.join(os.path.dirname(place), f"torch~{os.getpid():x}")  # its own, and no longer than the place
        with contextlib.suppress(FileNotFoundError):
            os.unlink(early)  # of one that was killed here
        listener.bind(early)
        os.chmod(early, 0o600)
        mine = os.stat(early).st_ino
        listener.listen(64)
        os.rename(early, place)  # whoever finds it there is answered
        while time.monotonic() < end and _inode(place) == mine:
            if select.select([listener], [], [], LOOK_S)[0]:
                _serve(listener)
        if _inode(place) == mine:
            os.unlink(place)
    return 0


def _inode(place: str) -> int:
    try:
        return os.stat(place).st_ino
    except OSError:
        return 0


def _serve(listener: socket.socket) -> None:
    """Fork for one connection; who asks for something else gets nothing, and its files are closed."""
    connection, _ = listener.accept()
    files: list[int] = []
    try:
        connection.settimeout(PATIENCE_S)
        request = _received(connection, files)
        if len(files) == _FILES:
            _import_once()
            if os.fork() == 0:
                _end_in(request, files, (listener, connection))
    except (OSError, ValueError):
        pass  # the agent finds its socket closed
    finally:
        connection.close()
        for fd in files:
            os.close(fd)


@cache
def _import_once() -> None:
    """With the first request, for pods may have no agent; whoever comes meanwhile waits."""
    for name in SHARED:
        with contextlib.suppress(Exception):  # the fork tries again, and its agent is told what is missing
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _fill_tables()
    gc.collect()
    gc.freeze()


def _fill_tables() -> None:
    """What numba does before it loads the first loop: it imports its own array functions, and tables of their types."""
    target = importlib.import_module("numba.core.registry").cpu_target
    target.target_context.refresh()
    target.typing_context.refresh()


def _received(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """The request, one line of JSON; what files came with it are added to ``files``. Raises OSError, ValueError."""
    text = b""
    while not text.endswith(b"\n"):
        data, came, _, _ = socket.recv_fds(connection, 1 << 16, _FILES)
        files += came
        text += data
        if not data or len(text) > LONGEST:
            raise ValueError("cut short, or no request")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no request")
    return found


def _end_in(request: Mapping[str, Any], files: Sequence[int], inherited: Sequence[socket.socket]) -> None:
    """Become the zygote of the agent that asked; never returns."""
    try:
        for one in inherited:
            one.close()
        for fd, target in zip(files, (0, 1, 2), strict=False):
            os.dup2(fd, target)
        _take_over(request)
        from uvcc_engine.agent.processes import zygote  # the pod's own

        zygote.log_to_stderr()
        zygote.become(socket.socket(fileno=files[3]), request["preload"], request["root"], request["give_way"])
    except BaseException:
        logging.exception("no zygote came of this process")
    os._exit(70)


def _take_over(request: Mapping[str, Any]) -> None:
    """Be as if this were a fork of the agent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), request["nice"]))
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()  # before the memory is written to in which it lies
    _show(request["argv"], request["environ"])
    os.environ.update(request["environ"])
    sys.path[:] = request["path"]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()


def _show(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Write command line and environment where the system reads them. Raises ValueError if there is no room."""
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    words = b"\0".join(map(os.fsencode, argv))
    pairs = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    if len(pairs) >= env_end - env_start:
        raise ValueError("no room for this environment")
    for start, end, text in ((arg_start, arg_end, words), (env_start, env_end, pairs)):
        room = end - start
        ctypes.memmove(start, text[: room - 1].ljust(room, b"\0"), room)


if __name__ == "__main__":
    sys.exit(main())
