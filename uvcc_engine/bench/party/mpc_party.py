"""One party of ``bench mpc``: opens its plane, runs each piece of work, prints what it took as one JSON object."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uvcc_engine.bench.work import gpt_step
from uvcc_engine.bench.work import mpc_proofs as proofs
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.comparisons.boolean import drelu_bits_protocol
from uvcc_engine.mpc.comparisons.gated import matmul_gated_protocol
from uvcc_engine.mpc.comparisons.maximum import matmul_max_protocol
from uvcc_engine.mpc.comparisons.selection import matmul_relu_protocol, relu_only_protocol
from uvcc_engine.mpc.foundation.drawn_ahead import DrawAhead
from uvcc_engine.mpc.foundation.drawn_beside import DrawBeside
from uvcc_engine.mpc.foundation.prg import Forecaster, PairKeys
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, cat, share_of, split
from uvcc_engine.mpc.functions.exponential import INVERSE, PairPowers, settle_powers_protocol
from uvcc_engine.mpc.functions.nonlinear import softmax_of_shifted_protocol
from uvcc_engine.mpc.functions.softmax import dealt_rows, shifted_powers_protocol
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.mpc.products.arithmetic import matmul_protocol, mul_protocol, scale_int, sub
from uvcc_engine.plane.api import Buffer, Plane, Tag
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.simulate.gpt_forecast import GptSize
from uvcc_engine.transcript.signing.identity import Identity

SID = hashlib.sha256(b"bench mpc").digest()
BATCH = 128
LAYERS = (784, 128, 128, 10)
CPU = torch.device("cpu")
LOCAL_PRODUCTS = 5  # matrix products over the three parties for a secure one; see ``arithmetic.terms``


class DelayedPlane:
    """A plane whose messages take ``delay`` seconds more, one way, and leave at ``rate`` bytes a second at most, one
    after the other. Parties on one host share the clock."""

    def __init__(self, inner: Plane, delay: float, rate: float = math.inf) -> None:
        self._inner, self._delay, self._rate = inner, delay, rate
        self._free = 0.0  # when the last message will have left
        self.party = inner.party

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        body = bytes(payload)
        self._free = max(self._free, time.monotonic()) + len(body) / self._rate
        self._inner.send(dst, tag, struct.pack("<d", self._free) + body)

    def recv(self, src: int, tag: Tag) -> memoryview:
        message = self._inner.recv(src, tag)
        (sent,) = struct.unpack("<d", message[:8])
        time.sleep(max(0.0, sent + self._delay - time.monotonic()))
        return message[8:]

    def send_control(self, dst: int, body: bytes) -> None:
        self._inner.send_control(dst, body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        return self._inner.recv_control(src, timeout)

    def close(self, *, graceful: bool = True) -> None:
        self._inner.close(graceful=graceful)


@dataclass(frozen=True, slots=True)
class Work:
    """A named piece of work, and how many multiplications of its matrix products the three parties cannot avoid."""

    run: Callable[[Runtime], object]
    products: int = 0


def normal(party: int, *shape: int, scale: float = 1.0, seed: int = 1, device: torch.device = CPU) -> Share:
    """A share of normal numbers; all parties derive the same components, as benchmarks may."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * scale

    def source(count: int) -> bytes:
        words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
        return words.numpy().tobytes()[:count]

    return share_of(split(x, 16, source), party).to(device)


def near_step_protocol(
    rt: Runtime, x: Share, y: Share, weights: list[Share], lr: float = 0.125
) -> MpcProtocol[list[Share]]:
    """The step in more rounds with half the bytes and half the work: 30 rounds. For parties that lie close together.

    Each operation has one dealer: P0 of the hidden layers, P1 of the updates, P2 of the rest, so that none sends much
    more of the step than another.
    """
    inputs, bits = [x], []
    value = x
    for i, weight in enumerate(weights):
        if i + 1 == len(weights):
            value, top = yield from matmul_max_protocol(rt, value, weight)
            break
        value, bit = yield from matmul_relu_protocol(rt, value, weight, dealer=0)
        inputs.append(value)
        bits.append(bit)
    probability, _ = yield from softmax_of_shifted_protocol(rt, sub(value, top.reshape(-1, 1)))
    delta = sub(probability, y)
    new: list[Share] = []
    for i in reversed(range(len(weights))):
        gradient = matmul_protocol(rt, inputs[i].T, delta, scale=lr / BATCH, dealer=1)
        if i == 0:
            change = yield from gradient
        else:
            change, delta = yield from par(gradient, matmul_gated_protocol(rt, delta, weights[i].T, bits[i - 1]))
        new.insert(0, sub(weights[i], change))
    return new


