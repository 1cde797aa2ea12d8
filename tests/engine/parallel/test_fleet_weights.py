"""The data owner opens what a fleet with tensor ranks sealed: whole weights, as one rank would have trained them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.bench.launch.fleet import OWNER, Fleet, Forker, pod_identity
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.owner import client

JOB = PrivateJob(model="mlp-digits", steps=2, batch=8, lr=0.5, test_rows=8, reveal=("loss", "weights"))


def opened(forker: Forker, folder: Path, size: Topology, *flags: str) -> dict[str, np.ndarray]:
    """Train on ``size`` and open the boxes that the workers left, as the owner does."""
    fleet = Fleet(folder / "fleet", forker, JOB, size)
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    OWNER.store(folder / "owner")
    (folder / "parties.json").write_text(json.dumps([pod_identity(p, 0).public.to_json() for p in range(3)]))
    told = ["--owner", str(folder / "owner"), "--parties", str(folder / "parties.json"), "--out", str(folder / "out")]
    assert client.main([*told, "--open", str(folder / "fleet"), *flags]) == 0
    with np.load(folder / "out" / "weights.npz") as found:
        return dict(found)


def test_weights_of_tensor_ranks_open_whole_and_equal_those_of_one_rank(forker: Forker, tmp_path: Path) -> None:
    split = opened(forker, tmp_path / "split", Topology(1, 1, 2, 1), "--model", JOB.model)
    alone = opened(forker, tmp_path / "alone", Topology(1, 1, 1, 1))
    assert {name: w.shape for name, w in split.items()} == {
        f"weight.{k}": layer.weight_shape for k, layer in enumerate(find_model(JOB.model).weights)
    }
    for name, weights in alone.items():
        assert np.abs(split[name] - weights).max() < 2.0**-9, name  # truncations differ in their last units
        assert np.abs(weights).max() > 0.1


def test_without_the_models_name_slices_are_refused(
    forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        opened(forker, tmp_path, Topology(1, 1, 2, 1))
    assert "name the job's model with --model" in capsys.readouterr().err
