"""The training's side of its sinks: each is a process that is fed through a pipe, which takes what it has room for.

A sink that fails, hangs or is slow costs the training no step: what the pipe does not take is dropped and counted, a
process that has ended is reported once, and one that does not end in time is killed.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.contract.text import clean
from uvcc_engine.train.config import LMConfig, to_mapping
from uvcc_engine.train.sinks import sink_registry
from uvcc_engine.train.sinks.sink_registry import SinkOpening

PATIENCE_S: Final = {"done": 30.0, "halted": 10.0, "failed": 10.0}
"""So long all sinks together may take to send their last figures once the training has ended, by how it ended."""
TRAINING: Final = "sinks_training.txt"
_TAIL: Final = 4096


class SinkProcess:
    """One sink. ``command`` is for tests."""

    def __init__(self, name: str, opening: SinkOpening, command: Sequence[str] = ()) -> None:
        self.name, self.dropped, self.error = name, 0, ""
        self._log = opening.folder / files.sink_log(name)
        self._rest = b""
        first: dict[str, Any] = {"run": opening.run, "project": opening.project, "folder": os.fspath(opening.folder)}
        first |= {"training": opening.training, "goes_on": opening.goes_on}
        head = _line({**first, "config": dict(opening.config)})
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                command or [sys.executable, "-m", "uvcc_engine.train.sinks", name],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environ,
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._send(head)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over figures, or drop them where the pipe is full."""
        self._send(_line({"step": step, "values": dict(values)}))

    def finish(self, status: str, deadline: float, clock: Callable[[], float]) -> None:
        """Say how the training ended, and wait for the process until ``deadline`` (monotonic seconds); kill it then.

        What it has not read yet is waited for as well: without its last line it would take the training for failed.
        """
        assert self._process.stdin is not None
        left = self._rest + _line({"status": status})
        with suppress(OSError):  # it has ended, or reads no more
            while left and not self.error and select.select([], [self._pipe], [], max(0.0, deadline - clock()))[1]:
                left = left[os.write(self._pipe, left[: select.PIPE_BUF]) :]
        self._process.stdin.close()
        try:
            self._process.wait(max(0.0, deadline - clock()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            words = self._last_words()
            self.error = self.error or "it did not end in time and was killed" + (f": {words}" if words else "")
        if self._process.wait() and not self.error:
            self.error = self._reason()

    def _send(self, line: bytes) -> None:
        """All of a line or nothing: a rest that the pipe did not take goes before the next one."""
        if self.error:
            self.dropped += 1
            return
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
            if self._rest:
                self.dropped += 1
                return
            self._rest = line[os.write(self._pipe, line) :]
        except BlockingIOError:
            self.dropped += 1
        except OSError as error:
            self.dropped += 1
            self.error = self._reason() if error.errno == errno.EPIPE else str(error)

    def _reason(self) -> str:
        """Why the process ended: its last line."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its input"
        return self._last_words() or f"it ended with code {code}"

    def _last_words(self) -> str:
        try:
            data = self._log.read_bytes()[-_TAIL:]
        except OSError:
            return ""
        said = data.decode(errors="replace").strip().splitlines()
        return clean(said[-1], 300) if said else ""


class Sinks:
    """All sinks of a training. ``tell(name, error, dropped)`` hears of each that fails or loses figures, once.

    ``status``: what they are told of the training's end, ``failed`` until it is known to be ``done`` or ``halted``.
    """

    def __init__(
        self,
        names: Sequence[str],
        opening: SinkOpening,
        tell: Callable[[str, str, int], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        commands: Mapping[str, Sequence[str]] = {},
    ) -> None:
        self._tell, self._clock = tell, clock
        self.status = "failed"
        self._told: set[str] = set()
        self._sinks: list[SinkProcess] = []
        for name in names:
            try:
                self._sinks.append(SinkProcess(name, opening, commands.get(name, ())))
            except OSError as error:
                tell(name, f"its process cannot be started: {error.strerror}", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand figures to every sink; returns at once."""
        for sink in self._sinks:
            sink.log(step, values)
            if sink.error:
                self._say(sink)

    def close(self) -> None:
        """End every sink, within ``PATIENCE_S`` in all."""
        deadline = self._clock() + PATIENCE_S[self.status]
        for sink in self._sinks:
            sink.finish(self.status, deadline, self._clock)
            if sink.error or sink.dropped:
                self._say(sink)
        self._sinks.clear()

    def _say(self, sink: SinkProcess) -> None:
        if sink.name not in self._told:
            self._told.add(sink.name)
            self._tell(sink.name, sink.error, sink.dropped)


@contextmanager
def sinks_of(cfg: LMConfig, writer: RunWriter, *, by_hand: bool, goes_on: bool) -> Iterator[Sinks]:
    """The sinks that ``train.sinks`` names, fed by the rank that writes the tables; an event tells of one that fails.

    They are ended last: nobody waits for them who waits for the training. ``by_hand``: no rollout named the run.
    """
    names = sink_registry.names_in(cfg.train.sinks) if writer.lead else []
    config, folder = flat(to_mapping(cfg)), writer.directory.resolve()
    training = _training(folder, writer.run, goes_on) if names and by_hand else writer.run
    opening = SinkOpening(writer.run, cfg.train.project, folder, config, training, goes_on)

    def tell(name: str, error: str, dropped: int) -> None:
        writer.event("sink_failed", level="warn", sink=name, error=error, dropped=dropped)

    sinks = Sinks(names, opening, tell)
    try:
        yield sinks
    finally:
        sinks.close()


def _training(folder: Path, run: str, goes_on: bool) -> str:
    """What names a training that was started by hand: its run id is that of every folder of this name."""
    noted = folder / TRAINING
    if noted.is_file():
        return files.checked_run_id(noted.read_text(errors="replace").strip())
    if goes_on:  # it began before such a name was noted, or in another folder
        return run
    made = f"{run[:100]}-{secrets.token_hex(4)}"
    files.write_atomic(noted, made.encode())
    return made


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), default=str).encode() + b"\n"


def flat(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """``{"train": {"lr": 1}}`` as ``{"train.lr": 1}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{under}.{key}" if under else key
        found |= flat(value, name) if isinstance(value, Mapping) else {name: value}
    return found
