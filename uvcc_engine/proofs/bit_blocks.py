"""The two long vectors of a statement about bits, 64 entries to the word, in a binary field.

The first fold takes the 64 bits of a word at once, with one public weight for the word and one for the place in it. The
weights of the places are fixed: a word is weighed as the element whose coefficients are its bits. So what bits that lie
``d`` places apart have in common is one AND of two words, its weight one product in the field, and all terms of an
equation share it (``Kernels.bit_diagonals``). After the fold one element is left for each word.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ``rows`` ``[n]`` and ``places`` ``[64]``, which belong to ``v``'s side.

    The words of a term lie in stretches, of each of which ``u`` and ``v`` have one tensor for each term.
    """

    field: BinaryField
    before: Sequence[Sequence[Tensor]] | None
    after: Sequence[Sequence[Tensor]] | None
    rows: Tensor
    places: Tensor

    def gram(self, at: Arithmetic, fold: int) -> Tensor:
        """``[127, 1]`` coefficients of the first fold, by 64. See ``vectors.Block``."""
        both = known(self.before), known(self.after)
        stretches = zip(*both, self._parted(self.rows, both[0]), strict=True)
        found = [self.field.bit_diagonals(u, v, rows, self.places) for u, v, rows in stretches]
        return self.field.total(torch.stack(found)).unsqueeze(-1)

    def left(self, fold: int) -> int:
        """See ``vectors.Block``: an element for each word."""
        return sum(len(term) for stretch in known(self.before or self.after) for term in stretch)

    def fold_before(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.before), powers[:, 0], out, weighed=False)

    def fold_after(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        weighted = self.field.mul(self.places, powers[:, 0].flip(0))
        self._fold(known(self.after), weighted, out, weighed=True)

    def _fold(self, side: Sequence[Sequence[Tensor]], places: Tensor, out: Tensor, *, weighed: bool) -> None:
        """To all stretches of the first term, one after the other, then all of the second, as to ``[terms, n]``."""
        for number, term in enumerate(out.reshape(-1, len(self.rows))):
            parts = self._parted(term, side), self._parted(self.rows, side)
            for stretch, to, rows in zip(side, *parts, strict=True):
                self.field.chosen(stretch[number], places, rows if weighed else None, to)

    def _parted(self, words: Tensor, side: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """``[n]`` by stretches."""
        return torch.split(words, [len(stretch[0]) for stretch in side])


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

    def left(self, fold: int) -> int:
        """See ``vectors.Block``."""
        return -(-len(known(self.after if self.before is None else self.before)) // fold)

    def fold_before(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.before), powers[:, 0], out)

    def fold_after(self, at: Arithmetic, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.after), powers[:, 0].flip(0), out)

    def _fold(self, side: Tensor, powers: Tensor, out: Tensor) -> None:
        out[:, 0] = self.field.columns(spread(side, len(powers))[..., 0], powers)
