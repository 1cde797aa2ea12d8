"""What a step costs where a party has several workers, or its batch passes in microbatches: counted at each worker.

Stages, tensor ranks, replicas and microbatches share out a step's messages, and each sends some that one worker would
not: a product whose columns are split is truncated at every rank, a borrowed table's gradient is repaid, a layer's
statistics are added up. So the run's own workers are rehearsed. Where there are too many of them for one machine, fewer
replicas are: a replica's passes cost what another's do, and the update is divided among all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.model.layer_types.trees import trees_of
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.simulate.message_chain import longest_chain
from uvcc_engine.simulate.step_worker import ALONE, WorkerSteps, by_itself

MOST_WORKERS: Final = 24
"""Processes of a rehearsal at most, as of the largest run of local pods."""
Mean = Callable[[Sequence[tuple[int, int]]], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Of one step: ``rounds`` of the worker that has most; ``bytes`` of all workers, and ``pod_bytes`` of one party's
    workers in one replica; ``chain``: how many messages wait for one another (``message_chain``)."""

    rounds: float
    bytes: float
    pod_bytes: float
    chain: float

    def to_json(self) -> dict[str, Any]:
        """As a rehearsal's JSON has it."""
        return asdict(self)


def rehearsed_size(model: ModelSpec, size: Topology, *, apart: bool) -> Topology | None:
    """The workers whose step is rehearsed on this machine for a run of ``size``, with fewer replicas if need be; None
    where one replica has too many of them, or all must be there (trees and k-means add up sums over rows).

    ``apart``: the pods are not this machine's, which then need not have the memory of all, and of one replica learns as
    much."""
    if by_itself(size):
        return ALONE
    fit = MOST_WORKERS // (PARTIES * size.stages * size.tensor)
    whole = model.unsupervised or trees_of(model) is not None
    few = 1 if size.stages * size.tensor * size.microbatches > 1 else 2  # one alone would train by itself
    most = min(fit, few) if apart and not whole else fit
    if most < 1 or (whole and most < size.replicas):
        return None
    return replace(size, replicas=min(size.replicas, most))


def busiest(workers: Mapping[Coord, WorkerSteps]) -> float:
    """How many times the average of the pods the one that sends most sends, its workers together: at least 1.

    Who deals for a product sends more than the others, and a step waits for the fullest line.
    """
    sent: dict[tuple[int, int], int] = {}
    for coord, one in workers.items():
        pod = coord.replica, coord.party
        sent[pod] = sent.get(pod, 0) + sum(one.bytes_sent[1:] or one.bytes_sent)
    total = sum(sent.values())
    return max(sent.values()) * len(sent) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The most that workers held, in MiB: of the pod whose workers held most, ``pod_mib``, and of all, ``all_mib``."""

    pod_mib: float
    all_mib: float

    def to_json(self) -> dict[str, Any]:
        """As a rehearsal's JSON has it."""
        return asdict(self)


def held(workers: Mapping[Coord, WorkerSteps]) -> HeldMemory:
    """Pages that workers of a pod share count for each of them."""
    pods: dict[tuple[int, int], float] = {}
    for coord, one in workers.items():
        pod = coord.replica, coord.party
        pods[pod] = pods.get(pod, 0.0) + one.peak_mib
    return HeldMemory(max(pods.values()), sum(pods.values()))


def fleet_costs(
    job: PrivateJob, size: Topology, rehearsed: Topology, workers: Mapping[Coord, WorkerSteps], mean: Mean
) -> FleetCosts:
    """What a step of ``size`` takes by what the workers of ``rehearsed`` told. ``mean``: rounds and bytes of a step on
    average, from those of each step."""
    by_worker = [mean(list(zip(one.rounds, one.bytes_sent, strict=True))) for one in workers.values()]
    total = sum(sent for _, sent in by_worker)
    shared = sum(mean(list(zip(one.rounds, one.main_bytes, strict=True)))[1] for one in workers.values())
    shared = 0.0 if job.proves else shared  # a proof of a replica's products is as long as another's
    more = size.replicas / rehearsed.replicas
    sent = shared + (total - shared) * more
    return FleetCosts(
        rounds=max(rounds for rounds, _ in by_worker),
        bytes=sent,
        pod_bytes=sent / PARTIES / size.replicas,
        chain=longest_chain({c: one.happenings for c, one in workers.items()}),
    )
