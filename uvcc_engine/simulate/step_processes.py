"""What a step takes on this machine when its workers' processes and their links share it, as local pods do.

``step_rehearsal`` counts rounds and bytes of three workers between threads of one process, which wait for their turn at
Python and send nothing. Seconds come from here, and the counts of parties that have several workers: every worker is a
process of its own, meets its sisters, seals what it sends, records it, signs a root for each step and agrees on it with
both peers, over the kind of link that the run will have.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.sealing.inputs import PartyInputs
from uvcc_engine.simulate import step_links, step_worker
from uvcc_engine.simulate.step_worker import ALONE, WorkerSteps, WorkerTask

LINKS: Final = ("direct", "relay", "stream")
MOST_STEPS: Final = 24
"""Steps of the processes, at most; the first is not timed."""
EARLY: Final = 2
"""Of them, those after the first step whose buffers are new and whose loops are read for the first time."""
TIMED_S: Final = 3.0
"""Short steps are repeated for about so long: each differs from the next by what else the machine does."""
GIVES_WAY: Final = 2
_WITHOUT: Final = "uvcc plan --no-rehearsal says what the profile alone decides"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step of all workers of ``size`` on ``cores`` processors of this machine.

    ``wall``: of each timed step, by the clock; ``worker_cpu``: processor seconds of each worker, on average;
    ``relay_cpu``: of the relay, 0 where the parties reach each other directly.
    """

    wall: tuple[float, ...]
    worker_cpu: Mapping[Coord, float]
    relay_cpu: float
    cores: float
    size: Topology = ALONE

    def to_json(self) -> dict[str, Any]:
        """As a rehearsal's JSON has it: the median step, the quickest and the slowest tenth, and how many times as long
        the first timed ones took, which a short smoke consists of; and of how many ``replicas``
        and ``workers`` that is."""
        ordered = sorted(self.wall)
        tenth = len(ordered) // 10
        settled = self.wall[EARLY:] or self.wall
        return {
            "wall": statistics.median(ordered),
            "low": ordered[tenth],
            "high": ordered[-1 - tenth],
            "early": max(1.0, statistics.fmean(self.wall[:EARLY]) / statistics.median(settled)),
            "party_cpu": self.party_cpu,
            "all_cpu": sum(self.worker_cpu.values()) + self.relay_cpu,
            "cores": self.cores,
            "replicas": self.size.replicas,
            "workers": self.size.workers,
        }

    @property
    def party_cpu(self) -> float:
        """Seconds that computing takes the party with most to do where each of its workers has a processor: its stages
        one after the other, microbatches one behind the other through them."""
        t, many = self.size, self.size.microbatches

        def of(replica: int, party: int) -> float:
            stages = [
                max(self.worker_cpu[Coord(replica, party, stage, rank)] for rank in range(t.tensor))
                for stage in range(t.stages)
            ]
            return (sum(stages) + (many - 1) * max(stages)) / many

        return max(of(replica, party) for replica in range(t.replicas) for party in range(PARTIES))


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """What the workers took, and what each told of its steps."""

    times: StepTimes
    workers: Mapping[Coord, WorkerSteps]


