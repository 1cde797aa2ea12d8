"""``bench threads``: what one party computes in a step where its pod has several processors for it.

Three parties train in this process and keep what they received. Then the first one trains again by itself from those
messages, on one thread and on more, as on a machine of its own whose links cost nothing. What it sends must be the same
to the bit, or the benchmark fails. Rows ``..._threads_N`` are held against one thread in the same run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from uvcc_engine.bench.epochs import CASES, EpochCase, data_of, job_of
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.machine.benchrows import Row, row, to_json, to_text
from uvcc_engine.contract.machine.by_itself import exit_code
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels import threads
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate.fitting import party_inputs

OF: Final = ("secureml", "lenet")
ALONE: Final = 0
"""The party that trains again by itself."""
_DEFECT: Final = "report this: it is a defect"
_PATIENCE_S: Final = 600.0  # for a party that computes while the others have the processors
_Sent = dict[tuple[int, Tag], bytes]


class ReplayedPlane:
    """``plane.api.Plane`` of a party whose peers are what it once received from them; keeps what it sends."""

    def __init__(self, received: Iterable[tuple[int, Tag, bytes]]) -> None:
        self.party = ALONE
        self.sent: _Sent = {}
        self._received = {(src, tag): body for src, tag, body in received}

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        self.sent[dst, tag] = bytes(payload)

    def recv(self, src: int, tag: Tag) -> memoryview:
        """See ``Plane.recv``. Raises UvccError for what the party did not receive then: it computes otherwise now."""
        if (src, tag) not in self._received:
            raise UvccError(f"a message differs: of party {src} another was received than {tag}", _DEFECT)
        return memoryview(self._received[src, tag])

    def send_control(self, dst: int, body: bytes) -> None:
        raise NotImplementedError

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        raise NotImplementedError

    def close(self, *, graceful: bool = True) -> None:
        return None


class RecordedTraining:
    """A job that three parties trained, and what its first party received and sent."""

    def __init__(self, job: PrivateJob, data: Dataset) -> None:
        self._job, self._model = job, fit_model(job)
        self._inputs: Sequence[PartyInputs] = party_inputs(dataset_tensors(data, job.frac_bits, job), job.frac_bits)
        planes = self._planes()
        planes.run_three(self._train)
        self._received = planes.wire.received[ALONE]
        peers = {p: planes.wire.received[p] for p in range(len(planes.runtimes)) if p != ALONE}
        self._sent = {(p, tag): body for p, of in peers.items() for src, tag, body in of if src == ALONE}

    def _planes(self) -> LocalPlanes:
        job = self._job
        made = LocalPlanes(job.seed, keep=True, few_rounds=job.rounds == "few", prg=job.random_generator)
        made.wire.wait_s = _PATIENCE_S
        return made

    def _train(self, rt: Runtime) -> list[float]:
        trainer, took = trainer_of(rt, self._job, self._model, self._inputs[rt.party]), []
        for step in range(self._job.steps):
            rt.begin_epoch(step)
            began = time.perf_counter()
            trainer.step(step)
            took.append(time.perf_counter() - began)
        return took

    def again(self, count: int) -> list[float]:
        """Seconds of each step of the first party by itself, on so many threads.

        Raises UvccError if it sends anything that it did not send before, or does not send what it did.
        """
        plane, rt = ReplayedPlane(self._received), self._planes().runtimes[ALONE]
        rt.plane = plane
        threads.use(count)
        took = self._train(rt)
        if plane.sent != self._sent:
            other = sum(plane.sent.get(key) != body for key, body in self._sent.items())
            raise UvccError(f"on {count} threads {other} of {len(self._sent)} messages differ", _DEFECT)
        return took


def recorded(case: EpochCase, steps: int, **more: Any) -> RecordedTraining:
    """So many steps of a case, by three parties that validate nothing."""
    data = replace(data_of(case, None), val_x=None, val_y=None)
    values = {k: v for k, v in job_of(case, data, steps=steps).items() if not k.startswith("val_")}
    return RecordedTraining(PrivateJob.from_json(values | {"reveal": ["loss"]} | more), data)


def thread_rows(name: str, one: RecordedTraining, counts: Sequence[int], runs: int) -> list[Row]:
    """Seconds of a step on each count of threads, in turn; a training's first step is not counted."""
    took: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(runs):
        for count in counts:
            took[count] += one.again(count)[1:]
    first = row(f"{name}_threads_1", "seconds", "s", took[1])
    return [first, *(row(f"{name}_threads_{n}", "seconds", "s", took[n], first.value) for n in counts if n > 1)]


def counts_up_to(most: int) -> list[int]:
    """The numbers 1, 2, 4 and so on of threads, up to ``most``, and that."""
    return sorted({1, most, *(1 << k for k in range(most.bit_length()) if 1 << k <= most)})


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    made = RaisingParser(prog="uvcc-engine bench threads", description=__doc__)
    made.add_argument("--case", action="append", default=[], help=f"only this one: {', '.join(OF)}")
    made.add_argument(
        "--most", type=int, default=os.cpu_count() or 1, help="threads, at most (default: all processors)"
    )
    made.add_argument("--steps", type=int, default=3, help="of each training, 2 at least: the first is not counted")
    made.add_argument("--runs", type=int, default=2)
    made.add_argument("--json", action="store_true")
    args = made.parse_args(argv)
    if unknown := sorted(set(args.case) - set(OF)):
        raise ConfigError(f"unknown case {unknown[0]!r}", f"one of: {', '.join(OF)}")
    if args.most < 1 or args.steps < 2 or args.runs < 1:
        raise ConfigError(
            f"--most {args.most} --steps {args.steps} --runs {args.runs}", "a thread, two steps and a run at the least"
        )
    torch.set_num_threads(1)  # as in a worker
    keep_freed_memory()
    found: list[Row] = []
    for name in args.case or OF:
        for kind, more in (("", {}), ("_proved", {"verify": "proofs"})):
            print(f"{name}{kind}: training", file=sys.stderr, flush=True)
            threads.use(1)
            one = recorded(CASES[name], args.steps, **more)
            found += thread_rows(name + kind, one, counts_up_to(args.most), args.runs)
    print(to_json(found) if args.json else to_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
