"""The proof of everything that is in a party's ledger: three provers side by side, before anything is opened.

Each party proves to the other two that the messages which it sent for the ledger's claims are what the protocol makes
of the shares (Boneh, Boyle, Corrigan-Gibbs, Gilboa, Ishai, CRYPTO 2019; Boyle, Gilboa, Ishai, Nof,
CCS 2019, section 4.3, and ASIACRYPT 2020). One verifier, before the prover in the circle of parties, knows ``u``, the
one after it ``v``, and of the target each knows a summand (``statement``). A fold sends the coefficients of a
polynomial: one summand comes from the stream that the prover has in common with the first verifier, the other one is
sent to the second, so neither learns anything. Then a coin of the verifiers' common stream takes the place of the
polynomial's variable, and is told to the prover. The last fold takes all that is left; its two polynomials have a
random slope at their top, and the first verifier sends the second its value at a coin that the prover never learns,
with its summand of the product, in the round in which the second gets the coefficients. So the second one judges.

What is shown: sound against one of three parties (``folding.soundness_bits``), for whoever trusts that at most one is
corrupt. Numbers are proved in a Galois ring, bits in a binary field, side by side and in the same way. A failure names
the prover and one verifier: either of them can make it fail, nobody else. The coins are interactive, not a hash of the
messages, so a prover cannot try again and again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.mpc.foundation.bilinear_claims import BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import ProductNotes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.rounds import exchanged
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.proofs.algebra import Algebra
from uvcc_engine.proofs.audit_draws import agree_on_audit_protocol, audited, note_unfinished
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_blocks import FieldBlock
from uvcc_engine.proofs.bit_statement import gather_bits, schedule_of_words, words_of
from uvcc_engine.proofs.challenges import SEED_WORDS, PublicCoins
from uvcc_engine.proofs.folding import BIT_DEGREE, DEGREE, proof_words, schedule
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.held_opening import HeldOpening
from uvcc_engine.proofs.second_round import Dispute, ProofTrace, second_round_protocol
from uvcc_engine.proofs.statement import ProverStatement, Sides, gather, sizes_of
from uvcc_engine.proofs.vectors import Arithmetic, Block, NumberBlock, joined, spread
from uvcc_engine.proofs.verdicts import FAILED, HELD, NOT_MINE, failure_of, found_true, tell_verdicts_protocol
from uvcc_engine.transcript.formats import kinds

_HALF: Final = SEED_WORDS // 2
Gathered = Callable[[Tensor, Sides | None], ProverStatement]
"""A prover's statement by the seed of its coins."""
_CLAIMS, _COINS = b"UVCC_CLAIMS_V1", b"UVCC_COINS_V1"


@dataclass(frozen=True, slots=True)
class ProvedStep:
    """What a proof covered: claims (products with their truncations, and equations), and the entries of the three
    provers' vectors, of numbers and of bits.

    ``digest``: of the claims, as far as they are public: forms, shapes, factors, dealers, shifts; provers and terms of
    equations. ``coins``: of the
    verifiers' coins, without those that no prover is told. ``drawn``: where steps are audited, what each prover's coins
    drew (``audit_draws``). All are the same at all three parties.
    """

    claims: int
    entries: tuple[int, ...]
    digest: bytes
    coins: bytes
    drawn: tuple[int, ...] = ()


NOTHING_PROVED: Final = ProvedStep(0, (0, 0, 0), hashlib.sha256(_CLAIMS).digest(), hashlib.sha256(_COINS).digest())


