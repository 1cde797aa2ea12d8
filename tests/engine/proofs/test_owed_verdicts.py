"""A step that opens nothing: its proof takes no round for the verdicts, and nothing is opened before they are heard."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from proof_kit import PROTOCOLS, WHOLE, LyingRuntime, alter, normal

from uvcc_engine.contract.errors import ConfigError, ProofFailedError, ProtocolError
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, share_of, split
from uvcc_engine.mpc.products.arithmetic import mul_protocol
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.settling import VERDICT_BYTES, OwedVerdict
from uvcc_engine.proofs.step_proof import prove_and_owe_protocol, prove_protocol
from uvcc_engine.transcript.formats import kinds

RING = GaloisRing(20)
INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
ALL = PROTOCOLS | WHOLE
Body = Callable[[Runtime, Share, OwedVerdict], Any]


def _owing(
    planes: LocalPlanes, body: Body, name: str = "sign", liar: int = -1, audit_one_in: int = 0, lie: Any = None
) -> list[Any]:
    """What ``body`` gives at each party once a protocol was proved and nobody was told of it."""
    parts = [split(x, 16, random.Random(3).randbytes) for x in INPUTS]

    def stands_by(number: int, data: torch.Tensor) -> None:
        if number == 0:
            alter(data, "random", random.Random(1))

    def course(rt: Runtime) -> Any:
        rt.__class__ = LyingRuntime
        rt.sends, rt.lie = 0, (lie or stands_by) if rt.party == liar else None  # type: ignore[attr-defined]
        rt.ledger = ClaimLedger(everything=name in WHOLE, audit_one_in=audit_one_in)
        found = rt.run(ALL[name](rt, *[share_of(p, rt.party, 16) for p in parts], dealer=1))
        before = rt.rounds
        owed = rt.run(prove_and_owe_protocol(rt, RING))[1]
        assert owed is not None
        rt.rounds -= before
        return body(rt, found, owed)

    return planes.run_three(course)


def _told(found: list[tuple[Runtime, OwedVerdict]], party: int) -> dict[int, bytes]:
    return {rt.party: owed.said for rt, owed in found if rt.party != party}


def _hear(planes: LocalPlanes, found: list[tuple[Runtime, OwedVerdict]], liar: int = -1) -> list[ProtocolError | None]:
    """Everybody hears both others; a liar says that all was well."""
    all_well = {p: bytes([int(q == (p + 2) % 3) for q in range(3)] + [1]) for p in range(3)}

    def body(rt: Runtime) -> ProtocolError | None:
        told = _told(found, rt.party)
        try:
            found[rt.party][1].hear({p: all_well[p] if p == liar else one for p, one in told.items()})
        except ProtocolError as error:
            return error
        return None

    return planes.run_three(body)


@pytest.mark.parametrize("name", ["matmul", "relu", "argmax"])
def test_a_proof_of_a_step_that_opens_nothing_has_six_rounds_at_most_and_none_for_its_verdicts(name: str) -> None:
    def told(rt: Runtime, found: Share, owed: OwedVerdict) -> int:
        return rt.rounds

    def at_once(rt: Runtime) -> int:
        rt.ledger = ClaimLedger(everything=name in WHOLE)
        rt.run(ALL[name](rt, *[share_of(p, rt.party, 16) for p in parts], dealer=1))
        before = rt.rounds
        rt.run(prove_protocol(rt, RING))
        return rt.rounds - before

    parts = [split(x, 16, random.Random(3).randbytes) for x in INPUTS]
    later, now = _owing(LocalPlanes(3), told, name), LocalPlanes(3).run_three(at_once)
    assert all(one <= 6 for one in later)
    assert now == [one + 1 for one in later]


def test_two_rounds_where_nobody_is_audited() -> None:
    assert _owing(LocalPlanes(3), lambda rt, found, owed: rt.rounds, audit_one_in=10**18) == [2] * 3


def test_nothing_is_opened_or_proved_on_before_the_verdicts_are_heard() -> None:
    planes = LocalPlanes(4)

    def body(rt: Runtime, found: Share, owed: OwedVerdict) -> tuple[Runtime, OwedVerdict, Share, list[str]]:
        refused = []
        for steps in (open_ring_protocol(rt, found), prove_protocol(rt, RING)):
            with pytest.raises(ConfigError) as why:
                rt.run(steps)
            refused.append(why.value.what)
        return rt, owed, found, refused

    found = _owing(planes, body)
    for *_, refused in found:
        assert "would be opened before" in refused[0]
        assert "before the verdicts of the one before it were heard" in refused[1]
    assert _hear(planes, [one[:2] for one in found]) == [None] * 3
    opened = planes.run_three(lambda rt: rt.run(open_ring_protocol(rt, found[rt.party][2])))
    assert all(torch.equal(opened[0], one) for one in opened)


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_a_lie_ends_both_honest_parties_with_the_liar_named(liar: int) -> None:
    """The one that judges says so; the other, to whom nothing looks wrong, hears it. The second round follows."""
    planes = LocalPlanes(5)
    found = _owing(planes, lambda rt, found, owed: (rt, owed), liar=liar)
    judge = (liar + 1) % 3
    assert [owed.held for rt, owed in found if rt.party in (judge, (liar + 2) % 3)].count(False) == 1
    assert not found[judge][1].held, "whoever judges the liar signs nothing"
    errors = _hear(planes, found, liar)
    for party in {0, 1, 2} - {liar}:
        error = errors[party]
        assert isinstance(error, ProofFailedError)
        assert liar in error.pair
        assert error.finding is not None
        assert error.finding.named == liar
        ledger = found[party][0].ledger
        assert ledger is not None
        with pytest.raises(ConfigError, match="would be opened before"):
            ledger.check_message(kinds.OPEN, proved=False, opening=True)


def test_the_next_step_s_first_messages_wait_for_no_verdict_and_its_first_receive_does() -> None:
    """So what is told takes no round, and a fault that was found ends the next step before anything came of it."""
    planes = LocalPlanes(6)
    found = _owing(planes, lambda rt, found, owed: (rt, owed, found))
    order: list[list[str]] = [[], [], []]
    for rt in planes.runtimes:
        send = rt.plane.send

        def noted(dst: int, tag: Any, payload: Any, send: Any = send, party: int = rt.party) -> None:
            order[party].append("sent")
            send(dst, tag, payload)

        rt.plane.send = noted  # type: ignore[method-assign]

    def body(rt: Runtime) -> None:
        ledger, owed, x = rt.ledger, found[rt.party][1], found[rt.party][2]
        assert ledger is not None

        def hear() -> None:
            order[rt.party].append("heard")
            owed.hear({p: one.said for p, (_, one, _) in enumerate(found) if p != rt.party})

        ledger.unheard = hear
        rt.begin_epoch(1)
        ledger.everything = False
        rt.run(mul_protocol(rt, x, x))

    planes.run_three(body)
    for one in order:
        assert one.count("heard") == 1
        assert 0 < one.index("heard") <= 2, "each party sends what it can before it hears"


@pytest.mark.parametrize("told", [b"", b"\x01" * (VERDICT_BYTES - 1), b"\x01" * (VERDICT_BYTES + 1)])
def test_a_verdict_of_another_size_names_its_sender(told: bytes) -> None:
    found = _owing(LocalPlanes(7), lambda rt, found, owed: (rt, owed))
    with pytest.raises(ProtocolError, match="bytes for its verdict of step 0") as why:
        found[0][1].hear({1: found[1][1].said, 2: told})
    assert why.value.party == 2


def test_who_says_that_an_honest_proof_failed_is_in_the_pair() -> None:
    planes = LocalPlanes(8)
    found = _owing(planes, lambda rt, found, owed: (rt, owed))

    def body(rt: Runtime) -> ProtocolError | None:
        lie = {0: bytes([0, 0, 2, 1])} if rt.party == 2 else {2: bytes([0, 2, 0, 1])}  # who lies answers as well
        told = _told(found, rt.party) | lie
        try:
            found[rt.party][1].hear(told)
        except ProtocolError as error:
            return error
        return None

    errors = planes.run_three(body)
    for party in (0, 1):
        error = errors[party]
        assert isinstance(error, ProofFailedError)
        assert 2 in error.pair
