"""A party's view tells nothing: the battery passes on every protocol and fails on every planted leak."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import privacy_battery as battery
import pytest
import torch
from torch import Tensor

from uvcc_engine.model.learning.standardising import Standardiser
from uvcc_engine.mpc.comparisons import boolean, gated, maximum, selection, shuffle
from uvcc_engine.mpc.foundation import prg
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import share_of, split
from uvcc_engine.mpc.functions import nonlinear, softmax
from uvcc_engine.mpc.products import arithmetic, truncation

N = 4096
ZERO = torch.zeros(N, dtype=torch.float64)
SECRET = torch.linspace(-3000.0, 3000.0, N, dtype=torch.float64)

PAIRWISE = ("mul", "matmul", "relu", "exp", "shuffle", "fused", "reduced", "gated")
COSTLY = ("softmax", "powers", "standardised", "own")  # made of what the others show by itself, or large
NAMES = (*PAIRWISE, "max", "argmax", "divide", "bits", "winner")

Program = Callable[[Runtime], object]


def program(name: str, x: Tensor, seed: int = 7) -> Program:
    rows = x.reshape(-1, 4)
    source = random.Random(seed)
    parts = split(x, 16, source.randbytes)
    table = split(rows, 16, source.randbytes)
    small = split(-(x.abs() / 500 + 0.5), 16, source.randbytes)
    signs = split((rows > 100).to(torch.float64) / 2.0**16, 16, source.randbytes)
    wide_range = split(x / 30, 16, source.randbytes)
    near = split(x.abs() / 1000 + 1, 16, source.randbytes)

    def run(rt: Runtime) -> object:
        value, matrix = share_of(parts, rt.party), share_of(table, rt.party)
        if name == "mul":
            return arithmetic.mul(rt, value, value)
        if name == "own":  # the mask of a large product
            wide = matrix.T.index((slice(None), slice(0, truncation.OWN_FROM // N * 4)))
            return rt.run(arithmetic.matmul_protocol(rt, matrix, wide, scale=0.1 / 64))
        if name == "matmul":
            return rt.run(
                arithmetic.matmul_protocol(rt, matrix, matrix.T.index((slice(None), slice(0, 8))), scale=0.1 / 64)
            )
        if name == "relu":
            return selection.relu(rt, value)
        if name == "max":
            return maximum.max_(rt, matrix)
        if name == "argmax":
            return maximum.argmax_one_hot(rt, matrix)
        if name == "exp":
            return nonlinear.exp(rt, share_of(small, rt.party))
        if name == "divide":
            return nonlinear.reciprocal(rt, share_of(near, rt.party), 1.0, 4.0)
        if name == "bits":
            return rt.run(boolean.drelu_bits_protocol(rt, value))
        if name == "shuffle":
            return rt.run(shuffle.shuffle_protocol(rt, value))
        if name == "reduced":
            return rt.run(selection.relu_only_protocol(rt, value, width=32))
        if name == "winner":
            return rt.run(maximum.matmul_max_protocol(rt, matrix, matrix.T.index((slice(None), slice(0, 4)))))
        if name == "powers":
            return rt.run(softmax.matmul_powers_protocol(rt, matrix, matrix.T.index((slice(None), slice(0, 4)))))
        if name == "standardised":
            two_rows = share_of(wide_range, rt.party).reshape(2, N // 2)
            statistics = Standardiser(rt, N // 2, 16)
            rt.run(statistics.fit_protocol(two_rows))
            return rt.run(statistics.apply_protocol(two_rows))
        if name == "gated":
            kept, columns = share_of(signs, rt.party, 0), matrix.T.index((slice(None), slice(0, 4)))
            return rt.run(gated.matmul_gated_protocol(rt, matrix, columns, kept, scale=0.1 / 64))
        if name == "fused":
            columns = matrix.T.index((slice(None), slice(0, 4)))
            return rt.run(selection.matmul_relu_protocol(rt, matrix, columns))
        assert name == "softmax"
        return nonlinear.softmax(rt, matrix)

    return run


@pytest.mark.parametrize(
    "name",
    [
        *NAMES,
        *(pytest.param(name, marks=pytest.mark.ci(__file__)) for name in COSTLY),
    ],
)
def test_views_are_uniform_and_independent_of_the_secret(name: str) -> None:
    runs = [battery.views(program(name, x)) for x in (ZERO, SECRET)]
    for party in range(3):
        for run in runs:
            assert any(data.numel() >= battery.LEAST for _, data in run[party].items)
            view = run[party]
            found = (
                battery.leaks(view)
                if name in (*PAIRWISE, "own")
                else [w for _, d in view.items for w in small_leaks(d)]
            )
            assert found == []
            assert battery.repeats(view) == []
        assert battery.dependence(runs[0][party], runs[1][party]) == []


def small_leaks(data: Tensor) -> list[str]:
    return battery.single(battery.words_of(data)) if data.numel() >= battery.LEAST else []


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[tuple[int, int, int, int]], str]], None]]:
    """Make chosen draws zero or repeated, at every party: what leaky systems did."""

    def set_plant(choose: Callable[[tuple[int, int, int, int]], str]) -> None:
        honest = prg.Stream.draw

        def draw(
            self: prg.Stream, epoch: int, stream: int, op: int, piece: int, out: Tensor, room: Tensor | None = None
        ) -> int:
            after = honest(self, epoch, stream, op, piece, out, room)
            what = choose((epoch, stream, op, piece))
            if what == "zero":
                out.zero_()
            if what == "same":
                fresh = prg.Stream.__new__(prg.Stream)
                fresh.__dict__.update(self.__dict__)
                fresh._at = (-1, -1, -1, 0)
                honest(fresh, 0, 0, 0, 0, out)
            return after

        monkeypatch.setattr(prg.Stream, "draw", draw)

    yield set_plant
    monkeypatch.undo()


def caught(name: str) -> bool:
    runs = [battery.views(program(name, x)) for x in (ZERO, SECRET)]
    return any(
        battery.leaks(view) or battery.repeats(view) or battery.dependence(a, b)
        for a, b in zip(*runs, strict=True)
        for view in (a, b)
    )


def test_catches_products_without_a_zero_share(plant: Callable[..., None]) -> None:
    plant(lambda place: "zero" if place[2] == 0 else "")
    assert caught("mul")


def test_catches_a_mask_used_twice(plant: Callable[..., None]) -> None:
    plant(lambda place: "same")
    assert caught("mul")
    assert caught("relu")


def test_catches_truncation_without_a_mask(plant: Callable[..., None]) -> None:
    plant(lambda place: "zero" if place[2] == 1 else "")
    assert caught("mul")


def test_catches_comparison_without_masks(plant: Callable[..., None]) -> None:
    plant(lambda place: "zero" if place[2] == 0 else "")
    assert caught("relu")


def test_catches_selection_without_masks(plant: Callable[..., None]) -> None:
    plant(lambda place: "zero" if place[2] == 1 else "")
    assert caught("relu")


def test_the_statistics_pass_uniform_bytes_and_fail_others() -> None:
    source = random.Random(1)
    uniform = torch.frombuffer(bytearray(source.randbytes(8 * N)), dtype=torch.int64)
    assert battery.single(battery.words_of(uniform)) == []
    assert battery.single(battery.words_of(uniform & ((1 << 44) - 1))) == []
    assert battery.single(battery.words_of(uniform & ~1)) != []
    assert battery.single(battery.words_of(torch.arange(N))) != []
    assert battery.single(battery.words_of(torch.zeros(N, dtype=torch.int64))) == ["all zero"]
