"""Products are proved before they are opened: honest runs pass, no altered message of a step or its proof does."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from proof_kit import PROTOCOLS, WHOLE, Ending, Message, alter, altered, judge, normal, run_proved

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.contract.job.proof_mode import PRODUCTS, PROOFS, Proving
from uvcc_engine.mpc.comparisons import boolean, selection
from uvcc_engine.mpc.foundation.claim_ledger import LINEAR, ClaimLedger, ProductNotes
from uvcc_engine.mpc.foundation.local import LocalPlane, LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs import folding, statement
from uvcc_engine.proofs.algebra import Algebra
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_statement import schedule_of_words
from uvcc_engine.proofs.challenges import SEED_WORDS, PublicCoins
from uvcc_engine.proofs.folding import BIT_DEGREE, DEGREE, LEAST_BITS, Fold, Sizes, schedule, soundness_bits
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.vectors import Arithmetic, TernaryBlock
from uvcc_engine.transcript.formats import kinds

INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
SHAPED = {
    "chosen": (normal(1, 3, 3), normal(2, 1, 3)),
    "patches": (normal(1, 8, 3), normal(2, 3, 4)),
    "batched": (normal(1, 2, 2, 3, 4), normal(2, 2, 2, 4, 3)),
}
ALL = PROTOCOLS | WHOLE
KERNELS = CpuKernels()
ERRORS = ("one", "top", "random", "bit", "swapped", "all")
RING = GaloisRing(20)  # misses one lie in thousands, and every case here has fixed seeds


def _run(name: str, dealer: int, ring: GaloisRing | None = RING, **how: Any) -> Ending:
    build = functools.partial(ALL[name], dealer=dealer)
    return run_proved(build, SHAPED.get(name, INPUTS), ring=ring, everything=name in WHOLE, **how)


@pytest.mark.parametrize("name", ALL)
def test_an_honest_step_is_proved_and_opens_the_same_value_everywhere(name: str) -> None:
    found = _run(name, len(name) % 3, ring=None)
    assert found.errors == [None] * 3
    assert all(p is not None and (1 <= p.claims <= 8 or (name in WHOLE and p.claims > 20)) for p in found.proved)
    assert _same(found)


def _same(found: Ending) -> bool:
    first = found.opened[0]
    return first is not None and all(o is not None and torch.equal(first, o) for o in found.opened)


def test_proved_products_are_right() -> None:
    x, y = INPUTS
    opened = _run("matmul", 2).opened[0]
    assert opened is not None
    assert (opened / 2.0**16 - x @ y).abs().max() <= 1.5 * 2.0**-16


def _standing_by(name: str, dealer: int, liar: int, number: int, how: str, seed: int, **more: Any) -> Ending:
    """A run in which a party alters what it sends, and computes on with it: nothing else would notice."""
    at = random.Random(seed)

    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == number:
            alter(data, how, at)

    return _run(name, dealer, liar=liar, stands_by=lie, seed=seed, **more)


def _lies(name: str, dealer: int, per_message: int) -> Iterator[tuple[int, int, str, int]]:
    """(liar, number of what it sends, how, seed) for everything that anybody sends in a step."""
    at = random.Random(f"{name} {dealer}")
    for liar, count in enumerate(_run(name, dealer).sends):
        for number in range(count):
            for how in at.sample(ERRORS, per_message):
                yield liar, number, how, at.randrange(1 << 16)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 or value == "argmax" else ())
        for n, value in enumerate(ALL)
    ],
)
def test_no_party_gets_away_with_anything_that_it_sends_in_a_step(name: str) -> None:
    """A seeded sample of what ``battery.py`` does whole."""
    dealer = len(name) % 3
    every = list(_lies(name, dealer, 1))
    for liar, number, how, seed in random.Random(name).sample(every, min(len(every), 12)):
        judge(_standing_by(name, dealer, liar, number, how, seed), liar)


def test_slices_of_one_product_are_proved_with_one_vector_and_lies_in_any_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large product goes through the rounds in slices of its rows, whose right factor is weighed once."""
    monkeypatch.setattr(arithmetic, "CHUNK", 1)
    inputs, drawn = (normal(1, 192, 2), normal(2, 2, 2)), list[int]()
    honest_draw = statement.SharedColumns

    def counted(columns: torch.Tensor) -> object:
        drawn.append(len(columns))
        return honest_draw(columns)

    monkeypatch.setattr(statement, "SharedColumns", counted)
    honest = run_proved(arithmetic.matmul_protocol, inputs, ring=RING)
    assert honest.errors == [None] * 3
    assert honest.opened[0] is not None
    assert (honest.opened[0] / 2.0**16 - inputs[0] @ inputs[1]).abs().max() <= 1.5 * 2.0**-16
    assert drawn == [2] * 9  # three provers at three parties, not once for each of the three slices
    for liar, count in enumerate(honest.sends):
        for number in random.Random(liar).sample(range(count), 3):
            at = random.Random(number)

            def lie(sent: int, data: torch.Tensor, number: int = number, at: random.Random = at) -> None:
                if sent == number:
                    alter(data, "random", at)

            judge(run_proved(arithmetic.matmul_protocol, inputs, ring=RING, liar=liar, stands_by=lie), liar)