INVERSE_BITS = 16


def step_of(rt: Runtime) -> Callable[[Runtime, Share, Share, list[Share]], MpcProtocol[list[Share]]]:
    """The step that suits the distance of the parties. What the one of few rounds looks up has no proof."""
    return mlp_step_protocol if rt.few_rounds and not rt.proves_everything else near_step_protocol


def mlp_step_protocol(
    rt: Runtime, x: Share, y: Share, weights: list[Share], lr: float = 0.125
) -> MpcProtocol[list[Share]]:
    """One SGD step of a fully connected network with ReLU and softmax cross-entropy; lr / batch is folded in.

    Both are powers of two, as in Mohassel and Zhang, "SecureML", IEEE S&P 2017, section IV: the gradient is shifted.
    For parties that lie apart: 20 rounds for two hidden layers, 4 each forward, 6 to the powers of the softmax, 2 for
    each hidden layer on the way back and 2 for the update.

    The rows go through the softmax and the way back in as many parts as there are words of 64 of them, up to three,
    with a dealer each; what is left is dealt by the third party, and large products by all three (``chunking``): no
    line is much fuller than another.
    """
    *hidden, last = weights
    inputs, bits = [x], []
    value = x
    for i, weight in enumerate(hidden):  # of a small layer the dealer, who sends the most, is another one each time
        value, bit = yield from matmul_relu_protocol(rt, value, weight, dealer=i % 2)
        inputs.append(value)
        bits.append(bit)
    places = dealt_rows(rt, value.shape[0], last.shape[1], 1)
    powers = [shifted_powers_protocol(rt, value.index(at), last, dealer=p) for p, at in enumerate(places)]
    shifted: MpcProtocol[list[Any]] = par(*powers)
    both: MpcProtocol[list[Any]] = par(shifted, _down_protocol(rt, y, list(reversed(weights[1:])), bits[::-1]))
    at_rows, wanted = yield from both
    lower: list[list[Share]] = yield from par(
        *[
            _scaled_powers_protocol(rt, at_rows[p].powers, last, hidden[-1], [bit.index(at) for bit in bits], x.f, p)
            for p, at in enumerate(places)
        ]
    )
    top, middle, scaled = (cat(list(parts)) for parts in zip(*lower, strict=True))
    fine = scale_int(wanted[1], 1 << INVERSE_BITS).with_f(x.f + INVERSE_BITS)
    deltas = [sub(top, y), sub(middle, wanted[0]), sub(scaled, fine)]
    return (yield from _updated_protocol(rt, weights, inputs, bits, deltas, lr / BATCH))


def _scaled_powers_protocol(
    rt: Runtime, at: PairPowers, last: Share, second: Share, bits: list[Share], f: int, dealer: int
) -> MpcProtocol[list[Share]]:
    """Of some rows, ``i E`` and what becomes of it below the last layer, and below the ``second`` last with
    ``INVERSE_BITS`` more fractional bits: 6 rounds. ``bits``: of the hidden layers, ``[rows, outputs]`` each.

    With powers E of the shifted logits and i the inverses of their rows' sums, the gradient of the logits is i E - y.
    The way back is linear in every row, so i need not be known when it begins: E goes down by itself, i joins with the
    second gate (a bit times i instead of a bit), and y goes down while the softmax is computed.
    """

    def below(powers: Share) -> MpcProtocol[list[Share]]:
        return [powers, (yield from matmul_gated_protocol(rt, powers, last.T, bits[-1]))]

    def beside(found: Share) -> MpcProtocol[list[Share]]:
        column = found.reshape(-1, 1)
        return [column, (yield from mul_protocol(rt, column, bits[-2]))]

    (powers, powers_down), (inverse, gate) = yield from settle_powers_protocol(
        rt, at, (INVERSE,), f, dealer, looked_up_f=INVERSE_BITS, below=below, beside=beside
    )
    scaled, *lower = yield from par(
        _scaled_gate_protocol(rt, powers_down, second.T, gate, (dealer + 1) % PARTIES),
        mul_protocol(rt, powers, inverse),
        mul_protocol(rt, powers_down, inverse, dealer=dealer),
    )
    return [*lower, scaled]


