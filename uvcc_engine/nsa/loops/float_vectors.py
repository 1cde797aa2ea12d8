"""Vectors of 32-bit floats, written down as LLVM code: loops over them, sums, powers of 2.

So neither vectors nor registers depend on what an automatic vectoriser makes of loops; LLVM lowers them for whatever
processor it runs on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import extending

intrinsic: Any = extending.intrinsic
WORD, PART, BYTE, FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.FloatType()
LANES: Final = 16
"""Floats of a vector: a register of AVX-512, two or four of other processors."""
_SHIFTER: Final = 12582912.0  # 3/2 2^23
VECTOR: Any = ir.VectorType(FLOAT, LANES)
_WHOLE: Any = ir.VectorType(PART, LANES)
POWERS: Final = (
    1.0,
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398875016719103,
    0.00015353361959569156,
)
"""Of 2^x between -1/2 and 1/2, from the lowest: off by 2e-9 at most, beside which rounding counts."""
LEAST: Final = -127.0
"""A power of 2 as low as this, or lower, is 0."""


def word(value: int) -> Any:
    """A constant of 64 bits."""
    return ir.Constant(WORD, value)


def every(value: float) -> Any:
    """A vector of the same number."""
    return ir.Constant(VECTOR, [value] * LANES)


def at(b: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to what lies ``offset`` bytes behind an address."""
    base = b.inttoptr(address, BYTE.as_pointer())
    return b.bitcast(b.gep(base, [offset]), kind.as_pointer())


def spread(b: Any, value: Any) -> Any:
    """A vector of the same number, known at run time."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    one = b.insert_element(nothing, value, ir.Constant(PART, 0))
    return b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(PART, LANES), [0] * LANES))


def load(b: Any, pointer: Any) -> Any:
    """What lies there, wherever a float may."""
    return b.load(pointer, align=4)


def fused(b: Any, x: Any, y: Any, z: Any) -> Any:
    """``x y + z`` of vectors, rounded once."""
    name = f"llvm.fma.v{LANES}f32"
    function = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(VECTOR, [VECTOR] * 3), name)
    return b.call(function, [x, y, z])


def folded(b: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    """All floats of a vector, joined by halves."""
    n = LANES
    while n > 1:
        n //= 2
        half = [ir.Constant(ir.VectorType(PART, n), list(range(first, first + n))) for first in (0, n)]
        x = join(*(b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), part) for part in half))
    return b.extract_element(x, ir.Constant(PART, 0))


def loop(b: Any, count: Any, first: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """``count`` times ``body`` of the turn's number and of what the turn before made of ``first``."""
    before = b.block
    turn, done = (b.function.append_basic_block(name) for name in ("turn", "done"))
    b.cbranch(b.icmp_signed(">", count, word(0)), turn, done)
    b.position_at_end(turn)
    i, state = b.phi(WORD), [b.phi(x.type) for x in first]
    following = body(i, state)
    more = b.add(i, word(1))
    for phi, x, y in zip([i, *state], [word(0), *first], [more, *following], strict=True):
        phi.add_incoming(x, before)
        phi.add_incoming(y, b.block)
    b.cbranch(b.icmp_signed("<", more, count), turn, done)
    last = b.block
    b.position_at_end(done)
    found = [b.phi(x.type) for x in first]
    for phi, x, y in zip(found, first, following, strict=True):
        phi.add_incoming(x, before)
        phi.add_incoming(y, last)
    return found


def reduced(b: Any, count: Any, first: Any, step: Callable[[Any, Any], Any], join: Callable[[Any, Any], Any]) -> Any:
    """``step`` of each vector's number and of one of four states, so that none waits for the one before; joined."""
    fours = b.ashr(count, word(2))

    def four(i: Any, state: list[Any]) -> list[Any]:
        base = b.shl(i, word(2))
        return [step(b.add(base, word(k)), x) for k, x in enumerate(state)]

    w, x, y, z = loop(b, fours, [first] * 4, four)
    done = b.shl(fours, word(2))
    (w,) = loop(b, b.sub(count, done), [w], lambda i, state: [step(b.add(done, i), state[0])])
    return folded(b, join(join(w, x), join(y, z)), join)


def powers(b: Any, x: Any) -> Any:
    """2^x of a vector: 0 where x is at most ``LEAST``, and no number where it is none."""
    low = every(LEAST)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    whole = b.fadd(x, every(_SHIFTER))  # whose last bits are x rounded to a whole number
    part = b.fsub(x, b.fsub(whole, every(_SHIFTER)))
    found = every(POWERS[-1])
    for power in POWERS[-2::-1]:
        found = fused(b, found, part, every(power))
    exponent = b.shl(b.bitcast(whole, _WHOLE), ir.Constant(_WHOLE, [23] * LANES))
    scale = b.bitcast(b.add(exponent, ir.Constant(_WHOLE, [127 << 23] * LANES)), VECTOR)
    return b.fmul(found, scale)
