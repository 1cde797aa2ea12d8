"""Runs ``uvcc`` as its users do: as a process, with a data folder and a temporary folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

PATIENCE_S = 420.0
# a drill's time includes the workers' start, which takes long where many tests start processes
PATIENT = ("halt.patience=60s", "gates.halt_drill_s=90")
Event = dict[str, Any]


@dataclass
class Uvcc:
    """A user's environment. ``temp`` must be empty whenever no run lives."""

    home: Path
    temp: Path

    @property
    def env(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_") or k == PRELOADED_ENV}
        return {**kept, "UVCC_HOME": str(self.home), "TMPDIR": str(self.temp), "OMP_NUM_THREADS": "1"}

    def start(self, *args: str) -> subprocess.Popen[str]:
        """A command in the background; both outputs are kept."""
        return subprocess.Popen(
            [sys.executable, "-m", "uvcc_console.cli.main", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """A command to its end."""
        process = self.start(*args)
        out, err = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def json(self, *args: str) -> Any:
        """What a reading verb prints with ``--json``."""
        done = self.run(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def events(self, run: str, until: Callable[[Event], bool]) -> list[Event]:
        """The run's events up to the first that ``until`` accepts, from ``uvcc watch``: it blocks, nothing polls."""
        process = self.start("watch", run)
        timer = threading.Timer(PATIENCE_S, process.kill)
        timer.start()
        found: list[Event] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found.append(json.loads(line))
                if until(found[-1]):
                    return found
        finally:
            timer.cancel()
            process.kill()
            process.communicate()
        told = [e for e in found if e["kind"] != "telemetry"]  # which goes on whatever the run waits for
        raise AssertionError(f"{run} never came so far; its last events: {told[-5:]}")

    def processes(self) -> dict[int, str]:
        """Every process that was started with this data folder and still lives."""
        return {pid: command for pid, command in _processes(f"UVCC_HOME={self.home}")}

    def on_pods(self) -> dict[int, str]:
        """Every process of this user's local pods that still lives, such as those of a run that nobody tore down."""
        return {pid: command for pid, command in _processes(f"UVCC_POD={self.temp}/", beginning=True)}


@contextlib.contextmanager
def user_at(home: Path) -> Iterator[Uvcc]:
    """A user whose processes and temporary files end with the block."""
    temp = Path(tempfile.mkdtemp(prefix="uv", dir="/tmp"))  # socket paths below it must stay short
    user = Uvcc(home, temp)
    yield user
    end = time.monotonic() + PATIENCE_S
    while left := {**user.processes(), **user.on_pods()}:  # who dies may have started another, and writes until then
        assert time.monotonic() < end, left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(temp)


def _processes(mark: str, *, beginning: bool = False) -> Iterator[tuple[int, str]]:
    name, _, value = mark.partition("=")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or not ours
            said = process.environ().get(name, "")
            if process.pid != os.getpid() and (said.startswith(value) if beginning else said == value):
                yield process.pid, " ".join(process.cmdline())


@dataclass
class Demo:
    """A running ``uvcc demo``."""

    uvcc: Uvcc
    process: subprocess.Popen[str]
    run: str

    @classmethod
    def start(cls, uvcc: Uvcc, *args: str) -> Demo:
        patient = (word for setting in PATIENT for word in ("--set", setting))
        process = uvcc.start("demo", "--headless", "--json", *patient, *args)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("run "), line + process.communicate()[1]
        return cls(uvcc, process, line.split()[1])

    def outcome(self) -> tuple[int, Mapping[str, Any], str]:
        """Exit code, summary and diagnostics of its end."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, json.loads(out), err

    def reach(self, step: int, phase: str = "full") -> list[Event]:
        """Events until the first worker reports ``step`` of a phase."""
        seen = {"phase": ""}

        def there(e: Event) -> bool:
            if e["kind"] == "phase":
                seen["phase"] = e["phase"]
            return e["kind"] == "metric" and seen["phase"] == phase and e["step"] >= step

        return self.uvcc.events(self.run, there)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
