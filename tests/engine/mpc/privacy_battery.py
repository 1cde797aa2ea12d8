"""Statistics over what one party sees. A view that depends on the secrets fails here; each known leak must.

A view is every message part that the party received and every pseudo-random number that it drew, by place in the
program. Each item alone must be uniform, and so must the difference and the XOR of any two items of one shape: a mask
that is used twice hides each message, but not their difference.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.prg import Draws
from uvcc_engine.mpc.foundation.rounds import RoundInbox
from uvcc_engine.mpc.foundation.runtime import Runtime

LEAST = 2048  # items with fewer elements say too little
SUSPICION = 1e-9  # a single test below this is a leak: thousands of tests run per view


@dataclass
class View:
    """One party's whole view: (what it is, values), in program order."""

    items: list[tuple[str, Tensor]] = field(default_factory=list)


class WatchedRuntime(Runtime):
    """A runtime that keeps its party's view."""

    view: View

    def _take(self, inbox: RoundInbox, peer: int) -> Tensor:
        got = super()._take(inbox, peer)
        self.view.items.append((f"round {self.rounds} from {peer}", _numbers(got)))
        return got

    def draws(self) -> Draws:
        draws = super().draws()
        ring, narrow, seen, op = draws.ring, draws.narrow, self.view, self._op

        def watched_ring(component: int, *shape: int, out: Tensor | None = None) -> Tensor:
            drawn = ring(component, *shape, out=out)
            seen.items.append((f"draw {component} of op {op}", drawn.reshape(-1).clone()))
            return drawn

        def watched_narrow(component: int, bits: int, *shape: int) -> Tensor:
            out = narrow(component, bits, *shape)
            seen.items.append((f"draw {component} of op {op}, {bits} bits", out.reshape(-1) & ((1 << bits) - 1)))
            return out

        draws.ring = watched_ring  # type: ignore[method-assign]
        draws.narrow = watched_narrow  # type: ignore[method-assign]
        return draws


def _numbers(got: Tensor) -> Tensor:
    """A part as numbers, in a row: those of 5 to 7 bytes as words, whose bits above the shift are zero."""
    if got.dtype is torch.uint8 and got.dim() > 1 and 4 < got.shape[-1] < 8:
        return torch.nn.functional.pad(got, (0, 8 - got.shape[-1])).contiguous().view(torch.int64).reshape(-1)
    return got.reshape(-1).clone()


def views(program: Callable[[Runtime], object], seed: int = 0) -> list[View]:
    """Run ``program`` at three watched parties."""
    planes = LocalPlanes(seed)
    for rt in planes.runtimes:
        rt.__class__ = WatchedRuntime
        rt.view = View()  # type: ignore[attr-defined]
    planes.run_three(program)
    return [rt.view for rt in planes.runtimes]  # type: ignore[attr-defined]


def leaks(view: View) -> list[str]:
    """What fails, as text; empty for a uniform view."""
    found: list[str] = []
    items = [(what, words_of(data)) for what, data in view.items if data.numel() >= LEAST]
    for what, words in items:
        found += [f"{what}: {why}" for why in single(words)]
    for i, (one, a) in enumerate(items):
        for other, b in items[:i]:
            if a.dtype == b.dtype and a.size == b.size and not np.array_equal(a, b):
                ring = a.dtype.type(2 ** int(np.bitwise_or.reduce(a | b)).bit_length() - 1)
                found += [f"{one} minus {other}: {why}" for why in single((a - b) & ring)]
                found += [f"{one} xor {other}: {why}" for why in single(a ^ b)]
    return found


def repeats(view: View) -> list[str]:
    """Pairs of items that are equal: a message sent twice, or under a mask the receiver knows."""
    items = [(what, words_of(data)) for what, data in view.items if data.numel() >= LEAST]
    return [
        f"{one} equals {other}"
        for i, (one, a) in enumerate(items)
        for other, b in items[:i]
        if a.dtype == b.dtype and np.array_equal(a, b)
    ]


def words_of(data: Tensor) -> np.ndarray:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[data.element_size()]
    return data.contiguous().numpy().view(unsigned)


def single(words: np.ndarray) -> list[str]:
    """Chi-square per byte position, serial correlation, compression: what looks unlike uniform words.

    Upper bytes that are zero throughout belong to numbers modulo a smaller power of two and are left out; the byte that
    is cut by that power is tested over the bits it uses.
    """
    size = words.dtype.itemsize
    grid = words.view(np.uint8).reshape(-1, size)
    used = int(np.bitwise_or.reduce(words)).bit_length()
    if used == 0:
        return ["all zero"]
    full = used // 8
    failures = []
    for position in range(full):
        p = chi_square(grid[:, position], 256)
        if p < SUSPICION:
            failures.append(f"byte {position} is not uniform (p={p:.1e})")
    if used % 8:
        p = chi_square(grid[:, full], 1 << (used % 8))
        if p < SUSPICION:
            failures.append(f"the upper {used % 8} bits are not uniform (p={p:.1e})")
    body = np.ascontiguousarray(grid[:, :full]).reshape(-1)
    if body.size:
        p = serial_correlation(body, max(1, full))
        if p < SUSPICION:
            failures.append(f"serial correlation (p={p:.1e})")
        packed = len(zlib.compress(body.tobytes(), 6))
        if packed < 0.985 * body.size:
            failures.append(f"compresses to {packed / body.size:.3f}")
    return failures


def chi_square(values: np.ndarray, bins: int) -> float:
    """Upper tail probability that uniform values are as uneven as these (Wilson-Hilferty)."""
    counts = np.bincount(values, minlength=bins).astype(np.float64)
    expected = values.size / bins
    statistic = float(((counts - expected) ** 2).sum() / expected)
    k = bins - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def serial_correlation(values: np.ndarray, lag: int) -> float:
    """Two-sided probability of the correlation between bytes ``lag`` apart and next to each other (the smaller one)."""
    least = 1.0
    for step in {1, lag}:
        x = values.astype(np.float64) - values.mean()
        r = float((x[:-step] * x[step:]).sum() / max((x * x).sum(), 1.0))
        least = min(least, math.erfc(abs(r) * math.sqrt(x.size) / math.sqrt(2)))
    return least


def dependence(one: View, other: View) -> list[str]:
    """Items whose bytes are distributed differently in two runs on different secrets (two-sample chi-square)."""
    found = []
    for (what, a), (_, b) in zip(one.items, other.items, strict=True):
        if a.numel() < LEAST:
            continue
        x, y = words_of(a), words_of(b)
        for position in range(x.dtype.itemsize):
            p = two_sample(
                x.view(np.uint8).reshape(x.size, -1)[:, position], y.view(np.uint8).reshape(y.size, -1)[:, position]
            )
            if p < SUSPICION:
                found.append(f"{what}: byte {position} depends on the secret (p={p:.1e})")
    return found


def two_sample(a: np.ndarray, b: np.ndarray) -> float:
    counts = np.stack([np.bincount(v, minlength=256) for v in (a, b)]).astype(np.float64)
    counts = counts[:, counts.sum(0) > 0]
    k = counts.shape[1] - 1
    if k == 0:
        return 1.0
    expected = counts.sum(0) * (counts.sum(1, keepdims=True) / counts.sum())
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))
