"""A text as rows: windows of letters, and the letter that comes next behind each. What ``text`` in a schema says.

    text: {positions: 32, stride: 16, letters: [' ', a, b, c]}
    split: {test: 0.1, seed: 7}

``letters: bytes`` takes the file's bytes for its 256 letters; ``tokenizer: words.json`` in place of letters reads the
text by the owner's own tokenizer, and what is said of letters holds for its tokens. The text is cut into pieces of
``PIECE`` windows' length, and a hash of a piece's number decides on which side it is, so that no letter is in both
training and test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.data.features import check_sides, side_counts, side_of
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.own_tokenizer import TextTokenizer
from uvcc_engine.data.schema import NEXT, Schema, TextPlan
from uvcc_engine.data.sets import Dataset, Ints, one_hot

PIECE: Final = 8
MOST_BYTES: Final = 64 << 20
MOST_VALUES: Final = 1 << 29
"""Numbers that the windows may be together, one-hot: 4 GiB while they are shared."""
MOST_LETTERS: Final = 256
_POSITIONS: Final = 32


def read_text(path: Path, letters: tuple[str, ...]) -> tuple[Ints, str]:
    """The text as numbers of its letters, ``[length]``, and the SHA-256 of the file. Raises ConfigError naming line and
    column of a letter that the schema does not have."""
    raw = _bytes(path)
    digest = hashlib.sha256(raw).hexdigest()
    if letters == BYTES:
        return np.frombuffer(raw, np.uint8).astype(np.int64), digest
    text = _decoded(path, raw)
    numbers = {letter: at for at, letter in enumerate(letters)}
    found = np.fromiter((numbers.get(letter, -1) for letter in text), np.int64, len(text))
    if (odd := np.flatnonzero(found < 0)).size:
        at = int(odd[0])
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise ConfigError(
            f"{path.name}, line {line}, column {column} holds {text[at]!r}, which is none of the schema's letters",
            "add it to text.letters, or write letters: bytes",
        )
    return found, digest


def read_tokens(path: Path, schema: Schema) -> tuple[Ints, str]:
    """The same by the schema's tokenizer: numbers of its tokens, ``[length]``, and the text's digest.

    Raises ConfigError if that has another hash than when the schema was read."""
    assert schema.text is not None
    raw = _bytes(path)
    own = TextTokenizer(Path(schema.text.tokenizer), len(schema.values))
    if own.sha256 != schema.text.sha256:
        raise ConfigError(f"{schema.text.tokenizer} has changed since the schema was read", "start again")
    return own.encode(_decoded(path, raw)), hashlib.sha256(raw).hexdigest()


BYTES: Final = tuple(chr(value) for value in range(256))
"""The letters of a text that is read byte by byte."""


def _bytes(path: Path) -> bytes:
    refuse_streams(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}", "check the path") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path.name} is longer than {MOST_BYTES >> 20} MiB", "train on a part of it")
    return raw


def _decoded(path: Path, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8, or write letters: bytes"
        raise UnreadableError(f"{path.name}, byte {error.start}, is not UTF-8 text", hint) from error


def text_dataset(path: Path, schema: Schema) -> tuple[Dataset, str]:
    """The windows as one-hot rows (rows, positions * letters) with labels (rows, positions), and the file's digest.

    Raises ConfigError for a text that is too short, or too long for its stride, and as :func:`read_text`.
    """
    plan = schema.text
    assert plan is not None
    found, digest = read_tokens(path, schema) if plan.tokenizer else read_text(path, schema.values)
    piece = PIECE * plan.positions + 1
    starts = [
        np.arange(first, min(first + piece, len(found)) - plan.positions, plan.stride)
        for first in range(0, len(found), piece)
    ]
    sides = [np.full(len(some), side_of(schema, str(k))) for k, some in enumerate(starts)]
    first, side = (np.concatenate([np.zeros(0, np.int64), *some]) for some in (starts, sides))
    check_sides(path.name, schema, side_counts(side), "windows")
    if len(first) * plan.positions * len(schema.values) > MOST_VALUES:
        raise ConfigError(
            f"{path.name}: {len(first)} windows of {plan.positions} letters of {len(schema.values)} are too many",
            "give text.stride a larger number, or train on a part",
        )
    windows = found[first[:, None] + np.arange(plan.positions + 1)]
    x, y = one_hot(windows[:, :-1], len(schema.values)), windows[:, 1:]
    return Dataset.of_sides(x, y, side, len(schema.values)), digest


def infer_text(path: Path) -> tuple[Schema, Mapping[str, str]]:
    """A first schema of a text: the letters that it has, or its bytes where they are more than ``MOST_LETTERS``.

    Raises UnreadableError, or ConfigError for a text of fewer than two letters.
    """
    text = _decoded(path, _bytes(path))
    letters = tuple(sorted(set(text)))
    notes = {}
    if len(letters) > MOST_LETTERS:
        notes["text"] = f"{len(letters)} different letters: read byte by byte"
        letters = BYTES
    if len(letters) < 2:
        raise ConfigError(f"{path.name} has {len(letters)} different letters", "bring a text")
    positions = min(_POSITIONS, max(2, len(text) // (4 * PIECE)))
    plan = TextPlan(positions, max(1, positions // 2))
    return Schema("next letter", letters, (), test=0.1, kind=NEXT, text=plan), notes
