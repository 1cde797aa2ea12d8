"""A plaintext twin to the last bit: the primitives under the layers in plain integers, in one process.

Layers, losses and optimisers are the product's; what they call (products, truncations, comparisons, choices, tables)
is here, a few lines of integers each, without shares, masks, messages or random numbers. Whatever of the real protocols
a layer reached all the same would ask ``PlainRuntime`` for random numbers or send a message, and it has neither.

A ``Number`` knows beside itself which of three summands it lies in. Masks that are zero leave the outcome of a
truncation or a choice whole in the one that its dealer does not know, and a public constant in the first. Only the
exponential depends on it: it rounds the power of what its dealer knows and that of the rest each by itself.

How the protocols round, which is how these do where every mask is zero:

- a product, a product by a public factor, a rescaling, a power: the exact integer, times the public factor, shifted
  right, so down to minus infinity, once for a sum of products;
- a product whose second factor has no fractional bits (a bit) and whose public factor is whole: exact;
- a public factor becomes an odd integer of 12 bits (16 for a number times a public one alone) and a shift, to the
  nearest, ties to even; a public summand is rounded to the nearest of its scale;
- comparisons, choices, maxima and their places are exact, those of a fused product before it is rounded;
- powers: both summands' powers to the nearest, at 40 and 20 fractional bits, their product down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Context, Decimal
from functools import cache
from typing import Any

import pytest
import torch
from fixed_twin import public_factor
from plain_numbers import (
    DEALER,
    Number,
    PlainRuntime,
    add,
    add_public,
    add_ring,
    cat,
    held,
    neg,
    public,
    scale_int,
    sub,
)
from torch import Tensor

from uvcc_engine.model import additive, ops
from uvcc_engine.mpc.comparisons import gated, maximum, selection, tournament
from uvcc_engine.mpc.foundation import opening, share
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import exponential, softmax
from uvcc_engine.mpc.products import arithmetic

_EXACT = Context(prec=40)
_UPPER, _LOWER, _ROOM = 40, 20, 16
Steps = Iterator[Any]


def down(z: Tensor, shift: int) -> Tensor:
    """The truncation: the quotient by a power of two, the next integer below."""
    return z >> shift


def settled(z: Tensor, bits: int, f: int, scale: float, dealer: int) -> Number | None:
    """A product at ``bits`` fractional bits too many, times a public scale; None where nothing is to be cut off."""
    factor, shift = public_factor(scale, 11)
    if shift < 0:
        factor, shift = factor << -shift, 0
    if not bits + shift:
        return None
    return held(down(z * factor, bits + shift), f, dealer)


def product(local: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any, scale: float, dealer: int) -> Number:
    z = local(x.first, y.first)
    found = settled(z, y.f, x.f, scale, dealer)
    return exact(local, x, y, scale) if found is None else found


def exact(local: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any, scale: float) -> Number:
    """A product of which nothing is cut off. It lies where each product of two summands is computed."""
    factor, shift = public_factor(scale, 11)
    whole = local(x.first, y.first) * (factor << -shift)
    if x.third is None or y.third is None:
        return Number(whole, whole, x.f)
    a, b = ([one.summand(at) for at in range(3)] for one in (x, y))
    mine = [local(a[i], b[i] + b[(i + 1) % 3]) + local(a[(i + 1) % 3], b[i]) for i in (1, 2)]
    return Number(whole, mine[0] * (factor << -shift), x.f, mine[1] * (factor << -shift))


def mul(rt: Any, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> Steps:
    return product(torch.mul, x, y, scale, dealer)
    yield


def matmul(rt: Any, x: Share, y: Share, *, scale: float = 1.0, dealer: int = DEALER) -> Steps:
    return product(torch.matmul, x, y, scale, dealer)
    yield


def product_with(
    rt: Any, x: Share, y: Share, local: Any, *, scale: float = 1.0, dealer: int = DEALER, cut: Any = None
) -> Steps:
    return product(local, x, y, scale, dealer)
    yield


def form(
    rt: Any, x: Share, y: Share, local: Any, form: str, *, scale: float = 1.0, dealer: int = DEALER, cut: Any = None
) -> Steps:
    return product(lambda a, b: local([a], [b]), x, y, scale, dealer)
    yield


def mul_public(rt: Any, x: Share, value: float, *, dealer: int = DEALER) -> Steps:
    factor, shift = public_factor(value, 15)
    if shift <= 0:
        return x.map(lambda t: t * (factor << -shift))
    return held(down(x.first * factor, shift), x.f, dealer)
    yield


def rescale(rt: Any, x: Share, f: int, *, dealer: int = DEALER) -> Steps:
    if f >= x.f:
        return x.map(lambda t: t << f - x.f).with_f(f)
    return held(down(x.first, x.f - f), f, dealer)
    yield


def public_product(
    rt: Any, x: Share, factor: Tensor, added: Any = None, *, after: Any = None, also: Any = None
) -> Steps:
    z = x.first @ factor
    z = z if after is None else after(z)
    z = z if added is None else z + (added << x.f)
    z = z if also is None else z + also[0].first @ also[1].first
    return held(down(z, x.f), x.f)
    yield


def public_scaling(rt: Any, x: Share, factor: Tensor, added: Any = None) -> Steps:
    z = x.first * factor
    return held(down(z if added is None else z + (added << x.f), x.f), x.f)
    yield


def term(rt: Any, x: Share, y: Share, dealer: int) -> Tensor:
    return x.first @ y.first


def summed_term(rt: Any, x: Share, y: Share, axis: int, dealer: int) -> Tensor:
    return (x.first * y.first).sum(axis)


def settle(rt: Any, z: Tensor, shift: int, f: int, dealer: int, scale: float = 1.0) -> Steps:
    return settled(z, shift, f, scale, dealer)
    yield


def gate(rt: Any, x: Share, y: Share, bit: Share, *, scale: float = 1.0, dealer: int = DEALER) -> Steps:
    return held(product(torch.matmul, x, y, scale, dealer).first * bit.first, x.f, dealer)
    yield


def product_gate(
    rt: Any, x: Share, y: Share, bit: Share, local: Any, *, dealer: int = DEALER, cut: Any = None
) -> Steps:
    return held(product(local, x, y, 1.0, dealer).first * bit.first, x.f, dealer)
    yield


def sign(rt: Any, x: Share, *, dealer: int = DEALER) -> Steps:
    return held((x.first >= 0).long(), 0, dealer)
    yield


def relu(rt: Any, x: Share, *, dealer: int = DEALER, width: int = 64, above: int = 0) -> Steps:
    bit = (x.first > above).long()
    return held(x.first * bit, x.f, dealer), held(bit, 0, dealer)
    yield


def relu_only(rt: Any, x: Share, *, dealer: int = DEALER, width: int = 64) -> Steps:
    return held(x.first.clamp(min=0), x.f, dealer)
    yield


def matmul_relu(rt: Any, x: Share, y: Share, *, dealer: int = DEALER) -> Steps:
    z = x.first @ y.first
    bit = (z > 0).long()  # the sign is that of the product before it is rounded
    return held(down(z, y.f) * bit, x.f, dealer), held(bit, 0, dealer)
    yield


def place_of_greatest(x: Tensor) -> Tensor:
    """One-hot along the last axis, of the first in a tie."""
    greatest = x == x.amax(-1, keepdim=True)
    return (greatest & (greatest.cumsum(-1) == 1)).long()


def greatest(rt: Any, x: Share, *, dealer: int = DEALER) -> Steps:
    return x.index((..., 0)) if x.shape[-1] == 1 else held(x.first.amax(-1), x.f, dealer)
    yield


def greatest_place(rt: Any, x: Share, *, dealer: int = DEALER) -> Steps:
    return held(place_of_greatest(x.first), 0, dealer)
    yield


def greatest_and_place(rt: Any, x: Share, *, dealer: int = DEALER) -> Steps:
    return held(x.first.amax(-1), x.f, dealer), held(place_of_greatest(x.first), 0, dealer)
    yield


def matmul_greatest(rt: Any, x: Share, y: Share, *, dealer: int = DEALER) -> Steps:
    z = x.first @ y.first
    whole = down(z, y.f)
    # of up to ten entries the place is found before they are rounded
    best = (whole * place_of_greatest(z)).sum(-1) if 1 < z.shape[1] <= 10 else whole.amax(-1)
    return held(whole, x.f, dealer), held(best, x.f, dealer)
    yield


@cache
def power_table(step: int) -> Tensor:
    """``e^(i step / 2^16)`` for ten bits, each rounded to the nearest double."""
    return torch.tensor([float(_EXACT.exp(Decimal(i * step) / 65536)) for i in range(1024)], dtype=torch.float64)


def power(x: Tensor, f: int, more: Decimal, bits: int) -> Tensor:
    """``e^(x / 2^f + more)`` at so many fractional bits, for whole ``x`` from 0 to below 16."""
    fine = x << 16 - f
    found = power_table(1024)[fine >> 10] * power_table(1)[fine & 1023]
    return torch.round(found * (float(_EXACT.exp(more)) * 2.0**bits)).long()


def power_of_sum(u: Tensor, v: Tensor, f: int) -> Tensor:
    """``e^(u + v)`` at 60 fractional bits, for a sum from -16 to two units above zero."""
    units, whole = Decimal(2) / 2**f, _ROOM << f
    mine, theirs = (u - 2) % whole, v % whole
    over = mine + theirs >= whole
    left = power(mine, f, units - _ROOM, _UPPER)
    right = torch.where(over, power(theirs, f, Decimal(-_ROOM), _LOWER), power(theirs, f, Decimal(0), _LOWER))
    return left * right


def fine_powers(x: Any, dealer: int) -> Tensor:
    apart = x.summand((dealer + 2) % 3)
    z = power_of_sum(x.first - apart, apart, x.f)
    return torch.where(x.first + (_ROOM << x.f) >= 2, z, 0)


def exp(rt: Any, x: Share, *, dealer: int = DEALER) -> Steps:
    return held(down(fine_powers(x, dealer), _UPPER + _LOWER - x.f), x.f, dealer)
    yield


def looked_up(total: Tensor, names: Sequence[str]) -> list[Number]:
    """Functions of sums of powers, by a parabola for each of 256 cells: the product's public tables, 42 bits."""
    cell, place = total >> 56 & 255, total >> 43 & 8191
    found = []
    for name in names:
        a, b, c = exponential.parabolas(name, torch.device("cpu"))[:, cell]
        found.append(held(a + place * (b + place * c), exponential.LOOKUP_F))
    return found


