"""A journal's file, opened to be read: also where nobody may write, in an archive or in somebody else's folder."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path
from typing import Final

_DAMAGED: Final = "the file is no journal, or it is damaged"
_BARRED: Final = (
    "its folder cannot be written, and without that SQLite does not read what was written last: copy the run's folder"
)


def opened(path: Path, wait_s: float, *, mode: str = "rw") -> sqlite3.Connection:
    """A connection that is there to read; ``mode`` as in SQLite's URIs, ``wait_s`` for another process that writes.

    SQLite wants to put files of its own beside a journal. Where it may not, and no rows wait in such a file, the
    journal is read as it lies there. What else is wrong with it is told to whoever asks for rows. Raises sqlite3.Error.
    """
    where = path.absolute().as_uri()
    db = sqlite3.connect(f"{where}?mode={mode}", uri=True, timeout=wait_s, isolation_level=None)
    try:
        db.execute("PRAGMA schema_version").fetchone()
    except sqlite3.DatabaseError as e:
        if _is_barred(e) and not _waiting(path):
            db.close()
            return sqlite3.connect(f"{where}?immutable=1", uri=True, timeout=wait_s, isolation_level=None)
    return db


def hint_of(error: sqlite3.Error | OverflowError) -> str:
    """What somebody can do who cannot read a journal for this reason."""
    return _BARRED if isinstance(error, sqlite3.Error) and _is_barred(error) else _DAMAGED


def _is_barred(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of the number says more of the same
    return code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


def _waiting(path: Path) -> bool:
    """Whether rows may lie in the file that SQLite writes first."""
    try:
        found = path.with_name(f"{path.name}-wal").stat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0
