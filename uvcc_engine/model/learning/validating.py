"""What is revealed of the rows that are held out for validation, while a training goes on: sums over all of them.

``val_loss`` is the mean of the objective, the others are the metrics of ``answer_metrics`` under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from uvcc_engine.contract.job.early_stop import WATCHED
from uvcc_engine.contract.job.private_job import VALIDATIONS, PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.learning.answer_metrics import evaluate_protocol, perplexity
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import sub

PREFIX: Final = "val_"


def validate_protocol(
    rt: Runtime, job: PrivateJob, model: ModelSpec, outputs: Share, targets: Share, seen: Sequence[Share] = ()
) -> MpcProtocol[dict[str, float]]:
    """Open the numbers of validation that the job lists, by name. ``outputs``, ``targets``: [rows, classes]; ``seen``:
    see ``evaluate_protocol``."""
    found: dict[str, float] = {}
    if WATCHED in job.reveal:
        found[WATCHED] = yield from mean_loss_protocol(rt, job, outputs, targets)
    wanted = [name.removeprefix(PREFIX) for name in VALIDATIONS if name in job.reveal and name != WATCHED]
    told = WATCHED in found and "perplexity" in wanted
    measured = yield from evaluate_protocol(
        rt, job, model, outputs, targets, [name for name in wanted if not told or name != "perplexity"], seen
    )
    if told and not math.isnan(value := perplexity(found[WATCHED])):  # it says nothing that the loss does not
        measured["perplexity"] = value
    return found | {PREFIX + name: value for name, value in measured.items()}


def mean_loss_protocol(rt: Runtime, job: PrivateJob, outputs: Share, targets: Share) -> MpcProtocol[float]:
    """Open the mean of the job's objective over the rows; nothing else is revealed. Both are [rows, classes]."""
    if job.objective == "mse":
        return (yield from losses.mean_square_protocol(rt, sub(outputs, targets)))
    if job.objective in OF_ONE_OUTPUT:
        _, total = yield from OF_ONE_OUTPUT[job.objective](rt, outputs, targets, loss=True)
        assert total is not None
        opened = yield from open_ring_protocol(rt, total)
        return float(opened.item()) / 2.0**total.f / outputs.shape[0]
    powers = yield from losses.powers_protocol(rt, outputs)
    return (yield from losses.mean_loss_protocol(rt, powers, targets))
