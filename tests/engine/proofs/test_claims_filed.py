"""That a round is called proved is nobody's proof: a protocol files claims of what it sends so, or is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from proof_kit import LEARNED, PROTOCOLS, WHOLE, judge, normal, run_proved

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons import proved_bits, proved_numbers
from uvcc_engine.mpc.foundation.bilinear_claims import NUMBERS
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.mpc.products.arithmetic import reshare_protocol
from uvcc_engine.proofs import folding
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.transcript.formats import kinds

INPUTS = (normal(1, 4, 4), normal(2, 4, 4))


def run_whole(build: Callable[..., MpcProtocol[Share]]) -> Any:
    return run_proved(functools.partial(build, dealer=0), INPUTS, everything=True)


def _says_so(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from reshare_protocol(rt, x.first, 16, proved=True))


def _says_so_beside_a_claim(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Claims of one product, and several times as much sent as if it covered them, too."""
    found = yield from arithmetic.mul_protocol(rt, x, y, dealer=dealer)
    for _ in range(6):
        yield from reshare_protocol(rt, x.first, 16, proved=True)
    return found


def _opens_as_if_proved(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    """What opens something calls its round an opening, and waits for the proofs before it."""
    message = Round(proved=True)
    message.send(rt.next, kinds.OPEN, x.first)
    message.want(rt.prev, kinds.OPEN, torch.int64, *x.shape)
    yield message
    return x


@pytest.mark.parametrize("build", [_says_so, _says_so_beside_a_claim, _opens_as_if_proved])
def test_a_protocol_that_only_says_that_it_is_proved_is_refused(build: Callable[..., MpcProtocol[Share]]) -> None:
    """Its sender could have sent anything: no receiver had noted an equation of it."""
    with pytest.raises(ConfigError, match=r"\d+ numbers were sent as proved, and claims of \d+ cover them"):
        run_whole(build)


def test_a_comparison_whose_claims_are_forgotten_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect is planted: the messages are as they were, and nobody proves them."""
    for module in (proved_bits, proved_numbers):
        monkeypatch.setattr(module, "claimed", lambda *_: None)
    with pytest.raises(ConfigError, match="numbers were sent as proved, and claims of 0 cover them"):
        run_whole(WHOLE["sign"])


def _says_what_nobody_multiplies(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Each tells the party after it what both hold already, plus one; the claim says that it is the same."""
    message = Round(proved=True)
    message.send(rt.next, kinds.RESHARE, x.second + 1)
    message.want(rt.prev, kinds.RESHARE, torch.int64, *x.shape)
    (told,) = yield message
    for q in range(3):
        held = {q: x.second, (q + 1) % 3: x.first}.get(rt.party)
        after = (None, -told) if rt.party == (q + 1) % 3 else (None, None)
        proved_bits.claimed(rt, q, NUMBERS, 0, x.shape, (None, held), after)
    return x


def test_an_equation_without_a_product_is_refused() -> None:
    """Its proof would have no entry and hold whatever was sent, with nothing else of its prover in the step."""
    with pytest.raises(ConfigError, match="an equation without a product has no proof"):
        run_whole(_says_what_nobody_multiplies)


def test_a_product_that_adds_up_nothing_is_refused() -> None:
    """What is sent of it are masks alone, and no entry of a proof has them."""
    inputs = (normal(1, 3, 0), normal(2, 0, 3))
    with pytest.raises(ConfigError, match="has no proof"):
        run_proved(functools.partial(PROTOCOLS["matmul"], dealer=0), inputs)


@pytest.mark.parametrize("great", [1, 1 << 19], ids=["ternary", "plain"])
def test_what_is_of_no_number_is_left_out_and_hides_no_lie(great: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "GREAT", great)

    def build(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
        nothing = x.index(slice(0, 0))
        yield from arithmetic.mul_protocol(rt, nothing, nothing, dealer=dealer)
        found = yield from arithmetic.mul_protocol(rt, x, y, dealer=dealer)
        yield from arithmetic.mul_protocol(rt, nothing, nothing, dealer=dealer)
        return found

    def lie(sent: int, data: torch.Tensor) -> None:
        if data.numel():
            data[-1] += 1

    how: dict[str, Any] = {"everything": True, "ring": GaloisRing(20)}
    honest = run_proved(functools.partial(build, dealer=0), INPUTS, **how)
    assert honest.errors == [None] * 3
    lied = run_proved(functools.partial(build, dealer=0), INPUTS, liar=1, stands_by=lie, **how)
    assert lied.opened == [None] * 3


@pytest.mark.parametrize("name", sorted({**PROTOCOLS, **LEARNED}.keys() - {"public layer"}))
def test_what_every_protocol_sends_lies_well_within_what_it_claims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, int]] = []
    honest = ClaimLedger.check_promises

    def look(ledger: ClaimLedger, promised: int, filed: int) -> None:
        found.append((promised, filed))
        honest(ledger, promised, filed)

    monkeypatch.setattr(ClaimLedger, "check_promises", look)
    run_whole({**PROTOCOLS, **LEARNED}[name])
    assert max(promised for promised, _ in found) > 0
    assert all(promised <= 1.5 * filed for promised, filed in found)


def test_a_lie_in_any_message_that_makes_numbers_of_bits_is_found() -> None:
    """Each of them, by each party: of one that no claim is about, other claims may still be as many as it needs."""
    counts = run_proved(functools.partial(WHOLE["sign"], dealer=0), INPUTS, everything=True).sends
    for liar, count in enumerate(counts):
        for number in range(count):

            def lie(sent: int, data: torch.Tensor, number: int = number) -> None:
                if sent == number:
                    data.view(-1)[0] += 1

            lied = run_proved(
                functools.partial(WHOLE["sign"], dealer=0), INPUTS, everything=True, liar=liar, stands_by=lie
            )
            judge(lied, liar)
