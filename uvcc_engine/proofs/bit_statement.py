"""From a step's claims about bits to one statement per prover: an inner product of two vectors of words.

Every equation holds bit by bit: ``sum_k u_k v_k + own_before + own_after = 0`` modulo 2, with ``u_k`` known to the
prover and the party before it, ``v_k`` to the prover and the party after it. A word of an equation is weighed by a
public coin of its own, and a bit by one for its place in the word, so a false equation survives with probability at
most 2 / 2^k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.bilinear_claims import BITS, BilinearClaim
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_blocks import WORD, BitBlock, weighed
from uvcc_engine.proofs.challenges import PublicCoins
from uvcc_engine.proofs.statement import ProverStatement


def of_bits(claims: Sequence[BilinearClaim], q: int) -> list[BilinearClaim]:
    """Prover ``q``'s claims about bits."""
    return [one for one in claims if one.prover == q and one.algebra == BITS]


def words_of(claims: Sequence[BilinearClaim], q: int) -> int:
    """How many words prover ``q``'s vectors have: public."""
    return sum(one.terms * one.count for one in of_bits(claims, q))


def schedule_of_words(words: int) -> list[int]:
    """The folds, first to last; empty for a prover without a claim. Afterwards one entry is left."""
    if not words:
        return []
    folds, left = [WORD], words
    while left > 1:
        folds.append(8 if left > 512 else min(16, 1 << (left - 1).bit_length()))
        left = -(-left // folds[-1])
    return folds


def gather_bits(
    field: BinaryField, claims: Sequence[BilinearClaim], q: int, me: int, coins: PublicCoins
) -> ProverStatement:
    """Prover ``q``'s statement over all claims about bits, with what party ``me`` holds of it."""
    knows_before, knows_after = me in (q, (q + 2) % 3), me in (q, (q + 1) % 3)
    places = coins.take(WORD)[:, 0]
    before: list[Tensor] = []
    after: list[Tensor] = []
    rows: list[Tensor] = []
    own: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for one in of_bits(claims, q):
        weights = coins.take(one.count)[:, 0]
        rows += [weights] * one.terms
        if knows_before:
            before += [t.reshape(-1) for t in one.known_before()]
            own[0].append((one.own(before=True).reshape(-1), weights))
        if knows_after:
            after += [t.reshape(-1) for t in one.known_after()]
            own[1].append((one.own(before=False).reshape(-1), weights))
    block = BitBlock(
        field, torch.cat(before) if before else None, torch.cat(after) if after else None, torch.cat(rows), places
    )
    sums = [
        weighed(field, torch.cat([w for w, _ in side]), torch.cat([r for _, r in side]), places) if side else None
        for side in own
    ]
    return ProverStatement([block], *sums)
