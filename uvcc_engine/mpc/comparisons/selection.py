"""Secret bits times secret numbers: ReLU, multiplexers, and conversion of bits to arithmetic shares.

A pair-shared bit ``b`` is opened to the online parties as ``delta = b ^ rho`` with a mask bit that the dealer knows.
A secret ``x = u + v`` (``u`` known to the dealer, ``v`` to the online parties) needs no opening at all: the dealer
hands out shares of ``rho`` and ``rho * u``, and ``b x`` is linear in them. The pair-shared product then returns to
replicated form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.mpc.comparisons.boolean import WIDE_UP_TO, PairBits, drelu_protocol, sign_protocol
from uvcc_engine.mpc.comparisons.proved_bits import sign_of_truncated_protocol, sign_proved_protocol
from uvcc_engine.mpc.comparisons.proved_numbers import chosen_proved_protocol, numbers_proved_protocol
from uvcc_engine.mpc.foundation.chunking import CHUNK, chunk_slices, dealt_slices, dealt_words, in_chunks_protocol
from uvcc_engine.mpc.foundation.roles import Roles, assemble, known, mine_part, online_part, places, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import BoolShare, Share, placed
from uvcc_engine.mpc.products.arithmetic import (
    DEALER,
    add_ring,
    matmul_open_protocol,
    matmul_protocol,
    mul_protocol,
    sub,
)
from uvcc_engine.mpc.products.truncation import Opened
from uvcc_engine.transcript.formats import kinds

_DEALT, _DEALT_WIDE = 64, 272  # bytes that the dealer of a product's ReLU sends for one output
COMPARED = 29  # and that of a comparison alone


def open_bits(role: Roles, b: PairBits, message: Round, left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add the opening of ``b`` under the mask bits to ``message``; returns this online party's half of ``delta``.

    Shapes in words: 64 bits each.
    """
    if role.is_dealer:
        return None
    closed = known(b.words).reshape(b.word_shape) ^ known(left if role.is_left else right)
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *b.word_shape)
    return closed


def select_pair_protocol(
    rt: Runtime, b: PairBits, xs: Sequence[Share], *, bit: bool = False
) -> MpcProtocol[list[Tensor | None]]:
    """Pair shares of ``b * x`` for every ``x`` of ``b``'s shape, then of ``b`` itself (as an integer) if ``bit``.

    1 round; 2 bits between the online parties and 8 (1 + len(xs)) bytes from the dealer per element.
    """
    role = roles(rt, b.d)
    draws = rt.draws()
    n_out = 1 + len(xs)
    left = draws.ring(role.with_left, *b.word_shape) if not role.is_right else None
    right = draws.ring(role.with_right, *b.word_shape) if not role.is_left else None
    dealt = draws.ring(role.with_right, n_out, *b.shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        us = [x.first + x.second for x in xs]
        message.send(role.left, kinds.DEALER, rt.kernels.select_deal(known(left) ^ known(right), us, known(dealt)))
        yield message
        return [None] * (len(xs) + bit)
    closed = known(open_bits(role, b, message, left, right))
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, n_out, *b.shape)
    got: list[Tensor] = yield message
    if role.is_left:
        dealt = got[1]
    mine, online = [mine_part(role, x) for x in xs], [online_part(rt, role, x) for x in xs]
    products, own = rt.kernels.select(closed ^ got[0], mine, online, known(dealt), int(role.is_left))
    return [*products, own] if bit else [*products]


def select_dealt_protocol(
    rt: Runtime, b: PairBits, value: Tensor | None
) -> MpcProtocol[tuple[Tensor | None, Tensor | None]]:
    """Pair shares of a number ``value`` that only the dealer knows (ring elements of ``b``'s shape), and of ``b *
    value``.

    1 round; 2 bits between the online parties and 16 bytes from the dealer per element.
    """
    role = roles(rt, b.d)
    draws = rt.draws()
    left = draws.ring(role.with_left, *b.word_shape) if not role.is_right else None
    right = draws.ring(role.with_right, *b.word_shape) if not role.is_left else None
    dealt = draws.ring(role.with_right, 2, *b.shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        plain = known(value)
        rho = rt.kernels.bits_to_ints(known(left) ^ known(right), b.shape[-1])
        message.send(role.left, kinds.DEALER, torch.stack([plain, rho * plain]) - known(dealt))
        yield message
        return None, None
    closed = known(open_bits(role, b, message, left, right))
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, 2, *b.shape)
    got: list[Tensor] = yield message
    delta = rt.kernels.bits_to_ints(closed ^ got[0], b.shape[-1])
    whole, part = got[1] if role.is_left else known(dealt)
    return whole, delta * whole + (1 - 2 * delta) * part


