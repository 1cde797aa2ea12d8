"""Three parties whose messages are proved, and a liar among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import PeerLostError, ProofFailedError, ProtocolError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model import additive, im2col
from uvcc_engine.model.layer_types import trees
from uvcc_engine.model.layer_types.conv2d import Conv2d
from uvcc_engine.model.learning import answer_metrics, clipping, objectives, optimizers
from uvcc_engine.model.model_spec import ModelSpec
from uvcc_engine.model.shapes import Image
from uvcc_engine.mpc.comparisons import gated, maximum, proved_bits, proved_numbers, selection
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger, ProvedStep
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, ProtocolProgress, ProtocolTask, Runtime
from uvcc_engine.mpc.foundation.share import Share, cat, share_of, split
from uvcc_engine.mpc.functions import exponential, normalize, order_statistics
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.mpc.products.summed import summed_products_protocol
from uvcc_engine.plane.api import Tag
from uvcc_engine.proofs.folding import BIT_DEGREE
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.instalments import in_instalments
from uvcc_engine.proofs.step_proof import prove_and_open_protocol, prove_protocol
from uvcc_engine.transcript.formats import kinds

T = TypeVar("T")
OF_A_PROOF = (kinds.PROOF, kinds.COIN, kinds.AUDIT)
Build = Callable[..., MpcProtocol[Share]]
Message = tuple[int, int, int, int, int]  # from, to, number on its link, kind, bytes


def normal(seed: int, *shape: int, scale: float = 4.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return torch.round(x * 2.0**16) / 2.0**16


def _dealer(build: Callable[..., Any], dealer: int) -> Build:
    return lambda rt, *xs: build(rt, *xs, dealer=dealer)


def _chosen(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    bit = Share(y.first[:1, : x.shape[1]], y.second[:1, : x.shape[1]], 0)
    return (yield from arithmetic.mul_protocol(rt, x, bit, dealer=dealer))


def _public(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from arithmetic.mul_public_protocol(rt, x, 0.3, dealer=dealer))


def _rescaled(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from arithmetic.rescale_protocol(rt, x.with_f(32), 0, dealer=dealer))


def _gated(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    bit = arithmetic.public(rt, torch.ones(x.shape[0], y.shape[1]), f=0)
    return (yield from gated.matmul_gated_protocol(rt, x, y, bit, dealer=dealer))


IMAGES = Conv2d(Image(1, 3, 3), 3, 2)  # 4 positions each, of which a patch has 4 pixels


def _patches(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """What a convolution's gradient is: ``[2 images of 4 positions, 3 channels] @ [3, 4]``, added up to 9 pixels."""
    return (
        yield from arithmetic.product_with_protocol(
            rt,
            x,
            y,
            lambda a, b: im2col.add_patches(rt.kernels, a @ b, IMAGES),
            dealer=dealer,
            cut=lambda t: im2col.cut_patches(rt.kernels, t, IMAGES),
        )
    )


def _elementwise(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from arithmetic.mul_protocol(rt, x, x, dealer=dealer))


def _scaled(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from arithmetic.matmul_protocol(rt, x, y, scale=3 * 2.0**-16, dealer=dealer))


def _summed(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from summed_products_protocol(rt, x, y.T, -1, scale=0.25, dealer=dealer))


PROTOCOLS: dict[str, Callable[..., MpcProtocol[Share]]] = {
    "matmul": arithmetic.matmul_protocol,
    "batched": arithmetic.matmul_protocol,  # several products at once, by the shape of what is multiplied
    "scaled": _scaled,
    "elementwise": _elementwise,
    "chosen": _chosen,
    "public": _public,
    "rescaled": _rescaled,
    "gated": _gated,
    "patches": _patches,
    "summed": _summed,
}


