"""One party's side of one prover's proof: what it sends and takes in from the first fold to the last.

The prover sends coefficients, the second verifier coins, the first verifier its end in the last round; each folds what
it holds. ``step_proof`` says what this is about, and runs the sides of all three provers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.rounds import exchanged
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.proofs.algebra import Algebra
from uvcc_engine.proofs.bit_blocks import FieldBlock
from uvcc_engine.proofs.folding import Fold
from uvcc_engine.proofs.second_round import ProofTrace
from uvcc_engine.proofs.statement import ProverStatement, Sides
from uvcc_engine.proofs.vectors import Arithmetic, Block, NumberBlock, joined, spread
from uvcc_engine.proofs.verdicts import FAILED, HELD, NOT_MINE
from uvcc_engine.transcript.formats import kinds

Gathered = Callable[[Tensor, Sides | None], ProverStatement]
"""A prover's statement by the seed of its coins."""


@dataclass(slots=True)
class ProverRandomness:
    """One prover's randomness, as far as this party knows it."""

    coins: Tensor | None = None  # words: the verifiers', one per fold
    summands: Tensor | None = None  # [.., width]: prover's and first verifier's
    slope_before: Tensor | None = None  # [width]: theirs, too
    slope_after: Tensor | None = None  # [width]: prover's and second verifier's


@dataclass(frozen=True, slots=True)
class ProofPart:
    """One of the two proofs of a prover: of its numbers, or of its bits. Empty ``folds``: it has no such claim."""

    algebra: Algebra
    folds: list[Fold]
    drawn: ProverRandomness
    gathered: Gathered
    joined: Callable[[Tensor | None, Tensor | None], Block]
    trace: ProofTrace


def one_protocol(rt: Runtime, at: Arithmetic, part: ProofPart, q: int, seed: Tensor) -> MpcProtocol[int]:
    """One of prover ``q``'s proofs at this party: whether it holds, ``NOT_MINE`` at all but the second verifier. Notes
    the folds' coins, and what the second round may ask for. ``seed``: int64 ``[SEED_WORDS]``. Raises ProtocolError for
    a coin beyond the ring's degree."""
    if not part.folds:
        return HELD if rt.prev == q else NOT_MINE
    return (yield from _side_protocol(_Side(rt.party, at, q, part, part.gathered(seed, None)), part))


def _side_protocol(side: _Side, part: ProofPart) -> MpcProtocol[int]:
    for number, fold in enumerate(part.folds[:-1]):
        part.trace.words.append((yield from side.fold_protocol(number, fold)))
    return (yield from side.finish_protocol(part.folds[-1]))


def with_last_coin(part: ProofPart) -> ProofTrace:
    """What the second round may ask for: a verifier has told all coins but the last."""
    coins = part.drawn.coins
    return part.trace if coins is None else replace(part.trace, words=[*part.trace.words, coins[-1:]])


