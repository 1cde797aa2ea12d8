"""Trees and k-means over the replicas of a party: with masks of zero the bits of one worker, with proofs its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from fixed_twin import ZeroStream
from training_kit import check_replicas, shares, train, weights

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.sets import Dataset, Floats
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.model.learning.replica_sums import ReplicaSums
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation import prg
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.products.arithmetic import matmul_protocol
from uvcc_engine.sharding.validation import fit_model

torch.set_num_threads(1)
ROWS, BITS, FIRST = 48, 5, Coord(0, 0, 0, 0)
TREES: dict[str, Any] = {"trees": {"count": 2, "depth": 2}}


def rows(classes: int) -> Dataset:
    """Bits, and a number or a class that follows from them; numbers alone for k-means (no class)."""
    rng = np.random.default_rng(6)
    if not classes:
        x = rng.normal(size=(ROWS + 16, 3)) + 3.0 * rng.integers(0, 3, (ROWS + 16, 1))
        return Dataset(x[16:], x[16:, :0], x[:16], x[:16, :0], 0, x[:16], x[:16, :0])
    x = rng.integers(0, 2, (ROWS + 16, BITS)).astype(np.float64)
    line = 2.0 * x[:, 0] - x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=len(x))
    y = line if classes == 1 else np.digitize(line, [-0.5, 1.5])
    return Dataset(x[16:], y[16:], x[:16], y[:16], classes, x[:16], y[:16])


def job_for(classes: int, replicas: int, batch: int, **changes: Any) -> PrivateJob:
    """``batch``: all replicas' together."""
    layer = TREES if classes else {"kmeans": 3}
    objective = {0: "inertia", 1: "mse", 3: "cross-entropy"}[classes]
    metric = {0: "inertia", 1: "rmse", 3: "accuracy"}[classes]
    values = {"model": model_to_json(model_of_list([layer], BITS if classes else 3, classes)), "objective": objective}
    values |= {"steps": 2, "batch": batch // replicas, "lr": 0.5, "momentum": 0.0, "schedule": "constant"}
    values |= {"test_rows": 16, "val_rows": 16, "val_every": 1, "reveal": ["loss", metric, "val_loss"], "min_rows": 2}
    return PrivateJob.from_json(values | changes)


def alone(job: PrivateJob, data: Dataset, *, stream: str) -> tuple[list[Floats], list[float | None], dict[str, float]]:
    """Weights, losses and metrics of one worker per party."""
    inputs = shares(job, data)

    def party(rt: Runtime) -> Any:
        trainer = trainer_of(rt, job, find_model(job.model), inputs[rt.party])
        losses = []
        for step in range(job.steps):
            rt.begin_epoch(step)
            losses.append(trainer.step(step).loss)
        rt.begin_epoch(job.steps)
        return trainer.evaluate(), losses, trainer.weights

    told = LocalPlanes(3, prg=stream).run_three(party)
    found = [reconstruct([one[2][k] for one in told]).numpy() for k in range(len(told[0][2]))]
    return found, told[0][1], told[0][0]


@pytest.mark.parametrize(
    ("classes", "replicas", "batch"),
    [
        pytest.param(1, 2, ROWS, id="a number, all rows"),
        pytest.param(0, 3, 36, id="k-means, three with some rows"),
        pytest.param(3, 2, ROWS, id="three classes, all rows", marks=pytest.mark.ci(__file__)),
        pytest.param(0, 2, ROWS, id="k-means, all rows", marks=pytest.mark.ci(__file__)),
        pytest.param(1, 3, 36, id="a number, three with some rows", marks=pytest.mark.ci(__file__)),
        pytest.param(3, 3, 36, id="three classes, three with some rows", marks=pytest.mark.ci(__file__)),
    ],
)
def test_replicas_grow_the_bits_of_one_worker(
    classes: int, replicas: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three replicas have no leaf, node or cluster each in places; 36 rows of 48 span two passes in the second step."""
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)
    data, size = rows(classes), Topology(replicas)
    job, whole = job_for(classes, replicas, batch), job_for(classes, 1, batch)
    fit_model(job, workers=replicas, replicas=replicas)
    found = train(job, size, data=data, prg="zeros")
    check_replicas(found)
    expected, losses, metrics = alone(whole, data, stream="zeros")
    assert np.abs(expected[0]).max() > 0.1
    assert all(np.array_equal(a, b) for a, b in zip(weights(job, found, size), expected, strict=True))
    assert found[FIRST]["losses"] == pytest.approx(losses, abs=2e-4)
    assert found[FIRST]["metrics"] == pytest.approx(metrics, abs=2e-3)
    assert list(found[FIRST]["validated"]) == [1, 2]
    clear = train_plaintext(whole, data)
    assert found[FIRST]["losses"] == pytest.approx(clear.losses, abs=4e-3)
    assert sum(name == "dp_ok" for name, _ in found[FIRST]["events"]) == 1


@contextmanager
def each_replica_rounds() -> Iterator[None]:
    """Every replica truncates its own sums, and the rounded ones are added up."""

    def apart(self: ReplicaSums, rt: Runtime, pairs: Any, scale: float, columns: slice) -> MpcProtocol[Share]:
        ((x, y),) = pairs
        whole = self.summed((yield from matmul_protocol(rt, x, y, scale=scale)))
        return whole.index((slice(None), columns))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaSums, "matmuls_protocol", apart)
        yield


@pytest.mark.parametrize(
    ("rules", "same"),
    [pytest.param(nullcontext, True, marks=pytest.mark.ci(__file__)), (each_replica_rounds, False)],
    ids=["as it is", "rounded apart"],
)
def test_a_sum_that_is_rounded_at_each_replica_is_seen(
    rules: Callable[[], AbstractContextManager[None]], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of k-means have a fraction at every row; halved sums of more than 512 rows of trees are cut, too."""
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)
    data, job = rows(0), job_for(0, 2, ROWS)
    found = weights(job, train(job, Topology(2), data=data, prg="zeros", rules=rules), Topology(2))
    expected, *_ = alone(job_for(0, 1, ROWS), data, stream="zeros")
    assert np.array_equal(found[0], expected[0]) is same


@pytest.mark.ci("tests/engine/proofs/test_proved_replicas.py")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("classes", [1, 0], ids=["trees", "k-means"])
def test_proved_replicas_find_the_model_that_one_proved_worker_finds(classes: int) -> None:
    """Each replica's sums are claims of its own and rounded by themselves: equal up to that."""
    changes = {"verify": "proofs", "steps": 1}
    job, size, data = job_for(classes, 2, ROWS, **changes), Topology(2), rows(classes)
    found = train(job, size, data=data)
    check_replicas(found)
    expected, losses, metrics = alone(job_for(classes, 1, ROWS, **changes), data, stream="aes")
    mine = weights(job, found, size)[0]
    if not classes:  # trees may ask otherwise where two questions gain the same
        assert np.abs(mine - expected[0]).max() < 4e-3
    assert mine.any()
    assert found[FIRST]["losses"] == pytest.approx(losses, abs=1e-3)
    assert found[FIRST]["metrics"] == pytest.approx(metrics, abs=4e-3)


@pytest.mark.parametrize("classes", [1, 0], ids=["trees", "k-means"])
def test_what_replicas_alone_divide_is_not_divided_otherwise(classes: int) -> None:
    job = job_for(classes, 2, ROWS)
    kind = "trees" if classes else "k-means"
    assert fit_model(job, workers=2, replicas=2).layers
    for way in ("stages", "tensor", "microbatches"):
        with pytest.raises(ConfigError, match=f"^{way} of 2, and .* is {kind}") as told:
            fit_model(job, workers=2, **{way: 2})
        assert "replicas divide the rows" in told.value.hint


def test_the_rows_of_all_replicas_together_are_bounded() -> None:
    job = PrivateJob.from_json(job_for(1, 1, ROWS).to_json() | {"batch": 1 << 16})
    assert trees_of(fit_model(job, workers=2, replicas=2)) is not None
    with pytest.raises(ConfigError, match="trees grown from 262144 rows each") as told:
        fit_model(job, workers=4, replicas=4)
    assert told.value.hint == "job.batch of at most 32768"
