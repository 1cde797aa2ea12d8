"""Random numbers of the next epoch, drawn by a GPU on a stream of its own beside this epoch's computation.

What a program draws depends on no data, and an epoch's program is nearly always that of the epoch before: so each draw
of an epoch says which the draw at the same place of the next one will be, whose kernel is launched at once on a second
stream. A program that comes to it lets its own stream wait for that kernel, never the host. Any other draw is made
where it is needed. The bits are the same either way (ChaCha20, as on a processor), every draw takes its place in its
stream, which gives no place twice, and numbers that nobody has taken yet fill at most a bounded memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from uvcc_engine.mpc.foundation.drawn_ahead import Draw
from uvcc_engine.mpc.foundation.prg import Stream

MOST: Final = 512 << 20
_LAST: Final = (1 << 32) - 1


class DrawBeside:
    """The drawing stream of one worker's GPU, for all of its runtimes. ``cuda`` is ``torch.cuda``, or what acts like
    it."""

    def __init__(self, device: torch.device, most: int = MOST, cuda: Any = torch.cuda) -> None:
        """``most``: bytes of numbers that may lie ready."""
        self.device, self.most, self.cuda = device, most, cuda
        self.side = cuda.Stream(device)
        self._room = threading.Lock()
        self._held = 0
        self._closed = False

    def forecast(self, streams: Mapping[int, Stream], stream: int) -> DrawnBeside:
        """That of a runtime which draws from ``streams`` in the stream ``stream`` of its messages."""
        return DrawnBeside(self, streams, stream)

    def take_room(self, nbytes: int) -> bool:
        """Reserve memory for numbers that are to lie ready; whether there was as much."""
        with self._room:
            if self._closed or self._held + nbytes > self.most:
                return False
            self._held += nbytes
            return True

    def free_room(self, nbytes: int) -> None:
        """Give back what was reserved."""
        with self._room:
            self._held -= nbytes

    def settle(self) -> bool:
        """Wait until all that was launched is drawn."""
        self.side.synchronize()
        return True

    def close(self) -> None:
        """From now on, everything is drawn where it is needed."""
        with self._room:
            self._closed = True

    @property
    def held(self) -> int:
        """Bytes that lie ready or are being drawn."""
        return self._held


class DrawnBeside:
    """What one program has drawn in this epoch, and what lies ready for it. Used by its computing thread."""

    def __init__(self, owner: DrawBeside, streams: Mapping[int, Stream], stream: int) -> None:
        self._owner, self._stream = owner, stream
        self._streams = {component: one.twin() for component, one in streams.items()}
        self._epoch, self._drawn = -1, 0
        self._ready: dict[tuple[int, int], tuple[Draw, Tensor, Any]] = {}
        self.met = self.missed = 0  # draws that lay ready, and those that did not

    def begin(self, epoch: int) -> None:
        """Enter an epoch; what was drawn for another one is given up."""
        self._epoch, self._drawn = epoch, 0
        for key in [key for key in self._ready if key[0] != epoch]:
            self._owner.free_room(self._ready.pop(key)[0][3])

    def take(self, component: int, op: int, piece: int, nbytes: int) -> Tensor | None:
        """The numbers of the program's next draw, bytes on the device, if they lie ready or are on their way; and have
        those of the next epoch drawn."""
        draw, index = (component, op, piece, nbytes), self._drawn
        self._drawn += 1
        found = self._ready.pop((self._epoch, index), None)
        if found is not None:
            self._owner.free_room(found[0][3])
        self._launch(index, draw)
        if found is None or found[0] != draw:
            self.missed += 1
            return None
        self.met += 1
        _, numbers, drawn = found
        current = self._owner.cuda.current_stream(self._owner.device)
        current.wait_event(drawn)
        if numbers.is_cuda:
            numbers.record_stream(current)  # so that its memory goes to nobody while this stream still reads it
        return numbers

    def _launch(self, index: int, draw: Draw) -> None:
        owner, (component, op, piece, nbytes) = self._owner, draw
        if self._epoch >= _LAST or not owner.take_room(nbytes):
            return
        with owner.cuda.stream(owner.side):
            numbers = torch.empty(nbytes, dtype=torch.uint8, device=owner.device)
            self._streams[component].generate((self._epoch + 1, self._stream, op), piece, numbers, None)
            drawn = owner.cuda.Event()
            drawn.record(owner.side)
        self._ready[self._epoch + 1, index] = draw, numbers, drawn
