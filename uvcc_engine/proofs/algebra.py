"""What a proof computes in: the Galois ring for numbers, a binary field for bits."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Algebra(Protocol):
    """A ring with a large set of elements whose differences are units. An element is ``[..., width]`` words."""

    @property
    def degree(self) -> int:
        """2 to this is the number of challenges."""

    @property
    def width(self) -> int:
        """Words of an element."""

    def zero(self) -> Tensor:
        """``[width]``."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """``a + b``. Shapes broadcast."""

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """``a - b``. Shapes broadcast."""

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """``a b``, element by element ``[..., width]``. Shapes broadcast."""

    def total(self, x: Tensor) -> Tensor:
        """The sum over the first axis."""

    def powers(self, of: Tensor, count: int) -> Tensor:
        """``[count, width]``: the powers of an element ``[width]`` from its 0th on."""

    def within(self, words: Tensor) -> Tensor:
        """Words of elements from uniform or received words, any shape."""

    def challenges(self, words: Tensor) -> Tensor:
        """Challenges ``[..., width]`` from uniform words ``[...]``."""

    def unit(self, word: Tensor) -> Tensor:
        """A challenge ``[1, width]`` that is a unit, from a uniform word ``[1]``."""
