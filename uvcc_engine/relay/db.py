"""The relay's durable store: SQLite in WAL mode, synchronous=FULL, one writer thread that commits in groups.

Whatever is waiting when the disk is free again goes into one transaction, so a slow disk makes groups larger instead
of queues longer. A caller learns of its commit after it is durable.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.relay.segments import LARGE, Segments
from uvcc_engine.relay.store import MessageRow, QueueRow, SeenRow, Write

_KEPT_FREE: Final = 32 << 20  # bytes of the disk, or an eighth of a small one
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS queues (
  queue INTEGER PRIMARY KEY, grp TEXT NOT NULL, sender INTEGER NOT NULL, receiver INTEGER NOT NULL, box BLOB NOT NULL,
  UNIQUE (grp, sender, receiver, box)) STRICT;
CREATE TABLE IF NOT EXISTS messages (
  id INTEGER PRIMARY KEY, queue INTEGER NOT NULL, msg_id BLOB NOT NULL, slot INTEGER NOT NULL, crc INTEGER NOT NULL,
  expires REAL NOT NULL, size INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, payload BLOB) STRICT;
CREATE TABLE IF NOT EXISTS seen (
  queue INTEGER NOT NULL, msg_id BLOB NOT NULL, crc INTEGER NOT NULL, size INTEGER NOT NULL, until REAL NOT NULL,
  PRIMARY KEY (queue, msg_id)) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS forgetting ON seen (until);
CREATE TABLE IF NOT EXISTS high_mark (one INTEGER PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL) STRICT;
"""
_INSERT: Final = "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_DELETE: Final = "DELETE FROM messages WHERE id = ?"
_REMEMBER: Final = "INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?)"
_FORGET: Final = "DELETE FROM seen WHERE until <= ?"
_FORGET_ONE: Final = "DELETE FROM seen WHERE queue = ? AND msg_id = ?"
_QUEUE: Final = "INSERT INTO queues VALUES (?, ?, ?, ?, ?)"
PENDING: Final = "SELECT id, queue, msg_id, slot, crc, expires, size FROM messages ORDER BY id"
PAYLOAD: Final = "SELECT payload, segment, offset, size FROM messages WHERE id = ?"
_SEGMENTS: Final = "SELECT segment FROM messages WHERE segment > 0"
_SEGMENT_OF: Final = "SELECT segment FROM messages WHERE id = ? AND segment > 0"
_SEGMENT_COLUMN: Final = 7
_MARK: Final = "INSERT INTO high_mark VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET value = max(value, excluded.value)"


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """What the disk or the database refuses is told by its name. Raises UnreadableError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        hint = "is its disk full? One that is damaged can be moved away: workers send again what was not taken"
        raise UnreadableError(f"cannot use the relay database {path}: {error}", hint) from error


def sole_user(folder: Path) -> int:
    """Keep others from this store for as long as the returned descriptor is open: a second relay would delete what the
    first has not entered yet, and hand out what that one has handed out. Raises UnreadableError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        what = f"another relay serves the database beside {folder}"
        raise UnreadableError(what, "one relay for a database: end the other, or give this one its own") from None
    return fd


def connect(path: Path) -> sqlite3.Connection:
    """Open the database. Raises UnreadableError."""
    with usable(path):
        # SQLite's files beside it, in which all messages stand first, take its mode as it is when they are made
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(path, 0o600)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA wal_autocheckpoint = 4000")
        db.execute("PRAGMA cache_size = -16000")
        db.executescript(_SCHEMA)
    return db


