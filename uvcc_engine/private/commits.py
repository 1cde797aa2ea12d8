"""The COMMIT record: three parties' signatures under one checkpoint, written once it is on disk at every worker.

A worker's votes say which checkpoint is the newest on its disk; the least over all votes of the fleet is the newest
that everybody has. From then on it can be resumed whatever is lost of one party, and the lead worker of each pod puts
the record beside the checkpoint: what the pod and its two peers each hold, as signed by their identities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract import checkpoint as ck
from uvcc_engine.contract import files
from uvcc_engine.contract.errors import ProtocolError, UnreadableError, VerificationError
from uvcc_engine.parallel.topology import PARTIES, Coord
from uvcc_engine.transcript.canonical import canonical
from uvcc_engine.transcript.identity import Identity, verify_signature
from uvcc_engine.transcript.policy import Policy

RECORD: Final = "COMMIT.json"
NAMESPACE: Final = "uvcc-checkpoint"


@dataclass(frozen=True, slots=True)
class Statement:
    """What one worker holds on its disk: the checkpoint of ``step`` whose manifest has this SHA-256 (hex)."""

    coord: str
    sid_job: str
    step: int
    manifest: str

    @property
    def payload(self) -> bytes:
        """The bytes that are signed."""
        return canonical({"coord": self.coord, "manifest": self.manifest, "sid_job": self.sid_job, "step": self.step})


def signed_statement(identity: Identity, policy: Policy, coord: Coord, manifest: ck.Manifest) -> str:
    """This worker's statement about a checkpoint of its own, signed, as one line of JSON."""
    said = Statement(str(coord), policy.sid_job.hex(), manifest.step, manifest.sha256)
    return json.dumps({"manifest": said.manifest, "signature": identity.sign(NAMESPACE, said.payload)})


def checked_statement(text: str, policy: Policy, coord: Coord, step: int) -> dict[str, str]:
    """A worker's statement about ``step``. Raises ProtocolError naming its party if it is not signed by its pod."""
    party = coord.party
    try:
        found = json.loads(text)
        manifest, signature = str(found["manifest"]), str(found["signature"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"P{party} sent a malformed statement about step {step}", party=party) from error
    said = Statement(str(coord), policy.sid_job.hex(), step, manifest)
    if not verify_signature(policy.public(party, coord.replica), NAMESPACE, said.payload, signature):
        raise ProtocolError(f"{coord} did not sign what it says about its checkpoint of step {step}", party=party)
    return {"coord": str(coord), "manifest": manifest, "signature": signature}


def write_record(root: Path, policy: Policy, step: int, statements: Mapping[int, Mapping[str, str]]) -> None:
    """Put the record beside the checkpoint of ``step``. Raises UvccError if the disk refuses."""
    record = {"sid_job": policy.sid_job.hex(), "step": step, "parties": [dict(statements[p]) for p in range(PARTIES)]}
    files.write_json(ck.step_dir(root, step) / RECORD, record, mode=0o600)


def read_record(folder: Path, policy: Policy) -> dict[str, Any]:
    """The record of a checkpoint, with its three signatures checked.

    Raises UnreadableError if there is none, VerificationError if it does not hold for this checkpoint.
    """
    manifest, found = ck.read_manifest(folder), files.read_json(folder / RECORD)
    try:
        parties, step = list(found["parties"]), int(found["step"])
        coords = [Coord.parse(str(p["coord"])) for p in parties]
        held = [checked_statement(json.dumps(p), policy, c, step) for p, c in zip(parties, coords, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{folder / RECORD} is damaged: {error}", "use an earlier checkpoint") from error
    except ProtocolError as error:
        raise VerificationError("commit", f"{folder}: {error.what}", "use an earlier checkpoint") from error
    if [c.party for c in coords] != list(range(PARTIES)) or step != manifest.step:
        raise VerificationError("commit", f"{folder} has the record of something else", "use an earlier checkpoint")
    if manifest.sha256 not in {h["manifest"] for h in held}:
        raise VerificationError("commit", f"{folder} is not the checkpoint that was committed", "use an earlier one")
    return found