def powers(rt: Any, x: Share, look_up: Sequence[str] = ("inverse",), *, dealer: int = DEALER) -> Steps:
    z = fine_powers(x, dealer)
    found = held(down(z, _UPPER + _LOWER - x.f), x.f, dealer)
    return [found, found.sum(1, keepdim=True), *looked_up(z.sum(1, keepdim=True), look_up)]
    yield


def matmul_powers(
    rt: Any, x: Share, y: Share, look_up: Sequence[str] = ("inverse",), *, f: int | None = None, dealer: int = DEALER
) -> Steps:
    z, scale, bits = x.first @ y.first, 2 * x.f, x.f if f is None else f
    hot = place_of_greatest(z)
    shifted = z - (z * hot).sum(1, keepdim=True)  # before it is rounded
    fine = power_of_sum(torch.zeros_like(z), shifted >> scale - 16, 16)
    fine = torch.where(shifted + (_ROOM << scale) - (4 << scale - 16) >= 0, fine, 0)
    whole = down(z, y.f)
    found = held(down(fine, _UPPER + _LOWER - bits), bits, dealer)
    total = found.sum(1, keepdim=True)
    top = held((whole * hot).sum(1), x.f, dealer)
    return softmax.SoftmaxParts(
        held(whole, x.f, dealer), top, found, total, looked_up(fine.sum(1, keepdim=True), look_up)
    )
    yield


