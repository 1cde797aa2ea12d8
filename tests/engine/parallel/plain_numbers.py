"""What stands where a party's runtime and its shares do in the plain twin (``plain_ring``), and linear maps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.rounds import Fork
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.kernels.layout import Patches

DEALER = 2


class PlainKernels:
    """What a layer's own maps are made of."""

    @staticmethod
    def right_factor(ys: Sequence[Tensor], rows: int) -> Callable[[Sequence[Tensor]], Tensor]:
        ((factor,), _) = ys, rows
        return lambda xs: xs[0] @ factor

    @staticmethod
    def cut_patches(images: Tensor, of: Patches, more: int = 0) -> Tensor:
        pixels = torch.nn.functional.pad(images.reshape(-1, of.image), (0, 1))
        cut = pixels[:, _places(of)].reshape(-1, of.each)
        return torch.nn.functional.pad(cut, (0, more))

    @staticmethod
    def add_patches(patches: Tensor, of: Patches) -> Tensor:
        flat = patches.reshape(-1, of.lines * of.columns * of.each)
        total = flat.new_zeros(len(flat), of.image + 1)
        return total.index_add_(1, _places(of), flat)[:, : of.image]


def _places(of: Patches) -> Tensor:
    """Which pixel each number of an image's patches is, in order; those of the padding come after the last."""
    top, side = -of.above, -of.beside
    found = [
        (channel * of.height + line) * of.width + column
        if 0 <= line < of.height and 0 <= column < of.width
        else of.image
        for y in range(of.lines)
        for x in range(of.columns)
        for channel in range(of.channels)
        for line in range(top + y * of.down, top + y * of.down + of.high)
        for column in range(side + x * of.across, side + x * of.across + of.wide)
    ]
    return torch.tensor(found)


class PlainRuntime:
    """Stands where a party's runtime does. It has no peers, no messages and no random numbers."""

    party, next, prev = 0, 1, 2
    kernels = PlainKernels
    device = torch.device("cpu")
    few_rounds, proves_everything = True, False
    ledger = range_watch = None
    epoch = -1

    def __init__(self) -> None:
        self.plane = self

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def draws(self) -> Any:
        raise AssertionError("a protocol on shares asks for random numbers")

    def run(self, steps: Any) -> Any:
        return self.start(steps).result

    def start(self, steps: Any) -> Done:
        with torch.inference_mode():
            return Done(_through(steps))

    def arrived(self, wants: Any) -> bool:
        raise AssertionError("nothing is waited for")

    send = recv = send_control = recv_control = close = wait_any = arrived


class Done:
    """A protocol that has ended, as one does that need not wait."""

    done, patient = True, False

    def __init__(self, result: Any) -> None:
        self.result = result


def _through(steps: Any) -> Any:
    """A protocol to its end: its branches in their order, each to its end."""
    answer = None
    while True:
        try:
            asked = steps.send(answer)
        except StopIteration as end:
            return end.value
        assert isinstance(asked, Fork), f"a protocol on shares sends {asked}"
        answer = [_through(branch) for branch in asked.branches]


@dataclass(frozen=True, slots=True, eq=False)
class Number(Share):
    """``first`` is the number, ``second`` and ``third`` what of it lies in summands 1 and 2; the rest is in 0. Without
    a third it is not known where it lies, and it cannot be exponentiated."""

    third: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Number:
        return Number(fn(self.first), fn(self.second), self.f, None if self.third is None else fn(self.third))

    def summand(self, of: int) -> Tensor:
        assert self.third is not None, "it is not known where this number lies"
        return (self.first - self.second - self.third, self.second, self.third)[of]


def held(x: Tensor, f: int, dealer: int = DEALER) -> Number:
    """An outcome of a protocol: in the summand that its dealer does not know."""
    parts = [x if (dealer + 2) % 3 == at else torch.zeros_like(x) for at in range(3)]
    return Number(x, parts[1], f, parts[2])


def both(fn: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any) -> Number:
    """A linear map of two numbers."""
    third = None if x.third is None or y.third is None else fn(x.third, y.third)
    return Number(fn(x.first, y.first), fn(x.second, y.second), x.f, third)


def add(x: Any, y: Any) -> Number:
    assert x.f == y.f
    return both(torch.add, x, y)


def sub(x: Any, y: Any) -> Number:
    assert x.f == y.f
    return both(torch.sub, x, y)


def neg(x: Any) -> Any:
    return x.map(torch.neg)


def scale_int(x: Any, factor: Any) -> Any:
    return x.map(lambda t: t * factor)


def add_ring(rt: Any, x: Any, ring: Any) -> Number:
    first = x.first + ring
    # where one is spread, so are its summands
    return Number(first, x.second.expand(first.shape), x.f, None if x.third is None else x.third.expand(first.shape))


def public(rt: Any, value: Any, like: Any = None, *, f: int | None = None) -> Number:
    scale = f if f is not None else 16 if like is None else like.f
    ring = torch.round(torch.as_tensor(value, dtype=torch.float64) * 2.0**scale).long()
    ring = ring if like is None else ring.expand(like.shape)
    return Number(ring, torch.zeros_like(ring), scale, torch.zeros_like(ring))


def add_public(rt: Any, x: Any, value: Any) -> Number:
    return add_ring(rt, x, public(rt, value, f=x.f).first)


def cat(parts: Any, dim: int = 0) -> Number:
    thirds = [one.third for one in parts]
    third = None if any(one is None for one in thirds) else torch.cat(thirds, dim)
    return Number(
        torch.cat([p.first for p in parts], dim), torch.cat([p.second for p in parts], dim), parts[0].f, third
    )
