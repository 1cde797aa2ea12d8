"""How three domains advance together without a coordinator: each signs, stage by stage, that it got there or why not.

A barrier names the proposal, the attempt, its party and the digest of what it reports, and it countersigns the three
barriers of the stage before (``seen``). So none can be used again elsewhere, and a domain that signed a later stage
has signed that all three had reached the earlier ones: the order is in the signatures, not in anybody's clock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.signed import orders
from uvcc_engine.transcript.signed.consents import MOST_RESUMES
from uvcc_engine.transcript.signed.roster import MOST_ATTEMPTS
from uvcc_engine.transcript.terms.proposal import Proposal

BARRIER_NAMESPACE: Final = "uvcc-barrier"
FILE: Final = "barriers.json"
"""In a run's artifacts: the barriers of its attempt, as their domains signed them."""
MEET: Final = "meet"
ROSTER: Final = "roster"
SHARES: Final = "shares"
DRILL: Final = "drill"
COLLECT: Final = "collect"
POLICY: Final = "policy-"
VERIFY: Final = "verify-"
"""Before a phase's name: all three have its policy; this domain verified all of it."""
VERSION: Final = 1
REACHED: Final = "reached"
FAILED: Final = "failed"
HALT: Final = "halt"
LONGEST_REASON: Final = 500
_TYPE: Final = "barrier"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_STAGE: Final = re.compile(r"[a-z][a-z-]{0,39}")


