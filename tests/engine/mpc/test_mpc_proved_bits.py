"""Comparisons, choices and exponentials in the forms that can be proved: the same values as the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from uvcc_engine.mpc.comparisons import maximum, proved_bits, selection
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct, share_of, split
from uvcc_engine.mpc.functions import exponential

EDGES = torch.tensor([0.0, 2.0**-16, -(2.0**-16), 2.0**29, -(2.0**29), 1.0, -1.0], dtype=torch.float64)


def _proved(build: Callable[[Runtime, Share], MpcProtocol[Any]], x: torch.Tensor, seed: int = 0) -> list[Any]:
    parts = split(x, 16, random.Random(seed).randbytes)
    planes = LocalPlanes(seed, watch_range=True)

    def body(rt: Runtime) -> Any:
        rt.ledger = ClaimLedger(everything=True)
        return rt.run(build(rt, share_of(parts, rt.party, 16)))

    return planes.run_three(body)


@pytest.mark.parametrize("dealer", [0, 1, 2])
def test_signs_are_exact(dealer: int) -> None:
    x = torch.cat([EDGES, torch.randn(150, generator=torch.Generator().manual_seed(1), dtype=torch.float64)])

    def build(rt: Runtime, share: Share) -> MpcProtocol[Share]:
        bits = yield from proved_bits.sign_proved_protocol(rt, share, dealer=dealer)
        return (yield from proved_bits.numbers_proved_protocol(rt, bits, dealer=dealer))

    for seed in range(3):
        assert torch.equal(reconstruct(_proved(build, x, seed)), (x >= 0).to(torch.float64))


def test_a_relu_is_that_of_its_numbers() -> None:
    found = _proved(lambda rt, x: selection.relu_protocol(rt, x), EDGES)
    assert torch.equal(reconstruct([value for value, _ in found]), EDGES.clamp(min=0))
    assert torch.equal(reconstruct([bit for _, bit in found]), (EDGES >= 0).to(torch.float64))


@pytest.mark.parametrize("n", [2, 5, 10, 13])
def test_a_maximum_is_that_of_its_row_and_the_first_of_a_tie(n: int) -> None:
    x = torch.randint(-3, 4, (70, n), generator=torch.Generator().manual_seed(n)).to(torch.float64)
    assert torch.equal(reconstruct(_proved(maximum.max_protocol, x)), x.max(1).values)
    if n <= 10:
        place = reconstruct(_proved(maximum.argmax_one_hot_protocol, x))
        assert torch.equal(place.argmax(1), (x == x.max(1, keepdim=True).values).to(torch.float64).argmax(1))
        assert torch.equal(place.sum(1), torch.ones(70, dtype=torch.float64))


def test_powers_are_as_exact_as_said() -> None:
    x = torch.cat([-torch.logspace(-5, 3, 200, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    x = torch.round(x * 2.0**16) / 2.0**16
    error = (reconstruct(_proved(exponential.exp_protocol, x)) - torch.exp(x)).abs()
    assert error.max() < 2.0**-15 + 2.0**-16
