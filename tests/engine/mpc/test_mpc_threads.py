"""However many threads a party computes on, its numbers are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.machine import host
from uvcc_engine.mpc.kernels import threads
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.kernels.layout import Patches, level
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.kernels.proving.binary_words import blocks_of
from uvcc_engine.worker import compute_setup
from uvcc_engine.worker.compute_setup import threads_for

PLAIN, CPU = PlainKernels(), CpuKernels()
GEN = torch.Generator().manual_seed(3)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=GEN)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch_takes = torch.get_num_threads()
    yield
    threads.use(0)
    assert torch.get_num_threads() == torch_takes


LONG = 5000
U, V, WEIGHTS, BLOCKS = words(LONG), words(LONG), words(LONG), words(blocks_of(LONG))
SIDES = [words(64, 300) for _ in range(8)]  # four terms: more than are weighed together
ELEMENTS = words(16, 203, 52), words(16, 203, 52)
KERNELS: dict[str, Callable[[PlainKernels], Tensor | None]] = {
    "binary_columns": lambda k: k.binary_columns(SIDES[0], WEIGHTS[:64]),
    "binary_product": lambda k: k.binary_product(SIDES[0], SIDES[1]),
    "ternary_bits": lambda k: k.ternary_bits([U, V, U, V], [V, V, U, U], BLOCKS),
    "turned_sums": lambda k: k.turned_sums(U, BLOCKS),
    "block_weights": lambda k: k.block_weights(BLOCKS, LONG),
    "chosen_places": lambda k: k.chosen_places(U, WEIGHTS[:64]),
    "chosen_places_weighed": lambda k: k.chosen_places(U, WEIGHTS[:64], V),
    "weigh": lambda k: k.weigh(SIDES[0], WEIGHTS[:64], 52),
    "weigh_columns": lambda k: k.weigh_columns(SIDES[0].T.contiguous(), WEIGHTS[:64], 52),
    "ternary_numbers": lambda k: k.ternary_numbers(SIDES[:4], SIDES[4:], WEIGHTS[:300], 52),
    "weigh_elements": lambda k: k.weigh_elements(ELEMENTS[0][0], WEIGHTS[:203], 3),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_the_proofs_gives_the_same_over_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, used = KERNELS[name](PLAIN), watched(monkeypatch)
    threads.use(3)
    assert torch.equal(KERNELS[name](CPU), expected)
    assert len(used) > 1


PLAN = level(3, generate=True, carry_on=True)
IMAGES = Patches(1, 4, 4, 2, 2, 1, 1, 0, 0)
SPREAD: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul": lambda x, _: CPU.mul([x], [x]),
    "blind": lambda x, _: CPU.blind(x.clone(), 3, x, x),
    "mul_blinded": lambda x, _: CPU.mul_blinded(True, False, (x, x), (x, x), 3, x, x),
    "truncate_deal": lambda x, _: CPU.truncate_deal(x, x, x, x, x, x, 40),
    "truncate_deal_own": lambda x, _: CPU.truncate_deal_own(x, x, torch.stack([x, x]), x, x, 40),
    "truncate_open": lambda x, _: CPU.truncate_open(x, x, x, x, x, 40),
    "truncate_close": lambda x, _: CPU.truncate_close(x, x, x, 40),
    "to_planes": lambda x, _: CPU.to_planes(x),
    "deal_digits": lambda _, bits: CPU.deal_digits(bits[:3], 3, bits[3:10], torch.empty_like(bits[3:10])),
    "pick_digits": lambda _, bits: CPU.pick_digits(bits[3:10], bits[:3], 3, -1),
    "mask_products": lambda _, bits: _products(bits),
    "close": lambda _, bits: CPU.close(PLAN, bits[:3], bits[:3], _singles(bits), torch.empty_like(_singles(bits))),
    "merge": lambda _, bits: CPU.merge(
        PLAN, _singles(bits), _singles(bits), _products(bits), -1, bits[:1].clone(), bits[:1].clone()
    ),
    "cut_patches": lambda x, _: CPU.cut_patches(x[: 16 * 1000].view(-1, 16), IMAGES),
    "add_patches": lambda x, _: CPU.add_patches(x[: 36 * 450].view(-1, 4), IMAGES),
    "laid_out": lambda x, _: threads.laid_out(x.view(-1, 64).t()),
}


def _singles(bits: Tensor) -> Tensor:
    return bits[: len(PLAN.singles)].unsqueeze(1)


def _products(bits: Tensor) -> Tensor:
    out = torch.empty_like(bits[: len(PLAN.products)].unsqueeze(1))
    CPU.mask_products(PLAN, _singles(bits), _singles(bits), torch.zeros_like(out), out)
    return out


@pytest.mark.parametrize("name", SPREAD)
def test_every_kernel_of_a_step_is_spread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its numbers are the same, ``test_mpc_kernels`` shows."""
    numbers, bits = words(64 * 256), words(10, 256)
    used = watched(monkeypatch)
    threads.use(3)
    SPREAD[name](numbers, bits)
    assert len(used) > 1


