"""What is opened beside the verdicts of a proof: by all or by nobody, whoever lies and wherever."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from proof_kit import PROTOCOLS, WHOLE, Ending, Message, alter, altered, normal, run_proved

from uvcc_engine.contract.errors import ConfigError, ProofFailedError, ProtocolError
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import reconstruct, share_of, split
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.proofs import settling, verdicts
from uvcc_engine.proofs.bit_statement import schedule_of_words
from uvcc_engine.proofs.folding import Sizes, schedule
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.held_opening import HeldOpening
from uvcc_engine.proofs.step_proof import NOTHING_PROVED, prove_and_open_protocol, prove_protocol
from uvcc_engine.transcript.formats import kinds

RING = GaloisRing(20)
INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
VERDICT = 4  # bytes


def _run(name: str = "sign", **how: Any) -> Ending:
    build = functools.partial((PROTOCOLS | WHOLE)[name], dealer=1)
    return run_proved(build, INPUTS, ring=RING, everything=name in WHOLE, **how)


@functools.cache
def _honest(name: str = "sign") -> Ending:
    return _run(name)


def _rounds(name: str, *, opens: bool, audit_one_in: int = 0) -> int:
    """How many rounds there are from the end of a protocol until its result is opened, or until it may be."""
    planes = LocalPlanes(3)
    parts = [split(x, 16, random.Random(3).randbytes) for x in INPUTS]

    def body(rt: Runtime) -> int:
        rt.ledger = ClaimLedger(everything=True, audit_one_in=audit_one_in)
        found = rt.run((PROTOCOLS | WHOLE)[name](rt, *[share_of(p, rt.party, 16) for p in parts], dealer=1))
        before = rt.rounds
        rt.run(prove_and_open_protocol(rt, [found], RING) if opens else prove_protocol(rt, RING))
        return rt.rounds - before

    counts = set(planes.run_three(body))
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize("name", ["matmul", "relu", "argmax"])
def test_a_proof_has_six_rounds_before_what_is_opened_and_its_verdicts_have_none_of_their_own(name: str) -> None:
    assert _rounds(name, opens=True) <= 6 + 1
    assert _rounds(name, opens=False) == _rounds(name, opens=True), "the verdicts alone take the round of the opening"


def test_a_step_takes_more_than_three_folds_only_where_it_has_some_200_000_relus() -> None:
    """So its proof has six rounds up to there: two for each fold but the last, and two. Of each ReLU a prover has two
    numbers and six words of bits."""
    for relus in (1, 10, 10**2, 10**3, 10**4, 10**5, 190_000):
        for elements in (0, 1, 512):
            assert len(schedule(Sizes(((2, relus),), elements))) <= 3
        assert len(schedule_of_words(6 * relus)) <= 3
    assert len(schedule(Sizes(((2, 10**6),)))) == len(schedule_of_words(6 * 10**6)) == 4


def test_a_step_that_audits_nobody_has_two_rounds_before_what_it_opens() -> None:
    assert _rounds("matmul", opens=True, audit_one_in=10**18) == 2 + 1


def test_what_is_opened_beside_the_verdicts_is_what_is_opened_after_them() -> None:
    for name in ("matmul", "relu"):
        beside, after = _run(name), _run(name, beside=False)
        assert beside.errors == after.errors == [None] * 3
        for one, other in zip(beside.opened, after.opened, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)


def test_several_values_of_any_shapes_are_opened_in_one_round() -> None:
    planes = LocalPlanes(5)
    values = [normal(1, 2, 3), normal(2, 1).reshape(()), normal(3, 0, 2)]
    parts = [split(x, 16, random.Random(k).randbytes) for k, x in enumerate(values)]

    def body(rt: Runtime) -> list[torch.Tensor]:
        rt.ledger = ClaimLedger()
        shares = [share_of(p, rt.party, 16) for p in parts]
        rt.run(arithmetic.mul_protocol(rt, shares[0], shares[0]))
        return rt.run(prove_and_open_protocol(rt, shares, RING))[1]

    for opened in planes.run_three(body):
        assert [tuple(one.shape) for one in opened] == [(2, 3), (), (0, 2)]
        assert all(torch.equal(one / 2.0**16, x) for one, x in zip(opened, values, strict=True))


def test_without_a_claim_the_values_are_opened_and_nothing_is_said_to_be_proved() -> None:
    planes, x = LocalPlanes(6), normal(4, 3)
    parts = split(x, 16, random.Random(6).randbytes)

    def body(rt: Runtime) -> tuple[bool, bool]:
        rt.ledger = ClaimLedger(everything=True)
        proved, (opened,) = rt.run(prove_and_open_protocol(rt, [share_of(parts, rt.party, 16)]))
        return proved is NOTHING_PROVED, torch.equal(opened / 2.0**16, x)

    assert planes.run_three(body) == [(True, True)] * 3


def _half(message: Message, how: str, seed: int, liar: int) -> Any:
    """Alters one half, or the hash of the other one, of what the liar sends to one peer."""

    def lie(seen: Message, body: bytes) -> bytes:
        if seen != message:
            return body
        at, end = (VERDICT, len(body) - 32) if how == "half" else (len(body) - 32, len(body))
        return body[:at] + altered(body[at:end], "random", random.Random(seed)) + body[end:]

    assert message[0] == liar
    return lie


@pytest.mark.parametrize("how", ["half", "hash"])
def test_an_altered_half_or_hash_is_found_by_whoever_gets_it(how: str) -> None:
    assert len(_honest().opening) == 6
    for seed, message in enumerate(_honest().opening):
        liar, told = message[:2]
        found = _run(lie_in_opening=_half(message, how, seed, liar))
        error = found.errors[told]
        assert isinstance(error, ProtocolError)
        assert "disagree on a share opened" in error.what
        assert f"parties {(told + 2) % 3} and {(told + 1) % 3}" in error.what
        assert found.opened[told] is None


def _seen(**how: Any) -> tuple[Ending, dict[tuple[int, int], bytes]]:
    """What everybody is sent in the round of the opening, by sender and receiver."""
    seen: dict[tuple[int, int], bytes] = {}

    def note(message: Message, body: bytes) -> bytes:
        seen[message[:2]] = body
        return body

    return _run(lie_in_opening=note, **how), seen


def _released(seen: dict[tuple[int, int], bytes], party: int) -> list[bool]:
    """Whether the party before and the one after released their halves to this one."""
    both = [seen[(party + 2) % 3, party], seen[(party + 1) % 3, party]]
    return [any(body[VERDICT:]) for body in both]


def test_whoever_lies_in_a_step_gets_no_component_though_one_verifier_releases_its_half() -> None:
    """The one that judges withholds its own; the other one has not heard the verdict when it sends."""
    for liar in range(3):

        def lie(sent: int, data: torch.Tensor) -> None:
            if sent == 0:
                alter(data, "random", random.Random(1))

        found, seen = _seen(liar=liar, stands_by=lie)
        assert found.opened == [None] * 3
        assert _released(seen, liar) == [True, False]
        honest = [p for p in range(3) if p != liar]
        assert all(isinstance(found.errors[p], ProofFailedError) for p in honest)
        assert not all(_released(seen, (liar + 2) % 3)), "nor does the honest party that has yet to hear of it"


def test_a_verifier_that_spoils_an_honest_proof_gets_no_component_either() -> None:
    """What it says to the one that judges, in the last round of the proof: the prover goes on, and it is not enough."""
    spoilt = 0
    for liar in range(3):
        judge, prover = (liar + 2) % 3, (liar + 1) % 3
        last = [m for m in _honest().proof if m[:2] == (liar, judge) and m[3] == kinds.PROOF][-1]

        def lie(message: Message, body: bytes, last: Message = last) -> bytes:
            return altered(body, "random", random.Random(2)) if message == last else body

        found, seen = _seen(lie=lie)
        assert found.opened == [None] * 3
        assert isinstance(found.errors[judge], ProofFailedError)
        assert liar in found.errors[judge].pair
        assert sum(_released(seen, liar)) == 1
        spoilt += any(seen[prover, liar][VERDICT:])
    assert spoilt == 3


def test_halves_that_are_released_anyway_would_open_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail."""
    for module in (verdicts, settling):
        monkeypatch.setattr(module, "found_true", lambda *args: True)

    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == 0:
            alter(data, "random", random.Random(1))

    found, seen = _seen(liar=1, stands_by=lie)
    assert found.opened == [None] * 3
    assert _released(seen, 1) == [True, True]
    words = [torch.frombuffer(bytearray(seen[src, 1][VERDICT:-32]), dtype=torch.int64) for src in (0, 2)]
    assert bool((words[0] - words[1])[:-4].any())


