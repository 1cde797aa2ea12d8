"""Encoding, splitting, and ring arithmetic on shares."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.foundation.roles import Roles
from uvcc_engine.mpc.foundation.share import Share, cat, decode, encode, reconstruct, share_of, split
from uvcc_engine.mpc.kernels.choose import kernels_for
from uvcc_engine.mpc.products import arithmetic, truncation

ring = st.integers(-(2**63), 2**63 - 1)
vector = st.lists(ring, min_size=1, max_size=6)


def wrap(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def shares_of(values: list[int], seed: int) -> list[Share]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(values)
    a = torch.randint(-(2**63), 2**63 - 1, x.shape, generator=generator)
    b = torch.randint(-(2**63), 2**63 - 1, x.shape, generator=generator)
    return [share_of((a, b, x - a - b), p, 0) for p in range(3)]


def total(shares: list[Share]) -> list[int]:
    return [int(v) for v in shares[0].first + shares[1].first + shares[2].first]


@given(vector, st.integers(0, 2**31), ring)
@settings(max_examples=60, deadline=None)
def test_linear_arithmetic_wraps_like_the_ring(values: list[int], seed: int, factor: int) -> None:
    x, y = shares_of(values, seed), shares_of(values[::-1], seed + 1)
    assert total([arithmetic.add(a, b) for a, b in zip(x, y, strict=True)]) == [
        wrap(a + b) for a, b in zip(values, values[::-1], strict=True)
    ]
    assert total([arithmetic.scale_int(arithmetic.neg(a), factor) for a in x]) == [wrap(-a * factor) for a in values]


@given(vector, vector, st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_the_cross_terms_sum_to_the_product(xs: list[int], ys: list[int], seed: int) -> None:
    n = min(len(xs), len(ys))
    x, y = shares_of(xs[:n], seed), shares_of(ys[:n], seed + 1)
    kernels = kernels_for(torch.device("cpu"))
    for dealer in (None, 0, 1, 2):
        role = [None if dealer is None else Roles(dealer, p) for p in range(3)]
        left = [arithmetic.terms(r, a) for r, a in zip(role, x, strict=True)]
        right = [arithmetic.partners(r, b) for r, b in zip(role, y, strict=True)]
        parts = [kernels.mul(a, b) for a, b in zip(left, right, strict=True)]
        assert [int(v) for v in sum(parts)] == [wrap(a * b) for a, b in zip(xs[:n], ys[:n], strict=True)]
        matrix = [
            kernels.right_factor([v[:, None] for v in b], 1)([u[None] for u in a])
            for a, b in zip(left, right, strict=True)
        ]
        assert int(sum(matrix)) == wrap(sum(a * b for a, b in zip(xs[:n], ys[:n], strict=True)))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.integers(4, 20))
@settings(max_examples=60, deadline=None)
def test_split_and_reconstruct(values: list[float], f: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    parts = split(x, f, secrets.token_bytes)
    back = reconstruct([share_of(parts, p, f) for p in range(3)])
    assert (back - x).abs().max() <= 2.0 ** -(f + 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**30, -(2.0**31)])
def test_a_value_outside_the_range_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ConfigError, match="images") as caught:
        encode(torch.tensor([0.0, bad]), 16, name="images")
    assert caught.value.hint


def test_the_range_ends_where_a_product_with_one_still_fits() -> None:
    assert decode(encode(torch.tensor([2.0**30 - 1], dtype=torch.float64)), 16).item() == 2.0**30 - 1
    with pytest.raises(ConfigError):
        encode(torch.tensor([1.0]), 31)


def test_wrong_sets_of_shares_are_refused() -> None:
    parts = split(torch.ones(3), 16, secrets.token_bytes)
    shares = [share_of(parts, p) for p in range(3)]
    with pytest.raises(ConfigError, match="2 shares"):
        reconstruct(shares[:2])
    altered = Share(shares[1].first + 1, shares[1].second)
    with pytest.raises(ConfigError, match="component 1"):
        reconstruct([shares[0], altered, shares[2]])


def test_mismatches_are_refused_before_any_message() -> None:
    one = Share(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 16)
    with pytest.raises(ConfigError, match="f=16 and f=12"):
        arithmetic.add(one, one.with_f(12))
    with pytest.raises(ConfigError, match="different scales"):
        cat([one, one.with_f(12)])
    with pytest.raises(ConfigError, match="shapes"):
        Share(one.first, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="dtype"):
        Share(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ConfigError, match=r"add shares of shapes \(3,\) and \(4,\)"):
        arithmetic.add(one, Share(*[torch.zeros(4, dtype=torch.int64)] * 2, 16))
    elsewhere = one.map(lambda t: t.to("meta"))
    with pytest.raises(ConfigError, match="subtract shares on cpu and meta"):
        arithmetic.sub(one, elsewhere)
    with pytest.raises(ConfigError, match="lie on cpu and meta"):
        Share(one.first, elsewhere.first, 16)


def test_products_of_what_does_not_fit_send_nothing(run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"multiply shares of shapes \(3,\) and \(4,\)"):
        run(arithmetic.mul_protocol, torch.ones(3), torch.ones(4))
    for product in (arithmetic.mul_protocol, arithmetic.matmul_protocol):
        with pytest.raises(ConfigError, match="multiply shares on cpu and meta"):
            run(lambda rt, x, act=product: act(rt, x, x.map(lambda t: t.to("meta"))), torch.ones(3, 3))


def test_matrix_product_names_the_shapes(run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"\(2, 3\) and \(2, 3\)"):
        run(arithmetic.matmul_protocol, torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize("scale", [2.0**-30, 3e-9, 1e-11, 1e-30, -3e-9])
def test_a_scale_that_no_truncation_reaches_has_fewer_bits(scale: float) -> None:
    factor, shift = arithmetic.integer_scale(scale, cut=16)
    assert shift <= truncation.MAX_SHIFT - 16
    assert abs(factor / 2.0**shift - scale) <= 2.0 ** (16 - truncation.MAX_SHIFT) / 2


@pytest.mark.parametrize("scale", [1.0, 0.1, 2.0**-9, 3.0, 0.1 / 64, 1e-6, 1 / 3])
def test_integer_scales_are_close(scale: float) -> None:
    factor, shift = arithmetic.integer_scale(scale)
    assert abs(factor / 2.0**shift / scale - 1) < 2.0**-12
    assert factor % 2 == 1
