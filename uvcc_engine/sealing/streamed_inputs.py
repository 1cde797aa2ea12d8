"""Inputs in secret shares, split and sealed row by row: what a data owner with gigabytes sends.

Components 0 and 1 are pseudo-random, so they travel as 32-byte keys that their holders expand (ChaCha20, a key for each
tensor); only component 2 = x - x0 - x1 has the size of the data, and goes to parties 1 and 2. Commitments bind the keys
and component 2 as ``inputs`` says. Rows of different tensors follow each other as they were read, in blocks.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.sealing.box_keys import derive
from uvcc_engine.sealing.commitments import Commitment, commitment
from uvcc_engine.sealing.components import Ring, fractional_bits, tensor_name
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sealing.streamed_box import BoxWriter
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

FORMAT: Final = "uvcc-input-2"
MOST_VALUES: Final = 1 << 36
"""Of one owner: more fit no pod's memory."""
_BLOCK: Final = struct.Struct("<HI")
_HOLDS: Final = {0: (0, 1), 1: (1, 2), 2: (2, 0)}
_WHOLE: Final = 2
_AT_ONCE: Final = 1 << 17
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SealedFile:
    """One party's file: its size and the SHA-256 of its bytes, in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StreamedShares:
    """What was written, and what the policy binds."""

    commitments: tuple[str, str, str]
    files: tuple[SealedFile, SealedFile, SealedFile]


def share_rows(
    shapes: Shapes,
    blocks: Iterable[tuple[str, Ring]],
    frac_bits: int,
    pods: Sequence[Sequence[PublicIdentity]],
    owner: Identity,
    purpose: Purpose,
    out: Sequence[Path],
) -> StreamedShares:
    """Split blocks of rows as they come, and seal two components to each party's pods, into three files.

    ``shapes``: of the whole tensors; ``blocks``: (name, rows), which together must fill them. ``pods``: of each
    replica, three identities. Raises ConfigError if the blocks do not fill the tensors.
    """
    if any(len(p) != PARTIES for p in pods) or len({i.x25519 for p in pods for i in p}) != PARTIES * len(pods):
        raise ConfigError("three different party identities are needed", "list the public identities of p0, p1, p2")
    keys, blinds = [os.urandom(32), os.urandom(32)], [os.urandom(32) for _ in range(PARTIES)]
    heads = [encode_head(c, frac_bits, shapes, keys[c] if c < _WHOLE else None) for c in range(PARTIES)]
    bound = Commitment(blinds[_WHOLE])
    bound.update(heads[_WHOLE])
    with ExitStack() as stack:
        boxes = []
        for party in range(PARTIES):
            file = stack.enter_context(open(out[party], "wb", opener=_private))
            about = {"format": FORMAT, "party": party, "purpose": purpose.to_json()}
            boxes.append(BoxWriter(file, sender=owner, to=[p[party].x25519 for p in pods], about=about))
            boxes[party].write(_front([(blinds[c], heads[c]) for c in _HOLDS[party]]))
        for piece in _whole_component(shapes, blocks, keys):
            bound.update(piece)
            for party in (1, 2):
                boxes[party].write(piece)
        digests = [box.close() for box in boxes]
        first, second, third = (SealedFile(box.size, digest) for box, digest in zip(boxes, digests, strict=True))
    found = [commitment(blinds[c], heads[c]) for c in range(_WHOLE)]
    return StreamedShares((found[0], found[1], bound.hex()), (first, second, third))


def read(
    plain: bytes | bytearray, about: Mapping[str, Any], *, party: int, commitments: Sequence[str]
) -> tuple[int, dict[str, tuple[Ring, Ring]]]:
    """(frac_bits, pairs of components) of an opened file.

    Raises UnreadableError, and VerificationError naming what does not hold.
    """
    if {key: value for key, value in about.items() if key != "purpose"} != {"format": FORMAT, "party": party}:
        raise VerificationError("inputs", f"the sealed input says {about}", f"this is party {party}; send its own file")
    parts, at = head_parts(plain, party)
    body = memoryview(plain)[at:]
    heads = [read_head(head, component) for component, (_, head) in parts.items()]
    for component, (blind, head) in parts.items():
        made = Commitment(blind)
        made.update(head)
        if component == _WHOLE:
            made.update(body)
        if made.hex() != commitments[component]:
            raise VerificationError(
                "inputs", f"component {component} is not the one the policy commits to", "share the data again"
            )
    if heads[0].frac_bits != heads[1].frac_bits or heads[0].shapes != heads[1].shapes:
        raise VerificationError("inputs", "the two components describe different tensors", "share the data again")
    held = [fill_tensors(head.shapes, body) if head.key is None else _expanded(head.shapes, head.key) for head in heads]
    if party == 0 and len(body):
        raise UnreadableError("the sealed file has bytes left over", "make it again")
    return heads[0].frac_bits, {name: (held[0][name], held[1][name]) for name in heads[0].shapes}


@dataclass(frozen=True, slots=True)
class _Head:
    frac_bits: int
    shapes: dict[str, tuple[int, ...]]
    key: bytes | None


def encode_head(component: int, frac_bits: int, shapes: Shapes, key: bytes | None) -> bytes:
    told: dict[str, Any] = {"component": component, "frac_bits": frac_bits}
    told["tensors"] = [[name, list(shape)] for name, shape in sorted(shapes.items())]
    return canonical(told | ({"key": key.hex()} if key is not None else {}))


def read_head(head: bytes, component: int) -> _Head:
    """Raises UnreadableError: an owner wrote it."""
    try:
        found = json.loads(head)
        shapes = {tensor_name(name): tuple(shape) for name, shape in found["tensors"]}
        sizes = [n for shape in shapes.values() for n in shape]
        if found["component"] != component or any(type(n) is not int or not 0 <= n < 1 << 36 for n in sizes):
            raise ValueError("another component, or a tensor without a shape")
        if sum(math.prod(shape) for shape in shapes.values()) > MOST_VALUES or not all(shapes.values()):
            raise ValueError("its tensors have too many values, or none")
        key = bytes.fromhex(found["key"]) if component != _WHOLE else None
        if key is not None and len(key) != 32:
            raise ValueError("its key is not of 32 bytes")
        return _Head(fractional_bits(found["frac_bits"]), shapes, key)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"a share component cannot be read: {error}", "make the sealed file again") from error


def _front(parts: Sequence[tuple[bytes, bytes]]) -> bytes:
    """What stands before the rows: each part's blinding and head."""
    return b"".join(blind + struct.pack("<I", len(head)) + head for blind, head in parts)