def replayed(
    at: Arithmetic, parts: Sequence[Sequence[ProofPart]], q: int, k: int, seed: Tensor, words: list[Tensor]
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

    def __init__(self, party: int, at: Arithmetic, q: int, part: ProofPart, statement: ProverStatement) -> None:
        self._at, self._q, self._drawn, self._trace = at, q, part.drawn, part.trace
        self._algebra, self._joined, self._folds = part.algebra, part.joined, part.folds
        self.proves = party == q
        self.is_before = (party + 1) % PARTIES == q
        self._blocks: list[Block] = statement.blocks
        own, none = statement.before if self.is_before else statement.after, part.algebra.zero()
        self._target = none if self.proves else part.algebra.sub(none, known(own))
        self._places, self._used = statement.places, 0

    def _summands(self, count: int) -> Tensor:
        start, self._used = self._used, self._used + count
        return known(self._drawn.summands)[start : start + count]

    def _word(self, number: int) -> Tensor:
        return known(self._drawn.coins)[number : number + 1]

    def _at_coin(self, coefficients: Tensor, powers: Tensor) -> Tensor:
        return self._algebra.total(self._algebra.mul(coefficients, powers))

    def fold_protocol(self, number: int, fold: Fold) -> MpcProtocol[Tensor]:
        """2 rounds: the coefficients, but the one that is the target, to the second verifier; its coin back, which is
        the result."""
        algebra, after = self._algebra, (self._q + 1) % PARTIES
        word: Tensor
        sent, told = Round(), Round()
        if self.proves:
            whole = algebra.total(torch.stack([block.gram(self._at, fold) for block in self._blocks]))
            others = torch.cat([whole[: fold.derived], whole[fold.derived + 1 :]])
            sent.send(after, kinds.PROOF, algebra.sub(others, self._summands(len(others))))
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
                mine = self._summands(fold.coefficients - 1)
            else:
                sent.want(self._q, kinds.PROOF, torch.int64, fold.coefficients - 1, algebra.width)
                (mine,) = yield sent
                told.send(self._q, kinds.COIN, word)
            yield told
        powers = algebra.powers(algebra.challenges(word)[0], fold.coefficients)
        if not self.proves:
            self._target = self._at_coin(self._completed(algebra.within(mine), fold), powers)
        self._shrink(fold, powers, self._folds[number + 1].size)
        return word

    def _completed(self, others: Tensor, fold: Fold) -> Tensor:
        """A verifier's summands of all coefficients, from those that were sent and of the target.

        Of a ternary fold the target is a sum of several, by the weights of the places; that of the first place is 1.
        """
        derived, algebra = self._target, self._algebra
        if fold.ternary:
            summed, places = others[fold.sums[1:] - 1], known(self._places)[1:]
            derived = algebra.sub(derived, algebra.total(algebra.mul(summed[: len(places)], places)))
            derived = algebra.sub(derived, algebra.total(summed[len(places) :])) if fold.slots else derived
        return torch.cat([others[: fold.derived], derived.unsqueeze(0), others[fold.derived :]])

    def _shrink(self, fold: Fold, powers: Tensor, following: int = 1) -> None:
        """Fold at the powers of a coin; ``following``: by how many is folded next."""
        before = after = None
        at, sizes = self._at, (fold.size, following, self._algebra.width)
        if self.proves or self.is_before:
            before = joined(self._blocks, *sizes, lambda block, out: block.fold_before(at, fold, powers, out))
        if self.proves or not self.is_before:
            after = joined(self._blocks, *sizes, lambda block, out: block.fold_after(at, fold, powers, out))
        self._blocks = [self._joined(before, after)]

    def finish_protocol(self, last_fold: Fold) -> MpcProtocol[int]:
        """1 round: the last polynomial's coefficients but the target, and the first verifier's value and summand, both
        to the second verifier, who judges."""
        algebra, q, last, fold = self._algebra, self._q, Round(), last_fold.size
        judge, count = (q + 1) % PARTIES, 2 * fold
        if self.proves:
            whole = self._extended(last_fold)
            others = torch.cat([whole[: fold - 1], whole[fold:]])
            last.send(judge, kinds.PROOF, algebra.sub(others, self._summands(count)))
            yield last
            return NOT_MINE
        coin = algebra.unit(self._word(len(known(self._drawn.coins)) - 1))[0]
        powers = algebra.powers(coin, 2 * fold + 1)
        self._shrink(last_fold, powers)
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

    def _extended(self, last_fold: Fold) -> Tensor:
        """``[2 size + 1, width]``: the product of both polynomials, each with its slope as one coefficient more."""
        algebra, (block,), fold = self._algebra, self._blocks, last_fold.size
        assert isinstance(block, NumberBlock | FieldBlock)
        u, v = (spread(known(side), fold)[:, 0] for side in (block.before, block.after))
        a, b = known(self._drawn.slope_before), known(self._drawn.slope_after)
        found = torch.cat([block.gram(self._at, last_fold), torch.zeros(2, algebra.width, dtype=torch.int64)])
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