class WaitingWorkers:
    """Processes that wait to be told how many steps they train, and their relay where they need one."""

    def __init__(self, folder: Path, kind: str, size: Topology) -> None:
        self.folder, self._kind, self._size = folder, kind, size
        self._forker = multiprocessing.get_context("fork")
        self._lines: dict[Coord | None, Connection] = {}
        self.processes: list[BaseProcess] = []
        self._relay: BaseProcess | None = None

    def _forked(self, coord: Coord | None, body: Callable[..., None], *args: Any) -> BaseProcess:
        ours, theirs = self._forker.Pipe()
        lines = [*self._lines.values(), ours]
        process = self._forker.Process(target=_by_itself, args=(lines, body, theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self._lines[coord] = ours
        self.processes.append(process)
        return process

    def fork(self, job: PrivateJob, model: ModelSpec, inputs: Sequence[PartyInputs]) -> None:
        """Fork them from this process, which must not have computed with several threads yet."""
        stores = ports(PARTIES)
        for c in self._size.coords():
            blank = LinkSpec()
            task = WorkerTask(c, self._size, job, model, inputs[c.party], blank, stores[c.party], self.folder)
            self._forked(c, _serve, task)
        if self._kind != "direct":
            step_links.relay_files(self.folder, self._size)
            self._relay = self._forked(None, _relay, self.folder)

    def measure(self, steps: int) -> MeasuredSteps:
        """What each of ``steps`` steps takes after a first one. Raises UvccError where a worker fails."""
        links, relay_took = self._links(), -self._relay_cpu()
        for c, link in links.items():
            self._lines[c].send((steps + 1, link))
        told = self._heard()
        relay_took += self._relay_cpu()
        times = StepTimes(
            wall=tuple(b - a for a, b in pairwise(told[next(iter(links))].ends)),
            worker_cpu={c: (one.cpu[-1] - one.cpu[0]) / steps for c, one in told.items()},
            relay_cpu=relay_took / (steps + 1),
            cores=host.cpu_limit(),
            size=self._size,
        )
        return MeasuredSteps(times, told)

    def _links(self) -> dict[Coord, LinkSpec]:
        if self._relay is None:
            return step_links.direct(self._size)
        return step_links.relayed(self.folder, self._size, self._kind, self._relay, _WITHOUT)

    def _heard(self) -> dict[Coord, WorkerSteps]:
        """What each worker says, the first to fail before those that wait for it."""
        found: dict[Coord, WorkerSteps] = {}
        left = {line: c for c, line in self._lines.items() if c is not None}
        while left:
            for line in wait(list(left)):
                assert isinstance(line, Connection)
                c = left.pop(line)
                who = f"party {c.party}" if self._size.workers_per_party == 1 else f"worker {c}"
                try:
                    said = line.recv()
                except EOFError:
                    raise UvccError(f"{who} of the rehearsal ended without a word", _WITHOUT) from None
                if not isinstance(said, WorkerSteps):
                    raise UvccError(f"{who} of the rehearsal failed: {said}", _WITHOUT)
                found[c] = said
        return found

    def _relay_cpu(self) -> float:
        return host.cpu_s(self._relay.pid or 0) if self._relay is not None else 0.0

    def close(self) -> None:
        """End what is still there."""
        for line in self._lines.values():
            line.close()
        for process in self.processes:
            process.kill()
            process.join()


def steps_for(step_s: float) -> int:
    """How many steps are timed where one takes about ``step_s`` between threads; at least two."""
    return max(2, min(MOST_STEPS, round(TIMED_S / max(step_s, 1e-3))))


@contextlib.contextmanager
def waiting(
    job: PrivateJob, model: ModelSpec, inputs: Sequence[PartyInputs], kind: str, size: Topology
) -> Iterator[WaitingWorkers]:
    """The processes of all workers of ``size`` over links of ``kind`` (one of ``LINKS``), ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="uvcc-steps-") as name:
        workers = WaitingWorkers(Path(name), kind, size)
        try:
            workers.fork(job, model, inputs)
            yield workers
        finally:
            workers.close()


# -- in a process of their own ----------------------------------------------------------------------------------------


def _by_itself(lines: Sequence[Connection], body: Callable[..., None], *args: Any) -> None:
    """Without the lines of who forked this: while one process has them, no other learns that it is gone."""
    for line in lines:
        line.close()
    body(*args)


def _serve(line: Connection, task: WorkerTask) -> None:
    """Wait for the number of steps and the link, train, and say what it took."""
    _as_a_pod()
    try:
        steps, link = line.recv()
    except EOFError:  # nobody asks any more
        step_links.remove(task.folder)
        return
    step_links.end_with(line, task.folder)
    try:
        torch.set_num_threads(1)  # as workers do
        keep_freed_memory()
        line.send(step_worker.trained(replace(task, job=replace(task.job, steps=steps), link=link)))
    except Exception as error:  # noqa: BLE001  # whatever it is, the plan says it
        line.send(f"{type(error).__name__}: {error}"[:400])


def _relay(line: Connection, folder: Path) -> None:
    _as_a_pod()
    step_links.serve_relay(line, folder)


def _as_a_pod() -> None:
    """A session of its own, which Linux gives a share of the processors of its own, and a local pod's niceness."""
    os.setsid()
    os.nice(GIVES_WAY)
