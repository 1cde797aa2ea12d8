"""``uvcc-engine data prepare``: read a source once, tokenise it, and write it as files that a training maps."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.run_files import files
from uvcc_engine.train.config import DataConfig
from uvcc_engine.train.text.data import bucket_of
from uvcc_engine.train.text.documents import DocumentSource
from uvcc_engine.train.text.hidden_letters import HiddenLetters
from uvcc_engine.train.text.prepared import FORMAT, MANIFEST, RECORD, PreparedManifest, PreparedShard, shard_name
from uvcc_engine.train.text.sources import FineWeb, LocalText, PythonManual, make_source
from uvcc_engine.train.text.tokenizer import Tokenizer, tokenizer_id, tokenizer_of

SHARD_TOKENS: Final = 32 << 20
PARTIAL: Final = ".partial"


def one_pass(source: DocumentSource, documents: int) -> Iterator[str]:
    """The texts of one pass, or the first ``documents`` (0: all). Raises ConfigError for a source that has no end, and
    for one whose documents are tokens."""
    if isinstance(source, HiddenLetters):
        hint = "train on it as it is; to prepare its text take data.source: local or python_docs"
        raise ConfigError("data.source=hidden_letters is made while it is read", hint)
    if isinstance(source, LocalText | PythonManual | FineWeb):
        texts = source.one_pass()
    elif documents:
        stream = source.open(0, 0, 1, {})
        texts = (text for _, text in iter(lambda: next(stream), None) if isinstance(text, str))
    else:
        raise ConfigError("this source has no end", "say how many documents: --documents 1000")
    return islice(texts, documents) if documents else texts


def prepare(
    cfg: DataConfig,
    seed: int,
    out: Path,
    *,
    documents: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda _documents, _tokens: None,
) -> PreparedManifest:
    """Write ``out`` whole or not at all; ``progress`` hears of documents and tokens at the end of each shard.

    Raises ConfigError if ``out`` exists or the source cannot be prepared, UnreachableError if it fails on the way,
    UvccError if the disk refuses.
    """
    if cfg.source == "prepared":
        raise ConfigError("data.source is prepared already", "name the source that is to be read")
    if out.exists():
        raise ConfigError(f"{out} exists", "name another folder, or remove it")
    partial = out.with_name(out.name + PARTIAL)
    tokenizer = tokenizer_of(cfg, 0)
    texts = one_pass(make_source(cfg, seed), documents)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a preparation that was cut off
        partial.mkdir(parents=True)
        shards = list(_write(partial, texts, tokenizer, shard_tokens, progress))
        if not shards:
            raise ConfigError("the source has no document", "the files are empty")
        about = f"{cfg.source} {cfg.path}".strip() + (f", the first {documents} documents" if documents else "")
        manifest = PreparedManifest(format=FORMAT, tokenizer=tokenizer_id(cfg), source=about, shards=shards)
        files.write_json(partial / MANIFEST, manifest.to_json())
        partial.rename(out)
        files.fsync_dir(out.parent)
    except OSError as e:
        raise files.write_failed(Path(e.filename or out), e) from e
    return manifest


class _Sink:
    """The two files of one shard while they grow."""

    def __init__(self, folder: Path, at: int) -> None:
        self.name = shard_name(at)
        self._tokens: BinaryIO = (folder / f"{self.name}.tokens").open("wb")
        self._index: BinaryIO = (folder / f"{self.name}.index").open("wb")
        self._hash = hashlib.sha256()
        self.documents = self.tokens = 0

    def add(self, ids: list[int], bucket: int) -> None:
        numbers = array("H", ids)
        if sys.byteorder == "big":
            numbers.byteswap()
        data = numbers.tobytes()
        self._tokens.write(data)
        self.tokens += len(ids)
        self.documents += 1
        record = RECORD.pack(self.tokens, bucket, zlib.crc32(data))
        self._index.write(record)
        self._hash.update(record)

    def close(self) -> PreparedShard:
        for file in (self._tokens, self._index):
            file.flush()
            files.sync_data(file.fileno())
            file.close()
        digest = self._hash.hexdigest()
        return PreparedShard(name=self.name, documents=self.documents, tokens=self.tokens, index_sha256=digest)


def _write(
    folder: Path,
    texts: Iterator[str],
    tokenizer: Tokenizer,
    shard_tokens: int,
    progress: Callable[[int, int], None],
) -> Iterator[PreparedShard]:
    sink, at, documents, tokens = None, 0, 0, 0
    for text in _arriving(texts):
        if sink is None:
            sink = _Sink(folder, at)
        sink.add(tokenizer.encode(text), bucket_of(text))
        if sink.tokens >= shard_tokens:
            documents, tokens, at = documents + sink.documents, tokens + sink.tokens, at + 1
            yield sink.close()
            progress(documents, tokens)
            sink = None
    if sink is not None:
        yield sink.close()


def _arriving(texts: Iterator[str]) -> Iterator[str]:
    """The texts; a source that breaks off is an error of its own, not one of the disk that is written."""
    while True:
        try:
            text = next(texts)
        except StopIteration:
            return
        except OSError as e:
            raise UnreachableError(f"the data source fails: {e}", "nothing was kept; prepare it again") from e
        yield text
