"""The binary fields GF(2^k) in which statements about bits are proved, k = 64 where it counts.

A bit is the element 0 or 1, XOR is addition and AND is multiplication, so a statement over bits is one over the field,
and a random element of it misses a false one with probability 2^-k times a degree. An element is one word: ``[..., 1]``
int64, the coefficient of X^i in bit i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.plain import shift_logical
from uvcc_engine.mpc.kernels.proving import binary_words
from uvcc_engine.mpc.kernels.proving.binary_words import carryless

LOW_TERMS: Final[dict[int, tuple[int, ...]]] = {64: (0, 1, 3, 4), 31: (0, 3), 20: (0, 3), 7: (0, 1), 6: (0, 1)}
"""By degree k: the exponents below k of a polynomial ``X^k + ...`` that is irreducible modulo 2."""


@dataclass(frozen=True, slots=True)
class BinaryField:
    """GF(2^``degree``), with the device's compiled product for what is long."""

    degree: int
    kernels: Kernels

    def __post_init__(self) -> None:
        if self.degree not in LOW_TERMS:
            raise ConfigError(f"a binary field of degree {self.degree}", f"one of: {', '.join(map(str, LOW_TERMS))}")

    @property
    def width(self) -> int:
        """Words of an element."""
        return 1

    def challenges(self, words: Tensor) -> Tensor:
        """Elements ``[..., 1]`` from uniform words ``[...]``."""
        return self.within(words).unsqueeze(-1)

    def within(self, words: Tensor) -> Tensor:
        """Words less what lies above the degree. Any shape."""
        return words if self.degree == 64 else words & ((1 << self.degree) - 1)

    def unit(self, word: Tensor) -> Tensor:
        """An element ``[1, 1]`` that is not zero from a uniform word ``[1]``."""
        found = self.challenges(word)
        return torch.where(found == 0, torch.ones_like(found), found)

    def zero(self) -> Tensor:
        """``[1]``."""
        return torch.zeros(1, dtype=torch.int64)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``, which is ``a - b`` as well. Shapes broadcast."""
        return a ^ b

    sub = add

    def total(self, x: Tensor) -> Tensor:
        """The sum over the first axis."""
        return binary_words.total(x)

    def columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """``sum_l factors_l x_ln`` of words ``[k, n]`` and ``[k]``: ``[n]``."""
        if self.degree == 64:
            return self.kernels.binary_columns(x.contiguous(), factors.contiguous())
        return self.total(self.mul(x, factors.unsqueeze(-1)))

    def diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        """``[b, 2 k - 1]``: entry ``k - 1 + i - j`` is ``sum_n u_in v_jn`` of words ``[b, k, n]`` each."""
        if self.degree == 64:
            return self.kernels.binary_diagonals(u.contiguous(), v.contiguous())
        pairs = self.mul(u.unsqueeze(2), v.unsqueeze(1))  # [b, k, k, n]
        return torch.stack([binary_words.diagonals(self.total(one.permute(2, 0, 1))) for one in pairs])

    def product(self, u: Tensor, v: Tensor) -> Tensor:
        """``[2 k - 1]``: ``diagonals`` of one block ``[k, n]``, for many rows and columns."""
        if self.degree == 64:
            return self.kernels.binary_product(u.contiguous(), v.contiguous())
        return self.diagonals(u.unsqueeze(0), v.unsqueeze(0))[0]

    def word_powers(self, parts: Tensor) -> Tensor:
        """Weights ``[64]`` of the bits of a word such that no word but zero weighs nothing for all ``parts``.

        ``[word_parts]`` coins: that many elements make a word, and each is weighed by one. A word is an element
        itself in the field of 2^64, which needs no coin.
        """
        at = torch.arange(64)
        powers = torch.ones(64, dtype=torch.int64) << (at % self.degree)
        return powers if self.degree == 64 else self.mul(powers, parts[at // self.degree])

    @property
    def word_parts(self) -> int:
        """How many coins ``word_powers`` takes."""
        return 0 if self.degree == 64 else -(-64 // self.degree)

    def words_weights(self, coins: Tensor, count: int, powers: Tensor) -> Tensor:
        """``[count]``: what words weigh by the ``coins`` of their blocks and their places in them, of which ``powers``
        are the weights."""
        if self.degree == 64:
            return self.kernels.block_weights(coins.contiguous(), count)
        return self.mul(coins.reshape(-1, 1, 8), powers.unsqueeze(-1)).reshape(-1)[:count]

    def chosen(self, words: Tensor, places: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """For every word ``[n]`` the sum of the ``places`` ``[64]`` whose bits are set, times the word's own of
        ``rows`` ``[n]`` if there are any. ``out``: where to."""
        if self.degree == 64 or rows is None:
            return self.kernels.chosen_places(words.contiguous(), places, rows, out)
        found = self.mul(self.kernels.chosen_places(words.contiguous(), places), rows)
        return found if out is None else out.copy_(found)

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], coins: Tensor, powers: Tensor) -> Tensor:
        """``[729]``: see ``Kernels.ternary_bits``; ``coins`` are the weights of the blocks, ``powers`` those of the
        words in them."""
        if self.degree == 64:
            return self.kernels.ternary_bits(u, v, coins.contiguous())
        met = self.chosen(binary_words.meeting_bits(u, v), powers)
        return binary_words.joined(self.total(self.mul(met, coins).T))

    def weighed(self, words: Tensor, coins: Tensor, powers: Tensor, places: Tensor) -> Tensor:
        """``[1]``: the sum of ``places_j`` wherever bit ``j`` of a word ``[n]`` is set, times what the word weighs."""
        if self.degree == 64:
            by_place = self.mul(self.kernels.turned_sums(words.contiguous(), coins.contiguous()), places)
        else:
            by_place = self.mul(self.chosen(words, places), self.words_weights(coins, len(words), powers))
        return self.total(by_place).reshape(1)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """The product, element by element; shapes broadcast."""
        if self.degree == 64:
            if a.shape != b.shape:
                none = torch.zeros(1, dtype=torch.int64)
                a, b = a ^ (none & b), b ^ (none & a)  # spread to one shape
            return self.kernels.binary_multiply(a.contiguous(), b.contiguous())
        return self._reduced(carryless(a, b))

    def _reduced(self, product: Tensor) -> Tensor:
        for _ in range(2):  # what the first pass leaves above the degree is less than the low terms' degree
            over = shift_logical(product, self.degree)
            parts = [over << t for t in LOW_TERMS[self.degree]]
            product = self.within(product) ^ reduce(torch.bitwise_xor, parts)
        return product

    def powers(self, of: Tensor, count: int) -> Tensor:
        """``[count, 1]``: the powers of an element ``[1]`` from its 0th on."""
        if self.degree == 64:
            return self.kernels.binary_powers(of.contiguous(), count).unsqueeze(-1)
        found, step = torch.ones(1, 1, dtype=torch.int64), of
        while len(found) < count:
            found = torch.cat([found, self.mul(found, step)])
            step = self.mul(step, step)
        return found[:count]
