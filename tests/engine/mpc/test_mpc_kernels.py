"""Every kernel gives the bits of the plain ones."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import uvcc_engine
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.compiled import loops_folder, shared_loops
from uvcc_engine.mpc.comparisons import selection
from uvcc_engine.mpc.comparisons.boolean import QUICK, SPARING
from uvcc_engine.mpc.comparisons.carry import tree
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels import compiled_kernels, cpu, threads
from uvcc_engine.mpc.kernels.choose import kernels_for
from uvcc_engine.mpc.kernels.compiled_kernels import COMPILE_FROM
from uvcc_engine.mpc.kernels.compiling import loops
from uvcc_engine.mpc.kernels.compiling.compile import main as compile_loops
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS, Loops, mark
from uvcc_engine.mpc.kernels.compiling.warm import warm
from uvcc_engine.mpc.kernels.cpu import CpuKernels
from uvcc_engine.mpc.kernels.gemm import gemm, limbs
from uvcc_engine.mpc.kernels.layout import Level, Patches, level, wire_dtype
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.mpc.products.truncation import from_wire

PLAIN, CPU = PlainKernels(), CpuKernels()
N = COMPILE_FROM + 192
WORDS = N // 64


def random(*shape: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, shape, generator=torch.Generator().manual_seed(sum(shape)))


LEVELS = [level(m, generate=g, carry_on=c) for m in (2, 3, 4, 5, 7) for g, c in ((1, 1), (1, 0), (0, 1))]


@pytest.fixture(params=[1, 3], ids=["alone", "over_threads"])
def on_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels compute on one thread, and on three however little there is to do."""
    if request.param > 1:
        monkeypatch.setattr(threads, "THREADS_FROM", 1)
    threads.use(request.param)
    yield
    threads.use(0)


over_threads = pytest.mark.usefixtures("on_threads")
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is an extra: kernels")


@needs_numba
def test_the_compiled_kernels_are_in_use() -> None:
    assert CPU._jit is not None


@needs_numba
def test_warming_up_compiles_whatever_the_protocols_call() -> None:
    loops = LOOPS.get()
    assert loops is not None
    warm(CPU)
    compiled = {name: fn for name, fn in vars(loops).items() if hasattr(fn, "signatures")}
    before = {name: list(fn.signatures) for name, fn in compiled.items()}

    def body(rt: Runtime) -> None:
        x = Share(random(N).clone(), random(N + 1)[1:].clone())
        rt.run(selection.relu_protocol(rt, x))
        rt.run(selection.relu_only_protocol(rt, x, width=32))
        for shift in (12, 24, 40):
            rt.run(arithmetic.mul_protocol(rt, x, x.with_f(shift)))

    LocalPlanes(3).run_three(body)
    assert {name: list(fn.signatures) for name, fn in compiled.items()} == before
    # without a unit for 8-bit products (AVX2 only) no protocol comes to the loops that split numbers into digits
    idle = (
        [] if limbs.has_fast_bytes(torch.device("cpu")) else ["split_left", "split_right", "split_columns", "combine"]
    )
    # elements of a proof all have one degree, for which eight numbers are multiplied at a time where a processor can
    idle += ["weigh_elements"] if loops.MULTIPLIES_EIGHT else ["weigh_by_fours", "multiply_elements"]
    # (another test of this process may have called them); one with an underscore is a part of the loops that call it
    assert {name for name, fn in compiled.items() if not fn.signatures and name[0] != "_"} <= set(idle)


@needs_numba
def test_a_worker_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    started: list[list[str]] = []

    class Maker:
        returncode: int | None = None

        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

        def poll(self) -> int | None:
            return self.returncode

    monkeypatch.setattr("uvcc_engine.mpc.kernels.compiling.loops.subprocess.Popen", Maker)
    monkeypatch.setattr("uvcc_engine.mpc.kernels.compiling.loops.LOOK_S", 0.0)
    found = Loops()
    found.compile_beside()
    assert found.get() is None
    assert found.get() is None
    assert [c[-1] for c in started] == ["uvcc_engine.mpc.kernels.compiling.compile"]
    assert mark().parent == tmp_path
    mark().touch()
    assert found.get() is not None
    failed = Loops()
    failed.compile_beside()
    mark().unlink()
    assert failed.get() is None
    monkeypatch.setattr(Maker, "returncode", 1)
    assert failed.get() is not None  # compiled by whoever needs it, then