def _down_protocol(rt: Runtime, grad: Share, weights: list[Share], bits: list[Share]) -> MpcProtocol[list[Share]]:
    """``grad`` on its way down through layers and the ReLUs below them: what arrives at each. 2 rounds a layer."""
    found = []
    for weight, bit in zip(weights, bits, strict=True):
        grad = yield from matmul_gated_protocol(rt, grad, weight.T, bit)
        found.append(grad)
    return found


def _scaled_gate_protocol(rt: Runtime, x: Share, y: Share, gate: Share, dealer: int) -> MpcProtocol[Share]:
    """``(x @ y) * gate`` for a gate that is no bit but has fractional bits; the result has those of both."""
    found = yield from matmul_gated_protocol(rt, x, y, gate.with_f(0), dealer=dealer)
    return found.with_f(x.f + gate.f)


def _updated_protocol(
    rt: Runtime, weights: list[Share], inputs: list[Share], bits: list[Share], deltas: list[Share], rate: float
) -> MpcProtocol[list[Share]]:
    """New weights from the gradients of the layers' outputs, the top layer's first."""
    changes = yield from par(
        *[matmul_protocol(rt, i.T, d, scale=rate) for i, d in zip(reversed(inputs), deltas, strict=True)]
    )
    return [sub(w, c) for w, c in zip(weights, reversed(changes), strict=True)]


def works(party: int, device: torch.device = CPU) -> dict[str, Callable[[], Work]]:
    """Name -> the work, built when its turn comes so that only one row's data is in memory."""

    def matmul(n: int) -> Work:
        x, y = normal(party, n, n, device=device), normal(party, n, n, seed=2, device=device)
        return Work(lambda rt: rt.run(matmul_protocol(rt, x, y)), LOCAL_PRODUCTS * n**3)

    def elements(build: Callable[[Runtime, Share], MpcProtocol[Any]], n: int = 1_000_000) -> Work:
        x = normal(party, n, device=device)
        return Work(lambda rt: rt.run(build(rt, x)))

    def mlp() -> Work:
        x = normal(party, BATCH, LAYERS[0], scale=0.3, device=device)
        y = normal(party, BATCH, LAYERS[-1], scale=0.1, device=device)
        weights = [normal(party, a, b, scale=a**-0.5, device=device) for a, b in itertools.pairwise(LAYERS)]

        def step(rt: Runtime) -> MpcProtocol[list[Share]]:
            return step_of(rt)(rt, x, y, weights)

        forward = sum(BATCH * a * b for a, b in itertools.pairwise(LAYERS))
        backward = 2 * forward - BATCH * LAYERS[0] * LAYERS[1]  # nobody asks for the gradient of the inputs
        return Work(lambda rt: rt.run(step(rt)), LOCAL_PRODUCTS * (forward + backward))

    def learning(size: GptSize) -> Work:
        return Work(gpt_step.stepping(party, size), LOCAL_PRODUCTS * size.macs)

    return {
        "matmul_256": lambda: matmul(256),
        "matmul_512": lambda: matmul(512),
        "matmul_1024": lambda: matmul(1024),
        "matmul_4096": lambda: matmul(4096),
        "mul_1e6": lambda: elements(lambda rt, x: mul_protocol(rt, x, x)),
        "drelu_1e6": lambda: elements(drelu_bits_protocol),
        "relu_1e6": lambda: elements(relu_only_protocol),
        "relu_1e7": lambda: elements(relu_only_protocol, 10_000_000),
        "relu_1e6_k32": lambda: elements(lambda rt, x: relu_only_protocol(rt, x, width=32)),
        "mlp_step": mlp,
        "gpt_tiny_step": lambda: learning(gpt_step.TINY),
        "gpt_step": lambda: learning(gpt_step.SMALL),
    }


def barrier(rt: Runtime) -> None:
    """All parties leave together, as nearly as two control messages allow."""
    for _ in range(2):
        for peer in (rt.next, rt.prev):
            rt.plane.send_control(peer, b"go")
        for peer in (rt.next, rt.prev):
            rt.plane.recv_control(peer, 60.0)


