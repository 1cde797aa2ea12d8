"""The two long vectors of a statement about bits, 64 entries to the word, in a binary field.

The first fold is ternary and takes the 64 bits of a word at once. Their public weights belong to the places of the
fold; of the words those of a block of 64 share one, which a word of the block has times a power of its own. So what
the bits of 64 words have in common is, for each coefficient of the fold, one AND of two words that have a bit of each,
its weight one product in the field, and all terms of an equation share it (``Kernels.ternary_bits``). After the fold
one element is left for each word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.folding import Fold
from uvcc_engine.proofs.vectors import Arithmetic, convolved, spread

_LEAF: Final = 16  # rows that are multiplied with each other, each with each
_LONG_LEAF: Final = 512  # where a row is one word
_COLUMNS: Final = 16  # from which a row is worth its way through the compiled product


FIRST: Final = Fold(64, ternary=True)
"""The first fold, by the bits of a word."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """So many words of every term, and the public coins of their blocks."""

    words: int
    coins: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BitBlock:
    """Entries ``rows_n u_tni v_tni`` of words ``u`` (before) and ``v`` (after) ``[terms, n]``, but for the weights of
    the fold's places ``i``; the weights of the words belong to ``v``'s side.

    The words of a term lie in ``stretches``, of each of which ``u`` and ``v`` have one tensor for each term. The
    weights of its blocks are public coins, and what the words of a block have times that is ``powers`` ``[64]``
    (``BinaryField.words_weights``).
    """

    field: BinaryField
    before: Sequence[Sequence[Tensor]] | None
    after: Sequence[Sequence[Tensor]] | None
    stretches: Sequence[Stretch]
    powers: Tensor

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        """``[729, 1]`` coefficients of the first fold, by 64. See ``vectors.Block``."""
        sides = zip(known(self.before), known(self.after), self.stretches, strict=True)
        found = [self.field.ternary_bits(u, v, one.coins, self.powers) for u, v, one in sides]
        return self.field.total(torch.stack(found)).unsqueeze(-1)

    def left(self, fold: int) -> int:
        """See ``vectors.Block``: an element for each word."""
        return sum(len(term) for stretch in known(self.before or self.after) for term in stretch)

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.before), fold.before(powers)[:, 0], out, weighed=False)

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.after), fold.after(powers)[:, 0], out, weighed=True)

    def _fold(self, side: Sequence[Sequence[Tensor]], factors: Tensor, out: Tensor, *, weighed: bool) -> None:
        """To all stretches of the first term, one after the other, then all of the second, as to ``[terms, n]``."""
        sizes = [one.words for one in self.stretches]
        by_stretch = zip(*(torch.split(term, sizes) for term in out.reshape(-1, sum(sizes))), strict=True)
        for one, terms, to in zip(self.stretches, side, by_stretch, strict=True):
            rows = self.field.words_weights(one.coins, one.words, self.powers) if weighed else None
            for term, found in zip(terms, to, strict=True):
                self.field.chosen(term, factors, rows, found)


@dataclass(frozen=True, slots=True, eq=False)
class FieldBlock:
    """Entries of elements ``[n, 1]``: ``u`` before, ``v`` after."""

    field: BinaryField
    before: Tensor | None
    after: Tensor | None

    def gram(self, at: Arithmetic, fold: Fold) -> Tensor:
        """See ``vectors.Block``."""
        u, v = (spread(known(side), fold.size)[..., 0] for side in (self.before, self.after))
        if u.shape[1] >= _COLUMNS:
            return self.field.product(u, v).unsqueeze(-1)
        leaf = _LEAF if u.shape[1] > 1 else _LONG_LEAF
        return convolved(self._pairs, u, v.flip(0), leaf, torch.bitwise_xor).unsqueeze(-1)

    def _pairs(self, u: Tensor, v: Tensor) -> Tensor:
        return self.field.diagonals(u, v.flip(1))

    def left(self, fold: int) -> int:
        """See ``vectors.Block``."""
        return -(-len(known(self.after if self.before is None else self.before)) // fold)

    def fold_before(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.before), fold.before(powers)[:, 0], out)

    def fold_after(self, at: Arithmetic, fold: Fold, powers: Tensor, out: Tensor) -> None:
        self._fold(known(self.after), fold.after(powers)[:, 0], out)

    def _fold(self, side: Tensor, factors: Tensor, out: Tensor) -> None:
        out[:, 0] = self.field.columns(spread(side, len(factors))[..., 0], factors)
