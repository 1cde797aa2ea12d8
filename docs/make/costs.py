"""What protocols cost: every row is run by three parties in this process, and their own counters are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from docs.make.words import HEAD

N: Final = 4096
ROWS: Final = 64
CLASSES: Final = 10


class _Run(NamedTuple):
    """A protocol on shares of inputs with these shapes; so many ``outputs`` are what its bytes are told by."""

    name: str
    build: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    outputs: int
    module: str


def _runs() -> list[_Run]:
    from uvcc_engine.mpc.comparisons import boolean, gated, maximum, selection, shuffle
    from uvcc_engine.mpc.foundation import opening
    from uvcc_engine.mpc.functions import nonlinear, softmax
    from uvcc_engine.mpc.products import arithmetic

    def bit_times(rt: Any, b: Any, x: Any) -> Any:
        return arithmetic.mul_protocol(rt, x, b.with_f(0))

    def gate(rt: Any, x: Any, y: Any, bits: Any) -> Any:
        return gated.matmul_gated_protocol(rt, x, y, bits.with_f(0), scale=1.0)

    def reciprocal(rt: Any, x: Any) -> Any:
        return nonlinear.reciprocal_protocol(rt, x, 1.0, 10.0)

    square = ((64, 64), (64, 64))
    return [
        _Run("product, truncated", arithmetic.mul_protocol, ((N,), (N,)), N, "arithmetic"),
        _Run("product of a bit and a number", bit_times, ((N,), (N,)), N, "arithmetic"),
        _Run("matrix product 64 × 64 × 64, truncated", arithmetic.matmul_protocol, square, 64 * 64, "arithmetic"),
        _Run("matrix product times a bit", gate, (*square, (64, 64)), 64 * 64, "gated"),
        _Run("opening to all", opening.open_ring_protocol, ((N,),), N, "opening"),
        _Run("sign, pair-shared", boolean.drelu_protocol, ((N,),), N, "boolean"),
        _Run("sign, replicated bits", boolean.drelu_bits_protocol, ((N,),), N, "boolean"),
        _Run("sign as a number", selection.drelu_arithmetic_protocol, ((N,),), N, "selection"),
        _Run("ReLU", selection.relu_only_protocol, ((N,),), N, "selection"),
        _Run("ReLU with its bit", selection.relu_protocol, ((N,),), N, "selection"),
        _Run("matrix product, then ReLU", selection.matmul_relu_protocol, square, 64 * 64, "selection"),
        _Run("maximum of 10", maximum.max_protocol, ((ROWS, CLASSES),), ROWS, "maximum"),
        _Run("one-hot of the largest of 10", maximum.argmax_one_hot_protocol, ((ROWS, CLASSES),), ROWS, "maximum"),
        _Run("exponential of what is not positive", nonlinear.exp_protocol, ((N,),), N, "exponential"),
        _Run("inverse on [1, 10]", reciprocal, ((N,),), N, "nonlinear"),
        _Run("softmax of 10", nonlinear.softmax_protocol, ((ROWS, CLASSES),), ROWS, "nonlinear"),
        _Run(
            "matrix product, then powers of 10 classes",
            softmax.matmul_powers_protocol,
            ((ROWS, 64), (64, CLASSES)),
            ROWS,
            "softmax",
        ),
        _Run("secret permutation", shuffle.shuffle_protocol, ((N,),), N, "shuffle"),
    ]


class Cost(NamedTuple):
    """Rounds; bytes that each party sent."""

    rounds: int
    sent: tuple[int, int, int]


def measured(build: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]) -> Cost:
    """Run a protocol at three parties on numbers below 0, and read their counters."""
    import random

    import torch

    from uvcc_engine.mpc.foundation.local import LocalPlanes
    from uvcc_engine.mpc.foundation.runtime import Runtime
    from uvcc_engine.mpc.foundation.share import share_of, split

    source = random.Random(1).randbytes
    inputs = [-torch.linspace(0.0, 4.0, shape.numel(), dtype=torch.float64) for shape in map(torch.Size, shapes)]
    parts = [split(x.reshape(shape), 16, source) for x, shape in zip(inputs, shapes, strict=True)]

    def body(rt: Runtime) -> tuple[int, int]:
        rt.run(build(rt, *[share_of(p, rt.party, 16) for p in parts]))
        return rt.rounds, rt.bytes_sent

    found = LocalPlanes().run_three(body)
    assert len({rounds for rounds, _ in found}) == 1
    return Cost(found[0][0], (found[0][1], found[1][1], found[2][1]))


def _step(few: bool, *, proved: bool = False) -> Cost:
    """The training step of ``bench mpc``, in either number of rounds; ``proved``: in the forms that ``verify: proofs``
    takes, without their proof."""
    import itertools

    from uvcc_engine.bench.party import mpc_party
    from uvcc_engine.bench.work import mpc_proofs
    from uvcc_engine.mpc.foundation.local import LocalPlanes
    from uvcc_engine.mpc.foundation.runtime import Runtime

    sizes = (784, 128, 128, 10)

    def body(rt: Runtime) -> tuple[int, int]:
        rt.few_rounds = few
        if proved:
            mpc_proofs.open_ledger(rt, "mlp_step_verified")
        x = mpc_party.normal(rt.party, 128, sizes[0])
        y = mpc_party.normal(rt.party, 128, sizes[-1], scale=0.1)
        weights = [mpc_party.normal(rt.party, a, b, scale=0.3) for a, b in itertools.pairwise(sizes)]
        rt.run(mpc_party.step_of(rt)(rt, x, y, weights))
        return rt.rounds, rt.bytes_sent

    found = LocalPlanes().run_three(body)
    return Cost(found[0][0], (found[0][1], found[1][1], found[2][1]))


def _proved() -> tuple[int, int]:
    """Rounds that the proof of one matrix product adds to that of an opening, and bytes of both at all parties."""
    from uvcc_engine.bench.party import mpc_party
    from uvcc_engine.bench.work import mpc_proofs
    from uvcc_engine.mpc.foundation.local import LocalPlanes
    from uvcc_engine.mpc.foundation.runtime import Runtime
    from uvcc_engine.mpc.products.arithmetic import matmul_protocol

    def body(rt: Runtime) -> tuple[int, int]:
        mpc_proofs.open_ledger(rt, "matmul_256_verified")
        rt.run(matmul_protocol(rt, mpc_party.normal(rt.party, 64, 64), mpc_party.normal(rt.party, 64, 64)))
        before = rt.bytes_sent
        _, rounds = mpc_proofs.prove(rt)
        return rounds, rt.bytes_sent - before

    found = LocalPlanes().run_three(body)
    return found[0][0], sum(sent for _, sent in found)


def page() -> str:
    """The page."""
    lines = [
        "# What a protocol costs",
        "",
        HEAD,
        "",
        "Rounds, and bytes of shares. Every row was run by three parties, whose own counters were read; a test makes",
        "this page again. A round is one message each way. Protocols that run side by side share their rounds. Bytes",
        "are those of all three parties together for one output, and what each party sends of them; heads and seals",
        "of [frames](../specifications/frame-session.md) come on top. Why none of these messages tells anything stands",
        "in [the arguments](arguments.md).",
        "",
        "| protocol | rounds | bytes for an output | sent by P0 · P1 · P2, for an output | module |",
        "|---|---|---|---|---|",
    ]
    for run in _runs():
        cost = measured(run.build, run.shapes)
        each = " · ".join(f"{sent / run.outputs:.1f}" for sent in cost.sent)
        at = f"[{run.module}](protocols.md#{run.module})"
        lines.append(f"| {run.name} | {cost.rounds} | {sum(cost.sent) / run.outputs:.1f} | {each} | {at} |")
    near, far = _step(few=False), _step(few=True)
    rounds, sent = _proved()
    lines += [
        "",
        f"Counts are of {N:,} numbers at once, or of {ROWS} rows of {CLASSES}. P2 is the dealer in a protocol that is",
        "run alone; in a training step the dealer is another party in each layer.",
        "",
        "## One training step",
        "",
        "MLP 784-128-128-10, batch 128, as `uvcc-engine bench mpc` runs it; see [its rounds](../rounds.md).",
        "",
        "| `job.rounds` | rounds | MB sent by P0 · P1 · P2 | rounds with `verify: proofs` | MB sent by P0 · P1 · P2 |",
        "|---|---|---|---|---|",
    ]
    for name, cost, proved in (
        ("sparing", near, _step(False, proved=True)),
        ("few", far, _step(True, proved=True)),
    ):
        megabytes = [" · ".join(f"{s / 1e6:.2f}" for s in one.sent) for one in (cost, proved)]
        lines.append(f"| `{name}` | {cost.rounds} | {megabytes[0]} | {proved.rounds} | {megabytes[1]} |")
    lines += [
        "",
        "With `verify: proofs` a step takes the forms whose messages can be proved; its proof comes on top.",
        f"The proof of one matrix product of 64 × 64 × 64 has {rounds} rounds before that in which something is opened",
        f"and, with the opening of one number, {sent:,} bytes of all three parties. A step has one proof for all of",
        "its products, so its rounds hardly grow with their number.",
        "",
    ]
    return "\n".join(lines)
