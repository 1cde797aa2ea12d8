"""Where a party's ranks meet: at a store that only they can join.

Without keys, in a replay or a measurement on one machine, it is torch's own store on a loopback address.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from typing import Any, Final, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.parallel import sealed_group, sealed_stream, unix_group
from uvcc_engine.parallel.party_keys import PartyKeys, stays_here
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.parallel.sealed_door import STORE, Door, OnEvent
from uvcc_engine.parallel.sealed_group import PartyNetwork
from uvcc_engine.parallel.sealed_store import SealedStore, StoreValues, serve
from uvcc_engine.parallel.sealed_stream import StrangerError

BACKEND_VARIABLE: Final = "UVCC_GROUP_BACKEND"
CLEAR_VARIABLE: Final = "UVCC_GROUP_CLEAR"
_LISTEN_S: Final = 3.0
_JOIN_S: Final = 10.0
_REFUSED_S: Final = 15.0  # a rank 0 that does not take this one's key for so long will not take it later either


class MeetingPlace(Protocol):
    """Where a world meets, and which of its ranks this is."""

    @property
    def address(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def rank(self) -> int: ...


def local_backend(device: str) -> str:
    """What carries groups within a machine, from ``device`` memory: NCCL that of GPUs, Unix sockets the host's, or what
    ``UVCC_GROUP_BACKEND`` says of that.

    Raises ConfigError.
    """
    if device == "cuda":
        return "nccl"
    wanted = os.environ.get(BACKEND_VARIABLE) or (unix_group.NAME if sys.platform == "linux" else "gloo")
    if wanted == unix_group.NAME and sys.platform != "linux":
        raise ConfigError(f"{BACKEND_VARIABLE} is {wanted!r}", "it needs Linux' abstract sockets; use gloo here")
    if wanted == sealed_group.NAME:
        return unix_group.register() if sys.platform == "linux" else "gloo"
    if wanted not in ("gloo", unix_group.NAME):
        known = f"gloo, {unix_group.NAME} or {sealed_group.NAME}"
        raise ConfigError(f"{BACKEND_VARIABLE} is {wanted!r}", f"use {known}")
    return unix_group.register() if wanted == unix_group.NAME else wanted


def is_sealed(place: RankAddress, keys: PartyKeys | None) -> bool:
    """Whether this world's traffic is sealed: beyond this machine it always is.

    ``UVCC_GROUP_BACKEND`` = sealed asks for it on this machine, too. Raises ConfigError for a world that would send in
    clear beyond this machine.
    """
    wanted = os.environ.get(BACKEND_VARIABLE, "")
    if not wants_seal(place.address):
        return False
    if keys is None:
        raise ConfigError(
            f"the world of {place.coord} meets at {place.address}, beyond this machine, and has no keys to seal it",
            "launch it with a policy that names the party's pods, or let its ranks meet at 127.0.0.1",
        )
    if wanted not in ("", sealed_group.NAME):
        raise ConfigError(
            f"{BACKEND_VARIABLE} is {wanted!r}, but the world of {place.coord} meets at {place.address}",
            f"{wanted} would send shares in clear beyond this machine: unset {BACKEND_VARIABLE}",
        )
    return True


def wants_seal(address: str) -> bool:
    """Whether a world that meets at ``address`` has to be sealed, or is asked to be."""
    return not stays_here(address) or os.environ.get(BACKEND_VARIABLE) == sealed_group.NAME


def keep_here(env: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen where no other machine reaches them."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env[name] = loopback


def check_plain_world(env: Mapping[str, str]) -> None:
    """Refuse a world of torch's own groups, which nothing seals, beyond this machine.

    For the trainer of the language model, which has no shares: ``UVCC_GROUP_CLEAR`` = accept takes the network for
    one that may read it. Raises ConfigError.
    """
    address, world = env.get("MASTER_ADDR", ""), env.get("WORLD_SIZE", "1")
    all_here = stays_here(address) or env.get("LOCAL_WORLD_SIZE", "") == world
    if not all_here and env.get(CLEAR_VARIABLE) != "accept":
        raise ConfigError(
            f"a world of {world} ranks meets at {address[:80]}, beyond this machine, and its traffic is not encrypted",
            f"train on one machine, or over a network of your own that may read it: {CLEAR_VARIABLE}=accept",
        )


def listen(place: MeetingPlace) -> socket.socket:
    """The store's own port; somebody who holds it for a moment is waited for. Raises OSError."""
    # a pod's address may be that of a gateway before it, which cannot be listened on
    address = place.address if stays_here(place.address) else ""
    deadline, pause = time.monotonic() + _LISTEN_S, threading.Event()
    while True:
        try:
            return socket.create_server((address, place.port), backlog=1024)
        except OSError:
            if time.monotonic() > deadline:
                raise
        pause.wait(0.1)


