"""What moves between neighbouring stages of one replica, inside the party: activations forth, gradients back.

Each direction has its own communicator, hence its own stream on a GPU, and a receive is posted for its microbatch when
that microbatch is due: a backward receive never stands in front of a forward send (``schedule.find_deadlock``). Sends
return at once; ``finish`` waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.parallel.groups import Group

FORWARD, BACKWARD, UPDATE = "F", "B", "U"
_MOST_AXES: Final = 4
Record = Callable[[str, int, int, Tensor], None]


@dataclass
class Pipe:
    """One stage's ends of the pipe. ``record(direction, microbatch, sent, tensor)`` notes what passes, if given."""

    forth: Group
    back: Group
    record: Record | None = None
    _sends: list[Callable[[], None]] = field(default_factory=list)

    @property
    def first(self) -> bool:
        return self.forth.index == 0

    @property
    def last(self) -> bool:
        return self.forth.index == self.forth.size - 1

    def send(self, direction: str, microbatch: int, x: Tensor) -> None:
        """Pass ``x`` (int64) on to the next stage (F) or the one before (B)."""
        group, to = self._end(direction, sending=True)
        x = x.contiguous()
        shape = torch.tensor([x.dim(), *x.shape] + [0] * (_MOST_AXES - x.dim()), device=x.device)
        for k, part in enumerate((shape, x)):
            self._sends.append(group.send(part, to, 2 * microbatch + k))
        if self.record is not None:
            self.record(direction, microbatch, 1, x)

    def receive(self, direction: str, microbatch: int, device: torch.device) -> Tensor:
        """What the stage before (F) or the next one (B) sends for this microbatch."""
        group, source = self._end(direction, sending=False)
        shape = torch.zeros(1 + _MOST_AXES, dtype=torch.int64, device=device)
        axes, *sides = group.receive(shape, source, 2 * microbatch).tolist()
        if not 1 <= axes <= _MOST_AXES or any(side < 0 for side in sides):
            raise ProtocolError(f"stage {source} announced a tensor of {axes} axes", "all ranks must run the same code")
        x = torch.empty(sides[:axes], dtype=torch.int64, device=device)
        group.receive(x, source, 2 * microbatch + 1)
        if self.record is not None:
            self.record(direction, microbatch, 0, x)
        return x

    def finish(self) -> None:
        """Wait until everything sent has left; afterwards the tensors may go."""
        for wait in self._sends:
            wait()
        self._sends.clear()

    def _end(self, direction: str, *, sending: bool) -> tuple[Group, int]:
        up = (direction == FORWARD) == sending
        group = self.forth if direction == FORWARD else self.back
        return group, group.index + (1 if up else -1)


@dataclass
class Gantt:
    """When each microbatch was worked on: (phase, microbatch, start, end), wall clock, for one step."""

    ticks: list[tuple[str, int, float, float]] = field(default_factory=list)

    def note(self, phase: str, microbatch: int, start: float) -> None:
        self.ticks.append((phase, microbatch, start, time.time()))
