"""What the domains of one attempt signed for while it is under way, and when it is enough to go on after a halt."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.federation.seat import Seat
from uvcc_console.rollout.bus import Bus
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.peer_protocol.record_names import BARRIERS
from uvcc_engine.transcript.signed import consents
from uvcc_engine.transcript.signed.consents import CONSENT_NAMESPACE, FULL, RESUME, TERMINATE, SignedConsent

MOST_KEPT: Final = 256  # of one domain: whoever signs for all that may come keeps no other's word out
KINDS: Final = (FULL, RESUME, TERMINATE)


class ConsentLedger:
    """The consents of one attempt. This domain's own are left at the rendezvous until the relay shows them."""

    def __init__(self, bus: Bus, seat: Seat) -> None:
        self.bodies: dict[str, None] = {}  # as their domains signed them, for the evidence
        self._bus = bus
        self._seat = seat
        self._asked: list[SignedConsent] = []
        self._own: dict[str, tuple[str, str]] = {}  # by label: the record's name and body
        self._given: dict[str, set[int]] = {}

    def ask(self, attempt: int, what: str, number: int) -> None:
        """This domain's operator signs for something; ``number``: which resume. Raises ConfigError for no such thing.

        The signature itself is made in the thread that visits the rendezvous: a key may lie with an agent.
        """
        if what not in KINDS:
            raise ConfigError(f"nobody signs for {what!r}", f"one of {', '.join(KINDS)}")
        made = SignedConsent(
            version=consents.VERSION,
            proposal=self._seat.proposal.id,
            attempt=attempt,
            party=self._seat.party,
            what=what,  # type: ignore[arg-type]
            number=number if what == RESUME else 0,
        )
        if made.label not in self._own and made not in self._asked:
            self._asked.append(made)

    def due(self, lying: Collection[str]) -> list[tuple[str, str]]:
        """Name and body of this domain's consents that are not among what lies at the rendezvous. Called in a thread.

        Raises UvccError where the domain's key does not sign.
        """
        while self._asked:
            made = self._asked[0]
            at = f"{BARRIERS}{made.proposal}/{made.attempt}/consent-{made.label}/{made.party}"
            body = consents.signed(made, lambda payload: self._seat.key.sign(CONSENT_NAMESPACE, payload))
            self._own[made.label] = (at, body)
            self._asked.pop(0)
        return [one for one in self._own.values() if one[1] not in lying]

    def take(self, attempt: int, fresh: Iterable[str]) -> None:
        """Count what came; each domain's first word for something is told as an event."""
        for body in fresh:
            for what, who in consents.gathered(self._seat.proposal, attempt, [body]).items():
                new = who - self._given.setdefault(what, set())
                new = {p for p in new if sum(p in given for given in self._given.values()) < MOST_KEPT}
                if new:
                    self.bodies[body] = None
                    self._given[what] |= new
                    told = [ev.Consent(what=what, by=f"P{p}", own=p == self._seat.party) for p in sorted(new)]
                    self._bus.record(told)

    def enough(self, number: int) -> bool:
        """Whether as many domains as the proposal wants, and at least one, signed for this resume."""
        wanted = max(1, self._seat.proposal.consent.resume)
        return len(self._given.get(consents.label(RESUME, number), ())) >= wanted
