"""The end of a run: three digests of the final state that all parties agree on without seeing each other's shares."""

from __future__ import annotations

from collections.abc import Mapping

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.peer_protocol.peer_messages import FinalState
from uvcc_engine.mpc.foundation.claim_ledger import ProvedStep
from uvcc_engine.sharding.learner import Learner
from uvcc_engine.transcript.signed.statements import Verdict
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.worker.consensus import StepConsensus

_LABEL = "state"


def state_blinds(identity: Identity, policy: Policy, coord: Coord) -> bytes:
    """The secrets that this worker's pod shares with the party before and the party after it, 32 bytes each."""
    peers = policy.peers(coord.party, coord.replica)
    both = [(coord.party + step) % PARTIES for step in (PARTIES - 1, 1)]
    return b"".join(identity.pair_secret(peers[p], policy.sid_job, _LABEL) for p in both)


def own_digests(trainer: Learner, blinds: bytes, party: int) -> dict[int, str]:
    """Digests of the two components that ``party`` holds, by component number.

    Each is blinded with the secret of the component's two holders (:func:`state_blinds`), so the third party, whom the
    digest reaches, cannot test guesses of the component with it.
    """
    return {
        party: trainer.component_digest("first", blinds[:32]),
        (party + 1) % PARTIES: trainer.component_digest("second", blinds[32:]),
    }


def agree_on_state(table: StepConsensus, mine: dict[int, str]) -> list[str]:
    """Exchange digests; returns those of components 0, 1, 2. Raises ProtocolError naming holders that differ."""
    table.say(FinalState(mine))
    known: dict[int, tuple[str, int]] = {c: (d, table.party) for c, d in mine.items()}
    for peer, message in sorted(table.hear(FinalState()).items()):
        for component, digest in _held_by(peer, message).items():
            found, holder = known.setdefault(component, (digest, peer))
            if found != digest:
                raise ProtocolError(
                    f"P{holder} and P{peer} hold different copies of component {component} of the final state",
                    "one of them computed something else; compare their transcripts",
                    party=peer,
                )
    return [known[c][0] for c in range(PARTIES)]


def _held_by(peer: int, said: FinalState) -> Mapping[int, str]:
    if set(said.digests) != {peer, (peer + 1) % PARTIES}:
        raise ProtocolError(f"P{peer} sent digests of other components than it holds", party=peer)
    return said.digests


def verdict_of(proved: ProvedStep | None) -> Verdict | None:
    """What a root statement says of a proof that held."""
    return None if proved is None else Verdict(proved.claims, proved.digest, proved.coins, proved.drawn)
