"""The alarm for a debugging mode: is every value that is truncated below 2^62?

No party can tell: its share of a product is uniform whatever the product is. Where all three parties compute in one
process (``mpc.foundation.local``, ``simulate``), each hands its share to this watch beside the protocol; the last to
come adds them up. No message, draw or round changes, and nothing of it exists in a run between domains.

What it cannot see: a number that passes 2^64 and comes to lie below 2^62 again, as one number in four beyond it would.
Tensors overflow in many places at a time, so that hardly hides one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import RingRangeError
from uvcc_engine.mpc.foundation.rounds import Fork, MpcProtocol

if TYPE_CHECKING:
    from uvcc_engine.mpc.foundation.runtime import Runtime

T = TypeVar("T")

LIMIT = 1 << 62
Place = tuple[int, int, int]  # epoch, stream, operation: where a mask is drawn, hence the same at every party


class RangeWatch:
    """Puts the parties' shares of what is truncated together. One for all parties of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Place, list[Tensor]] = {}

    def note(self, place: Place, share: Tensor, *, parties: int, shift: int) -> None:
        """One party's summand, of any shape, of the value that ``place`` truncates by ``shift`` bits.

        ``parties`` of the three hold one.

        Raises RingRangeError at the party that comes last if the value does not lie within 62 bits and a sign.
        """
        with self._lock:
            parts = self._waiting.setdefault(place, [])
            parts.append(share.detach().clone())
            if len(parts) < parties:
                return
            del self._waiting[place]
        whole = torch.stack(parts).sum(0)
        outside = (whole >= LIMIT) | (whole < -LIMIT)
        if bool(outside.any()):
            epoch, stream, op = place
            raise RingRangeError(
                f"{int(outside.sum())} of {whole.numel()} numbers of shape {tuple(whole.shape)} pass 2^62 before a"
                f" truncation by {shift} bits (step {epoch}, stream {stream}, operation {op})",
                "the result is wrong: choose fewer frac_bits, smaller numbers, or a smaller learning rate",
            )


def unwatched_protocol(rt: Runtime, steps: MpcProtocol[T]) -> MpcProtocol[T]:
    """``steps``, whose numbers may pass the end of the ring: what follows leaves out every one that does.

    Messages, draws and rounds are its own.
    """
    answer: list[Any] | None = None
    while True:
        watch, rt.range_watch = rt.range_watch, None
        try:
            request = steps.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        finally:
            rt.range_watch = watch
        if isinstance(request, Fork):
            request = Fork([unwatched_protocol(rt, branch) for branch in request.branches])
        answer = yield request
