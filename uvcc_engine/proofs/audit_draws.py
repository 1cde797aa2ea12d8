"""Whether a prover's step is audited: drawn by the other two, told to it when all its messages are fixed.

Under ``verify: covert`` a party proves one step in so many. What decides is a hash of the seed of its proof's coins.
The seed is a piece of the stream that its two verifiers have in common, so it is fixed before the step begins, is
independent of everything that the prover knows, and is told to it in two halves, each by a verifier that has
all of the prover's messages by then. The three draws are told by all to all before anybody acts on them. So a verifier
that told a prover a false half ends the step; it does not make an honest prover look like one that withholds its proof.

An attempt that is gone on with repeats every message of a step that was begun, word for word
(``worker.high_water``, ``transcript.leaves.store``), and draws what it drew: who has learned of its audit cannot take
back what it sent. Another attempt has other streams, begins with the first step and draws anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, ProofFailedError, ProtocolError
from uvcc_engine.contract.job.proof_mode import is_audited
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.transcript.formats import kinds

_LABEL: Final = b"UVCC_AUDIT_V1"
_DIGEST: Final = 8
_CURE: Final = "nothing of this step was revealed; go on under the next attempt"


def drawn(seed: Tensor, q: int) -> int:
    """What the seed ``[SEED_WORDS]`` of prover ``q``'s coins draws: a number of 64 bits."""
    hashed = hashlib.sha256(_LABEL + bytes([q]) + seed.contiguous().numpy().tobytes()).digest()
    return int.from_bytes(hashed[:_DIGEST], "big")


def audited(draws: tuple[int, ...], one_in: int) -> tuple[int, ...]:
    """The provers of whom these draws ask for a proof."""
    return tuple(q for q, number in enumerate(draws) if is_audited(number, one_in))


def audited_others(seeds: Sequence[Tensor | None], one_in: int) -> tuple[int, ...]:
    """The other two, as far as their seeds, int64 ``[SEED_WORDS]``, ask for a proof; None for one's own. It is known
    before anybody is told a half."""
    return tuple(q for q, seed in enumerate(seeds) if seed is not None and is_audited(drawn(seed, q), one_in))


def agree_on_audit_protocol(rt: Runtime, seeds: list[Tensor]) -> MpcProtocol[tuple[int, ...]]:
    """Everybody tells both others what the three seeds draw, each int64 ``[SEED_WORDS]`` as it knows or was told it: 1
    round.

    Raises ProofFailedError where they are not the same: somebody told a prover another half of its seed than it has.
    """
    draws = tuple(drawn(seed, q) for q, seed in enumerate(seeds))
    mine = torch.frombuffer(bytearray(b"".join(d.to_bytes(_DIGEST, "big") for d in draws)), dtype=torch.uint8)
    message = Round()
    for peer in (rt.next, rt.prev):
        message.send(peer, kinds.AUDIT, mine)
        message.want(peer, kinds.AUDIT, torch.uint8, PARTIES * _DIGEST)
    got: list[Tensor] = yield message
    if not all(torch.equal(mine, other) for other in got):
        raise ProofFailedError(
            f"step {rt.epoch}: the parties do not agree on whom this step's coins draw for an audit: one of them told"
            f" another coin than the others have{_could_know(rt, (rt.next, rt.prev))}",
            _CURE,
            pair=tuple(sorted((rt.next, rt.prev))),
        )
    return draws


def note_unfinished(rt: Runtime, error: PeerLostError | ProtocolError) -> None:
    """Let ``error`` say so where it names a party that was to be audited, after its coins were told."""
    if not isinstance(error, ProofFailedError):
        error.what += _could_know(rt, (error.party,))
        error.args = (error.what,)


def _could_know(rt: Runtime, parties: Sequence[int]) -> str:
    """What an error that names these parties says of those among them who were drawn; empty where none was."""
    due = rt.ledger.audits if rt.ledger is not None else ()
    told = [
        f"; party {party} could know that step {rt.epoch} audits it: nobody can tell this from a lie that was about to"
        " be found"
        for party in parties
        if party in due
    ]
    return "".join(told)
