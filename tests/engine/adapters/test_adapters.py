"""Trainers of the real libraries, watched, halted in the middle and resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.contract.run_files.obeying import TrainingHalted, sha256_of

RUN = "mine"
STEPS, HALT_AT = 12, 5


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        x = torch.full((2,), at / 10)
        return {"x": x, "labels": x.sum(0, keepdim=True)}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def writer(folder: Path) -> RunWriter:
    return RunWriter.open(folder / "run", run=RUN)


def ask_at(run: RunWriter, step: int) -> None:
    """Ask for a halt once this step is done; the trainer sees it after its next step at the latest."""
    if step == HALT_AT:
        write_halt(run.directory, HaltRequest("halt", "n1", RUN))


def left(run: RunWriter) -> tuple[dict[str, Any], list[str]]:
    run.close()
    rows = (run.directory / "training.csv").read_text().splitlines()
    return json.loads((run.directory / "exit.json").read_text()), rows[1:]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.linear(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


@pytest.mark.ci(__file__)
def test_lightning_trains_halts_and_goes_on(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from uvcc_engine.adapters.lightning import LightningCallback

    class Module(lightning.LightningModule):
        def __init__(self, run: RunWriter | None) -> None:
            super().__init__()
            self.line, self.asks = Line(), run

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if self.asks is not None:
                ask_at(self.asks, self.global_step)
            return self.line(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(run: RunWriter, checkpoint: Path | None) -> None:
        trainer = lightning.Trainer(
            max_steps=STEPS,
            callbacks=[LightningCallback(run)],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module(run if checkpoint is None else None)
        trainer.fit(module, DataLoader(Numbers(), batch_size=4), ckpt_path=checkpoint, weights_only=False)

    run = writer(tmp_path)
    with pytest.raises(TrainingHalted):
        fit(run, None)
    ended, rows = left(run)
    saved = run.directory / "checkpoints" / f"step-{HALT_AT + 1}.ckpt"
    assert (ended["status"], ended["step"], ended["checkpoint"]) == ("halted", HALT_AT + 1, sha256_of(saved))
    assert len(rows) == HALT_AT + 1
    run.control.clear()
    again = writer(tmp_path)
    fit(again, saved)
    ended, rows = left(again)
    assert (ended["status"], ended["step"]) == ("done", STEPS)
    assert [int(r.partition(",")[0]) for r in rows] == list(range(1, STEPS + 1)), "each step once, before and after"


@pytest.mark.ci(__file__)
def test_transformers_trains_halts_and_goes_on(tmp_path: Path) -> None:
    import transformers

    from uvcc_engine.adapters.transformers import TransformersCallback

    class Asks(transformers.TrainerCallback):
        def __init__(self, run: RunWriter) -> None:
            self.run = run

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ask_at(self.run, state.global_step)

    def train(run: RunWriter, first: bool) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        callbacks = [*([Asks(run)] if first else []), TransformersCallback(run)]
        trainer = transformers.Trainer(Line(), arguments, train_dataset=Numbers(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=not first)

    run = writer(tmp_path)
    train(run, first=True)
    ended, rows = left(run)
    saved = tmp_path / "out" / f"checkpoint-{HALT_AT + 1}"
    assert (ended["status"], ended["step"], ended["checkpoint"]) == ("halted", HALT_AT + 1, sha256_of(saved))
    assert len(rows) == HALT_AT + 1
    run.control.clear()
    again = writer(tmp_path)
    train(again, first=False)
    ended, rows = left(again)
    assert (ended["status"], ended["step"]) == ("done", STEPS)
    assert [int(r.partition(",")[0]) for r in rows] == list(range(1, STEPS + 1))


def test_a_run_that_fails_under_accelerate_is_not_done(tmp_path: Path) -> None:
    from uvcc_engine.adapters.accelerate import AccelerateTracker

    run = writer(tmp_path)
    tracker = AccelerateTracker(run)
    with pytest.raises(ZeroDivisionError):
        try:
            tracker.log({"loss": 1.0}, step=1)
            raise ZeroDivisionError("no rows")
        finally:
            tracker.finish()
    ended, _ = left(run)
    assert (ended["status"], ended["step"], ended["error"]) == ("failed", 1, "ZeroDivisionError: no rows")


def test_accelerate_trains_and_halts(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from uvcc_engine.adapters.accelerate import AccelerateTracker

    run, folder = writer(tmp_path), tmp_path / "state"

    def save() -> Path:
        accelerator.save_state(str(folder))
        return folder

    accelerator = Accelerator(cpu=True, log_with=[AccelerateTracker(run, save=save)])
    model = Line()
    made = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Numbers(), batch_size=4))
    accelerator.init_trackers("mine", config={"batch": 4})
    with pytest.raises(ConfigError, match="without its number"):
        accelerator.log({"accuracy": 1.0})
    with pytest.raises(TrainingHalted):
        for step, batch in enumerate(made[2], 1):
            loss = made[0](**batch)["loss"]
            accelerator.backward(loss)
            made[1].step()
            made[1].zero_grad()
            accelerator.log({"loss": loss.item(), "lr": 0.01}, step=step)
            ask_at(run, step)
    accelerator.end_training()  # as in a finally: what halted is not done
    ended, rows = left(run)
    assert (ended["status"], ended["step"], ended["checkpoint"]) == ("halted", HALT_AT + 1, sha256_of(folder))
    assert len(rows) == HALT_AT + 1
    assert json.loads((run.directory / "run.json").read_text())["batch"] == 4