def pair_to_share_protocol(
    rt: Runtime, y: Tensor | None, shape: torch.Size, f: int, dealer: int, out: Share | None = None
) -> MpcProtocol[Share]:
    """A pair-shared number to replicated form (in place in ``out``): 1 round, 16 bytes per element."""
    role = roles(rt, dealer)
    draws = rt.draws()
    to = places(role, out)
    left = draws.ring(role.with_left, *shape, out=to.with_left) if not role.is_right else None
    right = draws.ring(role.with_right, *shape, out=to.with_right) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        yield message
        return assemble(role, with_left=left, with_right=right, online=None, f=f)
    mine = known(y) - known(left if role.is_left else right)
    message.send(role.other, kinds.RESHARE, mine)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    (theirs,) = yield message
    online = torch.add(mine, theirs, out=to.online)
    return assemble(role, with_left=left, with_right=right, online=online, f=f)


def select_protocol(rt: Runtime, b: PairBits, x: Share, out: Share | None = None) -> MpcProtocol[Share]:
    """``b * x`` for ``x`` with as many elements as ``b``: 2 rounds, 32 bytes per element. Shape of ``x``."""
    (y,) = yield from select_pair_protocol(rt, b, [x.reshape(*b.shape)])
    return (yield from pair_to_share_protocol(rt, None if y is None else y.reshape(x.shape), x.shape, x.f, b.d, out))


def b2a_protocol(rt: Runtime, b: PairBits, out: Share | None = None) -> MpcProtocol[Share]:
    """The bits as arithmetic shares of 0 and 1 (``f = 0``): 2 rounds, 24 bytes per bit. Shape of ``b``."""
    (own,) = yield from select_pair_protocol(rt, b, [], bit=True)
    return (yield from pair_to_share_protocol(rt, own, b.shape, 0, b.d, out))


def _value_and_bit_protocol(
    rt: Runtime, b: PairBits, x: Share, outs: Sequence[Share | None] = (None, None)
) -> MpcProtocol[list[Share]]:
    """``b * x`` and ``b`` (``f = 0``), flat: 2 rounds, 48 bytes per element."""
    y, own = yield from select_pair_protocol(rt, b, [x.reshape(*b.shape)], bit=True)
    return (
        yield from par(
            pair_to_share_protocol(rt, y, b.shape, x.f, b.d, outs[0]),
            pair_to_share_protocol(rt, own, b.shape, 0, b.d, outs[1]),
        )
    )


def _proved_value_and_bit_protocol(
    rt: Runtime, x: Share, dealer: int, outs: Sequence[Share | None], above: int = 0
) -> MpcProtocol[list[Share]]:
    """``max(x, 0)`` and, where two results are asked for, the bit, flat, such that every message can be proved: 10
    rounds, 97 bytes per element; for few rounds 9, and 8 bytes more, with the bit 24. ``above``: see
    :func:`relu_protocol`."""
    sign = yield from sign_proved_protocol(rt, add_ring(rt, x, -1 - above), dealer=dealer)
    found = yield from _proved_choice_protocol(rt, sign, x, dealer, number=len(outs) > 1)
    return [placed(one, out) for one, out in zip(found, outs, strict=False)]


def _proved_choice_protocol(
    rt: Runtime, sign: BoolShare, x: Share, dealer: int, *, number: bool = True
) -> MpcProtocol[list[Share]]:
    """``x`` where its sign says so, and the sign as a ``number`` if that is wanted: 3 rounds, or 2."""
    if rt.few_rounds:
        return (yield from chosen_proved_protocol(rt, sign, x, dealer=dealer, number=number))
    bit = yield from numbers_proved_protocol(rt, sign, dealer=dealer)
    return [(yield from mul_protocol(rt, x, bit, dealer=dealer)), bit]


