"""The floor of a proof's time: what its parties multiply, at the rates at which this machine multiplies it.

Counted are the products in the two rings of the proof, as the kernels are asked for them, by the ways in which they
compute them; sums, shifts, choices by bits, copies, messages and calls count nothing. So no proof of this kind takes
less processor time than that, and what it takes more is memory and calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.base import Kernels, RightFactor

_INNER: Final = 1 << 15  # words: an inner product of them stays in the processor's caches, and outlasts its call
_SIDE: Final = 512
_TRIES: Final = 5


@dataclass(slots=True)
class Multiplications:
    """How many there were: of words without carries, and of numbers modulo 2^64."""

    words: int = 0
    numbers: int = 0


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Multiplications a second of one thread."""

    words: float
    numbers: float

    def seconds(self, of: Multiplications) -> float:
        """What these take at least."""
        return of.words / self.words + of.numbers / self.numbers


class CountingKernels:
    """Kernels that count what a proof asks them to multiply."""

    def __init__(self, inner: Kernels, count: Multiplications) -> None:
        self._inner, self._count = inner, count

    def __getattr__(self, name: str) -> Any:
        """What multiplies nothing."""
        return getattr(self._inner, name)

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> RightFactor:
        product = self._inner.right_factor(ys, rows)

        def counted(xs: Sequence[Tensor]) -> Tensor:
            self._count.numbers += sum(x.numel() * y.shape[-1] for x, y in zip(xs, ys, strict=True))
            return product(xs)

        return counted

    def weigh_pairs(self, u: Tensor, v: Tensor, weights: Tensor, degree: int) -> Tensor:
        self._count.numbers += u.numel() * v.shape[-1]
        return self._inner.weigh_pairs(u, v, weights, degree)

    def ternary_numbers(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor, degree: int) -> Tensor:
        self._count.numbers += 729 * len(u) * weights.numel()
        return self._inner.ternary_numbers(u, v, weights, degree)

    def multiply_wide(self, x: Tensor, y: Tensor) -> Tensor:
        self._count.numbers += x.numel() * y.shape[1] * y.shape[-1]
        return self._inner.multiply_wide(x, y)

    def multiply_elements(self, u: Tensor, v: Tensor) -> Tensor | None:
        """In halves, three for four, of the rows and twice of each element."""
        found, (rows, count, d) = self._inner.multiply_elements(u, v), u.shape
        if found is not None:
            self._count.numbers += round(3 ** math.log2(rows)) * 9 * (d // 4) ** 2 * count
        return found

    def ring_multiply(self, a: Tensor, b: Tensor, tap: int) -> Tensor:
        self._count.numbers += max(a.numel(), b.numel()) * a.shape[-1]
        return self._inner.ring_multiply(a, b, tap)

    def ring_powers(self, of: Tensor, count: int, tap: int) -> Tensor:
        self._count.numbers += count * of.numel() ** 2
        return self._inner.ring_powers(of, count, tap)

    def binary_multiply(self, a: Tensor, b: Tensor) -> Tensor:
        self._count.words += a.numel()
        return self._inner.binary_multiply(a, b)

    def binary_powers(self, of: Tensor, count: int) -> Tensor:
        self._count.words += count
        return self._inner.binary_powers(of, count)

    def binary_inner(self, a: Tensor, b: Tensor) -> Tensor:
        self._count.words += a.numel()
        return self._inner.binary_inner(a, b)

    def binary_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        self._count.words += x.numel()
        return self._inner.binary_columns(x, factors)

    def binary_diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        self._count.words += u.numel() * v.shape[1]
        return self._inner.binary_diagonals(u, v)

    def binary_product(self, u: Tensor, v: Tensor) -> Tensor:
        """In halves, three for four, as far as it goes: the last two are halved in a processor's registers."""
        rows, leaves = u.shape[0], 1
        while rows > 1 and rows % 2 == 0:
            rows, leaves = rows // 2, 3 * leaves
        self._count.words += leaves * rows**2 * u.shape[1]
        return self._inner.binary_product(u, v)

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor) -> Tensor:
        """One for each coefficient of a block; more than three terms take another."""
        self._count.words += 729 * -(-len(u) // 3) * weights.numel()
        return self._inner.ternary_bits(u, v, weights)

    def turned_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        self._count.words += 64 * weights.numel()
        return self._inner.turned_sums(x, weights)


def counting(kernels: Kernels, count: Multiplications) -> Kernels:
    """Kernels that add to ``count`` what they multiply."""
    return cast(Kernels, CountingKernels(kernels, count))


def machine_rates(kernels: Kernels) -> MachineRates:
    """How fast these kernels multiply what is near: an inner product of words, and a product of matrices."""
    a, b = (torch.randint(-(2**62), 2**62, (_INNER,)) for _ in range(2))
    x, y = (torch.randint(-(2**62), 2**62, (_SIDE, _SIDE)) for _ in range(2))
    words = _best(lambda: kernels.binary_inner(a, b), 16)
    numbers = _best(lambda: kernels.right_factor([y], _SIDE)([x]), 1)
    return MachineRates(_INNER / words, _SIDE**3 / numbers)


def _best(work: Callable[[], object], times: int) -> float:
    """Least processor seconds of this thread for one of so many in a row."""
    least = math.inf
    work()
    for _ in range(_TRIES):
        begun = time.thread_time()
        for _ in range(times):
            work()
        least = min(least, (time.thread_time() - begun) / times)
    return least
