"""The ways by which ``gemm.gemm`` multiplies matrices modulo 2^64 on a CPU; all of them give the same bits.

A path prepares the right factor once and then takes left ones: matrices ``[m, k]`` and ``[k, n]`` of int64, or batches
of them ``[..., m, k]`` and ``[..., k, n]``; several pairs are multiplied and summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.mpc.kernels.base import RightFactor
from uvcc_engine.mpc.kernels.compiling.loops import LOOPS
from uvcc_engine.mpc.kernels.gemm import floats, ifma_units, limbs, tile_units
from uvcc_engine.mpc.kernels.layout import broadcast_shape
from uvcc_engine.mpc.kernels.plain import PlainKernels
from uvcc_engine.mpc.kernels.threads import over_threads, parts

PATHS: Final = ("tiles", "bytes", "ifma", "wide", "halves", "floats", "torch")
BY_UNITS: Final = ("tiles", "ifma")
"""Compiled loops for units that few processors have."""
LOOP_KINDS: Final = {"halves": 0, "wide": 1}
_PLAIN: Final = PlainKernels()


def prepared(path: str, ys: Sequence[Tensor]) -> RightFactor:
    """The factor by one path, which must be able to do it. What is not int64 goes torch's way. ``ys``: [k, n] each."""
    if any(y.dtype != torch.int64 for y in ys):
        path = "torch"
    if path in LOOP_KINDS or path in BY_UNITS:
        return _looped(_micro(path), ys)
    if path == "floats":
        return _floating(ys)
    if path == "bytes":
        return _by_bytes(ys)
    return _threaded(_PLAIN.right_factor(ys, 0), ys)


# -- torch -------------------------------------------------------------------------------------------------------------


def _threaded(whole: RightFactor, ys: Sequence[Tensor]) -> RightFactor:
    """Rows over threads: torch's integer product keeps to one core."""

    def apply(xs: Sequence[Tensor]) -> Tensor:
        x, y = xs[0], ys[0]
        if x.dim() != 2 or y.dim() != 2:
            return whole(xs)
        work = x.shape[0] * sum(one.shape[0] for one in ys) * y.shape[1]
        if parts(work, x.shape[0]) < 2:
            return whole(xs)
        out = torch.empty(x.shape[0], y.shape[1], dtype=torch.int64)

        def rows(start: int, stop: int) -> None:
            out[start:stop] = whole([x[start:stop] for x in xs])

        over_threads(work, x.shape[0], rows)
        return out

    return apply


# -- double precision --------------------------------------------------------------------------------------------------


def _floating(ys: Sequence[Tensor]) -> RightFactor:
    right = floats.inner_chunks(ys)
    return lambda xs: floats.product(xs, right)


# -- compiled loops ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Micro:
    """Compiled loops for one kind of processor: they pack a right factor, and multiply by it."""

    pack: Callable[..., None]
    multiply: Callable[..., None]
    rows: int  # of a tile of the result
    lanes: int  # its columns
    deep: int  # what the inner size is rounded up to
    words: int  # that a panel of the right factor takes for each inner index


def _micro(path: str) -> _Micro:
    if path == "tiles":
        tiles = tile_units.loops()
        assert tiles is not None
        return _Micro(tiles.tiles_right, tiles.tiles_multiply, tiles.SIDE, tiles.SIDE, tiles.DEEP, tiles.SIDE)
    if path == "ifma":
        ifma = ifma_units.loops()
        assert ifma is not None
        return _Micro(ifma.ifma_right, ifma.ifma_multiply, ifma.ROWS, ifma.LANES, 1, ifma.STEP)
    jit, kind = LOOPS.get(), LOOP_KINDS[path]
    assert jit is not None
    pack, multiply = partial(jit.gemm_right, kind), partial(jit.gemm_multiply, kind)
    return _Micro(pack, multiply, jit.ROWS[kind], jit.LANES[kind], 2, jit.LANES[kind])


