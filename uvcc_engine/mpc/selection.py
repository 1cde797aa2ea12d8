"""Secret bits times secret numbers: ReLU, multiplexers, and conversion of bits to arithmetic shares.

A pair-shared bit ``b`` is opened to the online parties as ``b ^ rho`` with a mask bit that the dealer knows. A secret
``x = u + v`` (``u`` known to the dealer, ``v`` to the online parties) needs no opening at all: the dealer hands out
shares of ``rho`` and ``rho * u``, and ``b x`` is linear in them. The pair-shared product then returns to replicated
form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.arithmetic import DEALER, mul_gen, rt_kernels, sub
from uvcc_engine.mpc.boolean import PairBits, drelu_gen
from uvcc_engine.mpc.roles import assemble, mine_part, online_part, roles
from uvcc_engine.mpc.runtime import Round, Runtime, Steps
from uvcc_engine.mpc.share import Share
from uvcc_engine.transcript import kinds


def _ints(rt: Runtime, words: Tensor, shape: torch.Size) -> Tensor:
    """Packed bits to int64 zeros and ones of the bits' shape."""
    return rt_kernels(rt).bits_to_ints(words, shape[-1]).reshape(shape)


def select_pair_gen(rt: Runtime, b: PairBits, xs: list[Share], *, bit: bool = False) -> Steps[list[Tensor | None]]:
    """Pair shares of ``b * x`` for every ``x`` of ``b``'s shape, then of ``b`` itself (as an integer) if ``bit``.

    1 round; 2 bits between the online parties and 8 (1 + len(xs)) bytes from the dealer per element.
    """
    role = roles(rt, b.d)
    draws = rt.draws()
    shape = b.shape
    word_shape = b.word_shape
    n_out = 1 + len(xs)
    bits_left = draws.ring(role.with_left, *word_shape) if not role.is_right else None
    bits_right = draws.ring(role.with_right, *word_shape) if not role.is_left else None
    right = draws.ring(role.with_right, n_out, *shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        assert bits_left is not None
        assert bits_right is not None
        assert right is not None
        rho = _ints(rt, bits_left ^ bits_right, shape)
        message.send(role.left, kinds.DEALER, torch.stack([rho, *[rho * (x.lo + x.hi) for x in xs]]) - right)
        yield message
        return [None] * (len(xs) + bit)
    assert b.words is not None
    mask = bits_left if role.is_left else bits_right
    assert mask is not None
    closed = b.words.reshape(word_shape) ^ mask
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *word_shape)
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, n_out, *shape)
    got = yield message
    delta = _ints(rt, closed ^ got[0], shape)
    dealt = got[1] if role.is_left else right
    assert dealt is not None
    sign = 1 - 2 * delta
    # this party's share of the bit: delta + (1 - 2 delta) rho, the public part on the left
    own = sign * dealt[0] + delta if role.is_left else sign * dealt[0]
    out: list[Tensor | None] = [
        delta * mine_part(role, x) + sign * part + own * online_part(rt, role, x)
        for x, part in zip(xs, dealt[1:], strict=True)
    ]
    return [*out, own] if bit else out


def select_dealt_gen(rt: Runtime, b: PairBits, value: Tensor | None) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """Pair shares of a number ``value`` that only the dealer knows (ring elements of ``b``'s shape), and of ``b *
    value``.

    1 round; 2 bits between the online parties and 16 bytes from the dealer per element.
    """
    role = roles(rt, b.d)
    draws = rt.draws()
    shape = b.shape
    word_shape = b.word_shape
    bits_left = draws.ring(role.with_left, *word_shape) if not role.is_right else None
    bits_right = draws.ring(role.with_right, *word_shape) if not role.is_left else None
    right = draws.ring(role.with_right, 2, *shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        assert bits_left is not None
        assert bits_right is not None
        assert right is not None
        assert value is not None
        rho = _ints(rt, bits_left ^ bits_right, shape)
        message.send(role.left, kinds.DEALER, torch.stack([value, rho * value]) - right)
        yield message
        return None, None
    mask = bits_left if role.is_left else bits_right
    assert b.words is not None
    assert mask is not None
    closed = b.words.reshape(word_shape) ^ mask
    message.send(role.other, kinds.OPEN, closed)
    message.want(role.other, kinds.OPEN, torch.int64, *word_shape)
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, 2, *shape)
    got = yield message
    delta = _ints(rt, closed ^ got[0], shape)
    dealt = got[1] if role.is_left else right
    assert dealt is not None
    return dealt[0], delta * dealt[0] + (1 - 2 * delta) * dealt[1]


