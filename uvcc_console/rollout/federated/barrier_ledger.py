"""What the domains of one attempt signed of their progress, as it comes: what counts of it, and what is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.transcript.signed import barriers
from uvcc_engine.transcript.signed.barriers import MEET, REACHED, Barrier, Barriers
from uvcc_engine.transcript.terms.proposal import Proposal

MOST_STOPS: Final = 256  # of one domain are kept: it may sign as many as it likes, and keeps no other's out
MOST_AHEAD: Final = 10_000
"""So many attempts at most another domain can have begun without this one: each is a rollout that somebody started."""


class BarrierLedger:
    """The barriers of one attempt. A domain that signs without end is heard by its own words only: each of another
    counts as if it were the first.
    """

    def __init__(self, proposal: Proposal, attempt: int, stages: Sequence[str]) -> None:
        self.found = Barriers()
        self.bodies: dict[str, None] = {}  # as they were signed and came, for the evidence
        self._proposal = proposal
        self._attempt = attempt
        self._stages = stages
        self._looked: frozenset[str] = frozenset()  # what lay there at the last look: read already
        self._stops: dict[int, int] = {}

    def take(self, lying: Collection[str]) -> list[str]:
        """Hear what is new of what lies at the rendezvous; returns it, also what is no barrier.

        Raises ProtocolError naming a domain that contradicts itself, or signs a stage that the run does not have.
        """
        fresh = [body for body in lying if body not in self._looked]
        self._looked = frozenset(lying)
        for body in fresh:
            said = barriers.of_attempt(self._proposal, self._attempt, body)
            if said is not None:
                self._hear(said, body)
        return fresh

    def _hear(self, said: Barrier, body: str) -> None:
        if said.stage not in self._stages:
            self.bodies[body] = None
            raise ProtocolError(
                f"P{said.party} signed a barrier of {said.stage!r}, no stage of this run", party=said.party
            )
        try:
            new = self.found.hear(said, self._proposal.domains[said.party])
        except ProtocolError:
            self.bodies[body] = None  # it and the one before convict that domain
            raise
        if new and said.status != REACHED:
            self._stops[said.party] = self._stops.get(said.party, 0) + 1
            new = self._stops[said.party] <= MOST_STOPS
        if new:
            self.bodies[body] = None


def is_over(found: Barriers) -> bool:
    """Whether an attempt was given up, or went on without this domain."""
    return bool(found.stopped) or any(stage != MEET for stage, _ in found.reached)


def check_ahead(party: int, attempt: int, own: int, *, late: bool) -> None:
    """See that a domain that began a later attempt than this one can be followed there; ``late``: the wait is over.

    What is begun is noted for good. Raises ProtocolError, PeerLostError naming that domain.
    """
    if attempt - own > MOST_AHEAD:
        what = f"P{party}'s domain says that it begins attempt {attempt}, where this one is at {own}"
        raise ProtocolError(what, "nobody began so many; ask that domain's operator", party=party)
    if late:
        what = f"P{party}'s domain begins one attempt after the other, now {attempt}: nobody meets it"
        raise PeerLostError(what, "ask that domain's operator, then begin the next attempt", party=party)
