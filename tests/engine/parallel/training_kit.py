"""A fleet that trains: inputs in components, every worker a process, and the weights of all of them put together."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from parallel_kit import SocketPlane, run_fleet

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.mpc.foundation.local import rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.staging import Staging
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.plane.api import Tag
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.sharding.microbatches import IN_FLIGHT_VARIABLE
from uvcc_engine.sharding.partition import join_weight, place_layers, weights_of
from uvcc_engine.sharding.summed_training import parallel_trainer_of

Found = dict[Coord, dict[str, Any]]


def shares(job: PrivateJob, data: Dataset | None = None) -> list[PartyInputs]:
    """The job's data, or other, in additive components from a fixed generator."""
    rng = np.random.default_rng(5)
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for name, ring in dataset_tensors(data or dataset_for(job), job.frac_bits, job).items():
        low, middle = (rng.integers(-(2**63), 2**63, ring.shape, dtype=np.int64) for _ in range(2))
        with np.errstate(over="ignore"):
            for part, component in zip(parts, (low, middle, ring - low - middle), strict=True):
                part[name] = component
    names = list(parts[0])
    return [PartyInputs(p, job.frac_bits, {n: (parts[p][n], parts[(p + 1) % 3][n]) for n in names}) for p in range(3)]


class Skewed(SocketPlane):
    """A plane that now and then says of messages that they are not here yet: another order of work at every worker."""

    def __init__(self, inner: SocketPlane, seed: str) -> None:
        self.__dict__.update(inner.__dict__)  # the same sockets and the same letter box
        self._random = random.Random(seed)

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        return super().arrived(wants) and self._random.random() < 0.5


def train(
    job: PrivateJob,
    size: Topology,
    *,
    in_flight: int = 8,
    skew: int = 0,
    data: Dataset | None = None,
    device: str = "cpu",
    prg: str = "aes",
    carried: str = "cpu",
    rules: Callable[[], AbstractContextManager[Any]] = nullcontext,
    staging: Callable[[], Staging | None] = lambda: None,
) -> Found:
    """Every worker's losses, numbers of validation, correct test rows, metrics, final state, events, sent messages
    (hashed), and what passed between its stage and the others in the last step: (direction, microbatch, sent or
    received). A training that validation ends is not gone on with. ``device``: where shares lie; ``carried``: whose
    memory the groups carry; ``rules`` stand while a worker trains, whose messages pass through its ``staging``."""
    inputs = shares(job, data)

    def work(wire: SocketPlane, groups: PartyGroups, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        with rules():
            return trained(wire, groups, events)

    def trained(wire: SocketPlane, groups: PartyGroups, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        c = groups.place.coord
        os.environ[IN_FLIGHT_VARIABLE] = str(in_flight)
        sent: dict[tuple[int, Tag], bytes] = {}
        plane = Skewed(wire, f"{skew} {c}") if skew else wire
        put = plane.send

        def send(dst: int, tag: Tag, payload: Any) -> None:
            assert (dst, tag) not in sent
            sent[dst, tag] = hashlib.sha256(payload).digest()
            put(dst, tag, payload)

        plane.send = send  # type: ignore[method-assign]
        sid = hashlib.sha256(f"{c.replica} {c.stage} {c.tensor}".encode()).digest()
        keys = rehearsal_keys(10 + c.replica)[c.party]  # every pod has its own keys

        def runtime(stream: int) -> Runtime:
            return Runtime(c.party, plane, keys, sid, stream=stream, device=device, prg=prg, staging=staging())

        main = runtime(0)
        passed: list[tuple[str, int, int]] = []
        trainer = parallel_trainer_of(
            main,
            runtime,
            job,
            find_model(job.model),
            inputs[c.party],
            groups,
            lambda n, f: events.append((n, f)),
            lambda direction, m, sent, x: passed.append((direction, m, sent)),
        )
        found, trace, validated = [], [], {}
        for step in range(job.steps):
            main.begin_epoch(step)
            result = trainer.step(step)
            found.append(result.loss)
            validated |= {step + 1: dict(result.validated)} if result.validated else {}
            trace = passed.copy()
            passed.clear()
            if trainer.validations.ended:
                break
        main.begin_epoch(job.steps)
        metrics = trainer.evaluate()
        correct = trainer.count_correct() if trainer_counts(job) else 0
        state = {name: t.numpy() for name, t in trainer.state().items()}
        told = {"losses": found, "validated": validated, "metrics": metrics, "correct": correct}
        return told | {"state": state, "events": events, "sent": sent, "trace": trace}

    return run_fleet(size, work, carried)


def trainer_counts(job: PrivateJob) -> bool:
    """Whether right answers can be counted: of classes."""
    model = find_model(job.model)
    return model.classes > 1 and not model.unsupervised


def weights(job: PrivateJob, found: Found, size: Topology, replica: int = 0) -> list[np.ndarray]:
    """The whole model's weights in clear, put together from every stage and tensor rank of one replica."""
    slices: dict[int, list[np.ndarray]] = {}
    for s in range(size.stages):
        for t in range(size.tensor):
            states = [found[Coord(replica, p, s, t)]["state"] for p in range(3)]
            for name in states[0]:
                kind, number, component = name.split(".")
                if (kind, component) == ("weight", "lo"):
                    total = sum(state[name] for state in states)
                    slices.setdefault(int(number), []).append(total / 2.0**job.frac_bits)
    placed = weights_of(place_layers(find_model(job.model), size.tensor)[0])
    assert sorted(slices) == list(range(len(placed)))
    return [join_weight(one, slices[one.weight]) for one in placed]


def check_replicas(found: Found) -> None:
    """Replicas hold identical shares, bit for bit; all workers tell the same losses and count."""
    for c, value in found.items():
        first = found[Coord(0, c.party, c.stage, c.tensor)]
        for told in ("losses", "validated", "metrics", "correct"):
            assert value[told] == found[Coord(0, 0, 0, 0)][told]
        for name, tensor in value["state"].items():
            assert np.array_equal(tensor, first["state"][name]), (c, name)
