"""Weights & Biases. Account and mode come from the library's own environment (``WANDB_API_KEY``, ``WANDB_MODE``).

Without an account, ``WANDB_MODE=offline`` writes the run to ``wandb/`` below the run directory, for ``wandb sync``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvcc_engine.train.sinks.sink_registry import Sink, SinkOpening


class _WandbSink:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # a step of its own: a run that goes on from an earlier checkpoint would be below the library's counter
        self._run.log({**values, "step": step})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))


def open_sink(opening: SinkOpening) -> Sink:
    """A run under the name of the training, so that one that is resumed goes on in the same run."""
    import wandb

    run = wandb.init(
        project=opening.project,
        name=opening.run,
        id=opening.training or opening.run,
        resume="allow",
        dir=str(opening.folder),
        config=dict(opening.config),
        settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return _WandbSink(run)
