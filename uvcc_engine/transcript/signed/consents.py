"""A domain's word, in a run that is under way, for what needs the word of several: counted, and kept as evidence.

A consent names the proposal, the attempt and what it is for; one for a resume also names which resume, counted over
the attempt. So a word that was given for one resume holds for no other, and in no other attempt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signed.roster import MOST_ATTEMPTS
from uvcc_engine.transcript.terms.proposal import Proposal

CONSENT_NAMESPACE: Final = "uvcc-consent"
FILE: Final = "consents.json"
"""In a run's artifacts: the consents of its attempt, as their domains signed them."""
VERSION: Final = 1
FULL: Final = "full"
RESUME: Final = "resume"
TERMINATE: Final = "terminate"
MOST_RESUMES: Final = 1 << 16
_TYPE: Final = "consent"
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedConsent:
    """One domain's word. ``number``: which resume of the attempt, from 1; 0 for anything else."""

    version: int
    proposal: str
    attempt: int
    party: int
    what: Literal["full", "resume", "terminate"]
    number: int = 0

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"the consent has version {self.version}", f"this code knows version {VERSION}")
        if not _HASH.fullmatch(self.proposal) or self.party not in range(PARTIES):
            raise ConfigError("a consent that names no proposal or no party", "64 hex digits; 0, 1 or 2")
        if not 0 <= self.attempt < MOST_ATTEMPTS:
            raise ConfigError(f"a consent of attempt {self.attempt}", "attempts are counted from 0")
        if not (0 < self.number < MOST_RESUMES if self.what == RESUME else self.number == 0):
            raise ConfigError(f"a consent for {self.what} number {self.number}", "resumes are counted from 1")

    @property
    def label(self) -> str:
        """What it is for, in one word."""
        return label(self.what, self.number)


def label(what: str, number: int = 0) -> str:
    """``full``, ``terminate`` or ``resume-N``: under this word consents are counted."""
    return f"{what}-{number}" if what == RESUME else what


def signed(consent: SignedConsent, sign: Callable[[bytes], str]) -> str:
    """The consent with its signature, as it is sent and kept. ``sign`` signs under ``CONSENT_NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **asdict(consent)}, sign)


def opened(body: str, key: str) -> SignedConsent | None:
    """What the domain of this key said; None if it did not sign this, or it is no consent. Never raises."""
    content = orders.opened(body, CONSENT_NAMESPACE, [key])
    if content is None or content.get("type") != _TYPE:
        return None
    fields: Mapping[str, Any] = {k: v for k, v in content.items() if k != "type"}
    try:
        return strict.read(SignedConsent, fields, "a consent")
    except ConfigError:
        return None


def gathered(proposal: Proposal, attempt: int, bodies: Iterable[str]) -> dict[str, set[int]]:
    """Which domains signed for what, by the label, in one attempt; out of whatever lies there. Pure; never raises.

    What a domain did not sign, or signed for another attempt or proposal, is passed over.
    """
    found: dict[str, set[int]] = {}
    for body in bodies:
        party = _party(body, proposal.id, attempt)
        consent = opened(body, proposal.domains[party]) if party >= 0 else None
        if consent is not None:
            found.setdefault(consent.label, set()).add(party)
    return found


def _party(body: str, proposal: str, attempt: int) -> int:
    """Whose consent of this attempt a record says it is; -1 for anything else. Never raises."""
    try:
        found = parse_json(body.encode(), "a consent")["content"]
        if (found["type"], found["proposal"], found["attempt"]) == (_TYPE, proposal, attempt):
            party = found["party"]
            return party if isinstance(party, int) and party in range(PARTIES) else -1
    except (UnreadableError, KeyError, TypeError, ValueError):
        pass
    return -1
