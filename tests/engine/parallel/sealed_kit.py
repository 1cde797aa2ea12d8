"""Members of a sealed group as threads, a connection between two ranks, and doors that tell what they turned away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from parallel_kit import party_keys

from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.parallel import sealed_stream
from uvcc_engine.parallel.party_keys import PartyKeys
from uvcc_engine.parallel.sealed_door import Door, of_group
from uvcc_engine.parallel.sealed_group import PartyNetwork, SealedGroup
from uvcc_engine.parallel.sealed_stream import SealedStream

HERE = "127.0.0.1"
MEETING = b"8 bytes."
Events = list[tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def open_door(keys: PartyKeys, rank: int = 0, events: Events | None = None) -> Iterator[Door]:
    told: Events = [] if events is None else events
    door = Door(socket.create_server((HERE, 0), backlog=1024), keys, rank, lambda n, f: told.append((n, f)))
    try:
        yield door
    finally:
        door.close()


@contextlib.contextmanager
def connection(rekey: int = sealed_stream.REKEY_RECORDS) -> Iterator[tuple[SealedStream, SealedStream]]:
    """Both ends of a proven connection: that of rank 1, who dialled, and that of rank 0."""
    size = Topology(2)
    with open_door(party_keys(size, 0)) as door:
        dialled = dial(door, party_keys(size, 1), 1)
        taken = door.take(MEETING, 1, 20.0)
        dialled.rekey_records = taken.rekey_records = rekey
        yield dialled, taken
        dialled.close()
        taken.close()


def dial(door: Door, keys: PartyKeys, me: int, rank: int = 0) -> SealedStream:
    return sealed_stream.dial(keys, me, rank, (HERE, door.port), of_group(MEETING), 20.0)


def members(count: int, body: Callable[[SealedGroup, int], Any]) -> list[Any]:
    """``body(group, index)`` for every member of one group, each in a thread of its own."""
    size, store = Topology(count), dist.HashStore()
    with contextlib.ExitStack() as doors:
        groups = []
        for index in range(count):
            keys = party_keys(size, index)
            network = PartyNetwork(keys, index, doors.enter_context(open_door(keys, index)), [HERE])
            groups.append(SealedGroup(store, index, count, timedelta(seconds=60), network))
        with ThreadPoolExecutor(count) as pool:
            return [f.result(300) for f in [pool.submit(body, g, k) for k, g in enumerate(groups)]]
