"""Hugging Face Transformers: ``Trainer(callbacks=[TransformersCallback()])``.

Rows are written where the trainer logs (``logging_steps``). A halt has the trainer save its own ``checkpoint-N`` and
stop; ``trainer.train(resume_from_checkpoint=True)`` goes on from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.contract.run_files.writer import RunWriter


class TransformersCallback(TrainerCallback):
    """Writes the run contract for a Transformers trainer, and obeys hold, halt and release between two steps."""

    def __init__(self, run: RunWriter | None = None) -> None:
        """``run``: the writer of this rank; without one, that of the environment which an agent gives a command."""
        self._run = run if run is not None else RunWriter.from_env()
        self._asked: HaltRequest | None = None
        self._saved: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step:
            self._run.resume_at(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._run.heartbeat(state.global_step, "train")
        self._asked = self._run.obey(state.global_step)
        if self._asked is not None:
            control.should_save = control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:  # not the summary at the end, nor an evaluation
            rate = float(logs.get("learning_rate", 0.0))
            self._run.metrics(state.global_step, loss=float(logs["loss"]), lr=rate, toks_per_s=0.0)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._asked is not None:
            self._run.halted(self._asked, state.global_step, self._saved)
        else:
            self._run.exit("done", step=state.global_step)
