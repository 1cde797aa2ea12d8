"""What loops that are written in LLVM's own language are made of: vectors of words at addresses.

numba has no type for a processor's vectors and does not keep sums in its registers where their number is not known to
it, so the innermost part of some loops is written here, by hand; LLVM takes what vectors the processor has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir

WORD: Final = ir.IntType(64)
INDEX: Final = ir.IntType(32)
EIGHT: Final = ir.VectorType(WORD, 8)


def constant(value: int) -> Any:
    """A number of 64 bits."""
    return ir.Constant(WORD, value)


def vector_of(lanes: int) -> Any:
    """The type of so many words."""
    return ir.VectorType(WORD, lanes)


def load(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """What lies at an address, or so many bytes (``offset``) behind it."""
    at = builder.add(address, constant(offset)) if offset else address
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=1 if kind.__class__ is ir.IntType else 8)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    """To an address, or so many bytes (``offset``) behind it."""
    at = builder.add(address, constant(offset)) if offset else address
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=8)


def spread(builder: Any, word: Any, lanes: int) -> Any:
    """The same word in all lanes."""
    none = ir.Constant(vector_of(lanes), ir.Undefined)
    one = builder.insert_element(none, word, ir.Constant(INDEX, 0))
    return builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(INDEX, lanes), [0] * lanes))


def repeated(builder: Any, count: Any, sums: Sequence[Any], step: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """``sums`` after ``count`` steps, at least one; ``step`` makes of a step's number and the sums so far new ones."""
    before, body = builder.block, builder.append_basic_block()
    builder.branch(body)
    builder.position_at_end(body)
    at, phis = builder.phi(WORD), [builder.phi(one.type) for one in sums]
    found = step(at, list(phis))
    following, end = builder.add(at, constant(1)), builder.block
    at.add_incoming(constant(0), before)
    at.add_incoming(following, end)
    for phi, first, new in zip(phis, sums, found, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(new, end)
    after = builder.append_basic_block()
    builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
    builder.position_at_end(after)
    return found


def halves_joined(how: str) -> Callable[[Any, Any, Any, Any], Any]:
    """What builds a loop over ``count`` vectors of eight words at ``x`` and as many behind them, joined at ``to`` by
    the builder's ``how``: numbers are added, polynomials are by ``xor``."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count, to = arguments
        size, join = builder.mul(count, constant(64)), getattr(builder, how)

        def step(at: Any, _: list[Any]) -> list[Any]:
            place = builder.mul(at, constant(64))
            low, high = (load(builder, builder.add(one, place), EIGHT) for one in (x, builder.add(x, size)))
            store(builder, join(low, high), builder.add(to, place))
            return []

        repeated(builder, count, [], step)
        return context.get_dummy_value()

    return build


def carryless(builder: Any, x: Any, y: Any, lanes: int) -> Any:
    """Four products without carries of two vectors of eight words: of the lower words of their pairs, or of the upper
    ones where ``lanes`` has bit 0 (of ``x``) or bit 4 (of ``y``). Each takes two words."""
    form = ir.FunctionType(EIGHT, [EIGHT, EIGHT, ir.IntType(8)])
    multiply = builder.module.declare_intrinsic("llvm.x86.pclmulqdq.512", fnty=form)
    return builder.call(multiply, [x, y, ir.Constant(ir.IntType(8), lanes)])


def fetch(builder: Any, address: Any) -> None:
    """Have the processor bring the 512 bytes from an address on near, which may be no memory of this process."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    form = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    intrinsic = builder.module.declare_intrinsic("llvm.prefetch", [pointer], form)
    for line in range(0, 512, 64):
        at = builder.inttoptr(builder.add(address, constant(line)), pointer)
        builder.call(intrinsic, [at, *(ir.Constant(number, k) for k in (0, 3, 1))])  # to read, as near as can be, data
