"""Whether a file of tensors would load, told from its header alone: no torch, no numpy, bounded memory.

The format (safetensors): the header's length as 8 bytes little-endian, the header as JSON ({name: {dtype, shape,
data_offsets}}, and ``__metadata__``), then the tensors' bytes without gaps. What comes from a pod is hostile, so every
number is held against the file's size before anything depends on it.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import VerificationError

LONGEST_HEADER: Final = 32 << 20
_LENGTH: Final = struct.Struct("<Q")
_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


def check_tensors(path: Path) -> int:
    """Check the header of a safetensors file against its size; returns how many tensors it holds.

    Raises VerificationError naming the file and what is wrong.
    """
    try:
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            raw = f.read(_LENGTH.size)
            if len(raw) < _LENGTH.size:
                raise _bad(path, "it is shorter than a header's length")
            (length,) = _LENGTH.unpack(raw)
            if length > min(LONGEST_HEADER, size - _LENGTH.size):
                raise _bad(path, f"its header would have {length} bytes, the file has {size}")
            text = f.read(length)
    except OSError as e:
        raise _bad(path, f"it cannot be read: {e.strerror}") from e
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _bad(path, "its header is not JSON") from e
    if not isinstance(header, dict):
        raise _bad(path, "its header is not an object")
    spans = sorted(_span(path, name, entry) for name, entry in header.items() if name != "__metadata__")
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise _bad(path, f"{name[:80]!r} begins at byte {begin}, {at} was due")
        at = end
    if at != size - _LENGTH.size - length:
        raise _bad(path, f"its tensors have {at} bytes, the file has {size - _LENGTH.size - length} for them")
    return len(spans)


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """Where a tensor lies, if that fits its type and shape."""
    if not isinstance(entry, dict):
        raise _bad(path, f"{name[:80]!r} is not described")
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    width = _BYTES.get(str(entry.get("dtype")), 0)
    if not width or shape is None or offsets is None or len(offsets) != 2:
        raise _bad(path, f"{name[:80]!r} has no known type, shape or place")
    count = width
    for n in shape:
        count *= n
        if count > 1 << 62:
            raise _bad(path, f"{name[:80]!r} is too large to be true")
    begin, end = offsets
    if end - begin != count:
        raise _bad(path, f"{name[:80]!r} has {end - begin} bytes, its shape says {count}")
    return begin, end, name


def _sizes(value: Any) -> list[int] | None:
    good = isinstance(value, list) and len(value) <= 64 and all(type(n) is int and n >= 0 for n in value)
    return list(value) if good else None


def _bad(path: Path, why: str) -> VerificationError:
    return VerificationError("tensors", f"{path} would not load: {why}", "fetch it again, or use an earlier checkpoint")
