"""Help texts within the width of the terminal: paragraphs, lists and alternatives, which argparse does not break."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Final

_MARGIN: Final = 2  # argparse leaves as much free at the right
_ENTRY: Final = re.compile(r"\s+(?:\S+\s{2,})?")  # what stands before an entry's words: its indent, perhaps its name
_LEAST: Final = 20


def width() -> int:
    """How many columns a text of help may take, as argparse reckons."""
    return max(_LEAST, shutil.get_terminal_size().columns - _MARGIN)


def filled(text: str, columns: int) -> str:
    """A text of paragraphs and of lists of indented entries, each within ``columns``: an entry stays one."""
    blocks = groupby(text.strip("\n").splitlines(), key=lambda line: (not line.strip(), line[:1].isspace()))
    return "\n".join(line for (empty, entry), lines in blocks for line in _block(list(lines), empty, entry, columns))


def _block(lines: list[str], empty: bool, entry: bool, columns: int) -> Iterator[str]:
    if empty:
        yield from ("" for _ in lines)
    elif not entry:
        yield from textwrap.wrap(" ".join(lines), columns, break_on_hyphens=False)
    else:
        for line in lines:
            found = _ENTRY.match(line)
            before = found[0] if found else ""
            words = line[len(before) :]
            yield from textwrap.wrap(
                words, columns, initial_indent=before, subsequent_indent=" " * len(before), break_on_hyphens=False
            )


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, which keeps a description's paragraphs and lists, and breaks a usage between alternatives, too."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(filled(text.replace("``", "`"), width - len(indent)), indent)

    def _format_usage(self, *args: object) -> str:
        said: str = super()._format_usage(*args)  # type: ignore[arg-type]
        return "\n".join(line for long in said.split("\n") for line in self._alternatives(long))

    def _alternatives(self, line: str) -> Iterator[str]:
        """A line of the usage, broken before the ``|`` that would pass the edge."""
        parts = line.split(" | ")
        hang = " " * (len(line) - len(line.lstrip()) + 1)
        now = parts[0]
        for part in parts[1:]:
            if len(now) + len(part) + 3 > self._width:
                yield now
                now = f"{hang}| {part}"
            else:
                now += f" | {part}"
        yield now
