"""What happens in a worker process between the fork and its end."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

from uvcc_engine.agent.processes.workers import register
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter

log = logging.getLogger(__name__)
NICE: Final = "UVCC_WORKER_NICE"
ENTRIES: Final = {
    "private": "uvcc_engine.worker.main",
    "lm": "uvcc_engine.train.worker",
    "preflight": "uvcc_engine.agent.fabric",
    "handover": "uvcc_engine.worker.migration_source",
}


def become_worker(spec: WorkerSpec, log_path: str, root: str, environ: Mapping[str, str], ready: int) -> NoReturn:
    """Turn this forked process into the worker: own session, own log, no inherited files; never returns.

    ``environ`` = the environment before the zygote limited its threads, which is what a command gets.
    ``ready`` is written to once the worker can be found and signalled.
    """
    rc = 70
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # a full disk or lost peer is an error, as Python has it
        register(Path(root), spec)
        os.write(ready, b".")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _redirect(log_path)
        os.closerange(3, 65536)
        os.chdir(root)
        if spec.kind == "command":
            os.environ.clear()
            os.environ.update(environ)
        rc = run(spec)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        log.exception("worker %s could not be run", spec.coord)
    os._exit(rc)


def run(spec: WorkerSpec) -> int:
    """Run one worker in this process and return its exit code. Whatever ends it leaves an ``exit.json``."""
    started = time.time()
    os.environ.update(spec.env)
    yield_to_console(os.environ.get(NICE, ""))
    directory = Path(spec.dir)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if spec.kind == "command":
            _exec(spec)
        _dump_stacks_on_usr1(directory, spec.coord)
        return _entry(spec)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        _leave_exit(spec, error, started)
        return error.exit_code
    except Exception as error:
        log.exception("worker %s ended by an error that nobody expected", spec.coord)
        _leave_exit(spec, error, started)
        return 70


def yield_to_console(level: str) -> None:
    """Let the console and the agents of a shared machine go first, and run in longer turns where the system can."""
    if not level.isdigit():
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), min(19, int(level))))
    if sys.platform == "linux" and hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _entry(spec: WorkerSpec) -> int:
    """The main function of a kind, imported only now."""
    import importlib

    name = ENTRIES[spec.kind]
    try:
        main = importlib.import_module(name).main
    except ImportError as error:
        raise UvccError(f"this installation cannot run {spec.kind} workers: {error}", f"install {name}") from error
    return int(main(spec))


def _exec(spec: WorkerSpec) -> NoReturn:
    """Become the command; it finds its run directory in the environment (``RunWriter.from_env``)."""
    env = os.environ
    env.update(
        UVCC_RUN=spec.run,
        UVCC_RUN_DIR=str(Path(spec.dir).resolve()),
        UVCC_RANK=str(spec.rank),
        UVCC_COORD=spec.coord,
        UVCC_LEAD="1" if spec.lead else "0",
        UVCC_RESUME="1" if spec.resume else "0",
        UVCC_ATTEMPT=str(spec.attempt),
    )
    if shutil.which(spec.argv[0]) is None:
        raise ConfigError(f"no such command: {spec.argv[0]}", "install it on the pod, or give its path")
    os.chdir(str(spec.job.get("cwd") or spec.dir))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(spec.argv[0], spec.argv, env)
    except OSError as error:
        raise UvccError(f"cannot run {spec.argv[0]}: {error.strerror}", "is it executable?") from error


def _leave_exit(spec: WorkerSpec, error: Exception, started: float) -> None:
    """Write ``exit.json`` unless the worker has written its own."""
    directory = Path(spec.dir)
    for lead in (True, False):
        found = files.read_json_of_run(directory / files.exit_name(spec.rank, lead=lead), spec.run)
        if found is not None and found.get("pid") == os.getpid() and float(found.get("ts", 0.0)) >= started:
            return
    try:
        with RunWriter.open(directory, spec.run, spec.rank, spec.coord, lead=spec.lead) as writer:
            writer.exit("failed", error=error)
    except (UvccError, OSError) as refused:  # a full disk: the exit code and the log's last line tell of the error
        log.info("no exit record: %s", refused)


def _dump_stacks_on_usr1(directory: Path, coord: str) -> None:
    """SIGUSR1 writes the stacks of all threads, also while the main thread hangs in native code."""
    out = (directory / files.stackdump_name(coord)).open("a")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=out, all_threads=True)


def _redirect(log_path: str) -> None:
    """Standard input from nowhere, output and errors to the worker's log."""
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
