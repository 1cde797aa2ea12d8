"""The transcript file ``leaves.bin``: one block per finalised epoch, appended and never changed.

A block is a header (magic, epoch u32, leaf count u64, sid_sub 32, root 32), then the records in canonical order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.formats.reading import open_regular
from uvcc_engine.transcript.leaves.leaf import RECORD

BUNDLE: Final = "proof_bundle.json"
POLICY: Final = "policy.json"
SIGNATURES: Final = "policy_signatures.json"
LEAVES: Final = "leaves.bin"
OPEN_EPOCH: Final = "open.bin"
ROOTS: Final = "roots.jsonl"
OPENINGS: Final = "openings.jsonl"
RESULT: Final = files.result_name(0)
PEERS: Final = "peers.jsonl"
CONTRADICTIONS: Final = "contradictions.jsonl"
HEADER: Final = struct.Struct("<8sIQ32s32s")
MAGIC: Final = b"UVCCEPO1"
_READ: Final = RECORD.size * 4096
_MOST: Final = 2**60  # streamed; the signed counts bound what is read of it


def folder_name(coord: object) -> str:
    """Name of a worker's transcript folder inside its run folder."""
    return f"transcript_{coord}"


def damaged(path: Path, where: str, what: str) -> UnreadableError:
    """A worker's own file is not as that worker wrote it: that says nothing about a peer."""
    said = f"{path}: this worker's own record of {where} is damaged: {what}"
    hint = "its disk or memory failed; take the next attempt (uvcc resume RUN --from 0), on another pod if this repeats"
    return UnreadableError(said, hint)


@dataclass(frozen=True, slots=True)
class EpochBlock:
    """Where one epoch lies in the file. ``at`` is the offset of its first record."""

    epoch: int
    count: int
    sid_sub: bytes
    root: bytes
    at: int

    @property
    def end(self) -> int:
        return self.at + self.count * RECORD.size


def write_all(fd: int, data: bytes, path: Path) -> None:
    """Write all of ``data``. Raises UvccError naming ``path`` if the disk refuses; a cut end is removed on opening."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError as e:
        raise files.write_failed(path, e) from e


def make_durable(fd: int, path: Path) -> None:
    """Have the disk keep what was written. Raises UvccError naming ``path`` if it refuses."""
    try:
        os.fsync(fd)
    except OSError as e:
        raise files.write_failed(path, e) from e


def header(epoch: int, count: int, sid_sub: bytes, root: bytes) -> bytes:
    return HEADER.pack(MAGIC, epoch, count, sid_sub, root)


def next_block(file: BinaryIO, at: int, size: int) -> EpochBlock | None:
    """The block whose header starts at ``at``; None at the end. Raises UnreadableError for anything else."""
    if at == size:
        return None
    file.seek(at)
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise UnreadableError(f"the transcript is cut short inside the block header at byte {at}")
    magic, epoch, count, sid_sub, root = HEADER.unpack(head)
    block = EpochBlock(epoch, count, sid_sub, root, at + HEADER.size)
    if magic != MAGIC:
        raise UnreadableError(f"no epoch block starts at byte {at} of the transcript")
    if block.end > size:
        raise UnreadableError(f"the transcript is cut short inside epoch {epoch}")
    return block


def blocks(path: Path) -> Iterator[tuple[BinaryIO, EpochBlock]]:
    """Every block of a transcript file in order, with the open file. Raises UnreadableError."""
    try:
        with open_regular(path, _MOST) as file:
            size = os.fstat(file.fileno()).st_size
            at = 0
            while (block := next_block(file, at, size)) is not None:
                yield file, block
                at = block.end
    except OSError as e:
        raise UnreadableError(f"cannot read the transcript {path}: {e.strerror}", "fetch it again") from e


def chunks(file: BinaryIO, block: EpochBlock) -> Iterator[bytes]:
    """The records of a block, some thousands at a time."""
    file.seek(block.at)
    left = block.count * RECORD.size
    while left:
        data = file.read(min(left, _READ))
        if not data or len(data) % RECORD.size:
            raise UnreadableError(f"the transcript is cut short inside epoch {block.epoch}")
        left -= len(data)
        yield data


def records(file: BinaryIO, block: EpochBlock) -> Iterator[bytes]:
    """The records of a block one by one."""
    for data in chunks(file, block):
        for i in range(0, len(data), RECORD.size):
            yield data[i : i + RECORD.size]
