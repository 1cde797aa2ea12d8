"""Back to the last good checkpoint when something is not a number: ``train.nonfinite: rollback``.

What happened once, such as a fault of memory, does not come again: the steps are done once more from the checkpoint's
bits, on the same data, and the run ends in the bits of one that nothing befell. What comes again lies in the data or
the settings, and ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.checkpoints.checkpoint import CheckpointManifest
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.train import lm_state
from uvcc_engine.train.distributed import RankGroup

MOST_TIMES: Final = 3  # without coming further than before


class NotFiniteError(UvccError):
    """Loss, gradient or a weight stopped being a number; the last good checkpoint is untouched."""


@dataclass(slots=True)
class Rollbacks:
    """How often this run went back, all ranks alike; ``allowed``: whether it may at all."""

    allowed: bool
    _furthest: int = -1
    _times: int = 0

    def target(self, error: NotFiniteError, step: int, root: Path, group: RankGroup, run: str) -> CheckpointManifest:
        """The checkpoint to go back to after ``error`` in ``step``; every rank asks.

        Raises the error itself where that is not wanted, was done often enough, or nothing was saved yet;
        VerificationError if the checkpoint was altered.
        """
        if not self.allowed:
            raise error
        self._times = 1 if step > self._furthest else self._times + 1
        self._furthest = max(self._furthest, step)
        if self._times > MOST_TIMES:
            raise NotFiniteError(f"{error.what}, also after going back {MOST_TIMES} times", error.hint) from error
        found = lm_state.common(group, root, run)
        if found is None:
            hint = f"{error.hint}; a checkpoint before that (train.save_every) would have been gone back to"
            raise NotFiniteError(error.what, hint) from error
        return found

    @property
    def times(self) -> int:
        """How often it went back without coming further."""
        return self._times
