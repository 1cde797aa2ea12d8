"""What every layer costs and how large its numbers become, seen beside a training and without changing it.

A layer's protocols are wrapped: the rounds that pass through are counted, the shares that come out are put together
from all three parties' (only a simulation can). No protocol draws, sends or computes anything else than without.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.model.layer_spec import LayerSpec
from uvcc_engine.model.registry import type_of
from uvcc_engine.model.secret_layer import Layer
from uvcc_engine.mpc.foundation.rounds import Fork, Round
from uvcc_engine.mpc.foundation.share import Share

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
_METHODS: Final = {
    "forward_protocol": FORWARD,
    "after_protocol": FORWARD,
    "input_gradient_protocol": BACKWARD,
    "before_protocol": BACKWARD,
    "weight_gradient_protocol": UPDATE,
    "grown_protocol": UPDATE,
    "gains_protocol": FORWARD,
    "moved_protocol": UPDATE,
}
_RING_BITS: Final = 62  # what a product before its truncation may take, sign included


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer of a simulated training: rounds and bytes (of all three parties) per step, and its largest output.

    A ReLU behind a product is computed in the product's rounds: the two are counted at the ReLU. ``headroom``: how many
    bits larger the outputs could be before a product of them at the job's scale overflows.
    """

    layer: str
    rounds: dict[str, float]
    bytes: dict[str, float]
    largest: float
    headroom: float

    @property
    def integer_bits(self) -> int:
        """Bits left of the point that the outputs take, with the sign."""
        return 1 + max(0, math.ceil(math.log2(self.largest + 2.0**-30))) if self.largest > 0 else 1


@dataclass(slots=True)
class _Count:
    rounds: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Meter:
    """Of one party: what each (layer, phase) took, and the request that was counted last."""

    counts: dict[tuple[int, str], _Count] = field(default_factory=dict)
    seen: object = None
    on: bool = True


class Metering:
    """Watches the layers of three parties; ``attach`` each party's own, ``costs`` when they have trained."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        self._names = [f"{at} {type_of(spec).name}" for at, spec in enumerate(flat_specs(specs))]
        self._meters = [_Meter() for _ in range(PARTIES)]
        self._peaks = _Peaks(len(self._names))

    def attach(self, party: int, layers: Sequence[Layer]) -> None:
        """Wrap the protocols of these layers, given in the order of the specs."""
        for at, layer in enumerate(layers):
            for name, phase in _METHODS.items():
                if hasattr(layer, name):
                    setattr(layer, name, self._wrapped(party, at, phase, getattr(layer, name)))

    def _wrapped(
        self, party: int, at: int, phase: str, plain: Callable[..., Generator[Any, Any, Any]]
    ) -> Callable[..., Generator[Any, Any, Any]]:
        meter = self._meters[party]
        count = meter.counts.setdefault((at, phase), _Count())

        def protocol(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            if not meter.on:
                return (yield from plain(*args, **kwargs))
            found = yield from _metered(plain(*args, **kwargs), count, meter)
            if phase == FORWARD and isinstance(found, Share):
                self._peaks.note(party, at, found)
            return found

        return protocol

    def stop(self, party: int) -> None:
        """Count no more of what this party does."""
        self._meters[party].on = False

    def costs(self, steps: int, frac_bits: int) -> list[LayerCost]:
        """What each layer costs in one step, on average over ``steps``."""
        return [self._cost(at, name, max(1, steps), frac_bits) for at, name in enumerate(self._names)]

    def _cost(self, at: int, name: str, steps: int, frac_bits: int) -> LayerCost:
        rounds: dict[str, float] = {}
        sent: dict[str, float] = {}
        for phase in (FORWARD, BACKWARD, UPDATE):
            counts = [meter.counts.get((at, phase), _Count()) for meter in self._meters]
            rounds[phase] = max(c.rounds for c in counts) / steps
            sent[phase] = sum(c.bytes for c in counts) / steps
        largest = self._peaks.largest(at, frac_bits)
        taken = math.log2(largest) if largest > 0 else 0.0
        return LayerCost(name, rounds, sent, largest, _RING_BITS - 2 * frac_bits - taken)


def flat_specs(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """All layers of a model, those inside of blocks in their place."""
    found: list[LayerSpec] = []
    for spec in specs:
        found += flat_specs(spec.inner) if spec.block else [spec]
    return found


def _metered(steps: Generator[Any, Any, Any], count: _Count, meter: _Meter) -> Generator[Any, Any, Any]:
    """The same protocol; rounds and bytes that pass through are added to ``count``, side by side the longest branch.

    What a wrapped protocol inside of it has counted already (``meter.seen``) passes on uncounted.
    """
    answer: Any = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as done:
            return done.value
        if request is meter.seen:
            answer = yield request
        elif isinstance(request, Fork):
            counts = [_Count() for _ in request.branches]
            branches = [_metered(b, c, meter) for b, c in zip(request.branches, counts, strict=True)]
            meter.seen = fork = Fork(branches)
            answer = yield fork
            count.rounds += max((c.rounds for c in counts), default=0)
            count.bytes += sum(c.bytes for c in counts)
        else:
            assert isinstance(request, Round)
            meter.seen = request
            count.rounds += 1
            count.bytes += sum(t.numel() * t.element_size() for _, _, t in request.sends)
            answer = yield request


class _Peaks:
    """The largest absolute ring element that came out of each layer. A value is known once all three gave theirs."""

    def __init__(self, layers: int) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], list[Tensor]] = {}
        self._given = [[0] * layers for _ in range(PARTIES)]
        self._largest = [0] * layers

    def note(self, party: int, at: int, found: Share) -> None:
        """One party's first component; the third to come puts them together."""
        with self._lock:
            turn = self._given[party][at]
            self._given[party][at] += 1
            parts = self._waiting.setdefault((at, turn), [])
            parts.append(found.first.clone())
            if len(parts) == PARTIES:
                del self._waiting[at, turn]
                whole = parts[0] + parts[1] + parts[2]
                self._largest[at] = max(self._largest[at], int(whole.abs().max()) if whole.numel() else 0)

    def largest(self, at: int, frac_bits: int) -> float:
        return float(self._largest[at] / 2.0**frac_bits)
