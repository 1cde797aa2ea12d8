"""How far a proof's vectors are folded at a time, and how sure it is.

Every party computes the same schedule from the public sizes of a prover's blocks. Errors (over the verifiers' coins): a
claim that does not hold passes the weighing with probability at most ``2 / 2^d`` (the weights are of degree 2 in the
coins), a fold by ``L`` with ``(2 L - 2) / 2^d``, a ternary one with ``(L^(log2 3) - 1) / 2^d``, and the last one, whose
polynomial has the slopes at its top and whose coin is odd, with ``2 L / 2^(d-1)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.proofs.algebra import Algebra

DEGREE: Final = 52
BIT_DEGREE: Final = 64
"""Of the binary field in which bits are proved: an element is a word."""
LEAST_BITS: Final = 40
"""A step's soundness error is at most 2^-40, for vectors of any length that fits into memory."""
SLOTS: Final = 8  # a product of elements takes so much that few at a time are cheapest
GREAT = 1 << 19
"""Entries from which the bytes of a ternary first fold, six times as many, are few."""
_MANY = 1 << 12  # entries from which a larger first fold pays for its bytes
_VERY_MANY = 1 << 16  # from which a still larger one takes less time: weighing pairs is cheaper than elements
_LAST = 32  # entries that are left to the last fold at once
_FEW = 128  # entries up to which one fold before it will do
_LONG = 6144  # entries from which more folds pay for less work


@lru_cache
def _ternary_exponents(size: int) -> Tensor:
    """``[size]``: the numbers whose digits to the base 3 are those of each place to the base 2."""
    at = torch.arange(size)
    return sum((3**k * (at >> k & 1) for k in range(size.bit_length() - 1)), torch.zeros_like(at))


@dataclass(frozen=True, slots=True)
class Fold:
    """So many entries become one: the coefficients of two polynomials, at a coin.

    As a rule ``u(X) = sum u_l X^l`` and ``v(X) = sum v_l X^(size - 1 - l)``, so that their inner product is one
    coefficient of ``u(X) v(X)``. A ternary fold takes ``2^k``: entry ``l`` has on both sides the power of ``X`` whose
    digits to the base 3 are those of ``l`` to the base 2. Nothing is carried where two such powers are added, so twice
    that power has ``u_l v_l`` and nothing else, and a public weight of each place can wait until the verifiers add
    these up. What one of its polynomials is at 0, 1 and infinity in each digit (Karatsuba and Ofman, 1962) is a sum of
    entries: of bits, another bit.

    ``slots``: so many elements of the ring are folded beside them as a rule; of a ternary fold their coefficients come
    behind all others.
    """

    size: int
    ternary: bool = False
    slots: int = 0

    @property
    def behind(self) -> int:
        """Where in a ternary fold the coefficients of elements start."""
        found: int = 3 ** (self.size.bit_length() - 1)
        return found

    @property
    def coefficients(self) -> int:
        """Of the product of both polynomials."""
        return self.behind + max(0, 2 * self.slots - 1) if self.ternary else 2 * self.size - 1

    @property
    def sums(self) -> Tensor:
        """Which coefficients of a ternary fold the target is made of, each with the weight of its place: entries', and
        the elements' without a weight."""
        entries = 2 * self.exponents
        return torch.cat([entries, torch.tensor([self.behind + self.slots - 1])]) if self.slots else entries

    @property
    def derived(self) -> int:
        """Which coefficient is not sent: it follows from the target."""
        return 0 if self.ternary else self.size - 1

    @property
    def exponents(self) -> Tensor:
        """``[size]``: of the powers that the entries of the first side have."""
        return _ternary_exponents(self.size) if self.ternary else torch.arange(self.size)

    def before(self, powers: Tensor) -> Tensor:
        """``[size, width]``: what the first side's entries are folded by, of the coin's powers from the 0th on."""
        return powers[self.exponents]

    def after(self, powers: Tensor) -> Tensor:
        """The same of the second side."""
        return powers[self.exponents if self.ternary else self.exponents.flip(0)]

    def elements_before(self, powers: Tensor, used: int) -> Tensor:
        """``[used, width]``: what elements of the first side are folded by, ``used`` of them."""
        return powers[:used]

    def elements_after(self, powers: Tensor, used: int) -> Tensor:
        """The same of the second side."""
        last = self.behind + self.slots - 1 if self.ternary else self.size - 1
        return powers[last - used + 1 : last + 1].flip(0)

    def of_elements(self, product: Tensor) -> Tensor:
        """``[coefficients, width]`` from those of the product of ``used`` elements of each side,
        ``[2 used - 1, width]``."""
        used = (len(product) + 1) // 2
        first = self.behind + self.slots - used if self.ternary else self.size - used
        found = torch.zeros(self.coefficients, *product.shape[1:], dtype=torch.int64)
        found[first : first + len(product)] = product
        return found


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


def schedule(sizes: Sizes) -> list[Fold]:
    """The folds, first to last, of which the last takes what is left; empty for a prover without a claim."""
    if sizes.entries == 0:
        return []
    folds, left, great = [], sizes.elements, bool(sizes.equations) and sizes.entries > GREAT
    if sizes.equations:
        folds = [64 if great or sizes.entries > _VERY_MANY else 32 if sizes.entries > _MANY else 16]
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
    folds.append(left if left < 8 else 4 * -(-left // 4))  # halves of halves are multiplied
    first = Fold(folds[0], ternary=True, slots=SLOTS if sizes.elements else 0) if great else Fold(folds[0])
    return [first, *map(Fold, folds[1:])]


def proof_words(folds: Sequence[Fold]) -> int:
    """Elements that a prover sends: of each polynomial all coefficients but the one that follows from the target."""
    return sum(fold.coefficients - 1 for fold in folds[:-1]) + 2 * folds[-1].size if folds else 0


def soundness_bits(algebra: Algebra, folds: Sequence[Fold]) -> float:
    """``-log2`` of the probability that a false claim of one prover and step passes, among numbers or among bits."""
    errors = 2 + sum(fold.coefficients - 1 for fold in folds[:-1]) + 2 * 2 * (folds[-1].size if folds else 0)
    return algebra.degree - math.log2(errors)
