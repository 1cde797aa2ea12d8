"""Several microbatches at a time on one thread: while one waits for a message of the other parties, another computes.

Passes start in the order of the schedule, at most ``depth`` at a time; a pass goes on whenever all messages of its
round are there. What is computed does not depend on who went first: every pass has its own stream, hence its own masks
and message numbers, and what passes add to (gradients, losses) are sums modulo 2^64. Where tensor ranks work together
inside a pass, the first of them chooses who goes on and tells the others, so that all meet in the same collectives.

Over the three parties nothing can get stuck: they start the passes in one order, so the oldest that is unfinished
anywhere is at work in all three.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from uvcc_engine.mpc.foundation.runtime import ProtocolProgress
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.plane.api import WatchedPlane

Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Passage:
    """One pass of a microbatch: what it is called, what must be done before, and how it starts and ends.

    ``arrived`` says whether ``start`` would find its input without waiting.
    """

    name: Name
    after: frozenset[Name]
    arrived: Callable[[], bool]
    start: Callable[[], ProtocolProgress[Any]]
    finish: Callable[[Any], None]


class Overlap:
    """Runs passes on one plane. ``idle_s`` is how long it has waited with nothing to compute."""

    def __init__(self, plane: WatchedPlane, depth: int, tp: Communicator) -> None:
        self._plane = plane
        self._depth = depth
        self._tp = tp
        self._active: list[tuple[Passage, ProtocolProgress[Any]]] = []
        self.idle_s = 0.0

    def run(self, passes: Iterable[Passage]) -> None:
        """All of them to their end. Raises what they raise."""
        left, done = deque(passes), set[Name]()
        self._active = []
        while left or self._active:
            free = len(self._active) < self._depth and bool(left) and left[0].after <= done
            chosen = self._turns(left[0] if free else None)
            for turn, (_, progress) in enumerate(self._active):
                if chosen >> turn & 1:
                    progress.advance()
            if chosen >> self._depth & 1:
                began = left.popleft()
                self._active.append((began, began.start()))
            for passage, progress in self._active:
                if progress.done:
                    passage.finish(progress.result)
                    done.add(passage.name)
            self._active = [(passage, progress) for passage, progress in self._active if not progress.done]

    def _turns(self, head: Passage | None) -> int:
        """Who goes on now: bit k for the active pass k, bit ``depth`` for the start of ``head``."""
        if not self._active:
            return 1 << self._depth
        if head is None and len(self._active) == 1:
            return 1  # it waits for its messages by itself, taking each as it comes
        if self._tp.size == 1:
            return self._choose(head)
        told = torch.tensor([self._choose(head) if self._tp.index == 0 else 0])
        return int(self._tp.broadcast_(told, 0).item())

    def _choose(self, head: Passage | None) -> int:
        waits = [progress.wants() for _, progress in self._active]
        while True:
            found = sum(1 << turn for turn, wants in enumerate(waits) if self._plane.arrived(wants))
            if head is not None and head.arrived():
                found |= 1 << self._depth
            if found:
                return found
            began = time.monotonic()
            self._plane.wait_any(waits, head.arrived if head is not None else None)
            self.idle_s += time.monotonic() - began
