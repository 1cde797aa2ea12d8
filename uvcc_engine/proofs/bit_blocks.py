"""The two long vectors of a statement about bits, 64 entries to the word, in a binary field.

The first fold takes the 64 bits of a word at once, with one public weight for the word and one for the place in it. So
the prover needs no product per bit: the coefficients follow from the sums of the words' weights over every pair of
places (``Kernels.bit_pairs``), and after the fold one element is left for each word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.vectors import Arithmetic

WORD: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class BitBlock:
    """Entries ``rows_n places_i u_ni v_ni`` of words ``u`` (before) and ``v`` (after) ``[n]``; public weights: ``rows``
    ``[n]`` and ``places`` ``[64]``, which belong to ``v``'s side."""

    field: BinaryField
    before: Tensor | None
    after: Tensor | None
    rows: Tensor
    places: Tensor

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """``[127, 1]`` coefficients of the first fold, by 64. See ``vectors.Block``."""
        field = self.field
        pairs = field.kernels.bit_pairs(known(self.before), known(self.after), self.rows)
        return diagonals(field, field.mul(pairs, self.places))

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return by_places(known(self.before), powers[:, 0]).unsqueeze(-1)

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        weighted = self.field.mul(self.places, powers[:, 0].flip(0))
        return self.field.mul(by_places(known(self.after), weighted), self.rows).unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class FieldBlock:
    """Entries of elements ``[n, 1]``: ``u`` before, ``v`` after."""

    field: BinaryField
    before: Tensor | None
    after: Tensor | None

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """See ``vectors.Block``."""
        u, v = _grouped(known(self.before), fold), _grouped(known(self.after), fold)
        pairs = [self.field.total(self.field.mul(u, v[:, k : k + 1])) for k in range(fold)]
        return diagonals(self.field, torch.stack(pairs, 1))

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return self._folded(known(self.before), powers[:, 0])

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return self._folded(known(self.after), powers[:, 0].flip(0))

    def _folded(self, side: Tensor, powers: Tensor) -> Tensor:
        whole = self.field.mul(_grouped(side, len(powers)), powers)
        return torch.from_numpy(np.bitwise_xor.reduce(whole.numpy(), axis=1)).unsqueeze(-1)


def _grouped(x: Tensor, fold: int) -> Tensor:
    """``[n, 1]`` to ``[ceil(n / fold), fold]``, zeros at the end."""
    return torch.nn.functional.pad(x[:, 0], (0, -x.shape[0] % fold)).reshape(-1, fold)


def diagonals(field: BinaryField, pairs: Tensor) -> Tensor:
    """``[L, L]`` products ``u_l v_l'`` to the coefficients ``l + L - 1 - l'``: ``[2 L - 1, 1]``."""
    fold = pairs.shape[0]
    found = torch.zeros(2 * fold - 1, dtype=torch.int64)
    for k in range(fold):
        first = fold - 1 - k
        found[first : first + fold] ^= pairs[:, k]
    return found.unsqueeze(-1)


def by_places(words: Tensor, weights: Tensor) -> Tensor:
    """For every word the sum of the ``weights`` ``[64]`` of the places that are set. Shape of the words."""
    total: Tensor | None = None
    for byte in range(8):
        table = torch.zeros(1, dtype=torch.int64)
        for weight in weights[8 * byte : 8 * byte + 8]:
            table = torch.cat([table, table ^ weight])
        part = table[(words >> (8 * byte)) & 255]
        total = part if total is None else total ^ part
    assert total is not None
    return total


def weighed(field: BinaryField, words: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """``sum_n rows_n sum_i places_i bit_i(words_n)``: ``[1]``."""
    return field.total(field.mul(by_places(words, places), rows)).reshape(1)
