"""Secret bits: comparisons, ANDs, and conversion to replicated XOR shares.

Comparisons give pair-shared bits (``PairBits``): the online parties hold XOR shares, the dealer nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons.carry import CarryTree, and_level_protocol, carry_protocol, tree
from uvcc_engine.mpc.foundation.chunking import chunk_slices
from uvcc_engine.mpc.foundation.roles import known, online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import BoolShare, Share
from uvcc_engine.mpc.kernels.layout import level
from uvcc_engine.transcript.formats import kinds

DEALER = 2
DIGIT = 3  # 21 digits of 3 bits make the 63 bits below the sign
QUICK: CarryTree = tree(((5, 1), (4, 4)), ((5, 1),))
SPARING: CarryTree = tree(((3, 1), (3, 6)), ((3, 1), (4, 1)), ((2, 1),))
HALF: CarryTree = tree(((3, 1), (3, 2), (2, 1)), ((4, 1),))  # 11 digits: 31 bits below the sign of the reduced ring
WIDE: CarryTree = tree(((9, 1),))  # 9 digits of 7 bits, merged at once
WIDE_DIGIT = 7
WIDE_UP_TO = 1 << 14  # elements for which a round matters more than 190 bytes each
BULK = 1 << 15  # elements from which bytes matter more than a round


@dataclass(frozen=True, slots=True, eq=False)
class PairBits:
    """Secret bits of ``shape``, XOR-shared between the online parties of dealer ``d``; ``words`` is None at the dealer.

    ``words`` is ``[..., ceil(shape[-1] / 64)]``, packed along the last axis.
    """

    d: int
    shape: torch.Size
    words: Tensor | None

    @property
    def n(self) -> int:
        """How many bits there are."""
        return self.shape.numel()

    @property
    def word_shape(self) -> tuple[int, ...]:
        """The shape of the packed words: ``[..., ceil(shape[-1] / 64)]``."""
        return (*self.shape[:-1], -(-self.shape[-1] // 64))


def not_(rt: Runtime, b: PairBits) -> PairBits:
    """The complement. Local. Shape of ``b``."""
    if b.words is None or not roles(rt, b.d).is_left:
        return b
    return replace(b, words=~b.words)


def padded(x: Share) -> Share:
    """Pad the last axis with zeros to a multiple of 64, so that bit planes pack along it."""
    short = -x.shape[-1] % 64
    return x.map(lambda t: torch.nn.functional.pad(t, (0, short))) if short else x


def drelu_protocol(
    rt: Runtime, x: Share, *, dealer: int = DEALER, width: int = 64, of: int = 0
) -> MpcProtocol[PairBits]:
    """``[x >= 0]`` for every element, exact over all 64 bits: ``x.n`` pair-shared bits in one row.

    ``of``: how many elements there are, where this is a part of them that has a dealer of its own.

    3 rounds, 51 bytes per element over the three parties; from ``BULK`` elements on 4 rounds, 43 bytes. ``width=32``
    looks at the components modulo 2^32, which still share ``x`` if ``|x| < 2^31`` as a ring element: 3 rounds, 22
    bytes.
    """
    role = roles(rt, dealer)
    flat = x.reshape(-1)
    value = (flat.first + flat.second) if role.is_dealer else online_part(rt, role, flat)
    mine = value if role.is_dealer else None
    return (yield from sign_protocol(rt, dealer, x.n, mine, lambda: value, width=width, of=of))


def _planes(rt: Runtime, x: Tensor, width: int, digit: int) -> tuple[Tensor, Tensor]:
    """(bit planes below the sign, a multiple of the digit; sign plane)."""
    planes = rt.kernels.to_planes(x, width)
    body = planes[: width - 1]
    short = -(width - 1) % digit
    return (torch.cat([torch.zeros_like(body[:short]), body]) if short else body), planes[width - 1]


def sign_protocol(
    rt: Runtime,
    dealer: int,
    n: int,
    u: Tensor | None,
    v: Callable[[], Tensor],
    *,
    width: int = 64,
    most: int = 0,
    of: int = 0,
) -> MpcProtocol[PairBits]:
    """``[u + v >= 0]`` for ``u`` known to the dealer and ``v()`` to the online parties, ``[n]`` each.

    ``v`` is asked for after the first round, so a value that is just being opened can be compared without delay. Up to
    ``most`` elements are compared in 2 rounds and 240 bytes each: the online parties open 17 bits under masks at once,
    with the dealer's shares of all products of masks, as in every merging step (``carry``). ``of``: see
    :func:`drelu_protocol`.
    Raises ConfigError for a width other than 32 and 64 bits.
    """
    if width not in (32, 64):
        raise ConfigError(f"a comparison over {width} bits", "use 64, or 32 where the range allows it")
    role = roles(rt, dealer)
    wide = width == 64 and n <= most and rt.few_rounds
    digit = WIDE_DIGIT if wide else DIGIT
    mine, sign = (None, None) if u is None else _planes(rt, u, width, digit)
    top: list[Tensor] = []

    def online() -> Tensor:
        planes, own = _planes(rt, v(), width, digit)
        top.append(own)
        return planes

    steps = WIDE if wide else HALF if width == 32 else SPARING if max(n, of) >= BULK else QUICK
    carry, theirs = yield from carry_protocol(rt, dealer, digit, steps, -(-n // 64), mine, online, sign)
    shape = torch.Size((n,))
    if carry is None or theirs is None:
        return PairBits(role.d, shape, None)
    bits = carry ^ theirs
    return PairBits(role.d, shape, ~(bits ^ top[0]) if role.is_left else bits)


def and_protocol(rt: Runtime, b: PairBits, *, fan: int = 9) -> MpcProtocol[PairBits]:
    """AND over the first axis of ``b``, [n, ...] to [...], in ``ceil(log_fan(n))`` rounds of ``fan`` inputs at most."""
    role = roles(rt, b.d)
    m, rest = b.shape[0], b.shape[1:]
    inner = PairBits(b.d, rest, None).word_shape
    flat = 1
    for side in inner:
        flat *= side
    words = None if b.words is None else b.words.reshape(m, flat)
    while m > 1:
        take = m if m <= fan else max(2, min(fan, round(m**0.5)))
        groups = -(-m // take)
        if words is not None and groups * take > m:  # neutral ones
            fill = torch.full_like(words[:1], -1 if role.is_left else 0).expand(groups * take - m, flat)
            words = torch.cat([words, fill])
        words = yield from and_level_protocol(rt, b.d, level(take, generate=False, carry_on=True), groups, flat, words)
        m = groups
    return PairBits(b.d, rest, None if words is None else words[0].reshape(inner))


def to_bool_share_protocol(rt: Runtime, b: PairBits) -> MpcProtocol[BoolShare]:
    """Pair-shared bits to replicated XOR shares: 1 round, 2 bits per bit. Shape of ``b``."""
    role = roles(rt, b.d)
    draws = rt.draws()
    shape = b.word_shape
    left = draws.ring(role.with_left, *shape) if not role.is_right else None
    right = draws.ring(role.with_right, *shape) if not role.is_left else None
    message = Round()
    if role.is_dealer:
        yield message
        return BoolShare(known(right), known(left), b.n)
    mask = known(left if role.is_left else right)
    mine = known(b.words).reshape(shape) ^ mask
    message.send(role.other, kinds.RESHARE, mine)
    message.want(role.other, kinds.RESHARE, torch.int64, *shape)
    (theirs,) = yield message
    online = mine ^ theirs
    return BoolShare(mask, online, b.n) if role.is_left else BoolShare(online, mask, b.n)


def drelu_bits_protocol(rt: Runtime, x: Share, *, dealer: int = DEALER) -> MpcProtocol[BoolShare]:
    """``[x >= 0]`` as replicated XOR shares, in one row: one round and 2 bits more than ``drelu_protocol``."""

    def chunk_protocol(at: int, place: slice) -> MpcProtocol[BoolShare]:
        b = yield from drelu_protocol(rt, flat.index(place), dealer=(dealer + at) % 3)
        return (yield from to_bool_share_protocol(rt, b))

    flat = x.reshape(-1)
    found = yield from par(*[chunk_protocol(at, place) for at, place in enumerate(chunk_slices(flat.n))])
    return BoolShare(torch.cat([b.first for b in found]), torch.cat([b.second for b in found]), x.n)