def opened(rt: Any, x: Share) -> Steps:
    return x.first
    yield


PRIMITIVES: dict[Any, Any] = {
    Share: Number,
    share.cat: cat,
    arithmetic.add: add,
    arithmetic.sub: sub,
    arithmetic.neg: neg,
    arithmetic.scale_int: scale_int,
    arithmetic.add_ring: add_ring,
    arithmetic.add_public: add_public,
    arithmetic.public: public,
    arithmetic.mul_protocol: mul,
    arithmetic.matmul_protocol: matmul,
    arithmetic.product_with_protocol: product_with,
    arithmetic.form_protocol: form,
    arithmetic.mul_public_protocol: mul_public,
    arithmetic.rescale_protocol: rescale,
    additive.public_product_protocol: public_product,
    additive.public_scaling_protocol: public_scaling,
    additive.product: term,
    additive.summed_term: summed_term,
    additive.settle_protocol: settle,
    gated.matmul_gated_protocol: gate,
    gated.product_gated_protocol: product_gate,
    selection.drelu_arithmetic_protocol: sign,
    selection.relu_protocol: relu,
    selection.relu_only_protocol: relu_only,
    selection.matmul_relu_protocol: matmul_relu,
    maximum.max_protocol: greatest,
    maximum.argmax_one_hot_protocol: greatest_place,
    maximum.max_and_place_protocol: greatest_and_place,
    maximum.matmul_max_protocol: matmul_greatest,
    tournament.greatest_place_protocol: greatest_place,
    exponential.exp_protocol: exp,
    exponential.powers_protocol: powers,
    softmax.matmul_powers_protocol: matmul_powers,
    opening.open_ring_protocol: opened,
}


@contextmanager
def plain_ring(changed: dict[Any, Any] | None = None) -> Iterator[PlainRuntime]:
    """Meanwhile the primitives in place of the protocols, wherever the product's modules name them.

    ``changed``: other primitives for some protocols, as a planted difference.
    """
    ops.load()
    stands = {id(real): plain for real, plain in (PRIMITIVES | (changed or {})).items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in sorted(sys.modules.items()):
            if name.startswith("uvcc_engine."):
                for attribute, value in list(vars(module).items()):
                    if id(value) in stands:
                        patch.setattr(module, attribute, stands[id(value)])
        before = set(sys.modules)
        yield PlainRuntime()
        late = {name for name in set(sys.modules) - before if name.startswith("uvcc_engine.")}
        assert not late, f"import {late} before: they have kept the primitives"
