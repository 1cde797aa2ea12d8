"""Trains a party's ranks on one GPU and on processors and prints whether the bits agree; run it as a program.

``python ranks_on_gpu.py REPLICAS STAGES TENSOR MICROBATCHES cuda|cpu off|proofs``: what carries the groups, NCCL, which
takes the ranks for hosts of their own, or Unix sockets; and what is proved. The parent of the ranks must not touch the
GPU itself. The folders of the repository and of ``training_kit`` have to be on Python's path.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from training_kit import check_replicas, train

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json


def main(size: Topology, carried: str, verify: str, device: str = "cuda") -> dict[str, object]:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((48, 12)), rng.integers(0, 3, 48)
    model = model_to_json(model_of_list([{"linear": 16}, "relu", {"linear": 8}, "relu", {"linear": 3}], 12, 3))
    values = {"model": model, "steps": 3, "batch": 8, "lr": 0.5, "momentum": 0.9, "test_rows": 16, "reveal": ["loss"]}
    values |= {"verify": verify}
    job, data = PrivateJob.from_json(json.loads(json.dumps(values))), Dataset(x[:32], y[:32], x[32:], y[32:], 3)
    plain = train(job, size, data=data, prg="chacha20")
    began = time.monotonic()
    found = train(job, size, data=data, prg="chacha20", device=device, carried=carried)
    took = time.monotonic() - began
    check_replicas(found)
    for coord, theirs in plain.items():
        ours = found[coord]
        for told in ("losses", "correct", "sent"):
            assert ours[told] == theirs[told], (coord, told)
        assert all(np.array_equal(tensor, theirs["state"][name]) for name, tensor in ours["state"].items()), coord
    backends = {f["backend"] for one in found.values() for name, f in one["events"] if name == "group_ready"}
    first = next(iter(found.values()))
    return {
        "topology": [size.replicas, size.stages, size.tensor, size.microbatches],
        "workers": len(found),
        "backends": sorted(backends),
        "losses": first["losses"],
        "messages": len(first["sent"]),
        "seconds": round(took, 1),
    }


if __name__ == "__main__":
    r, s, t, m = map(int, sys.argv[1:5])
    print(json.dumps(main(Topology(r, s, t, m), *sys.argv[5:8])))
