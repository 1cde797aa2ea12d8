"""Every protocol against its plain reference: values, rounds and bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.comparisons import boolean, gated, maximum, selection
from uvcc_engine.mpc.foundation import chunking
from uvcc_engine.mpc.foundation.claim_ledger import MATMUL, ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import exponential, nonlinear
from uvcc_engine.mpc.products import arithmetic, truncation

Run = Callable[..., Any]
UNIT = 2.0**-16
EXP_DIGEST = "52c71b1d872f61071a1a60acf88ef7dfec2c28de6ca8b430fe10b74cb68e641f"


def normal(gen: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=gen, dtype=torch.float64) * scale


def fixed(x: Tensor, f: int = 16) -> Tensor:
    return torch.round(x * 2.0**f) / 2.0**f


def test_product_truncates_within_a_unit_in_two_rounds(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 40, 50, scale=30)), fixed(normal(gen, 40, 50, scale=30))
    out = run(arithmetic.mul_protocol, x, y)
    error = (out.value - x * y) / UNIT
    assert error.min() > -1.0
    assert error.max() <= 1.0
    assert abs(error.mean()) < 0.05  # the stochastic rounding is unbiased
    assert out.rounds == 2
    assert out.bytes_total == 40 * x.numel()


def test_matrix_product_with_folded_scale(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 33, 64)), fixed(normal(gen, 64, 10))
    out = run(arithmetic.matmul_protocol, x, y)
    assert (out.value - x @ y).abs().max() <= UNIT
    assert (out.rounds, out.bytes_total) == (2, 40 * 330)
    scaled = run(lambda rt, a, b: arithmetic.matmul_protocol(rt, a, b, scale=2.0**-9), x, y)
    assert (scaled.value - x @ y / 512).abs().max() <= UNIT
    rough = run(lambda rt, a, b: arithmetic.matmul_protocol(rt, a, b, scale=0.1 / 48), x, y)
    assert (rough.value - x @ y * (0.1 / 48)).abs().max() <= 2 * UNIT


@pytest.mark.parametrize("dealer", [0, 1, 2])
@pytest.mark.parametrize(("scale", "each"), [(1.0, 56), (2.0**-9, 64), (2.0**-20, 68)])
def test_a_product_and_the_choice_by_a_bit_take_the_product_s_rounds(
    run: Run, gen: torch.Generator, dealer: int, scale: float, each: int
) -> None:
    x, y = fixed(normal(gen, 30, 40, scale=20)), fixed(normal(gen, 40, 20, scale=20))
    bits = (torch.rand(30, 20, generator=gen) < 0.5).to(torch.float64)

    def build(rt: Runtime, a: Share, b: Share, kept: Share) -> MpcProtocol[Share]:
        whole = kept.with_f(0)
        return (yield from gated.matmul_gated_protocol(rt, a, b, whole, scale=scale, dealer=dealer))

    out = run(build, x, y, bits / 2.0**16)
    assert (out.value - (x @ y) * bits * scale).abs().max() <= UNIT
    assert (out.value[bits == 0] == 0).all()
    assert (out.rounds, out.bytes_total) == (2, each * 600)


def test_a_gate_that_does_not_fit_is_refused(run: Run) -> None:
    x = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(ConfigError, match="gate at f=16"):
        run(gated.matmul_gated_protocol, x, x, x)
    with pytest.raises(ConfigError, match=r"gate of shape \(3, 4\)"):
        run(lambda rt, a, b, c: gated.matmul_gated_protocol(rt, a, b, c.with_f(0)), x, x, x[:3])


def test_batched_matrix_product_broadcasts(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 3, 5, 7)), fixed(normal(gen, 7, 4))
    assert (run(arithmetic.matmul_protocol, x, y).value - x @ y).abs().max() <= UNIT


def test_independent_products_share_their_rounds(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 8, 8)), fixed(normal(gen, 8, 8))

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[list[Share]]:
        return (yield from arithmetic.par(arithmetic.mul_protocol(rt, a, b), arithmetic.matmul_protocol(rt, a, b)))

    out = run(build, x, y)
    assert (out.values[0] - x * y).abs().max() <= UNIT
    assert (out.values[1] - x @ y).abs().max() <= UNIT
    assert out.rounds == 2


def test_linear_operations_are_local(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 6, 5)), fixed(normal(gen, 6, 5))

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[Share]:
        total = arithmetic.sub(arithmetic.add(a, b), arithmetic.scale_int(arithmetic.neg(b), 3))
        return arithmetic.add_public(rt, arithmetic.add(total, arithmetic.public(rt, 0.5, total)), -2.0)
        yield

    out = run(build, x, y)
    assert torch.equal(out.value, x + 4 * y - 1.5)
    assert (out.rounds, out.bytes_total) == (0, 0)


@pytest.mark.parametrize("dealer", [0, 1, 2])
@pytest.mark.parametrize("shift", [1, 8, 16, 30, 44])
def test_truncation_never_errs_in_the_top_bits(run: Run, gen: torch.Generator, shift: int, dealer: int) -> None:
    edge = torch.tensor([0, 1, -1, 2**61, -(2**61), 2**62 - 1, -(2**62) + 1, 2**shift, -(2**shift), 2**shift - 1])
    wide = torch.randint(-(2**62) + 1, 2**62, (4000,), generator=gen)
    narrow = torch.randint(-(2**20), 2**20, (1000,), generator=gen)
    ring = torch.cat([edge, wide, narrow])

    def build(rt: Runtime, zero: Share) -> MpcProtocol[Share]:
        x = arithmetic.add_ring(rt, zero, ring).with_f(shift)
        return (yield from arithmetic.rescale_protocol(rt, x, 0, dealer=dealer))

    out = run(build, torch.zeros(ring.shape, dtype=torch.float64))
    difference = out.rings[0] - (ring >> shift)
    assert set(difference.unique().tolist()) <= {0, 1}
    assert out.rounds == 2


@pytest.mark.parametrize("dealer", [0, 1, 2])
def test_comparison_is_exact_over_the_whole_range(run: Run, gen: torch.Generator, dealer: int) -> None:
    edge = torch.tensor([0, 1, -1, 2**61, -(2**61), 2**62 - 1, 1 - 2**62, 2**63 - 1, -(2**63), 15, 16, -16, -15])
    powers = torch.tensor([s * 2**k + d for k in range(62) for s in (1, -1) for d in (-1, 0, 1)])
    ring = torch.cat([edge, powers, torch.randint(-(2**62), 2**62, (500,), generator=gen)])

    def build(rt: Runtime, zero: Share) -> MpcProtocol[Share]:
        return selection.drelu_arithmetic_protocol(rt, arithmetic.add_ring(rt, zero, ring), dealer=dealer)

    out = run(build, torch.zeros(ring.shape, dtype=torch.float64))
    assert torch.equal(out.rings[0], (ring >= 0).to(torch.int64))
    assert out.rounds == 5


def test_relu_gives_value_and_bit_in_five_rounds(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 64, 32, scale=4))
    out = run(selection.relu_protocol, x)
    assert torch.equal(out.values[0], x.clamp(min=0))
    assert torch.equal(out.values[1], (x > 0).to(torch.float64))
    assert out.rounds == 5
    assert out.bytes_total <= 102 * x.numel()


def test_relu_alone_costs_less(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 128, 64, scale=4))
    out = run(selection.relu_only_protocol, x)
    assert torch.equal(out.value, x.clamp(min=0))
    assert out.bytes_total <= 86 * x.numel()


def test_mux_chooses_by_a_shared_bit_in_one_round(run: Run, gen: torch.Generator) -> None:
    x, y = fixed(normal(gen, 9)), fixed(normal(gen, 9))
    bit = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1])

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[Share]:
        chooser = arithmetic.add_ring(rt, arithmetic.public(rt, 0.0, a), bit).with_f(0)
        return selection.mux_protocol(rt, chooser, a, b)

    out = run(build, x, y)
    assert torch.equal(out.value, torch.where(bit == 1, x, y))
    assert out.rounds == 1


def test_replicated_bits_agree_with_the_pair_shared_ones(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 130))

    def build(rt: Runtime, a: Share) -> MpcProtocol[Share]:
        bits = yield from boolean.drelu_protocol(rt, a)
        words = yield from boolean.to_bool_share_protocol(rt, bits)
        return Share(words.first, words.second, 0)

    from uvcc_engine.mpc.kernels.cpu import CpuKernels

    shares = [s[0] for s in run(build, x).shares]
    total = shares[0].first ^ shares[1].first ^ shares[2].first
    assert torch.equal(shares[0].second, shares[1].first)
    assert torch.equal(CpuKernels().bits_to_ints(total, 130), (x >= 0).to(torch.int64))


@pytest.mark.parametrize(("shape", "rounds"), [((17, 10), 6), ((5, 3), 6), ((3, 37), 12), ((2, 4, 7), 6), ((4, 1), 0)])
def test_maximum(run: Run, gen: torch.Generator, shape: tuple[int, ...], rounds: int) -> None:
    x = fixed(normal(gen, *shape, scale=3))
    out = run(maximum.max_protocol, x)
    assert torch.equal(out.value, x.max(-1).values)
    assert out.rounds == rounds


def test_argmax_takes_the_first_of_a_tie(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 70, 10))
    x[0] = 1.0
    x[1, 3] = x[1, 8] = 9.0
    out = run(maximum.argmax_one_hot_protocol, x)
    assert torch.equal(out.value, torch.nn.functional.one_hot(x.argmax(-1), 10).to(torch.float64))
    assert out.value[1, 3] == 1
    assert out.rounds == 6


def test_exponential(run: Run, gen: torch.Generator) -> None:
    x = fixed(-torch.rand(2000, generator=gen, dtype=torch.float64) * 40)
    x[:6] = torch.tensor([0.0, -UNIT, -16.0, -16.0 + UNIT, -15.999, -20000.0])
    out = run(nonlinear.exp_protocol, x)
    assert (out.value - x.exp()).abs().max() < 1.6 * UNIT
    assert out.rounds == 6


@pytest.mark.parametrize(("low", "high", "rounds"), [(1.0, 10.0, 10), (1.0, 2.0, 6), (0.5, 40.0, 16)])
def test_reciprocal(run: Run, gen: torch.Generator, low: float, high: float, rounds: int) -> None:
    x = fixed(low + (high - low) * torch.rand(500, generator=gen, dtype=torch.float64))
    out = run(lambda rt, s: nonlinear.reciprocal_protocol(rt, s, low, high), x)
    assert (out.value * x - 1).abs().max() < max(2e-4, 10 * high * UNIT)
    assert out.rounds == rounds


def test_softmax_in_14_rounds(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 64, 10, scale=5))
    x[0] = 0.0
    x[1, 0] = 100.0
    out = run(nonlinear.softmax_protocol, x)
    assert (out.values[0] - x.softmax(-1)).abs().max() < 8 * UNIT
    assert torch.equal(out.values[1], x.max(-1, keepdim=True).values)
    assert out.rounds == 14


def test_softmax_of_long_rows(run: Run, gen: torch.Generator) -> None:
    x = fixed(normal(gen, 5, 40, scale=3))
    out = run(nonlinear.softmax_protocol, x)
    assert (out.values[0] - x.softmax(-1)).abs().max() < 20 * UNIT


def test_powers_come_with_inverse_and_logarithm_of_their_sum(run: Run, gen: torch.Generator) -> None:
    x = fixed(-torch.rand(300, 15, generator=gen, dtype=torch.float64) * 3)
    x[:, 0] = 0.0
    x[0] = 0.0
    x[1:200, 1:] = -100.0
    x[2:200, 1] = fixed(-torch.linspace(0.0, 16.0, 198, dtype=torch.float64))
    out = run(lambda rt, s: exponential.powers_protocol(rt, s, (exponential.INVERSE, exponential.LOG)), x)
    powers, total, inverse, log = out.values
    assert (powers - x.exp()).abs().max() < 1.6 * UNIT
    assert torch.equal(total, powers.sum(1, keepdim=True))
    assert (1 - total * inverse).abs().max() < exponential.LOOKUP_ERROR
    assert (total.log() - log).abs().max() < exponential.LOOKUP_ERROR
    assert out.rounds == 6
    with pytest.raises(ConfigError, match="16 powers"):
        run(exponential.powers_protocol, -torch.ones(2, 16))


def test_public_powers_are_rounded_the_same_everywhere() -> None:
    value = torch.arange(1 << 20)
    found = exponential.exp_public(value, 16, exponential.Decimal(0), 20)
    assert found[0] == 1 << 20
    assert found[1 << 16] == round(math.e * 2**20)
    exact = torch.exp(value.to(torch.float64) / 2**16) * 2.0**20
    assert ((found - exact).abs() <= 0.5 + exact * 2.0**-50).all()
    # fixed outputs: both online parties must agree on every bit, whatever their processors
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert digest == EXP_DIGEST


def test_matrix_product_with_row_maximum(run: Run, gen: torch.Generator) -> None:
    x, w = fixed(normal(gen, 70, 20)), fixed(normal(gen, 20, 10))
    out = run(maximum.matmul_max_protocol, x, w)
    assert (out.values[0] - x @ w).abs().max() <= UNIT
    assert (out.values[1] - out.values[0].max(1).values).abs().max() <= UNIT
    assert out.rounds == 5
    longer = run(maximum.matmul_max_protocol, x, fixed(normal(gen, 20, 12)))
    assert torch.equal(longer.values[1], longer.values[0].max(1).values)


def test_logarithm(run: Run, gen: torch.Generator) -> None:
    x = fixed(1 + 9 * torch.rand(500, generator=gen, dtype=torch.float64))
    out = run(lambda rt, s: nonlinear.log_protocol(rt, s, 1.0, 10.0), x)
    assert (out.value - x.log()).abs().max() < 1e-3
    assert math.isclose(float(out.value.mean()), float(x.log().mean()), abs_tol=1e-4)
    assert out.rounds == 10


@pytest.mark.parametrize("n", [1000, boolean.BULK + 77])
def test_comparison_in_the_reduced_ring(run: Run, gen: torch.Generator, n: int) -> None:
    ring = torch.randint(1 - 2**31, 2**31, (n,), generator=gen)
    ring[:6] = torch.tensor([0, 1, -1, 2**31 - 1, 1 - 2**31, 2**16])

    def build(rt: Runtime, zero: Share) -> MpcProtocol[list[Share]]:
        x = arithmetic.add_ring(rt, zero, ring)
        value, bit = yield from selection.relu_protocol(rt, x, width=32)
        return [value, bit, (yield from selection.relu_only_protocol(rt, x, width=32))]

    out = run(build, torch.zeros(n, dtype=torch.float64))
    assert torch.equal(out.rings[0], ring.clamp(min=0))
    assert torch.equal(out.rings[1], (ring > 0).to(torch.int64))
    assert torch.equal(out.rings[2], ring.clamp(min=0))
    assert out.rounds == 10
    assert out.bytes_total <= (22 + 48 + 22 + 33) * (n + 200)


def test_a_reduced_ring_of_another_size_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="40 bits"):
        run(lambda rt, x: selection.relu_only_protocol(rt, x, width=40), torch.ones(3))


@pytest.mark.parametrize("shift", [33, 40, 41, 50])
def test_wide_shifts_travel_packed(run: Run, gen: torch.Generator, shift: int) -> None:
    n = truncation.OWN_FROM + 100
    ring = torch.randint(-(2**62) + 1, 2**62, (n,), generator=gen)

    def build(rt: Runtime, zero: Share) -> MpcProtocol[Share]:
        x = arithmetic.add_ring(rt, zero, ring).with_f(shift)
        return (yield from arithmetic.rescale_protocol(rt, x, 0))

    out = run(build, torch.zeros(n, dtype=torch.float64))
    assert set((out.rings[0] - (ring >> shift)).unique().tolist()) == {0, 1}
    assert out.rounds == 2
    assert out.bytes_total == (24 + 5 * -(-shift // 8)) * n


def test_a_comparison_starts_from_a_product_that_is_being_truncated(run: Run, gen: torch.Generator) -> None:
    x, w = fixed(normal(gen, 20, 30)), fixed(normal(gen, 30, 17))
    out = run(selection.matmul_relu_protocol, x, w)
    assert (out.values[0] - (x @ w).clamp(min=0)).abs().max() <= UNIT
    assert torch.equal(out.values[1], (x @ w > 0).to(torch.float64))
    assert out.rounds == 4


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("rows", [40, 32])
def test_for_few_rounds_the_three_share_what_one_dealer_would_send(
    run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, few: bool, rows: int
) -> None:
    """As many rounds and bytes as with one dealer; also where a part has rows of its own number (40 = 14 + 14 + 12)."""
    x, w = fixed(normal(gen, rows, 30)), fixed(normal(gen, 30, 64))

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[list[Share]]:
        value, bit = yield from selection.matmul_relu_protocol(rt, a, b, dealer=1)
        return [value, bit, (yield from arithmetic.matmul_protocol(rt, a, b, dealer=1))]

    found = {}
    for spread in (1 << 21, 1 << 10):
        monkeypatch.setattr(chunking, "SPREAD", spread)
        planes = LocalPlanes(few_rounds=few)
        out = found[spread] = run(build, x, w, planes=planes)
        assert (out.values[0] - (x @ w).clamp(min=0)).abs().max() <= UNIT
        assert torch.equal(out.values[1], (x @ w > 0).to(torch.float64))
        assert (out.values[2] - x @ w).abs().max() <= UNIT
        sent = sorted(rt.bytes_sent for rt in planes.runtimes)
        assert (sent[-1] < 1.2 * sent[0]) == (few and spread < 1 << 21)
    one, three = found.values()
    assert (one.rounds, one.bytes_total) == (three.rounds, three.bytes_total)


def test_what_is_compared_in_fewer_rounds_does_not_depend_on_how_it_is_shared_out(
    run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More outputs than are compared wide stay so in three parts, each of which would be few enough."""
    monkeypatch.setattr(selection, "WIDE_UP_TO", 1000)
    x, w = fixed(normal(gen, 18, 5)), fixed(normal(gen, 5, 64))
    rounds = []
    for spread in (1 << 21, 1 << 10):
        monkeypatch.setattr(chunking, "SPREAD", spread)
        rounds.append(run(selection.matmul_relu_protocol, x, w).rounds)
    assert rounds == [5, 5]


