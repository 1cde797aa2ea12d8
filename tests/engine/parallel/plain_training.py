"""Trainings by the plain ring, and by three parties whose masks are zero: the state after a job's steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from fixed_twin import Ints
from plain_ring import PlainRuntime, plain_ring
from training_kit import shares

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.specs import ModelSpec, find_model
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.sealing.inputs import PartyInputs, dataset_tensors
from uvcc_engine.sharding.sharded_training import ParallelTrainer

Ended = tuple[list[Any], dict[str, float], dict[str, Ints]]
"""Losses, what was measured at the end, and the state in ring elements, by name."""


def _inputs(job: PrivateJob, data: Dataset) -> PartyInputs:
    tensors = dataset_tensors(data, job.frac_bits, job)
    return PartyInputs(0, job.frac_bits, {name: (x, np.zeros_like(x)) for name, x in tensors.items()})


def _trained(rt: Any, trainer: Any, job: PrivateJob) -> Ended:
    losses = []
    for step in range(job.steps):
        rt.begin_epoch(step)
        told = trainer.step(step)
        losses.append((told.loss, dict(told.validated)))
    rt.begin_epoch(job.steps)
    measured = trainer.evaluate()
    kept = {name.removesuffix(".lo"): x.numpy() for name, x in trainer.state().items() if name.endswith(".lo")}
    return losses, measured, kept


def in_plain_integers(
    job: PrivateJob, data: Dataset, model: ModelSpec | None = None, changed: dict[Any, Any] | None = None
) -> Ended:
    """The twin of one worker a party. ``changed``: see ``plain_ring``."""
    found = find_model(job.model) if model is None else model
    with plain_ring(changed) as rt:
        rt.few_rounds = job.rounds == "few"
        return _trained(rt, trainer_of(rt, job, found, _inputs(job, data)), job)  # type: ignore[arg-type]


def in_plain_integers_by_parts(job: PrivateJob, data: Dataset, parts: int = 1) -> Ended:
    """The twin of several workers a party, whose program is another one; ``parts``: microbatches of all replicas."""
    with plain_ring() as rt:
        groups = PartyGroups.open(RankAddress(Coord(0, 0, 0, 0), Topology(1, 1, 1, parts)), on_event=_unheard)
        more: Any = lambda stream: PlainRuntime()  # noqa: E731 - as the trainer is given it
        main: Any = rt
        trainer = ParallelTrainer(main, more, job, find_model(job.model), _inputs(job, data), groups, _unheard)
        return _trained(rt, trainer, job)


def _unheard(name: str, told: dict[str, Any]) -> None:
    """What nobody listens to."""


def by_three_parties(job: PrivateJob, data: Dataset, model: ModelSpec | None = None, prg: str = "zeros") -> Ended:
    found, inputs = find_model(job.model) if model is None else model, shares(job, data)
    parties = LocalPlanes(3, prg=prg, few_rounds=job.rounds == "few").run_three(
        lambda rt: _trained(rt, trainer_of(rt, job, found, inputs[rt.party]), job)
    )
    losses, measured, first = parties[0]
    return losses, measured, {name: first[name] + parties[1][2][name] + parties[2][2][name] for name in first}


def weights_in_clear(job: PrivateJob, ended: Ended) -> list[Any]:
    """The weights as numbers, in the order of the model."""
    kept = ended[2]
    return [kept[f"weight.{at}"] / 2.0**job.frac_bits for at in range(sum(name.startswith("weight.") for name in kept))]


def same(ours: Ended, theirs: Ended) -> bool:
    """Losses, measures, weights and moments, to the last bit."""
    kept = all(np.array_equal(ours[2][name], theirs[2][name]) for name in ours[2])
    return kept and ours[2].keys() == theirs[2].keys() and ours[:2] == theirs[:2]
