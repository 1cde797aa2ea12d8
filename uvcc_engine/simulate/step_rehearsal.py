"""What a job will cost and how large its numbers become, from a few steps on made-up rows: nobody's data are needed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, RingRangeError, UvccError
from uvcc_engine.contract.job.private_job import BOUNDS, VALIDATIONS, PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.sets import Dataset, one_hot
from uvcc_engine.model.definition.base_model import made_up
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.sealing.inputs import dataset_tensors
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate import fitting, step_processes
from uvcc_engine.simulate.metering import LayerCost
from uvcc_engine.simulate.step_fleet import busiest, fleet_costs, held, rehearsed_size
from uvcc_engine.simulate.step_worker import ALONE, by_itself

STEPS: Final = 3
"""The first of them pays for compiling and is not timed; of the others the quickest counts. All but the last are
watched for numbers that pass the end of the ring, which takes time."""
_WORKERS: Final = ("workers", "replicas", "stages", "tensor", "microbatches")
"""Of a party, as ``fit_model`` takes them; ``workers``: all of them, times the microbatches."""
_NEVER: Final = 1 << 64
"""One audit in so many: of the numbers that coins draw, 0 alone asks for it."""
_APART, _PROCESS_MIB = 1.4, 350
"""Times as much memory as threads of one process that workers take that are processes, with links of their own; and
what each has before it computes."""
TIGHT_BITS: Final = 4.0
"""Headroom below which a layer's numbers come near the end of the ring."""


@dataclass(frozen=True, slots=True)
class AuditCosts:
    """What audits add under ``verify: covert``: ``rounds`` to a step in which there is one, ``bytes_sent`` for one more
    party that is audited, of one party; and how they fall: ``audits`` a step on average, ``audited``: the share of the
    steps that have one."""

    rounds: float
    bytes_sent: float
    audits: float
    audited: float

    @classmethod
    def between(cls, none: tuple[float, float], every: tuple[float, float], one_in: int) -> AuditCosts:
        """From rounds and bytes of all parties of a step without an audit and of one in which every party has one."""
        rounds, sent = every[0] - none[0], (every[1] - none[1]) / PARTIES
        return cls(rounds, sent / PARTIES, PARTIES / one_in, 1.0 - (1.0 - 1.0 / one_in) ** PARTIES)


@dataclass(frozen=True, slots=True)
class StepRehearsal:
    """One step of a job with one worker per party, on average over those that reveal their loss and those that do not.

    ``rounds``; ``bytes_sent``: of one party; ``seconds``: of computing, the three parties on this machine's processors;
    ``layers``: their costs and ranges; ``warnings``: where fixed point may hurt, and what to change;
    ``most_frac_bits``: how many fractional bits the layers' outputs leave room for; ``audit``: what of rounds and bytes
    falls as audits are drawn.
    """

    rounds: float
    bytes_sent: float
    seconds: float
    layers: tuple[LayerCost, ...]
    warnings: tuple[str, ...]
    most_frac_bits: int
    audit: AuditCosts | None = None

    def to_json(self) -> dict[str, Any]:
        layers = [
            {
                "layer": one.layer,
                "rounds": sum(one.rounds.values()),
                "bytes": sum(one.bytes.values()) / PARTIES,
                "integer_bits": one.integer_bits,
                "headroom_bits": round(one.headroom, 1),
            }
            for one in self.layers
        ]
        step: dict[str, Any] = {"rounds": self.rounds, "bytes": self.bytes_sent, "seconds": self.seconds}
        step["most_frac_bits"] = self.most_frac_bits
        step |= {"audit": asdict(self.audit)} if self.audit is not None else {}
        return step | {"layers": layers, "warnings": list(self.warnings)}


