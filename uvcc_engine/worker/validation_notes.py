"""What a session keeps of the numbers of validation: when they end the training, what a checkpoint notes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from uvcc_engine.contract.job.private_job import UNDEFINED, VALIDATIONS, PrivateJob
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.model.learning.validating import PREFIX

_NOTED: Final = "validations"


def ended_early(learner: object) -> bool:
    """Whether what was revealed of validation ends the training here."""
    return isinstance(learner, PrivateTrainer) and learner.validations.ended


def validations_so_far(learner: object) -> dict[str, Any]:
    """What a checkpoint notes of them: (step, loss) pairs, which all parties know; nothing where there are none."""
    if not isinstance(learner, PrivateTrainer) or not learner.validations.entries:
        return {}
    return {_NOTED: [list(entry) for entry in learner.validations.entries]}


def remember_validations(learner: object, noted: Mapping[str, Any]) -> None:
    """Go on from what a checkpoint noted."""
    if isinstance(learner, PrivateTrainer):
        learner.validations.restore(noted.get(_NOTED, ()))


def validations_of(job: PrivateJob) -> list[str]:
    """The numbers of validation that the job reveals."""
    return [name for name in VALIDATIONS if name in job.reveal]


def tell_undefined(writer: RunWriter, step: int, listed: Collection[str], values: Mapping[str, float]) -> None:
    """Say of the listed metrics that came out as no number why they did."""
    for name in listed:
        why = UNDEFINED.get(name.removeprefix(PREFIX))
        if why is not None and name not in values:
            writer.event("metric_not_defined", metric=name, why=why, step=step)
