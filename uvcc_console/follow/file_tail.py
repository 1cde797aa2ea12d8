"""How far a growing file has been read: whole lines only, from a cursor, with rotation and truncation told. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from uvcc_console.follow.listing import FileStat

LONGEST: Final = 256 << 10
WHOLE: Final = 64 << 20
"""A file that is larger when it is met first is read from its last part on."""
LAST: Final = 16 << 20
PIECE: Final = 1 << 20


@dataclass(slots=True)
class Tail:
    """One file. ``at`` is the offset behind what was read; ``rest`` what of it is no whole line yet."""

    ino: int = 0
    at: int = 0
    rest: bytes = b""
    whole: int = WHOLE
    last: int = LAST
    overlong: int = 0
    skipped: int = 0  # bytes before the part that was read first
    _skipping: bool = field(default=False)

    def look(self, now: FileStat) -> str:
        """What has become of the file: "" | rotated | truncated. It is then read from its beginning again."""
        told = ""
        if self.ino and now.ino != self.ino:
            told = "rotated"
        elif now.size < self.at:
            told = "truncated"
        if told or not self.ino:
            self.ino, self.rest, self._skipping = now.ino, b"", False
            self.at = 0 if told or now.size <= self.whole else now.size - self.last
            if not told:
                self.skipped, self._skipping = self.at, self.at > 0
        return told

    def wants(self, now: FileStat) -> tuple[int, int]:
        """(offset, count) of what is to be read next; a count of 0 where nothing is new."""
        return self.at, min(PIECE, max(0, now.size - self.at))

    @property
    def cursor(self) -> list[int]:
        """Inode, and the offset behind the last whole line: where to go on after a new start."""
        return [self.ino, self.at - len(self.rest)]

    def take(self, data: bytes) -> list[str]:
        """The lines that these bytes complete; one longer than anybody reads is passed over and counted."""
        self.at += len(data)
        *ends, self.rest = (self.rest + data).split(b"\n")
        found = []
        for end in ends:
            if self._skipping:
                self._skipping = False  # the end of what was too long, or of the line that we came into
            elif len(end) > LONGEST:
                self.overlong += 1
            else:
                found.append(end.removesuffix(b"\r").decode(errors="replace"))
        if self._skipping:
            self.rest = b""
        elif len(self.rest) > LONGEST:
            self.rest, self._skipping = b"", True
            self.overlong += 1
        return found
