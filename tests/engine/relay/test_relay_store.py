"""A store from outside: the hub keeps its promises over whatever implements ``Store``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from relay_kit import PARTIES

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.relay import binary
from uvcc_engine.relay.config import RelayConfig
from uvcc_engine.relay.db import SqliteStore, room_beside
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.server import running_hub, steady
from uvcc_engine.relay.store import MessageRow, QueueRow, SeenRow, Write


class MemoryStore:
    """Keeps everything in dictionaries; a restart is a new hub over the same one."""

    def __init__(self) -> None:
        self.commits = self.rows = self.starts = 0
        self.messages: dict[int, MessageRow] = {}
        self.all_queues: list[QueueRow] = []
        self.known: dict[tuple[int, bytes], SeenRow] = {}
        self.closed = self.mark = 0

    def put(self, write: Write) -> None:
        self.all_queues += write.queues
        self.messages |= {row[0]: row for row in write.inserts}
        for (ident,) in write.deletes:
            self.messages.pop(ident, None)
        self.known |= {(row[0], row[1]): row for row in write.seen}
        for key in write.forgotten:
            self.known.pop(key, None)
        self.mark = max(self.mark, write.mark)
        self.commits += 1
        self.rows += len(write.inserts)
        write.done(None)

    def queues(self) -> list[QueueRow]:
        return self.all_queues

    def pending(self) -> list[tuple[int, int, bytes, int, int, float, int]]:
        return [row[:7] for _, row in sorted(self.messages.items())]

    def seen(self) -> list[SeenRow]:
        return sorted(self.known.values(), key=lambda row: row[-1])

    def next_start(self) -> int:
        self.starts += 1
        return self.starts

    def high_mark(self) -> int:
        return self.mark

    def payload(self, ident: int) -> bytes | None:
        row = self.messages.get(ident)
        return None if row is None else bytes(row[-1])

    def close(self) -> None:
        self.closed += 1


async def sent(hub: Hub, *names: bytes) -> bytes:
    fates: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    items = [binary.Item(1, binary.STORE, 0, name, b"content of " + name) for name in names]
    hub.enqueue(PARTIES[0], 7, items, fates.set_result)
    return await asyncio.wait_for(fates, 120)


async def test_messages_survive_a_restart_and_are_delivered_once(tmp_path: Path) -> None:
    memory = MemoryStore()
    config = RelayConfig(db=tmp_path / "unused", credentials={})
    async with running_hub(config, lambda path: memory) as (hub, store):
        assert store is memory
        assert await sent(hub, b"a", b"b") == bytes([binary.STORED] * 2)
        (first, _) = hub.take(PARTIES[1], 7, 1 << 20)
        assert hub.acknowledge(PARTIES[1], 7, [first.delivery]) == [True]
    assert memory.closed == 1
    async with running_hub(config, lambda path: memory) as (hub, _):
        assert await sent(hub, b"a", b"b", b"c") == bytes([binary.DUPLICATE, binary.DUPLICATE, binary.STORED])
        assert [bytes(m.payload) for m in hub.take(PARTIES[1], 7, 1 << 20)] == [b"content of b", b"content of c"]
    assert memory.starts == 2
    assert not list(tmp_path.iterdir())


def test_one_relay_has_a_database_and_a_killed_one_has_it_no_more(tmp_path: Path) -> None:
    """A second one deleted the first one's segments, and handed out what that one had handed out."""
    first = SqliteStore(tmp_path / "relay.db")
    with pytest.raises(UnreadableError, match="another relay serves the database") as refused:
        SqliteStore(tmp_path / "relay.db")
    assert "one relay for a database" in refused.value.hint
    first.close()
    SqliteStore(tmp_path / "relay.db").close()
    with open_process(tmp_path) as child:
        with pytest.raises(UnreadableError, match="another relay"):
            SqliteStore(tmp_path / "relay.db")
        child.kill()
        child.wait()
        SqliteStore(tmp_path / "relay.db").close()


