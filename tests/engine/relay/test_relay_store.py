"""A store from outside: the hub keeps its promises over whatever implements ``Store``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relay_kit import PARTIES

from uvcc_engine.relay import binary
from uvcc_engine.relay.config import RelayConfig
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.server import running_hub
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
    return await asyncio.wait_for(fates, 10)


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
