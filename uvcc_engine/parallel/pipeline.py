"""What moves between stages of one replica, inside the party: activations forth and gradients back, to neighbours; and
a weight that two stages compute with, lent before a step's first activation and repaid behind its last gradient.

Each direction has its own communicator, hence its own stream on a GPU, and a receive is posted for its microbatch when
that microbatch is due: a backward receive never stands in front of a forward send (``schedule.find_deadlock``). Sends
return at once; ``finish`` waits for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError, UvccError
from uvcc_engine.parallel.group import Communicator

FORWARD, BACKWARD, UPDATE = "F", "B", "U"
_MOST_AXES: Final = 4
_HANDED: Final = 1 << 24  # behind the tags of all microbatches
_HANDED_ON: Final = 2  # behind what of a pass is noted as received (0) and sent (1)
Record = Callable[[str, int, int, Tensor], None]


@dataclass
class Pipe:
    """One stage's ends of the pipe. ``record(direction, microbatch, which, tensor)`` notes what passes, if given;
    ``which``: received (0) or sent (1), and 2 more for what is handed to a stage that need be no neighbour."""

    forth: Communicator
    back: Communicator
    record: Record | None = None
    _sends: list[Callable[[], None]] = field(default_factory=list)
    _held: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _next: dict[str, int] = field(default_factory=dict)
    _from: int = 0

    @property
    def first(self) -> bool:
        return self.forth.index == 0

    @property
    def last(self) -> bool:
        return self.forth.index == self.forth.size - 1

    def send(self, direction: str, microbatch: int, x: Tensor) -> None:
        """Pass ``x`` (int64) on to the next stage (F) or the one before (B), when all microbatches before it are.

        The other end receives in order, and on a GPU's stream an early send would stand in front of the due one.
        """
        self._held[direction, microbatch] = x
        while (ready := self._held.pop((direction, due := self._next.get(direction, self._from)), None)) is not None:
            self._next[direction] = due + 1
            self._pass(direction, due, ready)

    def _pass(self, direction: str, microbatch: int, x: Tensor) -> None:
        group, to = self._end(direction, sending=True)
        self._put(group, to, 2 * microbatch, x)
        if self.record is not None:
            self.record(direction, microbatch, 1, x)

    def _put(self, group: Communicator, to: int, tag: int, x: Tensor) -> None:
        x = x.contiguous()
        shape = torch.tensor([x.dim(), *x.shape] + [0] * (_MOST_AXES - x.dim()), device=x.device)
        for k, part in enumerate((shape, x)):
            self._sends.append(group.send(part, to, tag + k))

    def hand(self, direction: str, to: int, first: int, x: Tensor) -> None:
        """Send ``x`` (int64) to a stage that need be no neighbour: forth while no activation is under way, back once
        every gradient was sent. ``first``: the microbatch with which the passes begin."""
        self._put(self._group(direction), to, _HANDED, x)
        if self.record is not None:
            self.record(direction, first, _HANDED_ON + 1, x)

    def take(self, direction: str, source: int, first: int, device: torch.device) -> Tensor:
        """The inverse of :meth:`hand`. Raises as :meth:`fetch`."""
        x = self._get(self._group(direction), source, _HANDED, device)
        if self.record is not None:
            self.record(direction, first, _HANDED_ON, x)
        return x

    def receive(self, direction: str, microbatch: int, device: torch.device) -> Tensor:
        """What the stage before (F) or the next one (B) sends for this microbatch."""
        return self.received(direction, microbatch, self.fetch(direction, microbatch, device))

    def received(self, direction: str, microbatch: int, x: Tensor) -> Tensor:
        """Note in the transcript what :meth:`fetch` received."""
        if self.record is not None:
            self.record(direction, microbatch, 0, x)
        return x

    def fetch(self, direction: str, microbatch: int, device: torch.device) -> Tensor:
        """Receive without a note: the note belongs to the thread that has the transcript.

        Raises ProtocolError where the neighbour announces another tensor than is due.
        """
        group, source = self._end(direction, sending=False)
        return self._get(group, source, 2 * microbatch, device)

    def _get(self, group: Communicator, source: int, tag: int, device: torch.device) -> Tensor:
        shape = torch.zeros(1 + _MOST_AXES, dtype=torch.int64, device=device)
        axes, *sides = group.receive(shape, source, tag).tolist()
        if not 1 <= axes <= _MOST_AXES or any(side < 0 for side in sides):
            raise ProtocolError(f"stage {source} announced a tensor of {axes} axes", "all ranks must run the same code")
        x = torch.empty(sides[:axes], dtype=torch.int64, device=device)
        group.receive(x, source, tag + 1)
        return x

    def finish(self, first: int = 0) -> None:
        """Wait until everything sent has left; afterwards the tensors may go, and microbatches count from ``first``."""
        self._from = first
        for wait in self._sends:
            wait()
        self._sends.clear()
        self._next.clear()

    def _end(self, direction: str, *, sending: bool) -> tuple[Communicator, int]:
        up = (direction == FORWARD) == sending
        group = self._group(direction)
        return group, group.index + (1 if up else -1)

    def _group(self, direction: str) -> Communicator:
        return self.forth if direction == FORWARD else self.back


class PipelineReceiver:
    """One direction's receives of a step, on a thread and communicator of their own.

    Each is posted when its microbatch is due, in order; nothing that this stage sends ever stands behind one, and its
    passes go on computing while it waits.
    """

    def __init__(
        self,
        pipe: Pipe,
        direction: str,
        microbatches: int,
        device: torch.device,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """``told`` is called, on that thread, whenever :meth:`arrived` has another answer."""
        self._pipe, self._direction, self._device, self._told = pipe, direction, device, told
        self._due = -1
        self._there: dict[int, Tensor] = {}
        self._failed: UvccError | None = None
        self._news = threading.Condition()
        name = f"intake {direction}"
        threading.Thread(target=self._receive, args=(microbatches,), name=name, daemon=True).start()

    def _receive(self, microbatches: int) -> None:
        try:
            for m in range(microbatches):
                with self._news:
                    while self._due < m:
                        self._news.wait()
                x = self._pipe.fetch(self._direction, m, self._device)
                with self._news:
                    self._there[m] = x
                    self._news.notify_all()
                self._told()
        except UvccError as error:
            with self._news:
                self._failed = error
                self._news.notify_all()
            self._told()

    def _answered(self, microbatch: int) -> bool:
        return microbatch in self._there or self._failed is not None

    def arrived(self, microbatch: int) -> bool:
        """Whether :meth:`take` has an answer. From the first question on the microbatch is due."""
        with self._news:
            if microbatch > self._due:
                self._due = microbatch
                self._news.notify_all()
            return self._answered(microbatch)

    def take(self, microbatch: int) -> Tensor:
        """What came for this microbatch, once, in the shape that was announced; waits for it.

        Raises PeerLostError or ProtocolError as receives do.
        """
        self.arrived(microbatch)
        with self._news:
            self._news.wait_for(lambda: self._answered(microbatch))
            if microbatch not in self._there:
                assert self._failed is not None
                raise self._failed
            x = self._there.pop(microbatch)
        return self._pipe.received(self._direction, microbatch, x)


@dataclass
class Gantt:
    """When each microbatch was worked on: (phase, microbatch, start, end), wall clock, for one step. Those that are in
    work at a time overlap."""

    ticks: list[tuple[str, int, float, float]] = field(default_factory=list)

    _open: dict[tuple[str, int], float] = field(default_factory=dict)

    def begin(self, phase: str, microbatch: int) -> None:
        self._open[phase, microbatch] = time.time()

    def end(self, phase: str, microbatch: int) -> None:
        self.ticks.append((phase, microbatch, self._open.pop((phase, microbatch)), time.time()))
