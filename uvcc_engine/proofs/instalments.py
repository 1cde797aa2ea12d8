"""The proof of a long step in instalments: what a party keeps for it is bounded.

A ledger keeps all that a claim is about until it is proved, and a proof takes about as much again. So wherever the
settled claims of a stream fill a bound, they are proved between two rounds of the step, and forgotten: with the same
rounds as at a step's end, and one in which the verdicts are told, in a stream of messages of their own. All parties
come to the same bound between the same rounds, since claims are the same at all, and so are their sizes.

Each message of a settled claim has arrived before a verifier tells its half of the coins, as at a step's end. Nothing
is opened in an instalment, and nothing is opened in the step before the rest of it is proved. A proof that does not
hold ends the step where it stands, with the second round.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.proof_mode import Proving
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, ProtocolProgress, Runtime
from uvcc_engine.proofs.step_proof import prove_protocol

BOUND: Final = 1 << 26
"""Words, about, that a worker keeps of claims that could be proved: 512 MiB."""
LEAST: Final = 1 << 20
"""Of a stream among many: what a proof is worth its rounds for."""
STREAM: Final = 1 << 15
"""What the stream of a stream's instalments has above its number."""


def proves(
    rt: Runtime,
    proving: Proving,
    *,
    sisters: bool = False,
    committed: bool = True,
    alike: bool = True,
    streams: int = 1,
) -> None:
    """Have what ``rt`` computes proved: it gets a ledger, and a long step is proved in instalments.

    ``sisters`` and ``committed``: see ``ClaimLedger``. ``alike``: whether whoever this worker meets in the middle of a
    pass comes to the bound with it: not so of tensor ranks, whose claims differ, and which prove at a step's end alone.
    ``streams``: how many of the worker share the bound.
    """
    rt.ledger = ClaimLedger.of(proving, sisters=sisters, committed=committed)
    if alike:
        in_instalments(rt, rt.ledger, share_of_bound(streams))


def share_of_bound(streams: int) -> int:
    """How many words a stream may keep, of ``streams`` of a worker."""
    return max(LEAST, BOUND // streams)


def in_instalments(rt: Runtime, main: ClaimLedger, bound: int) -> None:
    """Have the claims of ``rt``'s ledger proved wherever they are ``bound`` words. ``main``: this worker's ledger that
    owes verdicts, and is told of a failure.

    Where steps are audited there are no instalments: who was told in the middle of a step that nobody looks could lie
    in the rest of it.
    """
    if not main.audit_one_in and rt.stream < STREAM:
        rt.instalment = partial(_due, rt, main, bound, [])


def _due(rt: Runtime, main: ClaimLedger, bound: int, kept: list[Runtime]) -> ProtocolProgress[None] | None:
    """The instalment that is due now, begun. In a party of several workers none is while the verdicts of the step
    before are owed, which all of them hear together at a step's end, nor behind one that failed."""
    ledger = known(rt.ledger)
    if ledger.settled_words < bound or main.failed is not None or (main.owes and main.sisters):
        return None
    main.hear()
    if not kept:
        kept.append(rt.beside(STREAM | rt.stream))
    (beside,) = kept
    if beside.epoch != rt.epoch:
        beside.begin_epoch(rt.epoch)
    beside.ledger = ledger.take_settled()
    if not rt.on_processors:
        beside.ledger.bring_to_host()
    return beside.start(_instalment_protocol(rt, beside, main))


def _instalment_protocol(rt: Runtime, beside: Runtime, main: ClaimLedger) -> MpcProtocol[None]:
    """Prove what ``beside``'s ledger has. Where the party has other workers a failure is raised at the step's end, at
    all of them; until then nothing is opened, and what is sent is masked."""
    costs = beside.rounds, beside.bytes_sent, beside.messages
    try:
        proved = yield from prove_protocol(beside)
    except ProofFailedError as failure:
        if not main.sisters:
            raise
        main.failed = failure
    else:
        known(rt.ledger).instalments.append(proved)
    beside.ledger = None
    rt.rounds += beside.rounds - costs[0]
    rt.bytes_sent += beside.bytes_sent - costs[1]
    rt.messages += beside.messages - costs[2]
