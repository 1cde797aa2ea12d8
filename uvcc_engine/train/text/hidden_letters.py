"""Prose in which three capital letters are hidden, and asked for in the last line: a needle task that is text, too.

A document is a passage in small letters; three of its characters are capitals, one each of A-H, I-P and Q-X. Its last
line gives them back in some order: ``2K1C3X``, the group's number and then the letter. To predict a letter a model has
to find it in the passage, however far back it stands; whoever only sees the last line has one chance in eight.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.train.text.documents import DocumentStream, Numbered, TokenDocument, WholeText, unasked

GROUPS: Final = ("ABCDEFGH", "IJKLMNOP", "QRSTUVWX")
CHANCE: Final = 1 / 8
ASKED: Final = 2 * len(GROUPS) + 1  # bytes of the last line, with what divides it from the passage
SHORTEST, LONGEST = 8, 248  # bytes of a passage in training
STRETCHES: Final = 100  # of the text; passages of some are held out, see data.val_percent
_EASY, _EASY_UP_TO = 5000, 16  # so many documents have passages of at most so many bytes
_DOCUMENTS_A_BYTE: Final = 6  # behind them; until passages are as long as they may be
_WHOLE: Final = 5  # stretches, the first to be held out, whose passages are of any length from the beginning


def longest(number: int, stretch: int) -> int:
    """How many bytes the passage of document ``number`` may have: a letter near by is learned first, and at once.

    In long passages alone nothing is learned for a long time: a letter is one of hundreds that attention begins with.
    """
    if stretch < _WHOLE:
        return LONGEST
    return min(LONGEST, _EASY_UP_TO + max(0, number - _EASY) // _DOCUMENTS_A_BYTE)


_KEPT: Final = frozenset(string.ascii_lowercase + string.punctuation + " ")


@dataclass(frozen=True)
class Hideout:
    """The text that letters are hidden in, as one line without capitals and digits. Raises UnreadableError if short."""

    texts: WholeText | Sequence[str]

    @cached_property
    def stretches(self) -> list[str]:
        """The text in a hundred parts of equal length, in an order in which neighbours are not held out together."""
        texts = self.texts if isinstance(self.texts, Sequence) else self.texts.one_pass()
        words = " ".join(" ".join(texts).lower().split())
        text = "".join(c for c in words if c in _KEPT)
        size = len(text) // STRETCHES
        if size <= LONGEST:
            raise UnreadableError(f"{len(text):,} characters are too few to hide letters in", "a text of 25,000")
        return [text[at * size : (at + 1) * size] for at in (37 * n % STRETCHES for n in range(STRETCHES))]

    def passage(self, draw: random.Random, stretch: int, length: int, within: float = 1.0) -> tuple[bytes, list[int]]:
        """A document of ``length`` bytes and a last line, and where in it the letters are asked for.

        The letters stand in the first ``within`` of the passage. Raises ConfigError if ``length`` has no room or the
        text none for it.
        """
        text = self.stretches[stretch]
        if not SHORTEST <= length <= len(text):
            raise ConfigError(f"a passage of {length} bytes", f"{SHORTEST} to {len(text)} with this text")
        start = draw.randrange(len(text) - length + 1)
        body = list(text[start : start + length])
        letters = [draw.choice(group) for group in GROUPS]
        for place, letter in zip(draw.sample(range(int(len(body) * within)), len(GROUPS)), letters, strict=True):
            body[place] = letter
        order = draw.sample(range(len(GROUPS)), len(GROUPS))
        asked = "".join(f"{group + 1}{letters[group]}" for group in order)
        answers = [len(body) + 2 + 2 * n for n in range(len(GROUPS))]
        return f"{''.join(body)}\n{asked}".encode(), answers


@dataclass(frozen=True, slots=True)
class HiddenLetters:
    """Endlessly many such documents, the same for the same seed. The loss is that of the
    answers: beside it the prose would drown what there is to learn."""

    hideout: Hideout
    seed: int

    def open(self, first: int, rank: int, world: int, facts: dict[str, Any]) -> DocumentStream:
        return Numbered(self._documents(first))

    def _documents(self, first: int) -> Iterator[tuple[int, TokenDocument]]:
        number = first
        while True:
            draw = random.Random(f"{self.seed}/{number}")
            stretch = draw.randrange(STRETCHES)
            document, answers = self.hideout.passage(draw, stretch, draw.randint(SHORTEST, longest(number, stretch)))
            tokens = [t if n in answers else unasked(t) for n, t in enumerate(document)]
            yield number, TokenDocument(tokens, stretch)
            number += 1
