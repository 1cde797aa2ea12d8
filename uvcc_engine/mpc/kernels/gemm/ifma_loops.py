"""Matrix products modulo 2^64 on units that multiply 52 bits and add (AVX-512 IFMA, and VNNI beside it), compiled.

With ``x = x0 + 2^52 x1``, ``x0`` below ``2^52`` and ``x1`` below ``2^12``, and ``y`` likewise,

``x y = low(x0 y0) + 2^52 (high(x0 y0) + (x0 y1 + x1 y0) mod 2^12)  (mod 2^64)``

where ``low`` and ``high`` are the 52 lower and the other bits of a product: one instruction each, which adds as well,
and which takes only the 52 lower bits of a word, so that words go in as they are. Of the two products in brackets 12
bits count, so 12 bits of each factor do: both are 16-bit products of neighbours, which one instruction multiplies and
adds for 16 columns. Two and a half instructions are eight products that way, of ``vpmullq`` and an addition it is four.
Each of the three sums may wrap: what falls off has a weight of 2^64 or more.

The blocking is that of ``gemm.gemm_loops``, and so is the interface; ``gemm.ifma_units`` says where this can run.
Nothing here may be compiled for a processor without these units.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types

from uvcc_engine.mpc.kernels.compiling.loop_cache import compiled_loop
from uvcc_engine.mpc.kernels.gemm.gemm_loops import WORD, get, int_word, put

ROWS = 5  # of a tile of the result: five accumulators each, and what they are made of, fill 32 registers
LANES = 16  # columns of a tile: a register of 32-bit sums
STEP = 24  # words of a panel of the right matrix for each inner index: its words, and what is left of them in pairs
_LEFT = 8  # the same of the left matrix: one line of the cache
BLOCK = 512  # of the inner dimension: a panel of the right matrix is read from the second-level cache, row by row
_ROWS_BLOCK = 50  # rows of the left matrix that are packed at a time: a third of a megabyte
_TWELVE = 0xFFF

intrinsic: Any = extending.intrinsic
_PART = ir.IntType(32)
_WORDS, _PARTS = ir.VectorType(WORD, 8), ir.VectorType(_PART, 16)
_MULTIPLY = "llvm.x86.avx512.vpmadd52{}.uq.512"
_PAIRS = "llvm.x86.avx512.vpdpwssd.512"


def _call(builder: Any, name: str, kind: Any, given: list[Any]) -> Any:
    """One of the processor's instructions that take and return vectors of one kind."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, given)


def _every(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * 8)


def _load(builder: Any, base: Any, index: int, kind: Any, align: int) -> Any:
    place = builder.gep(base, [int_word(index)])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=align)


