"""Which rows of which step's batch a pass through a model is of. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The rows ``first`` to ``first + count`` of the batch that all replicas together take in ``step``, of a job with
    this ``seed``. What a layer draws for them depends on nothing else: no way of splitting the work changes it."""

    seed: int
    step: int
    first: int
    count: int
