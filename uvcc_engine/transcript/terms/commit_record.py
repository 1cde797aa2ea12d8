"""The COMMIT record of a checkpoint as anybody can check it: what three pods signed that they hold on their disks.

A statement names both components that its pod holds by blinded digests (the blinding is known to a component's two
holders), so each component is named twice, and a copy that differs is found out here. Whoever is handed a component
later can check it, however the one who handed it over may lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.transcript.signing.identity import verify_signature
from uvcc_engine.transcript.terms.policy import Policy

RECORD: Final = "COMMIT.json"
RECORDS: Final = "commits.jsonl"
"""Every record of a run, one a line, in its run directory: what is left of them once checkpoints are retired."""
NAMESPACE: Final = "uvcc-checkpoint"


@dataclass(frozen=True, slots=True)
class Statement:
    """What one pod holds on its disk: the checkpoint of ``step`` whose manifest has this SHA-256 (hex).

    ``components``: digests of the components that it holds, first its own number's, then the next one's.
    """

    coord: str
    sid_job: str
    step: int
    manifest: str
    components: tuple[str, str]

    @property
    def payload(self) -> bytes:
        """The bytes that are signed."""
        return canonical({**asdict(self), "components": list(self.components)})


Said = dict[str, Any]
"""A checked statement as it stands in the record: coord, manifest, components, signature."""


def checked_statement(text: str, policy: Policy, coord: Coord, step: int) -> Said:
    """A worker's statement about ``step``. Raises ProtocolError naming its party if it is not signed by its pod."""
    party = coord.party
    try:
        found = json_of(text)
        manifest, signature = str(found["manifest"]), str(found["signature"])
        lo, hi = (str(digest) for digest in found["components"])
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"P{party} sent a malformed statement about step {step}", party=party) from error
    said = Statement(str(coord), policy.sid_job.hex(), step, manifest, (lo, hi))
    if not verify_signature(policy.public(party, coord.replica), NAMESPACE, said.payload, signature):
        raise ProtocolError(f"{coord} did not sign what it says about its checkpoint of step {step}", party=party)
    return {"coord": str(coord), "manifest": manifest, "components": [lo, hi], "signature": signature}


def check_copies(statements: Mapping[int, Said]) -> None:
    """Both holders of each component must have the same. Raises ProtocolError naming the pair that differs."""
    for party in range(PARTIES):
        before = (party + 2) % PARTIES
        if statements[party]["components"][0] != statements[before]["components"][1]:
            raise ProtocolError(
                f"P{before} and P{party} hold different copies of component {party} of the checkpoint",
                "one of them computed something else; compare their transcripts",
                party=party,
            )


def check_record(record: Mapping[str, Any], policy: Policy) -> dict[int, Said]:
    """The three statements of a record by party, checked under the policy that they were made under.

    Raises UnreadableError if it is no record, VerificationError if it does not hold.
    """
    try:
        parties, step = list(record["parties"]), int(record["step"])
        coords = [Coord.parse(str(p["coord"])) for p in parties]
        held = [checked_statement(json.dumps(p), policy, c, step) for p, c in zip(parties, coords, strict=True)]
        by_party = dict(enumerate(held))
        same_pods = [c.party for c in coords] == list(range(PARTIES)) and len({c.replica for c in coords}) == 1
        if not same_pods or record["sid_job"] != policy.sid_job.hex():
            raise UnreadableError(f"{RECORD} is of another job or of other workers", "use an earlier checkpoint")
        check_copies(by_party)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, ConfigError) as error:
        raise UnreadableError(f"{RECORD} is damaged: {error}", "use an earlier checkpoint") from error
    except ProtocolError as error:
        raise VerificationError("commit", error.what, "use an earlier checkpoint") from error
    return by_party
