"""A party's secrets of one session, disclosed to the data owner where the policy says so, for a replay of the run.

They are derived keys of this session and attempt alone: no static key can be computed from them, and they open no other
session. The owner learns every share of the run from them, which is why the policy must list ``seeds`` and all three
parties sign it. They are sealed at the start, so a run that fails can be replayed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.mpc.foundation.prg import PairKeys
from uvcc_engine.sealing.box import box_key, open_with, seal, unseal
from uvcc_engine.sealing.inputs import PartyInputs, read_inputs
from uvcc_engine.sealing.joint import MAGIC as SET_MAGIC
from uvcc_engine.transcript.exchange.evidence import blinding_keys
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity
from uvcc_engine.transcript.terms.policy import Policy

SEEDS: Final = "seeds"
_FORMAT: Final = "uvcc-seeds-1"


@dataclass(frozen=True, slots=True)
class Seeds:
    """What one worker disclosed. ``blinds``: party -> key that blinds its leaves with that party (its own included)."""

    party: int
    attempt: int
    prg: PairKeys
    blinds: Mapping[int, bytes]
    inputs_key: bytes

    def inputs(self, sealed: bytes, policy: Policy) -> PartyInputs:
        """The party's inputs from its sealed file. Raises VerificationError if they are not the policy's."""
        plain, about = open_with(sealed, self.inputs_key)
        return read_inputs(plain, about, party=self.party, commitments=policy.commitments)


def seeds_name(coord: object) -> str:
    """Name of a worker's disclosed seeds inside its run directory."""
    return f"seeds_{coord}.box"


def seal_seeds(
    identity: Identity, policy: Policy, coord: Coord, *, prg: PairKeys, attempt: int, sealed_inputs: bytes
) -> bytes:
    """This worker's seeds, sealed to the owner. Raises ConfigError where the inputs are of several owners."""
    if sealed_inputs.startswith(SET_MAGIC):
        raise ConfigError(
            "the seeds of a run on several owners' data would show each owner's rows to the first",
            "leave seeds out of job.reveal",
        )
    keys = {"prev": prg.prev, "next": prg.next, "own": prg.own}
    blinds = blinding_keys(identity, policy, coord)
    plain = canonical(
        {
            "attempt": attempt,
            "blinds": {str(p): k.hex() for p, k in blinds.items()},
            "inputs_key": box_key(sealed_inputs, recipient=identity, sender=policy.owner).hex(),
            "prg": {name: key.hex() for name, key in keys.items()},
        }
    )
    return seal(plain, sender=identity, to=policy.owner, about=_about(policy, coord))


def _about(policy: Policy, coord: Coord) -> dict[str, str]:
    return {"format": _FORMAT, "coord": str(coord), "sid_job": policy.sid_job.hex()}


def open_seeds(box: bytes, *, owner: Identity, sender: PublicIdentity, policy: Policy, coord: Coord) -> Seeds:
    """Open what :func:`seal_seeds` made. Raises UnreadableError; VerificationError: another job or worker."""
    plain, about = unseal(box, recipient=owner, sender=sender.x25519)
    if about != _about(policy, coord):
        raise VerificationError("seeds", f"the box of {coord} says {about}", "give the boxes of one run")
    try:
        found = json_of(plain)
        prg = {name: bytes.fromhex(found["prg"][name]) for name in ("prev", "next", "own")}
        blinds = {p: bytes.fromhex(found["blinds"][str(p)]) for p in range(PARTIES)}
        key, attempt = bytes.fromhex(found["inputs_key"]), found["attempt"]
        if len(key) != 32 or type(attempt) is not int or not 0 <= attempt < 1 << 31:
            raise ValueError("the inputs' key is not of 32 bytes, or there is no attempt")
        return Seeds(coord.party, attempt, PairKeys(**prg), blinds, key)
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise UnreadableError(
            f"the seeds of {coord} cannot be read: {error}", "its party must seal them again"
        ) from error


def check_pairs(seeds: Mapping[int, Seeds]) -> None:
    """Both ends of every pair must disclose the same. Raises VerificationError naming the pair and the attempt."""
    for party, mine in seeds.items():
        peer = (party + 1) % PARTIES
        theirs = seeds[peer]
        pairs = ((mine.prg.next, theirs.prg.prev), (mine.blinds[peer], theirs.blinds[party]))
        if any(one != two for one, two in pairs):
            raise VerificationError("seeds", f"P{party} and P{peer} disclose different secrets of their pair")
        if mine.attempt != theirs.attempt:
            raise VerificationError("seeds", f"P{party} is at attempt {mine.attempt}, P{peer} at {theirs.attempt}")