def room_beside(folder: Path) -> int:
    """Bytes that messages may still take on the disk of ``folder``: what is free but for what bookkeeping may need."""
    disk = os.statvfs(folder)
    return disk.f_frsize * (disk.f_bavail - min(_KEPT_FREE // disk.f_frsize, disk.f_blocks // 8))


class Writer:
    """The thread that writes. ``commits`` counts transactions, ``rows`` what they stored.

    Before messages fill the disk they are refused: to note that others were taken needs room, too, and without that
    none would ever come back.
    """

    def __init__(self, db: sqlite3.Connection, segments: Segments, room: Callable[[], int]) -> None:
        """``room``: bytes that messages may still take on the disk."""
        self._db = db
        self._segments = segments
        self._room = room
        segments.keep_only(number for (number,) in db.execute(_SEGMENTS))
        self._queue: SimpleQueue[Write | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="relay-writer", daemon=True)
        self.commits = 0
        self.rows = 0
        self._thread.start()

    def put(self, write: Write) -> None:
        """Hand over a write; it is part of the next transaction."""
        self._queue.put(write)

    def close(self) -> None:
        """Commit what is left and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            group = [self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get())
            writes = self._with_room([w for w in group if w is not None])
            failure: Exception | None = None
            try:
                if writes:
                    self._commit(writes)
            except (sqlite3.Error, OSError) as error:
                failure = error
                if self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # then every further write fails, and is told so
                        self._db.execute("ROLLBACK")
            for write in writes:
                write.done(failure)
            if None in group:
                return

    def _with_room(self, writes: list[Write]) -> list[Write]:
        """Those of which the disk has room for the messages; the others are told that it has not."""
        wanted = sum(len(row[-1]) for w in writes for row in w.inserts)
        if not wanted or wanted <= self._room():
            return writes
        self._segments.give_back()
        with contextlib.suppress(sqlite3.Error):  # a reader may have it open, or the disk no room for that either
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if wanted <= self._room():
            return writes
        for write in writes:
            if write.inserts:
                write.done(OSError(errno.ENOSPC, "what is left of the disk is kept for bookkeeping"))
        return [w for w in writes if not w.inserts]

    def _commit(self, writes: list[Write]) -> None:
        rows = self._place([row for w in writes for row in w.inserts])
        try:
            gone = self._transact(writes, rows)
        except sqlite3.Error:
            for row in rows:
                if row[_SEGMENT_COLUMN]:
                    self._segments.release(row[_SEGMENT_COLUMN])
            raise
        self.commits += 1
        self.rows += len(rows)
        for number in gone:
            self._segments.release(number)

    def _transact(self, writes: list[Write], rows: list[tuple[Any, ...]]) -> list[int]:
        """One transaction; returns the segment of each large payload that it deleted."""
        db = self._db
        gone: list[int] = []
        db.execute("BEGIN IMMEDIATE")
        for w in writes:
            if w.queues:
                db.executemany(_QUEUE, w.queues)
            for ident in w.deletes if self._segments.in_use else ():
                gone += [number for (number,) in db.execute(_SEGMENT_OF, ident)]
            if w.deletes:
                db.executemany(_DELETE, w.deletes)
            if w.seen:
                db.executemany(_REMEMBER, w.seen)
            if w.forgotten:
                db.executemany(_FORGET_ONE, w.forgotten)
            if w.forget_before:
                db.execute(_FORGET, (w.forget_before,))
            if w.mark:
                db.execute(_MARK, (w.mark,))
        if rows:
            db.executemany(_INSERT, rows)
        db.execute("COMMIT")
        return gone

    def _place(self, rows: list[MessageRow]) -> list[tuple[Any, ...]]:
        """Rows for the table; large payloads go to the segments first, durably."""
        large = [row[-1] for row in rows if row[-2] >= LARGE]
        places = iter(self._segments.append(large) if large else ())
        return [(*row[:-1], *next(places), None) if row[-2] >= LARGE else (*row[:-1], 0, 0, row[-1]) for row in rows]


class DatabaseReader:
    """Reads on the caller's thread, over its own connection."""

    def __init__(self, path: Path, segments: Segments) -> None:
        self._db = connect(path)
        self._path, self._segments = path, segments

    def queues(self) -> list[QueueRow]:
        with usable(self._path):
            return list(self._db.execute("SELECT queue, grp, sender, receiver, box FROM queues"))

    def pending(self) -> Iterator[tuple[int, int, bytes, int, int, float, int]]:
        """(id, queue, msg_id, slot, crc, expires, size) of every message, oldest first, in primary-key order."""
        with usable(self._path):
            yield from self._db.execute(PENDING)

    def seen(self) -> Iterator[SeenRow]:
        with usable(self._path):
            yield from self._db.execute("SELECT queue, msg_id, crc, size, until FROM seen ORDER BY until")

    def next_start(self) -> int:
        """A number that grows with every start; ids of different starts never meet."""
        with usable(self._path):
            start = int(self._db.execute("PRAGMA user_version").fetchone()[0]) + 1
            self._db.execute(f"PRAGMA user_version = {start}")
        return start

    def high_mark(self) -> int:
        """See ``store.Store``."""
        with usable(self._path):
            row = self._db.execute("SELECT value FROM high_mark").fetchone()
        return 0 if row is None else int(row[0])

    def payload(self, ident: int) -> bytes | None:
        row = self._db.execute(PAYLOAD, (ident,)).fetchone()
        if row is None:
            return None
        payload, segment, offset, size = row
        return self._segments.read(segment, offset, size) if segment else bytes(payload)

    def close(self) -> None:
        self._db.close()


class SqliteStore:
    """The store in a folder: one connection that reads, one thread that writes."""

    def __init__(self, path: Path, room: Callable[[], int] | None = None) -> None:
        """``room``: see :class:`Writer`. Raises UnreadableError where the database cannot be used."""
        folder = path.with_name(path.name + "-segments")
        with usable(path):
            self._segments = Segments(folder)
            self._sole_user = sole_user(folder)
            try:
                self._db, self._reader = connect(path), DatabaseReader(path, self._segments)
                self._writer = Writer(self._db, self._segments, room or partial(room_beside, folder))
            except BaseException:
                os.close(self._sole_user)
                raise
        self.put = self._writer.put
        self.queues, self.pending, self.seen = self._reader.queues, self._reader.pending, self._reader.seen
        self.next_start, self.payload = self._reader.next_start, self._reader.payload
        self.high_mark = self._reader.high_mark

    @property
    def commits(self) -> int:
        return self._writer.commits

    @property
    def rows(self) -> int:
        return self._writer.rows

    def close(self) -> None:
        """Commit what is left and close every file."""
        self._writer.close()
        self._reader.close()
        self._db.close()
        self._segments.close()
        os.close(self._sole_user)