def test_what_is_proved_is_dealt_by_one(run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part would be a claim of its own."""
    monkeypatch.setattr(chunking, "SPREAD", 1)
    filed, file = [], ClaimLedger.file

    def counting(ledger: ClaimLedger, notes: Any) -> Any:
        filed.append(notes.form)
        return file(ledger, notes)

    monkeypatch.setattr(ClaimLedger, "file", counting)

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[Share]:
        rt.ledger = ClaimLedger()
        found = yield from arithmetic.matmul_protocol(rt, a, b)
        rt.ledger = None
        return found

    run(build, fixed(normal(gen, 40, 8)), fixed(normal(gen, 8, 64)))
    assert filed == [MATMUL] * 3


def test_long_vectors_flow_in_chunks_with_the_rounds_of_one(
    run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking.chunk_slices, "__defaults__", (512,))
    x, y = fixed(normal(gen, 5000, scale=3)), fixed(normal(gen, 5000))

    def build(rt: Runtime, a: Share, b: Share) -> MpcProtocol[list[Share]]:
        product = yield from arithmetic.mul_protocol(rt, a, b)
        value, bit = yield from selection.relu_protocol(rt, a.reshape(50, 100))
        only = yield from selection.relu_only_protocol(rt, a)
        return [product, value, bit, only, (yield from selection.drelu_arithmetic_protocol(rt, a))]

    out = run(build, x, y)
    product, value, bit, only, drelu = out.values
    assert (product - x * y).abs().max() <= UNIT
    assert torch.equal(value, x.clamp(min=0).reshape(50, 100))
    assert torch.equal(bit.reshape(-1), (x >= 0).to(torch.float64))
    assert torch.equal(only, x.clamp(min=0))
    assert torch.equal(drelu, bit.reshape(-1))
    assert out.rounds == 2 + 5 + 5 + 5


def test_matrix_products_in_chunks(run: Run, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "CHUNK", 32)
    x, y = fixed(normal(gen, 300, 20)), fixed(normal(gen, 20, 16))
    out = run(arithmetic.matmul_protocol, x, y)
    assert (out.value - x @ y).abs().max() <= UNIT
    assert (out.rounds, out.bytes_total) == (2, 40 * 300 * 16)


@pytest.mark.parametrize(
    ("n", "size", "count"), [(10, 10, 1), (11, 10, 3), (1_000_000, 1 << 18, 6), (300, 64, 6), (0, 5, 1)]
)
def test_chunks_cover_everything(n: int, size: int, count: int) -> None:
    places = chunking.chunk_slices(n, size)
    assert [i for p in places for i in range(p.start, p.stop)] == list(range(n))
    assert len(places) <= count
    assert all(p.stop - p.start <= max(64, size) for p in places)
