"""How far a proof's vectors are folded at a time, and how sure it is.

Every party computes the same schedule from the public sizes of a prover's blocks. Errors (over the verifiers' coins): a
claim that does not hold passes the weighing with probability at most ``2 / 2^d`` (the weights are of degree 2 in the
coins), a fold by ``L`` with ``(2 L - 2) / 2^d`` and the last step, whose coin is odd, with ``2 / 2^(d-1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from uvcc_engine.proofs.algebra import Algebra

DEGREE: Final = 49
BIT_DEGREE: Final = 64
"""Of the binary field in which bits are proved: an element is a word."""
LEAST_BITS: Final = 40
"""A step's soundness error is at most 2^-40, for vectors of any length that fits into memory."""
SLOTS: Final = 4  # a product of elements takes so much that few at a time are cheapest
_MANY = 1 << 12  # entries from which a larger first fold pays for its bytes
_SOME = 1 << 10  # entries from which more rounds pay for less work


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
    """The folds, first to last; empty for a prover without a claim. Afterwards one entry is left."""
    if sizes.entries == 0:
        return []
    first = 32 if sizes.entries > _MANY else 16
    folds, left = [first], sizes.after(first)
    while left > 1:
        folds.append(4 if left > _SOME else min(16, 1 << (left - 1).bit_length()))
        left = -(-left // folds[-1])
    return folds


def soundness_bits(algebra: Algebra, folds: list[int]) -> float:
    """``-log2`` of the probability that a false claim of one prover and step passes, among numbers or among bits."""
    errors = 2 + sum(2 * fold - 2 for fold in folds) + 2 * 2
    return algebra.degree - math.log2(errors)