@dataclass(slots=True)
class ProverRandomness:
    """One prover's randomness, as far as this party knows it."""

    coins: Tensor | None = None  # words: the verifiers', one per fold
    summands: Tensor | None = None  # [.., width]: prover's and first verifier's
    slope_before: Tensor | None = None  # [width]: theirs, too
    slope_after: Tensor | None = None  # [width]: prover's and second verifier's


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the two proofs of a prover: of its numbers, or of its bits. Empty ``folds``: it has no such claim."""

    algebra: Algebra
    folds: list[int]
    drawn: ProverRandomness
    gathered: Gathered
    joined: Callable[[Tensor | None, Tensor | None], Block]
    trace: ProofTrace


def prove(rt: Runtime) -> ProvedStep:
    """Run :func:`prove_protocol`. Whoever leaves in an audit of its own step is named with that."""
    return prove_and_open(rt, ())[0]


def prove_and_open(rt: Runtime, values: Sequence[Share]) -> tuple[ProvedStep, list[Tensor]]:
    """Run :func:`prove_and_open_protocol`: ``values`` of any shapes are opened in them. Whoever leaves in an audit of
    its own step is named with that."""
    if not rt.on_processors:
        known(rt.ledger).bring_to_host()
        values = [one.map(Tensor.cpu) for one in values]
    try:
        with rt.on_host():
            return rt.run(prove_and_open_protocol(rt, values))
    except (PeerLostError, ProtocolError) as error:
        note_unfinished(rt, error)
        raise


def prove_protocol(
    rt: Runtime, ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[ProvedStep]:
    """:func:`prove_and_open_protocol`, opening nothing: verdicts are alone in their round, as a rule the seventh."""
    return (yield from prove_and_open_protocol(rt, (), ring, bit_degree=bit_degree))[0]


def prove_and_open_protocol(
    rt: Runtime, values: Sequence[Share], ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[tuple[ProvedStep, list[Tensor]]]:
    """Prove what the ledger holds, empty it, and open ``values`` to all if everything held: int64, in their shapes.

    2 rounds for the coins and the last fold, 2 for every other fold: 6 as a rule. In one more ``values`` are opened
    (``held_opening``), and the verdicts told beside it. Where one step in so many is audited (``audit_draws``),
    the provers that were not drawn leave out their proofs, and one round more says who was: 2 before that opening
    where nobody was. Reveals ``values``.

    Raises ProofFailedError at every party if a proof does not hold at one of them; then nothing is opened, but to one
    that says so of proofs that held: it may have seen ``values``, which are right.
    ``ring`` and ``bit_degree``: of a smaller degree in tests.
    """
    ledger = known(rt.ledger)
    notes, claims = ledger.take()
    if not notes and not claims:
        return NOTHING_PROVED, (yield from par(*(open_ring_protocol(rt, value) for value in values)))
    ledger.hold_openings()
    at = Arithmetic(GaloisRing(ring.degree if ring is not None else DEGREE, rt.kernels), rt.kernels)
    field = BinaryField(bit_degree, rt.kernels)
    sizes = [sizes_of(notes, claims, q) for q in range(PARTIES)]
    words = [words_of(claims, q) for q in range(PARTIES)]
    folds, bit_folds = [schedule(s) for s in sizes], [schedule_of_words(n) for n in words]
    halves = _draw_seeds(rt)
    drawn, drawn_bits = draw_randomness(rt, at.ring, folds), draw_randomness(rt, field, bit_folds)
    seeds, agree = yield from _begin_protocol(rt, notes, halves)
    drew: tuple[int, ...] = ()
    if ledger.audit_one_in:
        drew = yield from agree_on_audit_protocol(rt, seeds)
        ledger.audits = audited(drew, ledger.audit_one_in)
        folds, bit_folds = (_of_audited(of_all, ledger.audits) for of_all in (folds, bit_folds))

    def of_numbers(q: int) -> Gathered:
        return lambda seed, sides: gather(
            at, notes, claims, q, rt.party, PublicCoins(at.ring, seed, bytes([q])), folds[q][0], sides
        )

    def of_bits(q: int) -> Gathered:
        return lambda seed, sides: gather_bits(
            field, claims, q, rt.party, PublicCoins(field, seed, b"bits" + bytes([q])), sides
        )

    parts: list[tuple[_Part, _Part]] = []
    for q in range(PARTIES):
        traces = ProofTrace(at.ring, folds[q]), ProofTrace(field, bit_folds[q])
        number = _Part(at.ring, folds[q], drawn[q], of_numbers(q), NumberBlock, traces[0])
        joined = functools.partial(FieldBlock, field)
        parts.append((number, _Part(field, bit_folds[q], drawn_bits[q], of_bits(q), joined, traces[1])))
    found = yield from par(*[_one_protocol(rt, at, one, q, seeds[q]) for q in range(PARTIES) for one in parts[q]])
    verdicts = [max(found[2 * q], found[2 * q + 1]) for q in range(PARTIES)]
    coins = hashlib.sha256(_COINS)
    for word in (*seeds, *(w for both in parts for part in both for w in part.trace.words)):
        coins.update(word.contiguous().numpy().tobytes())

    def dispute(said: Mapping[int, Tensor]) -> Dispute:
        both = [[_with_last_coin(part) for part in mine] for mine in parts]
        replay = functools.partial(_replayed, at, parts)
        return Dispute(seeds, both, said, agree, ledger.copies_agree, replay, HELD, FAILED)

    opened = yield from _settle_protocol(rt, verdicts, all(agree.values()), values, dispute)
    entries = tuple(s.entries + 64 * n for s, n in zip(sizes, words, strict=True))
    return ProvedStep(len(notes) + len(claims), entries, _claims_digest(notes, claims), coins.digest(), drew), opened


def _settle_protocol(
    rt: Runtime,
    verdicts: list[int],
    agree: bool,
    values: Sequence[Share],
    dispute: Callable[[Mapping[int, Tensor]], Dispute],
) -> MpcProtocol[list[Tensor]]:
    """Tell the verdicts, and open ``values`` beside them: 1 round. Raises ProofFailedError after the second round if
    one of them is bad."""
    ledger = known(rt.ledger)
    opening = HeldOpening(rt, values) if values else None
    if opening is not None and found_true(rt, verdicts, agree) and not ledger.sisters:
        ledger.all_proved()
    told = yield from tell_verdicts_protocol(rt, verdicts, agree, opening)
    ledger.audits = ()
    if (failure := failure_of(rt, told.said, agree)) is not None:
        ledger.hold_openings()
        raise failure.settled((yield from second_round_protocol(rt, dispute(told.said))))
    if not ledger.sisters:
        ledger.all_proved()
    return [] if opening is None else opening.opened(told.halves)


def _of_audited(folds: list[list[int]], audits: tuple[int, ...]) -> list[list[int]]:
    """No folds, and so no proof, for a prover that was not drawn."""
    return [of_one if q in audits else [] for q, of_one in enumerate(folds)]


def _claims_digest(notes: Sequence[ProductNotes], claims: Sequence[BilinearClaim]) -> bytes:
    """Of what everybody may know of the claims."""
    hashed = hashlib.sha256(_CLAIMS)
    for one in notes:
        y, shift = one.y, one.truncation.s if one.truncation is not None else 0
        shapes = [list(t) for t in (one.x.shape, y.shape if y is not None else (), one.z.shape)]
        hashed.update(sorted_json([one.form, *shapes, one.factor, one.dealer, shift]).encode() + b"\n")
    for claim in claims:
        public = [claim.algebra, claim.prover, claim.terms, list(claim.shape)]
        hashed.update(sorted_json(public).encode() + b"\n")
    return hashed.digest()


def _draw_seeds(rt: Runtime) -> list[Tensor | None]:
    """The seed of every prover's coins at its two verifiers, ``[SEED_WORDS]``; None at the prover."""
    draws = rt.draws()
    found: list[Tensor | None] = [None] * PARTIES
    for c in (rt.party, rt.next):
        found[(c + 1) % PARTIES] = draws.ring(c, SEED_WORDS)
    return found