def _spread(builder: Any, value: Any, kind: Any) -> Any:
    """The same number in every place of a vector."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_PART, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_PART, kind.count), [0] * kind.count))


def _step(builder: Any, sums: list[list[Any]], left: Any, right: Any) -> list[list[Any]]:
    """``sums`` plus the products of ``ROWS`` elements at ``left`` and ``LANES`` elements at ``right``, as packed."""
    b = builder
    words = [_load(b, right, at, _WORDS, 8) for at in (0, 8)]
    pairs = _load(b, right, LANES, _PARTS, 8)
    halves = b.bitcast(b.gep(left, [int_word(ROWS)]), _PART.as_pointer())
    found = []
    for i, row in enumerate(sums):
        x = _spread(b, b.load(b.gep(left, [int_word(i)])), _WORDS)
        pair = _spread(b, b.load(b.gep(halves, [int_word(i)])), _PARTS)
        parts = [
            _call(b, _MULTIPLY.format("lh"[k // 2]), _WORDS, [row[k], x, words[k % 2]])
            for k in range(4)
        ]  # fmt: skip
        found.append([*parts, _call(b, _PAIRS, _PARTS, [row[4], pair, pairs])])
    return found


def _total(builder: Any, row: list[Any], half: int) -> Any:
    """The finished sums of eight columns of a row."""
    b, none = builder, ir.Constant(_PARTS, ir.Undefined)
    places = ir.Constant(ir.VectorType(_PART, 8), list(range(8 * half, 8 * half + 8)))
    cross = b.zext(b.shuffle_vector(row[4], none, places), _WORDS)
    return b.add(row[half], b.shl(b.add(row[2 + half], cross), _every(52)))


@intrinsic
def _micro(_: Any, inner: Any, left: Any, right: Any, out: Any, stride: Any, fresh: Any) -> Any:
    """``out[ROWS, LANES] (+)= left[inner, ROWS]^T right[inner, LANES]``; ``inner`` is at least 1."""

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
        old = [[builder.phi(kind) for kind in (*[_WORDS] * 4, _PARTS)] for _ in range(ROWS)]
        sums = _step(builder, old, x, y)
        steps = [
            (k, int_word(0), builder.add(k, int_word(1))),
            (x, starts[0], builder.gep(x, [int_word(_LEFT)])),
            (y, starts[1], builder.gep(y, [int_word(STEP)])),
        ]
        for was, now in zip(old, sums, strict=True):
            steps += [(p, ir.Constant(p.type, None), q) for p, q in zip(was, now, strict=True)]
        for phi, first, following in steps:
            phi.add_incoming(first, before)
            phi.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", steps[0][2], inner), loop, done)
        builder.position_at_end(done)
        keep = builder.icmp_signed("==", fresh, int_word(0))
        for i, row in enumerate(sums):
            for half in range(2):
                place = builder.gep(to, [builder.add(builder.mul(stride, int_word(i)), int_word(8 * half))])
                place = builder.bitcast(place, _WORDS.as_pointer())
                there = builder.select(keep, builder.load(place, align=8), ir.Constant(_WORDS, None))
                builder.store(builder.add(there, _total(builder, row, half)), place, align=8)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 6), generate


@intrinsic
def _pack16(_: Any, to: Any, source: Any) -> Any:
    """``LANES`` neighbours, and behind them their pairs: the upper 12 bits, and above those the lower 12."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, pointer = builder, WORD.as_pointer()
        target, words = (b.inttoptr(at, pointer) for at in args)
        found = []
        for at in (0, 8):
            x = _load(b, words, at, _WORDS, 8)
            place = b.bitcast(b.gep(target, [int_word(at)]), _WORDS.as_pointer())
            b.store(x, place, align=8)
            lower = b.shl(b.and_(x, _every(_TWELVE)), _every(16))
            found.append(b.trunc(b.or_(b.lshr(x, _every(52)), lower), ir.VectorType(_PART, 8)))
        both = b.shuffle_vector(*found, ir.Constant(ir.VectorType(_PART, 16), list(range(16))))
        place = b.bitcast(b.gep(target, [int_word(LANES)]), _PARTS.as_pointer())
        b.store(both, place, align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _put_half(_: Any, base: Any, index: Any, value: Any) -> Any:
    """Stores the lower half of a word at the place ``index`` of halves from ``base`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(builder.inttoptr(args[0], _PART.as_pointer()), [args[1]])
        builder.store(builder.trunc(args[2], _PART), place)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.uint64), generate


@compiled_loop
def ifma_right(out: int, batch: int, step: int, y: int, y0: int, y1: int, y2: int, k: int, n: int) -> None:
    """Packs ``y [batch, k, n]`` with strides ``y0, y1, y2`` into ``out``, ``step`` elements for each of the batch.

    A block of ``BLOCK`` rows is a row of panels; a panel is ``[rows, STEP]``. Columns beyond ``n`` are zeros.
    """
    panels = (n + LANES - 1) // LANES
    buffer = np.zeros(LANES, dtype=np.uint64)
    line = buffer.ctypes.data
    for one in range(batch):
        base, to = y + 8 * one * y0, out + 8 * one * step
        for p in range(0, k, BLOCK):
            depth = min(BLOCK, k - p)
            block = to + 8 * p * panels * STEP
            for q in range(panels):
                panel, width = block + 8 * q * depth * STEP, min(LANES, n - q * LANES)
                if y2 == 1 and width == LANES:
                    for r in range(depth):
                        _pack16(panel + 8 * r * STEP, base + 8 * ((p + r) * y1 + q * LANES))
                else:
                    for c in range(width, LANES):
                        put(line, c, np.uint64(0))
                    for r in range(depth):
                        source = (p + r) * y1 + q * LANES * y2
                        for c in range(width):
                            put(line, c, get(base, source + c * y2))
                        _pack16(panel + 8 * r * STEP, line)
    buffer[0] = np.uint64(0)  # a last use: the compiler frees an array that only its address is asked of


@compiled_loop
def _pack_left(out: int, x: int, x1: int, x2: int, m: int, depth: int) -> None:
    """``[m, depth]`` into panels ``[depth, ROWS]`` of words and pairs, filled up with zeros."""
    twelve, over, up = np.uint64(_TWELVE), np.uint64(52), np.uint64(16)
    for i in range(0, m, ROWS):
        panel, there = out + 8 * (i // ROWS) * depth * _LEFT, min(ROWS, m - i)
        for c in range(ROWS):
            source = (i + c) * x1
            for r in range(depth):
                value = get(x, source + r * x2) if c < there else np.uint64(0)
                put(panel, r * _LEFT + c, value)
                _put_half(panel, 2 * (r * _LEFT + ROWS) + c, (value & twelve) | ((value >> over) << up))


@compiled_loop
def ifma_multiply(
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
    """``out [batch, m, n] (+)= x [batch, m, k] right [batch, k, n]``; ``right`` as ``ifma_right`` has packed it.

    ``fresh``: whether ``out`` holds nothing yet. Its rows are contiguous; ``k`` is at least 1.
    """
    panels = (n + LANES - 1) // LANES
    most = (min(_ROWS_BLOCK, m) + ROWS - 1) // ROWS
    packed = np.empty(most * min(BLOCK, k) * _LEFT + 8, dtype=np.uint64)
    rest = np.empty(ROWS * LANES, dtype=np.uint64)
    left, spare = (packed.ctypes.data + 63) & ~63, rest.ctypes.data
    for one in range(batch):
        for p in range(0, k, BLOCK):
            depth = min(BLOCK, k - p)
            first = 1 if fresh != 0 and p == 0 else 0
            block = right + 8 * (one * step + p * panels * STEP)
            for i in range(0, m, _ROWS_BLOCK):
                height = min(_ROWS_BLOCK, m - i)
                _pack_left(left, x + 8 * (one * x0 + i * x1 + p * x2), x1, x2, height, depth)
                for j in range(panels):
                    panel, width = block + 8 * j * depth * STEP, min(LANES, n - j * LANES)
                    for r in range(0, height, ROWS):
                        to, high = out + 8 * (one * out0 + (i + r) * out1 + j * LANES), min(ROWS, height - r)
                        whole = high == ROWS and width == LANES
                        target, stride = (to, out1) if whole else (spare, LANES)
                        start = first if whole else 1
                        _micro(depth, left + 8 * (r // ROWS) * depth * _LEFT, panel, target, stride, start)
                        if not whole:
                            for a in range(high):
                                for b in range(width):
                                    value = rest[a * LANES + b]
                                    if first == 0:
                                        value += get(to, a * out1 + b)
                                    put(to, a * out1 + b, value)
    packed[0] = np.uint64(0)  # last uses, as above
    rest[0] = np.uint64(0)
