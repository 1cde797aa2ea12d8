"""What a training step of a GPT of any size costs: rounds and bytes from small steps that were measured, MACs counted.

Bytes are a sum of products of sizes (windows, places, width, heads, blocks, letters), so small steps give the factors
and another measured step tells how well they hold. Truncation has another form for many numbers than for few, so the
small steps are measured in both. Rounds do not depend on the width or on how many windows there are:
one block over the real number of places, and one answer over the real number of letters, give them. Seconds are not
foretold: they are those of a machine. A softmax among more letters than ``MOST_SHARED`` has no fixed point and no run
takes it; bytes and MACs are told of it all the same, rounds as of so many letters.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.data.sets import Dataset, Floats, one_hot
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import gpt
from uvcc_engine.model.shapes import MOST_SHARED
from uvcc_engine.mpc.products import truncation
from uvcc_engine.simulate.fitting import train


@dataclass(frozen=True, slots=True)
class GptSize:
    """A GPT, and the ``batch`` of windows of a step."""

    vocabulary: int
    positions: int
    width: int
    heads: int
    blocks: int
    batch: int

    @property
    def weights(self) -> int:
        """Numbers that are trained."""
        w = self.width
        block = 2 * 2 * w + (w + 1) * 3 * w + (w + 1) * w + (w + 1) * 4 * w + (4 * w + 1) * w
        return (self.vocabulary + self.positions) * w + self.blocks * block + 2 * w + (w + 1) * self.vocabulary

    @property
    def macs(self) -> int:
        """Multiplications of matrix products of a step in clear: forward, and twice as many backward. Each party's
        part of a secure product is two such products, and the embedding is a product with one-hot letters."""
        n, w = self.batch * self.positions, self.width
        block = n * (3 * w * w + w * w + 8 * w * w) + 2 * self.batch * self.positions**2 * w
        return 3 * (self.blocks * block + n * w * self.vocabulary) + 2 * n * w * (self.vocabulary + self.positions)


GPT2_SMALL: Final = GptSize(50257, 1024, 768, 12, 12, 1)
CHECK: Final = GptSize(512, 256, 768, 12, 1, 1)
"""The step that the fitted factors are tried on: one block of GPT-2 small over a quarter of its places, larger than any
that they were fitted to."""


@dataclass(frozen=True, slots=True)
class GptForecast:
    """``rounds`` and ``bytes_per_party`` of a step, and of ``CHECK`` the bytes foretold in parts of those measured."""

    size: GptSize
    rounds: int
    bytes_per_party: float
    check: float


def foretell(size: GptSize) -> GptForecast:
    """Measure small steps, and say what one of ``size`` takes. It computes for half a minute or more."""
    samples = _samples()
    few, many = (_factors(samples, form) for form in (math.inf, 0))
    check = _bytes(CHECK, few, many) / measured_step(CHECK)[1]
    one, two = (measured_step(GptSize(12, size.positions, 4, 1, blocks, 1))[0] for blocks in (1, 2))
    letters = min(size.vocabulary, MOST_SHARED)
    ends = measured_step(GptSize(letters, 12, 4, 1, 1, 1))[0] - measured_step(GptSize(12, 12, 4, 1, 1, 1))[0]
    rounds = one + (size.blocks - 1) * (two - one) + ends
    return GptForecast(size, rounds, _bytes(size, few, many), check)


def _factors(samples: Sequence[GptSize], own_from: float) -> Floats:
    """Bytes for each product of sizes, where truncation takes its form of many numbers from ``own_from`` outputs on."""
    with _truncation_of_many(own_from):
        measured = np.array([measured_step(one)[1] for one in samples])
    terms = np.stack([_terms(one) for one in samples])
    weight = 1.0 / measured[:, None]  # equally exact for small and for large
    found = np.linalg.lstsq(terms * weight, np.ones(len(samples)), rcond=None)[0]
    return np.asarray(found, dtype=np.float64)


def _bytes(size: GptSize, few: Floats, many: Floats) -> float:
    """Of each product of sizes, the factor of the form that tensors of its size are truncated in."""
    return float(_terms(size) @ np.where(_outputs(size) >= truncation.OWN_FROM, many, few))


@contextlib.contextmanager
def _truncation_of_many(own_from: float) -> Iterator[None]:
    before, truncation.OWN_FROM = truncation.OWN_FROM, own_from
    try:
        yield
    finally:
        truncation.OWN_FROM = before


def _samples() -> list[GptSize]:
    rng = np.random.default_rng(7)
    found = []
    for blocks in (1, 2) * 10:
        heads = int(rng.choice([2, 4, 8]))
        width = heads * int(rng.choice([8, 16, 24]))
        vocabulary, positions = int(rng.integers(64, 300)), int(rng.integers(64, 200))
        found.append(GptSize(vocabulary, positions, width, heads, blocks, int(rng.integers(1, 3))))
    return found


def _terms(s: GptSize) -> Floats:
    """The products of sizes that bytes are a sum of: those that count in a model of some size."""
    n, scores = s.batch * s.positions, s.batch * s.heads * s.positions**2
    of_block = (s.blocks * n * s.width, s.blocks * s.width**2, s.blocks * n, s.blocks * scores)
    return np.array([*of_block, n * s.vocabulary, s.vocabulary * s.width, n * s.width], dtype=np.float64)


def _outputs(s: GptSize) -> Floats:
    """By product of sizes, about how many numbers one truncation of its tensors takes: in a block they are one to four
    times as wide as the model."""
    n = s.batch * s.positions
    scores = n * s.heads * s.positions
    return np.array([2 * n * s.width, 2 * s.width**2, n, scores, n * s.vocabulary, s.vocabulary * s.width, n * s.width])


def measured_step(s: GptSize) -> tuple[int, float]:
    """Rounds, and bytes of one party, of one measured step on made-up letters."""
    model = gpt("measured", s.vocabulary, s.positions, s.width, s.heads, s.blocks)
    rng = np.random.default_rng(3)
    x = rng.integers(0, s.vocabulary, (s.batch + 1, s.positions))
    flat = one_hot(x, s.vocabulary)
    data = Dataset(flat[1:], x[1:], flat[:1], x[:1], s.vocabulary)
    asked = {"model": model_to_json(model), "steps": 1, "batch": s.batch, "test_rows": 1, "reveal": ["loss"]}
    found = train(PrivateJob.from_json(json.loads(json.dumps(asked))), data)
    return found.rounds, found.bytes_sent / PARTIES
