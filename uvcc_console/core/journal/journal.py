"""The run's journal: an append-only SQLite file. Whatever anybody shows or resumes is a view of it.

Several processes may append (the conductor, the halt sidecar, a CLI verb); readers poll ``since``. Appends are
durable (WAL, synchronous=FULL) before the call returns: the halt ladder relies on it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.core.events.event_base import is_harmless
from uvcc_console.core.folding.bulk_folding import Folding
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal_file import hint_of, opened
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import UnreadableError, UvccError
from uvcc_engine.contract.parsing.untrusted import as_timestamp

BUSY_S = 10.0
KEEP_AFTER = 2_000  # events that a reader folded: from here on a kept snapshot pays
SUM_UP_AFTER = 200  # the same for the summary, which is small
MANY: Final = 256  # rows of a page from which the quick parser pays for being loaded
_DECODER = json.JSONDecoder()
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_NAMES: Final[dict[object, str]] = {name.encode(): name for name in ev.kinds()}
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, ts REAL NOT NULL,
  source TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_kind ON events(kind, seq);
"""


class Journal:
    """One open journal. Not shared between threads: open one each."""

    def __init__(
        self,
        path: Path,
        *,
        source: str = "",
        readonly: bool = False,
        busy_s: float = BUSY_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``busy_s``: how long to wait for another process that writes. Raises UnreadableError.

        To open it may take longer: who is the last one to close it holds it alone, for as long as its disk takes.
        """
        self.path = path
        self._source = source
        self._clock = clock
        if readonly and not _is_there(path):
            raise UnreadableError(f"no journal at {path}", "see the runs with: uvcc runs")
        try:
            wait_s = max(busy_s, BUSY_S)
            self._db = opened(path, wait_s) if readonly else sqlite3.connect(path, timeout=wait_s, isolation_level=None)
            self._db.text_factory = bytes  # text that is not UTF-8 spoils its row, not the page
            if not readonly:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA busy_timeout={round(1000 * busy_s)}")
        except sqlite3.DatabaseError as e:
            hint = "is it a file, and yours to read?" if readonly else "is the disk full, or the folder not writable?"
            raise UnreadableError(f"journal {path}: {e}", hint) from e

    def append(self, *batch: ev.Event) -> int:
        """Write events durably, in order; returns the last sequence number. Raises UvccError if the disk refuses."""
        now = self._clock()
        rows = [(e.ts or now, self._source, e.kind, _ENCODER.encode(ev.to_json(e))) for e in batch]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO events(ts, source, kind, data) VALUES (?,?,?,?)", rows)
            last = self._db.execute("SELECT last_insert_rowid()").fetchone()[0] if rows else 0
            self._db.execute("COMMIT")
        except sqlite3.DatabaseError as e:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            hint = "nothing was lost; is its disk full, or read-only?"
            raise UvccError(f"cannot write the journal {self.path}: {e}", hint) from e
        return int(last)

    def since(self, seq: int, limit: int = 10_000, kinds: Sequence[str] = ()) -> Iterator[tuple[int, ev.Event]]:
        """Events after ``seq`` in order, all or only those of ``kinds``; kinds of a newer version are skipped.

        A row that cannot be an event comes as ``LinesMalformed``. Raises UnreadableError if the file is no journal.
        """
        only = f"AND kind IN ({','.join('?' * len(kinds))}) " if kinds else ""
        given, rows = False, self._page(only, seq, kinds, limit)
        while rows:
            read = event_of if len(rows) < MANY else quick_reader()
            for number, ts, kind, data in rows:
                event = read(kind, ts, data)
                if event is not None:
                    given = True
                    yield number, event
            if given or len(rows) < limit:
                return
            rows = self._page(only, rows[-1][0], kinds, limit)  # a page of nothing known is not the end

    def _page(self, only: str, seq: int, kinds: Sequence[str], limit: int) -> list[tuple[int, Any, Any, Any]]:
        try:
            return self._db.execute(
                f"SELECT seq, ts, kind, data FROM events WHERE seq > ? {only}ORDER BY seq LIMIT ?", (seq, *kinds, limit)
            ).fetchall()
        except (sqlite3.DatabaseError, OverflowError) as e:
            raise UnreadableError(f"journal {self.path}: {e}", hint_of(e)) from e

    def last_seq(self) -> int:
        """The newest row's number. Raises UnreadableError if the file is no journal."""
        try:
            row = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()
        except sqlite3.DatabaseError as e:
            raise UnreadableError(f"journal {self.path}: {e}", hint_of(e)) from e
        return int(row[0])

    def newest(self) -> tuple[int, float]:
        """Number and time of the newest row; (0, 0.0) where there is none or the row has no time.

        Raises UnreadableError if the file is no journal.
        """
        try:
            row = self._db.execute("SELECT seq, ts FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        except sqlite3.DatabaseError as e:
            raise UnreadableError(f"journal {self.path}: {e}", hint_of(e)) from e
        return (int(row[0]), as_timestamp(row[1]) or 0.0) if row else (0, 0.0)

    def mark(self, seq: int) -> str:
        """What tells this journal at this row from another: the first row's time and that row's; empty without them."""
        try:
            rows = self._db.execute("SELECT seq, ts FROM events WHERE seq IN (1, ?) ORDER BY seq", (seq,)).fetchall()
        except (sqlite3.DatabaseError, OverflowError):
            return ""
        return repr(rows) if rows and rows[0][0] == 1 and rows[-1][0] == seq else ""

    def close(self) -> None:
        self._db.close()


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as e:  # of a folder that may not be entered
        raise UnreadableError(f"cannot read the journal {path}: {e.strerror}", "look who may read it") from e


def event_of(kind: Any, ts: Any, data: Any) -> ev.Event | None:
    """One row as an event. Columns may hold anything: SQLite does not keep to its types, nor do damaged disks."""
    name = _NAMES.get(kind) or (kind.decode(errors="replace") if isinstance(kind, bytes) else str(kind))
    harmless = False
    try:
        if isinstance(data, bytes) and data.startswith(b'{"'):  # UTF-8, as JSON is told by its first two bytes
            data = data.decode("utf-8", "surrogatepass")
            harmless = is_harmless(data)
        fields = _decoded(data) if isinstance(data, str) else json.loads(data)
    except (ValueError, TypeError, RecursionError):
        fields = None
    return ev.from_json(name, ts, fields, harmless=harmless)


@cache
def quick_reader() -> Callable[[Any, Any, Any], ev.Event | None]:
    """:func:`event_of` by a parser three times as fast. It takes the time of a glance to load, so only long reads do.

    It is asked of text alone that needs no cleaning and no escapes; whatever else there is, or it refuses, is read as
    every row is.
    """
    from pydantic_core import from_json

    names = _NAMES

    def read(kind: Any, ts: Any, data: Any) -> ev.Event | None:
        name = names.get(kind)
        if name is None or type(data) is not bytes or not data.startswith(b'{"'):
            return event_of(kind, ts, data)
        try:
            if not is_harmless(data.decode()):
                return event_of(kind, ts, data)
            fields = from_json(data)
        except ValueError:
            return event_of(kind, ts, data)
        return ev.from_json(name, ts, fields, harmless=True)

    return read


def _decoded(data: str) -> Any:
    """The value of a JSON text. One that begins and ends with it, as every row of ours, is scanned at once."""
    try:
        value, end = _DECODER.raw_decode(data)
    except json.JSONDecodeError:
        end = -1
    return value if end == len(data) else _DECODER.decode(data)


class Follower:
    """Keeps a snapshot up to date with a journal; ``poll`` returns the new events."""

    def __init__(self, journal: Journal, start: Snapshot | None = None) -> None:
        self._journal = journal
        self.snapshot = start or Snapshot()

    def poll(self, limit: int = 10_000) -> list[ev.Event]:
        """Fold what is new; at most ``limit`` events, so that a caller can stay responsive."""
        new: list[ev.Event] = []
        folding = Folding(self.snapshot)
        for seq, event in self._journal.since(self.snapshot.seq, limit):
            folding.add(event, seq)
            new.append(event)
        self.snapshot = folding.snapshot
        return new


def read_all(journal: Journal, start: Snapshot | None = None) -> Snapshot:
    """Read from ``start`` to the end of the journal; returns the snapshot that it folds to."""
    folding, seq = Folding(start or Snapshot()), -1
    while seq != folding.seq:
        seq = folding.seq
        for number, event in journal.since(seq):
            folding.add(event, number)
    return folding.snapshot


def read_newest(journal: Journal) -> Snapshot:
    """The same for a reader in a hurry: from the snapshot kept beside the journal, its curves thinned if they are long.

    One that had much to fold keeps what it has found for the next, where the folder may be written.
    """
    run_dir = journal.path.parent
    known = snapshot_cache.load(run_dir, journal.mark) or Snapshot()
    s = read_all(journal, known)
    if s.seq - known.seq >= KEEP_AFTER:
        with contextlib.suppress(OSError):
            snapshot_cache.keep(run_dir, s, journal.mark(s.seq))
    return s


def read_summary(journal: Journal) -> Snapshot:
    """What whoever asks about many runs needs of one: the summary kept beside the journal, brought up to date.

    One that is missing, damaged or far behind is made anew. Curves, log and heartbeats are not in it.
    """
    run_dir = journal.path.parent
    known = snapshot_cache.load(run_dir, journal.mark, snapshot_cache.SUMMARY)
    if known is None or journal.last_seq() - known.seq > KEEP_AFTER:
        s = read_newest(journal)
    else:
        s = read_all(journal, known)
    if known is None or s.seq - known.seq >= SUM_UP_AFTER:
        with contextlib.suppress(OSError):
            snapshot_cache.keep_summary(run_dir, s, journal.mark(s.seq))
    return s


def iter_events(path: Path, kinds: Sequence[str] = (), seq: int = 0) -> Iterable[tuple[int, ev.Event]]:
    """Every event of a journal file after ``seq``, in order; of ``kinds`` alone it costs what these cost."""
    journal = Journal(path, readonly=True)
    try:
        while batch := list(journal.since(seq, kinds=kinds)):
            yield from batch
            seq = batch[-1][0]
    finally:
        journal.close()
