"""Files from one domain to another through the relay's mail: kept there on disk until they were taken.

A parcel is cut into messages that each name the file, its size and SHA-256. The relay sees names, sizes and times of
what it carries; shares are sealed, transcripts hold blinded digests. What arrives is held against the digests that the
sending domain signed, by whoever unpacks it. Nothing here is signed: what a relay altered accuses no domain.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_engine.contract.errors import ProtocolError, UnreadableError, UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol.record_names import MAIL_KEPT_S
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import parse_json

PIECE: Final = 1 << 20
LARGEST: Final = 64 << 30
MOST_FILES: Final = 4096
_HEAD: Final = 4096
_TRIES: Final = 8
_NOTE: Final = ".have"
_WHOSE: Final = "the relay altered it, or it was sent so: nothing that is signed shows which; ask that domain"
_BOX: Final = b"UVCC_PARCEL_V1"


def box_of(proposal: str, attempt: int, what: str) -> int:
    """The number of the mailbox for one purpose of one attempt."""
    return int.from_bytes(hashlib.sha256(_BOX + f"{proposal}|{attempt}|{what}".encode()).digest()[:7], "big")


def manifest(files: Mapping[str, Path]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file of a parcel, by name."""
    found = {}
    for name, path in sorted(files.items()):
        with path.open("rb") as f:
            found[name] = (path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest())
    return found


def send(there: Rendezvous, box: int, receiver: int, files: Mapping[str, Path]) -> None:
    """Put a parcel there for one party. Sent again, it is there once. Raises UvccError."""
    for name, (size, digest) in manifest(files).items():
        with files[name].open("rb") as f:
            for at in range(0, max(size, 1), PIECE):
                enqueue(there, box, receiver, name, (size, digest), at, f.read(PIECE))


def enqueue(
    there: Rendezvous, box: int, receiver: int, name: str, whole: tuple[int, str], at: int, piece: bytes
) -> None:
    """One piece of a file of this size and SHA-256; sent again it is there once.

    Waits a while for a relay that does not answer, or whose receiver has not taken enough. Raises UvccError.
    """
    size, digest = whole
    head = json.dumps({"at": at, "name": name, "sha256": digest, "size": size}).encode()
    entry = {
        "msg_id": hashlib.sha256(b"%d|%d|" % (box, at) + name.encode() + digest.encode()).hexdigest(),
        "receiver": receiver,
        "payload_b64": base64.b64encode(head + b"\n" + piece).decode(),
        "ttl_s": MAIL_KEPT_S,
    }
    for attempt in range(_TRIES):
        try:
            there.mail("/enqueue", {"messages": [entry], "box": box})
            return
        except UvccError:
            if attempt == _TRIES - 1:
                raise
            time.sleep(min(30.0, 0.25 * 2**attempt))


