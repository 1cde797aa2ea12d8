"""A hub over a real database whose commits happen at once, with a clock that the test moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from uvcc_engine.relay import binary
from uvcc_engine.relay.config import Credential, RelayConfig
from uvcc_engine.relay.db import DatabaseReader, Writer, connect
from uvcc_engine.relay.hub import Hub
from uvcc_engine.relay.segments import Segments
from uvcc_engine.relay.store import Write

PARTIES = {p: Credential(p, "g", frozenset({0, 1, 2} - {p})) for p in range(3)}


class InlineWriter(Writer):
    """Commits in the caller's thread; ``broken`` makes the disk refuse, ``held`` collects instead of committing."""

    def __init__(self, folder: Path) -> None:
        self.segments = Segments(folder / "segments", segment_bytes=1 << 20)
        self._db = connect(folder / "relay.db")
        self._segments = self.segments
        self._segments.keep_only(n for (n,) in self._db.execute("SELECT segment FROM messages WHERE segment > 0"))
        self.commits = self.rows = 0
        self.broken: Exception | None = None
        self.held: list[Write] | None = None

    def put(self, write: Write) -> None:
        if self.held is not None:
            self.held.append(write)
            return
        if self.broken is None:
            self._commit([write])
        write.done(self.broken)

    def release(self) -> None:
        held, self.held = self.held or [], None
        for write in held:
            self.put(write)

    def close(self) -> None:
        self._db.close()
        self.segments.close()


class Bench:
    """A hub, its writer and its clock."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = settings
        self.now = 1000.0
        self.open()

    def open(self) -> None:
        config = RelayConfig(db=self.folder / "relay.db", credentials={}, **self.settings)
        self.writer = InlineWriter(self.folder)
        self.reader = DatabaseReader(config.db, self.writer.segments)
        r = self.reader
        parts = {"queues": r.queues, "pending": r.pending, "seen": r.seen, "next_start": r.next_start}
        store: Any = SimpleNamespace(put=self.writer.put, payload=r.payload, **parts)
        self.hub = Hub(config, store, lambda then: then(), lambda: self.now)

    def reopen(self) -> None:
        """As after kill -9: nothing is flushed."""
        self.reader.close()
        self.writer.close()
        self.open()

    def send(self, src: int, dst: int, *payloads: bytes, ids: list[bytes] | None = None, **more: Any) -> bytes:
        """Enqueue and return the fates; ids default to the payloads."""
        box = more.pop("box", 7)
        slot, ttl = more.pop("slot", binary.STORE), more.pop("ttl", 0)
        names = ids or [b"id-" + p[:40] for p in payloads]
        items = [binary.Item(dst, slot, ttl, i, p) for i, p in zip(names, payloads, strict=True)]
        found: list[bytes] = []
        self.hub.enqueue(more.pop("who", PARTIES[src]), box, items, found.append)
        return found[0] if found else b"pending"

    def take(self, party: int, box: int = 7, **more: Any) -> list[binary.Message]:
        return self.hub.take(PARTIES[party], box, more.pop("max_bytes", 1 << 20), **more)

    def ack(self, party: int, messages: list[binary.Message], box: int = 7) -> list[bool]:
        return self.hub.acknowledge(PARTIES[party], box, [m.delivery for m in messages])
