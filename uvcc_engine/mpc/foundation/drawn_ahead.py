"""Random numbers of the next epoch, drawn on a thread of its own while this one is computed.

What a program draws depends on no data, and an epoch's program is nearly always that of the epoch before: so the draws
of one say which the next will make. A draw that was foretold lies ready when the program comes to it, any other is made
where it is needed. The bits are the same either way, and every draw takes its place in its stream, which gives no place
twice. Numbers that nobody has taken yet fill at most a bounded memory.

This gains time where a core is idle and the library enciphers without the interpreter's lock, as ``cryptography`` does
from version 50 on; with an older one, the thread and the program would wait for each other.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import cryptography
import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.prg import TAG, Stream

MOST: Final = 64 << 20
_UNLOCKED: Final = 50  # the version of the library that first lets other threads run meanwhile
_LAST: Final = (1 << 32) - 1
Draw = tuple[int, int, int, int]
"""Component, operation, first piece, bytes."""


def draws_unlocked() -> bool:
    """Whether other threads run while the library draws."""
    return int(cryptography.__version__.partition(".")[0]) >= _UNLOCKED


@dataclass(slots=True)
class _Place:
    """Where a program is, and what lies ready for it: by epoch and by how many draws come before."""

    epoch: int = -1
    drawn: list[Draw] = field(default_factory=list)
    ready: dict[tuple[int, int], tuple[Draw, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The draws that are foretold for one epoch of one program, in order."""

    place: _Place
    streams: Mapping[int, Stream]
    stream: int
    epoch: int
    draws: list[Draw]

    def over(self) -> bool:
        """Whether the program is past this epoch."""
        return self.place.epoch > self.epoch

    def passed(self, index: int) -> bool:
        """Whether the program has made the draw at this index by itself."""
        return self.over() or (self.place.epoch == self.epoch and len(self.place.drawn) > index)


class _Shared:
    """What the computing thread and the drawing thread share; ``changed`` guards all of it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.changed = threading.Condition()
        self.plans: deque[_Plan] = deque()
        self.held = 0
        self.closed = False
        self.awaited: Callable[[], bool] | None = None  # by the drawing thread, if it rests

    def _rest_until(self, found: Callable[[], bool]) -> None:
        """The drawing thread waits; ``changed`` is held."""
        self.awaited = found
        self.changed.notify_all()
        self.changed.wait_for(found)
        self.awaited = None

    def resting(self) -> bool:
        """Whether the drawing thread has nothing that it could do."""
        return self.closed or (self.awaited is not None and not self.awaited())

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.plans.clear()
            self.changed.notify_all()

    def next_plan(self) -> _Plan | None:
        with self.changed:
            self._rest_until(lambda: self.closed or bool(self.plans))
            return None if self.closed else self.plans.popleft()

    def room_for(self, plan: _Plan, index: int) -> bool:
        """Wait until there is memory for a draw and take it. False where nobody will need the draw any more."""
        nbytes = plan.draws[index][3]

        def settled() -> bool:
            return self.closed or plan.passed(index) or self.held + nbytes <= self.most

        with self.changed:
            if not settled():
                self._rest_until(settled)
            if self.closed or plan.passed(index):
                return False
            self.held += nbytes
            return True

    def put(self, plan: _Plan, index: int, numbers: Tensor) -> None:
        draw = plan.draws[index]
        with self.changed:
            if plan.passed(index) or self.closed:
                self.held -= draw[3]
            else:
                plan.place.ready[plan.epoch, index] = draw, numbers


def _work(shared: _Shared) -> None:
    """The drawing thread: one plan after the other, until its owner is gone."""
    while (plan := shared.next_plan()) is not None:
        for index, (component, op, piece, nbytes) in enumerate(plan.draws):
            if plan.over() or shared.closed:
                break
            if nbytes > shared.most or not shared.room_for(plan, index):
                continue
            memory = torch.empty(nbytes + TAG, dtype=torch.uint8)
            plan.streams[component].generate((plan.epoch, plan.stream, op), piece, memory[:nbytes], memory)
            shared.put(plan, index, memory[:nbytes])
        del plan


class DrawAhead:
    """The drawing thread of one worker, for all of its runtimes. It ends when they are gone."""

    device: Final = torch.device("cpu")

    def __init__(self, most: int = MOST) -> None:
        """``most``: bytes of numbers that may lie ready."""
        self._shared = _Shared(most)
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._shared.close)

    def forecast(self, streams: Mapping[int, Stream], stream: int) -> ForetoldDraws:
        """That of a runtime which draws from ``streams`` in the stream ``stream`` of its messages."""
        return ForetoldDraws(self, self._shared, streams, stream)

    def start(self) -> None:
        """Have the thread run. Called by the computing thread only."""
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._shared,), name="draws ahead", daemon=True)
            self._thread.start()

    def close(self, wait_s: float = 10.0) -> None:
        """End the thread; what was foretold is drawn where it is needed from now on."""
        self._shared.close()
        if self._thread is not None:
            self._thread.join(wait_s)

    def settle(self, wait_s: float = 10.0) -> bool:
        """Wait until all that is foretold and has room is drawn; whether that came to be within the time."""
        if self._thread is None:
            return True
        with self._shared.changed:
            return self._shared.changed.wait_for(self._shared.resting, wait_s)

    @property
    def held(self) -> int:
        """Bytes that lie ready or are being drawn."""
        return self._shared.held


class ForetoldDraws:
    """What one program has drawn in this epoch, and what of it lies ready. Used by its computing thread."""

    def __init__(self, owner: DrawAhead, shared: _Shared, streams: Mapping[int, Stream], stream: int) -> None:
        self._owner, self._shared = owner, shared
        self._streams = {component: one.twin() for component, one in streams.items()}
        self._stream = stream
        self._place = _Place()
        self.met = self.missed = 0  # draws that lay ready, and those that did not

    def begin(self, epoch: int) -> None:
        """Enter an epoch, and have the one after it drawn like the one that ends."""
        shared, place = self._shared, self._place
        with shared.changed:
            draws, place.drawn, place.epoch = place.drawn, [], epoch
            for key in [key for key in place.ready if key[0] != epoch]:
                shared.held -= place.ready.pop(key)[0][3]
            if draws and epoch < _LAST and not shared.closed:
                shared.plans.append(_Plan(place, self._streams, self._stream, epoch + 1, draws))
            shared.changed.notify_all()
        if draws:
            self._owner.start()

    def take(self, component: int, op: int, piece: int, nbytes: int) -> Tensor | None:
        """The numbers of the program's next draw, bytes, if they lie ready."""
        draw, place, shared = (component, op, piece, nbytes), self._place, self._shared
        with shared.changed:
            found = place.ready.pop((place.epoch, len(place.drawn)), None)
            place.drawn.append(draw)
            if found is not None:
                shared.held -= found[0][3]
                shared.changed.notify_all()
        if found is None or found[0] != draw:
            self.missed += 1
            return None
        self.met += 1
        return found[1]
