"""Random messages between three parties, recorded at both ends."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Protocol

from uvcc_engine.transcript.formats import kinds

WIRE = (kinds.OPEN, kinds.RESHARE, kinds.DEALER)


class Recording(Protocol):
    """Anything with the recorder's two methods: a store."""

    def record(self, direction: int, peer: int, tag: tuple[int, int, int, int], payload: bytes) -> None: ...


def exchange(stores: Mapping[int, Recording], epoch: int, seed: int = 0, ops: int = 6) -> None:
    """Random messages between all pairs, recorded at both ends in each end's own order of events."""
    rng = random.Random(f"{seed}/{epoch}")
    for op in range(ops):
        for stream in (0, 1):
            for src in range(3):
                for dst in range(3):
                    if src == dst or rng.random() < 0.2:
                        continue
                    payload = rng.randbytes(rng.choice([1, 8, 32, 200]))
                    tag = (epoch, stream, op, rng.choice(WIRE))
                    stores[src].record(0, dst, tag, payload)
                    stores[dst].record(1, src, tag, payload)
