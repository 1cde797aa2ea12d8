"""One party of ``bench mpc``: opens its plane, runs each piece of work, prints what it took as one JSON object."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uvcc_engine.contract.link_spec import LinkSpec
from uvcc_engine.mpc.arithmetic import matmul_protocol, mul_protocol, sub
from uvcc_engine.mpc.boolean import drelu_bits_protocol
from uvcc_engine.mpc.gated import matmul_gated_protocol
from uvcc_engine.mpc.kernels.memory import keep_freed_memory
from uvcc_engine.mpc.maximum import matmul_max_protocol
from uvcc_engine.mpc.nonlinear import softmax_of_shifted_protocol
from uvcc_engine.mpc.prg import PairKeys
from uvcc_engine.mpc.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.selection import matmul_relu_protocol, relu_only_protocol
from uvcc_engine.mpc.share import Share, share_of, split
from uvcc_engine.plane.api import Buffer, Plane, Tag
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.transcript.signing.identity import Identity

SID = hashlib.sha256(b"bench mpc").digest()
BATCH = 128
LAYERS = (784, 128, 128, 10)
LOCAL_PRODUCTS = 5  # matrix products over the three parties for a secure one; see ``arithmetic.terms``


class DelayedPlane:
    """A plane whose messages take ``delay`` seconds more, one way. Parties on one host share the clock."""

    def __init__(self, inner: Plane, delay: float) -> None:
        self._inner, self._delay = inner, delay
        self.party = inner.party

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        self._inner.send(dst, tag, struct.pack("<d", time.monotonic()) + bytes(payload))

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


def normal(party: int, *shape: int, scale: float = 1.0, seed: int = 1) -> Share:
    """A share of normal numbers; all parties derive the same components, as benchmarks may."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * scale

    def source(count: int) -> bytes:
        words = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), generator=generator)
        return words.numpy().tobytes()[:count]

    return share_of(split(x, 16, source), party)


def mlp_step_protocol(
    rt: Runtime, x: Share, y: Share, weights: list[Share], lr: float = 0.125
) -> MpcProtocol[list[Share]]:
    """One SGD step of a fully connected network with ReLU and softmax cross-entropy; lr / batch is folded in.

    Both are powers of two, as in Mohassel and Zhang, "SecureML", IEEE S&P 2017, section IV: the gradient is shifted.
    """
    inputs, bits = [x], []
    value = x
    for i, weight in enumerate(weights):
        if i + 1 == len(weights):
            value, top = yield from matmul_max_protocol(rt, value, weight)
            break
        value, bit = yield from matmul_relu_protocol(rt, value, weight)
        inputs.append(value)
        bits.append(bit)
    probability, _ = yield from softmax_of_shifted_protocol(rt, sub(value, top.reshape(-1, 1)))
    delta = sub(probability, y)
    new: list[Share] = []
    for i in reversed(range(len(weights))):
        gradient = matmul_protocol(rt, inputs[i].T, delta, scale=lr / BATCH)
        if i == 0:
            change = yield from gradient
        else:
            change, delta = yield from par(gradient, matmul_gated_protocol(rt, delta, weights[i].T, bits[i - 1]))
        new.insert(0, sub(weights[i], change))
    return new


def works(party: int) -> dict[str, Callable[[], Work]]:
    """Name -> the work, built when its turn comes so that only one row's data is in memory."""

    def matmul(n: int) -> Work:
        x, y = normal(party, n, n), normal(party, n, n, seed=2)
        return Work(lambda rt: rt.run(matmul_protocol(rt, x, y)), LOCAL_PRODUCTS * n**3)

    def elements(build: Callable[[Runtime, Share], MpcProtocol[Any]], n: int = 1_000_000) -> Work:
        x = normal(party, n)
        return Work(lambda rt: rt.run(build(rt, x)))

    def mlp() -> Work:
        x = normal(party, BATCH, LAYERS[0], scale=0.3)
        y = normal(party, BATCH, LAYERS[-1], scale=0.1)
        weights = [normal(party, a, b, scale=a**-0.5) for a, b in itertools.pairwise(LAYERS)]
        forward = sum(BATCH * a * b for a, b in itertools.pairwise(LAYERS))
        backward = 2 * forward - BATCH * LAYERS[0] * LAYERS[1]  # nobody asks for the gradient of the inputs
        return Work(lambda rt: rt.run(mlp_step_protocol(rt, x, y, weights)), LOCAL_PRODUCTS * (forward + backward))

    return {
        "matmul_512": lambda: matmul(512),
        "matmul_1024": lambda: matmul(1024),
        "mul_1e6": lambda: elements(lambda rt, x: mul_protocol(rt, x, x)),
        "drelu_1e6": lambda: elements(drelu_bits_protocol),
        "relu_1e6": lambda: elements(relu_only_protocol),
        "relu_1e6_k32": lambda: elements(lambda rt, x: relu_only_protocol(rt, x, width=32)),
        "mlp_step": mlp,
        "mlp_step_20ms": mlp,
    }


def barrier(rt: Runtime) -> None:
    """All parties leave together, as nearly as two control messages allow."""
    for _ in range(2):
        for peer in (rt.next, rt.prev):
            rt.plane.send_control(peer, b"go")
        for peer in (rt.next, rt.prev):
            rt.plane.recv_control(peer, 60.0)


def measure(rt: Runtime, work: Work, runs: int) -> dict[str, Any]:
    """Seconds per run, processor seconds, rounds, bytes, and the multiplications of matrix products."""
    seconds: list[float] = []
    cpu: list[float] = []
    rounds = sent = 0
    gc.collect()
    gc.freeze()  # as a worker's process does
    for k in range(runs + 1):  # the first one warms up
        rt.begin_epoch(rt.epoch + 1)
        barrier(rt)
        before = (rt.rounds, rt.bytes_sent)
        begun, busy = time.perf_counter(), time.process_time()
        work.run(rt)
        taken = time.perf_counter() - begun
        cpu.append(time.process_time() - busy)
        rounds, sent = rt.rounds - before[0], rt.bytes_sent - before[1]
        if k:
            seconds.append(taken)
    return {"seconds": seconds, "products": work.products, "rounds": rounds, "bytes": sent, "cpu": cpu[1:]}


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
    out: dict[str, Any] = {}
    for attempt, name in enumerate(config["rows"]):
        used: Plane = DelayedPlane(plane, 0.020) if name.endswith("_20ms") else plane
        rt = Runtime(party, used, keys, SID, attempt)
        rt.begin_epoch(1000 * attempt)  # tags must not repeat within the session
        out[name] = measure(rt, works(party)[name](), config["runs"])
    plane.close()
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
