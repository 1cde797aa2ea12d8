"""From a step's claims about bits to one statement per prover: an inner product of two vectors of words.

Every equation holds bit by bit: ``sum_k u_k v_k + own_before + own_after = 0`` modulo 2, with ``u_k`` known to the
prover and the party before it, ``v_k`` to the prover and the party after it. Of 64 words the bits at one place are an
element of the field, which is weighed by a public coin of the 64 words and one of the place. So a false equation
survives with probability at most 2 / 2^64 (in a field of tests, where 64 bits are several elements with a coin each, at
most 3 / 2^k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import BITS, BilinearClaim
from uvcc_engine.mpc.kernels.proving.binary_words import blocks_of
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_blocks import FIRST, BitBlock, Stretch
from uvcc_engine.proofs.challenges import PublicCoins
from uvcc_engine.proofs.folding import Fold
from uvcc_engine.proofs.statement import Prover, ProverStatement, Sides

_FEW: Final = 64  # words that are left to the last fold at once
_WIDEST: Final = 256
_LAST: Final = 4608  # entries that are left to the last fold after others
_CHEAPEST: Final = 64  # the fold that takes least work, where one more is needed anyway
_LONG: Final = 1 << 14  # words of a claim from which a copy takes more than a call
_HALVED: Final = 64  # from which the last fold is a multiple of it, so that its product goes on in halves


def of_bits(claims: Sequence[BilinearClaim], q: int) -> list[BilinearClaim]:
    """Prover ``q``'s claims about bits."""
    return [one for one in claims if one.prover == q and one.algebra == BITS]


def words_of(claims: Sequence[BilinearClaim], q: int) -> int:
    """How many words prover ``q``'s vectors have: public."""
    return sum(one.terms * one.count for one in of_bits(claims, q))


def schedule_of_words(words: int) -> list[Fold]:
    """The folds, first to last, of which the last takes what is left; empty for a prover without a claim.

    Two rounds a fold and 16 bytes an entry of it: one more between the words' and the last is about the square root.
    """
    if not words:
        return []
    sizes: list[int] = []
    left = words
    while left > (_LAST if sizes else _FEW):
        sizes.append(_CHEAPEST if left > _WIDEST * _LAST else min(_WIDEST, 1 << (left.bit_length() // 2)))
        left = -(-left // sizes[-1])
    sizes.append(left if left <= _HALVED else _HALVED * -(-left // _HALVED))
    return [FIRST, *map(Fold, sizes)]


def gather_bits(
    field: BinaryField,
    claims: Sequence[BilinearClaim],
    q: int,
    me: int,
    coins: PublicCoins,
    sides: Sides | None = None,
) -> ProverStatement:
    """Prover ``q``'s statement over all claims about bits, with what party ``me`` holds of it. ``sides``: as in
    ``statement.gather``."""
    who = Prover(q, me, sides)
    powers = field.word_powers(coins.take(field.word_parts)[:, 0])
    places = coins.take(FIRST.size)
    places[0] = 1  # its coefficient follows from the others
    mine = of_bits(claims, q)
    statement = ProverStatement(places=places)

    def own(alike: Sequence[_Alike], before: bool) -> Tensor:
        found = [field.weighed(one.own(before=before), one.stretch.coins, powers, places[:, 0]) for one in alike]
        return field.total(torch.stack(found))

    everything: list[_Alike] = []
    for terms in sorted({one.terms for one in mine}):
        alike = _stretches(coins, [one for one in mine if one.terms == terms])
        before = [one.terms([c.known_before() for c in one.claims]) for one in alike] if who.before else None
        after = [one.terms([c.known_after() for c in one.claims]) for one in alike] if who.after else None
        statement.blocks.append(BitBlock(field, before, after, [one.stretch for one in alike], powers))
        everything += alike
    if who.before and not who.after:
        statement.before = own(everything, True)
    if who.after and not who.before:
        statement.after = own(everything, False)
    return statement


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """Claims of as many terms each that lie in one stretch."""

    claims: Sequence[BilinearClaim]
    stretch: Stretch

    def terms(self, sides: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The terms of one side, ``[words]`` each."""
        return [_flat(same) for same in zip(*sides, strict=True)]

    def own(self, *, before: bool) -> Tensor:
        """``[words]`` that one of the two verifiers knows alone."""
        return _flat([one.own(before=before) for one in self.claims])


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """One after the other; as it lies in memory where there is only one."""
    return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([one.reshape(-1) for one in parts])


def _stretches(coins: PublicCoins, claims: Sequence[BilinearClaim]) -> list[_Alike]:
    """Claims by stretches, with the next coins: long ones for themselves, as they lie in memory, and short ones that
    follow each other in one, which takes less than a call for each."""
    groups: list[list[BilinearClaim]] = []
    open_group = False
    for claim in claims:
        if claim.count >= _LONG or not open_group:
            groups.append([])
        groups[-1].append(claim)
        open_group = claim.count < _LONG
    found = []
    for group in groups:
        words = sum(one.count for one in group)
        found.append(_Alike(group, Stretch(words, coins.take(blocks_of(words))[:, 0])))
    return found
