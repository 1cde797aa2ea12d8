"""The accuracy table: what training on shares reaches against the same training in floats, and how far they drift.

Three parties in one process, the 1,797 digits (enlarged to 28 x 28 for networks that take that), the same rows, order
and start in both. ``python -m uvcc_engine.owner.accuracy`` prints it; the exit code says whether it holds.

Beside it stands a second float training whose initial weights are off by up to one unit of the fixed point: how far
rounding alone carries this training. The table's learning rates are those at which that is little. At five times
their size it moves the float accuracy by more than the bar, and no arithmetic of 16 fractional bits could hold it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser, natural
from uvcc_engine.data.sets import Dataset, Floats, load_digits
from uvcc_engine.model.definition.specs import ModelSpec, initial_weights
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.sealing.inputs import open_inputs, share_dataset
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.signing.identity import Identity

BAR_POINTS: Final = 0.5
JOBS: Final = {
    "secureml-a": PrivateJob(model="secureml-a", steps=150, batch=128, lr=0.02),
    "lenet": PrivateJob(model="lenet", steps=60, batch=64, lr=0.05),
    "mlp-digits": PrivateJob(model="mlp-digits", steps=150, batch=128, lr=0.1),
}


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """Test accuracy in percent, private and in clear, and the greatest distance of the loss curves.

    ``nudged`` and ``nudged_gap``: the same of the float training that starts one unit of the fixed point away.
    """

    model: str
    steps: int
    private: float
    clear: float
    loss_gap: float
    nudged: float
    nudged_gap: float

    @property
    def holds(self) -> bool:
        """Whether the private model is at most the bar's points behind."""
        return self.private >= self.clear - BAR_POINTS


def enlarge(x: Floats) -> Floats:
    """(rows, 8 x 8) to (rows, 28 x 28): every pixel three by three, a border of the background's grey."""
    wide = np.kron(x.reshape(-1, 8, 8), np.ones((3, 3)))
    return np.pad(wide, ((0, 0), (2, 2), (2, 2)), constant_values=float(x.min())).reshape(len(x), -1)


def digits_for(job: PrivateJob) -> Dataset:
    """The digits in the size that the job's model takes."""
    data = load_digits(job.seed, job.test_rows)
    if fit_model(job).features == data.train_x.shape[1]:
        return data
    return replace(data, train_x=enlarge(data.train_x), test_x=enlarge(data.test_x))


def measure(job: PrivateJob, data: Dataset) -> AccuracyRow:
    """Train on shares and in clear. Raises ConfigError if job and data do not fit."""
    model = fit_model(job)
    seeds = [bytes([i + 1]) * 32 for i in range(PARTIES + 1)]
    *parties, owner = (Identity(s, bytes(reversed(s[:31] + b"\0"))) for s in seeds)
    made = share_dataset(data, job.frac_bits, tuple(p.public for p in parties), owner, seed=1, job=job)

    def body(rt: Runtime) -> tuple[list[float], int, int]:
        inputs = open_inputs(made.boxes[rt.party], party=rt.party, identity=parties[rt.party], **made.public())
        trainer = PrivateTrainer(rt, job, model, inputs)
        losses = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            loss = trainer.step(step).loss
            losses += [] if loss is None else [loss]
        rt.begin_epoch(job.steps)
        return losses, trainer.count_correct(), trainer.test_rows

    losses, correct, rows = LocalPlanes(1).run_three(body)[0]
    clear, nudged = train_plaintext(job, data), train_plaintext(job, data, nudged_weights(job, model))
    opened = [s for s in range(job.steps) if job.reveals_loss(s)]
    gap = max(abs(a - clear.losses[s]) for a, s in zip(losses, opened, strict=True))
    drift = max(abs(a - b) for a, b in zip(clear.losses, nudged.losses, strict=True))
    percent = [100.0 * a for a in (correct / rows, clear.accuracy, nudged.accuracy)]
    return AccuracyRow(job.model, job.steps, percent[0], percent[1], gap, percent[2], drift)


def nudged_weights(job: PrivateJob, model: ModelSpec) -> list[Floats]:
    """The job's initial weights, each off by up to one unit of the fixed point."""
    off = np.random.default_rng(job.seed)
    unit = 2.0**-job.frac_bits
    return [w + off.uniform(-unit, unit, w.shape) for w in initial_weights(model, job.seed, job.frac_bits)]


def main(argv: Sequence[str]) -> int:
    """Print one JSON line per model; 0 if every private model is within the bar, else 1."""
    parser = RaisingParser(prog="python -m uvcc_engine.owner.accuracy", description=__doc__)
    parser.add_argument("--model", choices=sorted(JOBS), action="append", help="only this one (may be repeated)")
    parser.add_argument("--steps", type=natural, help="another number of steps than the table's")
    args = parser.parse_args(argv)
    fine = True
    for name in args.model or sorted(JOBS):
        base = JOBS[name]
        job = base if args.steps is None else PrivateJob.from_json({**base.to_json(), "steps": args.steps})
        row = measure(job, digits_for(job))
        fine = fine and row.holds
        print(
            json.dumps(
                {
                    "model": row.model,
                    "steps": row.steps,
                    "private_percent": round(row.private, 2),
                    "float_percent": round(row.clear, 2),
                    "loss_gap": round(row.loss_gap, 5),
                    "nudged_float_percent": round(row.nudged, 2),
                    "nudged_float_loss_gap": round(row.nudged_gap, 5),
                    "holds": row.holds,
                }
            ),
            flush=True,
        )
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