def draw_randomness(rt: Runtime, algebra: Algebra, folds: list[list[int]]) -> list[ProverRandomness]:
    """What masks and tests each prover's messages. Every holder of a component draws the same of its stream: coins,
    summands, slopes, in this order."""
    draws = rt.draws()
    found = [ProverRandomness() for _ in range(PARTIES)]
    for c in (rt.party, rt.next):
        other, before = (c + 1) % PARTIES, (c + 2) % PARTIES
        found[other].coins = draws.ring(c, len(folds[other]))
        found[c].summands = algebra.within(draws.ring(c, proof_words(folds[c]), algebra.width))
        found[c].slope_before = algebra.within(draws.ring(c, algebra.width))
        found[before].slope_after = algebra.within(draws.ring(c, algebra.width))
    return found


def _begin_protocol(
    rt: Runtime, notes: list[ProductNotes], drawn: list[Tensor | None]
) -> MpcProtocol[tuple[list[Tensor], dict[int, bool]]]:
    """Everybody tells both provers its half of their seeds, and the online parties compare what they opened: 1 round.

    Whoever sends a half has received every message that the coins are about, because the round before is over.
    """
    message = Round()
    for peer in (rt.next, rt.prev):
        half = slice(0, _HALF) if (rt.party + 1) % PARTIES == peer else slice(_HALF, SEED_WORDS)
        message.send(peer, kinds.COIN, known(drawn[peer])[half])
        message.send(peer, kinds.PROOF, _opened_digest(rt, notes, peer))
        message.want(peer, kinds.COIN, torch.int64, _HALF)
        message.want(peer, kinds.PROOF, torch.uint8, 32)
    got: list[Tensor] = yield message
    halves = {rt.next: got[0], rt.prev: got[2]}
    agree = {
        peer: torch.equal(digest, _opened_digest(rt, notes, peer))
        for peer, digest in ((rt.next, got[1]), (rt.prev, got[3]))
    }
    mine = torch.cat([halves[rt.prev], halves[rt.next]])
    return [mine if q == rt.party else known(drawn[q]) for q in range(PARTIES)], agree