@pytest.mark.parametrize("name", ["chosen", "argmax", "learned"])
def test_a_step_of_many_numbers_is_folded_as_bits_are_and_lies_in_it_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From half a million entries on; the first fold then leaves the places' weights to the verifiers, and what comes
    of products of matrices has coefficients of its own behind those."""
    monkeypatch.setattr(folding, "GREAT", 0)
    folds: list[Fold] = []
    honest_gram = TernaryBlock.gram

    def gram(block: TernaryBlock, at: Arithmetic, fold: Fold) -> torch.Tensor:
        folds.append(fold)
        return honest_gram(block, at, fold)

    monkeypatch.setattr(TernaryBlock, "gram", gram)
    build = _learned if name == "learned" else functools.partial(ALL[name], dealer=1)
    run = functools.partial(
        run_proved, build, SHAPED.get(name, INPUTS), ring=RING, everything=name in WHOLE or name == "learned"
    )
    found = run()
    assert found.errors == [None] * 3
    assert _same(found)
    assert {one.ternary for one in folds} == {True}
    assert {bool(one.slots) for one in folds} == {name == "learned"}
    at = random.Random(name)
    every = [(liar, number) for liar, count in enumerate(found.sends) for number in range(count)]
    for liar, number in at.sample(every, min(len(every), 10)):
        how = at.choice(ERRORS)

        def lie(sent: int, data: torch.Tensor, number: int = number, how: str = how) -> None:
            if sent == number:
                alter(data, how, at)

        judge(run(liar=liar, stands_by=lie, seed=number), liar)


def _learned(rt: Runtime, x: Share, y: Share) -> MpcProtocol[Share]:
    """A product of matrices and one of what comes of it, entry by entry."""
    z = yield from arithmetic.matmul_protocol(rt, x, y)
    return (yield from arithmetic.mul_protocol(rt, z, z))


@pytest.mark.parametrize("name", ["matmul", "chosen", "sign"])
def test_the_same_lies_go_through_without_the_proof(name: str) -> None:
    """So the tests of this file can fail: nothing else notices such a lie, and everybody opens the same wrong value."""
    right = _run(name, 2).opened[0]
    assert right is not None
    through = 0
    for liar, number, _, seed in _lies(name, 2, 1):
        found = _standing_by(name, 2, liar, number, "top", seed, prove=False)
        shifted = found.opened[0]
        through += _same(found) and shifted is not None and not torch.equal(shifted, _honest(name, seed))
    assert through >= 3


def _honest(name: str, seed: int) -> torch.Tensor:
    opened = _run(name, 2, prove=False, seed=seed).opened[0]
    assert opened is not None
    return opened


def _on_its_way(name: str, dealer: int, chosen: Message, how: str, seed: int) -> Ending:
    """A run in which one message arrives altered."""
    at = random.Random(seed)
    return _run(name, dealer, lie=lambda message, body: altered(body, how, at) if message == chosen else body)


def test_two_peers_that_are_told_different_numbers_notice() -> None:
    """The dealer's masked value to one of the online parties only, and every other message of a step likewise."""
    at = random.Random(8)
    for number, message in enumerate(_run("matmul", 1).step):
        judge(_on_its_way("matmul", 1, message, at.choice(ERRORS[:5]), number), message[0])


@pytest.mark.parametrize("name", ["matmul", "sign"])
def test_messages_of_the_proof_itself_are_covered(name: str) -> None:
    honest, at = _run(name, 1), random.Random(3)
    for number, message in enumerate(at.sample(honest.proof, 8)):
        found = _on_its_way(name, 1, message, at.choice(ERRORS[:4]), number)
        assert any(isinstance(found.errors[p], ProtocolError) for p in range(3) if p != message[0])


def test_a_proof_of_a_wrong_length_is_refused_by_whose_it_is() -> None:
    chosen = next(one for one in _run("matmul", 1).proof if one[3] == kinds.PROOF)
    found = _run("matmul", 1, lie=lambda message, body: body[:-8] if message == chosen else body)
    refused = found.errors[chosen[1]]
    assert isinstance(refused, ProtocolError)
    assert refused.party == chosen[0]
    assert f"party {chosen[0]} sent {chosen[4] - 8} bytes" in refused.what
    assert found.opened == [None] * 3


