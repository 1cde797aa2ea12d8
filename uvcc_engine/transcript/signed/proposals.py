"""A proposal as its coordinator signed it, what the domains said of it, and the proof that a coordinator lied.

Each domain leaves at the rendezvous a copy of the very text that it was shown, beside its word about it. So whoever
reads the rendezvous finds two texts under one nonce, if a coordinator showed different ones: each is signed by that
coordinator, and together they convict it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import approvals, orders
from uvcc_engine.transcript.signed.approvals import APPROVE, REFUSE, Approval
from uvcc_engine.transcript.terms.proposal import Proposal

PROPOSAL_NAMESPACE: Final = "uvcc-proposal"
FILE: Final = "proposal.json"
"""In a run's artifacts: the proposal that its domains approved, with their approvals."""
_TYPE: Final = "proposal"


@dataclass(frozen=True, slots=True)
class SignedProposal:
    """A proposal, and the record in which its coordinator signed it."""

    proposal: Proposal
    body: str

    @classmethod
    def make(cls, proposal: Proposal, sign: Callable[[bytes], str]) -> SignedProposal:
        """``sign`` signs with the coordinator's key under ``PROPOSAL_NAMESPACE``."""
        return cls(proposal, orders.sealed({"type": _TYPE, "proposal": proposal.to_json()}, sign))

    @classmethod
    def opened(cls, body: str) -> SignedProposal | None:
        """What a record says, if the coordinator that it names signed it; None for anything else. Never raises."""
        try:
            found = parse_json(body.encode(), "a proposal")
            proposal = Proposal.from_bytes(canonical(found["content"]["proposal"]))
        except (ConfigError, UnreadableError, KeyError, TypeError, UnicodeEncodeError):
            return None
        content = orders.opened(body, PROPOSAL_NAMESPACE, [proposal.coordinator])
        return cls(proposal, body) if content is not None and content.get("type") == _TYPE else None


@dataclass(frozen=True, slots=True)
class Standing:
    """A proposal and what each domain says of it. A refusal outweighs an approval of the same domain."""

    signed: SignedProposal
    said: Mapping[int, tuple[Approval, str]] = field(default_factory=dict)

    @property
    def approved(self) -> bool:
        """Whether all three domains approved exactly this text."""
        return len(self.said) == PARTIES and all(a.decision == APPROVE for a, _ in self.said.values())

    def hearing(self, body: str) -> Standing:
        """The same with one more record, where that is the word of one of its domains about it."""
        p = self.signed.proposal
        for party, key in enumerate(p.domains):
            found = approvals.opened(body, key)
            if found is None or (found.of, found.sha256, found.party) != (approvals.PROPOSAL, p.id, party):
                continue
            before = self.said.get(party)
            if before is None or before[0].decision != REFUSE:
                return Standing(self.signed, {**self.said, party: (found, body)})
        return self

    def to_json(self) -> dict[str, Any]:
        """The document that a run keeps."""
        words = {str(party): body for party, (_, body) in sorted(self.said.items())}
        return {"proposal": self.signed.body, "approvals": words}

    @classmethod
    def from_json(cls, data: object) -> Standing:
        """Read what :meth:`to_json` wrote. Raises UnreadableError for what the coordinator or a domain did not sign."""
        found = data if isinstance(data, dict) and set(data) == {"proposal", "approvals"} else {}
        body, words = found.get("proposal"), found.get("approvals")
        signed = SignedProposal.opened(body) if isinstance(body, str) else None
        if signed is None or not isinstance(words, dict) or not all(isinstance(w, str) for w in words.values()):
            raise UnreadableError("not a proposal that its coordinator signed", "fetch it again with uvcc proposals")
        made = cls(signed)
        for party, word in words.items():
            heard = made.hearing(word)
            if set(map(str, heard.said)) - set(map(str, made.said)) != {party}:
                raise UnreadableError(f"what P{party[:8]} is said to have signed of the proposal, it did not sign")
            made = heard
        return made


@dataclass(frozen=True, slots=True)
class Equivocation:
    """Two texts that one coordinator signed under one nonce: evidence against it, whoever holds it."""

    coordinator: str
    texts: tuple[SignedProposal, SignedProposal]

    def to_json(self) -> dict[str, Any]:
        return {"coordinator": self.coordinator, "texts": [t.body for t in self.texts]}


def standings(bodies: Iterable[str]) -> tuple[dict[str, Standing], list[Equivocation]]:
    """What a rendezvous holds, in any order: every proposal by its id, and who told two tales. Pure; never raises."""
    kept = list(bodies)
    found: dict[str, Standing] = {}
    by_nonce: dict[tuple[str, str], SignedProposal] = {}
    twice: list[Equivocation] = []
    for body in kept:
        signed = SignedProposal.opened(body)
        if signed is None or signed.proposal.id in found:
            continue
        p = signed.proposal
        found[p.id] = Standing(signed)
        first = by_nonce.setdefault((p.coordinator, p.nonce), signed)
        if first is not signed:
            twice.append(Equivocation(p.coordinator, (first, signed)))
    for body in kept:
        named = found.get(approvals.claims(body))
        if named is not None:
            found[named.signed.proposal.id] = named.hearing(body)
    return found, twice
