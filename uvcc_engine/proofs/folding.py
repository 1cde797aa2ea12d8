"""How far a proof's vectors are folded at a time, and how sure it is.

Every party computes the same schedule from the public sizes of a prover's blocks. Errors (over the verifiers' coins): a
claim that does not hold passes the weighing with probability at most ``2 / 2^d`` (the weights are of degree 2 in the
coins), a fold by ``L`` with ``(2 L - 2) / 2^d`` and the last one, whose polynomial has the slopes at its top and whose
coin is odd, with ``2 L / 2^(d-1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from uvcc_engine.proofs.algebra import Algebra

DEGREE: Final = 52
BIT_DEGREE: Final = 64
"""Of the binary field in which bits are proved: an element is a word."""
LEAST_BITS: Final = 40
"""A step's soundness error is at most 2^-40, for vectors of any length that fits into memory."""
SLOTS: Final = 8  # a product of elements takes so much that few at a time are cheapest
_MANY = 1 << 12  # entries from which a larger first fold pays for its bytes
_VERY_MANY = 1 << 16  # from which a still larger one takes less time: weighing pairs is cheaper than elements
_LAST = 32  # entries that are left to the last fold at once
_FEW = 128  # entries up to which one fold before it will do
_LONG = 6144  # entries from which more folds pay for less work


@dataclass(frozen=True, slots=True)
class Sizes:
    """Public sizes of a prover's blocks: terms and entries of each equation of numbers, and entries of the block that
    has elements of the ring on both sides, of which the first fold takes ``SLOTS`` at a time."""

    equations: tuple[tuple[int, int], ...]
    elements: int = 0

    def after(self, fold: int) -> int:
        """Entries after the first fold, which takes every equation for itself."""
        return sum(terms * -(-n // fold) for terms, n in self.equations) + -(-self.elements // min(fold, SLOTS))

    @property
    def entries(self) -> int:
        """How many entries the inner product that is proved has."""
        return sum(terms * n for terms, n in self.equations) + self.elements


def schedule(sizes: Sizes) -> list[int]:
    """The folds, first to last, of which the last takes what is left; empty for a prover without a claim."""
    if sizes.entries == 0:
        return []
    folds, left = [], sizes.elements
    if sizes.equations:
        folds = [64 if sizes.entries > _VERY_MANY else 32 if sizes.entries > _MANY else 16]
        left = sizes.after(folds[0])
    while left > _LONG:
        folds.append(16)
        left = -(-left // 16)
    if folds and left > _LAST:  # the one before the last
        folds.append(16 if left <= 32 * _LAST else 32)
        left = -(-left // folds[-1])
    elif left > _FEW:
        folds += [8, 16 if left > 8 * _FEW else 8]
        left = -(-left // math.prod(folds))
    elif left > _LAST:
        folds.append(8)
        left = -(-left // 8)
    return [*folds, left if left < 8 else 4 * -(-left // 4)]  # halves of halves are multiplied


def proof_words(folds: list[int]) -> int:
    """Elements that a prover sends: of each polynomial all coefficients but the one that is the target."""
    return sum(2 * fold - 2 for fold in folds[:-1]) + 2 * folds[-1] if folds else 0


def soundness_bits(algebra: Algebra, folds: list[int]) -> float:
    """``-log2`` of the probability that a false claim of one prover and step passes, among numbers or among bits."""
    errors = 2 + sum(2 * fold - 2 for fold in folds[:-1]) + 2 * 2 * (folds[-1] if folds else 0)
    return algebra.degree - math.log2(errors)
