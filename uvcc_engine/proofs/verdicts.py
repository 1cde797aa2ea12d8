"""What the parties found of a step's proofs, told by all to all, and whom each must suspect by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.proofs.held_opening import HeldOpening
from uvcc_engine.transcript.formats import kinds

HELD: Final = 1
FAILED: Final = 2
NOT_MINE: Final = 0
_CURE: Final = (
    "nothing of this step was revealed; each party's exit names whom its own view leaves. Go on under the next attempt:"
    " a step that is repeated with other messages under the same masks would leak"
)


def flags_of(verdicts: Sequence[int], agree: bool) -> Tensor:
    """What a party says: ``[PARTIES + 1]``, of each prover, and whether what it opened under masks is what its peers
    say that they opened."""
    return torch.tensor([*verdicts, HELD if agree else FAILED], dtype=torch.uint8)


def tell_verdicts_protocol(
    rt: Runtime, verdicts: list[int], agree: bool, opening: HeldOpening | None = None, *, release: bool | None = None
) -> MpcProtocol[dict[int, Tensor]]:
    """Everybody tells both others what it found, and releases its halves of an ``opening`` if all of it held: 1 round.
    What everybody found ``[PARTIES + 1]``, by party.

    ``verdicts``: of the three provers, ``NOT_MINE`` where this party does not judge. ``agree``: whether what it opened
    under masks is what its peers say that they opened. ``release``: whether the halves are, where more decides.
    """
    mine = flags_of(verdicts, agree)
    release = found_true(rt, verdicts, agree) if release is None else release
    message = Round(proved=True, opening=opening is not None and release)
    for peer in (rt.next, rt.prev):
        message.send(peer, kinds.PROOF, mine)
        message.want(peer, kinds.PROOF, torch.uint8, PARTIES + 1)
    if opening is not None:
        opening.add_to(message, release=release)
    got: list[Tensor] = yield message
    if opening is not None:
        opening.got = got[2:]
    return {rt.party: mine, rt.next: got[0], rt.prev: got[1]}


def found_true(rt: Runtime, verdicts: list[int], agree: bool) -> bool:
    """Whether all that this party judges held. It judges the party before it."""
    return agree and verdicts[rt.prev] == HELD


def failure_of(rt: Runtime, epoch: int, found: Mapping[int, Tensor], agree: bool) -> ProofFailedError | None:
    """The first fault of ``epoch`` that somebody found, as this party must see it. ``found``: ``[PARTIES + 1]`` of
    each."""
    where = f"step {epoch}"
    for q in range(PARTIES):
        refuted = [p for p in found if p == (q + 1) % PARTIES and int(found[p][q]) != HELD]
        if refuted and q != rt.party and rt.party in refuted:
            other = next(p for p in range(PARTIES) if p not in (q, rt.party))
            return ProofFailedError(
                f"{where}: the proof of party {q} does not hold at party {rt.party}: party {q} altered a message of"
                f" this step, or party {other} its part of the check",
                _CURE,
                pair=tuple(sorted((q, other))),
                prover=q,
            )
    if not agree:
        return ProofFailedError(
            f"{where}: parties {rt.next} and {rt.prev} sent party {rt.party} values under masks that do not agree",
            _CURE,
            pair=tuple(sorted((rt.next, rt.prev))),
        )
    for p, flags in found.items():
        due = {(p + 2) % PARTIES: HELD, PARTIES: HELD}  # whom it judges, and whether what it was told agrees
        if p != rt.party and any(int(flags[q]) != due.get(q, NOT_MINE) for q in range(PARTIES + 1)):
            return ProofFailedError(
                f"{where}: party {p} reports that a proof of this step does not hold",
                f"if that is false, party {p} may know what the policy reveals of this step; else {_CURE}",
                pair=tuple(sorted((p, next(q for q in range(PARTIES) if q not in (p, rt.party))))),
                prover=next((q for q in range(PARTIES) if int(flags[q]) == FAILED), -1),
            )
    return None
