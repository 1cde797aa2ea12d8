"""What the trainer says of itself: tables, heartbeat figures, TensorBoard, metrics.json, env.json; and what that costs.

Every rank keeps its own window of figures; only the directory's lead writes tables and curves.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.table import rows_until
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.nsa.model import GateMetrics, gate_metrics
from uvcc_engine.train.model_flops import Effort
from uvcc_engine.train.tensorboard import ScalarFile

_SHOWN: Final = (
    *("NSA_", "NCCL_", "TORCH_", "PYTORCH_", "CUDA_VISIBLE", "OMP_", "RANK", "WORLD_SIZE", "MASTER_"),
    *("HF_DATASETS_", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TIKTOKEN_"),  # not all of HF_*: a token is secret
)


@dataclass(slots=True)
class Window:
    """What is averaged between two log lines. Times are monotonic seconds."""

    began: float
    tokens: int = 0
    own_s: float = 0.0  # what telling figures and asking for halts took
    waited_s: float = 0.0  # what the newest step waited for its batches
    fetch: list[float] = field(default_factory=list)  # what reading each batch took, on the thread that reads ahead


class RankTelemetry:
    """The figures of one rank. ``last`` holds those of the last log line, for the heartbeats that end a run.

    ``tell`` hears the lead's figures as they go to the curves: the step, and values by names like ``train/loss``.
    """

    def __init__(
        self,
        writer: RunWriter,
        device: torch.device,
        clock: Callable[[], float],
        effort: Effort,
        tell: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
    ) -> None:
        self.writer, self._device, self._clock, self._effort = writer, device, clock, effort
        self.window = Window(clock())
        self.gates: GateMetrics | None = None
        self.losses: dict[str, float] = {}
        self.last: dict[str, Any] = {}
        self.peak_mib = 0.0  # of GPU memory, since the process began
        self.rate = 0.0  # tokens a second of all ranks, in the last log line
        self._curves = ScalarFile(writer.directory / files.TENSORBOARD) if writer.lead else None
        self._tell = tell

    def restart(self) -> None:
        """Begin a new window: after a hold, an evaluation or a checkpoint, which are no training time."""
        self.window = Window(self._clock())

    def go_on(self, step: int) -> None:
        """Training goes on after ``step``: what the curves have of later steps comes again.

        A pod that replaces another one got the tables with the checkpoint, but no curves: these are drawn from them.
        """
        if self._curves:
            anew = self._curves.empty
            self._curves.restart(step)
            for name, group in ((files.TRAINING, "train"), (files.VAL, "val")) if anew else ():
                for at, row in rows_until(self.writer.directory / name, step):
                    self._curves.add(at, {f"{group}/{column}": value for column, value in row.items()})

    def gates_of(self, gates: list[Tensor]) -> None:
        """Take the step's gates of all layers into the next log line."""
        began = self._clock()
        self.gates = gate_metrics(gates)
        self.window.own_s += self._clock() - began

    def log(self, step: int, mean_loss: float, lr: float, norm: float, queue_depth: int) -> dict[str, Any]:
        """A row of training.csv and a point of each curve; returns the heartbeat's extra fields."""
        w, now = self.window, self._clock()
        self.rate = rate = w.tokens / max(1e-9, now - w.began)
        self.losses.setdefault("loss_first", mean_loss)
        self.losses["loss_last"] = mean_loss
        efficiency = self._effort.at(rate)
        self.writer.metrics(step, mean_loss, lr, rate, more=efficiency)
        if self._curves:
            curves = {"loss": mean_loss, "toks_per_s": rate, "lr": lr, **efficiency}
            self._show(step, {f"train/{name}": value for name, value in curves.items()})
        extra: dict[str, Any] = {
            "grad_norm": norm,
            "queue_depth": queue_depth,
            **efficiency,
            **_fetch(w),
            **self._gpu(),
        }
        extra["own_share"] = round(w.own_s / max(1e-9, now - w.began), 5)
        if self.gates:
            extra |= {f"gate_{k}": list(v) if isinstance(v, tuple) else v for k, v in asdict(self.gates).items()}
        self.window, self.last = Window(now), extra
        return extra

    def val(self, step: int, loss: float) -> None:
        """A row of val.csv and its curve."""
        ppl = math.exp(min(loss, 50.0))
        self.losses["val_loss"] = loss
        self.writer.val(step, loss, ppl)
        if self._curves:
            self._show(step, {"val/loss": loss, "val/ppl": ppl})

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        assert self._curves is not None
        self._curves.add(step, values)
        self._tell(step, values)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """metrics.json: the run in one line."""
        if self.writer.lead:
            known = {k: v for k, v in self.losses.items() if math.isfinite(v)}
            known |= {"gpu_mem_peak_mib": self.peak_mib} if self.peak_mib else {}
            files.write_json(self.writer.directory / files.METRICS, {**facts, **known})
        if self._curves:
            self._curves.close()

    def _gpu(self) -> dict[str, float]:
        if self._device.type != "cuda":
            return {}
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        self.peak_mib = torch.cuda.max_memory_allocated(self._device) / 2**20
        mib = {"gpu_mem_alloc_mib": allocated / 2**20, "gpu_mem_reserved_mib": reserved / 2**20}
        return mib | {"gpu_mem_peak_mib": self.peak_mib}


def _fetch(w: Window) -> dict[str, float]:
    """How long the newest step waited for data, in s; p50 and p95 of reading a batch over the window, in ms."""
    if not w.fetch:
        return {}
    ordered = sorted(w.fetch)
    p50, p95 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)]
    return {"dt_fetch_s": round(w.waited_s, 6), "fetch_p50_ms": 1e3 * p50, "fetch_p95_ms": 1e3 * p95}


def write_env(directory: Path, versions: Mapping[str, Any]) -> None:
    """env.json: versions, device and the variables that steer torch, NCCL and this trainer."""
    shown = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SHOWN)}
    files.write_json(directory / files.ENV_JSON, {"ts": time.time(), **versions, "env": shown})
