"""After a proof that failed: whoever is named lied, whatever it does in the second round; honest parties never are."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from proof_kit import PROTOCOLS, WHOLE, Ending, Message, alter, altered, lies_again, misnamed, normal, run_proved

from uvcc_engine.contract.errors import PeerLostError, ProofFailedError
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlane
from uvcc_engine.mpc.foundation.rounds import Round, exchanged
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs import second_round, settling
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.second_round import SecondRoundFinding
from uvcc_engine.transcript.formats import kinds

INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
ALL = PROTOCOLS | WHOLE
RING = GaloisRing(20)
Lie = Callable[[Message, bytes], bytes]


def _run(name: str, dealer: int = 1, **how: Any) -> Ending:
    build = functools.partial(ALL[name], dealer=dealer)
    return run_proved(build, INPUTS, ring=RING, everything=name in WHOLE, **how)


def _findings(ended: Ending, liar: int) -> dict[int, SecondRoundFinding]:
    """What the honest parties found, which is never that an honest one lied."""
    assert not misnamed(ended, liar)
    errors = {p: e for p, e in enumerate(ended.errors) if p != liar and isinstance(e, ProofFailedError)}
    return {p: cast(SecondRoundFinding, e.finding) for p, e in errors.items()}


def _stands_by(number: int, how: str, seed: int) -> Callable[[int, torch.Tensor], None]:
    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == number:
            alter(data, how, random.Random(seed))

    return lie


def _only(chosen: Message, how: str, seed: int = 0) -> Lie:
    return lambda message, body: altered(body, how, random.Random(seed)) if message == chosen else body


@functools.cache
def _honest(name: str) -> Ending:
    return _run(name)


@pytest.mark.parametrize(
    "name",
    [
        "matmul",
        pytest.param("sign", marks=pytest.mark.ci(__file__)),
        pytest.param("patches", marks=pytest.mark.ci(__file__)),
        "relu",
    ],
)
def test_who_computes_wrongly_and_goes_on_in_good_faith_is_named_by_both_others(name: str) -> None:
    """As on a machine that errs: by its own numbers its statement does not hold, and it says so."""
    inputs = {"patches": (normal(1, 8, 3), normal(2, 3, 4))}.get(name, INPUTS)
    build = functools.partial(ALL[name], dealer=1)
    at = random.Random(name)
    for liar, count in enumerate(run_proved(build, inputs, ring=RING, everything=name in WHOLE).sends):
        lie = _stands_by(at.randrange(count), at.choice(("one", "top", "random")), 3)
        ended = run_proved(build, inputs, ring=RING, everything=name in WHOLE, liar=liar, stands_by=lie)
        found = _findings(ended, liar)
        assert len(found) == 2
        for one in found.values():
            assert (one.named, one.open_to) == (liar, (liar,))
            assert one.why == second_round.CONFESSED
        mine = ended.errors[liar]
        assert isinstance(mine, ProofFailedError)
        assert "this party's own statement does not hold" in mine.what


def test_a_message_of_the_step_that_its_two_ends_describe_differently_leaves_the_pair_and_clears_the_third() -> None:
    """Altered on its way: its sender says that it sent something else. Who of the two lies nobody else can see."""
    ends = []
    for number, message in enumerate(_honest("sign").step):
        if number % 3:
            continue
        ended = _run("sign", lie=_only(message, "one"))
        for sender in message[:2]:  # either of its ends may be the liar
            found = _findings(ended, sender)
            assert all(set(one.open_to) <= {*message[:2]} for one in found.values() if len(one.open_to) == 2)
            third = found.get(3 - message[0] - message[1])
            ends.append(third is not None and third.open_to == tuple(sorted(message[:2])))
    assert sum(ends) >= len(ends) // 2


def test_a_verifier_that_refuses_an_honest_proof_is_named_by_both_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verdict is not that of the numbers which it publishes, as the first verifier sees; the prover knows it."""
    honest = settling.tell_verdicts_protocol
    for judge in range(3):

        def refusing(rt: Runtime, verdicts: list[int], *more: Any, judge: int = judge, release: bool = True) -> Any:
            said = [2 * bool(one) for one in verdicts] if rt.party == judge else verdicts
            return honest(rt, said, *more)

        monkeypatch.setattr(settling, "tell_verdicts_protocol", refusing)
        found = _findings(_run("sign"), judge)
        assert {one.named for one in found.values()} == {judge}
        assert {one.open_to for one in found.values()} == {(judge,)}
        assert {one.why for one in found.values()} == {second_round.JUDGED, second_round.REFUSED}


