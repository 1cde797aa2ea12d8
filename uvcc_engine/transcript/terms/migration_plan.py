"""From a policy and a checkpoint of its job to the migration that the next policy names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.migration import Migration, record_hash
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty


def migration_after(old: Policy, record: Mapping[str, Any], parties: Sequence[PolicyParty]) -> Migration:
    """Where the policy after ``old`` with these ``parties`` starts, from a checkpoint's COMMIT record.

    The record's signatures are checked where it is used, on the pods. Raises ConfigError if it is of another job,
    or if a second party of the chain of migrations would be restored.
    """
    before, step = Migration.of_job(old.job), record.get("step")
    if record.get("sid_job") != old.sid_job.hex() or not isinstance(step, int) or not 0 < step < old.steps:
        raise ConfigError("the COMMIT record is not of a checkpoint of this policy", "fetch that of the old run")
    known = before.restored if before is not None else ()
    return Migration(
        of=old.hash.hex(),
        step=step,
        commit=record_hash(record),
        root=before.root if before is not None else old.hash.hex(),
        restored=tuple(sorted({*known, *unvouched(old, parties)})),
    )


def unvouched(old: Policy, parties: Sequence[PolicyParty]) -> set[int]:
    """Parties whose first pod, which signs the new policy for all of them, is not of the old policy's pods."""
    return {p.party for p in parties if p.public not in (old.parties[p.party].public, *old.parties[p.party].pods)}
