"""From a step's claims about bits to one statement per prover: an inner product of two vectors of words.

Every equation holds bit by bit: ``sum_k u_k v_k + own_before + own_after = 0`` modulo 2, with ``u_k`` known to the
prover and the party before it, ``v_k`` to the prover and the party after it. A word of an equation is weighed by a
public coin of its own, as the element of the field that its bits are, so a false equation survives with probability at
most 2^-64 (in a field of tests, where a word is several elements with a coin each, at most 2 / 2^k).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import BITS, BilinearClaim
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_blocks import WORD, BitBlock
from uvcc_engine.proofs.challenges import PublicCoins
from uvcc_engine.proofs.statement import ProverStatement, Sides
from uvcc_engine.proofs.vectors import Block

_FEW: Final = 64  # words that are left to the last fold at once
_WIDEST: Final = 256
_LAST: Final = 4608  # entries that are left to the last fold after others
_CHEAPEST: Final = 64  # the fold that takes least work, where one more is needed anyway
_TOGETHER: Final = 1 << 20  # words up to which a copy takes less than many calls
_LONG: Final = 1 << 14  # words of a claim from which a copy takes more than a call
_HALVED: Final = 64  # from which the last fold is a multiple of it, so that its product goes on in halves


def of_bits(claims: Sequence[BilinearClaim], q: int) -> list[BilinearClaim]:
    """Prover ``q``'s claims about bits."""
    return [one for one in claims if one.prover == q and one.algebra == BITS]


def words_of(claims: Sequence[BilinearClaim], q: int) -> int:
    """How many words prover ``q``'s vectors have: public."""
    return sum(one.terms * one.count for one in of_bits(claims, q))


def schedule_of_words(words: int) -> list[int]:
    """The folds, first to last, of which the last takes what is left; empty for a prover without a claim.

    Two rounds a fold and 16 bytes an entry of it: one more between the words' and the last is about the square root.
    """
    if not words:
        return []
    folds, left = [WORD], words
    while left > (_FEW if len(folds) == 1 else _LAST):
        folds.append(_CHEAPEST if left > _WIDEST * _LAST else min(_WIDEST, 1 << (left.bit_length() // 2)))
        left = -(-left // folds[-1])
    return [*folds, left if left <= _HALVED else _HALVED * -(-left // _HALVED)]


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
    knows_before, knows_after = sides or (me in (q, (q + 2) % 3), me in (q, (q + 1) % 3))
    places = field.places(coins.take(field.place_blocks)[:, 0])
    mine = sorted(of_bits(claims, q), key=lambda one: one.terms)
    all_rows = rows = coins.take(sum(one.count for one in mine))[:, 0]
    weights = torch.split(all_rows, [one.count for one in mine])
    blocks: list[Block] = []
    for terms in sorted({one.terms for one in mine}):
        here = [one for one in mine if one.terms == terms]
        before = _stretches([one.known_before() for one in here]) if knows_before else None
        after = _stretches([one.known_after() for one in here]) if knows_after else None
        count = sum(one.count for one in here)
        blocks.append(BitBlock(field, before, after, rows[:count], places))
        rows = rows[count:]

    def own(before: bool) -> Tensor:
        flat = [one.own(before=before).reshape(-1) for one in mine]
        if len(all_rows) <= _TOGETHER:
            return field.weighed(torch.cat(flat), all_rows, places)
        parts = zip(flat, weights, strict=True)
        return field.total(torch.stack([field.weighed(x, w, places) for x, w in parts]))

    sums = own(True) if knows_before else None, own(False) if knows_after else None
    return ProverStatement(blocks, *sums)


def _stretches(claims: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The terms of claims that have as many each, ``[words]``: long ones as they lie in memory, and short ones that
    follow each other in one stretch, which takes less than a call for each."""
    found: list[list[Tensor]] = []
    short: list[list[Tensor]] = []

    def end() -> None:
        if short:
            found.append([torch.cat(same) if len(same) > 1 else same[0] for same in zip(*short, strict=True)])
            short.clear()

    for claim in claims:
        flat = [term.reshape(-1) for term in claim]
        if len(flat[0]) < _LONG:
            short.append(flat)
        else:
            end()
            found.append(flat)
    end()
    return found
