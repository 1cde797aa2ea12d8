"""What a protocol runs on: the party's place, its random streams, its message rounds, and what they cost.

Protocols are generators that yield one ``Round`` per communication round and are driven by ``Runtime.run``. ``par``
merges several of them in lock-step: independent messages of one round to one peer leave as one packed message.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, ProtocolError
from uvcc_engine.mpc.prg import OWN, Draws, PairKeys, Stream, derive_key
from uvcc_engine.plane.api import Plane, Tag
from uvcc_engine.transcript import kinds

T = TypeVar("T")


@dataclass(slots=True)
class Round:
    """What one protocol sends and expects in one round. Both ends list parts in the same order.

    ``sends``: (peer, kind, tensor); ``wants``: (peer, kind, dtype, shape).
    """

    sends: list[tuple[int, int, Tensor]] = field(default_factory=list)
    wants: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = field(default_factory=list)

    def send(self, peer: int, kind: int, data: Tensor) -> None:
        self.sends.append((peer, kind, data))

    def want(self, peer: int, kind: int, dtype: torch.dtype, *shape: int) -> None:
        self.wants.append((peer, kind, dtype, shape))


Steps = Generator[Round, list[Tensor], T]


class Runtime:
    """One party's session of one (stage, tensor) subsession. Used by one thread."""

    def __init__(
        self,
        party: int,
        plane: Plane,
        keys: PairKeys,
        sid_sub: bytes,
        attempt: int = 0,
        *,
        stream: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        if party not in (0, 1, 2):
            raise ConfigError(f"party {party}", "there are three parties: 0, 1 and 2")
        if len(sid_sub) != 32:
            raise ConfigError(f"sid_sub has {len(sid_sub)} bytes", "use uvcc_engine.parallel.ids.sid_sub")
        self.party = party
        self.next = (party + 1) % 3
        self.prev = (party + 2) % 3
        self.plane = plane
        self.stream = stream
        self.device = torch.device(device)
        self._streams = {
            party: Stream(derive_key(keys.prev, sid_sub, attempt, f"component{party}"), f"component {party}"),
            self.next: Stream(
                derive_key(keys.next, sid_sub, attempt, f"component{self.next}"), f"component {self.next}"
            ),
            OWN: Stream(derive_key(keys.own, sid_sub, attempt, f"own{party}"), "own"),
        }
        self._epoch = -1
        self._op = 0
        self._message = 0
        self.rounds = 0
        self.bytes_sent = 0
        self.messages = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin_epoch(self, epoch: int) -> None:
        """Enter ``epoch`` (the training step). Epochs only increase: a second visit would repeat masks."""
        if epoch <= self._epoch:
            raise ProtocolError(
                f"epoch {epoch} after epoch {self._epoch} would repeat masks",
                "open a new session to resume a checkpoint, or take the next attempt",
            )
        self._epoch = epoch
        self._op = 0
        self._message = 0

    def draws(self) -> Draws:
        """Random streams of the next operation. Every party must call this at the same place of the program."""
        if self._epoch < 0:
            self.begin_epoch(0)
        draws = Draws(self._streams, self._epoch, self.stream, self._op, self.device)
        self._op += 1
        return draws

    def run(self, steps: Steps[T]) -> T:
        """Drive a protocol to its result."""
        try:
            request = next(steps)
            while True:
                request = steps.send(self._exchange(request))
        except StopIteration as done:
            result: T = done.value
            return result

    def _exchange(self, request: Round) -> list[Tensor]:
        """One round: at most one message to and from each peer."""
        if self._epoch < 0:
            self.begin_epoch(0)
        self.rounds += 1
        number = self._message
        self._message += 1
        for peer in (self.next, self.prev):
            parts = [(kind, data) for to, kind, data in request.sends if to == peer]
            if parts:
                payload = _pack([data for _, data in parts])
                self.plane.send(peer, Tag(self._epoch, self.stream, number, _kind([k for k, _ in parts])), payload)
                self.bytes_sent += payload.nbytes
                self.messages += 1
        got: list[Tensor] = [torch.empty(0)] * len(request.wants)
        for peer in (self.prev, self.next):
            slots = [i for i, want in enumerate(request.wants) if want[0] == peer]
            if slots:
                tag = Tag(self._epoch, self.stream, number, _kind([request.wants[i][1] for i in slots]))
                _unpack(self.plane.recv(peer, tag), peer, tag, request, slots, got, self.device)
        return got


def _kind(found: list[int]) -> int:
    """The kind of a packed message: both ends compute it from the same parts. OPEN outranks all others."""
    return kinds.OPEN if kinds.OPEN in found else min(found)


def _pack(parts: list[Tensor]) -> memoryview:
    arrays = [part.contiguous().cpu().numpy().data.cast("B") for part in parts if part.numel()]
    if len(arrays) == 1:
        return arrays[0]
    return memoryview(b"".join(arrays))


def _unpack(
    payload: memoryview,
    peer: int,
    tag: Tag,
    request: Round,
    slots: list[int],
    got: list[Tensor],
    device: torch.device,
) -> None:
    expected = sum(_nbytes(request.wants[i]) for i in slots)
    if payload.nbytes != expected:
        raise ProtocolError(
            f"party {peer} sent {payload.nbytes} bytes for {tag}, expected {expected}",
            "the parties run different programs or shapes; compare code and job hashes",
            party=peer,
        )
    at = 0
    raw = bytearray(payload) if payload.readonly else payload
    for i in slots:
        _, _, dtype, shape = request.wants[i]
        nbytes = _nbytes(request.wants[i])
        if nbytes == 0:
            got[i] = torch.empty(shape, dtype=dtype, device=device)
            continue
        count = nbytes // dtype.itemsize
        if at % dtype.itemsize:  # torch wants aligned views
            piece = torch.frombuffer(bytearray(raw[at : at + nbytes]), dtype=dtype)
        else:
            piece = torch.frombuffer(raw, dtype=dtype, count=count, offset=at)
        got[i] = piece.reshape(shape).to(device)
        at += nbytes


def _nbytes(want: tuple[int, int, torch.dtype, tuple[int, ...]]) -> int:
    count = 1
    for side in want[3]:
        count *= side
    return count * want[2].itemsize


def par(*steps: Steps[T]) -> Steps[list[T]]:
    """Run protocols side by side, one round of each per round. Results in the order given."""
    results: dict[int, T] = {}
    waiting: list[tuple[int, Steps[T], Round]] = []
    for i, one in enumerate(steps):
        try:
            waiting.append((i, one, next(one)))
        except StopIteration as done:
            results[i] = done.value
    while waiting:
        merged = Round()
        for _, _, request in waiting:
            merged.sends.extend(request.sends)
            merged.wants.extend(request.wants)
        got = yield merged
        following: list[tuple[int, Steps[T], Round]] = []
        at = 0
        for i, one, request in waiting:
            mine = got[at : at + len(request.wants)]
            at += len(request.wants)
            try:
                following.append((i, one, one.send(mine)))
            except StopIteration as done:
                results[i] = done.value
        waiting = following
    return [results[i] for i in range(len(steps))]