def measure(rt: Runtime, work: Work, runs: int, ahead: Forecaster | None = None, *, steps: int = 1) -> dict[str, Any]:
    """Seconds per run, processor seconds (of the process, and ``thread``: of the computing thread), most rounds, mean
    bytes, and the multiplications of matrix products. With ``ahead`` a run begins when all that is foretold of it is
    drawn. Of ``steps`` that make a run, each time is the mean."""
    seconds: list[float] = []
    cpu: list[float] = []
    thread: list[float] = []
    proof: list[float] = []
    drawing: list[float] = []
    sent: list[int] = []
    rounds = dealt = proof_rounds = 0
    floor = 0.0
    gc.collect()
    gc.freeze()  # as a worker's process does
    warm = 1 if ahead is None else 2  # the second one is the first that could be foretold
    for k in range(runs * steps + warm):
        if ahead is not None:
            ahead.settle()
        rt.begin_epoch(rt.epoch + 1)
        barrier(rt)
        before = (rt.rounds, rt.bytes_sent, rt.dealt_bytes, rt.drawing_s)
        begun, busy, mine = time.perf_counter(), time.process_time(), time.thread_time()
        work.run(rt)
        thread.append(time.thread_time() - mine)
        if k == 0:  # not timed: what is counted takes longer
            floor, (proof_s, of_proof) = proofs.floor_s(rt), (0.0, 0)
        else:
            proof_s, of_proof = proofs.prove(rt)
        if rt.device.type == "cuda":
            torch.cuda.synchronize(rt.device)
        taken = time.perf_counter() - begun
        cpu.append(time.process_time() - busy)
        rounds, dealt = max(rounds, rt.rounds - before[0]), rt.dealt_bytes - before[2]
        proof_rounds = max(proof_rounds, of_proof)
        sent.append(rt.bytes_sent - before[1])
        drawing.append(rt.drawing_s - before[3])
        if k >= warm:
            seconds.append(taken)
            proof.append(proof_s)
    seconds, proof, cpu, thread = (_means(of, steps) for of in (seconds, proof, cpu[warm:], thread[warm:]))
    figures = {"seconds": seconds, "products": work.products, "rounds": rounds, "cpu": cpu}
    figures["bytes"] = round(statistics.fmean(sent[warm:]))
    split = {"drawing": drawing[1:], "dealt": dealt} if any(drawing) else {}
    return (
        figures
        | split
        | {"thread": thread}
        | {"peak": proofs.peak_bytes(), "proof": proof, "proof_rounds": proof_rounds, "floor": floor}
    )


def _means(of: list[float], steps: int) -> list[float]:
    """Of so many at a time."""
    return [statistics.fmean(of[k : k + steps]) for k in range(0, len(of), steps)]


def main(argv: Sequence[str]) -> int:
    """``CONFIG PARTY``: the config has identities, link addresses, rows, runs."""
    config, party = json.loads(Path(argv[0]).read_text()), int(argv[1])
    torch.set_num_threads(1)
    keep_freed_memory()
    folder = Path(config["folder"])
    identities = [Identity.load(folder / f"id{p}") for p in range(3)]
    me, public = identities[party], {p: i.public for p, i in enumerate(identities)}
    plane = open_plane(
        party=party,
        coord=f"p{party}r0s0t0",
        sid_sub=SID,
        identity=me,
        peers=public,
        link=LinkSpec(kind="direct", listen=config["addresses"][str(party)], peers=config["addresses"]),
        recorder=None,
        state_dir=folder,
        on_event=lambda name, fields: None,
    )
    keys = PairKeys(
        prev=me.pair_secret(public[(party + 2) % 3], SID, "prg"),
        next=me.pair_secret(public[(party + 1) % 3], SID, "prg"),
        own=me.own_secret(SID, "prg"),
    )
    device = torch.device(config.get("device", "cpu"))
    prg = "chacha20" if device.type == "cuda" else "aes"  # which a GPU draws by itself
    out: dict[str, Any] = {}
    for attempt, name in enumerate(config["rows"]):
        delay, rate = proofs.link_of(name)
        used: Plane = DelayedPlane(plane, delay, rate) if delay or rate < math.inf else plane
        beside: Forecaster = DrawBeside(device) if device.type == "cuda" else DrawAhead()
        for ahead in (None, beside) if config.get("split") else (None,):
            turn = 2 * attempt + (ahead is not None)
            rt = Runtime(party, used, keys, SID, turn, few_rounds=delay > 0, device=device, prg=prg, ahead=ahead)
            rt.begin_epoch(1000 * turn)  # tags must not repeat within the session
            proofs.open_ledger(rt, name)
            if ahead is not None:
                found = measure(rt, works(party, device)[proofs.work_of(name)](), config["runs"], ahead)
                out[name]["ahead"] = found["thread"]
                ahead.close()
                continue
            if config.get("split"):
                rt.time_draws()
            work, steps = works(party, device)[proofs.work_of(name)](), proofs.steps_of(name)
            out[name] = measure(rt, work, config["runs"], steps=steps)
    plane.close()
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