@contextlib.contextmanager
def open_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the store."""
    code = (
        "import sys, pathlib; from uvcc_engine.relay.db import SqliteStore;"
        " store = SqliteStore(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder / "relay.db")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("before", [None, 0o644])
def test_nobody_else_may_read_what_the_relay_holds(tmp_path: Path, before: int | None) -> None:
    """The files beside the database hold its messages first; they take the mode that it has when they are made."""
    path = tmp_path / "relay.db"
    if before is not None:
        path.touch(before)
    umask = os.umask(0)
    try:
        store = SqliteStore(path)
    finally:
        os.umask(umask)
    modes = {one.name: one.stat().st_mode & 0o077 for one in tmp_path.iterdir()}
    store.close()
    assert {"relay.db", "relay.db-wal", "relay.db-shm"} <= modes.keys()
    assert set(modes.values()) == {0}


def test_a_disk_that_messages_filled_has_room_to_note_that_they_were_taken(tmp_path: Path) -> None:
    """A relay whose own messages had filled its disk refused everything for good: no deletion could be written."""
    room = [10_000]
    store = SqliteStore(tmp_path / "relay.db", lambda: room[0])
    fates: SimpleQueue[Exception | None] = SimpleQueue()

    def put(ids: Sequence[int] = (), deletes: Sequence[int] = (), size: int = 6000) -> Exception | None:
        rows: list[MessageRow] = [(n, 1, b"%d" % n, 0, 0, 0.0, size, bytes(size)) for n in ids]
        queues = [(1, "g", 0, 1, bytes(8))] if 1 in ids else []
        store.put(Write(queues, rows, [(n,) for n in deletes], [], 0.0, fates.put))
        return fates.get(timeout=120)

    assert put([1]) is None
    assert put([2, 3]) is not None  # 12,000 bytes
    room[0] = -5
    refused = put([4])
    assert isinstance(refused, OSError)
    assert refused.errno == errno.ENOSPC
    assert put(deletes=[1]) is None
    assert list(store.pending()) == []
    room[0] = 10_000
    assert put([5]) is None
    assert [row[0] for row in store.pending()] == [5]
    store.close()


def test_what_is_kept_free_is_a_part_of_a_small_disk_and_little_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks, free, left in ((2048, 256, 0), (2048, 1256, 1000 * 4096), (1 << 28, 1 << 20, (1 << 32) - (32 << 20))):
        disk = SimpleNamespace(f_frsize=4096, f_bavail=free, f_blocks=blocks)
        monkeypatch.setattr(os, "statvfs", lambda path, disk=disk: disk)
        assert room_beside(tmp_path) == left


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_database_is_told_by_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "relay.db"
    store = SqliteStore(path)
    done = threading.Event()
    rows: list[MessageRow] = [(n, 1, b"%d" % n, 0, 0, 0.0, 4000, os.urandom(4000)) for n in range(1, 200)]
    store.put(Write([(1, "g", 0, 1, bytes(8))], rows, [], [], 0.0, lambda failure: done.set()))
    assert done.wait(120)
    store.close()
    size = path.stat().st_size
    if damage == "cut":
        os.truncate(path, size // 2 + 1000)
    else:
        with path.open("r+b") as f:
            f.seek(4096)
            f.write(os.urandom(size - 4096))

    async def begin() -> None:
        async with running_hub(RelayConfig(db=path, credentials={})):
            pass

    with pytest.raises(UnreadableError, match=r"cannot use the relay database .*relay\.db") as told:
        asyncio.run(begin())
    assert "full" in told.value.hint


def test_the_hubs_clock_goes_on_evenly_whoever_sets_the_other() -> None:
    wall, elapsed = [1000.0], [50.0]
    clock = steady(lambda: wall[0], lambda: elapsed[0])
    for stepped in (1000.0, 4600.0, -2600.0):
        wall[0], elapsed[0] = stepped, elapsed[0] + 1.0
    assert clock() == 1003.0
