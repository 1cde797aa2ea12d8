"""Matrix products modulo 2^64, compiled: packed panels and one micro-kernel per kind of processor.

The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", ACM TOMS 34(3),
2008: the right matrix is packed once into panels of ``LANES`` columns, the left one block by block into panels of
``ROWS`` rows, and a micro-kernel keeps a tile of the result in registers. Packing makes transposed and strided operands
as fast as others. The micro-kernel is written down as LLVM code, so that its vectors and registers do not depend on
what an automatic vectoriser makes of loops; LLVM lowers it for whatever processor it runs on.

``HALVES`` is for vector units that multiply 32-bit numbers only (AVX2, NEON). With ``a = a1 2^32 + a0``,
``a b = a0 b0 + (a0 b1 + a1 b0) 2^32 (mod 2^64)``: the first product needs all its 64 bits (``vpmuludq``), of the other
two 32 bits are enough (``vpmulld``, both at once with the halves of ``b`` swapped). They are summed up apart, modulo
2^64 and modulo 2^32, and put together at the end: two multiplications and two additions for four products.
``WIDE`` is for units with a 64-bit product (AVX-512's ``vpmullq``).

Everything takes addresses and strides (in elements) as integers: one compiled form serves every layout, and a call
costs a microsecond. Callers answer for the bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop

HALVES, WIDE = 0, 1
ROWS = (6, 12)  # of a tile of the result: as many accumulators as there are registers for
LANES = (4, 8)  # columns of a tile
BLOCK = 256  # of the inner dimension: a panel of each matrix fits the first-level cache
_ROWS_BLOCK = 96  # rows of the left matrix packed at a time, a multiple of every ROWS: half of a second-level cache
_AHEAD = 4  # panels of the right matrix that are packed side by side

intrinsic: Any = extending.intrinsic
WORD, _HALF, BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)


def int_word(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(WORD, value)


class _Tile:
    """The micro-kernel as it is written down: accumulators of a tile, and one step of the inner dimension."""

    def __init__(self, builder: Any, kind: int) -> None:
        self.b, self.rows, self.lanes, self.halves = builder, ROWS[kind], LANES[kind], kind == HALVES
        self.words = ir.VectorType(WORD, self.lanes)
        self.parts = ir.VectorType(_HALF, 2 * self.lanes)
        kinds = [self.words, self.parts] if self.halves else [self.words]
        self.sums = [[builder.phi(t) for t in kinds] for _ in range(self.rows)]

    def every(self, value: int) -> Any:
        return ir.Constant(self.words, [value] * self.lanes)

    def step(self, sums: Any, left: Any, right: Any) -> Any:
        """``sums`` plus the products of ``rows`` elements at ``left`` and ``lanes`` elements at ``right``."""
        b, low = self.b, self.every(0xFFFFFFFF)
        y = b.load(b.bitcast(right, self.words.as_pointer()), align=8)
        if self.halves:
            swap = ir.Constant(ir.VectorType(_HALF, 2 * self.lanes), [i ^ 1 for i in range(2 * self.lanes)])
            swapped = b.shuffle_vector(b.bitcast(y, self.parts), ir.Constant(self.parts, ir.Undefined), swap)
        out = []
        for i, row in enumerate(sums):
            nothing = ir.Constant(self.words, ir.Undefined)
            x = b.insert_element(nothing, b.load(b.gep(left, [int_word(i)])), ir.Constant(_HALF, 0))
            x = b.shuffle_vector(x, nothing, ir.Constant(ir.VectorType(_HALF, self.lanes), [0] * self.lanes))
            if self.halves:
                lower = b.mul(b.and_(x, low), b.and_(y, low))
                cross = b.mul(b.bitcast(x, self.parts), swapped)
                out.append([b.add(row[0], lower), b.add(row[1], cross)])
            else:
                out.append([b.add(row[0], b.mul(x, y))])
        return out

    def total(self, row: Any) -> Any:
        """The finished sum of a row of the tile."""
        if not self.halves:
            return row[0]
        b = self.b
        cross = b.bitcast(row[1], self.words)
        upper = b.add(b.shl(cross, self.every(32)), b.and_(cross, self.every(0xFFFFFFFF00000000)))
        return b.add(row[0], upper)


def _micro(kind: int) -> Any:
    @intrinsic
    def micro(_: Any, inner: Any, left: Any, right: Any, out: Any, stride: Any, fresh: Any) -> Any:
        """``out[rows, lanes] (+)= left[inner, rows]^T right[inner, lanes]``; ``inner`` is even and at least 2."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            inner, left, right, out, stride, fresh = args
            pointer = WORD.as_pointer()
            starts = [builder.inttoptr(at, pointer) for at in (left, right)]
            to = builder.inttoptr(out, pointer)
            before = builder.block
            loop, done = (builder.function.append_basic_block(name) for name in ("inner", "store"))
            builder.branch(loop)
            builder.position_at_end(loop)
            k, (x, y) = builder.phi(WORD), (builder.phi(pointer) for _ in range(2))
            tile = _Tile(builder, kind)
            sums: Any = tile.sums
            for u in range(2):
                at = [builder.gep(p, [int_word(u * size)]) for p, size in ((x, tile.rows), (y, tile.lanes))]
                sums = tile.step(sums, *at)
            steps = [
                (k, int_word(0), builder.add(k, int_word(2))),
                (x, starts[0], builder.gep(x, [int_word(2 * tile.rows)])),
                (y, starts[1], builder.gep(y, [int_word(2 * tile.lanes)])),
            ]
            for old, new in zip(tile.sums, sums, strict=True):
                steps += [(p, ir.Constant(p.type, None), q) for p, q in zip(old, new, strict=True)]
            for phi, first, following in steps:
                phi.add_incoming(first, before)
                phi.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", steps[0][2], inner), loop, done)
            builder.position_at_end(done)
            for i, row in enumerate(sums):
                place = builder.gep(to, [builder.mul(stride, int_word(i))])
                place = builder.bitcast(place, tile.words.as_pointer())
                there = builder.load(place, align=8)
                keep = builder.icmp_signed("==", fresh, int_word(0))
                there = builder.select(keep, there, ir.Constant(tile.words, None))
                builder.store(builder.add(there, tile.total(row)), place, align=8)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 6), generate

    return micro


