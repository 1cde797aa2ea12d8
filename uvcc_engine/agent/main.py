"""Starting an agent: one per root, detached if asked, nothing stale believed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent import party, socketpath
from uvcc_engine.agent.lines import LineBuffer
from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.agent.processes.spawner import Spawner
from uvcc_engine.agent.processes.zygote import log_to_stderr
from uvcc_engine.agent.service import Agent
from uvcc_engine.agent.socketpath import NAME as SOCKET
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files

log = logging.getLogger(__name__)
PRELOAD: Final = "torch,torch.distributed.device_mesh,uvcc_engine.worker.main"
ANSWER_S: Final = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """``uvcc-engine agent``. Prints one line of JSON when the agent answers; exit code 0 also if one already did."""
    parser = RaisingParser(prog="uvcc-engine agent", description="supervise this pod's workers")
    parser.add_argument("--root", default="~/.uvcc", help="the agent's directory (%(default)s)")
    parser.add_argument("--detach", action="store_true", help="go on in the background, logging to agent.log")
    parser.add_argument("--preload", default=PRELOAD, help="modules that workers share (%(default)s)")
    parser.add_argument("--give-way", type=int, default=0, help="niceness of imports and workers (%(default)s)")
    options = parser.parse_args(argv)
    try:
        root = Path(options.root).expanduser().absolute()
        return start(root, _names(options.preload), detach=options.detach, give_way=options.give_way)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def start(root: Path, preload: Sequence[str], *, detach: bool = False, give_way: int = 0) -> int:
    """Become the agent of ``root``, or find the one that is. Raises UvccError."""
    _make_root(root)
    found: dict[str, Any] | int | None = _lock(root)
    if found is None:
        found = _running(root)
    if isinstance(found, int):
        lock = found
    elif found["code_hash"] == party.code_hash():
        _say({"op": "already", **found})
        return 0
    else:
        lock = _take_over(root, found)
    if detach:
        return _detached(root, preload, lock, give_way)
    return _serve(root, preload, lock, _say, give_way)


def _serve(root: Path, preload: Sequence[str], lock: int, say: Callable[[dict[str, Any]], None], give_way: int) -> int:
    log_to_stderr()
    seed = os.environ.pop(party.SEED_VARIABLE, "")
    try:
        listener = socketpath.listen(root / SOCKET)
    except OSError as error:
        raise files.write_failed(root / SOCKET, error) from error
    spawner = Spawner(root, preload, give_way)  # its imports go on while the identity is made
    identity = party.ensure_identity(root / "identity", seed)
    agent = Agent(root, listener, spawner, identity)
    assert agent.me is not None
    sock = os.fspath(root / SOCKET)
    facts = {**agent.me.to_json(), "sock": sock, "code_hash": party.code_hash(), "started": time.time()}
    files.write_json(root / "agent.json", facts, mode=0o600)
    say({"op": "ready", **facts})
    try:
        return agent.run()
    finally:
        for name in (SOCKET, "agent.json"):
            (root / name).unlink(missing_ok=True)
        listener.close()
        os.close(lock)


def _detached(root: Path, preload: Sequence[str], lock: int, give_way: int) -> int:
    """Fork the agent into its own session; return when it answers."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        status = 70
        try:
            status = _in_background(root, preload, lock, write, give_way)
        except UvccError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            status = error.exit_code
        except BaseException:
            log.exception("the agent ended by an error that nobody expected")
        os._exit(status)
    os.close(write)
    os.close(lock)
    with os.fdopen(read) as told:
        line = told.readline()
    if not line:
        os.waitpid(pid, 0)
        raise UvccError("the agent did not start", f"see {root / 'agent.log'}")
    print(line, end="", flush=True)
    return 0


def _in_background(root: Path, preload: Sequence[str], lock: int, tell: int, give_way: int) -> int:
    os.setsid()
    out = os.open(root / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    for fd in (null, out):
        os.close(fd)

    def say(facts: dict[str, Any]) -> None:
        with os.fdopen(tell, "w") as parent:
            print(json.dumps(facts), file=parent)

    return _serve(root, preload, lock, say, give_way)


def _make_root(root: Path) -> None:
    try:
        for folder in (root, root / "runs", root / "state", root / "relay"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise files.write_failed(root, error) from error


def _lock(root: Path) -> int | None:
    """The root's lock, held until this process ends; None if another agent holds it."""
    try:
        fd = os.open(root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise files.write_failed(root / "agent.lock", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _take_over(root: Path, found: dict[str, Any]) -> int:
    """End the agent of another version, unless it has work to do; returns the lock. Raises UvccError."""
    if found["live"]:
        what = f"an agent of other code ({found['code_hash'][:12] or 'source'}) runs {found['live']} workers in {root}"
        raise UvccError(what, "halt them and stop that agent first")
    with contextlib.suppress(UnreachableError, OSError):
        ask(root, {"op": wire.STOP, "nonce": "takeover"}, timeout=3 * ANSWER_S)
    deadline = time.monotonic() + ANSWER_S
    while (lock := _lock(root)) is None:
        if time.monotonic() > deadline:
            raise UnreachableError(f"the agent in {root} does not end", f"end process {found['pid']}")
        time.sleep(0.02)
    return lock


def _running(root: Path) -> dict[str, Any] | int:
    """The agent that holds the lock, once it answers; or the lock, where that one was about to end.

    Raises UnreachableError if it does neither.
    """
    deadline = time.monotonic() + ANSWER_S
    detail = "silent"
    while time.monotonic() < deadline:
        try:
            facts = files.read_json(root / "agent.json")
            if ProcessId.from_json(facts).alive():
                answer = ask(root, {"op": wire.HELLO, "nonce": "start", "version": wire.VERSION}, timeout=ANSWER_S)
                live = sum(w["state"] == "started" for run in answer["runs"].values() for w in run)
                return {"live": live, **{k: answer[k] for k in ("pid", "starttime", "boot_id", "code_hash")}}
        except (UvccError, OSError) as error:
            detail = str(error)
        if (lock := _lock(root)) is not None:
            return lock
        time.sleep(0.05)
    raise UnreachableError(f"an agent holds {root} but does not answer ({detail})", "end it, then start again")


def ask(root: Path, message: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Send one command to the agent of ``root`` and return its acknowledgement, waited for at most ``timeout`` seconds.

    Raises OSError, UnreachableError.
    """
    with socketpath.connect(root / SOCKET, timeout) as sock:
        sock.sendall(wire.encode(message))
        buffer = LineBuffer()
        while data := sock.recv(1 << 16):
            for line in buffer.feed(data):
                answer = wire.decode(line)
                if answer["op"] == wire.ACK and answer.get("nonce") == message.get("nonce"):
                    return answer
    raise UnreachableError(f"the agent in {root} closed the channel", "see its agent.log")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name and name != "none"]


def _say(facts: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(facts), flush=True)