def _opened_digest(rt: Runtime, notes: list[ProductNotes], peer: int) -> Tensor:
    """Of everything that this party and ``peer`` opened under masks as the two online parties."""
    hashed = hashlib.sha256(b"UVCC_OPENED_V1")
    for one in notes:
        if one.truncation is not None and one.dealer not in (rt.party, peer):
            hashed.update(known(one.truncation.opened).contiguous().numpy().data.cast("B"))
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)


def _one_protocol(rt: Runtime, at: Arithmetic, part: _Part, q: int, seed: Tensor) -> MpcProtocol[int]:
    """One of prover ``q``'s proofs at this party: whether it holds, ``NOT_MINE`` at all but the second verifier. Notes
    the folds' coins, and what the second round may ask for."""
    if not part.folds:
        return HELD if rt.prev == q else NOT_MINE
    return (yield from _side_protocol(_Side(rt.party, at, q, part, part.gathered(seed, None)), part))


def _side_protocol(side: _Side, part: _Part) -> MpcProtocol[int]:
    for number, fold in enumerate(part.folds[:-1]):
        part.trace.words.append((yield from side.fold_protocol(number, fold)))
    return (yield from side.finish_protocol(part.folds[-1]))


def _with_last_coin(part: _Part) -> ProofTrace:
    """What the second round may ask for: a verifier has told all coins but the last."""
    coins = part.drawn.coins
    return part.trace if coins is None else replace(part.trace, words=[*part.trace.words, coins[-1:]])


def _replayed(
    at: Arithmetic, parts: Sequence[Sequence[_Part]], q: int, k: int, seed: Tensor, words: list[Tensor]
) -> tuple[Tensor, bool]:
    """At the prover: its proof again, with both verifiers as it knows them. See ``second_round.Replay``."""
    trace = ProofTrace(parts[q][k].algebra, parts[q][k].folds)
    part = replace(parts[q][k], trace=trace, drawn=replace(parts[q][k].drawn, coins=torch.cat(words)))
    first, judge = (q + 2) % PARTIES, (q + 1) % PARTIES
    courses = {
        party: _side_protocol(_Side(party, at, q, part, part.gathered(seed, sides)), part)
        for party, sides in ((q, None), (first, (True, False)), (judge, (False, True)))
    }
    held = exchanged(courses)[judge] == HELD
    return known(trace.first), held


