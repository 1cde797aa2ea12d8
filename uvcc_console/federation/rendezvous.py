"""Where a coordinator and the domains meet: records at a relay, and what this domain keeps of them.

The relay sees signed texts and can withhold them, but not change them; one that it withholds all do not approve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import paths
from uvcc_console.federation import domain_key
from uvcc_console.halt.relay_path import RelayMailbox
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.peer_protocol.record_names import APPROVALS, BARRIERS, PROPOSALS, REPORTS, SIGNATURES
from uvcc_engine.contract.peer_protocol.relay_words import RECORDS_AN_ANSWER
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signed import barriers, reports
from uvcc_engine.transcript.signed.approvals import REFUSE
from uvcc_engine.transcript.signed.barriers import Barrier
from uvcc_engine.transcript.signed.proposals import Equivocation, SignedProposal, Standing, standings
from uvcc_engine.transcript.signed.reports import DomainReport

KEPT: Final = "proposals"
EVIDENCE: Final = "equivocations"
_MOST: Final = 64
"""Answers of a relay that are read: each has ``RECORDS_AN_ANSWER`` records at most, and fewer only at the end."""


@dataclass(slots=True)
class Rendezvous:
    """A relay, and the credential that it lets this domain in with."""

    url: str
    token: str
    ca_file: str = ""
    _box: RelayMailbox = field(init=False)

    def __post_init__(self) -> None:
        self._box = RelayMailbox(self.url, "", "", (self.token,), self.ca_file)

    def leave(self, name: str, body: str) -> None:
        """Put a record there. Raises UvccError."""
        self._box.exchange({"name": name, "body": body}, "\n")  # no record has such a name: nothing is read

    def look(self) -> tuple[dict[str, Standing], list[Equivocation]]:
        """Every proposal that lies there, with the domains' words. Raises UvccError."""
        return standings([body for prefix in (PROPOSALS, APPROVALS) for body in self._bodies(prefix)])

    def connected(self) -> AbstractContextManager[None]:
        """One connection for what is left and looked at inside; for one thread."""
        return self._box.connected()

    def leave_report(self, report: DomainReport, sign: Callable[[bytes], str]) -> None:
        """Put this domain's sign of life there; ``sign`` signs under ``REPORT_NAMESPACE``. Raises UvccError."""
        self.leave(f"{REPORTS}{report.proposal}/{report.party}", reports.signed(report, sign))

    def leave_signature(self, at: str, party: int, signature: str) -> None:
        """Put a policy's signature by this domain's pod there; ``at`` names proposal, attempt and phase."""
        self.leave(f"{SIGNATURES}{at}/{party}", signature)

    def look_signatures(self, at: str) -> list[str]:
        """Whatever lies there as signatures of that policy; none is checked here. Raises UvccError."""
        return list(self._bodies(f"{SIGNATURES}{at}/"))

    def leave_as(self, name: str, body: str) -> int:
        """Put a record there; which number this credential has, by what the relay says. Raises UvccError."""
        self.leave(name, body)
        self._box.after = -1
        for one in self._box.exchange(None, name):
            if one.body == body and one.party >= 0:
                return one.party
        raise UnreadableError("the relay did not keep what was put there", "is it up?")

    def mail(self, path: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request to the relay's mail (``/enqueue``, ``/poll``, ``/ack``). Raises UvccError."""
        return self._box.request(path, asked)

    def look_bodies(self, prefix: str) -> list[str]:
        """The records under a prefix as they lie there, unread. Raises UvccError."""
        return list(self._bodies(prefix))

    def _bodies(self, prefix: str) -> Iterator[str]:
        self._box.after = -1
        for _ in range(_MOST):
            found = self._box.exchange(None, prefix)
            yield from (one.body for one in found)
            if len(found) < RECORDS_AN_ANSWER:
                return


def barrier_name(barrier: Barrier) -> str:
    """Under which name a domain leaves it: a stop beside, not in place of, what was reached."""
    last = barrier.stage if barrier.status == barriers.REACHED else barrier.status
    last += f"-{barrier.resumed}" if barrier.resumed and barrier.status == barriers.HALT else ""
    return f"{BARRIERS}{barrier.proposal}/{barrier.attempt}/{last}/{barrier.party}"


def kept_file(proposal_id: str) -> Path:
    """Where this domain keeps a proposal."""
    return domain_key.folder() / KEPT / f"{proposal_id}.json"


def keep(standing: Standing) -> Path:
    """Write down a proposal and what was said of it; nothing that was kept before is forgotten. Raises UvccError."""
    path = kept_file(standing.signed.proposal.id)
    paths.ensure(path.parent)
    if path.exists():
        for _, body in Standing.from_json(reading.read_json(path)).said.values():
            standing = standing.hearing(body)
    write_atomic(path, json.dumps(standing.to_json(), indent=1).encode() + b"\n", mode=0o600)
    return path


def refused_before(standing: Standing, party: int) -> bool:
    """Whether a domain refused a proposal, by what lies at the rendezvous or by what is kept here."""
    path = kept_file(standing.signed.proposal.id)
    known = [standing, *([Standing.from_json(reading.read_json(path))] if path.exists() else [])]
    return any(party in one.said and one.said[party][0].decision == REFUSE for one in known)


def kept(proposal_id: str) -> Standing:
    """A proposal that was kept, by its id or the beginning of it. Raises ConfigError, UnreadableError."""
    folder = domain_key.folder() / KEPT
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    hits = [p for p in found if proposal_id and p.stem.startswith(proposal_id)]
    if len(hits) != 1:
        what = (
            f"no proposal {proposal_id!r} is kept here" if not hits else f"{proposal_id!r} fits {len(hits)} proposals"
        )
        raise ConfigError(what, "uvcc proposals fetches them")
    return Standing.from_json(reading.read_json(hits[0]))


def chosen(found: dict[str, Standing], proposal_id: str) -> Standing:
    """The proposal of this id, or of its beginning. Raises ConfigError."""
    hits = [name for name in found if proposal_id and name.startswith(proposal_id)]
    if len(hits) != 1:
        what = f"no proposal {proposal_id!r} lies there" if not hits else f"{proposal_id!r} fits {len(hits)} proposals"
        raise ConfigError(what, "see: uvcc proposals")
    return found[hits[0]]


def keep_evidence(found: Equivocation) -> Path:
    """Write down two texts that convict their coordinator; the file's name follows from both. Raises UvccError."""
    names = sorted(t.proposal.id[:16] for t in found.texts)
    where = domain_key.folder() / EVIDENCE / f"{'-'.join(names)}.json"
    paths.ensure(where.parent)
    write_atomic(where, json.dumps(found.to_json(), indent=1).encode() + b"\n", mode=0o600)
    return where


def check_no_equivocation(signed: SignedProposal, twice: list[Equivocation]) -> None:
    """See that its coordinator signed no other text under this nonce, there or to this domain before.

    Raises ProtocolError naming the coordinator; both texts are kept as evidence.
    """
    p = signed.proposal
    against = [e for e in twice if e.coordinator == p.coordinator and e.texts[0].proposal.nonce == p.nonce]
    folder = domain_key.folder() / KEPT
    for path in sorted(folder.glob("*.json")) if folder.is_dir() and not against else []:
        try:
            other = Standing.from_json(reading.read_json(path)).signed
        except UnreadableError:
            continue  # a file of ours that is damaged convicts nobody
        q = other.proposal
        if (q.coordinator, q.nonce) == (p.coordinator, p.nonce) and q.id != p.id:
            against = [Equivocation(p.coordinator, (other, signed))]
            break
    if not against:
        return
    where = keep_evidence(against[0])
    who = domain_key.fingerprint(p.coordinator)
    ids = " and ".join(t.proposal.id[:12] for t in against[0].texts)
    raise ProtocolError(
        f"the coordinator {who} signed two texts as one proposal: {ids}", f"both, with its signatures, are in {where}"
    )