def test_a_coin_out_of_range_is_refused_by_whose_it_is() -> None:
    """A challenge for numbers has as many bits as the ring's degree, here 20."""
    chosen = next(one for one in _run("elementwise", 1).proof if one[3] == kinds.COIN and one[4] <= 16)
    found = _run("elementwise", 1, lie=lambda message, body: b"\xff" * len(body) if message == chosen else body)
    refused = found.errors[chosen[1]]
    assert isinstance(refused, ProtocolError)
    assert refused.party == chosen[0]
    assert f"the coin of party {chosen[0]} is -1, beyond 20 bits" in refused.what
    assert found.opened == [None] * 3


def test_a_proof_for_another_epoch_is_refused_by_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, done = LocalPlane.send, []

    def send(self: LocalPlane, dst: int, tag: Tag, payload: Any) -> None:
        if self.party == 1 and tag.kind == kinds.PROOF and not done:
            done.append(dst)
            tag = tag._replace(epoch=tag.epoch + 1)
        honest(self, dst, tag, payload)

    monkeypatch.setattr(LocalPlane, "send", send)
    found = _run("matmul", 1)
    refused = found.errors[done[0]]
    assert isinstance(refused, ProtocolError)
    assert refused.party == 1
    assert "party 1 sent Tag(epoch=1" in refused.what
    assert found.opened == [None] * 3


def test_a_small_ring_misses_lies_as_rarely_as_computed() -> None:
    """The check of soundness: with challenges of 6 bits lies do pass, but no more often than the bound says."""
    ring, tries = GaloisRing(6), 24
    passed = sum(_standing_by("chosen", 0, 1, 0, "top", seed, ring=ring).opened != [None] * 3 for seed in range(tries))
    bound = 2.0 ** -soundness_bits(ring, schedule(Sizes(((2, 9),))))
    assert bound < 0.7
    assert 0 < passed <= bound * tries


@pytest.mark.ci("tests/engine/proofs/test_soundness.py")
def test_a_small_field_misses_lies_about_bits_as_rarely_as_computed() -> None:
    """The same for bits, in the field of 64 elements: the dealer's bits of ``u``, of which one is false. The first fold
    adds nothing to what this liar escapes by: it is constant where the target alone is false."""
    tries = 75
    passed = sum(_standing_by("sign", 0, 0, 0, "bit", seed, bit_degree=6).opened != [None] * 3 for seed in range(tries))
    bound = 2.0 ** -soundness_bits(BinaryField(6, KERNELS), [Fold(1)])  # the weighing and the end alone
    assert 0.09 < bound < 0.1
    assert 0 < passed <= bound * tries


def test_the_field_of_bits_gives_far_more_than_forty_bits() -> None:
    for words in (1, 10**3, 10**6, 10**9):
        assert soundness_bits(BinaryField(BIT_DEGREE, KERNELS), schedule_of_words(words)) >= 46
    assert schedule_of_words(0) == []


def test_a_ledger_of_everything_lets_nothing_go_that_no_claim_covers() -> None:
    planes = LocalPlanes(1)
    rt = planes.runtimes[0]
    rt.ledger = ClaimLedger(everything=True)
    x = arithmetic.public(rt, torch.ones(3), f=16)
    with pytest.raises(ConfigError, match="no proof"):
        rt.run(selection.select_protocol(rt, boolean.PairBits(2, torch.Size((3,)), torch.zeros(1).long()), x))
    with pytest.raises(ConfigError, match="no proof"):
        rt.run(arithmetic.reshare_protocol(rt, x.first, 16))
    rt.ledger.file(ProductNotes(LINEAR, x, None, 1, 2, x.first, x.first, x.first))
    with pytest.raises(ConfigError, match="opened before 1 claims"):
        rt.run(open_ring_protocol(rt, x))
    assert not any(planes.wire.main[0, p].qsize() for p in (1, 2))


def test_the_degree_gives_forty_bits_for_every_length() -> None:
    for numbers, elements in ((0, 1), (10, 0), (10**5, 10**3), (10**7, 10**6), (10**9, 10**9)):
        folds = schedule(Sizes(((2, numbers), (1, numbers)), elements))
        assert soundness_bits(GaloisRing(DEGREE), folds) >= LEAST_BITS
    assert soundness_bits(GaloisRing(31), schedule(Sizes(((1, 10**5),)))) < LEAST_BITS
    assert schedule(Sizes(())) == []