class SealedMeeting:
    """A rank at the sealed meeting place: its store, and its door, through which groups find each other."""

    def __init__(self, store: SealedStore, keys: PartyKeys, rank: int, door: Door | None, addresses: list[str]) -> None:
        self.store, self._keys, self._rank, self._door, self._addresses = store, keys, rank, door, addresses

    @classmethod
    def serve(cls, place: MeetingPlace, keys: PartyKeys, limit_s: float, on_event: OnEvent) -> SealedMeeting:
        """Rank 0: be the meeting place. Raises OSError if its port is taken."""
        values = StoreValues()
        door = Door(listen(place), keys, place.rank, on_event)
        door.serve_store(lambda stream: serve(values, stream))
        return cls(SealedStore(values, None, limit_s), keys, place.rank, door, [place.address])

    @classmethod
    def join(cls, place: MeetingPlace, keys: PartyKeys, limit_s: float, wait: Callable[[], None]) -> SealedMeeting:
        """Another rank: look for the meeting place, calling ``wait`` in between, which may raise.

        Raises OSError if it is not there in time, StrangerError if it does not take this rank's key.
        """
        store = join_store(place, keys, limit_s, wait)
        return cls(store, keys, place.rank, None, [store.own_address, store.seen_address])

    def network(self, on_event: OnEvent) -> PartyNetwork:
        """What groups beyond this machine connect with: rank 0 listens at the store's port, others at one of theirs."""
        if self._door is None:
            here = self.store.own_address if stays_here(self.store.own_address) else ""
            self._door = Door(socket.create_server((here, 0), backlog=1024), self._keys, self._rank, on_event)
        return PartyNetwork(self._keys, self._rank, self._door, self._addresses)

    def close(self) -> None:
        self.store.close()
        if self._door is not None:
            self._door.close()


def join_store(place: MeetingPlace, keys: PartyKeys, limit_s: float, wait: Callable[[], None]) -> SealedStore:
    """See :meth:`SealedMeeting.join`; the store alone."""
    deadline = time.monotonic() + limit_s
    refused = float("inf")
    while True:
        try:
            where = (place.address, place.port)
            stream = sealed_stream.dial(keys, place.rank, 0, where, STORE, min(_JOIN_S, limit_s))
            return SealedStore(None, stream, limit_s)
        except OSError as error:  # not there yet, or not for us
            refused = min(refused, time.monotonic()) if isinstance(error, StrangerError) else float("inf")
            if time.monotonic() > min(deadline, refused + _REFUSED_S):
                raise
        wait()


def join_local(place: MeetingPlace, limit_s: float, wait: Callable[[], None]) -> Any:
    """torch's store client backs off for seconds while no server is there, and hears nobody; this looks itself."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((place.address, place.port), 2.0).close()
            store = TCPStore(place.address, place.port, None, False, timedelta(seconds=_JOIN_S), False)
            store.set_timeout(timedelta(seconds=limit_s))
            return store
        except (OSError, RuntimeError):  # not there yet, or gone between the two
            if time.monotonic() > deadline:
                raise
        wait()
