"""The plain twin's primitives against the protocols: equal where masks are zero, else how far apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import plain_ring
import pytest
import torch
from fixed_twin import ZeroStream
from torch import Tensor

from uvcc_engine.model import additive, ops
from uvcc_engine.mpc.comparisons import gated, maximum, selection, tournament
from uvcc_engine.mpc.foundation import opening, prg, share
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import exponential, softmax
from uvcc_engine.mpc.functions.exponential import INVERSE, LOG
from uvcc_engine.mpc.products import arithmetic, summed

torch.set_num_threads(1)
ops.load()
Fixed = tuple[Tensor, int]
"""Ring elements and their fractional bits."""


def numbers(*shape: int, seed: int, most: float = 4.0) -> Tensor:
    drawn = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.round((drawn * 2 - 1) * most * 2**16).long()


X, Y, SQUARE, ROWS = numbers(40, 12, seed=1), numbers(40, 12, seed=2), numbers(12, 12, seed=3), numbers(30, 7, seed=6)
BIT = (numbers(40, 12, seed=4) > 0).long()
UNITS = [0, 1, -1, 2, -2, 65535, 65536, -65535, -65536, -65537, 3 * 65536 + 1, -(1 << 40), (1 << 40) + 1]
EDGES = torch.tensor(UNITS)
TIES = torch.tensor([[3, 7, 7, -2], [0, 0, 0, 0], [-5, -5, -9, -5], [1, 2, 3, 4], [9, 8, 9, 9]]).repeat(1, 2)
CLOSE = torch.tensor([[65537, 65536, 65537], [-3, -2, -3], [-1, 0, 1]])  # halved, apart by less than a unit
HALF = torch.eye(3).long() * 32768
LEAST = torch.tensor([0, 1, 2, -1, -(16 << 16), -(16 << 16) + 2, -(16 << 16) + 1, -(17 << 16), -70000])
POWERS = torch.cat([numbers(400, seed=5, most=9.0).clamp(max=0), LEAST])


@dataclass(frozen=True)
class Case:
    """A protocol on numbers. ``masks``: by how many units they may move what it gives, down and up; None: not told."""

    run: Callable[..., Any]
    inputs: list[Fixed]
    masks: tuple[int, int] | None = (0, 1)


def case(run: Callable[..., Any], *inputs: Tensor | Fixed, masks: tuple[int, int] | None = (0, 1)) -> Case:
    return Case(run, [x if isinstance(x, tuple) else (x, 16) for x in inputs], masks)


EXACT = (0, 0)
CASES: dict[str, Case] = {
    "mul": case(lambda *a: arithmetic.mul_protocol(*a), X, Y),
    "mul of edges": case(lambda *a: arithmetic.mul_protocol(*a), EDGES, EDGES.flip(0) >> 8),
    "mul, scaled": case(lambda *a: arithmetic.mul_protocol(*a, scale=0.37), X, Y),
    "mul, six times": case(lambda *a: arithmetic.mul_protocol(*a, scale=6.0), X, Y),
    "mul by bits": case(lambda *a: arithmetic.mul_protocol(*a), X, (BIT, 0), masks=EXACT),
    "mul by bits, scaled": case(lambda *a: arithmetic.mul_protocol(*a, scale=0.3), X, (BIT, 0)),
    "mul by a column": case(lambda *a: arithmetic.mul_protocol(*a), X, Y[:, :1]),
    "matmul": case(lambda *a: arithmetic.matmul_protocol(*a), X, SQUARE),
    "matmul, scaled": case(lambda *a: arithmetic.matmul_protocol(*a, scale=-0.013), X, SQUARE),
    "bilinear": case(lambda *a: arithmetic.product_with_protocol(*a, torch.mul), (X, 12), (Y, 14)),
    "sums of products": case(lambda *a: summed.summed_products_protocol(*a, 0, scale=1 / 40), X, Y),
    "public factor": case(lambda *a: arithmetic.mul_public_protocol(*a, 1 / 3), X),
    "public factor of edges": case(lambda *a: arithmetic.mul_public_protocol(*a, -0.1), EDGES),
    "public whole number": case(lambda *a: arithmetic.mul_public_protocol(*a, -6.0), X, masks=EXACT),
    "rescaled down": case(lambda *a: arithmetic.rescale_protocol(*a, 9), EDGES),
    "rescaled up": case(lambda *a: arithmetic.rescale_protocol(*a, 20), X, masks=EXACT),
    "public matrix": case(
        lambda rt, x: additive.public_product_protocol(rt, x, SQUARE, SQUARE[:1], after=lambda t: t + t.flip(1)), X
    ),
    "public matrix and a product": case(
        lambda rt, x, *also: additive.public_product_protocol(rt, x, SQUARE, also=also), X, Y, SQUARE
    ),
    "public scaling": case(lambda *a: additive.public_scaling_protocol(*a, Y, SQUARE[:1]), X),
    "terms": case(
        lambda rt, x, y: additive.settle_protocol(
            rt, additive.product(rt, x, y, 1) + additive.product(rt, x, y, 1), 16, 16, 1, 0.05
        ),
        X,
        SQUARE,
    ),
    "terms of sums": case(
        lambda rt, x, y: additive.settle_protocol(rt, additive.summed_term(rt, x, y, 1, 0), 16, 16, 0), X, Y
    ),
    "signs": case(lambda *a: selection.drelu_arithmetic_protocol(*a), EDGES, masks=EXACT),
    "relu": case(lambda *a: selection.relu_protocol(*a), EDGES, masks=EXACT),
    "relu alone": case(lambda *a: selection.relu_only_protocol(*a), X, masks=EXACT),
    "gated product": case(lambda *a: gated.matmul_gated_protocol(*a), X, SQUARE, (BIT, 0)),
    "gated bilinear": case(lambda *a: gated.product_gated_protocol(*a, torch.mul), X, Y, (BIT, 0)),
    "product and relu": case(lambda *a: selection.matmul_relu_protocol(*a), X, SQUARE),
    "product and relu of units": case(lambda *a: selection.matmul_relu_protocol(*a), X >> 14, SQUARE >> 14),
    "maximum": case(lambda *a: maximum.max_protocol(*a), TIES, masks=EXACT),
    "maximum of many": case(lambda *a: maximum.max_protocol(*a), X, masks=EXACT),
    "place": case(lambda *a: maximum.argmax_one_hot_protocol(*a), TIES, masks=EXACT),
    "maximum and place": case(lambda *a: maximum.max_and_place_protocol(*a), TIES, masks=EXACT),
    "place of many": case(lambda *a: tournament.greatest_place_protocol(*a), X, masks=EXACT),
    "product and maximum": case(lambda *a: maximum.matmul_max_protocol(*a), X, SQUARE[:, :5]),
    "product and maximum, close": case(lambda *a: maximum.matmul_max_protocol(*a), CLOSE, HALF),
    "product and maximum of many": case(lambda *a: maximum.matmul_max_protocol(*a), X, SQUARE),
    "power": case(lambda *a: exponential.exp_protocol(*a), POWERS, masks=(-1, 1)),
    "power of 12 bits": case(lambda *a: exponential.exp_protocol(*a), (POWERS >> 4, 12), masks=(-1, 1)),
    "powers": case(
        lambda *a: exponential.powers_protocol(*a, (INVERSE, LOG)), ROWS - ROWS.amax(1, keepdim=True), masks=None
    ),
    "powers of a product": case(
        lambda *a: softmax.matmul_powers_protocol(*a, (INVERSE, LOG), f=16), ROWS, SQUARE[:7, :5], masks=None
    ),
    "linear maps": case(lambda *a: linear(*a), X, Y, masks=EXACT),
    "opened": case(lambda rt, x: opened(rt, x), X, masks=EXACT),
}


def linear(rt: Any, x: Share, y: Share) -> Any:
    both = share.cat([arithmetic.add(x, arithmetic.neg(y)), arithmetic.sub(arithmetic.scale_int(x, 3), y)], 1)
    moved = arithmetic.add_public(rt, arithmetic.add_ring(rt, both, 5), 0.3)
    return arithmetic.add(moved, arithmetic.public(rt, -0.77, moved))
    yield


def opened(rt: Any, x: Share) -> Any:
    found = yield from opening.open_ring_protocol(rt, x)
    return arithmetic.add_ring(rt, arithmetic.scale_int(x, 0), found)


def flat(found: Any) -> list[Share]:
    """All shares of what a protocol gave."""
    if isinstance(found, Share):
        return [found]
    if is_dataclass(found):
        found = [getattr(found, field.name) for field in fields(found)]
    return [one for part in found for one in flat(part)]


def on_shares(one: Case, stream: str, component: int) -> list[Fixed]:
    """By three parties, of inputs that lie in one component whole."""

    def body(rt: Any) -> list[Share]:
        inputs = [Share(x * (rt.party == component), x * (rt.next == component), f) for x, f in one.inputs]
        return flat(rt.run(one.run(rt, *inputs)))

    parties = LocalPlanes(3, prg=stream).run_three(body)
    return [(a.first + b.first + c.first, a.f) for a, b, c in zip(*parties, strict=True)]


def numbers_of(one: Case) -> list[plain_ring.Number]:
    return [plain_ring.held(x, f) for x, f in one.inputs]


def in_clear(one: Case) -> list[Fixed]:
    with plain_ring.plain_ring() as rt:
        found = flat(rt.run(one.run(rt, *numbers_of(one))))
    return [(x.first, x.f) for x in found]


def same(ours: list[Fixed], theirs: list[Fixed]) -> bool:
    return all(torch.equal(a, b) and f == g for (a, f), (b, g) in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_protocol_without_masks_is_its_primitive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)
    assert same(on_shares(CASES[name], "zeros", 1), in_clear(CASES[name]))


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.masks is not None])
def test_masks_lift_what_is_truncated_by_a_unit_at_most_and_nothing_else(name: str) -> None:
    """Wherever the inputs lie. Of many numbers some are lifted and some are not."""
    least, most = CASES[name].masks or EXACT
    lifted = []
    for component in range(3):
        ours, theirs = on_shares(CASES[name], "aes", component), in_clear(CASES[name])
        lifted += [(a - b).reshape(-1) for (a, _), (b, _) in zip(ours, theirs, strict=True)]
    found = torch.cat(lifted)
    assert least <= int(found.min()) <= 0 <= int(found.max()) <= most
    assert most == 0 or len(set(found.tolist())) > 1


def test_every_primitive_has_a_case() -> None:
    """So that none stands in the twin that was not held against its protocol."""
    used: set[str] = set()
    functions = {real: plain for real, plain in plain_ring.PRIMITIVES.items() if not isinstance(real, type)}

    def counted(real: Any, plain: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            used.add(real.__qualname__)
            return plain(*given, **named)

        return call

    counting = {real: counted(real, plain) for real, plain in functions.items()}
    for one in CASES.values():
        with plain_ring.plain_ring(counting) as rt:
            rt.run(one.run(rt, *numbers_of(one)))
    assert used == {real.__qualname__ for real in functions}
