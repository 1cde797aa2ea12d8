"""Text from elsewhere, made fit to be shown: the one place that decides what may reach a terminal, screen or journal.

A pod, a provider, a relay or a bundle may put into its words what moves the cursor, retitles the window, writes the
clipboard, hides text or turns its direction round. None of that survives :func:`clean`. Standard library only.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import lru_cache
from typing import Final

LIMIT: Final = 4096
MORE: Final = "…"
_ST = r"(?:\x07|\x1b\\|\x9c)"
_INSIDE = r"[^\x07\x1b\x90\x98\x9b-\x9f\n]*"  # ends where another begins: no text is read twice
_SEQUENCE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, modes
    rf"|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f]){_INSIDE}{_ST}"  # OSC and device strings: titles, links, clipboard
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~]"  # charsets, resets
)
_ODD: Final = re.compile(r"[^ -~]")
_ODD_IN_BLOCK: Final = re.compile(r"[^ -~\n\t]")
_MARKUP: Final = re.compile(r"(?<!\\)(\\*)(<(?=[A-Za-z/!?])|(?<=\])\(|\|)")  # with what would escape the escape
_SPACES: Final = frozenset(("Zs", "Zl", "Zp"))
_NOTHING: Final = frozenset(("Cc", "Cf", "Cs"))


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    """What one character becomes: itself, a space, nothing, or the sign for what has no shape."""
    if character.isprintable():
        return character
    kind = unicodedata.category(character)
    if kind in _SPACES or character in "\n\r\t\v\f\x85":
        return " "
    return "" if kind in _NOTHING else "\ufffd"


def clean(text: str, limit: int = LIMIT) -> str:
    """One line of printable text, at most ``limit`` characters; what was cut off is marked with an ellipsis.

    Without control characters, escape sequences, bidirectional overrides and isolates, zero-width characters and lone
    surrogates; line ends, tabs and every other kind of space are a space. Printable Unicode stays as it is.
    """
    if not text.isprintable():
        text = _ODD.sub(lambda m: _shown(m.group()), _SEQUENCE.sub("", text[: 8 * limit + 64]))
    return text if len(text) <= limit else text[: max(0, limit - 1)] + MORE


def clean_block(text: str) -> str:
    """Text of several lines, of any length: as :func:`clean`, but line feeds and tabs stay."""
    if text.isprintable():
        return text
    return _ODD_IN_BLOCK.sub(lambda m: _shown(m.group()), _SEQUENCE.sub("", text))


def in_markdown(text: str) -> str:
    """A line of text for a file in Markdown, cleaned: no tag, link or picture begins in it, no cell of a table ends."""
    return _MARKUP.sub(lambda m: f"{m[1] * 2}\\{m[2]}", clean(text))


def counted(n: int, word: str, plural: str = "") -> str:
    """``1 pod``, ``3 pods``."""
    return f"{n} {word}" if n == 1 else f"{n} {plural or word + 's'}"


def size_words(replicas: int, stages: int, tensor: int, parties: str = "") -> str:
    """``2 replicas x 3 parties x 1 stage x 1 tensor rank``; ``parties`` with its own sign behind it, or nothing."""
    return f"{counted(replicas, 'replica')} x {parties}{counted(stages, 'stage')} x {counted(tensor, 'tensor rank')}"


def complain(text: str) -> None:
    """A diagnostic on standard error, cleaned."""
    sys.stderr.write(clean_block(text) + "\n")
    sys.stderr.flush()
