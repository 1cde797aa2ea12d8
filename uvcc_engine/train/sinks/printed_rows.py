"""A training's rows on standard output, for whoever started it by hand. An agent's ranks print none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping


class PrintedRows:
    """Prints ``step 20/60  loss 3.3267  lr 3.00e-03  27,743 tokens/s  0:12 left``, a line for each logged row.

    What is left follows from the pace since this process began. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        steps: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._steps, self._clock, self._say = steps, clock, say
        self._first: tuple[int, float] | None = None

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Say a row: loss, lr and toks_per_s after ``step`` steps.

        A terminal that has gone, or a full disk, stops no training: every row is in ``training.csv``.
        """
        now = self._clock()
        left = ""
        if self._first is None:
            self._first = step, now
        elif step > self._first[0]:
            seconds = int((now - self._first[1]) / (step - self._first[0]) * (self._steps - step))
            minutes, seconds = divmod(seconds, 60)
            hours, minutes = divmod(minutes, 60)
            left = f"  {hours}:{minutes:02}:{seconds:02} left" if hours else f"  {minutes}:{seconds:02} left"
        figures = f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['toks_per_s']:,.0f} tokens/s"
        with contextlib.suppress(OSError):
            self._say(f"step {step}/{self._steps}  {figures}{left}")