def rehearse(job: PrivateJob, steps: int = STEPS, known: int = 0) -> StepRehearsal:
    """Train ``steps`` steps, at least 2, on rows from a normal distribution: a batch of them, or as many as are
    ``known`` to be trained on, where a step's cost depends on all.

    Raises ConfigError for another task, and where a number passes the end of the ring: nothing that is learned so is
    worth a run.
    """
    if job.task != "train":
        raise ConfigError(f"a job of the task {job.task} cannot be rehearsed", "only trainings can")
    job = _with_trees_for(job, steps)
    model = made_up(fit_model(job), job.seed)
    data = _rows(job, model, known=known)
    times: list[float] = []
    short = _shortened(job, steps, len(data.test_x))
    rarely = job.proving.audit_one_in
    try:
        found = fitting.train(
            short,
            data,
            progress=lambda _done, _steps, _loss: times.append(time.monotonic()),
            watch_range=True,
            watched_steps=steps - 1,
            model=model,
            audit_one_in=_NEVER if rarely else 0,
        )
    except RingRangeError as error:
        what = f"with job.frac_bits {job.frac_bits} numbers overflow in the rehearsal: {error.what}"
        raise ConfigError(what, "fewer frac_bits, smaller inputs, or a smaller learning rate") from error
    rounds, sent = _mean_costs(job, short, found.step_costs)
    audit = None
    if rarely:
        every = fitting.train(short, data, model=model, audit_one_in=1)
        audit = AuditCosts.between((rounds, sent), _mean_costs(job, short, every.step_costs), rarely)
        rounds += audit.rounds * audit.audited
        sent += audit.bytes_sent * audit.audits * PARTIES
    return StepRehearsal(
        rounds=rounds,
        bytes_sent=sent / PARTIES,
        audit=audit,
        seconds=min(after - before for before, after in pairwise(times)),
        layers=found.layers,
        warnings=(*_warnings(found.layers, job.frac_bits), *_validated(job)),
        most_frac_bits=_most_frac_bits(found.layers, job.frac_bits),
    )


def _shortened(job: PrivateJob, steps: int, rows: int) -> PrivateJob:
    """``steps`` steps of it, some that reveal their loss and some that do not where the job has both, and ``rows`` to
    test with."""
    often = min(job.loss_every, 2)
    return _unvalidated(replace(job, steps=steps, val_every=0, test_rows=rows, checkpoint_every=1, loss_every=often))


def _with_trees_for(job: PrivateJob, steps: int) -> PrivateJob:
    """The job with trees for so many steps, where it grows some: each step of a rehearsal grows one that it has."""
    model = fit_model(job)
    trees = trees_of(model)
    if trees is None or trees.count >= steps:
        return job
    roomy = replace(model, layers=(replace(trees, count=steps),))
    return PrivateJob.from_json(job.to_json() | {"model": model_to_json(roomy)})


def _rows(job: PrivateJob, model: ModelSpec, replicas: int = 1, known: int = 0) -> Dataset:
    """A batch for each replica, or as many rows as are ``known``, and rows to test with, from a normal distribution."""
    rng = np.random.default_rng(job.seed)
    batch = max(job.batch * replicas, known)
    rows = max(2 * job.batch, job.min_rows)
    kinds = max(2, model.classes)
    numbers = rng.integers(0, kinds, (batch + rows, model.positions))
    if model.positions > 1 and model.features == model.targets:  # letters, of which the next ones are learned
        x = one_hot(numbers, kinds)
    else:
        x = rng.standard_normal((batch + rows, model.features))
        x = (x > 0.0).astype(np.float64) if trees_of(model) is not None else x
        numbers = numbers if model.positions > 1 else numbers[:, 0]
    y = numbers if model.classes > 1 else numbers.astype(np.float64)
    y = np.zeros((len(x), 0)) if model.unsupervised else y
    weights = rng.uniform(0.0, 1.0, batch) if job.row_weights else None
    return Dataset(x[:batch], y[:batch], x[batch:], y[batch:], model.labels, weights=weights)


def waiting_workers(
    job: PrivateJob, link: str, size: Topology = ALONE, known: int = 0
) -> AbstractContextManager[step_processes.WaitingWorkers]:
    """All workers of ``size`` as processes that will train on made-up rows. ``known``: see :func:`rehearse`.

    Raises ConfigError for another task."""
    if job.task != "train":
        raise ConfigError(f"a job of the task {job.task} cannot be rehearsed", "only trainings can")
    job = _with_trees_for(job, STEPS + step_processes.MOST_STEPS)
    model = made_up(fit_model(job), job.seed)
    data = _rows(job, model, size.replicas, known)
    short = _shortened(job, STEPS, len(data.test_x))
    inputs = fitting.party_inputs(dataset_tensors(data, job.frac_bits, short), job.frac_bits)
    return step_processes.waiting(short, model, inputs, link, size)