USE = """
import numpy as np
from uvcc_engine.mpc.kernels import jit
x = np.arange(3, dtype=np.uint64)
jit.pack(x, 1, np.empty(3, dtype=np.uint8))
print(jit.__file__, sum(jit.pack.stats.cache_hits.values()), sum(jit.pack.stats.cache_misses.values()))
"""


@pytest.mark.ci(__file__)
@needs_numba
def test_copies_of_the_package_on_one_machine_compile_once(tmp_path: Path) -> None:
    """As local pods: each has its own copy. One whose source differs shares nothing."""
    (tmp_path / "loops").mkdir()
    told = []
    for name in ("one", "two", "other"):
        package = tmp_path / name / "uvcc_engine"
        shutil.copytree(Path(uvcc_engine.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        if name == "other":
            with open(package / "mpc/kernels/jit.py", "a") as source:
                source.write("# a later version\n")
        env = {**os.environ, "PYTHONPATH": str(package.parent), "UVCC_LOOPS": str(tmp_path / "loops")}
        done = subprocess.run([sys.executable, "-c", USE], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        where, hits, misses = done.stdout.split()
        assert Path(where).is_relative_to(package)
        told.append((int(hits), int(misses)))
    assert told == [(0, 1), (1, 0), (0, 1)]


def test_what_can_only_be_read_is_taken_over_and_what_anybody_writes_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A domain's own user begins with what the administrator's installation has compiled."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("UVCC_LOOPS", raising=False)
    beside = Path(cpu.__file__).parent / "__pycache__"
    assert loops_folder() == beside == Path(shared_loops(Path(uvcc_engine.__file__).parent))
    loops.take_over()  # nothing is shared
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(own))
    monkeypatch.setenv("UVCC_LOOPS", str(shared))
    assert loops_folder() == shared == mark().parent
    theirs, done = loops.code_folder(), mark()
    theirs.mkdir()
    (theirs / "jit.pack.nbc").write_bytes(b"machine code")
    monkeypatch.setattr("uvcc_engine.contract.machine.compiled.os.access", lambda *_: False)
    assert loops_folder() == own
    loops.take_over()  # not complete
    assert not own.exists()
    done.touch()
    shared.chmod(0o777)
    loops.take_over()  # anybody's
    assert not own.exists()
    monkeypatch.setattr("uvcc_engine.contract.machine.compiled.os.access", lambda *_: True)
    assert loops_folder() == own
    shared.chmod(0o755)
    monkeypatch.setattr("uvcc_engine.contract.machine.compiled.os.access", lambda *_: False)
    loops.take_over()
    assert (loops.code_folder() / "jit.pack.nbc").read_bytes() == b"machine code"
    assert loops.code_folder().parent == own
    monkeypatch.setenv("UVCC_LOOPS", str(tmp_path / "gone"))
    assert loops_folder() == own
    loops.take_over()


@needs_numba
def test_compiling_twice_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr("uvcc_engine.mpc.kernels.compiling.compile.os.nice", lambda _: 0)
    calls: list[object] = []
    measured: list[bool] = []
    monkeypatch.setattr("uvcc_engine.mpc.kernels.compiling.warm.warm", calls.append)
    monkeypatch.setattr("uvcc_engine.mpc.kernels.gemm.gemm_rates.known", lambda loops: measured.append(loops))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    assert compile_loops() == 0
    assert compile_loops() == 0
    assert len(calls) == 1
    assert measured == [True]
    assert mark().exists()


@over_threads
@pytest.mark.parametrize("n", [1, 63, 64, 130, N - 5])
@pytest.mark.parametrize("bits", [64, 63, 20])
def test_bit_planes(n: int, bits: int) -> None:
    x = random(n)
    assert torch.equal(CPU.to_planes(x, bits), PLAIN.to_planes(x, bits))
    planes = PLAIN.to_planes(x, bits)
    back = sum(PLAIN.bits_to_ints(planes[b], n) << b for b in range(bits))
    assert torch.equal(back, x & ((1 << bits) - 1) if bits < 64 else x)
    assert torch.equal(CPU.bits_to_ints(planes, n), PLAIN.bits_to_ints(planes, n))


@pytest.mark.parametrize("n", [5, N])
@pytest.mark.parametrize("size", [5, 6, 7])
def test_packed_numbers_keep_their_lowest_bytes(n: int, size: int) -> None:
    x = random(n)
    packed = CPU.pack(x, size)
    assert packed.shape == (n, size)
    assert torch.equal(packed, PLAIN.pack(x, size))
    assert torch.equal(from_wire(packed, 8 * size) & ((1 << 8 * size) - 1), x & ((1 << 8 * size) - 1))


@over_threads
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("words", [3, WORDS])
def test_digit_tables_tell_generate_and_propagate(k: int, words: int) -> None:
    u, v = random(2 * k, words), random(2 * k, words) ^ 5
    mask = random(2 * ((1 << k) - 1), words)
    dealt, plain = torch.empty_like(mask), torch.empty_like(mask)
    CPU.deal_digits(u, k, mask, dealt)
    PLAIN.deal_digits(u, k, mask, plain)
    assert torch.equal(dealt, plain)
    shares = []
    for table, one in ((dealt, -1), (mask, 0)):
        g, p = CPU.pick_digits(table, v, k, one)
        for mine, reference in zip((g, p), PLAIN.pick_digits(table, v, k, one), strict=True):
            assert torch.equal(mine, reference)
        shares.append((g, p))
    digits = [PLAIN.bits_to_ints(x, 64 * words).reshape(2, k, -1) for x in (u, v)]
    total = sum((d << torch.arange(k)[:, None]).sum(1) for d in digits)
    bits = [PLAIN.bits_to_ints(a ^ b, 64 * words) for a, b in zip(*shares, strict=True)]
    assert torch.equal(bits[0], (total >= 1 << k).to(torch.int64))
    assert torch.equal(bits[1], (total == (1 << k) - 1).to(torch.int64))


@over_threads
@pytest.mark.parametrize("plan", LEVELS, ids=lambda p: f"m{p.m}{'g' * p.generate}{'p' * p.carry_on}")
@pytest.mark.parametrize("words", [3, WORDS])
def test_merging_levels(plan: Level, words: int) -> None:
    groups, m = 3, plan.m
    g, p = random(groups * m, words), random(groups * m, words) | random(1, words)
    left, right = random(len(plan.singles), groups, words), random(len(plan.singles), groups, words) ^ 3
    product = random(len(plan.products), groups, words)
    dealt = [torch.empty_like(product) for _ in range(2)]
    closed = [torch.empty_like(left) for _ in range(2)]
    for kernels, d, c in zip((CPU, PLAIN), dealt, closed, strict=True):
        kernels.mask_products(plan, left, right, product, d)
        kernels.close(plan, g, p, left ^ right, c)
    assert torch.equal(*dealt)
    assert torch.equal(*closed)
    sums = []
    for kernels in (CPU, PLAIN):
        out = torch.zeros(2, 2, groups, words, dtype=torch.int64)
        kernels.merge(plan, closed[0], left, dealt[0], -1, out[0, 0], out[0, 1])
        kernels.merge(plan, closed[0], right, product, 0, out[1, 0], out[1, 1])
        sums.append(out[0] ^ out[1])
    g3, p3 = g.reshape(groups, m, words), p.reshape(groups, m, words)
    carry, passes = g3[:, 0], p3[:, 0]
    for j in range(1, m):
        carry, passes = g3[:, j] ^ (p3[:, j] & carry), passes & p3[:, j]
    for found in sums:
        if plan.generate:
            assert torch.equal(found[0], carry)
        if plan.carry_on:
            assert torch.equal(found[1], passes)


@over_threads
@pytest.mark.parametrize("n", [100, N])
@pytest.mark.parametrize("s", [1, 13, 16, 32, 38])
def test_truncation_kernels(n: int, s: int) -> None:
    z, left, right, a, b = (random(n) ^ i for i in range(5))
    k, m, low = ((random(n) ^ i).to(wire_dtype(s)) for i in range(3))
    for mine, reference in zip(
        CPU.truncate_deal(z, left, right, k, m, low, s), PLAIN.truncate_deal(z, left, right, k, m, low, s), strict=True
    ):
        assert torch.equal(mine, reference)
    own = (z, left, torch.stack([k, m]), low, k, s)
    for mine, reference in zip(CPU.truncate_deal_own(*own), PLAIN.truncate_deal_own(*own), strict=True):
        assert torch.equal(mine, reference)
    into = torch.empty_like(z)
    assert CPU.truncate_deal_own(*own, into)[1] is into
    assert torch.equal(into, PLAIN.truncate_deal_own(*own)[1])
    for given in ((z, a, b, k, m, s), (z, a, low, k, m, s, s)):
        for mine, reference in zip(CPU.truncate_open(*given), PLAIN.truncate_open(*given), strict=True):
            assert torch.equal(mine, reference)
    assert torch.equal(CPU.truncate_close(z, k, m, s), PLAIN.truncate_close(z, k, m, s))


@over_threads
@pytest.mark.parametrize("n", [100, N])
def test_product_and_selection_kernels(n: int) -> None:
    a, b, c, d = (random(n) ^ i for i in range(4))
    assert torch.equal(CPU.mul([a, b], [c, d]), PLAIN.mul([a, b], [c, d]))
    assert torch.equal(CPU.mul([a], [c]), PLAIN.mul([a], [c]))
    assert torch.equal(CPU.blind(a.clone(), 7, b, c), PLAIN.blind(a, 7, b, c))
    for ways in itertools.product((False, True), repeat=2):
        given = (*ways, (a, b), (c, d), 7, d, a)
        assert torch.equal(CPU.mul_blinded(*given), PLAIN.mul_blinded(*given))
        given = (*ways, (a[:1], b[:1]), (c, d), 7, d, a)
        assert torch.equal(CPU.mul_blinded(*given), PLAIN.mul_blinded(*given))
    words, right = random(-(-n // 64)), random(2, n)
    assert torch.equal(CPU.select_deal(words, [a], right), PLAIN.select_deal(words, [a], right))
    for lead in (0, 1):
        (mine,), bit = CPU.select(words, [a], [b], right, lead)
        (reference,), own = PLAIN.select(words, [a], [b], right, lead)
        assert torch.equal(mine, reference)
        assert torch.equal(bit, own)


PATCHES = [
    Patches(2, 6, 5, 3, 3, 1, 1, 1, 1),
    Patches(1, 7, 7, 3, 3, 2, 2, 0, 0),
    Patches(3, 5, 6, 4, 4, 2, 2, 2, 2),
    Patches(1, 9, 7, 2, 2, 2, 2, 0, 0),  # windows, and lines of pixels that are in none
    Patches(2, 1, 9, 1, 4, 1, 3, 0, 2),
    Patches(1, 7, 4, 2, 1, 1, 1, 3, 3),  # patches of padding alone
    Patches(3, 4, 4, 1, 1, 3, 4, 0, 0),  # patches with pixels between them
]


@over_threads
@pytest.mark.parametrize("of", PATCHES, ids=str)
@pytest.mark.parametrize("numbers", [1, N])
def test_patches_are_cut_and_added_up(of: Patches, numbers: int) -> None:
    rows = -(-numbers // (of.lines * of.columns * of.each))
    images, patches = random(rows, of.image), random(rows * of.lines * of.columns, of.each)
    cut, added = CPU.cut_patches(images, of), CPU.add_patches(patches, of)
    assert torch.equal(cut, PLAIN.cut_patches(images, of))
    assert torch.equal(added, PLAIN.add_patches(patches, of))
    assert (cut * patches).sum() == (images * added).sum()  # each is the other's transpose, modulo 2^64
    for more in (1, 3):
        for kernels in (CPU, PLAIN):
            wider = kernels.cut_patches(images, of, more)
            assert torch.equal(wider[:, : of.each], cut)
            assert not wider[:, of.each :].any()


@over_threads
@pytest.mark.parametrize("way", [(0, 1, 2), (0, 2, 1), (2, 1, 0)])
def test_numbers_are_laid_out_in_order(way: tuple[int, int, int]) -> None:
    x = random(7, 5, 3).permute(way)
    found = threads.laid_out(x)
    assert found.is_contiguous()
    assert torch.equal(found, x)
    into = torch.zeros(*x.shape[:2], 4, dtype=torch.int64)[..., : x.shape[2]] if x.shape[2] < 4 else torch.empty_like(x)
    assert threads.laid_out(x, into) is into
    assert torch.equal(into, x)


def test_the_trees_cover_63_bits() -> None:
    for steps in (QUICK, SPARING):
        blocks = [sum(batch.blocks for batch in one) for one in steps]
        groups = [sum(batch.groups for batch in one) for one in steps]
        assert blocks[0] == 21
        assert blocks[1:] == groups[:-1]
        assert groups[-1] == 1
    assert not tree(((3, 1), (3, 2)))[0][0].plan.carry_on


def test_without_numba_large_tensors_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvcc_engine.mpc.kernels.compiling.loops.importlib.util.find_spec", lambda name: None)
    for module in (compiled_kernels, gemm):
        monkeypatch.setattr(module, "LOOPS", Loops())
    slow = CpuKernels()
    assert slow._jit is None
    x = random(N)
    assert torch.equal(slow.to_planes(x), PLAIN.to_planes(x))


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match="meta"):
        kernels_for(torch.device("meta"))


def scrambled(*shape: int) -> Tensor:
    x = random(*shape)
    x.view(-1)[:8] = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 0x7F, 0x80, -0x80])
    return x


@pytest.mark.parametrize(("m", "k", "n"), [(33, 8, 16), (32, 100, 48), (64, 300, 16)])
def test_digit_products_are_exact(m: int, k: int, n: int) -> None:
    x, y = scrambled(m, k), scrambled(k, n)
    parts = exact_products(limbs.split_left(x), limbs.split_right(y))
    assert torch.equal(limbs.combine(parts), x @ y)


def digit_pairs(left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    k = right.shape[0] // 8
    return [(left[:, : (s + 1) * k], right[(7 - s) * k :]) for s in range(8)]


def test_digits_reach_from_end_to_end() -> None:
    x = scrambled(50)
    d = limbs.digits(x).to(torch.int64)
    assert d.min() >= -128
    assert d.max() <= 127
    assert torch.equal((d << (8 * torch.arange(8))).sum(-1), x)


def exact_products(left: Tensor, right: Tensor) -> list[Tensor]:
    """``limbs.products`` as a unit for 8-bit products gives them: exact, and wrapping at 32 bits."""
    return [a.to(torch.int32) @ b.to(torch.int32) for a, b in digit_pairs(left, right)]


@needs_numba
@pytest.mark.parametrize("terms", [1, 2])
def test_products_on_the_byte_unit(monkeypatch: pytest.MonkeyPatch, terms: int) -> None:
    if not limbs.has_fast_bytes(torch.device("cpu")):  # the loops around the unit are tested on every processor
        monkeypatch.setattr(limbs, "has_fast_bytes", lambda device: True)
        monkeypatch.setattr(limbs, "products", exact_products)
    monkeypatch.setenv("UVCC_GEMM", "bytes")
    xs, ys = [scrambled(48, 90) ^ i for i in range(terms)], [scrambled(90, 32) ^ i for i in range(terms)]
    expected = sum(a @ b for a, b in zip(xs, ys, strict=True))
    called = []
    monkeypatch.setattr(limbs, "products", lambda *a, honest=limbs.products: called.append(1) or honest(*a))
    assert torch.equal(CPU.right_factor(ys, 48)(xs), expected)
    assert torch.equal(CPU.right_factor([y.t().contiguous().t() for y in ys], 48)(xs), expected)
    assert len(called) == 2
    assert torch.equal(limbs.combine(limbs.products(limbs.split_left(xs[0]), limbs.split_right(ys[0]))), xs[0] @ ys[0])


def test_a_unit_that_adds_pairs_in_16_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As processors without VNNI do: exact for most numbers, and wrong at the extremes."""

    def paired(a: Tensor, b: Tensor) -> Tensor:
        pairs = (a.int() + 128)[:, :, None] * b.int()  # [m, k, n]
        if pairs.shape[1] % 2:
            pairs = torch.nn.functional.pad(pairs, (0, 0, 0, 1))
        summed = pairs.view(pairs.shape[0], -1, 2, pairs.shape[2]).sum(2).clamp(-(1 << 15), (1 << 15) - 1)
        return (summed.sum(1) - 128 * b.int().sum(0)).int()

    small = torch.randint(-40, 40, (8, 64), dtype=torch.int8)
    assert torch.equal(paired(small, small.t()), small.int() @ small.t().int())
    monkeypatch.setattr(torch, "_int_mm", paired)
    assert not limbs.extremes_are_exact(torch.device("cpu"), 127, 127)
    assert limbs.extremes_are_exact(torch.device("cpu"), -128, 127)


def test_units_that_are_there_and_not_exact_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in limbs.UNITS:
        monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
    monkeypatch.setattr(limbs, "wraps_and_is_exact", lambda device: False)
    with caplog.at_level(logging.INFO):
        assert not limbs.has_fast_bytes(torch.device("cpu"))
    assert "not exact" in caplog.text
    for name in limbs.UNITS:
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    monkeypatch.setattr(limbs, "wraps_and_is_exact", lambda device: pytest.fail("tried without a unit"))
    assert not limbs.has_fast_bytes(torch.device("cpu"))


def test_a_device_whose_products_saturate_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double()).clamp(-(2.0**31), 2.0**31 - 1).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not limbs.wraps_and_is_exact.__wrapped__(torch.device("cpu"))