def pair_to_share_gen(rt: Runtime, y: Tensor | None, shape: torch.Size, f: int, dealer: int) -> Steps[Share]:
    """A pair-shared number to replicated form: 1 round, 16 bytes per element."""
    role = roles(rt, dealer)
    draws = rt.draws()
    left = draws.ring(role.with_left, *shape) if not role.is_right else None
    right = draws.ring(role.with_right, *shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        yield message
        return assemble(role, with_left=left, with_right=right, online=None, f=f)
    mask = left if role.is_left else right
    assert y is not None
    assert mask is not None
    mine = y - mask
    message.send(role.other, kinds.RESHARE, mine)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    (theirs,) = yield message
    return assemble(role, with_left=left, with_right=right, online=mine + theirs, f=f)


def select_gen(rt: Runtime, b: PairBits, x: Share) -> Steps[Share]:
    """``b * x`` for ``x`` with as many elements as ``b``: 2 rounds, 32 bytes per element. Shape of ``x``."""
    (y,) = yield from select_pair_gen(rt, b, [x.reshape(*b.shape)])
    return (yield from pair_to_share_gen(rt, None if y is None else y.reshape(x.shape), x.shape, x.f, b.d))


def b2a_gen(rt: Runtime, b: PairBits) -> Steps[Share]:
    """The bits as arithmetic shares of 0 and 1 (``f = 0``): 2 rounds, 24 bytes per bit."""
    (own,) = yield from select_pair_gen(rt, b, [], bit=True)
    return (yield from pair_to_share_gen(rt, own, b.shape, 0, b.d))


def relu_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[tuple[Share, Share]]:
    """``max(x, 0)`` and the bit ``[x >= 0]`` (``f = 0``) for the backward pass.

    5 rounds; 53 + 48 bytes per element over the three parties.
    """
    b = yield from drelu_gen(rt, x, dealer=dealer)
    y, own = yield from select_pair_gen(rt, b, [x.reshape(-1)], bit=True)
    both: Tensor | None = None
    if y is not None and own is not None:
        both = torch.stack([y, own]).reshape(2, *x.shape)
    pair = yield from pair_to_share_gen(rt, both, torch.Size((2, *x.shape)), x.f, b.d)
    return pair.index(0), pair.index(1).with_f(0)


def relu_only_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """``max(x, 0)`` without the bit: 5 rounds; 53 + 32 bytes per element."""
    b = yield from drelu_gen(rt, x, dealer=dealer)
    return (yield from select_gen(rt, b, x))


def mux_gen(rt: Runtime, bit: Share, x: Share, y: Share) -> Steps[Share]:
    """``x`` where the arithmetic bit (``f = 0``) is one, else ``y``: 1 round, 24 bytes per element."""
    difference = sub(x, y)
    chosen = yield from mul_gen(rt, difference, bit)
    return Share(chosen.lo + y.lo, chosen.hi + y.hi, y.f)


def relu(rt: Runtime, x: Share) -> tuple[Share, Share]:
    """``relu_gen``, run."""
    return rt.run(relu_gen(rt, x))


def drelu(rt: Runtime, x: Share) -> Share:
    """``[x >= 0]`` as an arithmetic bit (``f = 0``): 5 rounds."""
    return rt.run(drelu_arithmetic_gen(rt, x))


def drelu_arithmetic_gen(rt: Runtime, x: Share, *, dealer: int = DEALER) -> Steps[Share]:
    """``[x >= 0]`` as an arithmetic bit (``f = 0``): 5 rounds, 53 + 24 bytes per element."""
    b = yield from drelu_gen(rt, x, dealer=dealer)
    return (yield from b2a_gen(rt, b)).reshape(*x.shape)


def mux(rt: Runtime, bit: Share, x: Share, y: Share) -> Share:
    """``mux_gen``, run."""
    return rt.run(mux_gen(rt, bit, x, y))
