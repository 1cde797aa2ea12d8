"""How share components are written down: the content of sealed files, in both directions between owner and parties."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.parsing.canonical import canonical

Ring = NDArray[np.int64]


def encode_component(component: int, frac_bits: int, tensors: Mapping[str, Ring]) -> bytes:
    """One component of named tensors as canonical bytes: LE32 header length, header (JSON), values in name order."""
    names = sorted(tensors)
    header = canonical(
        {"component": component, "frac_bits": frac_bits, "tensors": [[n, list(tensors[n].shape)] for n in names]}
    )
    body = [tensors[n].astype("<i8").tobytes() for n in names]
    return b"".join([struct.pack("<I", len(header)), header, *body])


def decode_component(component: int, encoded: memoryview) -> tuple[int, dict[str, Ring]]:
    """(frac_bits, tensors) of an encoded component. Raises UnreadableError unless it is exactly that component."""
    try:
        (length,) = struct.unpack_from("<I", encoded)
        header = json.loads(bytes(encoded[4 : 4 + length]))
        if header["component"] != component:
            raise ValueError(f"component {header['component']} in place of {component}")
        offset, found = 4 + length, {}
        for name, shape in header["tensors"]:
            count = _count(shape, len(encoded) - offset)
            found[tensor_name(name)] = np.frombuffer(encoded, "<i8", count, offset).astype(np.int64).reshape(shape)
            offset += 8 * count
        if offset != len(encoded):
            raise ValueError("bytes left over")
        return fractional_bits(header["frac_bits"]), found
    except (ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise UnreadableError(f"a share component cannot be read: {error}", "make the sealed file again") from error


def fractional_bits(stated: Any) -> int:
    """How many bits of a number of 64 are said to lie behind its point. Raises ValueError for what can be no such."""
    if type(stated) is not int or not 0 <= stated < 64:
        raise ValueError("it has no number of fractional bits")
    return stated


def tensor_name(stated: Any) -> str:
    """The name of a tensor, which labels streams and is shown: a word of ASCII. Raises ValueError for any other."""
    if not isinstance(stated, str) or not stated.isascii() or not stated.isprintable():
        raise ValueError("a tensor has no name that can be shown")
    return stated


def _count(shape: Any, left: int) -> int:
    """Number of elements of a tensor of this shape, which an owner wrote down. Raises ValueError if it cannot be."""
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
        raise ValueError("a tensor has no shape")
    count = math.prod(shape)
    if 8 * count > left:
        raise ValueError(f"a tensor of {count} values is longer than what is left")
    return count


def pack_halves(halves: list[tuple[bytes, bytes]]) -> bytes:
    """The two (32-byte blinding, encoded component) of a party as the plaintext of its box."""
    return b"".join(blind + struct.pack("<Q", len(part)) + part for blind, part in halves)


def unpack_halves(plain: bytes | bytearray) -> list[tuple[bytes, memoryview]]:
    """The inverse of :func:`pack_halves`. Raises UnreadableError."""
    view, found = memoryview(plain), []
    for _ in range(2):
        if len(view) < 40:
            raise UnreadableError("the sealed file is cut short", "make it again")
        blind, (length,) = bytes(view[:32]), struct.unpack_from("<Q", view, 32)
        found.append((blind, view[40 : 40 + length]))
        view = view[40 + length :]
    if len(view):
        raise UnreadableError("the sealed file has bytes left over", "make it again")
    return found
