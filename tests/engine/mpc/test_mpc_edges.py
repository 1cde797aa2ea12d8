"""Where fixed-point protocols come to the edge of what they promise: near ties, bits above a shift, the ring's end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from uvcc_engine import simulate
from uvcc_engine.contract.errors import RingRangeError
from uvcc_engine.model import losses
from uvcc_engine.mpc.comparisons import bits, gated, maximum
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct, share_of, split
from uvcc_engine.mpc.functions import activations, exponential, nonlinear
from uvcc_engine.mpc.products import arithmetic, truncation
from uvcc_engine.transcript.formats import kinds

Run = Callable[..., Any]
DEALER = 2


@pytest.mark.parametrize("shift", [1, 7, 20, 33, 45])
@pytest.mark.parametrize("own", [False, True])
def test_no_bit_above_the_shift_is_sent(run: Run, monkeypatch: pytest.MonkeyPatch, shift: int, own: bool) -> None:
    """A carry out of the parts' sum would be the mask's top bit, hence the sign of what is truncated."""
    monkeypatch.setattr(truncation, "OWN_FROM", 0 if own else 1 << 16)
    planes = LocalPlanes(5, keep=True)
    n = 400

    def build(rt: Runtime, zero: Share) -> MpcProtocol[Share]:
        return (yield from arithmetic.rescale_protocol(rt, zero.with_f(shift), 0, dealer=DEALER))

    run(build, torch.zeros(n, dtype=torch.float64), planes=planes)
    dtype, shape = truncation.wire_form(shift, torch.Size((n,)))
    size = dtype.itemsize * int(np.prod(shape))
    online = {(DEALER + 1) % 3, (DEALER + 2) % 3}
    seen = 0
    for party in online:
        for source, tag, body in planes.wire.received[party]:
            if source not in online or tag.kind != kinds.RESHARE or len(body) < size:
                continue
            part = torch.frombuffer(bytearray(body[-size:]), dtype=dtype).reshape(shape)
            if len(body) in (size, size + 8 * n):  # the second: packed behind what is opened
                whole = truncation.from_wire(part, shift).to(torch.int64)
                spare = 8 * (shape[-1] if dtype is torch.uint8 else dtype.itemsize)
                above = (whole & ((1 << spare) - 1)) >> shift
                assert not bool(above.any())
                seen += 1
    assert seen == 2


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_every_bit_of_what_is_opened_is_hidden(
    run: Run, monkeypatch: pytest.MonkeyPatch, own: bool, bare: bool
) -> None:
    """Of a truncated zero; ``bare``: planted, lower bits that the dealer does not cover show those of the value."""
    kinds_of = type(LocalPlanes().runtimes[0].kernels)
    opens, seen = kinds_of.truncate_open, []

    def watched(*given: Any) -> tuple[Tensor, Tensor]:
        found = opens(*given)
        seen.append(found[0].clone())
        return found

    def uncovered(honest: Callable[..., Any], at: int) -> Callable[..., Any]:
        return lambda *given: honest(*given[:at], torch.zeros_like(given[at]), *given[at + 1 :])

    monkeypatch.setattr(kinds_of, "truncate_open", watched)
    if bare:
        monkeypatch.setattr(kinds_of, "truncate_deal", uncovered(kinds_of.truncate_deal, 6))
        monkeypatch.setattr(kinds_of, "truncate_deal_own", uncovered(kinds_of.truncate_deal_own, 5))
    monkeypatch.setattr(truncation, "OWN_FROM", 0 if own else 1 << 16)
    run(lambda rt, zero: arithmetic.rescale_protocol(rt, zero, 3), torch.zeros(4096, dtype=torch.float64))
    assert len(seen) == 2
    ones = [int(((seen[0] >> bit) & 1).sum()) for bit in range(64)]
    hidden = [abs(count - 2048) < 6 * 32 for count in ones]  # six standard deviations
    assert hidden == [not bare or bit >= 13 for bit in range(64)]


@pytest.mark.parametrize("f", [12, 16, 20])
def test_two_logits_that_are_almost_equal_share_the_probability(run: Run, f: int) -> None:
    """The maximum is found before the product is rounded, which may lift the smaller of two above it."""
    rows, unit = 600, 2.0**-f
    x = torch.zeros(rows, 2, dtype=torch.float64)
    x[:, 0] = 1.0
    x[:, 1] = unit
    w = torch.tensor([[3.0, 3.0], [0.5, 0.5 - unit]], dtype=torch.float64)  # apart by 2^-f of a unit
    one_hot = torch.nn.functional.one_hot(torch.zeros(rows, dtype=torch.int64), 2).to(torch.float64)

    def build(rt: Runtime, a: Share, b: Share, y: Share) -> MpcProtocol[list[Share]]:
        logits, top = yield from maximum.matmul_max_protocol(rt, a, b)
        at = yield from losses.powers_protocol(rt, logits, top)
        return [(yield from losses.gradient_protocol(rt, at, y))]

    out = run(build, x, w, one_hot, f=f)
    probabilities = out.value + one_hot
    assert (probabilities - 0.5).abs().max() < 2.0**-9


@pytest.mark.parametrize("f", [12, 16])
def test_the_exponential_takes_a_unit_above_zero(run: Run, f: int) -> None:
    unit = 2.0**-f
    x = torch.tensor([unit, 0.0, -unit, -1.0, -16 + 2 * unit, -16.5, -100.0], dtype=torch.float64)
    out = run(exponential.exp_protocol, x, f=f)
    assert (out.value - torch.where(x > -16, x.exp(), torch.zeros_like(x))).abs().max() < 2 * unit


@pytest.mark.parametrize("f", [0, 1, 16])
@pytest.mark.parametrize("classes", [2, 3, 9])
def test_one_hots_of_integers_at_any_scale(run: Run, f: int, classes: int) -> None:
    index = torch.arange(classes, dtype=torch.float64).repeat(3)
    out = run(lambda rt, s: bits.one_hot_protocol(rt, s, classes), index, f=f)
    assert torch.equal(out.value, torch.nn.functional.one_hot(index.long(), classes).to(torch.float64))


def _wide(rt: Runtime, x: Share, y: Share) -> MpcProtocol[Share]:
    return (yield from arithmetic.matmul_protocol(rt, x, y))


def _elementwise(rt: Runtime, x: Share, y: Share) -> MpcProtocol[Share]:
    return (yield from arithmetic.mul_protocol(rt, x, y))


def _gated(rt: Runtime, x: Share, y: Share) -> MpcProtocol[Share]:
    bit = arithmetic.public(rt, torch.ones(x.shape), f=0)
    return (yield from gated.matmul_gated_protocol(rt, x, y, bit))


@pytest.mark.parametrize("protocol", [_wide, _elementwise, _gated])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_number_that_passes_the_ring_s_range_raises_the_alarm(run: Run, protocol: Any, sign: float) -> None:
    def numbers(size: float) -> Tensor:
        return torch.full((1, 1), size, dtype=torch.float64)

    below, above = numbers(2.0**15 - 1), numbers(sign * 2.0**15)
    assert float(run(protocol, below, below, planes=LocalPlanes(3, watch_range=True)).value) == (2.0**15 - 1) ** 2
    with pytest.raises(RingRangeError, match=r"1 of 1 numbers of shape \(1, 1\) pass 2\^62 before"):
        run(protocol, numbers(2.0**15 + 1), above, planes=LocalPlanes(3, watch_range=True))


def test_the_watch_changes_no_number_and_stops_a_training_that_overflows(gen: torch.Generator) -> None:
    x = torch.randn(48, 6, generator=gen, dtype=torch.float64).numpy()
    y = (x[:, 0] > 0).astype(int)
    net = [{"linear": 4}, "relu", "linear"]
    plain = simulate.fit(net, x, y, steps=2, batch=16, seed=3)
    watched = simulate.fit(net, x, y, steps=2, batch=16, seed=3, watch_range=True)
    assert np.allclose(plain.losses, watched.losses, atol=2.0**-10)
    with pytest.raises(RingRangeError, match="fewer frac_bits"):
        simulate.fit(net, 2.0**7 * x, y, steps=8, batch=16, seed=3, lr=16.0, frac_bits=20, watch_range=True)


@pytest.mark.parametrize("f", [12, 16, 18])
def test_a_gelu_of_large_numbers_raises_no_alarm(run: Run, f: int) -> None:
    """Its polynomial passes the ring's end there, and is chosen away."""
    x = torch.tensor([*np.linspace(-60, 60, 121), 2.0 ** (30 - f), -(2.0 ** (30 - f))], dtype=torch.float64)
    out = run(activations.gelu_protocol, x, f=f, planes=LocalPlanes(3, watch_range=True))
    assert (out.value - torch.nn.functional.gelu(x)).abs().max() < 2e-3


@pytest.mark.parametrize("proved", [False, True])
@pytest.mark.parametrize("n", [27, 200, 2048])
def test_probabilities_of_many_classes_are_as_exact_as_those_of_few(n: int, proved: bool) -> None:
    """Also where all are alike, and a class has a thirtieth of what the first rounding was multiplied to."""
    rows = torch.cat([torch.zeros(3, n), torch.randn(5, n, generator=torch.Generator().manual_seed(n)) * 8]).double()
    rows = torch.round(rows * 2**16) / 2**16
    parts = split(rows, 16, random.Random(n).randbytes)

    def body(rt: Runtime) -> Share:
        rt.ledger = ClaimLedger(everything=True) if proved else None
        return rt.run(nonlinear.softmax_protocol(rt, share_of(parts, rt.party, 16)))[0]

    found = reconstruct(LocalPlanes(n, watch_range=True).run_three(body))
    assert (found - torch.softmax(rows, 1)).abs().max() < 12 * 2.0**-16
