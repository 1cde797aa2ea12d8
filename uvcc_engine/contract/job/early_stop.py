"""When a training ends before its last step: a public rule over numbers that were revealed. Standard library only.

Parties and verifiers apply the same rule to the same signed numbers, so that nobody decides how long a run was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

WATCHED: Final = "val_loss"
"""The revealed number that the rule follows; less is better."""


@dataclass(slots=True)
class ValidationLog:
    """The revealed validation losses of a training so far, and what follows from them.

    ``patience``: the training has ended when so many in a row were not below the least before them; 0 for never.
    """

    patience: int
    entries: list[tuple[int, float]] = field(default_factory=list)
    best: int = 0
    waited: int = 0
    least: float = math.inf

    def add(self, step: int, loss: float) -> bool:
        """Note the loss after ``step`` steps; returns whether it is the least so far. One that is no number is not."""
        self.entries.append((step, loss))
        if loss < self.least:
            self.least, self.best, self.waited = loss, step, 0
            return True
        self.waited += 1
        return False

    @property
    def ended(self) -> bool:
        """Whether the training ends here."""
        return 0 < self.patience <= self.waited

    def restore(self, entries: Iterable[Sequence[float]]) -> None:
        """Begin again from the (step, loss) pairs that a checkpoint holds."""
        self.entries, self.best, self.waited, self.least = [], 0, 0, math.inf
        for step, loss in entries:
            self.add(int(step), float(loss))


@dataclass(frozen=True, slots=True)
class Course:
    """How a training went by what it revealed: ``steps`` were done, and ``best`` of them had the least validation loss
    ``least``; 0 and infinity where none was revealed."""

    steps: int
    best: int
    least: float


def course(job: Mapping[str, Any], first: int, values: Iterable[Mapping[str, float]]) -> Course:
    """The course of a job whose epochs, from step ``first`` on, revealed these values."""
    patience = job.get("patience", 0)
    log = ValidationLog(patience if type(patience) is int else 0)
    steps = int(job["steps"])
    for epoch, shown in enumerate(values):
        if WATCHED in shown:
            log.add(first + epoch + 1, shown[WATCHED])
            if log.ended:
                steps = first + epoch + 1
                break
    return Course(steps, log.best, log.least)


def steps_done(job: Mapping[str, Any], first: int, values: Iterable[Mapping[str, float]]) -> int:
    """After how many steps a job ended whose epochs, from step ``first`` on, revealed these values."""
    return course(job, first, values).steps
