"""The two long vectors of a statement about bits, 64 entries to the word, in a binary field.

The first fold takes the 64 bits of a word at once, with one public weight for the word and one for the place in it. The
weights of the places are fixed: a word is weighed as the element whose coefficients are its bits. So what bits that lie
``d`` places apart have in common is one AND of two words, its weight one product in the field, and all terms of an
equation share it (``Kernels.bit_diagonals``). After the fold one element is left for each word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.vectors import Arithmetic, convolved, spread

WORD: Final = 64
_LEAF: Final = 16  # rows that are multiplied with each other, each with each
_LONG_LEAF: Final = 512  # where a row is one word
_COLUMNS: Final = 16  # from which a row is worth its way through the compiled product


@dataclass(frozen=True, slots=True, eq=False)
class BitBlock:
    """Entries ``rows_n places_i u_tni v_tni`` of words ``u`` (before) and ``v`` (after) ``[terms, n]``; public weights:
    ``rows`` ``[n]`` and ``places`` ``[64]``, which belong to ``v``'s side."""

    field: BinaryField
    before: Tensor | None
    after: Tensor | None
    rows: Tensor
    places: Tensor

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """``[127, 1]`` coefficients of the first fold, by 64. See ``vectors.Block``."""
        found = self.field.bit_diagonals(known(self.before), known(self.after), self.rows, self.places)
        return found.unsqueeze(-1)

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return self.field.chosen(known(self.before), powers[:, 0]).reshape(-1, 1)

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        weighted = self.field.mul(self.places, powers[:, 0].flip(0))
        terms = [self.field.mul(term, self.rows) for term in self.field.chosen(known(self.after), weighted)]
        return torch.cat(terms).unsqueeze(-1)


@dataclass(frozen=True, slots=True, eq=False)
class FieldBlock:
    """Entries of elements ``[n, 1]``: ``u`` before, ``v`` after."""

    field: BinaryField
    before: Tensor | None
    after: Tensor | None

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """See ``vectors.Block``."""
        u, v = spread(known(self.before), fold)[..., 0], spread(known(self.after), fold)[..., 0]
        if u.shape[1] >= _COLUMNS:
            return self.field.product(u, v).unsqueeze(-1)
        leaf = _LEAF if u.shape[1] > 1 else _LONG_LEAF
        return convolved(self._pairs, u, v.flip(0), leaf, torch.bitwise_xor).unsqueeze(-1)

    def _pairs(self, u: Tensor, v: Tensor) -> Tensor:
        return self.field.diagonals(u, v.flip(1))

    def folded_before(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return self._folded(known(self.before), powers[:, 0])

    def folded_after(self, at: Arithmetic, powers: Tensor) -> Tensor:
        return self._folded(known(self.after), powers[:, 0].flip(0))

    def _folded(self, side: Tensor, powers: Tensor) -> Tensor:
        return self.field.columns(spread(side, len(powers))[..., 0], powers).unsqueeze(-1)
