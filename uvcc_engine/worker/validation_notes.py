"""What a session keeps of the numbers of validation: when they end the training, what a checkpoint notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.sharding.sharded_training import ParallelTrainer

_NOTED: Final = "validations"
VALIDATED: Final = (PrivateTrainer, ParallelTrainer)


def ended_early(learner: object) -> bool:
    """Whether what was revealed of validation ends the training here."""
    return isinstance(learner, VALIDATED) and learner.validations.ended


def validations_so_far(learner: object) -> dict[str, Any]:
    """What a checkpoint notes of them: (step, loss) pairs, which all parties know; nothing where there are none."""
    if not isinstance(learner, VALIDATED) or not learner.validations.entries:
        return {}
    return {_NOTED: [list(entry) for entry in learner.validations.entries]}


def remember_validations(learner: object, noted: Mapping[str, Any]) -> None:
    """Go on from what a checkpoint noted."""
    if isinstance(learner, VALIDATED):
        learner.validations.restore(noted.get(_NOTED, ()))
