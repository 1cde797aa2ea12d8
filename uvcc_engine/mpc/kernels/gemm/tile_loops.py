"""Matrix products modulo 2^64 on tile registers for 8-bit integers (AMX), compiled.

Digits and sums are those of ``gemm.limbs``: ``x = sum d_i 2^(8 i)`` with eight balanced digits, and of the products
of two digits only the 36 whose weight is below 2^64. Both matrices are cut into panels of 32 rows or columns and blocks
of ``BLOCK`` along the inner dimension, digit by digit, in the order that the unit reads: a tile of the left matrix is
16 rows of 64 neighbours, one of the right matrix 16 rows of 16 columns of four neighbours each. Four tiles of the
result stay in registers while all digits of one weight are multiplied, and are added to the result with that weight.
Sums of a block have 32 bits: exact below the weight 2^32 as long as ``4 BLOCK 2^14 < 2^31``, and above it only the
lower bits count.

Addresses and strides are those of ``gemm.gemm_loops``, and so is the interface; ``gemm.tile_units`` says where
this can run. Nothing here may be compiled for a processor without these units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.gemm.gemm_loops import BYTE, WORD, get, int_word, put

SIDE = 32  # of a square of the result: two tiles by two
BLOCK = 512  # of the inner dimension: a panel's digits take 128 KiB, so that many of them fit a second-level cache
_ROWS_BLOCK = 256  # rows of the left matrix that are packed at a time: half of a second-level cache
DEEP = 64  # of the inner dimension in one step
_TILE = 1024  # bytes
_PANEL = 2 * _TILE * 8  # bytes of one step's tiles of a panel, over all digits
_BIAS = 0x8080808080808080

intrinsic: Any = extending.intrinsic
_PART, _POINTER = ir.IntType(32), BYTE.as_pointer()


def _call(builder: Any, name: str, kinds: Sequence[Any], given: Sequence[Any]) -> None:
    """One of the processor's instructions that return nothing."""
    module, full = builder.module, f"llvm.x86.{name}"
    function = module.globals.get(full)
    if function is None:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), full)
    builder.call(function, given)


def _tile(number: int) -> Any:
    return ir.Constant(BYTE, number)


def _at(builder: Any, address: Any, offset: int = 0) -> Any:
    return builder.inttoptr(builder.add(address, int_word(offset)), _POINTER)


def _vector(builder: Any, address: Any, kind: Any, size: int) -> Any:
    """Pointer to ``size`` numbers at an address."""
    return builder.inttoptr(address, ir.VectorType(kind, size).as_pointer())


def _every(value: int, size: int) -> Any:
    return ir.Constant(ir.VectorType(WORD, size), [value] * size)


def _spread(builder: Any, value: Any, kind: Any, size: int) -> Any:
    """``size`` times the same number of 64 bits, as numbers of a kind."""
    vector = ir.VectorType(kind, size)
    value = builder.trunc(value, kind) if kind.width < 64 else value
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_PART, 0))
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(_PART, size), [0] * size)
    )


@intrinsic
def _configure(_: Any, address: Any) -> Any:
    """Takes the shapes of the tiles from 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", [_POINTER], [_at(builder, args[0])])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def _release(_: Any) -> Any:
    """Gives the tiles back: a thread that holds them takes longer to be switched."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _clear(_: Any) -> Any:
    """Sets the four tiles of the result to 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for number in range(4):
            _call(builder, "tilezero", [BYTE], [_tile(number)])
        return context.get_dummy_value()

    return types.void(), generate


def _step(high: int) -> Any:
    @intrinsic
    def step(_: Any, left: Any, right: Any) -> Any:
        """Adds the product of ``high`` tiles at ``left`` and two at ``right`` to the tiles of the result."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lefts, rights = range(4, 4 + high), range(6, 8)
            for tiles, address in ((rights, args[1]), (lefts, args[0])):
                for i, number in enumerate(tiles):
                    place = [_tile(number), _at(builder, address, _TILE * i), int_word(DEEP)]
                    _call(builder, "tileloadd64", [BYTE, _POINTER, WORD], place)
            for i, one in enumerate(lefts):
                for j, other in enumerate(rights):
                    _call(builder, "tdpbssd", [BYTE] * 3, [_tile(2 * i + j), _tile(one), _tile(other)])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return step


_step_high, _step_low = _step(2), _step(1)


