"""Rows that are held out, sent through the stages of every replica, and what is opened of the answers to them.

Each replica answers its slice of the rows. Where the accuracy alone is revealed, each counts its own right answers, and
one worker of each party opens the sum. For any other metric the answers, still shared, are gathered at that worker
within its party, which computes it as a party of one worker does.

Where products are proved, what is opened waits for the proofs of all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import METRICS, PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.learning.answer_metrics import measure_protocol
from uvcc_engine.model.learning.measured import Measured, numbers
from uvcc_engine.model.learning.validating import validations_protocol
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.model.parts import gather_rows
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.parallel.pipeline import FORWARD
from uvcc_engine.sharding.fleet_part import FleetPart
from uvcc_engine.sharding.partition import bounds
from uvcc_engine.sharding.stage_passes import Pass, StagePart, forward_protocol

_EVAL_ROWS: Final = 256
Open = Callable[[Sequence[Share]], list[Tensor]]
"""Opens numbers once all workers have proved what they computed, where that is proved. All call it; one has numbers."""
AtEnd = Callable[[Pass, Share, Tensor], MpcProtocol[Share]]
"""What the last stage does with its inputs for some rows: what it gives is kept."""
Measure = Callable[[Runtime, PrivateJob, ModelSpec, Share, Share], MpcProtocol[list[Measured]]]


def evaluate(fleet: FleetPart, open_all: Open) -> dict[str, float]:
    """Open the metrics that the job lists, over all test rows, by name. All workers call it together."""
    listed = set(METRICS) & set(fleet.job.reveal)
    if not listed:
        return {}
    if listed == {"accuracy"} and fleet.model.classes > 1:
        rows = int(fleet.tensors["test_x"].shape[0])
        return {"accuracy": count_correct(fleet, open_all) / (rows * fleet.model.positions)}
    measured = _measured(fleet, "test", 0, measure_protocol)
    return told_numbers(fleet, measured, open_all([one.share for one in measured]))


def measure_validation(fleet: FleetPart) -> list[Measured]:
    """The numbers of validation that the job lists, still shared, after a step and within its epoch; at the worker that
    opens them, and empty at all others.

    The passes take streams behind those of the step's microbatches. All workers call it together.
    """
    return _measured(fleet, "val", fleet.groups.place.topology.microbatches, validations_protocol)


def told_numbers(fleet: FleetPart, measured: list[Measured], rings: Sequence[Tensor]) -> dict[str, float]:
    """What was measured and opened as these, in the shapes of the shares, told to everybody in the party. All workers
    call it together."""
    return fleet.told_all(numbers(measured, rings) if fleet.opener else None)


def _measured(fleet: FleetPart, part: str, first: int, measure: Measure) -> list[Measured]:
    outputs, rt = _outputs(fleet, part, first), fleet.runtimes.main
    if not fleet.opener or outputs is None:
        return []
    targets = fleet.tensors[f"{part}_y"].reshape(-1, fleet.model.classes)
    return rt.run(measure(rt, fleet.job, fleet.model, outputs, targets))


def count_correct(fleet: FleetPart, open_all: Open) -> int:
    """Open how many test rows are classified correctly: each replica counts its slice, one opens the sum."""
    main = fleet.runtimes.main

    def hits_protocol(on: Pass, x: Share, rows: Tensor) -> MpcProtocol[Share]:
        logits = yield from forward_protocol(on, fleet.stage.parts, x)
        targets = fleet.my_lines("test_y", rows, fleet.model.classes)
        return (yield from losses.hits_protocol(on.rt, logits, targets))

    hits = [public(main, torch.zeros(1), f=fleet.job.frac_bits), *_through(fleet, "test", 0, hits_protocol)]
    total = fleet.summed(hits) if fleet.pipe.last else None
    found = open_all([total] if fleet.opener and total is not None else [])
    return int(fleet.told(int(found[0].item()) >> fleet.job.frac_bits if found else None))


def _outputs(fleet: FleetPart, part: str, first: int) -> Share | None:
    """Outputs for all rows of ``part``, ``[rows * positions, classes]``, at the workers of the last stage."""
    groups, model = fleet.groups, fleet.model

    def outputs_protocol(on: Pass, x: Share, rows: Tensor) -> MpcProtocol[Share]:
        mine = yield from forward_protocol(on, fleet.stage.parts, x)
        return gather_rows(on.tp, mine, on.rows)

    found = _through(fleet, part, first, outputs_protocol)
    if not fleet.pipe.last:
        return None
    width = model.positions * model.classes
    rows = gather_rows(groups.dp, cat(found, 0).reshape(-1, width), int(fleet.tensors[f"{part}_x"].shape[0]))
    return rows.reshape(-1, model.classes)


def _through(fleet: FleetPart, part: str, first: int, at_end: AtEnd) -> list[Share]:
    """This replica's rows of ``part`` through its stages, some at a time; what the last stage found of each lot.

    ``first``: the number of the first lot's stream among those of microbatches.
    """
    groups, pipe = fleet.groups, fleet.pipe
    groups.start_dp()
    rows = int(fleet.tensors[f"{part}_x"].shape[0])
    everyone = torch.arange(rows, device=fleet.runtimes.main.device)
    mine = everyone[bounds(rows, groups.place.topology.replicas, groups.place.coord.replica)]
    found: list[Share] = []
    count = -(-len(mine) // _EVAL_ROWS)
    pipe.finish(first)
    fleet.lend(first)
    for m in range(count):  # lots of one size, up to one: a tensor rank without a row could not take part
        some, at = mine[bounds(len(mine), count, m)], first + m
        rt = fleet.runtimes.of(FORWARD, at)
        on = fleet.passing(rt, len(some), _no_gradient)
        x = fleet.tensors[f"{part}_x"].index(some) if pipe.first else fleet.receive(FORWARD, at)
        if pipe.last:
            found.append(rt.run(at_end(on, x, some)))
        else:
            fleet.send(FORWARD, at, rt.run(forward_protocol(on, fleet.stage.parts, x)))
    pipe.finish()
    return found


def _no_gradient(part: StagePart, weight: int, term: Tensor) -> None:
    """Nothing is learned from rows that are held out."""
