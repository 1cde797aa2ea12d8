"""What is revealed of the rows that are held out for validation, while a training goes on: sums over all of them.

``val_loss`` is the mean of the objective, the others are the metrics of ``answer_metrics`` under the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvcc_engine.contract.job.early_stop import WATCHED
from uvcc_engine.contract.job.private_job import VALIDATIONS, PrivateJob
from uvcc_engine.model import losses
from uvcc_engine.model.learning.answer_metrics import mean_of, measure_protocol, perplexity
from uvcc_engine.model.learning.measured import Measured
from uvcc_engine.model.learning.objectives import OF_ONE_OUTPUT
from uvcc_engine.model.learning.overflows import Bounded
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products.arithmetic import sub

PREFIX: Final = "val_"


def validations_protocol(
    rt: Runtime, job: PrivateJob, model: ModelSpec, outputs: Share, targets: Share, seen: Sequence[Share | Bounded] = ()
) -> MpcProtocol[list[Measured]]:
    """The numbers of validation that the job lists, by name, still shared. Reveals nothing. ``outputs``, ``targets``:
    [rows, classes]; ``seen``: see ``measure_protocol``."""
    found: list[Measured] = []
    wanted = [name.removeprefix(PREFIX) for name in VALIDATIONS if name in job.reveal and name != WATCHED]
    if WATCHED in job.reveal:
        told = "perplexity" in wanted  # it says nothing that the loss does not
        wanted = [name for name in wanted if name != "perplexity"]

        def read(loss: float) -> dict[str, float]:
            return {WATCHED: loss} | ({PREFIX + "perplexity": perplexity(loss)} if told else {})

        found.append(mean_of((yield from _total_loss_protocol(rt, job, outputs, targets)), outputs.shape[0], read))
    measured: list[Measured] = yield from measure_protocol(rt, job, model, outputs, targets, wanted, seen)
    return found + [one.named(lambda values: {PREFIX + k: v for k, v in values.items()}) for one in measured]


def _total_loss_protocol(rt: Runtime, job: PrivateJob, outputs: Share, targets: Share) -> MpcProtocol[Share]:
    """The sum of the job's objective over the rows, one element. Both are [rows, classes]."""
    if job.objective == "mse":
        return (yield from losses.total_square_protocol(rt, sub(outputs, targets)))
    if job.objective in OF_ONE_OUTPUT:
        _, total = yield from OF_ONE_OUTPUT[job.objective](rt, outputs, targets, loss=True)
        assert total is not None
        return total
    powers = yield from losses.powers_protocol(rt, outputs)
    return (yield from losses.total_loss_protocol(rt, powers, targets))
