"""Between numbers and bits: decomposition, composition, secret indices, and lifts between the two kinds of sharing.

The decomposition is a prefix addition (Kogge and Stone, 1973) over single bits, in steps of ``fan`` positions at a
time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uvcc_engine.mpc.arithmetic import DEALER, add_ring, public, scale_int, sub
from uvcc_engine.mpc.boolean import PairBits, to_bool_share_protocol
from uvcc_engine.mpc.carry import BatchMasks, GroupBatch, merge_protocol
from uvcc_engine.mpc.layout import level
from uvcc_engine.mpc.roles import known, online_part, roles
from uvcc_engine.mpc.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.mpc.selection import b2a_protocol, drelu_arithmetic_protocol
from uvcc_engine.mpc.share import BoolShare, Share, stack
from uvcc_engine.transcript.formats import kinds


def decompose_protocol(
    rt: Runtime, x: Share, *, bits: int = 64, fan: int = 2, dealer: int = DEALER
) -> MpcProtocol[PairBits]:
    """The lowest ``bits`` bits of every element (two's complement): pair-shared bits of shape ``[bits, x.n]``.

    ``1 + ceil(log_fan bits)`` rounds: 7 for 64 bits, or 4 with ``fan=4``, which sends 4 times as much. 200 bytes per
    element at 64 bits and ``fan=2``.
    """
    role = roles(rt, dealer)
    flat = x.reshape(-1)
    n, words = flat.n, -(-flat.n // 64)
    shape = torch.Size((bits, n))
    strides = [1]
    while strides[-1] * fan < bits:
        strides.append(strides[-1] * fan)
    batch = GroupBatch(level(fan, generate=True, carry_on=True), bits)
    s, q = batch.n_single, batch.n_product
    draws = rt.draws()
    right = draws.ring(role.with_right, bits + len(strides) * (s + q), words) if not role.is_left else None
    left = draws.ring(role.with_left, len(strides) * s, words) if not role.is_right else None
    message = Round()
    if role.is_dealer:
        both, mine = known(right), known(left)
        dealt = torch.empty(bits + len(strides) * q, words, dtype=torch.int64, device=both.device)
        torch.bitwise_xor(rt.kernels.to_planes(flat.first + flat.second, bits), both[:bits], out=dealt[:bits])
        for i in range(len(strides)):
            at, to = bits + i * (s + q), bits + i * q
            rt.kernels.mask_products(
                batch.plan,
                mine[i * s : (i + 1) * s].view(-1, bits, words),
                both[at : at + s].view(-1, bits, words),
                both[at + s : at + s + q].view(-1, bits, words),
                dealt[to : to + q].view(-1, bits, words),
            )
        message.send(role.left, kinds.DEALER, dealt)
        yield message
        for _ in strides:
            yield Round()
        return PairBits(role.d, shape, None)
    if role.is_left:
        message.want(role.d, kinds.DEALER, torch.int64, bits + len(strides) * q, words)
    got: list[Tensor] = yield message
    v = rt.kernels.to_planes(online_part(rt, role, flat), bits)
    u = got[0][:bits] if role.is_left else known(right)[:bits]
    g, half = u & v, (u ^ v if role.is_left else u)
    p = half
    one = -1 if role.is_left else 0
    for i, stride in enumerate(strides):
        if role.is_left:
            single, product = known(left)[i * s : (i + 1) * s], got[0][bits + i * q : bits + (i + 1) * q]
        else:
            at = bits + i * (s + q)
            single, product = known(right)[at : at + s], known(right)[at + s : at + s + q]
        masks = BatchMasks(batch, single.view(-1, bits, words), product.view(-1, bits, words))
        g, p = yield from merge_protocol(rt, role, [masks], _reach(g, stride, fan, 0), _reach(p, stride, fan, one))
    carry = torch.cat([torch.zeros_like(g[:1]), g[:-1]])
    return PairBits(role.d, shape, half ^ carry)


def _reach(x: Tensor, stride: int, fan: int, below: int) -> Tensor:
    """For every position its ``fan`` predecessors ``stride`` apart, lowest first; ``below`` past the lower end."""
    bits, words = x.shape
    far = stride * (fan - 1)
    long = torch.cat([torch.full((far, words), below, dtype=torch.int64, device=x.device), x])
    return torch.stack([long[j * stride : j * stride + bits] for j in range(fan)], 1).reshape(bits * fan, words)


def pair_bits(rt: Runtime, b: BoolShare, shape: torch.Size, *, dealer: int = DEALER) -> PairBits:
    """Replicated XOR shares as pair-shared bits of ``shape`` (same words). Local: the dealer forgets what it knows."""
    role = roles(rt, dealer)
    if role.is_dealer:
        return PairBits(role.d, shape, None)
    return PairBits(role.d, shape, b.first ^ b.second if role.is_left else b.second)


def a2b_protocol(rt: Runtime, x: Share, *, bits: int = 64, dealer: int = DEALER) -> MpcProtocol[BoolShare]:
    """LIFT from numbers to bits: replicated XOR shares ``[bits, ceil(x.n / 64)]``. One round more than
    ``decompose_protocol``."""
    found = yield from decompose_protocol(rt, x, bits=bits, dealer=dealer)
    return (yield from to_bool_share_protocol(rt, found))


def b2a_words_protocol(
    rt: Runtime, b: BoolShare, bits: int, n: int, f: int, *, dealer: int = DEALER
) -> MpcProtocol[Share]:
    """LIFT from bits to numbers: planes ``[bits, ceil(n / 64)]`` to ``[n]``; the top plane is the sign if there are 64.

    2 rounds, 24 bytes per bit.
    """
    planes = pair_bits(rt, b, torch.Size((bits, n)), dealer=dealer)
    numbers = yield from b2a_protocol(rt, planes)
    weights = torch.ones(bits, 1, dtype=torch.int64, device=rt.device) << torch.arange(bits, device=rt.device)[:, None]
    return scale_int(numbers, weights).sum(0).with_f(f)


def at_least_protocol(rt: Runtime, x: Share, thresholds: Tensor, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """``[x >= t]`` for every public threshold, as arithmetic bits (``f = 0``) ``[thresholds, *x.shape]``: 5 rounds."""
    # the least ring element at or above each: rounded to the nearest, one between two integers would move at f = 0
    ring = torch.ceil(thresholds.to(torch.float64) * 2.0**x.f).to(torch.int64)
    return (yield from drelu_arithmetic_protocol(rt, stack([add_ring(rt, x, -int(t)) for t in ring]), dealer=dealer))


def one_hot_protocol(rt: Runtime, index: Share, classes: int, *, dealer: int = DEALER) -> MpcProtocol[Share]:
    """Secret integers ``0 <= index < classes`` (any scale) to one-hot bits (``f = 0``) ``[..., classes]``: 5 rounds."""
    steps = yield from at_least_protocol(rt, index, torch.arange(1, classes) - 0.5, dealer=dealer)
    one = public(rt, torch.ones(1, *index.shape), f=0)
    zero = scale_int(one, 0)
    above = Share(torch.cat([one.first, steps.first]), torch.cat([one.second, steps.second]), 0)
    below = Share(torch.cat([steps.first, zero.first]), torch.cat([steps.second, zero.second]), 0)
    return sub(above, below).map(lambda t: t.movedim(0, -1).contiguous())