def _shared_out(rt: Runtime, n: int) -> list[slice]:
    """Elements to compare, in chunks or, where few rounds matter, in three parts with a dealer each."""
    places = chunk_slices(n)
    return places if len(places) > 1 else dealt_words(rt, n, n * COMPARED)


ROUNDED: Final = 1
"""Units by which a truncation may lift a number: what is zero may come out of it as one."""


def relu_protocol(
    rt: Runtime, x: Share, *, dealer: int = DEALER, width: int = 64, above: int = 0
) -> MpcProtocol[tuple[Share, Share]]:
    """``max(x, 0)`` and the bit ``[x > 0]`` (``f = 0``) for the backward pass: the slope at zero is 0, as PyTorch's.

    With ``above`` numbers of up to so many units count as zero: ``ROUNDED`` where they were truncated. 5 rounds, 51 +
    48 bytes per element over the three parties; from ``boolean.BULK`` elements on 6 rounds, 43 + 48 bytes.
    """
    flat = x.reshape(-1)

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        part = flat.index(place)
        if rt.proves_everything:
            return (yield from _proved_value_and_bit_protocol(rt, part, dealer, outs, above))
        b = yield from drelu_protocol(rt, add_ring(rt, part, -1 - above), dealer=dealer, width=width, of=x.n)
        return (yield from _value_and_bit_protocol(rt, b, part, outs))

    value, bit = yield from in_chunks_protocol(_shared_out(rt, x.n), flat.shape, [x.f, 0], build, dealer, rt.device)
    return value.reshape(*x.shape), bit.reshape(*x.shape)


def relu_only_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER, width: int = 64) -> MpcProtocol[Share]:
    """``max(x, 0)`` without the bit: rounds as ``relu_protocol``; 32 bytes per element after the comparison."""
    flat = x.reshape(-1)

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        part = flat.index(place)
        if rt.proves_everything:
            return (yield from _proved_value_and_bit_protocol(rt, part, dealer, outs))
        b = yield from drelu_protocol(rt, part, dealer=dealer, width=width, of=x.n)
        return [(yield from select_protocol(rt, b, part, outs[0]))]

    (value,) = yield from in_chunks_protocol(_shared_out(rt, x.n), flat.shape, [x.f], build, dealer, rt.device)
    return value.reshape(*x.shape)


