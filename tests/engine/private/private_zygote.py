"""Imports the worker once and forks one process per request, as a pod's agent does; JSON lines on stdin and stdout.

``{"spec": WorkerSpec, "log": file}`` -> ``{"pid": n}``; with ``"lie": name`` the worker first calls that function of
``private_liars``. ``{"wait": pid}`` -> ``{"rc": n}`` (negative: by that signal).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys


def child(request: dict[str, object]) -> None:
    os.setsid()
    out = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(out, target)
    from uvcc_engine.agent.processes.child import run
    from uvcc_engine.contract.job.spec import WorkerSpec

    rc = 70
    try:
        spec = WorkerSpec.from_json(request["spec"])  # type: ignore[arg-type]
        if "lie" in request:
            import private_liars

            getattr(private_liars, str(request["lie"]))(spec)
        rc = run(spec)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(rc)


def ended(pid: int) -> int:
    """Exit code of a worker; one that does not end within five minutes is killed."""
    ready = select.poll()
    handle = os.pidfd_open(pid)
    ready.register(handle, select.POLLIN)
    if not ready.poll(300_000):
        os.kill(pid, signal.SIGKILL)
    os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prepared() -> bool:
    """Load all that is compiled and the exponential's table; False while nothing is compiled."""
    from decimal import Decimal

    import torch

    from uvcc_engine.mpc.functions.exponential import exp_public
    from uvcc_engine.mpc.kernels.compiling.preload import load_for_children
    from uvcc_engine.mpc.kernels.compiling.warm import warm
    from uvcc_engine.mpc.kernels.cpu import CpuKernels

    if not load_for_children():
        return False
    warm(CpuKernels())
    exp_public(torch.zeros(1, dtype=torch.int64), 16, Decimal(0), 48)
    return True


def main() -> None:
    import torch

    import uvcc_engine.worker.main  # noqa: F401  # imported here so that forked workers need not

    torch.set_num_threads(1)
    loops = False
    live: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"rc": ended(request["wait"])}
            live.discard(request["wait"])
        else:
            loops = loops or prepared()
            pid = os.fork()
            if pid == 0:
                child(request)
            live.add(pid)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    for pid in live:  # left over by a test that failed
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
