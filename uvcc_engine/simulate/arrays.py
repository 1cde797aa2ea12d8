"""Secret arrays between three simulated parties: share, compute, open; and what that cost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.data.sets import Floats
from uvcc_engine.mpc.comparisons import selection
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import DEFAULT_F, Share, decode, share_of, split
from uvcc_engine.mpc.products import arithmetic


class Parties:
    """Three parties that compute on arrays. ``rounds`` and ``bytes_sent`` (of all three) count from the beginning."""

    def __init__(self, seed: int = 0, *, watch_range: bool = False) -> None:
        """``seed`` gives their keys, hence how truncations round. ``watch_range``: RingRangeError where a number passes
        2^62 before a truncation."""
        self._planes = LocalPlanes(seed, watch_range=watch_range)

    @property
    def rounds(self) -> int:
        return self._planes.runtimes[0].rounds

    @property
    def bytes_sent(self) -> int:
        return sum(rt.bytes_sent for rt in self._planes.runtimes)

    def share(self, values: ArrayLike, *, frac_bits: int = DEFAULT_F) -> SecretArray:
        """Split numbers into three components. Raises ConfigError for what fixed point cannot hold."""
        found = np.array(values, dtype=np.float64)  # torch takes no array that may not be written
        made = split(torch.from_numpy(found), frac_bits, os.urandom, name="array")
        return SecretArray(self, tuple(share_of(made, p, frac_bits) for p in range(PARTIES)))

    def run(self, steps: Callable[[Runtime, int], MpcProtocol[Any]]) -> list[Any]:
        """One protocol at all three; ``steps(rt, party)``. Results by party."""
        return self._planes.run_three(lambda rt: rt.run(steps(rt, rt.party)))

    def local(self, fn: Callable[[Runtime, int], Share]) -> SecretArray:
        """What every party computes alone."""
        return SecretArray(self, tuple(fn(rt, rt.party) for rt in self._planes.runtimes))


@dataclass(frozen=True, slots=True, eq=False)
class SecretArray:
    """An array that three parties hold in shares; ``held`` is what each of them has."""

    parties: Parties
    held: tuple[Share, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held[0].shape)

    @property
    def frac_bits(self) -> int:
        return self.held[0].f

    def open(self) -> Floats:
        """The numbers, to everybody: 1 round."""
        f = self.frac_bits
        opened = self.parties.run(lambda rt, p: open_ring_protocol(rt, self.held[p]))
        numbers: Floats = decode(opened[0], f).numpy()
        return numbers

    def relu(self) -> SecretArray:
        """max(0, x)."""
        return self._made(lambda rt, p: selection.relu_only_protocol(rt, self.held[p]))

    def __add__(self, other: SecretArray | float) -> SecretArray:
        return self._with(other, arithmetic.add, arithmetic.add_public)

    def __sub__(self, other: SecretArray | float) -> SecretArray:
        return self._with(other, arithmetic.sub, lambda rt, x, value: arithmetic.add_public(rt, x, -value))

    def __mul__(self, other: SecretArray | float) -> SecretArray:
        if isinstance(other, SecretArray):
            theirs = self._same(other)
            return self._made(lambda rt, p: arithmetic.mul_protocol(rt, self.held[p], theirs[p]))
        return self._made(lambda rt, p: arithmetic.mul_public_protocol(rt, self.held[p], float(other)))

    def __matmul__(self, other: SecretArray) -> SecretArray:
        theirs = self._same(other)
        return self._made(lambda rt, p: arithmetic.matmul_protocol(rt, self.held[p], theirs[p]))

    @property
    def T(self) -> SecretArray:
        return SecretArray(self.parties, tuple(s.T for s in self.held))

    def sum(self, axis: int = 0) -> SecretArray:
        """Sums along an axis. Local."""
        return SecretArray(self.parties, tuple(s.sum(axis) for s in self.held))

    def _made(self, steps: Callable[[Runtime, int], MpcProtocol[Any]]) -> SecretArray:
        return SecretArray(self.parties, tuple(self.parties.run(steps)))

    def _same(self, other: SecretArray) -> tuple[Share, ...]:
        if other.parties is not self.parties:
            raise ConfigError("two arrays of different parties", "share both between the same Parties")
        return other.held

    def _with(
        self,
        other: SecretArray | float,
        secret: Callable[[Share, Share], Share],
        public: Callable[[Runtime, Share, float], Share],
    ) -> SecretArray:
        if isinstance(other, SecretArray):
            theirs = self._same(other)
            return self.parties.local(lambda rt, p: secret(self.held[p], theirs[p]))
        return self.parties.local(lambda rt, p: public(rt, self.held[p], float(other)))


_DEFAULT: list[Parties] = []


def share(values: ArrayLike, *, frac_bits: int = DEFAULT_F, parties: Parties | None = None) -> SecretArray:
    """Numbers between three parties: those given, or one set of this process."""
    if parties is None:
        if not _DEFAULT:
            _DEFAULT.append(Parties())
        parties = _DEFAULT[0]
    return parties.share(values, frac_bits=frac_bits)


def open(x: SecretArray) -> Floats:
    """``x.open()``."""
    return x.open()


def matmul(x: SecretArray, y: SecretArray) -> SecretArray:
    """``x @ y``: 2 rounds."""
    return x @ y


def mul(x: SecretArray, y: SecretArray | float) -> SecretArray:
    """``x * y``: 2 rounds."""
    return x * y


def relu(x: SecretArray) -> SecretArray:
    """``x.relu()``."""
    return x.relu()
