"""What sealed inputs are for: one job, so many steps of it, with these owners in this order.

An owner's box says so in its header, which is authenticated, and a pod opens it for nothing else: not for another batch
or learning rate, not for another list of what is revealed, not behind another first owner, to whom results would go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract import strict
from uvcc_engine.contract.canonical import sorted_json
from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.private_job import PrivateJob

_APART: Final = ("steps", "start")
_AGAIN: Final = "the data owner shares the inputs for this job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """``job``: SHA-256 of the job apart from its steps and where it starts; ``steps``: of it, at most; ``owners``:
    X25519 keys (hex), the one first to whom results are sealed."""

    job: str
    steps: int
    owners: tuple[str, ...]

    @classmethod
    def of(cls, job: PrivateJob, owners: Sequence[str]) -> Purpose:
        """What inputs of this job are shared for."""
        told = {key: value for key, value in job.to_json().items() if key not in _APART}
        digest = hashlib.sha256(b"UVCC_PURPOSE_V1" + sorted_json(told).encode()).hexdigest()
        return cls(job=digest, steps=job.steps, owners=tuple(owners))

    def to_json(self) -> dict[str, Any]:
        return {"job": self.job, "steps": self.steps, "owners": list(self.owners)}

    def check(self, stated: object) -> None:
        """Hold what a box says that it is for against this use. Raises VerificationError naming the difference."""
        if not isinstance(stated, Mapping):
            raise VerificationError("inputs", "the sealed input names no job that it is for", _AGAIN)
        try:
            given = strict.read(Purpose, stated, "what the sealed input is for")
        except ConfigError as e:
            raise VerificationError("inputs", e.what, _AGAIN) from e
        if given.job != self.job:
            raise VerificationError(
                "inputs", f"it was sealed for another job: {given.job[:16]}, this one is {self.job[:16]}", _AGAIN
            )
        if self.steps > given.steps:
            raise VerificationError("inputs", f"it was sealed for {given.steps} steps, not for {self.steps}", _AGAIN)
        if given.owners != self.owners:
            wanted, here = (", ".join(key[:12] for key in keys) for keys in (given.owners, self.owners))
            raise VerificationError("inputs", f"it was sealed for owners {wanted} in this order, not {here}", _AGAIN)
