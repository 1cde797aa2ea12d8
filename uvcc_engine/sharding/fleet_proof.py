"""The proofs of a party of several workers: each triple of workers proves its own step, and all wait for all.

A worker proves to the workers at its place in the other two parties what it sent to them. Its loss, its weights and
whatever else is opened depend on what the party's other workers computed as well, so nobody goes on before every worker
of the party has said that the proof of its triple held. Both honest parties hear of a failed proof in that triple; so
where it fails, the workers of both of them stop, all of them, and each names the pair.

What a worker says here is heard by its own party only, and is no evidence: the signed verdicts are, one for each place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, ProofFailedError, ProtocolError
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.mpc.foundation.claim_ledger import ProvedStep
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.proofs.settling import OwedVerdict, StepFinding
from uvcc_engine.proofs.step_proof import find_on_host, settle_on_host
from uvcc_engine.sharding.microbatches import StreamRuntimes

WORD_BYTES: Final = 1536
_MOST_LETTERS: Final = 440, 220  # of what and hint, whose escapes take twice as much at most
T = TypeVar("T")
_HELD: Final = b""
_REFUSED: Final = b"\1"  # no failure yet: what a sister's place found is told to the other parties next


def prove_together(
    runtimes: StreamRuntimes, groups: PartyGroups, values: Sequence[Share] = ()
) -> tuple[ProvedStep, list[Tensor]]:
    """Prove all that this worker's streams filed, and wait until every worker of the party has proved its own; open
    ``values`` of any shapes in the round of the verdicts. Only the worker that opens has any.

    This party releases its halves if every one of its workers judged that all held, and puts the others' halves
    together once every one has heard its verdicts. Raises ProofFailedError where a proof does not hold, at whatever
    place, and ProtocolError where a peer broke a rule in one; then nothing of the step may be opened by anybody.
    """
    main, ledger = runtimes.main, known(runtimes.main.ledger)
    (proved, finding), jointly = _found(runtimes, groups)
    if finding is None:
        agree(groups, lambda: None)
        ledger.all_proved()
        return proved, main.run(par(*(open_ring_protocol(main, one) for one in values)))
    opening = agree(groups, lambda: settle_on_host(main, finding, values, jointly=jointly))
    ledger.all_proved()
    return proved, [] if opening is None else opening.opened()


def prove_silently_together(runtimes: StreamRuntimes, groups: PartyGroups) -> tuple[ProvedStep, OwedVerdict | None]:
    """The same in a step that opens nothing: each worker owes the two others at its place its verdict, where whoever
    drives the steps has that told later. Raises as :func:`prove_together`."""
    if not known(runtimes.main.ledger).defers:
        return prove_together(runtimes, groups)[0], None
    (proved, finding), _ = _found(runtimes, groups)
    return proved, OwedVerdict(runtimes.main, finding or StepFinding.of_nothing(runtimes.main))


def _found(runtimes: StreamRuntimes, groups: PartyGroups) -> tuple[tuple[ProvedStep, StepFinding | None], bool]:
    """What this worker finds of its place's proofs, and whether every worker of the party finds that all held."""
    main, ledger = runtimes.main, known(runtimes.main.ledger)
    ledger.hear()
    runtimes.collect_claims()

    def here() -> tuple[ProvedStep, StepFinding | None]:
        if ledger.failed is not None:
            raise ledger.failed
        return find_on_host(main)

    def held(found: tuple[ProvedStep, StepFinding | None]) -> bool:
        return found[1] is None or found[1].held(main)

    return judged_together(groups, here, held)


def agree(groups: PartyGroups, work: Callable[[], T]) -> T:
    """What ``work`` gives, once it has given something at every worker of this party. Raises as it does, there or at
    a sister.
    """
    return judged_together(groups, work, lambda found: True)[0]


def judged_together(groups: PartyGroups, work: Callable[[], T], good: Callable[[T], bool]) -> tuple[T, bool]:
    """As :func:`agree`, and whether what came out is ``good`` at every one."""
    failed: ProtocolError | None = None
    found: list[T] = []
    try:
        found.append(work())
    except ProtocolError as error:
        failed = error
    word = (_HELD if good(found[0]) else _REFUSED) if failed is None else encoded(str(groups.place.coord), failed)
    try:
        heard = _greatest(groups, word)
        if heard > _REFUSED:
            with suppress(PeerLostError):
                _greatest(groups, word)  # a worker that leaves before all have heard it would cut the others short
    except PeerLostError:
        if failed is None:
            raise
    if failed is not None:
        raise failed
    if heard > _REFUSED:
        raise _decoded(heard)
    return found[0], heard == _HELD


def _greatest(groups: PartyGroups, word: bytes) -> bytes:
    """The same at every worker of the party: a failure, if there was one anywhere."""
    if groups.alone:
        return word
    groups.start_dp()
    found = word.ljust(WORD_BYTES, b"\0")
    for group in (groups.tp, groups.pp, groups.dp):
        found = max(_gathered(group, found))
    return found.rstrip(b"\0")


def _gathered(group: Communicator, word: bytes) -> list[bytes]:
    if group.size == 1:
        return [word]
    mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
    return [one.numpy().tobytes() for one in group.gather(mine)]


def encoded(coord: str, error: ProtocolError) -> bytes:
    """What the worker at ``coord`` tells its sisters of a failure, within ``WORD_BYTES``."""
    proof = {"pair": error.pair, "prover": error.prover} if isinstance(error, ProofFailedError) else {}
    texts = zip((error.what, error.hint), _MOST_LETTERS, strict=True)
    what, hint = (text.encode("ascii", "replace").decode()[:most] for text, most in texts)
    return json.dumps({"at": coord, "what": what, "hint": hint, "party": error.party} | proof).encode()


def _decoded(word: bytes) -> ProtocolError:
    """What a sister said. Its party runs the same code; a word that cannot be read is a failure all the same."""
    try:
        fields: dict[str, Any] = json_of(word)
        what, hint, party = f"{fields['at']}: {fields['what']}", str(fields["hint"]), int(fields["party"])
        if "pair" not in fields:
            return ProtocolError(what, hint, party=party)
        found = ProofFailedError(what, hint, pair=tuple(map(int, fields["pair"])), prover=int(fields["prover"]))
        found.party = party
        return found
    except (ValueError, KeyError, TypeError):
        return ProofFailedError("a worker of this party reports that a proof of this step does not hold")
