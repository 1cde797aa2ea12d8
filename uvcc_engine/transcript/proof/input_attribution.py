"""Whose inputs a run computed on: the data owners' signed statements, held against its policy and its rosters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, VerificationError
from uvcc_engine.transcript.signed import owner_shares
from uvcc_engine.transcript.signed.owner_shares import OwnerPart, OwnerShare
from uvcc_engine.transcript.signed.roster import Roster
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.transcript.terms.proposal import Proposal

OWNERS_FILE: Final = "owner-shares.json"
"""In a run's artifacts: what each data owner signed that it sealed."""


def check(
    bodies: Iterable[str], proposal: Proposal, rosters: Mapping[int, Roster], policy: Policy
) -> dict[int, OwnerShare]:
    """The statements by owner, once they are found to be of this policy's inputs: all owners of the proposal, in their
    order, sealed for its attempt to the rosters' pods, and nothing of anybody else.

    Raises VerificationError naming the owner, or in what the policy's inputs are not theirs.
    """
    if policy.proposal != proposal.id:
        raise VerificationError("owners", f"the policy's inputs are of {policy.proposal[:16] or 'no proposal'}")
    try:
        found = owner_shares.gathered(proposal, policy.attempt, rosters, bodies)
    except (ConfigError, ProtocolError) as e:
        raise VerificationError("owners", e.what, e.hint) from e
    if missing := [str(n) for n in range(len(proposal.owners)) if n not in found]:
        raise VerificationError("owners", f"owner {', '.join(missing)} signed no statement of shares for this attempt")
    parts = [OwnerPart(share.owner.x25519, share.commitments) for _, share in sorted(found.items())]
    wanted = parts[0].commitments if len(parts) == 1 else owner_shares.set_commitments(parts)
    if policy.owner != parts[0].owner:
        what = f"results are sealed to {policy.owner[:12]}, the proposal's first owner is {parts[0].owner[:12]}"
        raise VerificationError("owners", what, f"{policy.owner[:12]} put itself first")
    if policy.commitments != wanted:
        raise VerificationError("owners", "the policy commits to other inputs than the owners signed", "ask each owner")
    return found