def stages_of(phases: Iterable[str], *, drill: bool = False) -> list[str]:
    """The stages at which domains wait for each other, in order, of a run with these phases.

    ``drill``: whether the halt was rehearsed on the first of them.
    """
    found = [MEET, ROSTER, SHARES]
    for name in phases:
        found += [POLICY + name, *([DRILL] if drill else []), name, f"evidence-{name}", VERIFY + name]
        drill = False
    return [*found, COLLECT]


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """One domain's word about one stage of one attempt.

    ``status``: ``reached``, ``failed`` (this domain goes no further) or ``halt`` (all are to stop), both with a
    ``reason``. ``digest``: SHA-256 of what it reports of the stage, equal at all three where the stage has a common
    result. ``seen``: by party, the digests of the barriers of the stage before; empty at the first. ``resumed``: how
    often the attempt had been resumed by then. A halt counts until the next resume.
    """

    version: int
    proposal: str
    attempt: int
    party: int
    stage: str
    status: Literal["reached", "failed", "halt"]
    digest: str
    reason: str = ""
    seen: dict[str, str]
    resumed: int = 0

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(f"the barrier has version {self.version}", f"this code knows version {VERSION}")
        if not _HASH.fullmatch(self.proposal) or not _HASH.fullmatch(self.digest):
            raise ConfigError("a barrier that names no proposal or no report", "64 lower-case hex digits each")
        if not 0 <= self.attempt < MOST_ATTEMPTS or self.party not in range(PARTIES):
            raise ConfigError(f"a barrier of P{self.party}, attempt {self.attempt}", "0, 1 or 2; attempts from 0")
        if not 0 <= self.resumed < MOST_RESUMES:
            raise ConfigError(f"a barrier after {self.resumed} resumes", "resumes are counted from 0")
        if not _STAGE.fullmatch(self.stage):
            raise ConfigError(f"a barrier of the stage {self.stage[:40]!r}", "lower-case letters and -")
        if len(self.reason) > LONGEST_REASON or not self.reason.isprintable():
            raise ConfigError("the reason of a barrier is too long", f"at most {LONGEST_REASON} printable characters")
        if set(self.seen) not in (set(), {str(p) for p in range(PARTIES)}) or not all(
            _HASH.fullmatch(d) for d in self.seen.values()
        ):
            raise ConfigError("a barrier countersigns all three of the stage before, or none", "64 hex digits by party")

    @property
    def mark(self) -> str:
        """SHA-256 of all that it says: what the barriers of the next stage countersign."""
        return hashlib.sha256(b"UVCC_BARRIER_V1" + canonical(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What is signed, without the type: ``resumed`` stands in it only where there was a resume."""
        return {k: v for k, v in asdict(self).items() if k != "resumed" or v}


def signed(barrier: Barrier, sign: Callable[[bytes], str]) -> str:
    """The barrier with its signature, as it is sent and kept. ``sign`` signs under ``BARRIER_NAMESPACE``."""
    return orders.sealed({"type": _TYPE, **barrier.to_json()}, sign)


def opened(body: str, key: str) -> Barrier | None:
    """What the domain of this key said; None if it did not sign this, or it is no barrier. Never raises."""
    content = orders.opened(body, BARRIER_NAMESPACE, [key])
    if content is None or content.get("type") != _TYPE:
        return None
    fields: Mapping[str, Any] = {k: v for k, v in content.items() if k != "type"}
    try:
        return strict.read(Barrier, fields, "a barrier")
    except ConfigError:
        return None


@dataclass(frozen=True, slots=True)
class Barriers:
    """``reached``: by stage and party; ``stopped``: by party, the last word of a domain that it stops: ``failed``, or
    the ``halt`` after the most resumes."""

    reached: dict[tuple[str, int], Barrier] = field(default_factory=dict)
    stopped: dict[int, Barrier] = field(default_factory=dict)

    def of(self, stage: str) -> dict[int, Barrier]:
        """The domains that reached a stage."""
        return {party: b for (at, party), b in sorted(self.reached.items()) if at == stage}

    def hear(self, barrier: Barrier, key: str) -> bool:
        """Take one more of the domain of this key; whether it says anything new.

        Raises ProtocolError naming a domain that says twice, and differently, how it reached a stage.
        """
        party = barrier.party
        if barrier.status != REACHED:
            old = self.stopped.get(party)
            if old is not None and _rank(old) >= _rank(barrier):
                return False
            self.stopped[party] = barrier
            return True
        before = self.reached.get((barrier.stage, party))
        if before is not None and before != barrier:
            what = f"P{party}'s domain ({key}) signed two barriers of {barrier.stage}"
            raise ProtocolError(
                f"{what}, attempt {barrier.attempt}: {before.mark[:16]} and {barrier.mark[:16]}",
                "one of them is a lie; keep both",
                party=party,
            )
        self.reached[barrier.stage, party] = barrier
        return before is None


def of_attempt(proposal: Proposal, attempt: int, body: str) -> Barrier | None:
    """What one of the proposal's domains signed about this attempt; None for anything else. Never raises."""
    party = _party(body, proposal.id, attempt)
    return opened(body, proposal.domains[party]) if party >= 0 else None


def gathered(proposal: Proposal, attempt: int, bodies: Iterable[str]) -> Barriers:
    """Every barrier of one attempt, out of whatever lies at a rendezvous. Pure.

    What a domain did not sign, or signed for another attempt or proposal, is passed over. Raises ProtocolError naming
    a domain that says twice, and differently, how it reached a stage.
    """
    found = Barriers()
    for body in bodies:
        if (barrier := of_attempt(proposal, attempt, body)) is not None:
            found.hear(barrier, proposal.domains[barrier.party])
    return found


def in_order(found: Barriers, stages: Sequence[str]) -> None:
    """See that every stage was reached over the three barriers of the one before.

    Raises ProtocolError naming the domain that countersigned something else.
    """
    for (stage, party), barrier in sorted(found.reached.items(), key=lambda item: (item[0][0] not in stages, item[0])):
        if stage not in stages:
            raise ProtocolError(f"P{party} signed a barrier of {stage!r}, no stage of this run", party=party)
        at = stages.index(stage)
        before = found.of(stages[at - 1]) if at else {}
        silent = [f"P{p}" for p in range(PARTIES) if at and p not in before]
        if silent:
            what = f"P{party} signed {stage} before {', '.join(silent)} had reached {stages[at - 1]}"
            raise ProtocolError(what, "its signatures are out of order", party=party)
        if barrier.seen != {str(p): b.mark for p, b in before.items()}:
            what = f"P{party} signed {stage} over other barriers than those of the stage before"
            raise ProtocolError(what, "it was shown something else, or it lies; keep what lies there", party=party)


def agreed(found: Mapping[int, Barrier]) -> None:
    """See that three domains report the same of a stage. Raises ProtocolError naming the one that does not."""
    digests = [b.digest for b in found.values()]
    odd = [(p, b) for p, b in found.items() if digests.count(b.digest) * 2 < len(digests)]
    if len(odd) > 1:
        stage = odd[0][1].stage
        told = ", ".join(f"P{p} {b.digest[:16]}" for p, b in odd)
        raise ProtocolError(f"the domains all report another {stage}: {told}", "each is signed, keep the barriers")
    for p, b in odd:
        what = f"P{p}'s domain reports another {b.stage} than the two others: {b.digest[:16]}"
        raise ProtocolError(what, "both are signed, keep the barriers", party=p)


def _rank(stop: Barrier) -> tuple[bool, int]:
    return stop.status == FAILED, stop.resumed


def _party(body: str, proposal: str, attempt: int) -> int:
    """Whose barrier of this attempt a record says it is; -1 for anything else. Never raises."""
    try:
        found = parse_json(body.encode(), "a barrier")["content"]
        if (found["type"], found["proposal"], found["attempt"]) == (_TYPE, proposal, attempt):
            party = found["party"]
            return party if isinstance(party, int) and party in range(PARTIES) else -1
    except (UnreadableError, KeyError, TypeError, ValueError):
        pass
    return -1
