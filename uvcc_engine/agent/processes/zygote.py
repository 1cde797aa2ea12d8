"""The process that workers are forked from. It imports torch once, single-threaded, and then only forks and reaps.

It is a child of the agent, so that the agent stays small and answers while the import runs. Requests and reports are
lines on a socket pair, see ``zygote_messages``. When the agent is gone the zygote goes too; the workers go on. Rules of
forking: OMP_NUM_THREADS=1 before the import, one thread at the fork, garbage collector frozen, no CUDA before the fork.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes.child import become_worker, yield_to_console
from uvcc_engine.agent.processes.process import ProcessId, has_ended, wake_pipe
from uvcc_engine.agent.processes.zygote_messages import (
    ForkFailed,
    ForkRequest,
    ImportsDone,
    WorkerExited,
    WorkerForked,
    ZygoteReport,
    encode,
    parse_request,
)
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV, ROOM, socket_name
from uvcc_engine.contract.run_files.records import Malformed

log = logging.getLogger(__name__)
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def log_to_stderr() -> None:
    """How an agent's processes log; what they fork goes on with it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


def start(preload: Sequence[str], root: str, give_way: int = 0) -> tuple[socket.socket, int]:
    """Fork the zygote; returns the agent's end of the socket pair and the zygote's pid.

    ``give_way``: its niceness and that of its workers at least, where pods share a machine with the console. Where
    such pods have a process that has imported torch, that one forks it; the pid is 0 then, since it is not our child.
    """
    ours, theirs = socket.socketpair()
    if _forked_elsewhere(theirs, preload, root, give_way):
        theirs.close()
        ours.setblocking(False)
        return ours, 0
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return ours, pid
    ours.close()
    become(theirs, preload, root, give_way)


def _forked_elsewhere(theirs: socket.socket, preload: Sequence[str], root: str, give_way: int) -> bool:
    """Ask the process that ``UVCC_PRELOADED`` names, if it runs this Python, for a zygote. See ``preloaded_server``."""
    place = os.environ.get(PRELOADED_ENV, "")
    size = sum(len(os.fsencode(f"{name}={value}")) + 1 for name, value in os.environ.items())
    if not host.HAS_PROC or "torch" not in preload or os.path.basename(place) != socket_name() or size >= ROOM:
        return False
    mask = os.umask(0o077)
    os.umask(mask)
    asked = {
        "preload": list(preload),
        "root": root,
        "give_way": give_way,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "umask": mask,
        "cwd": os.getcwd(),
        "argv": sys.orig_argv,
        "environ": dict(os.environ),
        "path": sys.path,
    }
    try:
        with socket.socket(socket.AF_UNIX) as there:
            there.settimeout(5.0)
            there.connect(place)
            socket.send_fds(there, [json.dumps(asked).encode() + b"\n"], [0, 1, 2, theirs.fileno()])
    except OSError:  # it has ended
        return False
    return True


def become(sock: socket.socket, preload: Sequence[str], root: str, give_way: int) -> NoReturn:
    """Turn this forked process into the zygote of the agent at the other end of ``sock``; never returns."""
    status = 70
    try:
        yield_to_console(str(give_way or ""))
        status = _Zygote(sock, root).run(preload)
    except BaseException:
        log.exception("the zygote ended by an error that nobody expected")
    os._exit(status)


