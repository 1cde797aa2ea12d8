"""One job of the growth benchmark: ``-m uvcc_engine.bench.party.growth_step CONFIG 0`` prints one line of JSON.

Three simulated parties train a few steps on made-up rows in this process, so that its processor time and its memory
are theirs and nobody else's.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from uvcc_engine.bench.timing.peak import peak_memory
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.data.sets import Dataset
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate import fitting

_TEST_ROWS: Final = 8


def measure(asked: dict[str, Any]) -> dict[str, float]:
    """Rounds, and bytes and processor seconds of one party, of one step; ``memory``: the most the process held."""
    job = PrivateJob.from_json({**asked, "test_rows": _TEST_ROWS, "checkpoint_every": 1})
    model = fit_model(job)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((job.batch + _TEST_ROWS, model.features))
    y = rng.integers(0, model.classes, job.batch + _TEST_ROWS)
    data = Dataset(x[: job.batch], y[: job.batch], x[job.batch :], y[job.batch :], model.classes)
    times: list[float] = []
    found = fitting.train(job, data, progress=lambda _done, _steps, _loss: times.append(time.process_time()))
    return {
        "parameters": float(sum(w.size for w in found.weights)),
        "rounds": found.rounds / job.steps,
        "bytes": found.bytes_sent / PARTIES / job.steps,
        # the first step compiles; of the others the quickest is the one that the machine disturbed least
        "cpu": min(after - before for before, after in pairwise(times)) / PARTIES,
        "memory": peak_memory(),
    }


def main() -> int:
    torch.set_num_threads(1)
    keep_freed_memory()
    print(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
