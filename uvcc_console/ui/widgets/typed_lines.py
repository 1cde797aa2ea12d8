"""Lines that were typed, and what is certain of the one that is being typed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def candidates(text: str, offered: Iterable[str]) -> list[str]:
    """All that the last word of a line may become."""
    last = text.rpartition(" ")[2]
    return [word for word in offered if word.startswith(last)]


def completed(text: str, offered: Iterable[str]) -> tuple[str, list[str]]:
    """(the line as far as it is certain, all that its last word may be)."""
    before, space, last = text.rpartition(" ")
    found = candidates(text, offered)
    if not found:
        return text, []
    certain = last
    while all(word.startswith(found[0][: len(certain) + 1]) for word in found) and len(certain) < len(found[0]):
        certain = found[0][: len(certain) + 1]
    end = " " if len(found) == 1 and not certain.endswith(("=", " ")) else ""
    return f"{before}{space}{certain}{end}", found


class TypedLines:
    """Lines that were typed, the newest last; no line twice."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._lines = list(lines)
        self._at = len(self._lines)
        self._draft = ""

    def add(self, line: str) -> None:
        """Remember a line that was entered."""
        if line.strip():
            self._lines = [*(x for x in self._lines if x != line), line][-200:]
        self.rewind()

    def rewind(self) -> None:
        """Back to the end, where a new line is typed."""
        self._at, self._draft = len(self._lines), ""

    def move(self, by: int, now: str) -> str:
        """The line before (-1) or after (1) the one that is shown; ``now`` is what stands there."""
        if self._at == len(self._lines):
            if by > 0:
                return now
            self._draft = now
        self._at = min(len(self._lines), max(0, self._at + by))
        return self._lines[self._at] if self._at < len(self._lines) else self._draft
