"""Notices a rank that stopped moving, by the run's own pace: a fixed threshold gave eleven false alarms in a run."""

from __future__ import annotations

import faulthandler
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from uvcc_engine.contract.run_files.waiting import FIRST_STEP_S


class Watchdog:
    """Dumps every thread's stack once per stall. ``beat`` after each step; ``check`` is pure but for the dump."""

    def __init__(
        self,
        directory: Path,
        rank: int,
        on_stall: Callable[[float, float, str], None],
        *,
        factor: float = 10.0,
        floor_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._rank, self._on_stall = directory, rank, on_stall
        self._factor, self._floor, self._clock = factor, floor_s, clock
        self._times: deque[float] = deque(maxlen=50)
        self._last = clock()
        self._reported = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def threshold_s(self) -> float:
        """``factor`` times the median step, but at least the floor; the first step has a limit of its own."""
        return max(self._floor, self._factor * statistics.median(self._times)) if self._times else FIRST_STEP_S

    def beat(self, *, stepped: bool = True) -> None:
        """The rank lives. Only a step's time counts for the threshold, not that of a hold or an evaluation."""
        now = self._clock()
        if stepped:
            self._times.append(now - self._last)
        self._last, self._reported = now, False

    def check(self) -> bool:
        """True if this call found a stall (once per stall)."""
        age = self._clock() - self._last
        if self._reported or age < self.threshold_s:
            return False
        self._reported = True
        self._on_stall(age, self.threshold_s, self.dump())
        return True

    def dump(self) -> str:
        """Write all stacks to stackdump_rank{N}_{k}.txt; returns the name."""
        number = len(list(self._directory.glob(f"stackdump_rank{self._rank}_*.txt")))
        path = self._directory / f"stackdump_rank{self._rank}_{number}.txt"
        with path.open("w") as out:
            faulthandler.dump_traceback(out, all_threads=True)
        return path.name

    def start(self, every_s: float = 5.0) -> None:
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            self.check()
