"""Products of small matrices of 32-bit floats in the cache, a tile of the result in registers.

Addresses and strides are bytes as integers; callers answer for the bounds.
"""

from __future__ import annotations

from typing import Any, Final

from numba import types

from uvcc_engine.contract.machine.compiler_units import compiler_knows
from uvcc_engine.nsa.loops.attention_cache import compiled_loop
from uvcc_engine.nsa.loops.float_vectors import (
    BYTE,
    FLOAT,
    LANES,
    VECTOR,
    at,
    every,
    fused,
    intrinsic,
    load,
    loop,
    spread,
    word,
)

ROWS: Final = 6
"""Of a tile: with four vectors a row its sums take 24 of 32 registers, with one of two registers each 12 of 16."""
WIDE: Final = compiler_knows(("+avx512f",))
"""Whether a tile may have four vectors a row."""
FINE: Final = 32 if WIDE else 16
"""Lanes that a tile has at least where it is to be worth its while."""


def _sums(b: Any, rows: int, vectors: int, args: Any) -> None:
    """The tile of so many rows and vectors: see ``_tile``."""
    a, a0, a1, y, y0, inner, c, c0, fresh = args
    lefts = [b.inttoptr(b.add(a, b.mul(a0, word(r))), BYTE.as_pointer()) for r in range(rows)]
    outs = [at(b, c, b.mul(c0, word(r)), VECTOR) for r in range(rows)]
    places = [b.gep(to, [word(v)]) for to in outs for v in range(vectors)]
    before = b.block
    old, begin = (b.function.append_basic_block(name) for name in ("old", "begin"))
    b.cbranch(b.icmp_signed("==", fresh, word(0)), old, begin)
    b.position_at_end(old)
    there = [load(b, place) for place in places]
    b.branch(begin)
    b.position_at_end(begin)
    sums = [b.phi(VECTOR) for _ in there]
    for phi, x in zip(sums, there, strict=True):
        phi.add_incoming(x, old)
        phi.add_incoming(every(0.0), before)

    def step(i: Any, state: list[Any]) -> list[Any]:
        right = at(b, y, b.mul(i, y0), VECTOR)
        columns = [load(b, b.gep(right, [word(v)])) for v in range(vectors)]
        found = []
        for r, left in enumerate(lefts):
            x = spread(b, load(b, b.bitcast(b.gep(left, [b.mul(i, a1)]), FLOAT.as_pointer())))
            found += [fused(b, x, columns[v], state[vectors * r + v]) for v in range(vectors)]
        return found

    for x, place in zip(loop(b, inner, sums, step), places, strict=True):
        b.store(x, place, align=4)


def _tile(vectors: int) -> Any:
    @intrinsic
    def tile(
        _: Any, rows: Any, a: Any, a0: Any, a1: Any, y: Any, y0: Any, inner: Any, c: Any, c0: Any, fresh: Any
    ) -> Any:
        """``c[rows, lanes] (+)= a[rows, inner] y[inner, lanes]`` with strides a0, a1, y0, c0; 1 to ``ROWS`` rows."""

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            done = b.function.append_basic_block("stored")
            cases = [b.function.append_basic_block(f"rows{n}") for n in range(1, ROWS + 1)]
            chosen = b.switch(args[0], cases[-1])
            for n, case in enumerate(cases, 1):
                if n < ROWS:
                    chosen.add_case(word(n), case)
                b.position_at_end(case)
                _sums(b, n, vectors, args[1:])
                b.branch(done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 10), generate

    return tile


_tile64, _tile32, _tile16 = (_tile(vectors) for vectors in (4, 2, 1))


@compiled_loop
def multiply(
    rows: int, lanes: int, a: int, a0: int, a1: int, y: int, y0: int, inner: int, c: int, c0: int, fresh: int
) -> None:
    """``c[rows, lanes] (+)= a[rows, inner] y[inner, lanes]`` with strides a0, a1, y0, c0.

    ``lanes`` is a multiple of ``LANES``; ``fresh``: whether ``c`` holds nothing yet.
    """
    lane = 0
    while lane < lanes:
        left, right, to, more = a, y + 4 * lane, c + 4 * lane, rows
        wide = 4 * LANES if WIDE and lanes - lane >= 4 * LANES else min(FINE, lanes - lane)
        while more > 0:
            n = min(ROWS, more)
            if wide == LANES:
                _tile16(n, left, a0, a1, right, y0, inner, to, c0, fresh)
            elif WIDE:
                if wide == 2 * LANES:
                    _tile32(n, left, a0, a1, right, y0, inner, to, c0, fresh)
                else:
                    _tile64(n, left, a0, a1, right, y0, inner, to, c0, fresh)
            left, to, more = left + n * a0, to + n * c0, more - n
        lane += wide