def _sign(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Comparison alone; its bits are opened as words, for which numbers under XOR do."""
    bits = yield from proved_bits.sign_proved_protocol(rt, x, dealer=dealer)
    return (yield from proved_numbers.numbers_proved_protocol(rt, bits, dealer=dealer))


def _relu(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    value, bit = yield from selection.relu_protocol(rt, x, dealer=dealer)
    return arithmetic.add(value, bit.with_f(16))


def _near_relu(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """The same with one round more, as between parties that lie close together."""
    rt.few_rounds = False
    return (yield from _relu(rt, x, y, dealer=dealer))


def _product_relu(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    value, bit = yield from selection.matmul_relu_protocol(rt, x, y, dealer=dealer)
    return arithmetic.add(value, bit.with_f(16))


def _product_maximum(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    product, best = yield from maximum.matmul_max_protocol(rt, x, y, dealer=dealer)
    return arithmetic.add(product, best.map(lambda t: t.unsqueeze(-1)))


def _argmax(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    best, place = yield from maximum.max_and_place_protocol(rt, x, dealer=dealer)
    return arithmetic.add(place.with_f(16), best.map(lambda t: t.unsqueeze(-1)))


def _power(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from exponential.exp_protocol(rt, arithmetic.add_public(rt, x, -20.0), dealer=dealer))


WHOLE: dict[str, Callable[..., MpcProtocol[Share]]] = {
    "sign": _sign,
    "relu": _relu,
    "near relu": _near_relu,
    "product relu": _product_relu,
    "product maximum": _product_maximum,
    "argmax": _argmax,
    "power": _power,
}
"""Protocols with secret bits, which are proved where everything is."""


def _adam(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Adam's step from a gradient and a first moment: squares, an inverse root, a product."""
    job = PrivateJob(optimizer="adam", lr=0.1)
    second = arithmetic.public(rt, torch.full(x.shape, 50.0), f=optimizers.second_bits(job.frac_bits, job.beta2))
    moved = yield from optimizers.adam_moments_protocol(rt, job, 3, x, y.T, second)
    return moved[2]


def _clipped(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    return (yield from clipping.clipped_protocol(rt, x, 0.5))


def _objective(name: str) -> Build:
    """The gradient of three rows, each counted by a weight, and the loss."""

    def build(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
        outputs, targets, weights = (
            x.index((slice(None), slice(0, 1))),
            *(y.T.index((slice(None), [k])) for k in (0, 1)),
        )
        grad, total = yield from objectives.OF_ONE_OUTPUT[name](rt, outputs, targets, weights, loss=True)
        assert total is not None
        return cat([grad.reshape(-1), total.reshape(-1)])

    return build


def _normal(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Rows brought to mean 0 and variance 1, as the norms of rows and of batches are."""
    normal, _ = yield from normalize.normalize_protocol(rt, x, dealer=dealer)
    return normal


def _metrics(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """Every metric of classes: confusion, precision and recall; their counts, before anything is opened."""
    job = PrivateJob(reveal=("confusion", "precision", "recall"))
    model = ModelSpec("two", (), 4, 2)
    outputs, targets = x.index((slice(None), slice(0, 2))), y.T.index((slice(None), slice(0, 2)))
    found = yield from answer_metrics.measure_protocol(rt, job, model, outputs, targets)
    return cat([one.share.reshape(-1) for one in found])


def _quantiles(rt: Runtime, x: Share, _: Share, *, dealer: int) -> MpcProtocol[Share]:
    """What columns are standardised by, by bisection."""
    return (yield from order_statistics.order_statistics_protocol(rt, x, [0, 2], 4, 3, dealer=dealer))


def _public_layer(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """A layer of a public base with an adapter."""
    factor = torch.arange(-4, 8).reshape(4, 3) << 14
    return (yield from additive.public_product_protocol(rt, x, factor, factor[0], also=(x, y)))


def _answered(rt: Runtime, x: Share, y: Share, *, dealer: int) -> MpcProtocol[Share]:
    """What trees ask."""
    return (yield from trees.answered_protocol(rt, x.with_f(1), y.T.with_f(1)))


LEARNED: dict[str, Callable[..., MpcProtocol[Share]]] = {
    "adam": _adam,
    "clipped": _clipped,
    "binary": _objective("binary"),
    "huber": _objective("huber"),
    "poisson": _objective("poisson"),
    "normal": _normal,
    "metrics": _metrics,
    "quantiles": _quantiles,
    "public layer": _public_layer,
    "trees": _answered,
}
"""What optimizers, objectives, metrics, statistics and layers compute of the protocols above, where everything is
proved; each has as many messages as all of the others."""


class LyingRuntime(Runtime):
    """A party that lies and stands by it: it alters what it is about to send, and goes on with the altered numbers.

    ``sends`` counts what it sends before the proof; ``lie`` alters the tensor of that number in place.
    """

    sends: int
    lie: Callable[[int, Tensor], None] | None

    def beside(self, stream: int) -> Runtime:
        found = super().beside(stream)
        found.sends, found.lie = 0, None  # type: ignore[attr-defined]
        return found

    def _resume(self, task: ProtocolTask, answer: list[Tensor] | None) -> list[ProtocolTask]:
        steps = task.steps
        task.steps = _Altering(self, steps)  # type: ignore[assignment]
        try:
            return super()._resume(task, answer)
        finally:
            task.steps = steps


class _Altering:
    def __init__(self, rt: LyingRuntime, steps: Any) -> None:
        self._rt, self._steps = rt, steps

    def send(self, answer: Any) -> Any:
        request = self._steps.send(answer)
        seen: list[Tensor] = []
        for _, kind, data in getattr(request, "sends", []):
            if kind in (*OF_A_PROOF, kinds.OPEN) or any(data is other for other in seen):
                continue
            seen.append(data)  # one number to both peers is one lie
            if self._rt.lie is not None:
                self._rt.lie(self._rt.sends, data)
            self._rt.sends += 1
        return request


def alter(data: Tensor, how: str, at: random.Random) -> None:
    """An error in one entry: 1, the top bit, random, one bit; or two entries swapped; or all of them.

    Narrow numbers count modulo 2^s, s >= 16, only: an error above would be none. Bytes come lowest first.
    """
    if not data.is_contiguous():  # the transpose of what lies in memory
        whole = data.contiguous()
        alter(whole, how, at)
        data.copy_(whole)
        return
    flat, bits = data.view(-1), {8: 64, 1: 8}.get(data.element_size(), 16)
    where = at.randrange(flat.numel())
    if data.element_size() == 1:
        where -= where % data.shape[-1]
    if how == "swapped" and flat.numel() > 1:
        other = (where + 1) % flat.numel()
        if data.element_size() > 1:
            flat[[where, other]] = flat[[other, where]]
        else:
            flat[where] ^= 1
    elif how == "all":
        flat += 1
    elif how == "bit":
        bit = 1 << at.randrange(bits)
        flat[where] ^= _signed(bit, bits) if data.element_size() > 1 else bit
    else:
        error = {"one": 1, "top": 1 << (bits - 1)}.get(how, at.randrange(1, 1 << bits))
        flat[where] += _signed(error, bits) if data.element_size() > 1 else error


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


@dataclass
class Ending:
    """How a run went at each party: its error, or what it opened; and all messages, by the step or the proof."""

    errors: list[ProtocolError | None]
    opened: list[Tensor | None]
    proved: list[ProvedStep | None]
    step: list[Message]
    proof: list[Message]
    sends: list[int]
    received: list[list[bytes]]
    second: list[Message]
    opening: list[Message]


Turns = Generator[ProtocolProgress[Any], None, T]
"""A party's course, which gives way wherever it waits for a round's messages."""


class Turn:
    """Whose turn it is, for what is patched in all parties at once and means one of them."""

    party = -1


def _in_turns(rt: Runtime, steps: MpcProtocol[T]) -> Turns[T]:
    """``rt.run``, but giving way in every round."""
    progress = rt.start(steps)
    while not progress.done:
        yield progress
        progress.advance()
    return progress.result


def take_turns(planes: LocalPlanes, course: Callable[[Runtime], Turns[T]]) -> list[T]:
    """What ``course`` returns at the three parties, which take turns in this thread: each goes on once its round's
    messages are there. Threads spend most of a small protocol's time on waking each other."""
    courses = [course(rt) for rt in planes.runtimes]
    results: dict[int, T] = {}
    waiting: dict[int, ProtocolProgress[Any] | None] = dict.fromkeys(range(len(courses)))
    hurried = -1  # who waits no longer for what nobody will send
    while waiting:
        moved = False
        for party, progress in list(waiting.items()):
            Turn.party = party
            try:
                if progress is None:
                    waiting[party] = next(courses[party])
                    moved = True
                    continue
                try:
                    there = planes.planes[party].arrived(progress.wants())
                except (ProtocolError, PeerLostError) as why:
                    moved = True
                    if not progress.patient:
                        waiting[party] = courses[party].throw(why)
                        continue
                    planes.wire.wait_s, there = 0.01, True  # what is not there will not come
                if there or party == hurried:
                    hurried = -1
                    waiting[party] = next(courses[party])
                    moved = True
            except StopIteration as end:
                results[party] = end.value
                del waiting[party]
                moved = True
        if not moved and (patient := [p for p, at in waiting.items() if at is not None and at.patient]):
            hurried = min(patient, key=lambda p: planes.runtimes[p].rounds)  # who has waited longest
            planes.wire.wait_s, moved = 0.01, True
        assert moved, f"parties {sorted(waiting)} wait for messages that nobody will send"
    return [results[party] for party in range(len(courses))]


def run_proved(
    build: Build,
    inputs: Sequence[Tensor],
    *,
    lie: Callable[[Message, bytes], bytes] | None = None,
    liar: int = -1,
    stands_by: Callable[[int, Tensor], None] | None = None,
    prove: bool = True,
    ring: GaloisRing | None = None,
    seed: int = 0,
    keep: bool = False,
    everything: bool = False,
    bit_degree: int = BIT_DEGREE,
    audit_one_in: int = 0,
    lie_again: Callable[[Message, bytes], bytes] | None = None,
    beside: bool = True,
    lie_in_opening: Callable[[Message, bytes], bytes] | None = None,
    bound: int = 0,
) -> Ending:
    """Share ``inputs``, run a protocol, prove it (``everything`` of it, or products), and open the result.

    ``beside``: opened in the round of the verdicts, as by a party of one worker; or after it, as by one of several.
    ``lie`` may change any message on its way; ``stands_by`` what party ``liar`` sends, and goes on with;
    ``lie_in_opening`` any message of the round of the opening, ``lie_again`` of the second round, on its way.
    ``bound``: from how many words on claims are proved in the middle of the step; 0 never.
    """
    second: list[Message] = []
    opening: list[Message] = []
    step: list[Message] = []
    proof: list[Message] = []
    counts: dict[tuple[int, int], int] = {}

    def tamper(src: int, dst: int, tag: Tag, body: bytes) -> bytes:
        number = counts[src, dst] = counts.get((src, dst), -1) + 1
        message = (src, dst, number, tag.kind, len(body))
        if tag.kind == kinds.OPEN:
            opening.append(message)
            return body if lie_in_opening is None else lie_in_opening(message, body)
        if tag.kind == kinds.FINDING:
            second.append(message)
            return body if lie_again is None else lie_again(message, body)
        (proof if tag.kind in OF_A_PROOF else step).append(message)
        return body if lie is None else lie(message, body)

    planes = LocalPlanes(seed, tamper=tamper, keep=keep)
    for rt in planes.runtimes:
        rt.ledger = ClaimLedger(everything=everything, audit_one_in=audit_one_in)
        rt.__class__ = LyingRuntime
        rt.sends, rt.lie = 0, stands_by if rt.party == liar else None  # type: ignore[attr-defined]
        if bound:
            in_instalments(rt, rt.ledger, bound)
    source = random.Random(seed).randbytes
    parts = [split(x, 16, source) for x in inputs]

    def body(rt: Runtime) -> Turns[tuple[ProtocolError | None, Tensor | None, ProvedStep | None]]:
        try:
            found = yield from _in_turns(rt, build(rt, *[share_of(p, rt.party, 16) for p in parts]))
            if prove and beside:
                together = prove_and_open_protocol(rt, [found], ring, bit_degree=bit_degree)
                proved, (opened,) = yield from _in_turns(rt, together)
                return None, opened, proved
            if prove:
                proved = yield from _in_turns(rt, prove_protocol(rt, ring, bit_degree=bit_degree))
            else:
                proved, rt.ledger = None, None
            return None, (yield from _in_turns(rt, open_ring_protocol(rt, found))), proved
        except ProtocolError as why:
            planes.wire.abort()
            return why, None, None
        except PeerLostError:
            return None, None, None

    ends = take_turns(planes, body)
    received = [
        [b for _, tag, b in planes.wire.received[p] if tag.kind == kinds.PROOF and len(b) % 8 == 0 and len(b) > 64]
        for p in range(3)
    ]
    sends = [rt.sends for rt in planes.runtimes]  # type: ignore[attr-defined]
    return Ending(
        [e[0] for e in ends], [e[1] for e in ends], [e[2] for e in ends], step, proof, sends, received, second, opening
    )


def judge(found: Ending, liar: int) -> None:
    """Nobody opened anything; an honest party has a named error, and a pair that an honest one names has the liar."""
    assert found.opened == [None] * 3
    honest = [found.errors[p] for p in range(3) if p != liar and found.errors[p] is not None]
    assert honest
    for error in honest:
        assert isinstance(error, ProtocolError)
        if isinstance(error, ProofFailedError):
            assert liar in error.pair


def altered(body: bytes, how: str, at: random.Random) -> bytes:
    """A message with an error in one lane of 8 bytes (or what there is): 1, 2^63, random, a bit; or two swapped."""
    if how == "swapped" and len(body) >= 16:
        lanes = len(body) // 8
        i, j = at.sample(range(lanes), 2)
        out = bytearray(body)
        out[8 * i : 8 * i + 8], out[8 * j : 8 * j + 8] = body[8 * j : 8 * j + 8], body[8 * i : 8 * i + 8]
        if bytes(out) != body:
            return bytes(out)
    size = min(8, len(body))
    start = size * at.randrange(len(body) // size)
    bits = 8 * size
    error = {"one": 1, "top": 1 << (bits - 1), "random": at.randrange(1, 1 << bits)}.get(how, 1 << at.randrange(bits))
    value = int.from_bytes(body[start : start + size], "little")
    changed = value ^ error if how == "bit" else (value + error) % (1 << bits)
    return body[:start] + changed.to_bytes(size, "little") + body[start + size :]


def lies_again(liar: int, at: random.Random) -> Callable[[Message, bytes], bytes]:
    """What the liar says in the second round: noise in some place, nothing but zeros, another's name, a wrong size."""
    how = at.choice(("noise", "zeros", "names", "short", "all"))
    one, other = (1 << p for p in range(3) if p != liar)
    named = at.choice((one, other, one | other, one, other, 0, 7, 255))

    def lie(message: Message, body: bytes) -> bytes:
        if message[0] != liar:
            return body
        if len(body) == 1:
            return bytes([named]) if how in ("names", "all") else body
        if how == "short":
            return body[:-8]
        if how == "zeros":
            return bytes(len(body))
        return altered(body, "random", at) if how in ("noise", "all") else body

    return lie


def misnamed(ended: Ending, liar: int) -> list[int]:
    """The honest parties that suspect honest ones only, or leave a reader to think so."""
    found = []
    for party, error in enumerate(ended.errors):
        if party == liar or not isinstance(error, ProofFailedError):
            continue
        finding = error.finding
        sees = () if finding is None else (finding.own, finding.suspects, finding.open_to)
        if not sees or not all(liar in one for one in sees) or error.party not in (-1, liar):
            found.append(party)
    return found
