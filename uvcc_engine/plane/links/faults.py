"""Faults from a seed: what a bad network does to frames, as a wrapper around any link.

Arriving frames are dropped, repeated, held back, overtaken, damaged or cut off for a while. The same seed and the same
frames give the same faults. Restarts of a relay or of a receiver are done by whoever owns the process; the plane under
test is told nothing.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from uvcc_engine.contract.job.link_spec import FAULT_KINDS
from uvcc_engine.contract.parsing import strict
from uvcc_engine.plane.api import Buffer
from uvcc_engine.plane.links.link import Arrival, Link, LinkWrapper, no_work


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Chances per frame between 0 and 1, durations in seconds. A partition cuts off one peer after the other."""

    seed: int = 0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.02
    latency_s: float = 0.0  # for every frame: the one-way delay of a distant peer
    partition_every_s: float = 0.0  # 0: never
    partition_s: float = 0.2

    @classmethod
    def from_json(cls, data: object) -> FaultPlan:
        """Read strictly. Raises ConfigError."""
        return strict.read(cls, data, "faults")


class FaultInjector:
    """Decides what happens to each frame. No I/O; the clock is given."""

    def __init__(self, plan: FaultPlan, party: int, now: float) -> None:
        self._plan = plan
        self._random = random.Random(f"{plan.seed}/{party}")
        self._held: list[tuple[float, int, Arrival]] = []
        self._count = 0
        self._start = now
        self.injected = dict.fromkeys(FAULT_KINDS, 0)

    def cut_off(self, now: float) -> int | None:
        """The peer that cannot be reached now, if any."""
        every = self._plan.partition_every_s
        if not every:
            return None
        turn, phase = divmod(now - self._start, every)
        return int(turn) % 3 if turn >= 1 and phase < self._plan.partition_s else None

    def _hit(self, name: str) -> bool:
        if self._random.random() >= getattr(self._plan, name):
            return False
        self.injected[name] += 1
        return True

    def put(self, arrival: Arrival, now: float) -> None:
        """Take a frame from the network."""
        if arrival.header.src == self.cut_off(now):
            self.injected["partition"] += 1
            return
        if self._hit("drop"):
            return
        copies = [arrival, arrival] if self._hit("duplicate") else [arrival]
        for copy in copies:
            if self._hit("corrupt"):
                copy = arrival._replace(body=self._damaged(arrival.body))
            at = now + self._plan.latency_s
            if self._hit("reorder"):
                at += self._plan.delay_s / 10
            if self._hit("delay"):
                at += self._plan.delay_s * self._random.random()
            self._count += 1
            heapq.heappush(self._held, (at, self._count, copy))

    def _damaged(self, body: Buffer) -> bytes:
        damaged = bytearray(body)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)

    def due(self, now: float) -> list[Arrival]:
        """Frames whose time has come."""
        found = []
        while self._held and self._held[0][0] <= now:
            found.append(heapq.heappop(self._held)[2])
        return found

    def next_due(self) -> float:
        return self._held[0][0] if self._held else float("inf")


class FaultyLink(LinkWrapper[Link]):
    """A link whose arrivals go through a :class:`FaultInjector`."""

    def __init__(self, inner: Link, plan: FaultPlan, party: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self.faults = FaultInjector(plan, party, clock())

    def exchange(self, wait: float, src: int | None, meanwhile: Callable[[], None] = no_work) -> list[Arrival]:
        now = self._clock()
        arrivals = self._inner.exchange(max(0.0, min(wait, self.faults.next_due() - now)), src, meanwhile)
        now = self._clock()
        for arrival in arrivals:
            # a link may reuse the memory of a body at its next exchange; what is held back has to be a copy
            self.faults.put(arrival._replace(body=bytes(arrival.body)), now)
        return self.faults.due(now)
