"""What survives the end of a process: which messages were taken, and those sent that a peer may still ask for.

A party commits its cursors together with the effect of the messages (the name of a checkpoint, or the bytes of a small
state): one file, replaced atomically. Until a peer has committed a message its sender keeps it; a peer that comes back
from its last commit gets everything after it again, and nothing before it. Messages are counted per stream from 0; a
message that the sender produces again after its own restart is not sent again if the peer has it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.plane.api import Buffer, Tag

_MAGIC: Final = b"UVCCPLN1"
_SHA: Final = 32


@dataclass(slots=True)
class KeptMessages:
    """Messages of one stream that the peer has not committed, oldest first; ``first`` is the index of the oldest."""

    first: int = 0
    messages: deque[tuple[Tag, Buffer]] = field(default_factory=deque)

    def forget_below(self, index: int) -> None:
        while self.messages and self.first < index:
            self.messages.popleft()
            self.first += 1


@dataclass(slots=True)
class PeerState:
    """Cursors with one peer: per stream how many messages were taken from it and numbered to it, and what is kept."""

    taken: dict[int, int] = field(default_factory=dict)
    numbered: dict[int, int] = field(default_factory=dict)
    kept: dict[int, KeptMessages] = field(default_factory=dict)

    def keep(self, index: int, tag: Tag, payload: Buffer) -> None:
        kept = self.kept.get(tag.stream)
        if kept is None:
            kept = self.kept[tag.stream] = KeptMessages(index)
        if not kept.messages:
            kept.first = index
        kept.messages.append((tag, payload))

    def lowest(self, stream: int) -> int:
        """The lowest index that can still be sent again."""
        kept = self.kept.get(stream)
        return kept.first if kept is not None and kept.messages else self.numbered.get(stream, 0)

    @property
    def kept_bytes(self) -> int:
        return sum(len(p) for k in self.kept.values() for _, p in k.messages)


def save(path: Path, sid_sub: bytes, effect: bytes, peers: dict[int, PeerState]) -> None:
    """Commit: replace the file durably. Raises UvccError if the disk refuses."""
    payloads: list[Buffer] = [effect]
    described: dict[str, Any] = {}
    for peer, state in peers.items():
        kept = []
        for stream, entry in state.kept.items():
            messages = [[*tag, len(p)] for tag, p in entry.messages]
            kept.append([stream, entry.first, messages])
            payloads.extend(p for _, p in entry.messages)
        described[str(peer)] = {
            "taken": list(state.taken.items()),
            "numbered": list(state.numbered.items()),
            "kept": kept,
        }
    meta = json.dumps({"sid": sid_sub.hex(), "effect": len(effect), "peers": described}).encode()
    body = b"".join([_MAGIC, len(meta).to_bytes(8, "little"), meta, *payloads])
    write_atomic(path, body + hashlib.sha256(body).digest(), mode=0o600)


def load(path: Path, sid_sub: bytes) -> tuple[bytes, dict[int, PeerState]] | None:
    """(effect, states) of the last commit; None if there was none. Raises UnreadableError if the file is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror}") from error
    body = data[:-_SHA]
    if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[-_SHA:]:
        raise UnreadableError(f"{path} is damaged", "resume all parties from their last common checkpoint")
    at = len(_MAGIC) + 8
    size = int.from_bytes(body[len(_MAGIC) : at], "little")
    meta = json.loads(body[at : at + size])
    if meta["sid"] != sid_sub.hex():
        raise UnreadableError(f"{path} belongs to another subsession", "use another state directory")
    at += size
    effect = body[at : at + meta["effect"]]
    at += len(effect)
    peers: dict[int, PeerState] = {}
    for peer, found in meta["peers"].items():
        state = PeerState({s: n for s, n in found["taken"]}, {s: n for s, n in found["numbered"]})
        for stream, first, messages in found["kept"]:
            kept = state.kept[stream] = KeptMessages(first)
            for epoch, s, op, kind, length in messages:
                kept.messages.append((Tag(epoch, s, op, kind), body[at : at + length]))
                at += length
        peers[int(peer)] = state
    return effect, peers
