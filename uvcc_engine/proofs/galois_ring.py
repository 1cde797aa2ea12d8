"""The Galois ring GR(2^64, d) = Z_2^64[X] / (h), with ``h`` irreducible modulo 2.

An error of 2^63 times an even challenge is zero: over Z_2^64 alone a random challenge misses it half of the time. In
the extension the 2^d polynomials with coefficients 0 and 1 are an exceptional set: the difference of any two of them is
a unit, so a polynomial of degree k that is not zero has at most k roots among them, whatever its coefficients (Boyle,
Gilboa, Ishai, Nof, "Practical Fully Secure Three-Party Computation via Sublinear Distributed Zero-Knowledge Proofs",
CCS 2019, section 4.2; Abspoel, Cramer, Damgard, Escudero, Yuan, TCC 2019).

An element is its ``d`` coefficients, lowest first: int64 tensors whose last axis is the ring's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels.base import Kernels
from uvcc_engine.mpc.kernels.plain import PlainKernels

TAPS: Final[dict[int, int]] = {
    2: 1, 3: 1, 4: 1, 5: 2, 6: 1, 7: 1, 9: 1, 10: 3, 11: 2, 15: 1, 20: 3, 31: 3, 41: 3, 47: 5, 49: 9, 52: 3, 57: 4,
}  # fmt: skip
"""By degree d: t such that X^d + X^t + 1 is irreducible modulo 2, and 2 t - 2 < d."""


PLAIN: Final[Kernels] = PlainKernels()


@dataclass(frozen=True, slots=True)
class GaloisRing:
    """GR(2^64, ``degree``), with the device's compiled products."""

    degree: int
    kernels: Kernels = PLAIN

    def __post_init__(self) -> None:
        if self.degree not in TAPS:
            raise ConfigError(f"a Galois ring of degree {self.degree}", f"one of: {', '.join(map(str, TAPS))}")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element: 8 for each of its coefficients."""
        return 8 * self.degree

    @property
    def width(self) -> int:
        """Words of an element."""
        return self.degree

    @property
    def tap(self) -> int:
        """t of the modulus ``X^d + X^t + 1``."""
        return TAPS[self.degree]

    def zero(self) -> Tensor:
        """``[d]``."""
        return torch.zeros(self.degree, dtype=torch.int64)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``. Shapes broadcast."""
        return a + b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """``a - b``. Shapes broadcast."""
        return a - b

    def total(self, x: Tensor) -> Tensor:
        """The sum over the first axis."""
        return x.sum(0)

    def within(self, words: Tensor) -> Tensor:
        """Words as coefficients: all are. Any shape."""
        return words

    def unit(self, word: Tensor) -> Tensor:
        """A member ``[1, d]`` of the exceptional set that is a unit, from a uniform word ``[1]``: an odd one."""
        return self.challenges(word | 1)

    def reduced(self, wide: Tensor) -> Tensor:
        """``2 d - 1`` coefficients modulo ``h = X^d + X^t + 1``: ``[..., d]``. ``X^(d+j) = -X^j - X^(j+t)``, twice."""
        d, t = self.degree, TAPS[self.degree]
        low, high = wide[..., :d].clone(), wide[..., d:]
        low[..., : d - 1] -= high
        low[..., t:] -= high[..., : d - t]
        over = high[..., d - t :]
        low[..., : t - 1] += over
        low[..., t : 2 * t - 1] += over
        return low

    def collapsed(self, outer: Tensor) -> Tensor:
        """``[..., d, d]`` products of coefficients to the element ``[..., d]`` that they add up to."""
        d = self.degree
        wide = torch.zeros(*outer.shape[:-2], 2 * d - 1, dtype=torch.int64)
        wide.index_add_(-1, _degrees(d), outer.reshape(*outer.shape[:-2], d * d))
        return self.reduced(wide)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise, ``[..., d]`` each, broadcasting. For few elements; see ``inner`` for many."""
        return self.kernels.ring_multiply(a, b, self.tap)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i a_i b_i`` of ``[n, d]`` each: one matrix product of integers, ``d n d``."""
        return self.collapsed(a.T @ b)

    def times(self, factor: Tensor) -> Tensor:
        """``[..., d, d]`` by which a row of coefficients is multiplied to be multiplied by ``factor`` ``[..., d]``."""
        d = self.degree
        wide = torch.zeros(*factor.shape[:-1], d, 2 * d, dtype=torch.int64)  # row i is X^i times the factor
        wide[..., :d] = factor.unsqueeze(-2)
        shifted = wide.reshape(*factor.shape[:-1], 2 * d * d)[..., : d * (2 * d - 1)]
        return self.reduced(shifted.reshape(*factor.shape[:-1], d, 2 * d - 1))

    def powers(self, of: Tensor, count: int) -> Tensor:
        """``[count, d]``: the powers of an element from its 0th on."""
        return self.kernels.ring_powers(of.contiguous(), count, self.tap)

    def challenges(self, words: Tensor) -> Tensor:
        """Members of the exceptional set ``[..., d]`` from uniform words ``[...]``."""
        return (words.unsqueeze(-1) >> torch.arange(self.degree)) & 1

    def embedded(self, x: Tensor) -> Tensor:
        """Numbers modulo 2^64 as elements ``[..., d]``."""
        return torch.nn.functional.pad(x.unsqueeze(-1), (0, self.degree - 1))


@lru_cache(maxsize=32)
def _degrees(degree: int) -> Tensor:
    """``[d d]``: the power of X that the product of two coefficients belongs to."""
    at = torch.arange(degree)
    return (at[:, None] + at[None, :]).reshape(-1)