def test_elements_are_multiplied_alike_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What processors with vectors of eight do; on others both are None."""
    threads.use(1)
    expected, used = CPU.multiply_elements(*ELEMENTS), watched(monkeypatch)
    threads.use(3)
    found = CPU.multiply_elements(*ELEMENTS)
    assert found is None if expected is None else torch.equal(found, expected) and len(used) > 1


def watched(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """From now on little work is spread, too: the threads that took a part of some."""
    monkeypatch.setattr(threads, "THREADS_FROM", 1)
    used: set[int] = set()
    honest = threads.spread

    def noted(work: int, size: int, one: Callable[[int, int, int], None], grain: int = 1) -> None:
        honest(work, size, lambda *part: used.add(threading.get_ident()) or one(*part), grain)

    monkeypatch.setattr(threads, "spread", noted)
    return used


def test_a_part_that_fails_is_told_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "THREADS_FROM", 1)
    threads.use(3)
    ended: list[int] = []

    def part(start: int, _: int) -> None:
        if start == 0:
            raise ValueError("the first part")
        ended.append(start)

    with pytest.raises(ValueError, match="the first part"):
        threads.over_threads(9, 9, part)
    assert sorted(ended) == [3, 6]


def test_torch_itself_keeps_to_the_threads_that_it_has() -> None:
    """It adds up numbers with a floating point, too, whose order parties must not differ in."""
    before = torch.get_num_threads()
    assert threads.allowed() == before
    threads.use(before + 2)
    assert (torch.get_num_threads(), threads.allowed()) == (before, before + 2)


@pytest.mark.parametrize(
    ("cores", "size", "shared", "count"),
    [
        (1.5, Topology(), "", 1),
        (2, Topology(), "", 1),
        (8, Topology(), "", 7),
        (96, Topology(), "", 16),
        (16, Topology(1, 2, 2), "", 3),
        (16, Topology(1, 2, 2), "16", 1),
        (16, Topology(), "4", 3),
    ],
)
def test_a_worker_computes_on_what_it_has_to_itself(
    monkeypatch: pytest.MonkeyPatch, cores: float, size: Topology, shared: str, count: int
) -> None:
    monkeypatch.setattr(host, "cpu_limit", lambda: float(cores))
    monkeypatch.setenv(compute_setup.SHARED_BY, shared)
    assert threads_for(size) == count
    monkeypatch.setenv(compute_setup.THREADS, "5")
    assert threads_for(size) == 5


@pytest.mark.parametrize("told", ["0", "65", "many", "-1", "1.5"])
def test_another_number_of_threads_is_refused(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv(compute_setup.THREADS, told)
    with pytest.raises(ConfigError, match=f"{compute_setup.THREADS}={told}"):
        threads_for(Topology())
