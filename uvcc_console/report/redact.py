"""Refuse what must not leave: text shaped like shares, keys or tokens. Never quoted in an error.

A bundle that would hold such text is not written at all: a reader of logs cannot tell a harmless random number from a
share, so neither is let through. Lines are not looked at alone: numbers are counted over a window of lines, and what
goes on behind the end of a line is put together again. What each shape is stands in :mod:`shapes`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Final

from uvcc_console.report import secret_shapes
from uvcc_console.report.secret_shapes import KEY, SHARE, TOKEN
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.text import clean_block

__all__ = [
    "KEY",
    "SHARE",
    "TOKEN",
    "Leak",
    "LeakScanner",
    "RedactionError",
    "checked",
    "checked_as_shown",
    "lines_of",
    "secret_kind",
]

WINDOW: Final = 8
NUMBERS: Final = 4  # in a window: integers of the size of shares, or words of 64 bits in hex
BASE64: Final = 120
DUMPED: Final = 2  # lines of a hex dump
LONGEST: Final = 1 << 16
_OVERLAP: Final = 512
_SIGNATURE_LINES: Final = 48


@dataclass(frozen=True, slots=True)
class Leak:
    """Where something must not be: the file's name in the report, the line, and what it looks like."""

    name: str
    line: int
    shape: str


class RedactionError(UvccError):
    """Something that must stay on its pod was about to enter a report."""

    def __init__(self, finding: Leak) -> None:
        super().__init__(
            f"{finding.name}:{finding.line} is {finding.shape}; the report was not written",
            "look at that line on this machine"
            + ("" if finding.name.startswith("(") else f"; --exclude {finding.name} leaves the file out"),
        )
        self.finding = finding


def secret_kind(line: str) -> str:
    """What forbidden thing a line looks like by itself; "" if none."""
    return LeakScanner("").shape(line)


class LeakScanner:
    """Looks at the lines of one file in order; remembers what the lines before have shown."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._seen = 0
        self._window: deque[tuple[int, secret_shapes.Marks]] = deque()
        self._arrays = secret_shapes.Arrays()
        self._hex = 0
        self._above = ""
        self._public = 0
        self._cut = ""

    def check(self, line: str) -> None:
        """Raises RedactionError if the line, or what it goes on, must not leave."""
        self._number += 1
        shape = self.shape(line)
        if shape:
            raise RedactionError(Leak(self._name, self._number, shape))

    def shape(self, line: str) -> str:
        """What the line, together with those before it, looks like; "" if it may leave."""
        if len(line) >= LONGEST or self._cut:  # a part of a longer line: a secret may lie across the cut
            line, self._cut = self._cut + line, line[-_OVERLAP:] if len(line) >= LONGEST else ""
        self._seen += 1
        text = self._without_public(line)
        marks = secret_shapes.measure(text, self._above)
        self._remember(text)
        if marks.certain:
            return marks.certain
        self._hex = self._hex + marks.hex_line if marks.hex_line else 0
        crowded = marks.counts and self._crowded(marks)
        return SHARE if self._hex >= secret_shapes.HEX_RUN or crowded or self._arrays.add(text) else ""

    def _crowded(self, marks: secret_shapes.Marks) -> bool:
        """Whether the last lines together show more than any log does."""
        self._window.append((self._seen, marks))
        while self._window[0][0] <= self._seen - WINDOW:
            self._window.popleft()
        seen = [m for _, m in self._window]
        if sum(m.odd_bigs for m in seen) >= 2 and sum(m.bigs for m in seen) >= NUMBERS:
            return True
        if sum(m.words for m in seen) >= NUMBERS or sum(m.dump for m in seen) >= DUMPED:
            return True
        return sum(m.base64 for m in seen) >= BASE64

    def _without_public(self, line: str) -> str:
        """The line without signatures and public keys, also where these are several lines long."""
        text = secret_shapes.without_public(line)
        if self._public:
            self._public -= 1
            end = secret_shapes.PUBLIC_ENDS.search(text)
            if end:
                self._public = 0
                return text[end.end() :]
            if self._public and len(text) <= 80:
                return ""
            self._public = 0
        elif "-----BEGIN" in text and (begin := secret_shapes.PUBLIC_BEGINS.search(text)):
            self._public = _SIGNATURE_LINES
            return text[: begin.start()]
        return text

    def _remember(self, line: str) -> None:
        """Where a line ends inside a list, keep it: what goes on below has its name there."""
        if not line.rstrip().endswith(("[", "{", ",", ":", "(")):
            self._above = ""
        elif not self._above or secret_shapes.names_something(line):
            self._above = line[-600:]


def lines_of(file: IO[str]) -> Iterator[str]:
    """Lines without their ends, in bounded memory: one that is longer than ``LONGEST`` comes in parts."""
    while line := file.readline(LONGEST):
        yield line.rstrip("\n")


def checked(name: str, lines: Iterable[str]) -> Iterator[str]:
    """The lines, each looked at before it is handed on. Raises RedactionError."""
    sieve = LeakScanner(name)
    for line in lines:
        sieve.check(line)
        yield line


def checked_as_shown(name: str, lines: Iterable[str]) -> Iterator[str]:
    """The lines as they are shown, without control characters, each looked at as it was and as it is shown.

    What is hidden by invisible signs is found so. Up to the first line that holds one, both are the same text, and
    one look tells of both. Raises RedactionError.
    """
    sieve, of_shown = LeakScanner(name), None
    for line in lines:
        shown = clean_block(line)
        if of_shown is None and shown != line:
            of_shown = copy.deepcopy(sieve)
        sieve.check(line)
        if of_shown is not None:
            of_shown.check(shown)
        yield shown
