"""Scalars for TensorBoard, written directly: an event file is a sequence of checksummed protobuf records.

Formats: TFRecord (length, masked CRC32C, data, masked CRC32C) and tensorflow.Event of TensorBoard's event.proto.
Writing it takes no library, so every run has its curves; only looking at them needs TensorBoard. A training that goes
on from an earlier step says so as TensorBoard expects it, which then forgets the points that come again.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import google_crc32c


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _record(data: bytes) -> bytes:
    def masked(b: bytes) -> bytes:
        crc = google_crc32c.value(b)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


_START = b"\x08\x01"  # SessionLog{status: START}


class ScalarFile:
    """One ``events.out.tfevents.*`` file. Each call is one write, so a reader never sees half a record."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        # readers take the files in the order of their names, also where the clock was set back since the last one
        earlier = [re.match(r"events\.out\.tfevents\.(\d{1,18})\.", path.name) for path in folder.iterdir()]
        self.empty = not any(earlier)  # no point stands in an earlier file, nor in this one yet
        second = max([int(clock()), *(int(found[1]) + 1 for found in earlier if found)])
        name = f"events.out.tfevents.{second}.{os.uname().nodename}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._file.write(_record(struct.pack("<Bd", 0x09, clock()) + _field(3, b"brain.Event:2")))

    def restart(self, step: int) -> None:
        """Training goes on after ``step``: points of later steps, in earlier files too, are void."""
        self._file.write(
            _record(struct.pack("<Bd", 0x09, self._clock()) + b"\x10" + _varint(step + 1) + _field(7, _START))
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """One point per tag at ``step``."""
        self.empty = False
        summary = b"".join(
            _field(1, _field(1, tag.encode()) + struct.pack("<Bf", 0x15, value)) for tag, value in values.items()
        )
        head = struct.pack("<Bd", 0x09, self._clock()) + b"\x10" + _varint(step)
        self._file.write(_record(head + _field(5, summary)))

    def close(self) -> None:
        self._file.close()