@intrinsic
def _store(_: Any, address: Any) -> Any:
    """The four tiles of the result, one behind the other."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for number in range(4):
            place = [_tile(number), _at(builder, args[0], _TILE * number), int_word(DEEP)]
            _call(builder, "tilestored64", [BYTE, _POINTER, WORD], place)
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def _balance8(_: Any, to: Any, source: Any) -> Any:
    """Eight neighbours as words of balanced digits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x = builder.load(_vector(builder, args[1], WORD, 8), align=8)
        x = builder.xor(builder.add(x, _every(_BIAS, 8)), _every(_BIAS, 8))
        builder.store(x, _vector(builder, args[0], WORD, 8), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _line(_: Any, to: Any, source: Any, shift: Any) -> Any:
    """The digit at ``shift`` of 64 neighbours."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(0, 64, 16):
            x = builder.load(_vector(builder, builder.add(args[1], int_word(8 * i)), WORD, 16), align=8)
            x = builder.lshr(x, _spread(builder, args[2], WORD, 16))
            place = _vector(builder, builder.add(args[0], int_word(i)), BYTE, 16)
            builder.store(builder.trunc(x, ir.VectorType(BYTE, 16)), place, align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def _quads(_: Any, to: Any, source: Any, shift: Any) -> Any:
    """The digit at ``shift`` of 16 columns, of four rows ``SIDE`` apart: a column's four side by side."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        parts = ir.VectorType(_PART, 16)
        total = ir.Constant(parts, None)
        for i in range(4):
            x = builder.load(_vector(builder, builder.add(args[1], int_word(8 * SIDE * i)), WORD, 16), align=8)
            x = builder.trunc(builder.lshr(x, _spread(builder, args[2], WORD, 16)), parts)
            x = builder.and_(x, ir.Constant(parts, [0xFF] * 16))
            total = builder.or_(total, builder.shl(x, ir.Constant(parts, [8 * i] * 16)))
        builder.store(total, _vector(builder, args[0], _PART, 16), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def _weigh16(_: Any, to: Any, source: Any, shift: Any) -> Any:
    """Adds 16 sums of 32 bits, with the weight ``2^shift``, to numbers of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = ir.VectorType(WORD, 16)
        x = builder.sext(builder.load(_vector(builder, args[1], _PART, 16), align=4), words)
        x = builder.shl(x, _spread(builder, args[2], WORD, 16))
        place = _vector(builder, args[0], WORD, 16)
        builder.store(builder.add(builder.load(place, align=8), x), place, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def _add8(_: Any, to: Any, source: Any, fresh: Any) -> Any:
    """Adds eight neighbours to others, which count as nothing where they are ``fresh``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _vector(builder, args[0], WORD, 8)
        x = builder.load(_vector(builder, args[1], WORD, 8), align=8)
        keep = builder.icmp_signed("==", args[2], int_word(0))
        there = builder.select(keep, builder.load(place, align=8), ir.Constant(ir.VectorType(WORD, 8), None))
        builder.store(builder.add(there, x), place, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@compiled_loop
def _balanced(to: int, rows: int, columns: int, x: int, x1: int, x2: int, high: int, wide: int) -> None:
    """``[rows, columns]`` words of balanced digits; those beyond ``[high, wide]`` are 0."""
    zero, bias = np.uint64(0), np.uint64(_BIAS)
    if high < rows or wide < columns:
        for i in range(rows * columns):
            put(to, i, zero)
    if x2 == 1:
        eights = wide & ~7
        for r in range(high):
            for c in range(0, eights, 8):
                _balance8(to + 8 * (r * columns + c), x + 8 * (r * x1 + c))
            for c in range(eights, wide):
                put(to, r * columns + c, (get(x, r * x1 + c) + bias) ^ bias)
    else:
        for c in range(wide):
            for r in range(high):
                put(to, r * columns + c, (get(x, r * x1 + c * x2) + bias) ^ bias)


@compiled_loop
def tiles_right(out: int, batch: int, step: int, y: int, y0: int, y1: int, y2: int, k: int, n: int) -> None:
    """Packs ``y [batch, k, n]`` with strides ``y0, y1, y2`` into ``out``, ``step`` elements for each of the batch."""
    panels = (n + SIDE - 1) // SIDE
    buffer = np.empty(DEEP * SIDE, dtype=np.uint64)
    words = buffer.ctypes.data
    for one in range(batch):
        for p in range(0, k, BLOCK):
            deep = (min(BLOCK, k - p) + DEEP - 1) // DEEP
            for q in range(panels):
                panel = out + 8 * one * step + 8 * SIDE * panels * p + _PANEL * deep * q
                for b in range(deep):
                    first = p + DEEP * b
                    source = y + 8 * (one * y0 + first * y1 + q * SIDE * y2)
                    _balanced(words, DEEP, SIDE, source, y1, y2, min(DEEP, k - first), min(SIDE, n - q * SIDE))
                    for d in range(8):
                        to = panel + 2 * _TILE * (d * deep + b)
                        for r in range(16):
                            _quads(to + 64 * r, words + 32 * SIDE * r, 8 * d)
                            _quads(to + _TILE + 64 * r, words + 32 * SIDE * r + 128, 8 * d)
    buffer[0] = np.uint64(0)  # a last use: the compiler frees an array that only its address is asked of


@compiled_loop
def _tiles_left(out: int, words: int, deep: int, x: int, x1: int, x2: int, high: int, k: int) -> None:
    """One panel: up to 32 rows by ``k`` neighbours."""
    for b in range(deep):
        first = DEEP * b
        _balanced(words, SIDE, DEEP, x + 8 * first * x2, x1, x2, high, min(DEEP, k - first))
        for d in range(8):
            to = out + 2 * _TILE * (d * deep + b)
            for r in range(SIDE):
                _line(to + 64 * r, words + 8 * DEEP * r, 8 * d)


@compiled_loop
def _square(total: int, sums: int, left: int, right: int, deep: int, high: int) -> None:
    """``total [32, 32]``: the product of a panel's block with another one's; of the lower 16 rows nothing if not
    ``high``."""
    rows = SIDE if high != 0 else SIDE // 2
    for i in range(rows * SIDE):
        put(total, i, np.uint64(0))
    for s in range(8):
        _clear()
        for d in range(s + 1):
            x, y = left + 2 * _TILE * d * deep, right + 2 * _TILE * (s - d) * deep
            if high != 0:
                for b in range(deep):
                    _step_high(x + 2 * _TILE * b, y + 2 * _TILE * b)
            else:
                for b in range(deep):
                    _step_low(x + 2 * _TILE * b, y + 2 * _TILE * b)
        _store(sums)
        for r in range(rows):
            source = sums + 2 * _TILE * (r // 16) + 64 * (r % 16)
            _weigh16(total + 8 * SIDE * r, source, 8 * s)
            _weigh16(total + 8 * SIDE * r + 128, source + _TILE, 8 * s)


@compiled_loop
def _add(out: int, out1: int, total: int, high: int, wide: int, fresh: int) -> None:
    eights = wide & ~7
    for r in range(high):
        for c in range(0, eights, 8):
            _add8(out + 8 * (r * out1 + c), total + 8 * (r * SIDE + c), fresh)
        for c in range(eights, wide):
            value = get(total, r * SIDE + c)
            if fresh == 0:
                value += get(out, r * out1 + c)
            put(out, r * out1 + c, value)


@compiled_loop
def tiles_multiply(
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
    """``out [batch, m, n] (+)= x [batch, m, k] right [batch, k, n]``; ``right`` as ``tiles_right`` has packed it.

    ``fresh``: whether ``out`` holds nothing yet. Its rows are contiguous; ``k`` is at least 1.
    """
    panels = (n + SIDE - 1) // SIDE
    shapes = np.zeros(64, dtype=np.uint8)
    shapes[0] = 1
    for t in range(8):
        shapes[16 + 2 * t] = 64  # bytes of a row
        shapes[48 + t] = 16  # rows
    most = min(_ROWS_BLOCK, (m + SIDE - 1) // SIDE * SIDE) * (min(BLOCK, k + DEEP - 1) // DEEP) * DEEP
    packed = np.empty(most + DEEP * SIDE + SIDE * SIDE + SIDE * SIDE // 2 + 8, dtype=np.uint64)
    left = (packed.ctypes.data + 63) & ~63  # a row of a tile lies in one line of the cache
    words = left + 8 * most
    total = words + 8 * DEEP * SIDE
    sums = total + 8 * SIDE * SIDE
    _configure(shapes.ctypes.data)
    for one in range(batch):
        for p in range(0, k, BLOCK):
            depth = min(BLOCK, k - p)
            deep = (depth + DEEP - 1) // DEEP
            first = 1 if fresh != 0 and p == 0 else 0
            block = right + 8 * (one * step + p * panels * SIDE)
            for i in range(0, m, _ROWS_BLOCK):
                height = min(_ROWS_BLOCK, m - i)
                for r in range(0, height, SIDE):
                    source = x + 8 * (one * x0 + (i + r) * x1 + p * x2)
                    panel = left + _PANEL * deep * (r // SIDE)
                    _tiles_left(panel, words, deep, source, x1, x2, min(SIDE, height - r), depth)
                for j in range(panels):
                    for r in range(0, height, SIDE):
                        high = min(SIDE, height - r)
                        panel = left + _PANEL * deep * (r // SIDE)
                        _square(total, sums, panel, block + _PANEL * deep * j, deep, 1 if high > 16 else 0)
                        to = out + 8 * (one * out0 + (i + r) * out1 + j * SIDE)
                        _add(to, out1, total, high, min(SIDE, n - j * SIDE), first)
    _release()
    shapes[0] = packed[0] & np.uint64(0)  # a last use, as above
