"""The longest chain of messages through a step: how many of them wait for one another, over all workers.

A worker's rounds follow one another only where they are of one pass. Passes of several microbatches are on their way
side by side, and a stage begins a pass where the one before has ended it. So neither a worker's rounds nor the sum of
all stages' is how often a step waits for a link: that is the longest chain, and a link's delay is paid once for each
of its messages. What moves inside a party costs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.parallel.pipeline import FORWARD
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.live import LivePlane
from uvcc_engine.sharding.microbatches import stream_of

SENT: Final = "sent"
READ: Final = "read"
PASSED: Final = "passed"
TAKEN: Final = "taken"
Happening = tuple[str, int, int, int]
"""What happened at a worker: ``SENT`` to or ``READ`` from a peer (stream, peer, number of the message), ``PASSED`` to
or ``TAKEN`` from another stage (stream, direction, which)."""
_MAIN: Final = 0
_HANDED: Final = 2
"""From here on what is noted of a passage is a weight that is lent or repaid, not a microbatch's."""


@dataclass
class StepTrace:
    """Notes what a worker sends, reads, passes and takes, in order, while it is ``on``."""

    on: bool = False
    happenings: list[Happening] = field(default_factory=list)

    def watch(self, plane: LivePlane) -> None:
        """Note the messages of a plane from now on."""
        send, recv = plane.send, plane.recv

        def sent(dst: int, tag: Tag, payload: Any) -> None:
            if self.on:
                self.happenings.append((SENT, tag.stream, dst, tag.op))
            send(dst, tag, payload)

        def read(src: int, tag: Tag) -> memoryview:
            found = recv(src, tag)
            if self.on:
                self.happenings.append((READ, tag.stream, src, tag.op))
            return found

        plane.send, plane.recv = sent, read  # type: ignore[method-assign]

    def passage(self, direction: str, microbatch: int, which: int, passed: Tensor) -> None:
        """Note what moves between two stages; as ``parallel.pipeline.Pipe`` tells it."""
        if not self.on:
            return
        stream = _MAIN if which >= _HANDED else stream_of(direction, microbatch)
        what = PASSED if which % _HANDED else TAKEN
        number = microbatch + (1 << 32 if which >= _HANDED else 0)
        self.happenings.append((what, stream, int(direction == FORWARD), number))


def longest_chain(traces: Mapping[Coord, Sequence[Happening]]) -> int:
    """How many messages wait for one another in a step of which every worker noted all."""
    workers = {c: _Clocks(c, trace) for c, trace in traces.items()}
    under_way: dict[tuple[object, ...], int] = {}
    moved = True
    while moved:
        moved = False
        for worker in workers.values():
            moved |= worker.go_on(under_way)
    return max((max(worker.clocks.values()) for worker in workers.values()), default=0)


class _Clocks:
    """How long the chain is up to where each stream of a worker is."""

    def __init__(self, coord: Coord, trace: Sequence[Happening]) -> None:
        self._coord, self._trace, self._at = coord, trace, 0
        self.clocks: dict[int, int] = {_MAIN: 0}
        self._since = 0  # where the main stream was when the passes began

    def go_on(self, under_way: dict[tuple[object, ...], int]) -> bool:
        """As far as what is needed has been sent; whether it went any way."""
        began = self._at
        while self._at < len(self._trace):
            what, stream, other, number = self._trace[self._at]
            key = self._key(what, stream, other, number)
            if what in (READ, TAKEN) and key not in under_way:
                break
            self._begin(stream)
            if what in (SENT, PASSED):
                under_way[key] = self.clocks[stream]
            else:
                self.clocks[stream] = max(self.clocks[stream], under_way[key] + (what == READ))
            self._at += 1
        return self._at > began

    def _begin(self, stream: int) -> None:
        """The main stream goes on when every pass has ended; a pass back, when that forth has."""
        if stream == _MAIN:
            self._since = self.clocks[_MAIN] = max(self.clocks.values())
        elif stream not in self.clocks:
            forth = self.clocks.get(stream - 1, 0) if stream % 2 == 0 else 0
            self.clocks[stream] = max(self._since, forth)

    def _key(self, what: str, stream: int, other: int, number: int) -> tuple[object, ...]:
        """The same at both ends."""
        c = self._coord
        if what in (SENT, READ):
            src, dst = (c.party, other) if what == SENT else (other, c.party)
            return replace(c, party=src), dst, stream, number
        lent = number >> 32
        if lent:  # between the first stage and the one that has the last product: there are no others
            return replace(c, stage=-1), other, number
        step = 1 if other else -1
        at = c.stage if what == PASSED else c.stage - step
        return replace(c, stage=at), other, number
