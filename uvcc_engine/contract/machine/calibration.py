"""How fast this machine is at what every benchmark is made of, and bars that are scaled by it. Standard library only.

A bar says what is asked of a machine of ``NOMINAL`` speed. Another machine is measured in the same run, and the bar is
scaled by how much slower or faster it is at what bounds that figure: Python code, copying memory, or SQLite appends.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from uvcc_engine.contract.machine.benchrows import Row, held, row

_STEPS: Final = 5_000
_COPIED: Final = 4 << 20
_APPENDS: Final = 50
# how often each is measured; the best one counts, for nothing makes a machine faster than it is
_PYTHON_RUNS, _COPY_RUNS, _APPEND_RUNS = 100, 20, 7


@dataclass(frozen=True, slots=True)
class Speed:
    """Per second: turns of a loop in Python, bytes copied, transactions of one small row appended (WAL, unsynced)."""

    python: float
    copy: float
    append: float


# round figures of a current server core; the bars are asked of such a one
NOMINAL: Final = Speed(python=30e6, copy=25e9, append=100e3)
By = Literal["python", "copy", "append", ""]


@dataclass(frozen=True, slots=True)
class BenchBar:
    """What is asked of a figure on a nominal machine. ``by``: what bounds it ("": the same on every machine)."""

    value: float
    by: By = ""
    at_least: bool = False

    def scaled(self, speed: Speed) -> float:
        """The bar for a machine of that speed."""
        if not self.by:
            return self.value
        faster = float(getattr(speed, self.by) / getattr(NOMINAL, self.by))
        return self.value * faster if self.at_least else self.value / faster


BenchBars = Mapping[tuple[str, str], BenchBar]


def judged(rows: Sequence[Row], bars: BenchBars, speed: Speed) -> list[Row]:
    """The rows with their scaled bars, where (name, metric) has one, and whether the value meets it."""
    out = []
    for one in rows:
        bar = bars.get((one.name, one.metric))
        if bar is not None:
            one = held(one, bar.scaled(speed), at_least=bar.at_least)
        out.append(one)
    return out


def with_bars(found: Sequence[Row], bars: BenchBars, before: Speed) -> list[Row]:
    """The machine's rows, then the benchmark's with their bars. Measures once more: the better of both counts."""
    after = measure()
    speed = Speed(max(before.python, after.python), max(before.copy, after.copy), max(before.append, after.append))
    return [*rows(speed), *judged(found, bars, speed)]


def measure() -> Speed:
    """Takes about a fifth of a second."""
    parts = ((_python, _PYTHON_RUNS), (_copy, _COPY_RUNS), (_append, _APPEND_RUNS))
    return Speed(*(max(one() for _ in range(runs)) for one, runs in parts))


def rows(speed: Speed) -> list[Row]:
    """The speeds as rows, held against the nominal ones."""
    return [
        row("machine_python", "rate", "turns/s", [speed.python], NOMINAL.python),
        row("machine_copy", "rate", "MB/s", [speed.copy / 1e6], NOMINAL.copy / 1e6),
        row("machine_append", "rate", "rows/s", [speed.append], NOMINAL.append),
    ]


def _rate(count: int, work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return count / max(time.perf_counter() - begun, 1e-9)


def _python() -> float:
    def loop() -> int:
        total, table = 0, {"a": 1, "b": 2}
        for i in range(_STEPS):
            total += table["a"] if i & 1 else table["b"]
        return total

    return _rate(_STEPS, loop)


def _copy() -> float:
    source, target = memoryview(bytes(_COPIED)), memoryview(bytearray(_COPIED))

    def copy() -> None:
        target[:] = source

    copy()
    return _rate(_COPIED, copy)


def _append() -> float:
    with tempfile.TemporaryDirectory(prefix="uvcc-bench-") as folder:
        with sqlite3.connect(Path(folder) / "calibration.sqlite", isolation_level=None) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=OFF")
            db.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, body TEXT)")

            def append() -> None:
                for _ in range(_APPENDS):
                    db.execute("INSERT INTO events (body) VALUES (?)", ('{"event": "beat"}',))

            rate = _rate(_APPENDS, append)
        db.close()
    return rate
