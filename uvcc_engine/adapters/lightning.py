"""PyTorch Lightning: ``Trainer(callbacks=[LightningCallback()])``.

Every optimizer step is a step of the run. A halt saves Lightning's own checkpoint under ``checkpoints/`` of the run
directory; ``trainer.fit(..., ckpt_path=...)`` goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.obeying import TrainingHalted
from uvcc_engine.contract.run_files.writer import RunWriter


class LightningCallback(Callback):
    """Writes the run contract for a Lightning trainer, and obeys hold, halt and release between two steps."""

    def __init__(self, run: RunWriter | None = None) -> None:
        """``run``: the writer of this rank; without one, that of the environment which an agent gives a command."""
        self._run = run if run is not None else RunWriter.from_env()
        self._step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:
            self._run.resume_at(trainer.global_step)
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = step = trainer.global_step
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._run.step(step, loss=_loss(outputs), lr=float(rates[0]), save=lambda: self._save(trainer, step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.exit("done", step=trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, TrainingHalted):
            self._run.exit("failed", step=trainer.global_step, error=exception)

    def _save(self, trainer: Trainer, step: int) -> Path:
        path = self._run.directory / files.CHECKPOINTS / f"step-{step}.ckpt"
        trainer.save_checkpoint(path)
        return path


def _loss(outputs: Any) -> float:
    """What ``training_step`` returned: a tensor, or a mapping with ``loss``."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if found is None:
        raise ConfigError("training_step returned no loss", "return the loss, or a dictionary with the key loss")
    return float(found)
