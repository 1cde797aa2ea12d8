"""What sealed inputs are for: one job, so many steps of it, with these owners in this order, under one proposal.

An owner's box says so in its header, which is authenticated, and a pod opens it for nothing else: not for another batch
or learning rate, not for another list of what is revealed, not behind another first owner, to whom results would go.
Under a proposal it is also for no other text than the one that the three domains approved, and for one attempt of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.transcript.terms.policy import Policy

_APART: Final = ("steps", "start")
_AGAIN: Final = "the data owner shares the inputs for this job"
_OTHERS: Final = "whoever wrote this policy wanted the inputs for something else than the owner approved"


@dataclass(frozen=True, slots=True)
class ProposedUse:
    """The proposal (its id) and the attempt of it that inputs are for; ``reveal``: (value, to) pairs, as it lists."""

    proposal: str
    attempt: int
    reveal: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, policy: Policy) -> ProposedUse | None:
        """What a policy uses its inputs for; None if it names no proposal."""
        return cls(policy.proposal, policy.attempt, policy.reveal) if policy.proposal else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """``job``: SHA-256 of the job apart from its steps and where it starts; ``steps``: of it, at most; ``owners``:
    X25519 keys (hex), the one first to whom results are sealed. The others: see ``ProposedUse``; empty without one."""

    job: str
    steps: int
    owners: tuple[str, ...]
    proposal: str = ""
    attempt: int = 0
    reveal: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, job: PrivateJob, owners: Sequence[str], use: ProposedUse | None = None) -> Purpose:
        """What inputs of this job are shared for."""
        told = {key: value for key, value in job.to_json().items() if key not in _APART}
        digest = hashlib.sha256(b"UVCC_PURPOSE_V1" + sorted_json(told).encode()).hexdigest()
        under = {} if use is None else {"proposal": use.proposal, "attempt": use.attempt, "reveal": use.reveal}
        return cls(job=digest, steps=job.steps, owners=tuple(owners), **under)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        under = {"proposal": self.proposal, "attempt": self.attempt, "reveal": [list(pair) for pair in self.reveal]}
        told: dict[str, Any] = {"job": self.job, "steps": self.steps, "owners": list(self.owners)}
        return told | (under if self.proposal else {})

    def check(self, stated: object) -> None:
        """Hold what a box says that it is for against this use. Raises VerificationError naming the difference."""
        if not isinstance(stated, Mapping):
            raise VerificationError("inputs", "the sealed input names no job that it is for", _AGAIN)
        try:
            given = strict.read(Purpose, stated, "what the sealed input is for")
        except ConfigError as e:
            raise VerificationError("inputs", e.what, _AGAIN) from e
        if given.proposal != self.proposal:
            sealed, here = (f"the proposal {p[:16]}" if p else "no proposal" for p in (given.proposal, self.proposal))
            raise VerificationError("inputs", f"it was sealed for {sealed}, the policy is of {here}", _OTHERS)
        if given.attempt != self.attempt:
            what = f"it was sealed for attempt {given.attempt}, the policy is of attempt {self.attempt}"
            raise VerificationError("inputs", what, _AGAIN)
        if sorted(given.reveal) != sorted(self.reveal):
            more = ", ".join(f"{value} to {to}" for value, to in sorted(set(self.reveal) ^ set(given.reveal)))
            raise VerificationError("inputs", f"it was sealed for another list of what is revealed: {more}", _OTHERS)
        if given.job != self.job:
            raise VerificationError(
                "inputs", f"it was sealed for another job: {given.job[:16]}, this one is {self.job[:16]}", _AGAIN
            )
        if self.steps > given.steps:
            raise VerificationError("inputs", f"it was sealed for {given.steps} steps, not for {self.steps}", _AGAIN)
        if given.owners != self.owners:
            wanted, here = (", ".join(key[:12] for key in keys) for keys in (given.owners, self.owners))
            added = ", ".join(key[:12] for key in self.owners if key not in given.owners)
            what = f"it was sealed for owners {wanted} in this order, not {here}"
            what += f"; {added} put itself among them" if added else ""
            raise VerificationError("inputs", what, _AGAIN)
