"""Softmax of a product in few rounds: right on every kind of row, in the rounds it says, with what it looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons import boolean
from uvcc_engine.mpc.comparisons.selection import b2a_protocol
from uvcc_engine.mpc.foundation.roles import online_part, roles
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import exponential, softmax

Run = Callable[..., Any]
UNIT = 2.0**-16


def rows_of_every_kind(gen: torch.Generator, n: int) -> torch.Tensor:
    x = torch.randn(90, n, generator=gen, dtype=torch.float64) * 4
    x[0] = 0.0  # all equal
    x[1], x[1, n - 1] = -300.0, 250.0
    x[2, 0] = x[2, n - 1] = 30.0  # a tie
    x[3:60, 1] = x[3:60, 0] - torch.linspace(15.9, 16.1, 57, dtype=torch.float64)
    return torch.round(x * 256) / 256


def protocol(rt: Runtime, x: Share, w: Share) -> MpcProtocol[list[Share]]:
    at = yield from softmax.matmul_powers_protocol(rt, x, w, (exponential.INVERSE, exponential.LOG))
    return [at.logits, at.top, at.powers, at.total, *at.looked_up, softmax.shifted(at)]


@pytest.mark.parametrize("n", [2, 5, 10])
@pytest.mark.parametrize("f", [10, 12, 14, 16])
def test_powers_of_a_product_in_six_rounds(run: Run, gen: torch.Generator, n: int, f: int) -> None:
    x = rows_of_every_kind(gen, n)
    out = run(protocol, x, torch.eye(n, dtype=torch.float64), f=f)
    logits, top, powers, total, inverse, log, shifted = out.values
    unit = 2.0**-f
    assert (logits - x).abs().max() <= unit
    assert (top - x.max(1).values).abs().max() <= unit
    assert (shifted - (x - x.max(1, keepdim=True).values)).abs().max() <= 2 * unit
    exact = (x - x.max(1, keepdim=True).values).exp()
    assert (powers - exact).abs().max() < 1.1 * unit + 2 * UNIT
    assert torch.equal(total, powers.sum(1, keepdim=True))
    assert (exact.sum(1, keepdim=True) * inverse - 1).abs().max() < exponential.LOOKUP_ERROR + 4 * UNIT
    assert (exact.sum(1, keepdim=True).log() - log).abs().max() < exponential.LOOKUP_ERROR + 4 * UNIT
    assert out.rounds == 6


def test_many_rows_are_dealt_by_all_three_in_no_more_bytes(run: Run, gen: torch.Generator) -> None:
    """A step waits for the fullest line, and one dealer's tables are most of what is sent."""

    def sent(rows: int) -> tuple[list[int], int]:
        by_party: dict[int, int] = {}

        def counted(rt: Runtime, x: Share, w: Share) -> MpcProtocol[list[Share]]:
            found = yield from protocol(rt, x, w)
            by_party[rt.party] = rt.bytes_sent
            return found

        x = torch.randn(rows, 10, generator=gen, dtype=torch.float64)
        out = run(counted, x, torch.eye(10, dtype=torch.float64))
        assert (out.values[2] - (x - x.max(1, keepdim=True).values).exp()).abs().max() < 4 * UNIT
        return [by_party[p] for p in range(3)], out.rounds

    (one, rounds), (three, same) = sent(64), sent(192)
    assert max(one) > 2.5 * sum(one) / 3  # two megabytes are not worth the work of three
    assert max(three) == min(three) == sum(one)
    assert rounds == same == 6


def test_what_does_not_fit_is_refused_with_what_serves(run: Run) -> None:
    for rows, n in ((3, 11), (1000, 10), (3, 1)):
        with pytest.raises(ConfigError, match=f"powers of {rows} x {n}") as refused:
            run(softmax.matmul_powers_protocol, torch.ones(rows, 2), torch.ones(2, n))
        assert "matmul_max_protocol" in refused.value.hint
    with pytest.raises(ConfigError, match="at f=8"):
        run(softmax.matmul_powers_protocol, torch.ones(3, 2), torch.ones(2, 5), f=8)


@pytest.mark.parametrize("n", [1, 64, 333])
def test_few_comparisons_in_one_wide_step(run: Run, gen: torch.Generator, n: int) -> None:
    ring = torch.randint(-(2**45), 2**45, (n,), generator=gen).to(torch.float64)
    ring[: min(n, 6)] = torch.tensor([0.0, -1.0, 1.0, 2.0**44, -(2.0**44), 127.0])[: min(n, 6)]

    def signs(rt: Runtime, x: Share, most: int) -> MpcProtocol[Share]:
        role = roles(rt, 2)
        value = (x.first + x.second) if role.is_dealer else online_part(rt, role, x)
        u = value if role.is_dealer else None
        bits = yield from boolean.sign_protocol(rt, 2, x.n, u, lambda: value, most=most)
        return (yield from b2a_protocol(rt, bits))

    wide = run(lambda rt, x: signs(rt, x, n), ring / 2.0**16)
    narrow = run(lambda rt, x: signs(rt, x, n - 1), ring / 2.0**16)
    assert torch.equal(wide.value, narrow.value)
    assert torch.equal(wide.value.reshape(-1), (ring >= 0).to(torch.float64))
    assert (wide.rounds, narrow.rounds) == (2 + 2, 3 + 2)
