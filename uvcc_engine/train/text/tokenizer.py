"""Text to ids: UTF-8 bytes, or GPT-2's byte pairs (Radford et al. 2019) through tiktoken."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError


class Tokenizer(Protocol):
    """Text to ids; ``eos`` ends a document."""

    eos: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes; 0, which text does not contain, ends a document."""

    eos = 0

    def encode(self, text: str) -> list[int]:
        return list(text.replace("\0", " ").encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def make_tokenizer(name: str, merges: str = "") -> Tokenizer:
    """byte or gpt2, the latter from a file of merges or as tiktoken finds it.

    Raises ConfigError, UnreadableError or UnreachableError with a hint if the GPT-2 vocabulary cannot be had.
    """
    if name == "byte":
        return ByteTokenizer()
    try:
        import tiktoken
    except ImportError as e:
        raise ConfigError(
            "the gpt2 tokenizer needs tiktoken", "pip install 'uvcc[train]', or data.tokenizer: byte"
        ) from e
    if merges:
        special = {"<|endoftext|>": _GPT2.eos}
        ranks = gpt2_ranks(Path(merges).expanduser())
        return _GPT2(tiktoken.Encoding("gpt2", pat_str=_PIECES, mergeable_ranks=ranks, special_tokens=special))
    try:
        return _GPT2(tiktoken.get_encoding("gpt2"))
    except OSError as e:
        raise UnreachableError(
            f"cannot fetch the GPT-2 vocabulary: {e}",
            "data.merges: a copy of vocab.bpe, TIKTOKEN_CACHE_DIR: a copy of tiktoken's, or data.tokenizer: byte",
        ) from e


_PIECES: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts text before it merges bytes (Radford et al. 2019, encoder.py)."""


def gpt2_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> id from GPT-2's merges: 256 bytes, then one token per line. Raises UnreadableError.

    The file writes bytes as characters: the printable ones of Latin-1 as themselves, the others from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printable + [b for b in range(256) if b not in printable]
    as_byte = {chr(b if b in printable else 256 + i - len(printable)): b for i, b in enumerate(order)}
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    try:
        for line in path.read_text("utf-8").split("\n"):
            if line and not line.startswith("#version"):
                first, second = line.split()
                ranks[bytes(as_byte[c] for c in first + second)] = len(ranks)
    except OSError as e:
        raise UnreadableError(f"cannot read {path}: {e.strerror}", "data.merges names vocab.bpe or merges.txt") from e
    except (ValueError, KeyError) as e:
        raise UnreadableError(f"{path} holds no merges of GPT-2: {e}", "data.merges names vocab.bpe") from e
    if len(ranks) != _GPT2.eos:
        raise UnreadableError(f"{path} makes {len(ranks)} tokens, GPT-2 has {_GPT2.eos}", "take the whole vocab.bpe")
    return ranks


class _GPT2:
    eos = 50256

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids))
