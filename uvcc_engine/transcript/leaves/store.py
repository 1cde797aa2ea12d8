"""The transcript store of one worker: append-only per epoch, with an explicit finalisation.

Leaves of the open epoch are noted in ``open.bin`` (``write_ahead_log``) and collected in bounded memory
(``sorted_runs.RunSet``); finalising sorts them, hashes them once and appends one block to ``leaves.bin``. What was
received is with the operating system before anything that depends on it is sent, so after a killed process every
message received again is compared with the one received before. ``fsync`` happens at checkpoints and at the end only:
after a power cut the store holds at least everything up to the last checkpoint.

The leaf of what was sent is made while its sender waits for a peer (``sent_payloads``: some at a time, and all that are
left once the wait goes on), or at the epoch's end: who is killed before makes the same message again from what it
received. Where an epoch is repeated, it is compared before it is sent. A large payload is hashed beside the caller, if
there is a processor for it: from when it arrives until it is read, or from the first wait after it was sent until the
epoch ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, VerificationError
from uvcc_engine.transcript.leaves import leaf_file, payload_digests, write_ahead_log
from uvcc_engine.transcript.leaves.leaf import (
    BLIND,
    LOCAL_KINDS,
    OPENED_KINDS,
    RECEIVED,
    RECORDED_KINDS,
    SENT,
    SIZE,
    Buffer,
    Key,
    Leaf,
    blind_at,
    epoch_key,
    epoch_prefix,
    head_of,
    leaf_hash,
    make_record,
    name_of,
    record_of,
)
from uvcc_engine.transcript.leaves.merkle import inclusion_proofs
from uvcc_engine.transcript.leaves.replay import peers_of, summarise
from uvcc_engine.transcript.leaves.roots import EpochRoot
from uvcc_engine.transcript.leaves.sent_payloads import MOST, SentPayloads
from uvcc_engine.transcript.leaves.sorted_runs import EMPTY, LIMIT, KnownKeys, RunSet, SortedRun, first_missing, key_of
from uvcc_engine.transcript.leaves.write_ahead_log import WriteAheadLog

LeafTag = tuple[int, int, int, int]  # epoch, stream, op, kind; plane.api.Tag is one
_RERUN: Final = "a resume must repeat every message; otherwise take the next attempt"


@dataclass(frozen=True, slots=True)
class Opening:
    """A local leaf with its payload and blind, and the RFC 6962 proof that it is in the epoch's root."""

    epoch: int
    index: int
    record: bytes
    blind: bytes
    payload: bytes
    proof: tuple[bytes, ...]

    def to_json(self) -> dict[str, Any]:
        hexed = {"record": self.record.hex(), "blind": self.blind.hex(), "payload": self.payload.hex()}
        return {"epoch": self.epoch, "index": self.index, "proof": [p.hex() for p in self.proof], **hexed}