def _mean_costs(job: PrivateJob, short: PrivateJob, costs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Rounds and bytes of all parties that a step of ``job`` takes on average, from those of ``short``'s steps but the
    first, which may take statistics of the rows."""
    of: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for step, cost in enumerate(costs[1:], start=1):
        of[short.reveals_loss(step)].append(cost)
    told_steps = -(-job.steps // job.loss_every) + bool((job.steps - 1) % job.loss_every)
    telling = told_steps / job.steps if "loss" in job.reveal else 0.0
    found = [0.0, 0.0]
    for told, share in ((True, telling), (False, 1.0 - telling)):
        seen = of[told] or of[not told]
        for at in range(2):
            found[at] += share * sum(cost[at] for cost in seen) / len(seen)
    return found[0], found[1]


def _unvalidated(job: PrivateJob) -> PrivateJob:
    """The same job without rows for validation."""
    told = tuple(name for name in job.reveal if name not in VALIDATIONS)
    return replace(job, reveal=told, val_rows=0, val_every=0, val_budget=0, patience=0, keep_best=False)


def _validated(job: PrivateJob) -> list[str]:
    if not job.validations:
        return []
    often = f"at most {job.validations} times" if job.patience else f"{job.validations} times"
    return [
        f"validation is revealed {often}, of {job.val_rows} rows each; what that takes is not in the step's figures"
    ]


def _most_frac_bits(layers: Sequence[LayerCost], frac_bits: int) -> int:
    """A bit behind the point takes two of the headroom of a product."""
    spare = min((one.headroom for one in layers), default=TIGHT_BITS) - TIGHT_BITS
    least, most = (int(BOUNDS["frac_bits"].low), int(BOUNDS["frac_bits"].high))
    return min(most, max(least, frac_bits + math.floor(spare / 2.0)))


def _warnings(layers: Sequence[LayerCost], frac_bits: int) -> list[str]:
    tight = [one for one in layers if one.headroom < TIGHT_BITS]
    if not tight:
        return []
    worst = min(tight, key=lambda one: one.headroom)
    fewer = frac_bits - max(1, round((TIGHT_BITS - worst.headroom) / 2))
    return [
        f"layer {worst.layer} needs {worst.integer_bits} bits left of the point and comes near the ring's end: "
        f"job.frac_bits {fewer} instead of {frac_bits}, or smaller inputs"
    ]


def main(argv: list[str]) -> int:
    """``uvcc-engine rehearse --job FILE``: the rehearsal as one JSON line; returns the exit code."""
    parser = RaisingParser(prog="uvcc-engine rehearse", description=(__doc__ or "").strip())
    parser.add_argument("--job", type=Path, required=True, help="a private job (JSON, as in a policy)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to train; at least 2")
    for name in _WORKERS:
        parser.add_argument(f"--{name}", type=int, default=1, help="of the run")
    links = step_processes.LINKS
    parser.add_argument("--link", choices=links, default=links[0], help="how the processes that are timed meet")
    parser.add_argument("--rows", type=int, default=0, help="to train on, where a step answers all; else a batch")
    parser.add_argument("--apart", action="store_true", help="the run's pods are not this machine's")
    args = parser.parse_args(argv)
    try:
        job = PrivateJob.from_json(files.read_json(args.job))
        model = fit_model(job, **{name: getattr(args, name) for name in _WORKERS})
        size = Topology(args.replicas, args.stages, args.tensor, args.microbatches)
        found = told(job, size, rehearsed_size(model, size, apart=args.apart), args.link, max(2, args.steps), args.rows)
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found))
    return 0


def refuse_too_large(held_mib: float, workers: int) -> None:
    """Raises UvccError where this machine has not the memory for so many workers as processes that ``held_mib`` as
    threads of one: it would be of no use to anybody for many minutes, and end one of them."""
    host.give_back()
    need, free = (_APART * held_mib + _PROCESS_MIB * workers) / 1024, host.memory_mib()["available_mib"] / 1024
    if need > free > 0:
        raise UvccError(
            f"the workers of a step would hold some {need:.0f} GiB here, and this machine has {free:.0f} free",
            "a smaller job.batch, job.verify: products where it is proofs, or uvcc plan --no-rehearsal",
        )


def told(
    job: PrivateJob, size: Topology, part: Topology | None, link: str, steps: int, known: int = 0
) -> dict[str, Any]:
    """A step of one worker per party, what processes took for one of ``part``, and what that says of ``size``;
    ``busiest``: what the pod that sends most sends, by the average of the pods."""
    timed, before = part or ALONE, host.peak_mib()
    with waiting_workers(job, link, timed, known) as workers:
        found = rehearse(job, steps, known // timed.replicas)
        refuse_too_large((host.peak_mib() - before) * timed.replicas, PARTIES * timed.workers_per_party)
        count = step_processes.steps_for(found.seconds * timed.replicas)
        took = workers.measure(count)
    step = found.to_json() | {"processes": took.times.to_json(), "busiest": busiest(took.workers)}
    step["memory"] = held(took.workers).to_json()
    if part is None or by_itself(size):
        return step
    short = _shortened(job, count + 1, job.test_rows)
    mean = partial(_mean_costs, job, short)
    return step | {"fleet": fleet_costs(job, size, part, took.workers, mean).to_json()}
