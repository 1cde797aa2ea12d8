"""Process groups of one party: where its ranks meet, and what they do collectively. One code path for gloo and NCCL.

A party's world is a mesh ("dp", "pp", "tp") of R x S x T ranks. Its ranks find each other through a store that rank 0
serves at an address that the console or the agent chose. Tensor and pipeline groups come up at the start, the
data-parallel group after the first backward pass, off the critical path. Shares travel as int64, whose sums wrap like
the ring; every operation has a timeout and a number, so that a stuck one can be named.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from uvcc_engine.contract import flight
from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.parallel import unix_group
from uvcc_engine.parallel.place import Place, device_slot
from uvcc_engine.parallel.presence import LOOK_S, Presence, leave_word, stay_to_tell, word_of

__all__ = ["Group", "OnEvent", "PartyGroups", "Place", "device_slot"]

OnEvent = Callable[[str, dict[str, Any]], None]
DIMENSIONS: Final = ("dp", "pp", "tp")
TIMEOUT_S: Final = 300.0
TIMEOUT_VARIABLE: Final = "UVCC_GROUP_TIMEOUT_S"
BACKEND_VARIABLE: Final = "UVCC_GROUP_BACKEND"
_POLL_S: Final = (0.001, 0.05)
_PARTING_S: Final = 10.0
_LISTEN_S: Final = 3.0
_JOIN_S: Final = 10.0
# torch renamed the two; the older names still work but warn, and pods may carry an older torch of their image
_reduce_scatter: Final = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Final = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Group:
    """One communicator: this rank and its sisters along one dimension. Alone, every operation is the identity.

    Operations must be called in the same order by all members. Each raises PeerLostError if a member is gone or does
    not come within the timeout.
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
        self._timeout = timedelta(seconds=TIMEOUT_S)
        self._party = -1

    @classmethod
    def open(cls, place: Place, name: str, backend: str, timeout_s: float, on_event: OnEvent) -> Group:
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
            raise _lost(place.coord.party, f"the {name} group of {coord} does not come up", error) from error
        found = cls(name, members, index, made)
        found._timeout, found._party = timeout, place.coord.party
        found._check_sum(torch.device("cuda" if backend == "nccl" else "cpu"))
        on_event("group_ready", {"coord": coord, "group": name, "seconds": round(time.monotonic() - began, 4)})
        return found

    def _check_sum(self, device: torch.device) -> None:
        """The first collective connects the members; its sum must be right, the high bits included."""
        mine = torch.tensor([self.index + 1, 1 << 62], dtype=torch.int64, device=device)
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
            plain = _plain(x)
            self._wait("all_reduce", lambda: dist.all_reduce(plain, group=self._group, async_op=True))
        return x

    def sum_slices(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to add up a flat ``x`` of ``size * n`` elements; the call that is returned waits for this rank's n."""
        if self.size == 1:
            return lambda: x
        out, whole = _fresh(x.numel() // self.size, x), _plain(x)
        work = self._started("reduce_scatter", lambda: _reduce_scatter(out, whole, group=self._group, async_op=True))

        def finish() -> Tensor:
            self._wait("reduce_scatter", lambda: work)
            return out

        return finish

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's ``x``, in order; all have one shape."""
        if self.size == 1:
            return [x]
        flat = _plain(x.reshape(-1))
        out = _fresh(self.size * flat.numel(), x)
        self._wait("all_gather", lambda: _all_gather(out, flat, group=self._group, async_op=True))
        return list(out.reshape(self.size, *x.shape))

    def broadcast_(self, x: Tensor, source: int) -> Tensor:
        """``x`` becomes that of member ``source``."""
        if self.size > 1:
            plain, rank = _plain(x), self._members[source]
            self._wait("broadcast", lambda: dist.broadcast(plain, rank, group=self._group, async_op=True))
        return x

    # -- between two members -----------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int) -> Callable[[], None]:
        """Start to send; the call that is returned waits until ``x`` may be changed."""
        what, plain = f"send {tag} to {to}", _plain(x)
        work = self._started(what, lambda: dist.isend(plain, self._members[to], group=self._group, tag=tag))
        return lambda: self._wait(what, lambda: work)

    def receive(self, x: Tensor, source: int, tag: int) -> Tensor:
        """Fill ``x`` with what member ``source`` sent under ``tag``."""
        rank, what = self._members[source], f"receive {tag} from {source}"
        plain = _plain(x)
        self._wait(what, lambda: dist.irecv(plain, rank, group=self._group, tag=tag))
        return x

    def _started(self, what: str, start: Callable[[], Any]) -> Any:
        """Gloo connects at first use and may find the member gone already when an operation starts."""
        try:
            return start()
        except RuntimeError as error:
            raise _lost(self._party, f"{self.name} {what} did not start", error) from error

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        me = threading.get_ident()
        self.operations += 1
        numbered = f"{self.name} #{self.operations} {what}"
        self._waits[me] = (numbered, time.monotonic())
        entry = {"group": self._label, "seq": self.operations, "op": what, "state": "started", "ts": time.time()}
        self.recent.append(entry)
        try:
            start().wait(self._timeout)
        except RuntimeError as error:
            raise _lost(self._party, f"{numbered} did not finish", error) from error
        finally:
            del self._waits[me]
        entry["state"] = "completed"


def _plain(x: Tensor) -> Tensor:
    """``x``, or a tensor on its memory that any thread may write to: those made in inference mode refuse."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        plain: Tensor = from_dlpack(x)
    return plain


def _fresh(count: int, like: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(count, dtype=like.dtype, device=like.device)


class PartyGroups:
    """The store and the groups of one rank. ``alone`` if the party has a single rank: then nothing is opened."""

    def __init__(self, place: Place, *, device: str, timeout_s: float, on_event: OnEvent) -> None:
        """See :meth:`open`."""
        self.place = place
        self.alone = place.world == 1
        self._device = torch.device(device).type
        self._backend = _backend(self._device, place)
        self._timeout_s = timeout_s
        # ranks that come up on few processors must not keep them busy with asking for each other
        self._longest_poll = _POLL_S[1] * max(1.0, place.world / 16)
        self._on_event = on_event
        self._store: Any = None
        self._user_check: Callable[[], None] = lambda: None
        self._presence: Presence | None = None  # until all have met
        self._next_look = 0.0
        self._labels = 0
        self.tp, self.pp, self.dp = (Group(name, [place.rank], 0) for name in ("tp", "pp", "dp"))
        self.pp_back = self.pp  # gradients travel on a communicator of their own
        self.dp_started = place.topology.replicas == 1

    @classmethod
    def open(
        cls,
        place: Place,
        *,
        on_event: OnEvent,
        check: Callable[[], None] = lambda: None,
        device: str = "cpu",
        timeout_s: float = 0.0,
    ) -> PartyGroups:
        """Meet the sister ranks and bring up the tensor and the pipeline group. ``check`` may raise to give up waiting.

        Raises PeerLostError if not all come within ``timeout_s`` (0: ``UVCC_GROUP_TIMEOUT_S``, else 300 s).
        """
        limit = timeout_s or float(os.environ.get(TIMEOUT_VARIABLE, TIMEOUT_S))
        found = cls(place, device=device, timeout_s=limit, on_event=on_event)
        flight.provide("sequence", found.sequence)
        if not found.alone:
            found._user_check = check
            found._presence = Presence(f"{place.address}:{place.port}", place.rank, place.world, place.coord.party)
            try:
                found._meet()
            except PeerLostError as error:
                found._tell(error.what)
                raise
            finally:
                found._presence.close()
                found._presence = None
        return found

    def _check(self) -> None:
        """Raise if waiting for a sister rank has no sense any more: the caller's wish, or one that is gone."""
        self._user_check()
        if self._presence is not None and self._time_to_look():
            self._listen()
            self._presence.look()

    def look(self) -> None:
        """Raise PeerLostError if a sister rank gave up, or the first one is gone: for waits before the first step."""
        if self._time_to_look():
            self._listen()

    def _tell(self, why: str) -> None:
        """Say why this rank gives up; the first one, without whom there is no meeting place, stays until all know."""
        if self._store is not None:
            leave_word(self._store, self.place.rank, why, lost=self._presence.lost if self._presence else ())
            if self.place.rank == 0:
                stay_to_tell(self._store, self.place.world)

    def _time_to_look(self) -> bool:
        now, due = time.monotonic(), self._next_look
        self._next_look = now + LOOK_S if now >= due else due
        return now >= due

    def _listen(self) -> None:
        if self._store is None:
            return
        party = self.place.coord.party
        try:
            word = word_of(self._store, self.place.rank, party)
        except RuntimeError as error:
            raise _lost(party, f"{self.place.coord} lost the store of its party", error) from error
        if word is not None:
            raise word

    def _meet(self) -> None:
        place, timeout = self.place, timedelta(seconds=self._timeout_s)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connections at first use: a mesh of 64 needs few of 4032
        if place.address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            if place.rank == 0:
                listener = self._listener()
                self._store = TCPStore(
                    place.address, place.port, None, True, timeout, False, master_listen_fd=listener.detach()
                )
            else:
                self._store = self._join()
            store = PrefixStore("groups", self._store)
            dist.init_process_group(
                self._backend, timeout=timeout, world_size=place.world, rank=place.rank, store=store
            )
        except (RuntimeError, OSError) as error:
            raise _lost(place.coord.party, f"{place.coord} cannot meet its sister ranks", error) from error
        self.gather(b"")  # all are there: what follows is not timed with the others' start
        self.tp, self.pp = self._group("tp"), self._group("pp")
        self.pp_back = Group.open(place, "pp", self._backend, self._timeout_s, lambda name, fields: None)

    def _listener(self) -> socket.socket:
        """The store's own port; somebody who holds it for a moment is waited for."""
        # a pod's address may be that of a gateway before it, which cannot be listened on
        address = self.place.address if self.place.address.startswith("127.") else ""
        deadline, pause = time.monotonic() + _LISTEN_S, threading.Event()
        while True:
            try:
                return socket.create_server((address, self.place.port), backlog=1024)
            except OSError:
                if time.monotonic() > deadline:
                    raise
            pause.wait(0.1)

    def _join(self) -> Any:
        """torch's store client backs off for seconds while no server is there, and hears nobody; this looks itself."""
        place, deadline, pause = self.place, time.monotonic() + self._timeout_s, threading.Event()
        while True:
            try:
                socket.create_connection((place.address, place.port), 2.0).close()
                store = TCPStore(place.address, place.port, None, False, timedelta(seconds=_JOIN_S), False)
                store.set_timeout(timedelta(seconds=self._timeout_s))
                return store
            except (OSError, RuntimeError):  # not there yet, or gone between the two
                if time.monotonic() > deadline:
                    raise
            self._check()
            pause.wait(self._longest_poll)

    def _group(self, name: str) -> Group:
        return Group.open(self.place, name, self._backend, self._timeout_s, self._on_event)

    def start_dp(self) -> None:
        """Bring up the data-parallel group, unless it is up: all ranks of the world call this at the same point."""
        if self.dp_started:
            return
        self.dp = self._group("dp")
        self.dp_started = True
        self._on_event("dp_ready", {"coord": str(self.place.coord)})

    @property
    def mesh(self) -> DeviceMesh:
        """The party's world as torch's mesh ("dp", "pp", "tp"). Raises ConfigError before the last group is up."""
        groups = {g.name: g.group for g in (self.dp, self.pp, self.tp)}
        if self.alone or not self.dp_started:
            raise ConfigError("the mesh is there once all groups are", "a party of one rank has none")
        t = self.place.topology
        ranks = torch.arange(self.place.world).reshape(t.replicas, t.stages, t.tensor)
        kept = [name for name in DIMENSIONS if groups[name] is not None]
        flat = ranks.squeeze() if len(kept) > 1 else ranks.reshape(-1)
        return DeviceMesh.from_group(
            [groups[name] for name in kept] if len(kept) > 1 else groups[kept[0]],
            self._device,
            mesh=flat if len(kept) > 1 else None,
            mesh_dim_names=tuple(kept),
        )

    def gather(self, value: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchange a few bytes with all ranks (or with ``ranks``) through the store: for rare and early agreements.

        All members call it at the same point. ``check`` is called while it waits.
        """
        members = list(range(self.place.world)) if ranks is None else list(ranks)
        if self.alone or len(members) == 1:
            return [value]
        self._labels += 1
        keys = [f"note/{self._labels}/{members[0]}/{rank}" for rank in members]
        deadline, wait, pause = time.monotonic() + self._timeout_s, _POLL_S[0], threading.Event()
        try:
            self._store.set(keys[members.index(self.place.rank)], value)
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        f"{self.place.coord} waited {self._timeout_s:g} s for its sister ranks",
                        "look at the party's other pods",
                        party=self.place.coord.party,
                    )
                self._check()
                pause.wait(wait)
                wait = min(2 * wait, self._longest_poll)
            return [bytes(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise _lost(self.place.coord.party, f"{self.place.coord} lost the store of its party", error) from error

    @property
    def waiting_on(self) -> str | None:
        """Which collective this rank waits in, and for how long."""
        for group in (self.tp, self.pp, self.pp_back, self.dp):
            if (waiting := group.waiting) is not None:
                return f"{waiting[0]} for {time.monotonic() - waiting[1]:.1f} s"
        return None

    def sequence(self) -> list[dict[str, Any]]:
        """The newest operations of every group of this rank, numbered alike by its members; oldest first."""
        known = {id(g): g for g in (self.tp, self.pp, self.pp_back, self.dp)}
        return [entry for group in known.values() for entry in list(group.recent)]

    def close(self, *, graceful: bool = True, why: str = "it stopped") -> None:
        """Leave the world: at a good end together, so that nobody loses the store, else saying ``why``, if anything.

        Harmless twice.
        """
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if graceful:
                self._part(store)
            elif why:
                leave_word(store, self.place.rank, why)
            if dist.is_initialized():
                dist.destroy_process_group()
        except RuntimeError as error:
            self._on_event("group_close", {"coord": str(self.place.coord), "why": " ".join(str(error).split())[:200]})

    def _part(self, store: Any) -> None:
        """Rank 0 serves the store, so it goes last; it does not wait for long."""
        gone, deadline, pause = store.add("gone", 1), time.monotonic() + _PARTING_S, threading.Event()
        while self.place.rank == 0 and gone < self.place.world and time.monotonic() < deadline:
            pause.wait(_POLL_S[0])
            gone = store.add("gone", 0)


def _backend(device: str, place: Place) -> str:
    """NCCL between GPUs, gloo between CPUs of several machines, Unix sockets between ranks that meet on this one.

    ``UVCC_GROUP_BACKEND`` = gloo or unix overrides the last two. Raises ConfigError.
    """
    if device == "cuda":
        return "nccl"
    here = place.address.startswith("127.")
    wanted = os.environ.get(BACKEND_VARIABLE) or (unix_group.NAME if here and sys.platform == "linux" else "gloo")
    if wanted not in ("gloo", unix_group.NAME):
        raise ConfigError(f"{BACKEND_VARIABLE} is {wanted!r}", f"use gloo or {unix_group.NAME}")
    return unix_group.register() if wanted == unix_group.NAME else wanted


def _lost(party: int, what: str, error: BaseException) -> PeerLostError:
    reason = " ".join(str(error).split())[:300]
    return PeerLostError(f"{what}: {reason}", "a rank of this party stopped; see how its worker ended", party=party)


def _wrapped(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