class TranscriptStore:
    """Records one worker's messages. Used by one thread; one process at a time (the file is locked)."""

    def __init__(
        self,
        folder: Path,
        *,
        party: int,
        sid_sub: bytes,
        own_key: bytes,
        pair_keys: Mapping[int, bytes],
        resume_epoch: int = 0,
        limit: int = LIMIT,
        power_cut: bool = True,
    ) -> None:
        """Open or create. ``own_key`` blinds local leaves, ``pair_keys[peer]`` those exchanged with ``peer``.

        ``limit``: how many leaves of the open epoch stay in memory. ``power_cut``: whether the machine may have lost
        its power since the folder was written, and with it what was never synced.

        With epochs already on disk, work goes on at ``resume_epoch``; every leaf recorded again must match.
        Raises ConfigError (other session, epochs missing, in use), UnreadableError (damaged file).
        """
        if sorted(pair_keys) != list(peers_of(party)):
            raise ConfigError(f"P{party} needs blinding keys for {peers_of(party)}, got {sorted(pair_keys)}")
        if any(len(key) != BLIND for key in (own_key, *pair_keys.values())):
            raise ConfigError(f"a blinding key of P{party} has not {BLIND} bytes")
        self.party = party
        self.folder = folder
        self.openings: tuple[Opening, ...] = ()
        self._sid = sid_sub
        self._keys = {party: own_key, **pair_keys}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._limit, self._power_cut = limit, power_cut
        self._recorded, self._old = RunSet(folder, limit), RunSet(folder, limit)
        self._before = KnownKeys(EMPTY)
        self._sealed = False
        self._new = False  # whether nothing of the open epoch was recorded before it was begun
        self._hasher = payload_digests.Hasher() if (os.cpu_count() or 1) > 1 else None
        self._sent = SentPayloads(self._hasher)  # of the open epoch; their leaves are not made yet
        self._ahead: dict[Key, payload_digests.Job] = {}  # arrived and not read: who hashes it
        self._early: list[tuple[int, LeafTag, memoryview]] = []  # of an epoch to come
        self._to_open: list[tuple[Key, bytes, bytes]] = []
        self._blind: dict[int, bytes] = {}  # the keys of the open epoch, by party
        self._open: tuple[int, dict[int, bytes], bool] = (-1, self._blind, False)
        self._fd = os.open(folder / leaf_file.LEAVES, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._log: WriteAheadLog | None = None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blocks = self._scan(resume_epoch)
            if not 0 <= resume_epoch <= len(self._blocks):
                what = f"the transcript in {folder} holds {len(self._blocks)} epochs; cannot go on at {resume_epoch}"
                raise ConfigError(what, _RERUN)
            self._drop_torn(resume_epoch)
            self._log = WriteAheadLog(folder, sid_sub, len(self._blocks))
        except BlockingIOError as e:
            self.close(sync=False)
            raise ConfigError(
                f"another process writes the transcript in {folder}", "is the worker still running?"
            ) from e
        except BaseException:
            self.close(sync=False)
            raise
        self._epoch, self._next = -1, resume_epoch

    # ---- opening what is on disk -------------------------------------------------------------------------------

    def _scan(self, first: int) -> list[leaf_file.EpochBlock]:
        """Find the sealed epochs.

        From epoch ``first`` on, a block that :meth:`_may_be_torn` is removed, since that epoch is executed again.
        Before, nothing is removed, and UnreadableError raised.
        """
        found: list[leaf_file.EpochBlock] = []
        size = os.fstat(self._fd).st_size
        with open(self._fd, "rb", closefd=False) as file:
            at = 0
            while True:
                try:
                    block = leaf_file.next_block(file, at, size)
                except UnreadableError as e:
                    if len(found) < first or not self._may_be_torn(len(found)):
                        raise self._damaged(len(found), e.what) from e
                    os.ftruncate(self._fd, at)
                    break
                if block is None:
                    break
                if block.sid_sub != self._sid:
                    if found or write_ahead_log.open_epoch(self.folder, self._sid) >= 0:
                        raise self._damaged(len(found), "its header names another session")
                    raise ConfigError(f"{self.folder} holds the transcript of another session", "use a new run folder")
                if block.epoch != len(found):
                    raise self._damaged(len(found), f"its header says epoch {block.epoch} where {len(found)} belongs")
                found.append(block)
                at = block.end
        return found

    def _may_be_torn(self, epoch: int) -> bool:
        """Whether a block that is not whole may be nobody's fault. A power cut loses what was never synced; a process
        that is killed leaves at most the one unfinished that it was writing, whose leaves ``open.bin`` still has."""
        return self._power_cut or write_ahead_log.open_epoch(self.folder, self._sid) == epoch

    def _damaged(self, epoch: int, what: str) -> UnreadableError:
        return leaf_file.damaged(self.folder / leaf_file.LEAVES, f"epoch {epoch}", what)

    def _drop_torn(self, first: int) -> None:
        """Remove blocks from ``first`` on whose leaves a power loss damaged; those epochs are executed again anyway."""
        for block in self._blocks[first:]:
            try:
                self.summary(block.epoch)
            except (UnreadableError, VerificationError) as e:
                if not self._may_be_torn(block.epoch):
                    raise self._damaged(block.epoch, "its leaves are not those of its stored root") from e
                os.ftruncate(self._fd, block.at - leaf_file.HEADER.size)
                del self._blocks[block.epoch :]
                break

    def _left_open(self, epoch: int) -> SortedRun:
        """What an interrupted attempt at this epoch noted, in canonical order."""
        assert self._log is not None
        if self._log.epoch != epoch:
            self._log.begin(epoch)
            return EMPTY
        for record in self._log.begin(epoch):
            self._old.put(key_of(record), record)
        return self._old.merged(self._clash)

    # ---- epochs ------------------------------------------------------------------------------------------------

    @property
    def epochs(self) -> int:
        """How many epochs are finalised on disk."""
        return len(self._blocks)

    @property
    def left_open(self) -> int:
        """The epoch whose records an earlier process left in ``open.bin``; -1 if none is the next one."""
        return self._log.epoch if self._log is not None and self._log.epoch == len(self._blocks) else -1

    @property
    def beside_s(self) -> float:
        """Processor time that hashing beside the caller has taken so far, in seconds."""
        return self._hasher.cpu_s if self._hasher is not None else 0.0

    @property
    def next_epoch(self) -> int:
        return self._next

    def begin_epoch(self, epoch: int) -> None:
        """Open the next epoch. Raises ConfigError if it is not the next, or one is still open."""
        if self._epoch >= 0 or epoch != self._next:
            at = f"epoch {self._epoch} is open" if self._epoch >= 0 else f"epoch {self._next} is next"
            raise ConfigError(f"cannot begin epoch {epoch}: {at}", "finalise epochs in order")
        self._sealed = epoch < len(self._blocks)
        self._epoch, self._to_open = epoch, []
        self._before = KnownKeys(self._pile(epoch) if self._sealed else self._left_open(epoch), self._limit)
        self._blind = {p: epoch_key(k, self._sid, epoch) for p, k in self._keys.items()}
        self._new = not self._sealed and not self._before.run.count
        self._open = epoch, self._blind, self._new  # at once, for other threads
        self._foresee_early()

    def finalize_epoch(self) -> EpochRoot:
        """Close the epoch: sort, hash, append. ``openings`` then holds the epoch's local leaves with their proofs.

        Raises ProtocolError, which names nobody, if the epoch had been recorded before and a message is missing now.
        """
        epoch = self._epoch
        if epoch < 0:
            raise ConfigError("no epoch is open", "begin_epoch first")
        self._make(self._sent.all())
        run = self._recorded.merged(self._clash)
        missing = first_missing(self._before.run, run) if self._before.run.count else None
        if missing is not None:
            raise ProtocolError(f"epoch {epoch}: {name_of(key_of(missing))} was not repeated", _RERUN)
        self._ahead.clear()
        summary = summarise(run.chunks(), self._sid, epoch, self.party)
        self.openings = self._prove(run) if self._to_open else ()
        if not self._sealed:
            self._append(epoch, run, summary.root)
        elif self._blocks[epoch].root != summary.root:
            raise self._damaged(epoch, "its stored root is not that of its leaves")
        self._recorded.clear()
        self._old.clear()
        self._before = KnownKeys(EMPTY)
        self._epoch, self._next = -1, epoch + 1
        return summary

    def _append(self, epoch: int, run: SortedRun, root: bytes) -> None:
        """Write an epoch's block. Killed on the way, it is found cut short, and ``open.bin`` still binds its leaves."""
        at = os.fstat(self._fd).st_size
        head = leaf_file.header(epoch, run.count, self._sid, root)
        for data in run.chunks():
            leaf_file.write_all(self._fd, head + data, self.folder / leaf_file.LEAVES)
            head = b""
        if head:
            leaf_file.write_all(self._fd, head, self.folder / leaf_file.LEAVES)
        self._blocks.append(leaf_file.EpochBlock(epoch, run.count, self._sid, root, at + leaf_file.HEADER.size))

    def _prove(self, run: SortedRun) -> tuple[Opening, ...]:
        wanted = {key: (blind, payload) for key, blind, payload in self._to_open}
        places = {key: (i, record) for i, record in enumerate(run) if (key := key_of(record)) in wanted}
        prefix = epoch_prefix(self._sid, self._epoch)
        hashes = (leaf_hash(prefix, record) for record in run)
        proofs = inclusion_proofs(hashes, run.count, [i for i, _ in places.values()])
        return tuple(
            Opening(self._epoch, i, record, *wanted[key], proof=tuple(proofs[i]))
            for key, (i, record) in sorted(places.items())
        )

    # ---- leaves ------------------------------------------------------------------------------------------------

    def record(self, direction: int, peer: int, tag: LeafTag, payload: Buffer) -> None:
        """Note a message: ``direction`` 0 = sent to ``peer``, 1 = received from it. See plane.api.Recorder.

        Raises ProtocolError naming the sender if this message was recorded before with other content.
        """
        epoch, stream, op, kind = tag
        blinding, party = self._blind.get(peer), self.party
        if epoch != self._epoch or blinding is None or kind not in RECORDED_KINDS or peer == party:
            raise ConfigError(f"no transcript message: {tag} with P{peer} while epoch {self._epoch} is open")
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        for chunk, piece in ((0, payload),) if size <= payload_digests.CHUNK else payload_digests.chunks(payload):
            if direction == SENT:
                self._note_sent((stream, op, chunk, SENT, party, peer, kind), blinding, piece)
                continue
            key = (stream, op, chunk, RECEIVED, peer, party, kind)
            head, job = head_of(key), self._ahead.pop(key, None) if self._ahead else None
            if job is None:
                self._take(key, record_of(blinding, head, piece)[0])
            else:
                self._take(key, head + SIZE.pack(_size(piece)) + job.wait())

    def _note_sent(self, key: Key, blinding: bytes, piece: Buffer) -> None:
        """The leaf of what was sent can wait until the caller waits; a repeat is compared at once."""
        head, sent = head_of(key), self._sent
        if self._new and key not in self._recorded.recent and sent.put(key, blinding, head, piece):
            if sent.waiting > MOST:
                self._make(sent.all())
            return
        self._make(sent.all())
        self._take(key, record_of(blinding, head, piece)[0])

    def catch_up(self) -> None:
        """See ``plane.api.Recorder``: the leaves of what was sent; large payloads are hashed beside the caller."""
        if self._sent.due():
            self._make(self._sent.made())

    def _make(self, records: Iterable[tuple[Key, bytes]]) -> None:
        for key, record in records:
            self._take(key, record)

    def hash_ahead(self, peer: int, tag: LeafTag, payload: memoryview) -> None:
        """See ``plane.api.Recorder``: a large message is hashed while it waits for its reader."""
        epoch, stream, op, kind = tag
        open_epoch, blinds, new = self._open
        if payload.nbytes < payload_digests.AHEAD or self._hasher is None:
            return
        if epoch > open_epoch:
            self._early.append((peer, tag, payload))
        elif epoch == open_epoch and new and peer in blinds and kind in RECORDED_KINDS:
            for chunk, piece in payload_digests.chunks(payload):
                key = (stream, op, chunk, RECEIVED, peer, self.party, kind)
                self._ahead[key] = self._hasher.submit(blind_at(blinds[peer], head_of(key)), piece)

    def _foresee_early(self) -> None:
        """What arrived before its epoch was open."""
        arrived, self._early = self._early, []
        for message in arrived:
            self.hash_ahead(*message)

    def record_local(self, tag: LeafTag, payload: Buffer) -> None:
        """Note an event inside this party (kinds INPUT, RESULT, CHECKPOINT, POLICY, PIPELINE).

        All but PIPELINE are opened in the bundle: their payload becomes public. Raises like :meth:`record`.
        """
        epoch, stream, op, kind = tag
        if epoch != self._epoch or kind not in LOCAL_KINDS:
            raise ConfigError(f"no local transcript event: {tag} while epoch {self._epoch} is open")
        key = (stream, op, 0, SENT, self.party, self.party, kind)
        known = self._recorded.recent.get(key) is not None
        record, blind = make_record(self._blind[self.party], key, payload)
        self._take(key, record)
        if kind in OPENED_KINDS and not known:
            self._to_open.append((key, blind, bytes(payload)))

    def _take(self, key: Key, record: bytes) -> None:
        assert self._log is not None
        recorded = self._recorded
        held = recorded.recent.get(key)
        if held is None and self._new:
            self._log.add(record)
            recorded.put(key, record)
            return
        before = held or self._before.get(key)
        if before is not None and before != record:
            raise self._clash(before, record)
        if before is None:
            if self._sealed:
                raise ProtocolError(f"epoch {self._epoch} had no {name_of(key)} before", _RERUN)
            self._log.add(record)
        if held is None:
            recorded.put(key, record)

    def _clash(self, known: bytes, record: bytes) -> ProtocolError:
        return self._conflict(Leaf.unpack(known), Leaf.unpack(record).size)

    def _conflict(self, known: Leaf, size: int) -> ProtocolError:
        what = f"epoch {self._epoch}: {known.name} differs from what was recorded before ({known.size} B, now {size} B)"
        whose = f"P{known.src} sent another message under the same name" if known.direction == RECEIVED else _RERUN
        return ProtocolError(what, whose, party=known.src)

    # ---- reading and closing -----------------------------------------------------------------------------------

    def _pile(self, epoch: int) -> SortedRun:
        if not 0 <= epoch < len(self._blocks):
            raise ConfigError(f"epoch {epoch} is not finalised in {self.folder}")
        return SortedRun(self._blocks[epoch].count, fd=self._fd, at=self._blocks[epoch].at)

    def records(self, epoch: int) -> list[bytes]:
        """The records of a finalised epoch in canonical order. Raises ConfigError if there is none."""
        return list(self._pile(epoch))

    def summary(self, epoch: int) -> EpochRoot:
        """Recompute what finalising this epoch returned. Raises UnreadableError if the file no longer agrees."""
        found = summarise(self._pile(epoch).chunks(), self._sid, epoch, self.party)
        if found.root != self._blocks[epoch].root:
            raise self._damaged(epoch, "its stored root is not that of its leaves")
        return found

    def confirm(self, signed: EpochRoot, *, whole: bool) -> None:
        """Hold a finalised epoch against what was signed about it; ``whole``: all of its leaves, not the header alone.

        Raises UnreadableError if the file no longer agrees.
        """
        epoch = signed.epoch
        block = self._blocks[epoch]
        if (block.root, block.count) != (signed.root, signed.leaves):
            raise self._damaged(epoch, "its header does not say what was signed")
        if whole:
            try:
                same = self.summary(epoch) == signed
            except VerificationError:
                same = False
            if not same:
                raise self._damaged(epoch, "its leaves are not those that were signed")

    def sync(self) -> None:
        """Make everything finalised durable against power loss."""
        leaf_file.make_durable(self._fd, self.folder / leaf_file.LEAVES)

    def close(self, *, sync: bool = True) -> None:
        """Close the files; an open epoch stays in ``open.bin``. Harmless twice."""
        if self._fd < 0:
            return
        try:
            if sync:
                self._make(self._sent.all())
                self.sync()
        finally:  # a disk that refuses keeps no file open, and no lock
            if self._hasher is not None:
                self._hasher.close()
            self._recorded.clear()
            self._old.clear()
            os.close(self._fd)
            if self._log is not None:
                self._log.close()
            self._fd = -1


def _size(payload: Buffer) -> int:
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)
