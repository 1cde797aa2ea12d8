"""Three parties of several workers in one process: a thread for every worker, and groups that meet in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from proof_kit import LyingRuntime
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import AXES, Coord, Topology
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.mpc.foundation.local import LocalPlane, Wire, rehearsal_keys
from uvcc_engine.mpc.foundation.runtime import ProtocolTask, Runtime
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs.settling import OwedVerdict
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.sharding import fleet_proof
from uvcc_engine.sharding.sharded_training import ParallelTrainer

Opened = tuple[Coord, int]
"""By whom something was sent that opens a secret, and in which epoch."""


class _Table:
    """Where the members of one group put down what each has."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.passed: dict[tuple[int, int, int], Any] = {}
        self.news = threading.Condition()
        self.broken = False

    def swap(self, index: int, x: Any) -> list[Any]:
        try:
            self.slots[index] = x
            self.barrier.wait(120.0)
            found = list(self.slots)
            self.barrier.wait(120.0)
        except threading.BrokenBarrierError:
            raise PeerLostError("a sister worker is gone") from None
        return found

    def put(self, key: tuple[int, int, int], x: Tensor) -> None:
        with self.news:
            self.passed[key] = x.clone()
            self.news.notify_all()

    def take(self, key: tuple[int, int, int]) -> Tensor:
        with self.news:
            self.news.wait_for(lambda: key in self.passed or self.broken, 120.0)
            if key not in self.passed:
                raise PeerLostError("a sister worker is gone")
            return self.passed.pop(key)  # type: ignore[no-any-return]

    def leave(self) -> None:
        self.barrier.abort()
        with self.news:
            self.broken = True
            self.news.notify_all()


class Meeting:
    """``Communicator`` of one worker over a table in memory."""

    def __init__(self, table: _Table, index: int) -> None:
        self.table, self.index, self.size = table, index, len(table.slots)

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x] if self.size == 1 else self.table.swap(self.index, x.clone())

    def sum_(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.gather(x)).sum(0)) if self.size > 1 else x

    def sum_slices(self, x: Tensor) -> Callable[[], Tensor]:
        if self.size == 1:
            return lambda: x
        total = torch.stack(self.gather(x)).sum(0).reshape(self.size, -1)[self.index].clone()
        return lambda: total

    def broadcast_(self, x: Tensor, source: int) -> Tensor:
        return x.copy_(self.gather(x)[source]) if self.size > 1 else x

    def send(self, x: Tensor, to: int, tag: int) -> Callable[[], None]:
        self.table.put((self.index, to, tag), x)
        return lambda: None

    def receive(self, x: Tensor, source: int, tag: int) -> Tensor:
        return x.copy_(self.table.take((source, self.index, tag)))


class MemoryGroups:
    """``PartyGroups`` of one worker."""

    def __init__(self, place: RankAddress, tables: dict[tuple[str, tuple[int, ...]], _Table]) -> None:
        self.place, self.alone, self.dp_started = place, place.world == 1, True
        self._tables = []
        found = []
        for name in (*AXES, "back"):
            axis = "pp" if name == "back" else name
            members = tuple(place.members(axis))
            key = (f"{place.coord.party} {name}", members)
            table = tables.setdefault(key, _Table(len(members)))
            self._tables.append(table)
            found.append(Meeting(table, place.index(axis)))
        self.dp, self.pp, self.tp, self.pp_back = found

    def start_dp(self) -> None:
        """It is up."""

    def leave(self) -> None:
        for table in self._tables:
            table.leave()


@dataclass
class Course:
    """How it went at one worker."""

    losses: list[float | None] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    coins: list[bytes] = field(default_factory=list)
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)
    error: UvccError | None = None
    failure: BaseException | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Outcome:
    """How it went at every worker, and who sent what opens a secret; what is opened under a mask is none."""

    workers: dict[Coord, Course]
    opened: list[Opened]

    @property
    def errors(self) -> dict[Coord, UvccError | None]:
        return {c: one.error for c, one in self.workers.items()}

    def opened_in(self, epoch: int) -> list[Opened]:
        """Whoever sent what opens something in a step."""
        return [one for one in self.opened if one[1] == epoch]


def job_of(layers: Sequence[Any] = ({"linear": 2}, "relu", "linear"), **more: Any) -> PrivateJob:
    """A small job of 3 features and 2 classes."""
    net = sorted_json(model_to_json(model_of_list(list(layers), more.pop("features", 3), 2)))
    given: dict[str, Any] = {"model": net, "steps": 2, "batch": 2, "test_rows": 4, "lr": 0.5, "momentum": 0.9} | more
    return PrivateJob(**given)


