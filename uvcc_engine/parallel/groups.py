"""Process groups of one party: where its ranks meet, and which groups they bring up when.

A party's world is a mesh ("dp", "pp", "tp") of R x S x T ranks. Its ranks find each other through a store that rank 0
serves at an address that the console or the agent chose. The ranks of one replica share a pod; beyond it, store and
groups are sealed between the pods' identities. Tensor and pipeline groups come up at the start, the
data-parallel group after the first backward pass, off the critical path.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.contract.job.rank_waits import GROUP_TIMEOUT_S, GROUP_TIMEOUT_VARIABLE
from uvcc_engine.contract.job.topology import AXES
from uvcc_engine.contract.run_files import flight
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.parallel import meeting, sealed_group
from uvcc_engine.parallel.group import Communicator, OnEvent, lost
from uvcc_engine.parallel.meeting import SealedMeeting
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.presence import (
    LOOK_S,
    Presence,
    not_come,
    post_withdrawal,
    read_withdrawal,
    serve_withdrawal,
    unmet,
)

_POLL_S: Final = (0.001, 0.05)
_PARTING_S: Final = 10.0
_MOST_NOTE: Final = 64 << 20


class PartyGroups:
    """The store and the groups of one rank. ``alone`` if the party has a single rank: then nothing is opened."""

    def __init__(
        self, place: RankAddress, *, device: str, timeout_s: float, on_event: OnEvent, keys: PartyKeys | None = None
    ) -> None:
        """See :meth:`open`."""
        self.place = place
        self.alone = place.world == 1
        self._device = torch.device(device).type
        self._keys = keys
        self._sealed = not self.alone and meeting.is_sealed(place, keys)
        self._backend = meeting.local_backend(self._device)
        self._met: SealedMeeting | None = None
        self._timeout_s = timeout_s
        # ranks that come up on few processors must not keep them busy with asking for each other
        self._longest_poll = _POLL_S[1] * max(1.0, place.world / 16)
        self._on_event = on_event
        self._store: Any = None
        self._user_check: Callable[[], None] = lambda: None
        self._presence: Presence | None = None  # until all have met
        self._next_look = 0.0
        self._labels = 0
        self.dp, self.pp, self.tp = (Communicator(name, [place.rank], 0) for name in AXES)
        self.pp_back = self.pp  # gradients travel on a communicator of their own
        self.dp_started = place.topology.replicas == 1

    @classmethod
    def open(
        cls,
        place: RankAddress,
        *,
        on_event: OnEvent,
        check: Callable[[], None] = lambda: None,
        device: str = "cpu",
        timeout_s: float = 0.0,
        keys: PartyKeys | None = None,
    ) -> PartyGroups:
        """Meet the sister ranks and bring up the tensor and the pipeline group. ``check`` may raise to give up waiting.

        ``keys``: who the party's pods are; a world that meets beyond this machine needs them, and what crosses between
        its pods is sealed. Raises PeerLostError if not all come within ``timeout_s`` (0: ``UVCC_GROUP_TIMEOUT_S``, else
        300 s), ConfigError for a world beyond this machine without keys.
        """
        limit = timeout_s or float(os.environ.get(GROUP_TIMEOUT_VARIABLE, GROUP_TIMEOUT_S))
        found = cls(place, device=device, timeout_s=limit, on_event=on_event, keys=keys)
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

    @property
    def backend(self) -> str:
        """What carries the groups: nccl, gloo or unix within a pod, sealed beyond it; "" for a party of one rank."""
        if self.alone:
            return ""
        within = self.place.topology.stages * self.place.topology.tensor > 1
        return " and ".join([self._backend] * (within or not self._sealed) + [sealed_group.NAME] * self._sealed)

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
            post_withdrawal(self._store, self.place.rank, why, lost=self._presence.lost if self._presence else ())
            if self.place.rank == 0:
                serve_withdrawal(self._store, self.place.world)

    def _time_to_look(self) -> bool:
        now, due = time.monotonic(), self._next_look
        self._next_look = now + LOOK_S if now >= due else due
        return now >= due

    def _listen(self) -> None:
        if self._store is None:
            return
        party = self.place.coord.party
        try:
            word = read_withdrawal(self._store, self.place.rank, party)
        except RuntimeError as error:
            raise lost(party, f"{self.place.coord} lost the store of its party", error) from error
        if word is not None:
            raise word

    def _meet(self) -> None:
        place, timeout = self.place, timedelta(seconds=self._timeout_s)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connections at first use: a mesh of 64 needs few of 4032
        meeting.keep_here(os.environ)  # only ranks of one pod are left to gloo and NCCL
        try:
            world = self._open_local(timeout) if self._keys is None else self._open_sealed(self._keys)
        except (RuntimeError, OSError) as error:
            raise unmet(place, self._timeout_s, error) from error
        try:
            store = PrefixStore("groups", self._store)
            dist.init_process_group(world, timeout=timeout, world_size=place.world, rank=place.rank, store=store)
        except (RuntimeError, OSError) as error:
            raise lost(place.coord.party, f"{place.coord} cannot meet its sister ranks", error) from error
        self.gather(b"")  # all are there: what follows is not timed with the others' start
        self.tp, self.pp = self._group("tp"), self._group("pp")
        self.pp_back = self._bring_up("pp", lambda name, fields: None)

    def _open_local(self, timeout: timedelta) -> str:
        place = self.place
        if place.rank == 0:
            fd = meeting.listen(place).detach()
            self._store = TCPStore(place.address, place.port, None, True, timeout, False, master_listen_fd=fd)
        else:
            self._store = meeting.join_local(place, self._timeout_s, self._wait)
        return self._backend

    def _open_sealed(self, keys: PartyKeys) -> str:
        """The store of this party's own ranks, on one machine, too: others may have an account there."""
        place = self.place
        if place.rank == 0:
            self._met = SealedMeeting.serve(place, keys, self._timeout_s, self._on_event)
        else:
            self._met = SealedMeeting.join(place, keys, self._timeout_s, self._wait)
        self._store = self._met.store
        return sealed_group.register(self._met.network(self._on_event)) if self._sealed else self._backend

    def _wait(self) -> None:
        """Between two looks for the meeting place."""
        self._check()
        threading.Event().wait(self._longest_poll)

    def _group(self, name: str) -> Communicator:
        return self._bring_up(name, self._on_event)

    def _bring_up(self, name: str, on_event: OnEvent) -> Communicator:
        """Ranks of one replica share a pod: only the data-parallel group can leave it."""
        crosses = self._sealed and name == "dp"
        backend = sealed_group.NAME if crosses else self._backend
        return Communicator.open(self.place, name, backend, self._timeout_s, on_event)

    def start_dp(self) -> None:
        """Bring up the data-parallel group, unless it is up: all ranks of the world call this at the same point."""
        if self.dp_started:
            return
        self.dp = self._group("dp")
        self.dp_started = True
        self._on_event("dp_ready", {"coord": str(self.place.coord)})

    @property
    def store(self) -> Any:
        """The party's store; None for a party of one rank, and after the end."""
        return self._store

    @property
    def mesh(self) -> DeviceMesh:
        """The party's world as torch's mesh ("dp", "pp", "tp"). Raises ConfigError before the last group is up."""
        groups = {g.name: g.group for g in (self.dp, self.pp, self.tp)}
        if self.alone or not self.dp_started:
            raise ConfigError("the mesh is there once all groups are", "a party of one rank has none")
        t = self.place.topology
        ranks = torch.arange(self.place.world).reshape(t.replicas, t.stages, t.tensor)
        kept = [name for name in AXES if groups[name] is not None]
        flat = ranks.squeeze() if len(kept) > 1 else ranks.reshape(-1)
        return DeviceMesh.from_group(
            [groups[name] for name in kept] if len(kept) > 1 else groups[kept[0]],
            self._device,
            mesh=flat if len(kept) > 1 else None,
            mesh_dim_names=tuple(kept),
        )

    def gather(self, value: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchange a few bytes with all ranks (or with ``ranks``) through the store: for rare and early agreements.

        All members call it at the same point. ``check`` is called while it waits. Raises PeerLostError.
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
                    late = [rank for rank, key in zip(members, keys, strict=True) if not self._store.check([key])]
                    raise not_come(self.place, self._timeout_s, late, met=self._presence is None)
                self._check()
                pause.wait(wait)
                wait = min(2 * wait, self._longest_poll)
            found = [bytes(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise lost(self.place.coord.party, f"{self.place.coord} lost the store of its party", error) from error
        if any(len(note) > _MOST_NOTE for note in found):
            what = f"{self.place.coord} found a note of {max(map(len, found))} bytes at the meeting place"
            raise PeerLostError(what, "is anybody else's program there?", party=self.place.coord.party)
        return found

    @property
    def waiting_on(self) -> Waiting | None:
        """Which collective this rank waits in, and for how long."""
        for group in (self.tp, self.pp, self.pp_back, self.dp):
            if (waiting := group.waiting) is not None:
                return Waiting(waiting[0], time.monotonic() - waiting[1])
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
                post_withdrawal(store, self.place.rank, why)
            if dist.is_initialized():
                dist.destroy_process_group()
        except RuntimeError as error:
            self._on_event("group_close", {"coord": str(self.place.coord), "why": " ".join(str(error).split())[:200]})
        finally:
            if self._met is not None:
                self._met.close()

    def _part(self, store: Any) -> None:
        """Rank 0 serves the store, so it goes last; it does not wait for long."""
        gone, deadline, pause = store.add("gone", 1), time.monotonic() + _PARTING_S, threading.Event()
        while self.place.rank == 0 and gone < self.place.world and time.monotonic() < deadline:
            pause.wait(_POLL_S[0])
            gone = store.add("gone", 0)
