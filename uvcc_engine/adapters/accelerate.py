"""Hugging Face Accelerate: a tracker, and one call a step.

::

    tracker = AccelerateTracker(save=lambda: accelerator.save_state(folder) or folder)
    accelerator = Accelerator(log_with=[tracker])
    accelerator.init_trackers("mine")
    for step in range(1, steps + 1):
        ...
        tracker.step({"loss": loss, "lr": lr}, step)
    accelerator.end_training()

Of one process ``accelerator.log({"loss": loss}, step=step)`` does the same. Of several it reaches the main one alone,
which could not stop the others, so there it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import GeneralTracker

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files.obeying import TrainingHalted
from uvcc_engine.contract.run_files.writer import RunWriter


class AccelerateTracker(GeneralTracker):
    """Writes the run contract for a loop under Accelerate. Its ``step`` obeys hold, halt and release.

    Every process must call it at every step: all of them stop after the same one.
    """

    name = "uvcc"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run: RunWriter | None = None, *, save: Callable[[], str | Path | None] | None = None) -> None:
        """``save`` writes a checkpoint at a halt and returns its file or folder."""
        super().__init__()
        self._run = run if run is not None else RunWriter.from_env()
        self._save = save
        self._step = 0
        self._halted = False

    @property
    def tracker(self) -> RunWriter:
        return self._run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        if self._run.lead:
            self._run.describe(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """``step`` for a program of one process. Raises ConfigError in one of several, and as ``step`` does."""
        if PartialState().num_processes > 1:
            what = "accelerator.log reaches the main process alone, and a run halts with all of them or not at all"
            raise ConfigError(what, 'call tracker.step({"loss": loss}, step) in every process instead')
        self.step(values, step)

    def step(self, values: Mapping[str, Any], step: int | None) -> None:
        """A row and a heartbeat. Raises ConfigError without ``loss`` or ``step``, TrainingHalted where one is asked."""
        if step is None or "loss" not in values:
            raise ConfigError("a step without its number or loss", 'tracker.step({"loss": loss}, step)')
        self._step = step
        try:
            self._run.step(step, loss=float(values["loss"]), lr=float(values.get("lr", 0.0)), save=self._save)
        except TrainingHalted:
            self._halted = True
            raise

    def finish(self) -> None:
        """At ``end_training``, which may stand in a ``finally``: a run that halted, or fails just now, is not done."""
        error = sys.exception()
        if not self._halted:
            self._run.exit("done" if error is None else "failed", step=self._step, error=error)