def head_parts(plain: bytes | bytearray, party: int) -> tuple[dict[int, tuple[bytes, bytes]], int]:
    """Component -> (blinding, head), and where the rows begin. Raises UnreadableError."""
    at, found = 0, {}
    for component in _HOLDS[party]:
        if len(plain) < at + 36:
            raise UnreadableError("the sealed file is cut short", "make it again")
        (length,) = struct.unpack_from("<I", plain, at + 32)
        found[component] = (bytes(plain[at : at + 32]), bytes(plain[at + 36 : at + 36 + length]))
        at += 36 + length
    return found, at


def _stream(key: bytes, name: str) -> Any:
    return Cipher(ChaCha20(derive(key, f"split|{name}"), bytes(16)), mode=None).encryptor()


def _whole_component(
    shapes: Shapes, blocks: Iterable[tuple[str, Ring]], keys: Sequence[bytes]
) -> Iterator[bytes | memoryview]:
    """Component 2 in pieces: block heads and values. Raises ConfigError if the blocks do not fill the tensors."""
    names = sorted(shapes)
    streams = {name: [_stream(key, name) for key in keys] for name in names}
    left = {name: shape[0] for name, shape in shapes.items()}
    zeros, random = bytes(8 * _AT_ONCE), np.empty(_AT_ONCE, "<i8")
    for name, rows in blocks:
        if name not in left or rows.shape[1:] != tuple(shapes[name][1:]) or len(rows) > left[name]:
            raise ConfigError(f"{name} has other rows than were counted", "has the data file changed? share it again")
        left[name] -= len(rows)
        yield _BLOCK.pack(names.index(name), len(rows))
        flat = rows.reshape(-1)
        for start in range(0, flat.size, _AT_ONCE):
            part = flat[start : start + _AT_ONCE].astype("<i8")
            some = random[: part.size]
            with np.errstate(over="ignore"):
                for stream in streams[name]:
                    stream.update_into(memoryview(zeros)[: 8 * part.size], some.view(np.uint8).data)
                    np.subtract(part, some, out=part)
            yield part.view(np.uint8).data
    if any(left.values()):
        raise ConfigError("fewer rows came than were counted", "has the data file changed? share it again")


def _expanded(shapes: Shapes, key: bytes) -> dict[str, Ring]:
    found = {}
    for name, shape in shapes.items():
        values, stream = np.empty(math.prod(shape), "<i8"), _stream(key, name)
        zeros = bytes(8 * min(_AT_ONCE, values.size))
        for start in range(0, values.size, _AT_ONCE):
            some = values[start : start + _AT_ONCE]
            stream.update_into(memoryview(zeros)[: 8 * some.size], some.view(np.uint8).data)
        found[name] = values.astype(np.int64, copy=False).reshape(shape)
    return found


def fill_tensors(shapes: Shapes, body: memoryview) -> dict[str, Ring]:
    """Raises UnreadableError if the blocks do not fill the tensors exactly."""
    if 8 * sum(math.prod(shape) for shape in shapes.values()) > len(body):
        raise UnreadableError("the sealed file has fewer rows than it says", "make it again")
    names = sorted(shapes)
    found = {name: np.empty(shape, np.int64) for name, shape in shapes.items()}
    filled, at = dict.fromkeys(names, 0), 0
    try:
        while at < len(body):
            index, rows = _BLOCK.unpack_from(body, at)
            at += _BLOCK.size
            name = names[index]
            into = found[name][filled[name] : filled[name] + rows]
            if len(into) != rows:
                raise ValueError(f"{name} has more rows than it says")
            into[...] = np.frombuffer(body, "<i8", into.size, at).reshape(into.shape)
            at, filled[name] = at + 8 * into.size, filled[name] + rows
        if any(filled[name] != len(found[name]) for name in names):
            raise ValueError("there are fewer rows than it says")
    except (ValueError, IndexError, struct.error) as error:
        raise UnreadableError(f"a share component cannot be read: {error}", "make the sealed file again") from error
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
