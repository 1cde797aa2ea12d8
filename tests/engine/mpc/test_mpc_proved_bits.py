"""Comparisons, choices and exponentials in the forms that can be proved: the same values as the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.polynomial.chebyshev import chebval

from uvcc_engine.mpc.comparisons import maximum, proved_bits, proved_numbers, selection
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct, share_of, split
from uvcc_engine.mpc.functions import exponential, proved_powers

EDGES = torch.tensor([0.0, 2.0**-16, -(2.0**-16), 2.0**29, -(2.0**29), 1.0, -1.0], dtype=torch.float64)


def _proved(
    build: Callable[[Runtime, Share], MpcProtocol[Any]], x: torch.Tensor, seed: int = 0, *, f: int = 16
) -> list[Any]:
    parts = split(x, f, random.Random(seed).randbytes)
    planes = LocalPlanes(seed, watch_range=True)

    def body(rt: Runtime) -> Any:
        rt.ledger = ClaimLedger(everything=True)
        return rt.run(build(rt, share_of(parts, rt.party, f)))

    return planes.run_three(body)


@pytest.mark.parametrize("dealer", [0, 1, 2])
def test_signs_are_exact(dealer: int) -> None:
    x = torch.cat([EDGES, torch.randn(150, generator=torch.Generator().manual_seed(1), dtype=torch.float64)])

    def build(rt: Runtime, share: Share) -> MpcProtocol[Share]:
        bits = yield from proved_bits.sign_proved_protocol(rt, share, dealer=dealer)
        return (yield from proved_numbers.numbers_proved_protocol(rt, bits, dealer=dealer))

    for seed in range(3):
        assert torch.equal(reconstruct(_proved(build, x, seed)), (x >= 0).to(torch.float64))


def test_a_relu_is_that_of_its_numbers() -> None:
    found = _proved(lambda rt, x: selection.relu_protocol(rt, x), EDGES)
    assert torch.equal(reconstruct([value for value, _ in found]), EDGES.clamp(min=0))
    assert torch.equal(reconstruct([bit for _, bit in found]), (EDGES > 0).to(torch.float64))


@pytest.mark.parametrize("n", [2, 5, 10, 13])
def test_a_maximum_is_that_of_its_row_and_the_first_of_a_tie(n: int) -> None:
    x = torch.randint(-3, 4, (70, n), generator=torch.Generator().manual_seed(n)).to(torch.float64)
    assert torch.equal(reconstruct(_proved(maximum.max_protocol, x)), x.max(1).values)
    if n <= 10:
        place = reconstruct(_proved(maximum.argmax_one_hot_protocol, x))
        assert torch.equal(place.argmax(1), (x == x.max(1, keepdim=True).values).to(torch.float64).argmax(1))
        assert torch.equal(place.sum(1), torch.ones(70, dtype=torch.float64))


@pytest.mark.parametrize("f", [8, 12, 16, 19])
def test_powers_are_as_exact_as_said(f: int) -> None:
    """Also far below the range, where the polynomial beside the comparison passes the ring's end."""
    edges = torch.tensor([0.0, 2.0**-f, -16.0, -16.0 - 2.0**-f, -(2.0 ** (42 - f))], dtype=torch.float64)
    x = torch.cat([-torch.logspace(-5, 4, 300, dtype=torch.float64), -torch.linspace(0, 17, 300, dtype=torch.float64)])
    x = torch.cat([torch.round(x * 2.0**f) / 2.0**f, edges])
    for seed in range(2):
        found = reconstruct(_proved(exponential.exp_protocol, x, seed, f=f))
        assert (found - torch.exp(x)).abs().max() < 2.0**-18 + 1.5 * 2.0**-f
        assert not found[x < -16].any()


def test_the_series_of_the_power_is_as_exact_as_said() -> None:
    coefficients = [float(c) for c in proved_powers.chebyshev_of_power()]
    t = np.linspace(-1, 1, 10_001)
    assert np.abs(chebval(t, coefficients) - np.exp(8 * (t - 1))).max() < 2.0**-22


@pytest.mark.parametrize("dealer", [0, 1, 2])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 1), (5, 7, 9), (64, 16, 65)])
def test_a_product_s_relu_goes_by_its_sign_before_rounding(shape: tuple[int, int, int], few: bool, dealer: int) -> None:
    m, k, n = shape
    x, y = (_rounded(torch.Size(side), seed) for side, seed in (((m, k), 1), ((k, n), 2)))
    exact = x @ y

    def build(rt: Runtime, a: Share) -> MpcProtocol[Any]:
        left, right = a.index(slice(0, m * k)).reshape(m, k), a.index(slice(m * k, None)).reshape(k, n)
        rt.few_rounds = few
        value, bit = yield from selection.matmul_relu_protocol(rt, left, right, dealer=dealer)
        return value, bit, rt.rounds

    found = _proved(build, torch.cat([x.reshape(-1), y.reshape(-1)]))
    assert torch.equal(reconstruct([bit for _, bit, _ in found]), (exact > 0).to(torch.float64))
    assert (reconstruct([value for value, _, _ in found]) - exact.clamp(min=0)).abs().max() < 1.5 * 2.0**-16
    assert [rounds for *_, rounds in found] == [9 if few else 10] * 3


@pytest.mark.parametrize("n", [2, 10, 12])
def test_a_product_s_maximum_is_compared_beside_its_rounding(n: int) -> None:
    x, y = _rounded(torch.Size((70, 6)), 3), _rounded(torch.Size((6, n)), 4)

    def build(rt: Runtime, a: Share) -> MpcProtocol[Any]:
        left, right = a.index(slice(0, 420)).reshape(70, 6), a.index(slice(420, None)).reshape(6, n)
        product, best = yield from maximum.matmul_max_protocol(rt, left, right)
        return product, best

    found = _proved(build, torch.cat([x.reshape(-1), y.reshape(-1)]))
    product, best = (reconstruct([one[at] for one in found]) for at in (0, 1))
    assert (product - x @ y).abs().max() < 1.5 * 2.0**-16
    assert ((best - product.max(1).values).abs() <= 3 * 2.0**-16).all()


def _rounded(shape: torch.Size, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.round(x * 2.0**16) / 2.0**16