def test_who_refuses_to_one_party_only_is_found_out_by_it_while_the_other_goes_on() -> None:
    """The one that stops waits for nobody for ever, and does not take the other's silence for a lie."""
    chosen = [m for m in _run("sign", beside=False).proof if m[4] == 4 and m[0] == 2]
    assert len(chosen) == 2
    beside = [m for m in _honest("sign").opening if m[0] == 2]
    for k, told in itertools.product(range(2), (bytes([0, 2, 0, 1]), bytes([0, 1, 0, 2]), b"\xff" * 4)):
        _findings(_run("sign", lie=lambda m, b, k=k, told=told: told if m == chosen[k] else b, beside=False), 2)

        def lie(m: Message, b: bytes, k: int = k, told: bytes = told) -> bytes:
            return told + b[4:] if m == beside[k] else b

        _findings(_run("sign", lie_in_opening=lie), 2)


def _lies(name: str, at: random.Random, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lies of every kind in the step and in its proof: who, and how."""
    honest = _honest(name)
    for number in range(count):
        if number % 3 == 0:
            liar = at.randrange(3)
            how = at.choice(("one", "top", "random", "bit", "swapped", "all"))
            lie = _stands_by(at.randrange(honest.sends[liar]), how, number)
            yield liar, {"liar": liar, "stands_by": lie}
        else:
            message = at.choice(honest.step if number % 3 == 1 else honest.proof)
            yield message[0], {"lie": _only(message, at.choice(("one", "top", "random", "bit")), number)}


@pytest.mark.parametrize("name", [pytest.param("matmul", marks=pytest.mark.ci(__file__)), "sign"])
def test_no_honest_party_is_named_whatever_the_liar_says_in_the_second_round(name: str) -> None:
    """A seeded sample of what ``battery.py`` does with every lie."""
    at = random.Random(f"again {name}")
    two = 0
    for liar, how in _lies(name, at, 9):
        two += len(_findings(_run(name, lie_again=lies_again(liar, at), **how), liar)) == 2
    assert two >= 4


Captured = dict[int, tuple[Runtime, second_round.Dispute]]
"""What each party brings to a second round."""


def _captured(monkeypatch: pytest.MonkeyPatch, **how: Any) -> Captured:
    """What the parties bring to the second round after a lie, so that the round alone can be run again and again."""
    found: Captured = {}
    honest = second_round.second_round_protocol

    def capture(rt: Runtime, dispute: second_round.Dispute) -> Any:
        found[rt.party] = rt, dispute
        return (yield from honest(rt, dispute))

    with monkeypatch.context() as patch:
        patch.setattr(settling, "second_round_protocol", capture)
        _run("sign", **how)
    return found


def _settled(captured: Captured, liar: int, lie: Callable[[int, torch.Tensor], torch.Tensor | None]) -> None:
    """The second round with what ``lie`` makes of all that the liar says in it; no honest party names an honest one."""
    courses = {p: second_round.second_round_protocol(*both) for p, both in captured.items()}
    answers: dict[int, Any] = dict.fromkeys(courses)
    for _ in range(2):
        rounds = {p: course.send(answers[p]) for p, course in courses.items()}
        for p, asked in rounds.items():
            answers[p] = []
            for peer, _, dtype, shape in asked.wants:
                (data,) = (data for to, _, data in rounds[peer].sends if to == p)
                got = lie(p, data.clone()) if peer == liar else data
                fits = got is not None and (got.dtype, tuple(got.shape)) == (dtype, shape)
                answers[p].append(got if fits else None)
    for p, course in courses.items():
        with pytest.raises(StopIteration) as end:
            course.send(answers[p])
        finding = end.value.value
        assert p == liar or all(liar in one for one in (finding.own, finding.suspects, finding.open_to))


def _whatever(at: random.Random) -> Callable[[int, torch.Tensor], torch.Tensor | None]:
    """Another lie for each message: some words altered, exchanged or all of them random; any byte; nothing at all."""

    def lie(to: int, data: torch.Tensor) -> torch.Tensor | None:
        how = at.choice(("true", "words", "noise", "exchanged", "silent"))
        if how == "silent" and at.random() < 0.8:
            return data
        if data.dtype == torch.uint8:
            return data if how == "true" else torch.tensor([at.choice((*range(8), 255))], dtype=torch.uint8)
        if how == "noise":
            return torch.tensor([at.randrange(-(1 << 63), 1 << 63) for _ in range(len(data))])
        for _ in range(at.randrange(1, 4) if how in ("words", "exchanged") else 0):
            i, j = at.randrange(len(data)), at.randrange(len(data))
            if how == "exchanged":
                data[[i, j]] = data[[j, i]]
            else:
                data[i] ^= at.choice((1, 1 << 19, at.randrange(1 << 62)))
        return None if how == "silent" else data

    return lie


TIMES = 4  # in a suite; thousands by hand


def test_no_answer_in_a_second_round_makes_an_honest_party_name_an_honest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round alone, again and again: after a lie that the liar stands by, one on its way, and none at all."""
    at = random.Random(11)
    honest = settling.tell_verdicts_protocol

    def refused(rt: Runtime, verdicts: list[int], *more: Any, release: bool) -> Any:
        return honest(rt, [2 * bool(v) for v in verdicts] if rt.party == 0 else verdicts, *more)

    cases: list[tuple[int, Captured]] = []
    for liar in range(3):
        cases.append((liar, _captured(monkeypatch, liar=liar, stands_by=_stands_by(at.randrange(6), "one", 1))))
        messages = _honest("sign").step + [m for m in _honest("sign").proof if m[4] > 32]
        chosen = at.choice([m for m in messages if m[0] == liar])
        cases.append((liar, _captured(monkeypatch, lie=_only(chosen, "one"))))
    monkeypatch.setattr(settling, "tell_verdicts_protocol", refused)
    cases.append((0, _captured(monkeypatch)))
    for liar, captured in cases:
        assert len(captured) == 3
        with torch.inference_mode():
            for _ in range(TIMES):
                _settled(captured, liar, _whatever(at))


def test_a_party_that_keeps_silent_is_said_to_and_not_named_for_it() -> None:
    def nothing(message: Message, body: bytes) -> bytes:
        return body if message[0] != 2 or message[3] != kinds.FINDING else b"??"

    ended = _run("sign", liar=2, stands_by=_stands_by(1, "one", 0), lie_again=nothing)
    found = _findings(ended, 2)
    assert sorted(found) == [0, 1]
    for one in found.values():
        assert one.named == -1
        assert one.silent == (2,)
        assert "party 2 did not answer" in one.sentence


def test_a_peer_that_can_no_longer_be_reached_does_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LocalPlane.send

    def send(self: LocalPlane, dst: int, tag: Tag, payload: Any) -> None:
        if tag.kind == kinds.FINDING and (self.party, dst) == (0, 2):
            raise PeerLostError("party 2 is silent", party=2)
        honest(self, dst, tag, payload)

    monkeypatch.setattr(LocalPlane, "send", send)
    ended = _run("sign", liar=2, stands_by=_stands_by(1, "one", 0))
    found = _findings(ended, 2)
    assert [found[p].named for p in (0, 1)] == [2, 2]
    mine = ended.errors[2]
    assert isinstance(mine, ProofFailedError)
    assert "party 0 did not answer" in mine.what


def test_nothing_runs_and_nothing_is_sent_where_no_proof_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> object:
        raise AssertionError("a second round without a failure")

    monkeypatch.setattr("uvcc_engine.proofs.settling.second_round_protocol", never)
    assert _honest("relu").errors == [None] * 3
    assert _run("sign").second == []


def test_a_second_round_has_two_rounds_whose_sizes_follow_from_the_claims_alone() -> None:
    ended = [_run("sign", liar=liar, stands_by=_stands_by(1, "one", 0)) for liar in range(3)]
    sizes = [sorted((m[0], m[1], m[2], m[4]) for m in one.second) for one in ended]
    for one in sizes:
        assert len(one) == 12
        assert sorted({size for *_, size in one})[0] == 1
    assert [(a, b, size) for a, b, _, size in sizes[0]] == [(a, b, size) for a, b, _, size in sizes[1]]


def test_copies_agree_only_where_everything_is_proved_by_one_worker_over_committed_inputs() -> None:
    assert ClaimLedger(everything=True).copies_agree
    for less in ({"everything": False}, {"sisters": True}, {"committed": False}):
        assert not ClaimLedger(**{"everything": True, **less}).copies_agree


def test_rounds_are_handed_over_in_process_in_the_order_in_which_they_were_sent() -> None:
    def course(me: int, other: int) -> Any:
        message = Round()
        for k in range(2):
            message.send(other, kinds.PROOF, torch.tensor([10 * me + k]))
            message.want(other, kinds.PROOF, torch.int64, 1)
        got = yield message
        return [int(x) for x in got]

    assert exchanged({0: course(0, 1), 1: course(1, 0)}) == {0: [10, 11], 1: [0, 1]}