class _Packed:
    """A right matrix, or a batch of them, in the micro-kernel's order."""

    __slots__ = ("at", "batch", "data", "inner", "n", "step")

    def __init__(self, micro: _Micro, y: Tensor) -> None:
        """``y``: ``[batch, k, n]``, or ``[k, n]`` for a batch of one."""
        strides = y.stride()
        if y.dim() == 2:
            self.batch, (self.inner, self.n), strides = 1, y.shape, (0, *strides)
        else:
            self.batch, self.inner, self.n = y.shape
        self.step = -(-self.inner // micro.deep) * micro.deep * -(-self.n // micro.lanes) * micro.words
        self.data = torch.empty(self.batch * self.step, dtype=torch.int64)
        self.at = self.data.data_ptr()
        micro.pack(self.at, self.batch, self.step, y.data_ptr(), *strides, self.inner, self.n)


def _looped(micro: _Micro, ys: Sequence[Tensor]) -> RightFactor:
    n = ys[0].shape[-1]
    if ys[0].dim() == 2:
        right = [_Packed(micro, y) for y in ys]

        def apply(xs: Sequence[Tensor]) -> Tensor:
            if xs[0].dim() == 2:
                return _multiply(micro, xs, right)
            flat = [x.reshape(-1, x.shape[-1]) for x in xs]
            return _multiply(micro, flat, right).view(*xs[0].shape[:-1], n)

        return apply

    def batched(xs: Sequence[Tensor]) -> Tensor:
        lead = broadcast_shape(xs[0].shape[:-2], ys[0].shape[:-2])
        left, right = ([t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in side] for side in (xs, ys))
        return _multiply(micro, left, [_Packed(micro, y) for y in right]).view(*lead, xs[0].shape[-2], n)

    return batched


def _multiply(micro: _Micro, xs: Sequence[Tensor], right: Sequence[_Packed]) -> Tensor:
    """``xs`` as ``[batch, m, k]`` or ``[m, k]``. RuntimeError, as torch has it, for shapes that do not fit."""
    *lead, m, _ = xs[0].shape
    batch, n = (lead[0] if lead else 1), right[0].n
    out = torch.empty(*lead, m, n, dtype=torch.int64)
    factors = []  # addresses and strides in elements
    inner = 0
    for x, y in zip(xs, right, strict=True):
        if x.shape != (*lead, m, y.inner) or (y.batch, y.n) != (batch, n) or x.dtype != torch.int64:
            raise RuntimeError(f"{tuple(x.shape)} {x.dtype} times {(y.batch, y.inner, y.n)} torch.int64")
        inner += y.inner
        if y.inner:
            strides = x.stride()
            factors.append((x.data_ptr(), strides if lead else (0, *strides), y))
    if not factors:
        return out.zero_()
    at, out0 = out.data_ptr(), m * n

    def part(first: int, last: int, start: int, stop: int) -> None:
        fresh = 1
        for source, (x0, x1, x2), y in factors:
            shape = (last - first, stop - start, n, y.inner)
            to, source = at + 8 * (first * out0 + start * n), source + 8 * (first * x0 + start * x1)
            micro.multiply(fresh, to, out0, n, *shape, source, x0, x1, x2, y.at + 8 * first * y.step, y.step)
            fresh = 0

    work = batch * m * n * inner
    if batch > 1:
        over_threads(work, batch, lambda first, last: part(first, last, 0, m))
    else:
        over_threads(work, m, lambda start, stop: part(0, batch, start, stop), micro.rows)
    return out


# -- 8-bit units -------------------------------------------------------------------------------------------------------


def _by_bytes(ys: Sequence[Tensor]) -> RightFactor:
    jit, n = LOOPS.get(), ys[0].shape[-1]
    assert jit is not None
    batch = ys[0].shape[:-2]
    ys = [y.reshape(y.shape[-2:]) for y in ys]  # a batch is of one
    inner = sum(y.shape[0] for y in ys)
    right = _right_digits(jit, ys, inner)

    def apply(xs: Sequence[Tensor]) -> Tensor:
        shape = (*broadcast_shape(xs[0].shape[:-2], batch), xs[0].shape[-2], n)
        flat = [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in xs]
        left, at = _lines(flat[0].shape[0], limbs.DIGITS * inner), 0
        for x, y in zip(flat, ys, strict=True):
            if x.shape != (left.shape[0], y.shape[0]) or x.dtype != torch.int64:
                raise RuntimeError(f"{tuple(x.shape)} {x.dtype} times {tuple(y.shape)} torch.int64")
            jit.split_left(_unsigned(x), _unsigned(left), inner, at)
            at += x.shape[1]
        parts = limbs.products(left[:, : limbs.DIGITS * inner], right)
        out = torch.empty(shape, dtype=torch.int64)
        jit.combine(*[_unsigned(part).reshape(-1) for part in parts], _unsigned(out).reshape(-1))
        return out

    return apply


def _right_digits(jit: Any, ys: Sequence[Tensor], inner: int) -> Tensor:
    """Right factors one above the other as digits ``[8 inner, n]``, which lie in memory as the first of them does:
    columns in order stay so, since the units take both and to turn them would take longer."""
    n, height, at = ys[0].shape[1], limbs.DIGITS * inner, 0
    by_column = not ys[0].is_contiguous() and ys[0].t().is_contiguous()
    lines = _lines(n, height) if by_column else _lines(height, n)
    for y in ys:
        if by_column:
            jit.split_columns(_unsigned(y.t()), _unsigned(lines), inner, at)
        else:
            jit.split_right(_unsigned(y), _unsigned(lines), inner, at)
        at += y.shape[0]
    return lines[:, :height].t() if by_column else lines[:, :n]


def _lines(rows: int, columns: int) -> Tensor:
    """Memory for bytes ``[rows, at least columns]``. A row takes an odd number of 64 bytes: rows of a power of two
    would all lie on the same few places of the caches."""
    return torch.empty(rows, 64 * (-(-columns // 64) | 1), dtype=torch.int8)


def _unsigned(x: Tensor) -> Any:
    """The elements as an unsigned array on the same memory, or on a copy in order."""
    return x.contiguous().numpy().view(f"u{x.element_size()}")
