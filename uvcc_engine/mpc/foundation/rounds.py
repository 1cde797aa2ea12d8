"""Communication rounds as data, and how the messages of a round are packed.

A protocol is a generator that yields one ``Round`` per communication round and is resumed with what it asked for.
``par`` runs several in lock-step. Small parts for one peer leave as one message; large ones leave as soon as they
exist, so that a long vector cut into chunks is computed, sent and received at the same time.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.foundation.staging import Staging
from uvcc_engine.plane.api import Tag
from uvcc_engine.transcript.formats import kinds

T = TypeVar("T")
LARGE = 1 << 18  # bytes: a part of this size is a message of its own
Want = tuple[int, int, torch.dtype, tuple[int, ...]]
_NUMPY: Final = {
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}


@dataclass(slots=True)
class Round:
    """What one protocol sends and expects in one round. Both ends list parts in the same order.

    ``sends``: (peer, kind, tensor); ``wants``: (peer, kind, dtype, shape). ``proved``: claims in the ledger cover all
    that is sent. ``opening``: what becomes public is opened, checked (``opening``). ``patient``: a peer that is silent
    or breaks a rule ends nothing, and what it owes is answered with None.
    """

    sends: list[tuple[int, int, Tensor]] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    proved: bool = False
    opening: bool = False
    patient: bool = False

    def send(self, peer: int, kind: int, data: Tensor) -> None:
        """Send ``data``, of any shape, to ``peer`` in this round, as a message of ``kind``."""
        self.sends.append((peer, kind, data))

    def want(self, peer: int, kind: int, dtype: torch.dtype, *shape: int) -> None:
        """Expect a tensor of ``dtype`` and ``shape`` from ``peer`` in this round."""
        self.wants.append((peer, kind, dtype, shape))


@dataclass(slots=True)
class Fork:
    """Asks the runtime to run several protocols side by side; answered with their results."""

    branches: list[Generator[Any, Any, Any]]


MpcProtocol = Generator[Any, Any, T]
"""A protocol of multi-party computation with result ``T``: yields ``Round`` (answered with tensors) or ``Fork``.

Functions named ``..._protocol`` return one, and ``Runtime.run`` executes it. It is not called ``Protocol`` because
several modules that import it import ``typing.Protocol``, too.
"""


def par(*steps: MpcProtocol[T]) -> MpcProtocol[list[T]]:
    """Run protocols side by side, one round of each per round. Results in the order given."""
    results: list[T] = yield Fork(list(steps))
    return results


def exchanged(courses: Mapping[int, MpcProtocol[T]]) -> dict[int, T]:
    """What protocols return that are run in this process, by party: each round's messages are handed over."""
    left, answers, results = dict(courses), dict.fromkeys(courses, None), {}
    while left:
        rounds: dict[int, Round] = {}
        for party, course in list(left.items()):
            try:
                rounds[party] = course.send(answers[party])
            except StopIteration as end:
                results[party] = end.value
                del left[party]
        sent = {
            (party, to): iter([data for peer, _, data in one.sends if peer == to])
            for party, one in rounds.items()
            for to in courses
        }
        for party, one in rounds.items():
            answers[party] = [next(sent[peer, party]) for peer, *_ in one.wants]
    return results


def nbytes(want: Want) -> int:
    """Size of a part on the wire."""
    count = want[2].itemsize
    for side in want[3]:
        count *= side
    return count


def message_kind(found: list[int]) -> int:
    """The kind of a packed message: both ends compute it from the same parts. OPEN outranks all others."""
    return kinds.OPEN if kinds.OPEN in found else min(found)


class RoundOutbox:
    """Parts for one peer in one round, grouped into messages by size alone (the receiver does the same)."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._kinds: list[int] = []
        self._parts: list[Tensor] = []
        self._size = 0

    def add(self, kind: int, data: Tensor) -> list[tuple[int, memoryview]]:
        """Take a part; returns the (kind, payload) messages that are complete now."""
        part = self._staging.begin(data)
        if part.nbytes >= LARGE:
            out = self.flush()
            self._staging.arrived()
            return [*out, (kind, _body(part))]
        self._kinds.append(kind)
        self._parts.append(part)
        self._size += part.nbytes
        return self.flush() if self._size >= LARGE else []

    def flush(self) -> list[tuple[int, memoryview]]:
        """What is left, as at most one message."""
        if not self._kinds:
            return []
        self._staging.arrived()
        bodies = [_body(part) for part in self._parts]
        body = bodies[0] if len(bodies) == 1 else memoryview(b"".join(bodies))
        out = [(message_kind(self._kinds), body)]
        self._kinds, self._parts, self._size = [], [], 0
        return out


def _body(part: Tensor) -> memoryview:
    return part.numpy().data.cast("B") if part.numel() else memoryview(b"")


class RoundInbox:
    """The parts that are due from one peer in one round, unpacked as they are asked for."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._due: list[list[Want]] = []  # messages to come, each a list of parts
        self._open: list[Want] = []
        self._size = 0
        self._ready: list[Tensor] = []

    def expect(self, want: Want) -> None:
        """Note a part, in program order; mirrors ``RoundOutbox.add``."""
        size = nbytes(want)
        if size >= LARGE:
            self.seal()
            self._due.append([want])
            return
        self._open.append(want)
        self._size += size
        if self._size >= LARGE:
            self.seal()

    def seal(self) -> None:
        """No further part joins the message that is being collected."""
        if self._open:
            self._due.append(self._open)
            self._open, self._size = [], 0

    def kinds(self) -> list[int]:
        """The kinds of the messages that are still to come, in order."""
        return [message_kind([kind for _, kind, _, _ in parts]) for parts in self._due]

    def next_message(self) -> list[Want] | None:
        """The parts of the message to receive before the next part can be taken; None if it is here."""
        return None if self._ready else self._due.pop(0)

    def fill(self, payload: memoryview, parts: list[Want], peer: int, tag: Tag) -> None:
        """Cut a message into its parts. ProtocolError naming ``peer`` if its size is not what the program expects."""
        expected = sum(nbytes(want) for want in parts)
        if payload.nbytes != expected:
            raise ProtocolError(
                f"party {peer} sent {payload.nbytes} bytes for {tag}, expected {expected}",
                "the parties run different programs or shapes; compare code and job hashes",
                party=peer,
            )
        raw = bytearray(payload) if payload.readonly else payload
        at = 0
        cut = []
        for want in parts:
            size = nbytes(want)
            cut.append(_tensor(raw, at, size, want))
            at += size
        self._ready += reversed(self._staging.bring(cut))

    def take(self) -> Tensor:
        """The next part, in program order and in the shape that was asked for."""
        return self._ready.pop()


def _tensor(raw: bytearray | memoryview, at: int, size: int, want: Want) -> Tensor:
    _, _, dtype, shape = want
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    if at % dtype.itemsize:  # torch wants aligned views
        raw, at = bytearray(raw[at : at + size]), 0
    return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], raw, at))
