"""Where few rounds matter, what one dealer would send for many comparisons the three parties send at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from uvcc_engine.mpc.comparisons import boolean, maximum, selection
from uvcc_engine.mpc.foundation import chunking
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share

Run = Callable[..., Any]


@pytest.mark.parametrize("few", [True, False])
def test_comparisons_and_maxima_of_many_are_shared_out_too(
    run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """As many rounds and bytes as with one dealer; also where the whole is compared in the way of many, and no part
    would be."""
    monkeypatch.setattr(boolean, "BULK", 300)
    x = torch.round(torch.randn(192, 4, generator=gen, dtype=torch.float64) * 2.0**16) / 2.0**16

    def build(rt: Runtime, a: Share) -> MpcProtocol[list[Share]]:
        value, bit = yield from selection.relu_protocol(rt, a, dealer=1)
        only = yield from selection.relu_only_protocol(rt, a, dealer=1)
        number = yield from selection.drelu_arithmetic_protocol(rt, a, dealer=1)
        best, place = yield from maximum.max_and_place_protocol(rt, a, dealer=1)
        return [value, bit, only, number, best, place]

    found = {}
    for spread in (1 << 21, 1 << 10):
        monkeypatch.setattr(chunking, "SPREAD", spread)
        planes = LocalPlanes(few_rounds=few)
        out = found[spread] = run(build, x, planes=planes)
        sent = sorted(rt.bytes_sent for rt in planes.runtimes)
        assert (sent[-1] < 1.05 * sent[0]) == (few and spread < 1 << 21)
        positive, above = (x >= 0).to(torch.float64), (x > 0).to(torch.float64)
        wanted = [x * above, above, x * positive, positive, x.amax(1), (x == x.amax(1, keepdim=True)).double()]
        assert all(torch.equal(got, due) for got, due in zip(out.values, wanted, strict=True))
    one, three = found.values()
    assert (one.rounds, one.bytes_total) == (three.rounds, three.bytes_total)
