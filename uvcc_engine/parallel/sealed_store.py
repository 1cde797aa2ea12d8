"""The store where a party's ranks meet, for its own ranks only: torch's interface over sealed connections.

Rank 0 holds the values and serves them behind its :class:`Door`; nobody else's bytes reach this code. A request is a
word and its arguments; what does not parse ends the connection it came over.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from uvcc_engine.parallel.sealed_stream import SealedStream

_SIZE: Final = struct.Struct("<I")
_MOST_BYTES: Final = (64 << 20) + 4096  # of a request or an answer
_MOST_PARTS: Final = 1 << 17
_MOST_KEYS: Final = 1 << 20
_WAIT_S: Final = 1.0  # a longer wait asks again, so that others of the same rank get their turn
_SPARE_S: Final = 30.0  # for an answer that needs no waiting
_YES, _NO = b"1", b"0"


class StoreValues:
    """What is in the store, with everything that a rank may ask of it. For threads."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._news = threading.Condition()

    def set(self, key: bytes, value: bytes) -> None:
        """Raises ValueError where there are too many keys already."""
        with self._news:
            if key not in self._values and len(self._values) >= _MOST_KEYS:
                raise ValueError("the store holds too many keys")
            self._values[key] = value
            self._news.notify_all()

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        with self._news:
            value = int(self._values.get(key, b"0")) + amount
            self.set(key, str(value).encode())
            return value

    def swap(self, key: bytes, expected: bytes, wanted: bytes) -> bytes:
        with self._news:
            found = self._values.get(key)
            if found == expected or (found is None and not expected):
                self.set(key, wanted)
                return wanted
            return expected if found is None else found

    def delete(self, key: bytes) -> bool:
        with self._news:
            return self._values.pop(key, None) is not None

    def count(self) -> int:
        return len(self._values)

    def has(self, keys: Sequence[bytes], limit_s: float = 0.0) -> bool:
        """Whether all keys are there, waiting for them up to ``limit_s``."""
        with self._news:
            return self._news.wait_for(lambda: all(k in self._values for k in keys), limit_s)

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """What a request is answered with. Raises ValueError for what is none."""
        word, *args = request
        if word == b"set" and len(args) == 2:
            self.set(args[0], args[1])
            return []
        if word == b"get" and len(args) == 1:
            value = self.get(args[0])
            return [_NO] if value is None else [_YES, value]
        if word == b"add" and len(args) == 2:
            return [str(self.add(args[0], int(args[1]))).encode()]
        if word == b"swap" and len(args) == 3:
            return [self.swap(*args)]
        if word == b"delete" and len(args) == 1:
            return [_YES if self.delete(args[0]) else _NO]
        if word == b"count" and not args:
            return [str(self.count()).encode()]
        if word == b"has":
            return [_YES if self.has(args) else _NO]
        if word == b"wait":
            return [_YES if self.has(args, _WAIT_S) else _NO]
        raise ValueError(f"no request: {word[:20]!r} of {len(args)}")


def serve(values: StoreValues, stream: SealedStream) -> None:
    """Answer one rank until it leaves; say first from which address it came."""
    try:
        _send(stream, [str(stream.sock.getpeername()[0]).encode()])
        while True:
            _send(stream, values.answer(_received(stream)))
    except (OSError, ValueError):
        stream.close()  # it left, or what it asks is no request: it notices by the end of the connection


class SealedStore(Store):
    """``torch.distributed.Store`` of a rank: the values themselves at rank 0, a connection to them elsewhere."""

    def __init__(self, values: StoreValues | None, stream: SealedStream | None, limit_s: float) -> None:
        """Either of the two. Raises OSError if the connection breaks before rank 0's first word."""
        super().__init__()
        self._values, self._stream = values, stream
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._broken = ""
        self.own_address = self.seen_address = ""
        if stream is not None:
            stream.sock.settimeout(_SPARE_S)
            self.own_address = str(stream.sock.getsockname()[0])
            self.seen_address = _received(stream)[0].decode()

    def _ask(self, *request: bytes) -> list[bytes]:
        if self._values is not None:
            return self._values.answer(request)
        assert self._stream is not None
        with self._turn:
            if self._broken:
                raise RuntimeError(f"the party's store is gone: {self._broken}")
            try:
                self._stream.sock.settimeout(min(_SPARE_S, self._limit_s) + _WAIT_S)
                _send(self._stream, request)
                return _received(self._stream)
            except (OSError, ValueError) as error:
                self._broken = str(error)
                self._stream.close()
                raise RuntimeError(f"the party's store is gone: {error}") from error

    # -- what torch calls --------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for the key, as torch's stores do. Raises RuntimeError if it does not come."""
        found = self._ask(b"get", key.encode())
        if found[0] != _YES:
            self.wait([key])
            found = self._ask(b"get", key.encode())
        if found[0] != _YES:
            raise RuntimeError(f"the party's store lost the key {key}")
        return found[1]

    def add(self, key: str, value: int) -> int:
        return int(self._ask(b"add", key.encode(), str(value).encode())[0])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        pair = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected_value, desired_value))
        return self._ask(b"swap", key.encode(), *pair)[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete", key.encode())[0] == _YES

    def num_keys(self) -> int:
        return int(self._ask(b"count")[0])

    def check(self, keys: list[str]) -> bool:
        return self._ask(b"has", *(k.encode() for k in keys))[0] == _YES

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError, a RuntimeError, if they do not all come in time."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while self._ask(b"wait", *(k.encode() for k in keys))[0] != _YES:
            if time.monotonic() > deadline:
                raise DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(keys)[:200]}")

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._limit_s = timeout.total_seconds()

    def close(self) -> None:
        """Leave; harmless twice."""
        if self._stream is not None:
            self._stream.close()


def _send(stream: SealedStream, parts: Sequence[bytes]) -> None:
    body = b"".join(_SIZE.pack(len(part)) + part for part in parts)
    if len(body) > _MOST_BYTES or len(parts) > _MOST_PARTS:
        raise ValueError(f"a message of {len(body)} bytes is more than the store takes")
    stream.write(_SIZE.pack(len(body)), body)


def _received(stream: SealedStream) -> list[bytes]:
    """The parts of one message. Raises ValueError for what is none, OSError."""
    head = bytearray(_SIZE.size)
    stream.fill(memoryview(head))
    (size,) = _SIZE.unpack(head)
    if size > _MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    body = bytearray(size)
    stream.fill(memoryview(body))
    parts, at = list[bytes](), 0
    while at < size:
        if size - at < _SIZE.size or len(parts) >= _MOST_PARTS:
            raise ValueError("a message that is cut short, or of too many parts")
        (length,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        if at + length > size:
            raise ValueError("a part that is longer than its message")
        parts.append(bytes(body[at : at + length]))
        at += length
    return parts
