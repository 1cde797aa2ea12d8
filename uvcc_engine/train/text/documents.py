"""What a source of documents is to the trainer: streams of numbered texts, or of tokens where that was done before.

Numbers are the source's own order: the same on every rank and in a world of any size. Which rank reads which number is
the stream's to say; it yields that rank's numbers in rising order, and may yield others' between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """A document that was tokenised before; ``bucket``, from 0 to 99, decides whether it is held out.

    A token that no loss is taken of is given as :func:`unasked` makes it.
    """

    tokens: list[int]
    bucket: int


def unasked(token: int) -> int:
    """A token as it stands in rows where no loss is taken of it: below 0. Its own inverse."""
    return ~token


class DocumentStream(Protocol):
    """An opened source."""

    def __next__(self) -> tuple[int, str | TokenDocument]: ...

    def owner(self, number: int, world: int) -> int:
        """The rank that reads a document in a world of ``world`` ranks."""
        ...

    def facts(self) -> dict[str, Any]:
        """What gives the numbers their meaning: ``open`` refuses a source of which they do not hold any more."""
        ...


class DocumentSource(Protocol):
    """Opens streams at the first document that ``rank`` has not read. ``facts`` are an earlier stream's, or empty."""

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream: ...


class Numbered:
    """A stream whose documents are dealt to the ranks in turn, and whose numbers need no other facts."""

    def __init__(self, documents: Iterator[tuple[int, str | TokenDocument]]) -> None:
        self._documents = documents

    def __next__(self) -> tuple[int, str | TokenDocument]:
        return next(self._documents)

    def owner(self, number: int, world: int) -> int:
        return number % world

    def facts(self) -> dict[str, Any]:
        return {}


class WholeText(Protocol):
    """Text that can be read from its beginning to its end."""

    def one_pass(self) -> Iterator[str]:
        """Every document once."""
        ...
