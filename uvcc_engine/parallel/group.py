"""One communicator of a party's ranks, and what its members do collectively. One code path for gloo and NCCL.

Shares travel as int64, whose sums wrap like the ring; every operation has a timeout and a number, so that a stuck one
can be named. Tensors of a GPU go through the host where the group's backend is no NCCL, and what lies on the host (a
count, a vote) through the GPU where it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.contract.job.rank_waits import GROUP_TIMEOUT_S, GROUP_TIMEOUT_VARIABLE
from uvcc_engine.parallel.member_connection import LateMemberError
from uvcc_engine.parallel.place import RankAddress

OnEvent = Callable[[str, dict[str, Any]], None]
NCCL: Final = "nccl"
_QUICK_LOOKS, _LOOK_S = 200, 0.0005
# torch renamed the two; the older names still work but warn, and pods may carry an older torch of their image
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Communicator:
    """One communicator: this rank and its sisters along one dimension. Alone, every operation is the identity.

    Operations must be called, and waited for, in the same order by all members. Each raises PeerLostError if a member
    is gone or does not come within the timeout. A tensor has the same shape at all members, whatever it is.
    """

    def __init__(self, name: str, members: Sequence[int], index: int, group: Any = None) -> None:
        self.name = name
        self.size = len(members)
        self.index = index
        self.operations = 0
        self.recent: deque[dict[str, Any]] = deque(maxlen=64)  # the newest operations, for the flight recorder
        self._waits: dict[int, tuple[str, float]] = {}  # by thread: what for, and since when (monotonic)
        self._members = list(members)
        self._label = f"{name} {' '.join(map(str, members))}"  # members know it alike, other groups have another
        self._group = group
        self._timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        self._party = -1
        self._carrier = torch.device("cpu")  # where the backend wants its tensors

    @classmethod
    def open(cls, place: RankAddress, name: str, backend: str, timeout_s: float, on_event: OnEvent) -> Communicator:
        """Bring up the group of this rank along ``name``; returns when all of it is there and has added up right."""
        members, index = place.members(name), place.index(name)
        if len(members) == 1:
            return cls(name, members, index)
        began = time.monotonic()
        coord = str(place.coord)
        if index:
            on_event("uid_wait", {"coord": coord, "group": name})
        timeout = timedelta(seconds=timeout_s)
        try:
            made = dist.new_group(
                members, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=name
            )
        except (RuntimeError, ValueError) as error:
            raise lost(place.coord.party, f"the {name} group of {coord} does not come up", error) from error
        found = cls(name, members, index, made)
        found._timeout, found._party = timeout, place.coord.party
        found._carrier = torch.device("cuda" if backend == NCCL else "cpu")
        found._check_sum()
        took = round(time.monotonic() - began, 4)
        on_event("group_ready", {"coord": coord, "group": name, "backend": backend, "seconds": took})
        return found

    def _check_sum(self) -> None:
        """The first collective connects the members; its sum must be right, the high bits included."""
        mine = torch.tensor([self.index + 1, 1 << 62], dtype=torch.int64, device=self._carrier)
        self.sum_(mine)
        wanted = [self.size * (self.size + 1) // 2, _wrapped(self.size << 62)]
        if mine.tolist() != wanted:
            raise PeerLostError(f"the {self.name} group adds up to {mine.tolist()}, not {wanted}", party=self._party)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """What this rank waits for, and since when (monotonic): the oldest of its waits."""
        return min(list(self._waits.values()), key=lambda wait: wait[1], default=None)

    @property
    def group(self) -> Any:
        """torch's process group; None if this rank is alone."""
        return self._group

    # -- collectives -------------------------------------------------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """``x`` becomes the sum over all members, modulo 2^64 for int64."""
        if self.size > 1:
            plain = self._carried(x)
            self._wait("all_reduce", lambda: dist.all_reduce(plain, group=self._group, async_op=True))
            _put_back(x, plain)
        return x

    def sum_slices(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to add up a flat ``x`` of ``size * n`` elements; the call that is returned waits for this rank's n."""
        if self.size == 1:
            return lambda: x
        whole = self._carried(x)
        out = _fresh(x.numel() // self.size, whole)
        work = self._started("reduce_scatter", lambda: _reduce_scatter(out, whole, group=self._group, async_op=True))

        def finish() -> Tensor:
            self._wait("reduce_scatter", lambda: work)
            return _home(out, x)

        return finish

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's ``x``, in order; all have one shape."""
        if self.size == 1:
            return [x]
        flat = self._carried(x.reshape(-1))
        out = _fresh(self.size * flat.numel(), flat)
        self._wait("all_gather", lambda: _all_gather(out, flat, group=self._group, async_op=True))
        return list(_home(out, x).reshape(self.size, *x.shape))

    def broadcast_(self, x: Tensor, source: int) -> Tensor:
        """``x`` becomes that of member ``source``."""
        if self.size > 1:
            plain, rank = self._carried(x), self._members[source]
            self._wait("broadcast", lambda: dist.broadcast(plain, rank, group=self._group, async_op=True))
            _put_back(x, plain)
        return x

    # -- between two members -----------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int) -> Callable[[], None]:
        """Start to send; the call that is returned waits until ``x`` may be changed."""
        what, plain = f"send {tag} to {to}", self._carried(x)
        work = self._started(what, lambda: dist.isend(plain, self._members[to], group=self._group, tag=tag))
        return lambda: self._wait(what, lambda: work)

    def receive(self, x: Tensor, source: int, tag: int) -> Tensor:
        """Fill ``x`` with what member ``source`` sent under ``tag``."""
        rank, what = self._members[source], f"receive {tag} from {source}"
        plain = self._carried(x)
        self._wait(what, lambda: dist.irecv(plain, rank, group=self._group, tag=tag))
        _put_back(x, plain)
        return x

    def _carried(self, x: Tensor) -> Tensor:
        """``x`` where the backend wants it: NCCL carries a GPU's memory, all others the host's."""
        return _plain(x) if x.device.type == self._carrier.type else _plain(x).to(self._carrier)

    def _started(self, what: str, start: Callable[[], Any]) -> Any:
        """Gloo connects at first use and may find the member gone already when an operation starts."""
        try:
            return start()
        except RuntimeError as error:
            raise lost(self._party, f"{self.name} {what} did not start", error) from error

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        me = threading.get_ident()
        self.operations += 1
        numbered = f"{self.name} #{self.operations} {what}"
        self._waits[me] = (numbered, time.monotonic())
        entry = {"group": self._label, "seq": self.operations, "op": what, "state": "started", "ts": time.time()}
        self.recent.append(entry)
        try:
            self._finish(start())
        except RuntimeError as error:
            raise lost(self._party, f"{numbered} did not finish", error) from error
        finally:
            del self._waits[me]
        entry["state"] = "completed"

    def _finish(self, work: Any) -> None:
        """Wait on this processor. NCCL's own wait would have the device's stream wait, which all threads of this rank
        share: a receive would hold up the very passes that it waits for."""
        if self._carrier.type == "cuda":
            deadline, pause = time.monotonic() + self._timeout.total_seconds(), threading.Event()
            looked = 0
            while not work.is_completed():
                looked += 1
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nothing came in {self._timeout.total_seconds():g} s")
                pause.wait(_LOOK_S if looked > _QUICK_LOOKS else 0.0)
        work.wait(self._timeout)


def _plain(x: Tensor) -> Tensor:
    """``x``, or a tensor on its memory that any thread may write to: those made in inference mode refuse."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        plain: Tensor = from_dlpack(x)
    return plain


def _put_back(x: Tensor, carried: Tensor) -> None:
    """What came to a copy elsewhere, into ``x``."""
    if x.device != carried.device:
        _plain(x).copy_(carried)


def _home(carried: Tensor, x: Tensor) -> Tensor:
    """What was carried, where ``x`` lies."""
    return carried if carried.device == x.device else carried.to(x.device)


def _fresh(count: int, like: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return like.new_empty(count)


def lost(party: int, what: str, error: BaseException) -> PeerLostError:
    """What a rank raises when torch lost a sister rank."""
    reason = " ".join(str(error).split())[:300]
    hint = "a rank of this party stopped; see how its worker ended"
    if isinstance(error, LateMemberError):
        hint += f"; if none did, its steps take longer than {GROUP_TIMEOUT_VARIABLE}, which the profile's env may raise"
    return PeerLostError(f"{what}: {reason}", hint, party=party)


def _wrapped(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
