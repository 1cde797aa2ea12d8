"""The operations that differ per device. Everything else in the protocols is plain tensor arithmetic.

All tensors are int64 and wrap modulo 2^64; bit planes and words are bit-sliced, 64 elements to the word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from uvcc_engine.mpc.kernels.layout import Level, Patches

RightFactor = Callable[[Sequence[Tensor]], Tensor]


class Kernels(Protocol):
    """Local arithmetic of one party. Implementations differ in speed, never in the result.

    Where no shape is said, a function goes element by element: all its tensors have one shape, and so has the result.
    """

    def mul(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """``sum_i xs[i] * ys[i]`` elementwise, broadcasting, for one or two terms."""

    def right_factor(self, ys: Sequence[Tensor], rows: int) -> RightFactor:
        """Prepares ``xs -> sum_i xs[i] @ ys[i]`` for one or two matrices ``[..., k, n]`` and ``rows`` rows of
        ``xs``."""

    def cut_patches(self, images: Tensor, of: Patches, more: int = 0) -> Tensor:
        """``[rows, of.image]`` to ``[rows * of.lines * of.columns, of.each + more]``; the last ``more`` columns are
        zero."""

    def add_patches(self, patches: Tensor, of: Patches) -> Tensor:
        """``[rows * of.lines * of.columns, of.each]`` to ``[rows, of.image]``: every number of a patch is added to the
        pixel that it was cut from."""

    def blind(self, z: Tensor, factor: int, plus: Tensor, minus: Tensor) -> Tensor:
        """``z * factor + plus - minus``: a product share with its public factor and its part of a zero."""

    def mul_blinded(
        self,
        first: bool,
        second: bool,
        x: tuple[Tensor, Tensor],
        y: tuple[Tensor, Tensor],
        factor: int,
        plus: Tensor,
        minus: Tensor,
    ) -> Tensor:
        """``blind`` of ``x_1 y_2 + x_2 y_1``, broadcasting; where ``first``, ``y_1`` is added to what ``x_1`` is
        multiplied by, and where ``second``, ``y_2`` to what ``x_2`` is."""

    def truncate_deal(
        self, z: Tensor, left: Tensor, right: Tensor, k: Tensor, m: Tensor, low: Tensor, s: int
    ) -> tuple[Tensor, Tensor]:
        """The dealer's (masked ``z``, corrections ``[2, ...]`` for the left party); see ``mpc.products.truncation``."""

    def truncate_deal_own(
        self, z: Tensor, left: Tensor, drawn: Tensor, more: Tensor, low: Tensor, s: int, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The dealer's (``[2, ...]``, below 2^s: bits that it shows, correction of the right party; component of the
        right party, into ``out`` if given) where its own summand ``z`` is the mask; see ``mpc.products.truncation``.

        ``drawn`` ``[2, ...]`` is drawn with the left, ``more`` with the right, ``low`` by the dealer alone.
        """

    def truncate_open(
        self, z: Tensor, a: Tensor, b: Tensor, k: Tensor, m: Tensor, s: int, bits: int = 64
    ) -> tuple[Tensor, Tensor]:
        """``c = z + a + b + 2^62``, of ``b`` the lowest ``bits``, and this online party's part ``k + m [c >= 0]`` of
        the upper bits, modulo 2^s."""

    def truncate_close(self, c: Tensor, part: Tensor, theirs: Tensor, s: int, out: Tensor | None = None) -> Tensor:
        """The online component of the result from the opened ``c`` and both parts (into ``out`` if given)."""

    def to_planes(self, x: Tensor, bits: int = 64) -> Tensor:
        """``[n]`` elements to ``[bits, ceil(n / 64)]``: bit ``e`` of ``planes[b, w]`` is bit ``b`` of ``x[64 w +
        e]``."""

    def bits_to_ints(self, words: Tensor, n: int) -> Tensor:
        """``[..., ceil(n / 64)]`` words to ``[..., n]`` zeros and ones."""

    def binary_multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Products in GF(2^64) = F_2[X] / (X^64 + X^4 + X^3 + X + 1), element by element."""

    def binary_powers(self, of: Tensor, count: int) -> Tensor:
        """``[count]``: the powers of an element ``[1]`` of that field from its 0th on."""

    def binary_inner(self, a: Tensor, b: Tensor) -> Tensor:
        """``sum_i a_i b_i`` in that field, ``[1]``."""

    def binary_columns(self, x: Tensor, factors: Tensor) -> Tensor:
        """``sum_l factors_l x_ln`` in that field: ``[k, n]`` and ``[k]`` to ``[n]``."""

    def binary_diagonals(self, u: Tensor, v: Tensor) -> Tensor:
        """``[b, 2 k - 1]``: entry ``k - 1 + i - j`` has the ``sum_n u_in v_jn`` of ``[b, k, n]`` each; in that
        field."""

    def binary_product(self, u: Tensor, v: Tensor) -> Tensor:
        """``[2 k - 1]``: as ``binary_diagonals``, for one block ``[k, n]`` of many rows and columns."""

    def ternary_bits(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor) -> Tensor:
        """``[729]``: the sum over blocks and terms of ``weights`` ``[blocks]`` times ``u(Y) v(Y)``, its coefficients.

        A block is 64 words, as ``binary_words.turned`` has them of ``[n]``. Bit ``j`` of its words stands at ``Y^e``,
        where ``e`` has to the base 3 the digits of ``j`` to the base 2, so that what two times the same ``j`` have in
        common stands alone at ``Y^(2 e)``. The bits of two sides that meet in a word are the element of that field that
        the word is."""

    def turned_sums(self, x: Tensor, weights: Tensor) -> Tensor:
        """``[64]``: the sum over blocks of ``weights`` ``[blocks]`` times the element that bit ``j`` of a block's words
        is; of ``[n]``, as above."""

    def block_weights(self, weights: Tensor, count: int) -> Tensor:
        """``[count]``: what a word weighs whose block has this weight: that times ``X^i`` for the ``i``-th."""

    def chosen_places(
        self, words: Tensor, weights: Tensor, factors: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """For every word ``[n]`` the XOR of the ``weights`` ``[64]`` of the places that are set; in the field times
        its ``factors`` ``[n]``, where there are any. ``out``: where to, no gaps in it."""

    def weigh(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        """``[degree, n]``: row ``c`` is the sum of the rows of ``x`` ``[m, n]`` whose weight ``[m]`` has bit ``c``."""

    def weigh_columns(self, x: Tensor, weights: Tensor, degree: int) -> Tensor:
        """``[m, degree]``: column ``c`` is the sum of the columns of ``x`` ``[m, n]`` whose weight ``[n]`` has bit
        ``c``."""

    def weigh_pairs(self, u: Tensor, v: Tensor, weights: Tensor, degree: int) -> Tensor:
        """``[degree, k, k]``: entry ``c, i, j`` is the sum of ``u_tgi v_tgj`` over terms ``t`` and groups ``g`` whose
        weight ``[m]`` has bit ``c``. ``[terms, m, k]`` each."""

    def ternary_numbers(self, u: Sequence[Tensor], v: Sequence[Tensor], weights: Tensor, degree: int) -> Tensor:
        """``[729, degree]``: the coefficients of ``sum_tg u_tg(Y) v_tg(Y)``, terms ``[64, groups]``: those of all
        groups in column ``c`` whose weight has bit ``c``. Entry ``j`` stands at the powers of ``ternary_bits``."""

    def weigh_elements(self, x: Tensor, weights: Tensor, tap: int, out: Tensor | None = None) -> Tensor:
        """``x_n w_n (X)`` modulo ``X^d + X^tap + 1``: ``[n, d]``, with the bits of ``weights`` ``[n]`` as
        coefficients. ``out``: where to, no gaps in it."""

    def add_degrees(self, products: Tensor) -> Tensor:
        """``[b, l, d, m, e]`` to ``[b, l + m - 1, d + e - 1]``: the entries whose two pairs of indices have the same
        sums."""

    def multiply_wide(self, x: Tensor, y: Tensor) -> Tensor:
        """Products of polynomials in two variables ``[b, l, n, d]``, summed over ``n``: ``[b, 2 l - 1, 2 d - 1]``. For
        few of them."""

    def multiply_elements(self, u: Tensor, v: Tensor) -> Tensor | None:
        """``[2 l - 1, 2 d - 1]``: entry ``l - 1 + i - j`` is ``sum_n u_in v_jn`` of elements ``[l, n, d]`` each, before
        their reduction. None where products of matrices take less."""

    def ring_multiply(self, a: Tensor, b: Tensor, tap: int) -> Tensor:
        """Products modulo ``X^d + X^tap + 1``, element by element ``[..., d]``; shapes broadcast."""

    def ring_powers(self, of: Tensor, count: int, tap: int) -> Tensor:
        """``[count, d]``: the powers of an element ``[d]`` modulo ``X^d + X^tap + 1``, from its 0th on."""

    def pack(self, x: Tensor, size: int) -> Tensor:
        """The lowest ``size`` bytes of every element, lowest first: uint8 ``[..., size]``."""

    def select_deal(self, rho: Tensor, us: list[Tensor], right: Tensor) -> Tensor:
        """``[1 + len(us), n]``: the mask bits ``rho`` (words) and ``rho u`` for each ``u``, less ``right``."""

    def select(
        self, delta: Tensor, mine: list[Tensor], online: list[Tensor], dealt: Tensor, lead: int
    ) -> tuple[list[Tensor], Tensor]:
        """An online party's shares of ``b x`` for each ``x``, and of ``b = delta ^ rho`` (``delta`` in words)."""

    def deal_digits(self, planes: Tensor, k: int, mask: Tensor, out: Tensor) -> None:
        """Thermometer codes of ``k``-bit digits, XOR ``mask``: planes ``[k d, w]`` into ``out`` ``[(2^k - 1) d, w]``.

        Row ``j d + i`` is ``[digit i > j]``.
        """

    def pick_digits(self, table: Tensor, planes: Tensor, k: int, one: int) -> tuple[Tensor, Tensor]:
        """(generate, propagate) ``[d, w]`` from a share of such a table and the public digits (``one``: share of
        one)."""

    def mask_products(self, plan: Level, left: Tensor, right: Tensor, mask: Tensor, out: Tensor) -> None:
        """All products of the masks ``left ^ right`` ``[singles, groups, w]``, XOR ``mask``, into ``out``."""

    def close(self, plan: Level, g: Tensor | None, p: Tensor, single: Tensor, out: Tensor) -> None:
        """Bits to open, ``[groups m, w]`` each, XOR their masks, in the layout's order, into ``out``."""

    def merge(
        self,
        plan: Level,
        opened: Tensor,
        single: Tensor,
        product: Tensor,
        one: int,
        g_out: Tensor | None,
        p_out: Tensor | None,
    ) -> None:
        """Evaluate the groups' generate and propagate shares into ``[groups, w]`` tensors (None: not wanted)."""