def test_the_errors_of_a_prover_s_two_proofs_add_up_to_less_than_what_is_printed() -> None:
    """One party of three lies at most, so one prover's proof of numbers and its proof of bits can be false."""
    assert LEAST_BITS == 40
    assert all("at most 2^-40 a step" in Proving.of(mode).sentences[0] for mode in (PRODUCTS, PROOFS))
    for count in (1, 10**3, 10**6, 10**9):
        numbers = schedule(Sizes(((2, count), (1, count)), count))
        ring = 2.0 ** -soundness_bits(GaloisRing(DEGREE), numbers)
        field = 2.0 ** -soundness_bits(BinaryField(BIT_DEGREE, KERNELS), schedule_of_words(3 * count))
        assert ring + field <= 2.0**-40


def _escapes(error_weight: Callable[[PublicCoins], torch.Tensor], algebra: Algebra, tries: int) -> int:
    """How often an error weighs nothing, over the coins of so many seeds."""
    at = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**63), 2**63 - 1, (tries, SEED_WORDS), generator=at)
    return sum(not bool(error_weight(PublicCoins(algebra, seed, b"escapes")).any()) for seed in seeds)


def test_weights_of_a_small_field_and_a_small_ring_miss_errors_as_rarely_as_computed() -> None:
    """A false equation weighs nothing with a chance of at most 2 / 2^7, and does so now and then; of bits 3 / 2^7,
    because 64 of them are several elements of so small a field."""
    tries, field, ring = 600, BinaryField(7, KERNELS), GaloisRing(7, KERNELS)
    bounds = 3 * tries / 2**7, 2 * tries / 2**7
    bits = torch.tensor([5, 1 << 40])  # words of which two bits and one are false
    numbers = torch.tensor([[0, -(2**63), 0, 0]])  # a group of four numbers, one of them off by 2^63

    def of_bits(coins: PublicCoins) -> torch.Tensor:
        powers = field.word_powers(coins.take(field.word_parts)[:, 0])
        places = coins.take(64)[:, 0]
        places[0] = 1
        return field.weighed(bits, coins.take(8)[:, 0], powers, places)

    def of_numbers(coins: PublicCoins) -> torch.Tensor:
        places = coins.take(4)
        return ring.inner(KERNELS.weigh(numbers, coins.words(1), 7).T, places)

    escaped = _escapes(of_bits, field, tries), _escapes(of_numbers, ring, tries)
    for passed, bound in zip(escaped, bounds, strict=True):
        assert 0 < passed <= bound + 3 * bound**0.5


def test_what_has_no_proof_is_refused_before_it_is_sent() -> None:
    planes = LocalPlanes(1)
    for rt in planes.runtimes:
        rt.ledger = ClaimLedger()
    x = arithmetic.public(planes.runtimes[0], torch.ones(2, 3, 3), f=16)
    one = x.index(0)
    for left, right in ((x, one), (one, x)):  # several products share a factor: claims are of one for each
        with pytest.raises(ConfigError, match="no proof"):
            planes.runtimes[0].run(arithmetic.matmul_protocol(planes.runtimes[0], left, right))
    with pytest.raises(ConfigError, match="no proof"):
        planes.runtimes[0].run(arithmetic.product_with_protocol(planes.runtimes[0], x, x, lambda a, b: a * b))
    rt = planes.runtimes[0]
    assert rt.ledger is not None
    rt.ledger.file(ProductNotes(LINEAR, x, None, 1, 2, x.first, x.first, x.first))
    with pytest.raises(ConfigError, match="opened before 1 claims"):
        rt.run(open_ring_protocol(rt, x))


def _bits_seen(name: str, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Per party: how often each of the 64 bits of a word is set in all that it is sent in 4 such proofs."""
    found = [torch.zeros(64) for _ in range(3)]
    words = [0] * 3
    for seed in range(4):
        build = functools.partial(ALL[name], dealer=seed % 3)
        seen = run_proved(build, (x, y), ring=RING, seed=seed, keep=True, everything=name in WHOLE).received
        for party, bodies in enumerate(seen):
            for body in bodies:
                whole = torch.frombuffer(bytearray(body), dtype=torch.int64)
                found[party] += ((whole[:, None] >> torch.arange(64)) & 1).sum(0)
                words[party] += len(whole)
    return [f / n for f, n in zip(found, words, strict=True)]


@pytest.mark.parametrize("name", ["matmul", "sign"])
def test_messages_of_the_proof_look_alike_for_any_inputs(name: str) -> None:
    """Coefficients, their ends and values under masks: every bit of every word is set half of the time."""
    nothing, much = torch.zeros(3, 4, dtype=torch.float64), torch.full((3, 4), 2.0**13, dtype=torch.float64)
    for x in (nothing, much):
        for shares in _bits_seen(name, x, x.T):
            assert (shares - 0.5).abs().max() < 0.1
