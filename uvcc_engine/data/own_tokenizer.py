"""An owner's own ``tokenizer.json`` (Hugging Face's tokenizers) for a text that a private model learns.

It is data of the owner: read on the owner's machine alone, and the policy names it by its hash.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.data.named_file import refuse_streams
from uvcc_engine.data.sets import Ints

LARGEST_FILE: Final = 16 << 20


class TextTokenizer:
    """A tokenizer with its ``tokens`` in the order of their numbers, and the ``sha256`` of its file."""

    def __init__(self, path: Path, most: int) -> None:
        """Read it. Raises UnreadableError for a file that is none, ConfigError for more than ``most`` tokens, fewer
        than 2, numbers with gaps, or without the library."""
        refuse_streams(path)
        try:
            import tokenizers
        except ImportError as e:
            hint = "pip install 'uvcc[train]', or write text.letters"
            raise ConfigError("a tokenizer of one's own needs the library tokenizers", hint) from e
        try:
            with path.open("rb") as file:
                raw = file.read(LARGEST_FILE + 1)
        except OSError as e:
            raise UnreadableError(f"cannot read {path}: {e.strerror}", "text.tokenizer names a tokenizer.json") from e
        if len(raw) > LARGEST_FILE:
            raise UnreadableError(f"{path} is larger than {LARGEST_FILE >> 20} MiB", "name a smaller tokenizer.json")
        self.sha256 = hashlib.sha256(raw).hexdigest()
        try:
            self._own: Any = tokenizers.Tokenizer.from_buffer(raw)
        except Exception as e:  # the library raises nothing narrower, whatever is wrong with the file
            said = " ".join(str(e).split())[:200]
            hint = "`uvcc-engine data tokenizer` writes one"
            raise UnreadableError(f"{path} is no tokenizer: {said}", hint) from e
        numbers: dict[str, int] = self._own.get_vocab(with_added_tokens=True)
        if not 2 <= len(numbers) <= most:
            what = f"{path.name} has {len(numbers)} tokens"
            raise ConfigError(what, f"2 to {most}: each is a class and an input of its own; train a smaller one")
        if sorted(numbers.values()) != list(range(len(numbers))):
            raise ConfigError(f"{path.name}: its tokens' numbers have gaps", "train it anew")
        self.tokens = tuple(sorted(numbers, key=numbers.__getitem__))

    def encode(self, text: str) -> Ints:
        """The text as numbers of its tokens, ``[length]``; no special token is added."""
        found = self._own.encode(text, add_special_tokens=False).ids
        return np.asarray(found, dtype=np.int64)


def tokenizer_of_hash(path: Path, most: int, digest: object, where: str) -> TextTokenizer:
    """The tokenizer in a file, held to the hash that the schema ``where`` gives, if it gives one (None: none).

    Raises ConfigError for another hash, and as ``TextTokenizer``.
    """
    found = TextTokenizer(path, most)
    if digest is not None and digest != found.sha256:
        what = f"{path.name} has the hash {found.sha256}, {where}: text.sha256 is {str(digest)[:80]!r}"
        raise ConfigError(what, "put the old file back, or write the new hash")
    return found
