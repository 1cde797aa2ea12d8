"""Imports the worker once and forks one process per request; JSON lines on stdin and stdout.

``{"spec": WorkerSpec, "log": file}`` -> ``{"pid": n}``; ``{"wait": [pids], "seconds": s}`` -> ``{pid: rc}``, where
what runs longer is killed. Once stdin has ended, nobody is there any more who asks: all that is left is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_LOOK_S: Final = 0.01


def child(request: dict[str, Any]) -> None:
    os.setsid()
    out = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(out, target)
    from uvcc_engine.agent.processes.child import run
    from uvcc_engine.contract.job.spec import WorkerSpec

    rc = 70
    try:
        rc = run(WorkerSpec.from_json(request["spec"]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(rc)


def wait(pids: list[int], seconds: float) -> dict[str, int]:
    """Exit codes of these children, which have so long to end by themselves, or until stdin ends."""
    ended: dict[str, int] = {}
    left, end = set(pids), time.monotonic() + seconds
    alone = False
    while left:
        late = alone or time.monotonic() >= end
        for pid in tuple(left):
            if late:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                left.discard(pid)
                ended[str(pid)] = os.waitstatus_to_exitcode(status)
        if left:
            # one request at a time: what can be read while it is answered is the end
            alone = bool(select.select([sys.stdin], [], [], _LOOK_S)[0])
    return ended


def main() -> None:
    import torch

    import uvcc_engine.worker.main  # noqa: F401  # imported here so that forked workers need not
    from uvcc_engine.mpc.kernels.compiling.preload import load_for_children

    torch.set_num_threads(1)
    live: set[int] = set()
    try:
        serve(live, load_for_children)
    except BrokenPipeError:  # nobody is there to be answered
        pass
    finally:
        for pid in live:  # left over by whoever failed
            os.kill(pid, signal.SIGKILL)


def serve(live: set[int], load: Callable[[], bool]) -> None:
    """Answer requests until stdin ends. ``live``: the pids that nobody has waited for."""
    loaded = False
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "wait" in request:
            pids = [int(pid) for pid in request["wait"]]
            answer = wait(pids, float(request["seconds"]))
            live -= set(pids)
        else:
            loaded = loaded or load()
            pid = os.fork()
            if pid == 0:
                child(request)
            live.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
