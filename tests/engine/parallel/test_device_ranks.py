"""A GPU's kernels, in Triton's interpreter, train over replicas, stages and tensor ranks with the bits of a CPU's; and
all ranks keep to the device that their shares lie on, by a GPU's rules."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from training_kit import Found, check_replicas, train

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.mpc.foundation.staging import CudaStaging
from uvcc_engine.mpc.kernels import choose
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.pipeline import PipelineReceiver

sys.path.append(str(Path(__file__).parents[1] / "private"))

from other_device import OtherDevice, mark, nothing_kept, on_device
from test_private_device import FakeCuda

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports it
SIZE = Topology(2, 2, 2, 2)
MODEL = model_to_json(model_of_list([{"linear": 4}, "relu", {"linear": 2}], 3, 2))
VALUES = {"model": MODEL, "steps": 2, "batch": 4, "lr": 0.5, "momentum": 0.9, "test_rows": 4, "reveal": ["loss"]}


def trained(**more: Any) -> Found:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((12, 3)), rng.integers(0, 2, 12)
    job = PrivateJob.from_json(json.loads(json.dumps(VALUES)))
    return train(job, SIZE, data=Dataset(x[:8], y[:8], x[8:], y[8:], 2), **more)


def keep_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a group carried lies where it was taken from; other threads, and memory seen anew, bear no mark."""
    take, gather, slices = PipelineReceiver.take, Communicator.gather, Communicator.sum_slices

    def gathered(self: Communicator, x: Tensor) -> list[Tensor]:
        return [mark(one, on_device(x)) for one in gather(self, x)]

    def sliced(self: Communicator, x: Tensor) -> Callable[[], Tensor]:
        wait = slices(self, x)
        return lambda: mark(wait(), on_device(x))

    monkeypatch.setattr(PipelineReceiver, "take", lambda self, m: mark(take(self, m)))
    monkeypatch.setattr(Communicator, "gather", gathered)
    monkeypatch.setattr(Communicator, "sum_slices", sliced)


@pytest.mark.ci("tests/engine/private/test_other_device.py")
def test_ranks_keep_to_the_device_of_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are marked: an operation on tensors of both places, or a host that reads the device, fails."""
    plain = trained()
    monkeypatch.setattr("uvcc_engine.mpc.foundation.runtime.kernels_for", lambda device: PlainKernels())
    keep_marks(monkeypatch)
    with nothing_kept():
        marked = trained(rules=OtherDevice, staging=lambda: CudaStaging(torch.device("cpu"), FakeCuda()))
    check_replicas(marked)
    for coord, theirs in plain.items():
        assert marked[coord]["sent"] == theirs["sent"]
        assert len(theirs["sent"]) > 20


@pytest.mark.slow  # 24 workers, in an interpreter
def test_steps_over_all_ranks_on_a_gpu_s_kernels_have_the_bits_of_the_cpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    plain = trained()
    monkeypatch.setenv(choose.KERNELS_ENV, "triton")
    choose.kernels_for.cache_clear()
    assert type(choose.kernels_for(choose.device_for("cpu"))).__name__ == "CudaKernels"
    try:
        found = trained()
    finally:
        choose.kernels_for.cache_clear()
    check_replicas(found)
    assert len(found) == 24
    for coord, theirs in plain.items():
        ours = found[coord]
        assert len(ours["losses"]) == 2
        assert (ours["losses"], ours["correct"], ours["sent"]) == (theirs["losses"], theirs["correct"], theirs["sent"])
        assert all(np.array_equal(tensor, theirs["state"][name]) for name, tensor in ours["state"].items()), coord