def test_a_refusal_is_no_opening_to_the_ledger_and_a_release_before_the_proof_is_refused() -> None:
    planes = LocalPlanes(7)
    parts = split(normal(1, 2, 2), 16, random.Random(7).randbytes)
    for sisters in (False, True):

        def body(rt: Runtime, sisters: bool = sisters) -> str:
            rt.ledger = ClaimLedger(everything=True, sisters=sisters)
            x = share_of(parts, rt.party, 16)
            rt.ledger.hold_openings()  # as from the beginning of a proof on
            opening = HeldOpening(rt, [x])
            try:
                rt.run(verdicts.tell_verdicts_protocol(rt, [int(q == rt.prev) for q in range(3)], True, opening))
            except ConfigError as error:
                return error.what
            return ""

        assert all("would be opened before" in what for what in planes.run_three(body))


def test_halves_are_under_masks_that_serve_nothing_else() -> None:
    """The same values opened twice in a step: no word of any half is the same, and each time the right value comes."""
    planes, x = LocalPlanes(8), normal(2, 5)
    parts = split(x, 16, random.Random(8).randbytes)

    def body(rt: Runtime) -> list[torch.Tensor]:
        return [torch.cat([*opening.masked, *opening.masks]) for opening in _two(rt)]

    def _two(rt: Runtime) -> list[HeldOpening]:
        return [HeldOpening(rt, [share_of(parts, rt.party, 16)]) for _ in range(2)]

    for one, other in planes.run_three(body):
        assert not set(one.tolist()) & set(other.tolist())
    assert torch.equal(reconstruct([share_of(parts, p, 16) for p in range(3)]), x)