def rows_of(job: PrivateJob) -> Dataset:
    features = find_model(job.model).features
    x = torch.randn(20, features, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    y = (x[:, 0] > 0).astype(np.int64)
    return Dataset(x[:16], y[:16], x[16:], y[16:], 2)


def shares_of(job: PrivateJob, data: Dataset) -> list[PartyInputs]:
    rng = np.random.default_rng(5)
    parts: list[dict[str, Any]] = [{}, {}, {}]
    for name, ring in dataset_tensors(data, job.frac_bits, job).items():
        low, middle = (rng.integers(-(2**63), 2**63, ring.shape, dtype=np.int64) for _ in range(2))
        with np.errstate(over="ignore"):
            for part, component in zip(parts, (low, middle, ring - low - middle), strict=True):
                part[name] = component
    names = list(parts[0])
    return [PartyInputs(p, job.frac_bits, {n: (parts[p][n], parts[(p + 1) % 3][n]) for n in names}) for p in range(3)]


Tamper = Callable[[Coord, int, Tag, bytes], bytes]


def train(
    job: PrivateJob,
    size: Topology = Topology(2),
    *,
    tamper: Tamper | None = None,
    stands_by: Callable[[int, int, Tensor], None] | None = None,
    liar: Coord | None = None,
    prepare: Callable[[Coord, ParallelTrainer, MemoryGroups], None] = lambda c, trainer, groups: None,
    data: Dataset | None = None,
    defers: bool = False,
) -> Outcome:
    """A training with all its openings. ``tamper`` may change any message on its way; ``stands_by(epoch, number,
    tensor)`` what worker ``liar`` sends, and goes on with. ``defers``: verdicts of steps that open nothing are heard in
    the next step, as workers do."""
    inputs, opened = shares_of(job, data or rows_of(job)), list[Opened]()
    places = sorted({(c.replica, c.stage, c.tensor) for c in size.coords()})
    wires = {place: Wire(tamper=_of_place(place, tamper)) for place in places}
    tables: dict[tuple[str, tuple[int, ...]], _Table] = {}
    votes = {place: _Table(3) for place in places} if defers else {}
    members = {c: MemoryGroups(RankAddress(c, size), tables) for c in size.coords()}
    found = {c: Course() for c in size.coords()}

    def body(c: Coord) -> None:
        place = (c.replica, c.stage, c.tensor)
        wire, groups, course = wires[place], members[c], found[c]
        try:
            lie = stands_by if c == liar else None
            _train(job, c, wire, groups, inputs[c.party], course, opened, lie, prepare, votes.get(place))
        except UvccError as why:
            course.error = why
        except BaseException as why:  # noqa: BLE001 - raised in the caller's thread below
            course.failure = why
        if course.error or course.failure:  # as a process that ends: peers and sisters lose it
            for peer in {0, 1, 2} - {c.party}:
                wire.main[c.party, peer].put(None)
            groups.leave()
            if defers:
                votes[place].leave()

    threads = [threading.Thread(target=body, args=(c,), name=str(c), daemon=True) for c in size.coords()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    for course in found.values():
        if course.failure is not None:
            raise course.failure
    return Outcome(found, opened)


def _of_place(place: tuple[int, int, int], tamper: Tamper | None) -> Any:
    if tamper is None:
        return None
    return lambda src, dst, tag, body: tamper(Coord(place[0], src, place[1], place[2]), dst, tag, body)


def _hear(groups: MemoryGroups, votes: _Table, party: int, owed: OwedVerdict) -> None:
    """What the session does with the votes of the next step."""

    def work() -> None:
        told = votes.swap(party, owed.said)
        owed.hear({p: said for p, said in enumerate(told) if p != party})

    fleet_proof.agree(groups, work)  # type: ignore[arg-type]


class NotingRuntime(LyingRuntime):
    """A runtime that notes when it sends what opens a secret, and lies if it is asked to."""

    note: Callable[[int], None]

    def _resume(self, task: ProtocolTask, answer: list[Tensor] | None) -> list[ProtocolTask]:
        waiting = super()._resume(task, answer)
        if task.request is not None and task.request.opening and task.request.sends:
            self.note(self.epoch)
        return waiting


def _train(
    job: PrivateJob,
    c: Coord,
    wire: Wire,
    groups: MemoryGroups,
    inputs: PartyInputs,
    course: Course,
    opened: list[Opened],
    lie: Callable[[int, int, Tensor], None] | None,
    prepare: Callable[[Coord, ParallelTrainer, MemoryGroups], None],
    votes: _Table | None,
) -> None:
    plane, keys = LocalPlane(wire, c.party), rehearsal_keys(10 + c.replica)[c.party]  # every pod has its own keys
    sid = hashlib.sha256(f"{c.replica} {c.stage} {c.tensor}".encode()).digest()

    def runtime(stream: int = 0) -> Runtime:
        rt = NotingRuntime(c.party, plane, keys, sid, stream=stream)
        rt.sends, rt.lie = 0, None
        rt.note = lambda epoch: opened.append((c, epoch))
        if lie is not None:
            rt.lie = lambda number, data: lie(rt.epoch, 1000 * stream + number, data)
        return rt

    main = runtime()
    trainer = ParallelTrainer(main, runtime, job, find_model(job.model), inputs, groups, lambda n, f: None)  # type: ignore[arg-type]
    prepare(c, trainer, groups)
    ledger = main.ledger
    if votes is not None and ledger is not None:
        ledger.defers = True
    for step in range(job.steps):
        main.begin_epoch(step)
        result = trainer.step(step)
        course.losses.append(result.loss)
        course.validated |= result.validated
        if result.proved is not None:
            course.claims.append(result.proved.claims)
            course.coins.append(result.proved.coins)
            course.drawn.append(result.proved.drawn)
        course.state = trainer.state()
        if votes is not None and ledger is not None and result.owed is not None:
            ledger.unheard = partial(_hear, groups, votes, c.party, result.owed)
    main.begin_epoch(job.steps)
    course.metrics = trainer.evaluate()
    course.claims.append(trainer.proved_metrics.claims)
    course.coins.append(trainer.proved_metrics.coins)


def weights(job: PrivateJob, found: Outcome, size: Topology = Topology(2), replica: int = 0) -> list[np.ndarray]:
    """The weights of one replica in clear, in the order of the model; without tensor ranks."""
    whole: dict[int, np.ndarray] = {}
    for s in range(size.stages):
        states = [found.workers[Coord(replica, p, s, 0)].state for p in range(3)]
        for name in states[0]:
            kind, number, component = name.split(".")
            if (kind, component) == ("weight", "lo"):
                whole[int(number)] = sum(state[name] for state in states).numpy() / 2.0**job.frac_bits  # type: ignore[union-attr]
    return [whole[k] for k in sorted(whole)]
