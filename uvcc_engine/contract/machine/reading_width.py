"""Lines as wide as whoever reads them has columns: broken between words, where a terminal breaks them in the middle.

What goes into a file or a pipe stays as it is, so that a line that one looks for is found whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final, TextIO

_LEAST: Final = 20
_LABEL: Final = re.compile(
    r"\s*\S+(?: \S+)*? {2,}(?=\S)"  # the name of an entry, or a table's first column
    r"|\s*[-*] (?:\[.\] )?(?=\S)"  # the sign of a list
)
_WORD: Final = re.compile(r"\s*(?:ssh-[a-z0-9]+ )?\S+")  # a key's kind and the key are copied together


def columns_of(stream: TextIO) -> int | None:
    """How many columns the reader of a stream has: ``COLUMNS``, else its terminal's; None where nobody said."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit() and int(asked) > 0:
        return max(_LEAST, int(asked))
    try:
        found = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # closed, or with no file behind it
        return None
    return max(_LEAST, found) if found else None


def for_reader(text: str, stream: TextIO) -> str:
    """The text as it goes to a stream."""
    columns = columns_of(stream)
    return text if columns is None else folded(text, columns)


def folded(text: str, columns: int) -> str:
    """Each line within ``columns``, broken between words; a word that is longer, as paths and hashes are, stays whole.

    What goes on begins under the words of its entry, not under the entry's name.
    """
    found: list[str] = []
    under = 0
    for line in text.split("\n"):
        under = _place(line, under, columns)
        found += [line] if len(line) <= columns else _broken(line, under, columns)
    return "\n".join(found)


def _place(line: str, above: int, columns: int) -> int:
    """Where a line's words begin. ``above``: where those of the line before did, which counts for a label that ends
    there with a single space."""
    if (label := _LABEL.match(line)) and label.end() <= columns // 2:
        return label.end()
    if 0 < above < len(line) and line[above - 1] == " " != line[above]:
        return above
    return min(len(line) - len(line.lstrip()), columns // 2)


def _broken(line: str, under: int, columns: int) -> Iterator[str]:
    now = ""
    for word in _WORD.findall(line):
        if len(now) + len(word) > columns and len(now) > under:
            yield now
            now = " " * under + word.lstrip()
        else:
            now += word
    yield now
