"""Text to ids: UTF-8 bytes, GPT-2's byte pairs (Radford et al. 2019) through tiktoken, or a tokenizer of one's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError
from uvcc_engine.contract.run_files import files
from uvcc_engine.train.config import LEAST_VOCAB, MOST_VOCAB, DataConfig

END: Final = "<|endoftext|>"
GPT2_END: Final = 50256  # its number among GPT-2's tokens
LARGEST_FILE: Final = 64 << 20


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


def tokenizer_of(data: DataConfig, vocab: int) -> Tokenizer:
    """The tokenizer that a config names. Raises as ``make_tokenizer`` does, and ConfigError for other than ``vocab``
    symbols."""
    return make_tokenizer(data.tokenizer, data.tokenizer_file or data.merges, vocab)


def tokenizer_id(data: DataConfig) -> str:
    """What tells a tokenizer from others: its name, with the hash of its file where it has one of its own.

    Raises UnreadableError for a file that cannot be read.
    """
    if data.tokenizer != "file":
        return data.tokenizer
    path = Path(data.tokenizer_file).expanduser()
    try:
        return f"file:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    except OSError as e:
        raise UnreadableError(f"cannot read {path}: {e.strerror}", "data.tokenizer_file names it") from e


def make_tokenizer(name: str, path: str = "", vocab: int = 0) -> Tokenizer:
    """byte; gpt2, from a file of merges at ``path`` or as tiktoken finds it; or file, that of Hugging Face at ``path``.

    Raises ConfigError, UnreadableError or UnreachableError with a hint if a vocabulary cannot be had, or if a file's
    has another number of symbols than ``vocab`` (0: any).
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "file":
        return OwnTokenizer(Path(path).expanduser(), vocab)
    merges = path
    try:
        import tiktoken
    except ImportError as e:
        raise ConfigError(
            "the gpt2 tokenizer needs tiktoken", "pip install 'uvcc[train]', or data.tokenizer: byte"
        ) from e
    if merges:
        special = {END: _GPT2.eos}
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


_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_ORDER: Final = (*_PRINTABLE, *(b for b in range(256) if b not in _PRINTABLE))


def byte_characters() -> list[str]:
    """The character that GPT-2's files write for each byte: the printable ones of Latin-1 themselves, the others from
    U+0100 on."""
    there = {b: chr(b if b in _PRINTABLE else 256 + i - len(_PRINTABLE)) for i, b in enumerate(_BYTE_ORDER)}
    return [there[b] for b in range(256)]


def gpt2_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> id from GPT-2's merges: 256 bytes, then one token per line. Raises UnreadableError.

    The file writes bytes as ``byte_characters``.
    """
    as_byte = {c: b for b, c in enumerate(byte_characters())}
    ranks = {bytes([b]): i for i, b in enumerate(_BYTE_ORDER)}
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
    eos = GPT2_END

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids))


class OwnTokenizer:
    """A ``tokenizer.json`` of Hugging Face's tokenizers with the token ``<|endoftext|>``, which text cannot contain.

    Raises ConfigError without that library or for another number of symbols than ``vocab`` (0: any), UnreadableError
    for a file that is none.
    """

    def __init__(self, path: Path, vocab: int = 0) -> None:
        hf = _library()
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise UnreadableError(f"{path} is larger than {LARGEST_FILE >> 20} MiB", "name a tokenizer.json")
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UnreadableError(f"cannot read {path}: {e}", "data.tokenizer_file names a tokenizer.json") from e
        try:
            self._own = hf.Tokenizer.from_str(text)
        except Exception as e:  # the library raises nothing narrower, whatever is wrong with the file
            said = " ".join(str(e).split())[:200]
            raise UnreadableError(f"{path} is no tokenizer: {said}", "uvcc-engine data tokenizer writes one") from e
        end = self._own.token_to_id(END)
        if end is None:
            raise UnreadableError(f"{path} has no token {END}, which ends a document", "add it as a special token")
        size = self._own.get_vocab_size()
        if size > MOST_VOCAB or (vocab and size != vocab):
            raise ConfigError(f"{path} has {size} symbols, model.vocab is {vocab}", f"model.vocab: {size}")
        self._own.encode_special_tokens = True  # an end that a text spells out is text
        self.eos = int(end)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._own.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        return str(self._own.decode(ids, skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab: int, out: Path) -> int:
    """Learn byte pairs of ``texts`` (Sennrich et al. 2016, on bytes) and write them; how many symbols there are.

    There may be fewer than ``vocab`` where the text is short. Raises ConfigError without the library, for a size that
    no tokenizer has, or for a file that exists; UvccError where the disk refuses.
    """
    if not LEAST_VOCAB <= vocab <= MOST_VOCAB:
        raise ConfigError(f"--vocab {vocab}", f"{LEAST_VOCAB} to {MOST_VOCAB}")
    if out.exists():
        raise ConfigError(f"{out} exists", "name another file, or remove it")
    hf = _library()
    own = hf.Tokenizer(hf.models.BPE())
    own.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    own.train_from_iterator(texts, trainer)
    try:
        files.write_atomic(out, own.to_str(pretty=True).encode())
    except OSError as e:
        raise files.write_failed(out, e) from e
    return int(own.get_vocab_size())


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as e:
        hint = "pip install 'uvcc[train]', or data.tokenizer: byte"
        raise ConfigError("a tokenizer of one's own needs the library tokenizers", hint) from e
    return tokenizers