class _Zygote:
    def __init__(self, sock: socket.socket, root: str) -> None:
        os.setsid()
        self._keep_only(sock.fileno())
        self._sock = sock
        self._root = root
        self._buffer = LineBuffer()
        self._live: set[int] = set()
        self._environ = dict(os.environ)
        self._missing: Mapping[str, str] = {}
        self._loops_shared = self._compiler_shared = False
        self._wake_read, self._wake_write = wake_pipe()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the agent ends it by closing the socket
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def run(self, preload: Sequence[str]) -> int:
        facts = _import_once(preload)
        self._missing = facts.missing
        self._tell(facts)
        while True:
            ready, _, _ = select.select([self._sock.fileno(), self._wake_read], [], [])
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            if self._sock.fileno() in ready:
                data = self._sock.recv(1 << 20)
                if not data:
                    return 0
                for line in self._buffer.feed(data):
                    request = parse_request(line)
                    if isinstance(request, Malformed):
                        log.error("the agent sent %s", request.why)
                    else:
                        self._fork(request)

    def _fork(self, request: ForkRequest) -> None:
        spec = request.spec
        if spec.kind != "command" and "torch" in self._missing:
            self._tell(ForkFailed(spec.run, spec.coord, f"torch cannot be imported: {self._missing['torch']}"))
            return
        if spec.kind == "private":
            self._share_loops()
        elif spec.kind == "lm":
            self._share_compiler(spec.env)
        ready_read, ready_write = os.pipe()
        began = time.time()
        try:
            pid = os.fork()
        except OSError as e:
            os.close(ready_read)
            os.close(ready_write)
            self._tell(ForkFailed(spec.run, spec.coord, f"cannot fork: {e.strerror}"))
            return
        if pid == 0:
            become_worker(spec, request.log, self._root, self._environ, ready_write)  # does not return
        self._live.add(pid)
        os.close(ready_write)
        os.read(ready_read, 1)  # now it leads its own group and its state file is written (or it has ended)
        os.close(ready_read)
        self._tell(WorkerForked(spec.run, spec.coord, ProcessId.of_child(pid), began))

    def _share_loops(self) -> None:
        """Load the compiled loops once for all private workers; without them, each does as well as it can."""
        if self._loops_shared:
            return
        try:
            from uvcc_engine.mpc.kernels.compiling.preload import load_for_children

            self._loops_shared = load_for_children()
        except Exception:
            log.exception("the compiled loops could not be loaded for the workers")
            self._loops_shared = True
        gc.freeze()

    def _share_compiler(self, env: Mapping[str, str]) -> None:
        """Import what torch's optimizers import when the first of them is made, once for all ranks.

        Not where it could touch a GPU before the fork, nor where a variable may say how it shall be imported.
        """
        version = getattr(sys.modules.get("torch"), "version", None)
        on_gpus = version is None or version.cuda is not None or version.hip is not None
        if self._compiler_shared or on_gpus or any(name.startswith(("TORCH", "TRITON")) for name in env):
            return
        self._compiler_shared = True
        try:
            importlib.import_module("torch._dynamo")
        except Exception:
            log.exception("torch's compiler could not be imported for the ranks")
        gc.freeze()

    def _reap(self) -> None:
        """Report who ended. What is left of its process group dies first, while the pid is still taken."""
        for pid in tuple(self._live):
            if not has_ended(pid):
                continue
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            _, status = os.waitpid(pid, 0)
            self._live.discard(pid)
            self._tell(WorkerExited(pid, status))

    def _tell(self, report: ZygoteReport) -> None:
        try:
            self._sock.sendall(encode(report))
        except OSError:
            os._exit(0)  # no agent any more; the workers go on

    @staticmethod
    def _keep_only(sock: int) -> None:
        """The agent's socket, lock and channels must not outlive it here."""
        os.closerange(3, sock)
        os.closerange(sock + 1, 65536)


def _import_once(preload: Sequence[str]) -> ImportsDone:
    """Import what the workers share. A module that is missing is named; its workers then fail by themselves."""
    began = time.monotonic()
    for name in SINGLE_THREADED:
        os.environ[name] = "1"
    missing: dict[str, str] = {}
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            log.exception("cannot import %s", name)
            missing[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    threads = host.threads()
    torch = sys.modules.get("torch")
    return ImportsDone(
        missing=missing,
        threads=threads,
        seconds=round(time.monotonic() - began, 3),
        torch=str(getattr(torch, "__version__", "")),
        cuda=str(getattr(getattr(torch, "version", None), "cuda", None) or ""),
        nccl=_nccl(torch),
        triton="there" if importlib.util.find_spec("triton") is not None else "",
    )


def _nccl(torch: Any) -> str:
    """The version of NCCL that torch was built with; empty without one. Asking does not touch a GPU."""
    ask = getattr(getattr(torch, "_C", None), "_nccl_version", None)
    number = int(ask()) if ask is not None else 0
    return f"{number >> 32}.{number >> 16 & 0xFFFF}.{number & 0xFFFF}" if number else ""
