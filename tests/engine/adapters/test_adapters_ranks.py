"""The adapters under ``torchrun``, two ranks over gloo: held at one step, released and halted together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.contract.run_files.control import HaltRequest, write_halt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN, RANKS, STEPS = "mine", 2, 100_000
COMMON = f"""
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, Dataset

STEPS = {STEPS}
FOLDER = Path(os.environ["UVCC_RUN_DIR"])

class Numbers(Dataset):
    def __len__(self):
        return STEPS * 4
    def __getitem__(self, at):
        time.sleep(0.005)
        x = torch.full((2,), (at % 7) / 10)
        return {{"x": x, "labels": x.sum(0, keepdim=True)}}

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)
    def forward(self, x, labels, **more):
        return {{"loss": ((self.linear(x) - labels) ** 2).mean()}}
"""
PLAIN = """
import torch.distributed as dist
from uvcc_engine.contract import RunWriter
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Line())
descent = torch.optim.SGD(model.parameters(), lr=0.01)
path = FOLDER / "model.pt"

def save():
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    return path

with RunWriter.from_env() as run:
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=2), 1):
        loss = model(**batch)["loss"]
        loss.backward()
        descent.step()
        descent.zero_grad()
        run.step(step, loss=loss.item(), lr=0.01, save=save)
"""
LIGHTNING = """
import lightning.pytorch as lightning
from uvcc_engine.adapters.lightning import LightningCallback

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = Line()
    def training_step(self, batch, index):
        return self.line(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

trainer = lightning.Trainer(
    max_steps=STEPS, callbacks=[LightningCallback()], accelerator="cpu", devices=2, strategy="ddp", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(Numbers(), batch_size=2))
"""
TRANSFORMERS = """
import transformers
from uvcc_engine.adapters.transformers import TransformersCallback
arguments = transformers.TrainingArguments(
    output_dir=str(FOLDER / "out"), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
    report_to=[], use_cpu=True, ddp_backend="gloo", disable_tqdm=True, remove_unused_columns=False,
)
transformers.Trainer(Line(), arguments, train_dataset=Numbers(), callbacks=[TransformersCallback()]).train()
"""
ACCELERATE = """
from accelerate import Accelerator
from uvcc_engine.adapters.accelerate import AccelerateTracker
from uvcc_engine.contract.errors import ConfigError
folder = FOLDER / "state"

def save():
    accelerator.save_state(str(folder))
    return folder

tracker = AccelerateTracker(save=save)
accelerator = Accelerator(cpu=True, log_with=[tracker])
model = Line()
model, descent, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Numbers(), batch_size=2)
)
accelerator.init_trackers("mine")
try:
    for step, batch in enumerate(loader, 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        descent.step()
        descent.zero_grad()
        if step == 1:
            try:
                accelerator.log({"loss": loss.item()}, step=step)  # which reaches one process, and would hang
                assert not accelerator.is_main_process
            except ConfigError as error:
                assert "the main process alone" in error.what
        tracker.step({"loss": loss.item(), "lr": 0.01}, step)
finally:
    accelerator.end_training()
"""


def newest(run: Path) -> list[dict[str, Any]]:
    """Each rank's newest heartbeat that is whole."""
    found = []
    for rank in range(RANKS):
        lines: list[str] = []
        with suppress(OSError):
            lines = (run / f"heartbeat_rank{rank}.jsonl").read_text().split("\n")[:-1]
        found.append(json.loads(lines[-1]) if lines else {"phase": "", "step": 0})
    return found


def until(process: subprocess.Popen[bytes], log: Path, what: str, holds: Callable[[], bool]) -> None:
    """Wait for it; a program that ends before has failed."""
    end = time.monotonic() + 500.0
    while not holds():
        assert process.poll() is None, f"it ended before {what}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"not {what}:\n{log.read_text()[-3000:]}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "program",
    [PLAIN, LIGHTNING, TRANSFORMERS, ACCELERATE],
    ids=["a plain loop", "Lightning", "Transformers", "Accelerate"],
)
def test_both_ranks_are_held_released_and_halted_together(program: str, tmp_path: Path) -> None:
    script, run, log = tmp_path / "train.py", tmp_path / "run", tmp_path / "log"
    script.write_text(COMMON + program)
    env = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_")}
    env |= {"UVCC_RUN_DIR": str(run), "UVCC_RUN": RUN, "UVCC_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until(process, log, "training", lambda: all(b["step"] >= 3 for b in newest(run)))
        write_halt(run, HaltRequest("hold", "n1", RUN))
        until(process, log, "held", lambda: all(b["phase"] == "hold" for b in newest(run)))
        held = newest(run)
        assert len({b["step"] for b in held}) == 1, held
        time.sleep(0.5)
        assert [b["step"] for b in newest(run)] == [b["step"] for b in held], "a held rank makes no step"
        write_halt(run, HaltRequest("release", "n1", RUN))
        until(process, log, "released", lambda: all(b["step"] > held[0]["step"] for b in newest(run)))
        write_halt(run, HaltRequest("halt", "n2", RUN))
        process.wait(120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, log.read_text()[-3000:]
    exits = {p.name: json.loads(p.read_text()) for p in run.glob("exit*.json")}
    assert set(exits) == {"exit.json", "exit_rank1.json"}
    ((status, step),) = {(e["status"], e["step"]) for e in exits.values()}
    assert (status, step > held[0]["step"]) == ("halted", True)
    assert len(exits["exit.json"]["checkpoint"]) == 64
    rows = (run / "training.csv").read_text().splitlines()
    assert [int(row.partition(",")[0]) for row in rows[1:]] == list(range(1, step + 1)), "each step once"
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    said = [e["event"] for e in told if e["event"] in ("held", "released", "halted")]
    assert said == ["held", "released", "halted"], "the first rank speaks for all"
