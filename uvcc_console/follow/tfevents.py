"""Scalars of a TensorBoard event file that grows: the framing of TFRecord and the few fields of ``Event`` that count.

A reader of our own, because the ``tensorboard`` package (with protobuf and its grpc) reads files by name and waits for
no half record, while these bytes come over SSH; and because the console does not depend on it. It is total: a record
whose checksum is wrong is counted, and behind a damaged length nothing can be found, so the file is given up.
Layout: tensorflow/core/util/event.proto, framework/summary.proto, lib/io/record_writer.cc; CRC32C, masked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import google_crc32c

MOST: Final = 4 << 20
"""A record that is longer holds pictures: it is passed over."""
MOST_VALUES: Final = 256
_HEAD: Final = 12
_FORMATS: Final = {1: ("<f", 4), 2: ("<d", 8), 3: ("<i", 4), 9: ("<q", 8), 19: ("<e", 2)}


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars that one event has, by their tags."""

    step: int
    values: dict[str, float]


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord writes it."""
    crc = int(google_crc32c.value(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class EventFile:
    """Takes the bytes of one file in pieces. ``bad`` counts records of no use; ``broken``: nothing more comes."""

    def __init__(self) -> None:
        self._rest = b""
        self._skip = 0
        self.bad = 0
        self.broken = False

    @property
    def pending(self) -> int:
        """Bytes of a record that is not whole yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Scalars]:
        """The scalars of the records that these bytes complete."""
        if self.broken:
            return []
        buffer, found, at = self._rest + data, [], 0
        while True:
            if self._skip:
                step = min(self._skip, len(buffer) - at)
                self._skip -= step
                at += step
                if self._skip:
                    break
            if len(buffer) - at < _HEAD:
                break
            (size,) = struct.unpack_from("<Q", buffer, at)
            if struct.unpack_from("<I", buffer, at + 8)[0] != masked_crc(buffer[at : at + 8]):
                self.broken, self.bad, at = True, self.bad + 1, len(buffer)
                break
            if size > MOST:
                at, self._skip = at + _HEAD, size + 4
                continue
            end = at + _HEAD + size
            if len(buffer) < end + 4:
                break
            record = buffer[at + _HEAD : end]
            scalars = _event(record) if struct.unpack_from("<I", buffer, end)[0] == masked_crc(record) else None
            if scalars is None:
                self.bad += 1
            elif scalars.values:
                found.append(scalars)
            at = end + 4
        self._rest = buffer[at:]
        return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("no number")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message. Raises ValueError for what is none."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value: int | bytes
            value, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError("no such kind of field")
        if at > len(data):
            raise ValueError("cut short")
        yield key >> 3, value


def _event(record: bytes) -> Scalars | None:
    """The scalars of an ``Event``; None for bytes that are none."""
    step = 0
    values: dict[str, float] = {}
    try:
        for number, value in _fields(record):
            if number == 2 and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif number == 5 and isinstance(value, bytes):
                for inner, one in _fields(value):
                    if inner == 1 and isinstance(one, bytes) and len(values) < MOST_VALUES:
                        tag, scalar = _value(one)
                        if tag and scalar is not None:
                            values[tag] = scalar
    except (ValueError, struct.error):
        return None
    return Scalars(step, values)


def _value(data: bytes) -> tuple[str, float | None]:
    """(tag, scalar) of a ``Summary.Value``; no scalar for pictures, histograms and texts."""
    tag, scalar, plugin = "", None, "scalars"
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode(errors="replace")[:200]
        elif number == 2 and len(value) == 4:
            scalar = float(struct.unpack("<f", value)[0])
        elif number == 8:
            scalar = _tensor(value)
        elif number == 9:
            plugin = _plugin(value) or plugin
    return tag, scalar if plugin == "scalars" else None


def _plugin(metadata: bytes) -> str:
    for number, value in _fields(metadata):
        if number == 1 and isinstance(value, bytes):
            for inner, name in _fields(value):
                if inner == 1 and isinstance(name, bytes):
                    return name.decode(errors="replace")
    return ""


def _tensor(data: bytes) -> float | None:
    """The only element of a ``TensorProto``; None where there are several, or none that is a number."""
    kind, content, found = 0, b"", None
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number == 4 and isinstance(value, bytes):
            content = value
        elif number in (5, 6) and isinstance(value, bytes):
            if len(value) != (4 if number == 5 else 8):
                return None
            found = float(struct.unpack("<f" if number == 5 else "<d", value)[0])
        elif number in (7, 10):
            whole = value if isinstance(value, int) else _varint(value, 0)[0]
            found = float(whole - (1 << 64) if whole >> 63 else whole)
    form = _FORMATS.get(kind)
    if content and form is not None and len(content) == form[1]:
        found = float(struct.unpack(form[0], content)[0])
    return found if found is None or not math.isinf(found) else math.copysign(1e300, found)
