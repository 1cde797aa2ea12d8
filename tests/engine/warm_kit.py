"""Forkers of workers that begin at once: children of one process per test session, which has imported everything.

To import torch and to load the compiled loops costs five processor seconds, which every module would pay in every
pytest worker that runs a test of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvcc_engine
from uvcc_engine.bench.launch.fleet import CODE, Forker

HERE = Path(__file__).parent
PATIENCE_S = 500.0
_owned: list[subprocess.Popen[bytes]] = []


def _folder() -> Path:
    """This session's, whichever pytest worker asks; its path is short, for a socket lies in it."""
    folder = Path("/tmp", f"uw-{os.environ.get('PYTEST_XDIST_TESTRUNUID', str(os.getpid()))[:16]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _start(folder: Path) -> subprocess.Popen[bytes]:
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "CODE_HASH").write_text(CODE)
    if not (site / "uvcc_engine").is_symlink():
        (site / "uvcc_engine").symlink_to(Path(uvcc_engine.__file__).parent)
    paths = os.pathsep.join(map(str, (site, HERE / "private")))
    return subprocess.Popen(
        [sys.executable, str(HERE / "warm_process.py"), str(folder / "socket")],
        stdin=subprocess.PIPE,  # which it watches
        stdout=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


@contextlib.contextmanager
def _asking() -> Iterator[Path]:
    """The session's folder, while nobody else asks or leaves: its process removes it when it ends, lock and all."""
    while True:
        folder = _folder()
        try:
            lock = (folder / "lock").open("w")
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is(folder / "lock", lock.fileno()):
                yield folder
                return


def _is(path: Path, fd: int) -> bool:
    """Whether the file that was opened still lies there."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _connected() -> socket.socket:
    """A connection to the session's process, which is started if there is none."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with _asking() as folder:
            found = socket.socket(socket.AF_UNIX)
            try:
                found.connect(str(folder / "socket"))
                return found
            except OSError:  # none yet, or its pytest worker has ended
                found.close()
            (folder / "socket").unlink(missing_ok=True)
            process = _start(folder)
            _owned.append(process)
            while not (folder / "socket").exists():
                assert process.poll() is None, "the process that imports everything has ended"
                assert time.monotonic() < end, "the process that imports everything does not answer"
                time.sleep(0.02)


class WarmChild:
    """As much of ``subprocess.Popen`` as forkers use."""

    def __init__(self, kind: str, env: Mapping[str, str] | None = None) -> None:
        """``kind`` and ``env``: see ``warm_process``."""
        self._socket = _connected()
        self._socket.sendall(json.dumps({"kind": kind, "env": dict(env or {})}).encode() + b"\n")
        self.stdin = self._socket.makefile("w")
        self.stdout = self._socket.makefile("r")
        self._heard = b""
        self.pid = int(self.stdout.readline())

    def tell(self, line: str) -> None:
        """Write a line to it."""
        self._socket.sendall(f"{line}\n".encode())

    def line(self, timeout: float | None = None) -> str:
        """Its next line, for whoever does not read ``stdout``; TimeoutError after so many seconds without one."""
        while b"\n" not in self._heard:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise TimeoutError
            found = self._socket.recv(1 << 12)
            assert found, "a forked process has ended without an answer"
            self._heard += found
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def end(self, timeout: float) -> None:
        """It kills what is left of its workers, and ends. Raises TimeoutError."""
        self._socket.shutdown(socket.SHUT_WR)
        self._socket.settimeout(timeout)
        while self._socket.recv(1 << 16):
            pass
        for file in (self.stdin, self.stdout, self._socket):
            file.close()


class WarmForker(Forker):
    """A ``Forker`` that need not import anything."""

    def __init__(self, folder: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Taken as a ``Forker`` is; it needs no folder."""
        self._forked: list[int] = []
        self._process = WarmChild("forker", env)  # type: ignore[assignment]

    def close(self) -> None:
        assert isinstance(self._process, WarmChild)
        self._process.end(60)
