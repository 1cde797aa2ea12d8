"""Every way to a matrix product modulo 2^64 gives torch's bits, whatever the shape, the strides and the numbers."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.mpc.kernels import threads
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import floats, gemm, gemm_paths, gemm_rates, ifma_units, limbs, tile_units

HAS_NUMBA = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not HAS_NUMBA, reason="numba is an extra: kernels")
PORTABLE = ["torch", "floats", *(gemm_paths.LOOP_KINDS if HAS_NUMBA else [])]
HAS_TILES = tile_units.loops() is not None
HAS_IFMA = ifma_units.loops() is not None
BY_UNITS = [*(["tiles"] if HAS_TILES else []), *(["ifma"] if HAS_IFMA else [])]
ALL = [*PORTABLE, *(["bytes"] if HAS_NUMBA else []), *BY_UNITS]
EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32 - 1, 2**32, -(2**32), 2**31, -(2**31), 2**21, -(2**21), 2**43 - 2**21]
EDGES += [2**52 - 1, 2**52, -(2**52), 2**12 - 1, 2**63 - 2**52 + 1]


def numbers(seed: int, edgy: bool, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if edgy:
        return torch.tensor(EDGES)[torch.randint(len(EDGES), shape, generator=generator)]
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same matrix otherwise in memory."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "spread":
        wide = torch.full((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1] + 1), 7)
        part = wide[..., ::2, 1::3]
        return part.copy_(x)
    if layout == "offset":
        return torch.cat([torch.zeros(1, dtype=torch.int64), x.reshape(-1)])[1:].view(x.shape)
    return x


def exact_products(left: Tensor, right: Tensor) -> list[Tensor]:
    """``limbs.products`` as a unit for 8-bit products gives them: exact, and wrapping at 32 bits."""
    k = right.shape[0] // limbs.DIGITS
    return [left[:, : (s + 1) * k].int() @ right[(7 - s) * k :].int() for s in range(limbs.DIGITS)]


@pytest.fixture(autouse=True, scope="module")
def _byte_units() -> Iterator[None]:
    """What surrounds the units for 8-bit products is tested on every processor."""
    with pytest.MonkeyPatch.context() as patched:
        if not limbs.has_fast_bytes(torch.device("cpu")):
            patched.setattr(limbs, "has_fast_bytes", lambda device: True)
            patched.setattr(limbs, "products", exact_products)
        yield


def reference(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """Of arbitrarily large integers; what torch computes is held to it, too."""
    total = xs[0] @ ys[0]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        total = total + x @ y
    return total


layouts = st.sampled_from(["plain", "transposed", "spread", "offset"])
sides = st.one_of(st.integers(0, 9), st.sampled_from([12, 13, 24, 31, 64, 97, 100]))
inners = st.one_of(sides, st.sampled_from([255, 256, 257, 511, 513, 640, 641, 1281]))


@pytest.mark.parametrize("path", ALL)
@settings(max_examples=60, deadline=None)
@given(
    m=sides,
    ks=st.lists(inners, min_size=1, max_size=2),
    n=sides,
    layouts=st.tuples(layouts, layouts),
    edgy=st.booleans(),
    seed=st.integers(0, 99),
)
def test_all_paths_give_the_same_bits(
    path: str, m: int, ks: list[int], n: int, layouts: tuple[str, str], edgy: bool, seed: int
) -> None:
    xs = [laid_out(numbers(seed + i, edgy, m, k), layouts[0]) for i, k in enumerate(ks)]
    ys = [laid_out(numbers(seed + 7 + i, edgy, k, n), layouts[1]) for i, k in enumerate(ks)]
    right = gemm.right_factor(ys, m, path)
    assert torch.equal(right(xs), reference(xs, ys))
    assert torch.equal(
        right([x[: m // 2] for x in xs]), reference([x[: m // 2] for x in xs], ys)
    )  # a last, short piece


@pytest.mark.parametrize("path", ALL)
@settings(max_examples=30, deadline=None)
@given(
    leads=st.sampled_from(
        [
            ((3,), (3,)),
            ((2, 3), (3,)),
            ((3,), ()),
            ((), (3,)),
            ((1, 3), (2, 1)),
            ((0,), (0,)),
            ((2, 2), (2, 2)),
            ((1,), (1,)),
            ((1,), ()),
            ((), (1,)),
            ((1, 1), (1,)),
        ]
    ),
    m=st.integers(1, 14),
    k=st.integers(0, 20),
    n=st.integers(1, 14),
    layouts=st.tuples(layouts, layouts),
    terms=st.integers(1, 2),
)
def test_batches_too(
    path: str, leads: tuple[tuple[int, ...], ...], m: int, k: int, n: int, layouts: tuple[str, str], terms: int
) -> None:
    xs = [laid_out(numbers(i, False, *leads[0], m, k), layouts[0]) for i in range(terms)]
    ys = [laid_out(numbers(9 + i, False, *leads[1], k, n), layouts[1]) for i in range(terms)]
    assert torch.equal(gemm.right_factor(ys, 0, path)(xs), reference(xs, ys))


@pytest.mark.parametrize("path", ALL)
def test_vectors_and_expanded_tensors(path: str) -> None:
    x, y = numbers(1, False, 6, 5), numbers(2, False, 5)
    assert torch.equal(gemm.right_factor([y], 0, path)([x]), x @ y)
    row = numbers(3, False, 1, 5).expand(40, 5)
    column = numbers(4, False, 5, 1).expand(5, 30)
    assert torch.equal(gemm.right_factor([column], 40, path)([row]), row @ column)


def test_the_reference_is_right() -> None:
    x, y = numbers(5, True, 4, 30), numbers(6, True, 30, 3)
    exact = [[sum(a * b for a, b in zip(r, c, strict=True)) for c in y.t().tolist()] for r in x.tolist()]
    wrapped = [[(v + 2**63) % 2**64 - 2**63 for v in row] for row in exact]
    assert torch.equal(reference([x], [y]), torch.tensor(wrapped))


@pytest.mark.parametrize("path", ALL)
def test_matrices_that_do_not_fit_are_refused(path: str) -> None:
    with pytest.raises(RuntimeError):
        gemm.right_factor([numbers(1, False, 40, 40)], 40, path)([numbers(1, False, 40, 39)])


def test_limbs_are_within_the_bounds_that_exactness_needs() -> None:
    x = torch.cat([numbers(1, False, 10_000), torch.tensor(EDGES)])
    found = floats.limbs(x)
    assert all(part.abs().max() <= 2**21 for part in found)
    assert torch.equal(sum(part.to(torch.int64) << (22 * i) for i, part in enumerate(found)), x)
    assert 3 * floats.INNER * 2**42 <= 2**53
    # the limbs that bring the sums nearest to 2^53, as long an inner dimension as is taken in one piece
    worst = torch.full((2, floats.INNER), -(2**21) - (2**43))
    assert torch.equal(floats.product([worst], floats.inner_chunks([worst.t()])), worst @ worst.t())


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("shape", [(1, 20, 9), (5, 20, 9), (64, 30, 20)])
def test_products_spread_over_threads(monkeypatch: pytest.MonkeyPatch, path: str, shape: tuple[int, int, int]) -> None:
    monkeypatch.setattr(threads, "THREADS_FROM", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    used: set[str] = set()
    honest = gemm_paths.over_threads

    def watched(work: int, size: int, one: Any, grain: int = 1) -> None:
        honest(work, size, lambda a, b: used.add(threading.current_thread().name) or one(a, b), grain)

    monkeypatch.setattr(gemm_paths, "over_threads", watched)
    m, k, n = shape
    xs, ys = [numbers(i, False, m, k) for i in range(2)], [numbers(i, False, k, n) for i in range(2)]
    assert torch.equal(gemm.right_factor(ys, m, path)(xs), reference(xs, ys))
    if path not in ("floats", "bytes"):  # whose threads are the BLAS's
        grain = {"halves": 6, "wide": 12, "tiles": 32, "ifma": 5}.get(path, 1)
        assert any(name.startswith("kernels") for name in used) == (m > grain)
    stacked = [t.expand(3, *t.shape).contiguous() for t in (xs[0], ys[0])]
    assert torch.equal(gemm.right_factor([stacked[1]], 0, path)([stacked[0]]), stacked[0] @ stacked[1])


# -- which path --------------------------------------------------------------------------------------------------------


SEEN = gemm_rates.OthersWatch.others  # before the tests' own


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(gemm.VARIABLE, raising=False)
    monkeypatch.setattr(gemm_rates, "loops_folder", lambda: tmp_path)
    monkeypatch.setattr(gemm_rates.OthersWatch, "others", lambda self: 0.0)
    gemm.ranked.cache_clear()
    yield
    gemm.ranked.cache_clear()


def test_the_environment_forces_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm.VARIABLE, "floats")
    taken: list[str] = []
    honest = gemm.prepared
    monkeypatch.setattr(gemm, "prepared", lambda path, ys: taken.append(path) or honest(path, ys))
    x = numbers(1, False, 3, 3)
    gemm.right_factor([x], 3)([x])
    gemm.right_factor([x.expand(2, 3, 3)], 0)([x.expand(2, 3, 3)])
    assert taken == ["floats", "floats"]
    monkeypatch.setenv(gemm.VARIABLE, "abacus")
    with pytest.raises(ConfigError, match="abacus"):
        gemm.right_factor([x], 3)


def test_a_path_that_cannot_be_had_is_an_error_if_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(LOOPS), "get", lambda self: None)
    with pytest.raises(ConfigError, match="numba"):
        gemm.choose(10, 10, 10, forced="halves")
    monkeypatch.setattr(limbs, "has_fast_bytes", lambda device: False)
    assert gemm.choose(64, 64, 64, forced="bytes") == "torch"


def test_the_fastest_is_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {
        "tiles": (9, 1, 11), "bytes": (1, 9, 9), "wide": (2, 3, 3), "halves": (5, 6, 6), "floats": (3, 4, 4),
        "ifma": (6, 8, 7), "torch": (4, 1, 10),
    }  # fmt: skip
    monkeypatch.setattr(gemm_rates, "known", lambda loops: rates)
    monkeypatch.setattr(type(LOOPS), "get", lambda self: object())
    monkeypatch.setattr(type(LOOPS), "found", property(lambda self: None))
    monkeypatch.setattr(limbs, "has_fast_bytes", lambda device: True)
    monkeypatch.setattr(tile_units, "loops", lambda: None)
    monkeypatch.setattr(ifma_units, "loops", lambda: None)
    assert gemm.choose(4, 4, 4) == "torch"
    assert gemm.choose(64, 64, 64) == "halves"
    assert gemm.choose(32, 64, 64) == "torch"  # not enough work to load the loops for
    assert gemm.choose(256, 256, 256) == "bytes"
    assert gemm.choose(63, 512, 1024) == "halves"  # too few rows for the 8-bit units
    assert gemm.choose(512, 127, 512) == "halves"
    assert gemm.choose(1024, 512, 63) == "halves"
    assert gemm.choose(256, 256, 256, batch=2) == "halves"
    assert gemm.choose(512, 512, 512) == "torch"
    assert gemm.choose(16, 512, 10**5) == "torch"
    monkeypatch.setattr(tile_units, "loops", lambda: object())
    assert gemm.choose(64, 64, 64) == gemm.choose(16, 512, 10**5) == "tiles"
    assert gemm.choose(512, 512, 512, batch=9) == "tiles"
    assert gemm.choose(15, 512, 10**5) == "torch"  # tiles would be mostly empty
    assert gemm.choose(512, 63, 512) == gemm.choose(512, 512, 15) == "halves"
    monkeypatch.setattr(ifma_units, "loops", lambda: object())
    assert gemm.choose(512, 63, 512) == gemm.choose(512, 512, 15) == gemm.choose(4, 4000, 400) == "ifma"
    assert gemm.choose(512, 512, 8) == gemm.choose(3, 5000, 500) == gemm.choose(512, 15, 512) == "halves"
    monkeypatch.setattr(type(LOOPS), "get", lambda self: None)
    gemm.ranked.cache_clear()
    assert gemm.choose(256, 256, 256) == "floats"
    assert gemm.choose(0, 512, 512) == "torch"


def test_a_product_goes_by_the_nearest_size_that_was_measured() -> None:
    assert [gemm_rates.size_class(side**3) for side in gemm_rates.SIZES] == [0, 1, 2]
    # 128 and 256: halfway in powers of two at 2^22.5 multiplications, then at 2^25.5
    assert [gemm_rates.size_class(work) for work in (1, 5_931_000, 5_932_000, 47_453_000, 47_454_000)] == [
        0,
        0,
        1,
        1,
        2,
    ]


@needs_numba
def test_what_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    LOOPS.get()
    monkeypatch.setattr(gemm_rates, "SIZES", (16, 20, 24))
    first = gemm_rates.known(loops=True)
    assert set(first) >= {"wide", "halves", "floats", "torch"}
    assert {p.name for p in tmp_path.iterdir()} == {gemm_rates.path().name, gemm_rates.path().with_suffix(".lock").name}
    monkeypatch.setattr(gemm_rates, "measure", lambda: pytest.fail("measured twice"))
    assert gemm_rates.known(loops=True) == first == gemm_rates.known(loops=False)


def test_what_was_measured_while_others_computed_is_measured_anew_a_minute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, made = {"use": 0.8}, {"torch": (1.0, 2.0, 3.0)}
    measured: list[float] = []
    monkeypatch.setattr(gemm_rates.OthersWatch, "others", lambda self: others["use"])
    monkeypatch.setattr(gemm_rates, "measure", lambda: measured.append(others["use"]) or made)
    for use, later, expected in ((0.8, 0, [0.8]), (0.1, 30, [0.8]), (0.1, 90, [0.8, 0.1]), (0.8, 900, [0.8, 0.1])):
        others["use"] = use
        if gemm_rates.path().exists():
            os.utime(gemm_rates.path(), (time.time() - later,) * 2)
        assert gemm_rates.known(loops=True) == made
        assert measured == expected
        assert gemm_rates.known(loops=False) == made


def test_others_are_seen_at_work() -> None:
    watch = gemm_rates.OthersWatch()
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        before = time.process_time()
        while SEEN(watch) <= 0.1:  # a test's patience is its limit of time
            time.sleep(0.01)
        assert time.process_time() - before < 10
    finally:
        busy.kill()
        busy.communicate()


def test_who_was_stopped_while_it_measured_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_rates, "PATIENCE_S", 0.0)
    monkeypatch.setattr(gemm_rates, "measure", lambda: {"torch": (1.0, 2.0, 3.0)})
    with gemm_rates.path().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert gemm_rates.known(loops=True)["torch"] == (1.0, 2.0, 3.0)


def test_of_processes_that_begin_together_one_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    begun = threading.Barrier(3)

    def measure() -> dict[str, tuple[float, ...]]:
        measured.append(1)
        return {"torch": (1.0, 2.0, 3.0)}

    def one() -> None:
        begun.wait()
        assert gemm_rates.known(loops=True)["torch"] == (1.0, 2.0, 3.0)

    monkeypatch.setattr(gemm_rates, "measure", measure)
    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured == [1]


def test_a_process_of_many_threads_measures_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    honest = gemm_rates.rates_at
    monkeypatch.setattr(gemm_rates, "SIZES", (16, 20, 24))
    monkeypatch.setattr(gemm_rates, "rates_at", lambda *a: seen.append(torch.get_num_threads()) or honest(*a))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gemm_rates.measure()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 1]


def test_nothing_is_measured_while_the_loops_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_rates, "measure", lambda: pytest.fail("measured"))
    for capability, better in (("AVX2", "floats"), ("AVX512", "torch"), ("DEFAULT", "floats")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        rates = gemm_rates.known(loops=False)
        assert max(("floats", "torch"), key=lambda name: rates[name]) == better


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"torch": 1}', '{"torch": [1]}', '{"torch": [0, 1, 1]}', '{"torch": ["x", 1, 1]}', "{}",
     '{"torch": [NaN, 1, 1]}', '{"halves": [1, 1, 1]}', '{"torch": [1, 1, 1e999]}', '{"torch": [1, 2]}', "\x00\xff"],
)  # fmt: skip
def test_a_corrupt_file_is_measured_anew(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    made = {"torch": (1.0, 2.0, 3.0)}
    monkeypatch.setattr(gemm_rates, "measure", lambda: made)
    gemm_rates.path().write_text(text)
    assert gemm_rates.known(loops=True) == made
    assert json.loads(gemm_rates.path().read_text()) == {"torch": [1.0, 2.0, 3.0]}
    assert gemm_rates.read(gemm_rates.path()) == made


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(gemm_rates, "loops_folder", lambda: tmp_path / "file" / "below")
    monkeypatch.setattr(gemm_rates, "measure", lambda: {"torch": (1.0, 2.0)})
    with caplog.at_level(logging.INFO):
        assert gemm_rates.known(loops=True) == {"torch": (1.0, 2.0)}
    assert "cannot be kept" in caplog.text


def test_another_processor_or_version_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gemm_rates.path()
    assert gemm_rates.path() == before
    monkeypatch.setattr(gemm_rates, "processor_name", lambda: "another")
    other = gemm_rates.path()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({before, other, gemm_rates.path()}) == 3


def test_threads_write_what_an_inference_has_made() -> None:
    """A runtime computes in inference mode, which the threads of a pool do not begin in."""
    side = 1 + round(threads.THREADS_FROM ** (1 / 3))
    x = torch.arange(side * side).view(side, side) * 0x5851F42D4C957F2D
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            found = gemm_paths.prepared("torch", [x])([x])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, x @ x)