_halves, _wide = _micro(HALVES), _micro(WIDE)


@intrinsic
def get(_: Any, base: Any, index: Any) -> Any:
    """The element ``index`` at the address ``base``; an index that is never negative lets the compiler use vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(args[0], WORD.as_pointer()), [args[1]]))

    return types.uint64(types.intp, types.intp), generate


@intrinsic
def put(_: Any, base: Any, index: Any, value: Any) -> Any:
    """Stores the element ``index`` at the address ``base``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(builder.inttoptr(args[0], WORD.as_pointer()), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.uint64), generate


@intrinsic
def _copy4(_: Any, to: Any, at: Any, base: Any, index: Any) -> Any:
    """Four neighbours at once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(WORD, 4).as_pointer()
        target, source = (
            builder.bitcast(builder.gep(builder.inttoptr(base, WORD.as_pointer()), [index]), kind)
            for base, index in (args[:2], args[2:])
        )
        builder.store(builder.load(source, align=8), target, align=8)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4), generate


@compiled_loop
def gemm_right(kind: int, out: int, batch: int, step: int, y: int, y0: int, y1: int, y2: int, k: int, n: int) -> None:
    """Packs ``y [batch, k, n]`` with strides ``y0, y1, y2`` into ``out``, ``step`` elements for each of the batch.

    A block of ``BLOCK`` rows is a row of panels; a panel is ``[rows, LANES]``. An odd last row and columns beyond ``n``
    are filled with zeros.
    """
    lanes = 4 if kind == 0 else 8
    panels = (n + lanes - 1) // lanes
    zero = np.uint64(0)
    for one in range(batch):
        base, to = y + 8 * one * y0, out + 8 * one * step
        for p in range(0, k, BLOCK):
            depth = min(BLOCK, k - p)
            even = (depth + 1) & ~1
            size = even * lanes
            block = to + 8 * p * panels * lanes
            full = n // lanes
            if y2 == 1:
                for j in range(0, full, _AHEAD):
                    for r in range(depth):
                        source = (p + r) * y1
                        for q in range(j, min(j + _AHEAD, full)):
                            for c in range(0, lanes, 4):
                                _copy4(block, q * size + r * lanes + c, base, source + q * lanes + c)
            else:
                for q in range(full):
                    for r in range(depth):
                        source = (p + r) * y1 + q * lanes * y2
                        for c in range(lanes):
                            put(block, q * size + r * lanes + c, get(base, source + c * y2))
            if full < panels:
                for r in range(depth):
                    for c in range(lanes):
                        col = full * lanes + c
                        value = get(base, (p + r) * y1 + col * y2) if col < n else zero
                        put(block, full * size + r * lanes + c, value)
            if even > depth:
                for q in range(panels):
                    for c in range(lanes):
                        put(block, q * size + depth * lanes + c, zero)


@compiled_loop
def _pack_left(rows: int, out: int, x: int, x1: int, x2: int, m: int, depth: int) -> None:
    """``[m, depth]`` into panels ``[even depth, rows]``, filled up with zeros."""
    even = (depth + 1) & ~1
    zero = np.uint64(0)
    for i in range(0, m, rows):
        panel, there = out + 8 * i * even, min(rows, m - i)
        if x1 == 1 and there == rows and rows % 4 == 2:
            for r in range(depth):
                source = i + r * x2
                for c in range(0, rows - 2, 4):
                    _copy4(panel, r * rows + c, x, source + c)
                put(panel, r * rows + rows - 2, get(x, source + rows - 2))
                put(panel, r * rows + rows - 1, get(x, source + rows - 1))
        elif x1 == 1 and there == rows and rows % 4 == 0:
            for r in range(depth):
                for c in range(0, rows, 4):
                    _copy4(panel, r * rows + c, x, i + r * x2 + c)
        else:
            for c in range(there):
                source = (i + c) * x1
                for r in range(depth):
                    put(panel, r * rows + c, get(x, source + r * x2))
            for c in range(there, rows):
                for r in range(depth):
                    put(panel, r * rows + c, zero)
        if even > depth:
            for c in range(rows):
                put(panel, depth * rows + c, zero)


@compiled_loop
def gemm_multiply(
    kind: int,
    fresh: int,
    out: int,
    out0: int,
    out1: int,
    batch: int,
    m: int,
    n: int,
    k: int,
    x: int,
    x0: int,
    x1: int,
    x2: int,
    right: int,
    step: int,
) -> None:
    """``out [batch, m, n] (+)= x [batch, m, k] right [batch, k, n]``; ``right`` as ``gemm_right`` has packed it.

    ``fresh``: whether ``out`` holds nothing yet. Its rows are contiguous; ``k`` is at least 1.
    """
    rows, lanes = (6, 4) if kind == 0 else (12, 8)
    panels = (n + lanes - 1) // lanes
    most = min(_ROWS_BLOCK, (m + rows - 1) // rows * rows)
    packed = np.empty(most * min(BLOCK, (k + 1) & ~1), dtype=np.uint64)
    rest = np.empty(rows * lanes, dtype=np.uint64)
    left, spare = packed.ctypes.data, rest.ctypes.data
    for one in range(batch):
        for p in range(0, k, BLOCK):
            depth = min(BLOCK, k - p)
            even = (depth + 1) & ~1
            first = 1 if fresh != 0 and p == 0 else 0
            block = right + 8 * (one * step + p * panels * lanes)
            for i in range(0, m, _ROWS_BLOCK):
                height = min(_ROWS_BLOCK, m - i)
                _pack_left(rows, left, x + 8 * (one * x0 + i * x1 + p * x2), x1, x2, height, depth)
                for j in range(panels):
                    panel, width = block + 8 * j * even * lanes, min(lanes, n - j * lanes)
                    for r in range(0, height, rows):
                        to, high = out + 8 * (one * out0 + (i + r) * out1 + j * lanes), min(rows, height - r)
                        whole = high == rows and width == lanes
                        target, stride = (to, out1) if whole else (spare, lanes)
                        start = first if whole else 1
                        if kind == 0:
                            _halves(even, left + 8 * r * even, panel, target, stride, start)
                        else:
                            _wide(even, left + 8 * r * even, panel, target, stride, start)
                        if not whole:
                            for a in range(high):
                                for b in range(width):
                                    value = rest[a * lanes + b]
                                    if first == 0:
                                        value += get(to, a * out1 + b)
                                    put(to, a * out1 + b, value)
    packed[0] = np.uint64(0)  # a last use: the compiler frees an array that only its address is asked of
