"""Three parties in one process, and the cost of what they ran."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share, decode, share_of, split


@dataclass
class Outcome:
    """What three parties computed: the opened results, the rounds, the bytes sent by all three."""

    values: list[Tensor]
    rings: list[Tensor]
    rounds: int
    bytes_total: int
    shares: list[list[Share]]

    @property
    def value(self) -> Tensor:
        return self.values[0]


def seeded_bytes(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def run_protocol(
    build: Callable[..., MpcProtocol[Any]],
    *inputs: Tensor,
    f: int = 16,
    seed: int = 0,
    planes: LocalPlanes | None = None,
) -> Outcome:
    """Share ``inputs``, run ``build(rt, *shares)`` at the three parties and open every share it returns."""
    source = seeded_bytes(seed + 1)
    parts = [split(x, f, source) for x in inputs]
    three = planes if planes is not None else LocalPlanes(seed)

    def body(rt: Runtime) -> tuple[list[Share], int, int, list[Tensor]]:
        out = rt.run(build(rt, *[share_of(p, rt.party, f) for p in parts]))
        shares = [out] if isinstance(out, Share) else list(out)
        rounds, sent = rt.rounds, rt.bytes_sent
        return shares, rounds, sent, [rt.run(open_ring_protocol(rt, s)) for s in shares]

    results = three.run_three(body)
    for _, _, _, rings in results[1:]:
        for mine, first in zip(rings, results[0][3], strict=True):
            assert torch.equal(mine, first)
    shares, rounds, _, rings = results[0]
    assert all(r[1] == rounds for r in results)
    return Outcome(
        [decode(ring, s.f) for ring, s in zip(rings, shares, strict=True)],
        rings,
        rounds,
        sum(r[2] for r in results),
        [r[0] for r in results],
    )


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(20261121)


@pytest.fixture
def run() -> Callable[..., Outcome]:
    """``run_protocol``: share the inputs, run at three parties, open the outputs."""
    return run_protocol
