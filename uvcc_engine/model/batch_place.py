"""Which rows of which step's batch a pass through a model is of. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The rows ``first`` to ``first + count`` of the batch that all replicas together take in ``step``, of a job with
    this ``seed``. What a layer draws for them depends on nothing else: no way of splitting the work changes it.

    ``whole``: rows of that batch, 0 where these are all of it.
    """

    seed: int
    step: int
    first: int
    count: int
    whole: int = 0

    @property
    def share(self) -> float:
        """Which part of the batch these rows are."""
        return self.count / self.whole if self.whole else 1.0
