"""How often a prover that lies as well as it can gets away with it, in a ring so small that it often does.

The whole protocol runs, with challenges of 7 bits. The liar alters a product, learns the weights when everybody does,
and adds to its first polynomial one that makes up for the lie at as many coins as a polynomial of that degree can be
zero. So it gets away whenever the coin is one of these, which is what the bound allows a fold, and seldom otherwise.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from proof_kit import PROTOCOLS, Turn, normal, run_proved
from torch import Tensor

from uvcc_engine.proofs.folding import Fold, Sizes, schedule, soundness_bits
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.vectors import Arithmetic, EquationBlock

RING = GaloisRing(7)
ENTRIES, LIAR, TRIES = 9, 1, 48
INPUTS = (normal(1, 3, 3), normal(2, 1, 3))


def _inverse(unit: Tensor) -> Tensor:
    """A unit to the power of (2^d - 1) 2^63 - 1, which is one less than a multiple of every unit's order."""
    found, power = RING.embedded(torch.tensor([1])), unit.unsqueeze(0)
    exponent = (2**RING.degree - 1) * 2**63 - 1
    while exponent:
        found = RING.mul(found, power) if exponent & 1 else found
        power, exponent = RING.mul(power, power), exponent >> 1
    return found[0]


def _vanishing(roots: Tensor) -> Tensor:
    """Coefficients ``[n + 1, d]``, lowest first, of the product of ``X - root``."""
    found = RING.embedded(torch.tensor([1]))
    for root in roots:
        raised, none = torch.cat([torch.zeros(1, RING.degree, dtype=torch.int64), found]), torch.zeros_like(found[:1])
        found = raised - torch.cat([RING.mul(found, root.expand_as(found)), none])
    return found


def _covering(lie: Tensor, fold: Fold, at: random.Random) -> tuple[Tensor, set[int]]:
    """A polynomial of a fold's coefficients, with ``lie`` for the one that is the target, and its zeros."""
    while True:
        numbers = at.sample(range(2**RING.degree), fold.coefficients - 1)
        made = _vanishing(RING.challenges(torch.tensor(numbers)))
        if bool((made[fold.derived] & 1).any()):
            scale = RING.mul(lie, _inverse(made[fold.derived]))
            return RING.mul(made, scale.expand_as(made)), set(numbers)


def test_the_inverse_is_one() -> None:
    unit = RING.challenges(torch.tensor([77])) + 2 * torch.arange(7)
    assert torch.equal(RING.mul(unit, _inverse(unit[0]).unsqueeze(0)), RING.embedded(torch.tensor([1])))


def test_the_best_lie_passes_as_often_as_the_bound_allows_and_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = EquationBlock.gram
    at = random.Random(6)
    covered: list[set[int]] = []

    def gram(block: EquationBlock, arithmetic: Arithmetic, fold: Fold) -> Tensor:
        found = honest(block, arithmetic, fold)
        if Turn.party != LIAR:
            return found
        weight = RING.mul(RING.challenges(block.rows[:1])[0], block.places[0])
        made, roots = _covering(weight, fold, at)
        covered.append(roots)
        return found + made

    def lie(sent: int, data: Tensor) -> None:
        if sent == 0:
            data.view(-1)[0] += 1

    monkeypatch.setattr(EquationBlock, "gram", gram)
    folds = schedule(Sizes(((2, ENTRIES),)))
    bound = 2.0 ** -soundness_bits(RING, folds)
    of_the_fold = (folds[0].coefficients - 1) / 2**RING.degree
    assert of_the_fold > 0.7 * bound
    passed = 0
    build = functools.partial(PROTOCOLS["chosen"], dealer=0)
    for seed in range(TRIES):
        how: dict[str, Any] = {"ring": RING, "liar": LIAR, "stands_by": lie, "seed": seed}
        passed += run_proved(build, INPUTS, **how).opened != [None] * 3
    assert len(covered) == 2 * TRIES - passed  # a proof that is refused is computed once more, in the second round
    deviation = (TRIES * bound * (1 - bound)) ** 0.5
    assert passed <= TRIES * bound + 3 * deviation
    assert passed >= TRIES * of_the_fold - 3 * deviation > 0