def drelu_arithmetic_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``[x >= 0]`` as an arithmetic bit (``f = 0``): rounds as ``relu_protocol``; 24 bytes per element after the
    comparison."""
    flat = x.reshape(-1)

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        if rt.proves_everything:
            sign = yield from sign_proved_protocol(rt, flat.index(place), dealer=dealer)
            return [(yield from numbers_proved_protocol(rt, sign, dealer=dealer, out=outs[0]))]
        b = yield from drelu_protocol(rt, flat.index(place), dealer=dealer, of=x.n)
        return [(yield from b2a_protocol(rt, b, outs[0]))]

    (bit,) = yield from in_chunks_protocol(_shared_out(rt, x.n), flat.shape, [0], build, dealer, rt.device)
    return bit.reshape(*x.shape)


def matmul_relu_protocol(rt: Runtime, x: Share, y: Share, *, dealer: int = DEALER) -> MpcProtocol[tuple[Share, Share]]:
    """``relu_protocol(x @ y)`` in 5 rounds instead of 7: the comparison starts from the masked product while it is
    truncated. Up to ``boolean.WIDE_UP_TO`` outputs 4 rounds, and 190 bytes more each.

    The bit is whether the product is above zero before rounding. ``x``: [..., m, k]; ``y``: [..., k, n]. Where
    everything is proved: 10 rounds, or 9; of more than ``CHUNK`` outputs 2 more, with the bit of the rounded product.
    For few rounds the rows are shared out to the three dealers, who send at the same time what one would send alone.
    """
    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    if rt.proves_everything:
        if shape.numel() > CHUNK:
            product = yield from matmul_protocol(rt, x, y, dealer=dealer)
            return (yield from relu_protocol(rt, product, dealer=dealer, above=ROUNDED))
        return (yield from _proved_product_relu_protocol(rt, x, y, dealer))
    most = WIDE_UP_TO if shape.numel() <= WIDE_UP_TO else 0  # of the whole, however it is shared out
    rows = [slice(0, 1)]
    if x.first.dim() == 2 and y.first.dim() == 2:
        rows = dealt_slices(rt, shape[0], shape.numel() * (_DEALT_WIDE if most else _DEALT))

    def build(dealer: int, place: slice, outs: Sequence[Share | None]) -> MpcProtocol[list[Share]]:
        part = x if len(rows) == 1 else x.index(place)
        into = [None if out is None else out.reshape(-1) for out in outs]
        return (yield from _open_relu_protocol(rt, part, y, dealer, most, into))

    value, bit = yield from in_chunks_protocol(rows, shape, [x.f, 0], build, dealer, rt.device)
    return value.reshape(*shape), bit.reshape(*shape)


def _proved_product_relu_protocol(rt: Runtime, x: Share, y: Share, dealer: int) -> MpcProtocol[tuple[Share, Share]]:
    """See :func:`matmul_relu_protocol`. Of a number whose rounding lies below zero the value is a unit below it."""
    opened = Opened()
    count = torch.Size((*x.shape[:-1], y.shape[-1])).numel()
    product = matmul_open_protocol(rt, x, y, opened, dealer=dealer)
    both: MpcProtocol[list[Any]] = par(product, sign_of_truncated_protocol(rt, opened, count, dealer))
    z, sign = yield from both
    value, bit = yield from _proved_choice_protocol(rt, sign, z.reshape(-1), dealer)
    return value.reshape(*z.shape), bit.reshape(*z.shape)


def _open_relu_protocol(
    rt: Runtime, x: Share, y: Share, dealer: int, most: int, outs: Sequence[Share | None]
) -> MpcProtocol[list[Share]]:
    """Value and bit, flat, of ``x @ y``, compared in 2 rounds up to ``most`` outputs."""
    opened = Opened()
    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    product = matmul_open_protocol(rt, x, y, opened, dealer=dealer)
    both: MpcProtocol[list[Any]] = par(product, sign_of_opened_protocol(rt, opened, shape, dealer, most=most))
    z, b = yield from both
    return (yield from _value_and_bit_protocol(rt, b, z, outs))


def sign_of_opened_protocol(
    rt: Runtime, opened: Opened, shape: torch.Size, dealer: int, *, most: int = WIDE_UP_TO
) -> MpcProtocol[PairBits]:
    """``[z > 0]`` for a product that runs beside this (before it in ``par``) and fills ``opened``. 3 rounds in all, or
    2 for few up to ``most`` elements."""
    u = known(opened.u).reshape(-1) - 1 if roles(rt, dealer).is_dealer else None

    def v() -> Tensor:
        return known(opened.v).reshape(-1)

    return (yield from sign_protocol(rt, dealer, shape.numel(), u, v, most=most))


def mux_protocol(rt: Runtime, bit: Share, x: Share, y: Share) -> MpcProtocol[Share]:
    """``x`` where the arithmetic bit (``f = 0``) is one, else ``y``: 1 round, 24 bytes per element.

    All three have one shape.
    """
    chosen = yield from mul_protocol(rt, sub(x, y), bit)
    return Share(chosen.first + y.first, chosen.second + y.second, y.f)


def relu(rt: Runtime, x: Share) -> tuple[Share, Share]:
    """``relu_protocol``, run."""
    return rt.run(relu_protocol(rt, x))


def drelu(rt: Runtime, x: Share) -> Share:
    """``drelu_arithmetic_protocol``, run."""
    return rt.run(drelu_arithmetic_protocol(rt, x))


def mux(rt: Runtime, bit: Share, x: Share, y: Share) -> Share:
    """``mux_protocol``, run."""
    return rt.run(mux_protocol(rt, bit, x, y))