@dataclass(slots=True)
class _Coming:
    size: int
    sha256: str
    have: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Parcels:
    """What arrives in one box, by sender, written below ``folder``/``P<n>`` under names of our own. ``senders``: whose
    numbers at the relay count; what anybody else put there is dropped.

    What was taken is noted there before the relay is told to forget it, so that whoever was interrupted goes on.
    """

    there: Rendezvous
    box: int
    folder: Path
    senders: Sequence[int] = range(PARTIES)
    _coming: dict[tuple[int, str], _Coming] = field(default_factory=dict)
    _changed: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for sender in self.senders:
            for note in sorted((self.folder / f"P{sender}").glob(f"*{_NOTE}")):
                self._recall(sender, note)

    def poll(self, wait_s: float = 0.0) -> int:
        """Take what lies there; returns how many messages it was. Raises UvccError, ProtocolError."""
        found = self.there.mail("/poll", {"box": self.box, "wait_s": wait_s}).get("messages")
        messages = [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []
        for message in messages:
            if message.get("kind") == "message":
                self._take(message)
        self._note()
        done = [m["delivery"] for m in messages if isinstance(m.get("delivery"), int)]
        if done:
            self.there.mail("/ack", {"box": self.box, "deliveries": done})
        return len(messages)

    def _take(self, message: Mapping[str, Any]) -> None:
        sender = message.get("sender")
        if not isinstance(sender, int) or sender not in self.senders:
            return
        try:
            body = base64.b64decode(str(message.get("payload_b64")), validate=True)
            head, _, piece = body.partition(b"\n")
            said = parse_json(head[:_HEAD], "a parcel")
            name, at, size, digest = said["name"], said["at"], said["size"], said["sha256"]
            good = isinstance(name, str) and isinstance(digest, str) and len(digest) == 64
            good = good and isinstance(at, int) and isinstance(size, int) and 0 <= at <= size <= LARGEST
        except (ValueError, KeyError, TypeError, UnreadableError):
            good = False
        if not good or at % PIECE or len(piece) != min(PIECE, size - at):
            raise ProtocolError(f"what came as P{sender}'s at the relay cannot be read", _WHOSE)
        known = self._coming.setdefault((sender, name), _Coming(size, digest))
        if (known.size, known.sha256) != (size, digest) or len(self._coming) > len(self.senders) * MOST_FILES:
            raise ProtocolError(f"two files came as P{sender}'s {name[:80]!r}", _WHOSE)
        if at in known.have:
            return
        path = self._path(sender, name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("r+b" if path.exists() else "w+b") as f:
            f.seek(at)
            f.write(piece)
        known.have.add(at)
        self._changed.add((sender, name))

    def _note(self) -> None:
        """Write down which pieces of which file are here."""
        for sender, name in self._changed:
            c = self._coming[sender, name]
            said = {"box": str(self.box), "name": name, "size": c.size, "sha256": c.sha256, "have": sorted(c.have)}
            note = self._path(sender, name).with_suffix(_NOTE)
            write_atomic(note, json.dumps(said).encode(), mode=0o600, durable=False)
        self._changed.clear()

    def _recall(self, sender: int, note: Path) -> None:
        """Take up a file that was coming when this was interrupted; a note that cannot be read counts as none."""
        try:
            said = reading.read_json(note)
            coming = _Coming(int(said["size"]), str(said["sha256"]), set(map(int, said["have"])))
            name, box = str(said["name"]), said["box"]
        except (UnreadableError, ValueError, KeyError, TypeError):
            return
        if box == str(self.box) and self._path(sender, name).exists():
            self._coming[sender, name] = coming

    def arrived(self, sender: int) -> dict[str, tuple[int, str]]:
        """What is whole of a sender's: size and SHA-256 by name, as announced."""
        return {
            name: (c.size, c.sha256)
            for (who, name), c in self._coming.items()
            if who == sender and len(c.have) == max(1, -(-c.size // PIECE))
        }

    def store(self, sender: int, name: str, downloads: DownloadFolder, parts: tuple[str, ...]) -> None:
        """Give a whole file its place. Raises ProtocolError if it is not what was announced."""
        size, digest = self.arrived(sender)[name]
        path = self._path(sender, name)
        with downloads.file(parts, limit=size) as download:
            for piece in _pieces(path):
                download.write(piece)
            if download.sha256 != digest:
                raise ProtocolError(f"what came as P{sender}'s {name[:80]!r} has another digest", _WHOSE)
            download.keep()
        path.unlink()
        path.with_suffix(_NOTE).unlink(missing_ok=True)

    def read(self, sender: int, name: str, most: int) -> bytes:
        """A small whole file. Raises ProtocolError if it is larger than ``most`` or not what was announced."""
        size, digest = self.arrived(sender)[name]
        data = self._path(sender, name).read_bytes() if size <= most else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise ProtocolError(f"what came as P{sender}'s {name[:80]!r} has another digest or size", _WHOSE)
        return data

    def _path(self, sender: int, name: str) -> Path:
        return self.folder / f"P{sender}" / hashlib.sha256(name.encode()).hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        read: Callable[[], bytes] = lambda: f.read(PIECE)  # noqa: E731
        yield from iter(read, b"")