class _Side:
    """One party's side of one proof: what is left of the vectors it holds, and of its summand of the target."""

    def __init__(self, party: int, at: Arithmetic, q: int, part: _Part, statement: ProverStatement) -> None:
        self._at, self._q, self._drawn, self._trace = at, q, part.drawn, part.trace
        self._algebra, self._joined, self._folds = part.algebra, part.joined, part.folds
        self.proves = party == q
        self.is_before = (party + 1) % PARTIES == q
        self._blocks: list[Block] = statement.blocks
        own, none = statement.before if self.is_before else statement.after, part.algebra.zero()
        self._target = none if self.proves else part.algebra.sub(none, known(own))
        self._used = 0

    def _summands(self, count: int) -> Tensor:
        start, self._used = self._used, self._used + count
        return known(self._drawn.summands)[start : start + count]

    def _word(self, number: int) -> Tensor:
        return known(self._drawn.coins)[number : number + 1]

    def _at_coin(self, coefficients: Tensor, powers: Tensor) -> Tensor:
        return self._algebra.total(self._algebra.mul(coefficients, powers))

    def fold_protocol(self, number: int, fold: int) -> MpcProtocol[Tensor]:
        """2 rounds: the coefficients, but the one that is the target, to the second verifier; its coin back, which is
        the result."""
        algebra, after = self._algebra, (self._q + 1) % PARTIES
        word: Tensor
        sent, told = Round(), Round()
        if self.proves:
            whole = algebra.total(torch.stack([block.gram(self._at, fold) for block in self._blocks]))
            others = torch.cat([whole[: fold - 1], whole[fold:]])
            sent.send(after, kinds.PROOF, algebra.sub(others, self._summands(2 * fold - 2)))
            yield sent
            told.want(after, kinds.COIN, torch.int64, 1)
            (word,) = yield told
            if not torch.equal(_within(word, algebra.degree), word):
                raise ProtocolError(
                    f"the coin of party {after} is {int(word)}, beyond {algebra.degree} bits", party=after
                )
            word = word.reshape(1)
        else:
            word = _within(self._word(number), algebra.degree)
            if self.is_before:
                yield sent
                mine = self._summands(2 * fold - 2)
            else:
                sent.want(self._q, kinds.PROOF, torch.int64, 2 * fold - 2, algebra.width)
                (mine,) = yield sent
                told.send(self._q, kinds.COIN, word)
            yield told
        powers = algebra.powers(algebra.challenges(word)[0], 2 * fold - 1)
        if not self.proves:
            whole = torch.cat([mine[: fold - 1], self._target.unsqueeze(0), mine[fold - 1 :]])
            self._target = self._at_coin(algebra.within(whole), powers)
        self._shrink(powers[:fold], self._folds[number + 1])
        return word

    def _shrink(self, powers: Tensor, following: int = 1) -> None:
        """Fold at the powers of a coin; ``following``: by how many is folded next."""
        before = after = None
        if self.proves or self.is_before:
            before = joined([block.folded_before(self._at, powers) for block in self._blocks], following)
        if self.proves or not self.is_before:
            after = joined([block.folded_after(self._at, powers) for block in self._blocks], following)
        self._blocks = [self._joined(before, after)]

    def finish_protocol(self, fold: int) -> MpcProtocol[int]:
        """1 round: the last polynomial's coefficients but the target, and the first verifier's value and summand, both
        to the second verifier, who judges."""
        algebra, q, last = self._algebra, self._q, Round()
        judge, count = (q + 1) % PARTIES, 2 * fold
        if self.proves:
            whole = self._extended(fold)
            others = torch.cat([whole[: fold - 1], whole[fold:]])
            last.send(judge, kinds.PROOF, algebra.sub(others, self._summands(count)))
            yield last
            return NOT_MINE
        coin = algebra.unit(self._word(len(known(self._drawn.coins)) - 1))[0]
        powers = algebra.powers(coin, 2 * fold + 1)
        self._shrink(powers[:fold])
        (block,) = self._blocks
        assert isinstance(block, NumberBlock | FieldBlock)
        end = known(block.before if self.is_before else block.after)[0]
        slope = known(self._drawn.slope_before if self.is_before else self._drawn.slope_after)
        end = algebra.add(end, algebra.mul(slope, powers[fold]))
        if self.is_before:
            self._trace.first = torch.stack([end, self._value(self._summands(count), fold, powers)])
            last.send(judge, kinds.PROOF, self._trace.first)
            yield last
            return NOT_MINE
        last.want(q, kinds.PROOF, torch.int64, count, algebra.width)
        last.want((q + 2) % PARTIES, kinds.PROOF, torch.int64, 2, algebra.width)
        mine, theirs = yield last
        value, both = self._value(algebra.within(mine), fold, powers), algebra.within(theirs)
        self._trace.first, self._trace.judged = theirs, torch.stack([end, value])
        held = torch.equal(algebra.mul(end, both[0]), algebra.add(value, both[1]))
        return HELD if held else FAILED

    def _extended(self, fold: int) -> Tensor:
        """``[2 fold + 1, width]``: the product of both polynomials, each with its slope as one coefficient more."""
        algebra, (block,) = self._algebra, self._blocks
        assert isinstance(block, NumberBlock | FieldBlock)
        u, v = (spread(known(side), fold)[:, 0] for side in (block.before, block.after))
        a, b = known(self._drawn.slope_before), known(self._drawn.slope_after)
        found = torch.cat([block.gram(self._at, fold), torch.zeros(2, algebra.width, dtype=torch.int64)])
        upper = algebra.add(algebra.mul(a, v.flip(0)), algebra.mul(b, u))
        found[fold : 2 * fold] = algebra.add(found[fold : 2 * fold], upper)
        found[2 * fold] = algebra.mul(a, b)
        return found

    def _value(self, others: Tensor, fold: int, powers: Tensor) -> Tensor:
        """A verifier's summand of the last product at the coin."""
        whole = torch.cat([others[: fold - 1], self._target.unsqueeze(0), others[fold - 1 :]])
        return self._at_coin(whole, powers)


def _within(word: Tensor, bits: int) -> Tensor:
    return word if bits >= 64 else word & ((1 << bits) - 1)
