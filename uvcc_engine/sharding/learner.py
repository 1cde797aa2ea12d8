"""What trains one worker's part of a model, whatever it is: the plain trainer, or one of several workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from uvcc_engine.model.learning.state_digests import Half
from uvcc_engine.model.learning.training import StepResult
from uvcc_engine.sealing.components import Ring


class Learner(Protocol):
    """What a session drives: the plain trainer, or one worker's part of a parallel one."""

    def step(self, step: int) -> StepResult:
        """Train on the batch of step ``step``."""

    def evaluate(self) -> dict[str, float]:
        """Open the metrics that the job lists, over all test rows, by name."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this worker: both components, each in the shape of its weight, by name."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what :meth:`state` gave, in the same shapes."""

    def weight_halves(self) -> tuple[dict[str, Ring], dict[str, Ring]]:
        """Both components of this worker's weights by name."""

    def component_digest(self, half: Half, blind: bytes) -> str:
        """Blinded digest of one component of this worker's state."""
