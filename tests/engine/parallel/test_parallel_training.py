"""Training on replicas, stages and tensor ranks equals training on one worker, up to one unit per update."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from parallel_kit import SocketPlane, run_fleet

from uvcc_engine.mpc.local import rehearsal_keys
from uvcc_engine.mpc.runtime import Runtime
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.topology import Coord, Topology
from uvcc_engine.private.clear import train_clear
from uvcc_engine.private.data import load_digits, one_hot
from uvcc_engine.private.inputs import PartyInputs, encode_fixed
from uvcc_engine.private.job import PrivateJob
from uvcc_engine.private.models import find_model
from uvcc_engine.private.parallel_training import ParallelTrainer

JOB = PrivateJob(steps=3, batch=16, lr=0.5, momentum=0.9, test_rows=50)


def shares(job: PrivateJob) -> list[PartyInputs]:
    """The digits in additive components from a fixed generator."""
    data, rng = load_digits(job.seed, job.test_rows), np.random.default_rng(5)
    plain = {"train_x": data.train_x, "test_x": data.test_x}
    plain |= {"train_y": one_hot(data.train_y, 10), "test_y": one_hot(data.test_y, 10)}
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for name, values in plain.items():
        ring = encode_fixed(name, values, job.frac_bits)
        low, middle = (rng.integers(-(2**63), 2**63, ring.shape, dtype=np.int64) for _ in range(2))
        with np.errstate(over="ignore"):
            for part, component in zip(parts, (low, middle, ring - low - middle), strict=True):
                part[name] = component
    return [PartyInputs(p, job.frac_bits, {n: (parts[p][n], parts[(p + 1) % 3][n]) for n in plain}) for p in range(3)]


def train(job: PrivateJob, size: Topology) -> dict[Coord, dict[str, Any]]:
    inputs = shares(job)

    def work(plane: SocketPlane, groups: PartyGroups, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        c = groups.place.coord
        sid = hashlib.sha256(f"{c.replica} {c.stage} {c.tensor}".encode()).digest()
        keys = rehearsal_keys(10 + c.replica)[c.party]  # every pod has its own keys

        def runtime(stream: int) -> Runtime:
            return Runtime(c.party, plane, keys, sid, stream=stream)

        main = runtime(0)
        trainer = ParallelTrainer(
            main, runtime, job, find_model(job.model), inputs[c.party], groups, lambda n, f: events.append((n, f))
        )
        found = []
        for step in range(job.steps):
            main.begin_epoch(step)
            found.append(trainer.step(step).loss)
        main.begin_epoch(job.steps)
        correct = trainer.count_correct()
        state = {name: t.numpy() for name, t in trainer.state().items()}
        return {"losses": found, "correct": correct, "state": state, "events": events}

    return run_fleet(size, work)


def weights(found: dict[Coord, dict[str, Any]], size: Topology, replica: int = 0) -> dict[int, np.ndarray]:
    """The whole model's weights in clear, put together from every stage and tensor rank of one replica."""
    whole: dict[int, list[np.ndarray]] = {}
    for s in range(size.stages):
        for t in range(size.tensor):
            states = [found[Coord(replica, p, s, t)]["state"] for p in range(3)]
            for name in states[0]:
                kind, number, component = name.split(".")
                if kind == "weight" and component == "lo":
                    total = sum(state[name] for state in states)
                    whole.setdefault(int(number), []).append(total / 2.0**16)
    joined = {}
    for number, parts in whole.items():
        if number % 2 == 0 or len(parts) == 1:
            joined[number] = np.concatenate(parts, 1)
        else:  # split by rows, the first slice carries the bias below its rows
            joined[number] = np.concatenate([parts[0][:-1], *parts[1:], parts[0][-1:]])
    return joined


@pytest.mark.parametrize(
    "size", [Topology(2), Topology(1, 2, 1, 4), Topology(1, 1, 2, 2), Topology(2, 2, 2, 2)], ids=str
)
def test_every_way_of_splitting_trains_the_same_model(size: Topology) -> None:
    job = JOB
    found = train(job, size)
    clear = train_clear(replace(job, batch=job.batch * size.replicas), load_digits(job.seed, job.test_rows))
    for value in found.values():
        assert value["losses"] == found[Coord(0, 0, 0, 0)]["losses"]
        assert value["correct"] == found[Coord(0, 0, 0, 0)]["correct"]
    assert found[Coord(0, 0, 0, 0)]["losses"] == pytest.approx(clear.losses, abs=2e-3)
    assert abs(found[Coord(0, 0, 0, 0)]["correct"] - clear.correct) <= 1
    for number, exact in enumerate(clear.weights):
        assert np.abs(weights(found, size)[number] - exact).max() < 1e-3
    for c, value in found.items():  # replicas hold identical shares, bit for bit
        first = found[Coord(0, c.party, c.stage, c.tensor)]["state"]
        for name, tensor in value["state"].items():
            assert np.array_equal(tensor, first[name]), (c, name)
