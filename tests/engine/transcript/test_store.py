"""The store: agreement of both ends, duplicates, crash and resume, order, time per leaf."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import pytest
from transcript_exchange import exchange

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, UvccError, VerificationError
from uvcc_engine.plane.api import Recorder, Tag
from uvcc_engine.plane.frame import CHUNK
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file, payload_digests, sent_payloads
from uvcc_engine.transcript.leaves.leaf import RECORD, Leaf, epoch_key, epoch_prefix, leaf_hash, make_record
from uvcc_engine.transcript.leaves.merkle import root_from_inclusion, tree_root
from uvcc_engine.transcript.leaves.replay import first_difference, summarise
from uvcc_engine.transcript.leaves.store import TranscriptStore
from uvcc_engine.transcript.leaves.write_ahead_log import WriteAheadLog, open_records

SID = hashlib.sha256(b"sub").digest()
PARTY = {"party": 0, "sid_sub": SID, "own_key": bytes(32), "pair_keys": {p: bytes([p]) * 32 for p in (1, 2)}}


def key(a: int, b: int) -> bytes:
    return hashlib.sha256(bytes(sorted((a, b)))).digest()


def open_store(
    folder: Path, party: int, resume_epoch: int = 0, sid: bytes = SID, *, power_cut: bool = True
) -> TranscriptStore:
    pairs = {p: key(party, p) for p in range(3) if p != party}
    return TranscriptStore(
        folder / f"p{party}",
        party=party,
        sid_sub=sid,
        own_key=bytes([party]) * 32,
        pair_keys=pairs,
        resume_epoch=resume_epoch,
        power_cut=power_cut,
    )


@pytest.fixture
def stores(tmp_path: Path) -> dict[int, TranscriptStore]:
    return {p: open_store(tmp_path, p) for p in range(3)}


def run_epochs(stores: dict[int, TranscriptStore], epochs: range, seed: int = 0) -> list[dict[int, bytes]]:
    found = []
    for epoch in epochs:
        for s in stores.values():
            s.begin_epoch(epoch)
        exchange(stores, epoch, seed)
        roots = {p: s.finalize_epoch() for p, s in stores.items()}
        for a in range(3):
            for b in range(3):
                assert a == b or roots[a].pairs[b] == roots[b].pairs[a]
        found.append({p: r.root for p, r in roots.items()})
    return found


def test_is_a_recorder(stores: dict[int, TranscriptStore]) -> None:
    recorder: Recorder = stores[0]
    stores[0].begin_epoch(0)
    recorder.record(0, 1, Tag(0, 0, 0, kinds.OPEN), b"x")
    assert stores[0].finalize_epoch().leaves == 1


def test_both_ends_agree_and_roots_are_those_of_the_records(stores: dict[int, TranscriptStore]) -> None:
    roots = run_epochs(stores, range(3))
    for epoch in range(3):
        for p, s in stores.items():
            records = s.records(epoch)
            keys = [Leaf.unpack(r).key for r in records]
            assert keys == sorted(set(keys))
            assert roots[epoch][p] == tree_root(leaf_hash(epoch_prefix(SID, epoch), r) for r in records)
            assert s.summary(epoch).root == roots[epoch][p]
    assert len({r for e in roots for r in e.values()}) == 9


def test_arrival_order_does_not_matter(tmp_path: Path) -> None:
    tags = [(0, s, o, kinds.OPEN) for s in (0, 1) for o in range(20)]
    found = set()
    for trial in range(3):
        store = open_store(tmp_path / str(trial), 0)
        store.begin_epoch(0)
        random.Random(trial).shuffle(tags)
        for tag in tags:
            store.record(0, 1, tag, b"payload %d" % tag[2])
            store.record(1, 2, tag, memoryview(bytearray(b"other %d" % tag[2])))
        found.add((store.finalize_epoch().root, tuple(store.summary(0).pairs.items())))
    assert len(found) == 1


def test_equal_repeat_is_harmless_and_differing_repeat_names_the_sender(stores: dict[int, TranscriptStore]) -> None:
    s = stores[0]
    s.begin_epoch(0)
    s.record(1, 2, (0, 0, 0, kinds.OPEN), b"share")
    s.record(1, 2, (0, 0, 0, kinds.OPEN), b"share")
    with pytest.raises(ProtocolError, match="P2->P0") as found:
        s.record(1, 2, (0, 0, 0, kinds.OPEN), b"sharf")
    assert found.value.party == 2
    s.record(1, 1, (0, 0, 0, kinds.OPEN), b"sharf")
    assert s.finalize_epoch().leaves == 2


def test_digest_is_blinded(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    """The same payload under another key or at another place has another digest, and never its plain hash."""
    for s in stores.values():
        s.begin_epoch(0)
    stores[0].record(0, 1, (0, 0, 0, kinds.OPEN), b"1")
    stores[0].record(0, 2, (0, 0, 0, kinds.OPEN), b"1")
    stores[0].record(0, 2, (0, 0, 1, kinds.OPEN), b"1")
    stores[0].record_local((0, 0, 0, kinds.PIPELINE), b"1")
    stores[0].finalize_epoch()
    digests = {Leaf.unpack(r).digest for r in stores[0].records(0)}
    assert len(digests) == 4
    assert hashlib.sha256(b"1").digest() not in digests


@pytest.mark.parametrize(
    ("direction", "peer", "tag"),
    [
        (0, 1, (1, 0, 0, kinds.OPEN)),
        (0, 0, (0, 0, 0, kinds.OPEN)),
        (0, 3, (0, 0, 0, kinds.OPEN)),
        (0, 1, (0, 0, 0, kinds.RESULT)),
        (0, 1, (0, 0, 0, 99)),
        (0, 1, (0, 0, 1 << 32, kinds.OPEN)),
        (0, 1, (0, -1, 0, kinds.OPEN)),
    ],
)
def test_what_is_no_message_is_refused(stores: dict[int, TranscriptStore], direction: int, peer: int, tag: Tag) -> None:
    stores[0].begin_epoch(0)
    with pytest.raises(ConfigError):
        stores[0].record(direction, peer, tag, b"x")
    with pytest.raises(ConfigError):
        stores[0].record_local((0, 0, 0, kinds.OPEN), b"x")


def test_epochs_go_in_order(stores: dict[int, TranscriptStore]) -> None:
    s = stores[0]
    with pytest.raises(ConfigError):
        s.begin_epoch(1)
    with pytest.raises(ConfigError):
        s.finalize_epoch()
    s.begin_epoch(0)
    with pytest.raises(ConfigError, match="is open"):
        s.begin_epoch(1)


def test_openings_lead_to_the_root(stores: dict[int, TranscriptStore]) -> None:
    for s in stores.values():
        s.begin_epoch(0)
    exchange(stores, 0)
    stores[1].record_local((0, 0, 0, kinds.POLICY), b"policy hash")
    stores[1].record_local((0, 9, 9, kinds.RESULT), b"result")
    found = stores[1].finalize_epoch()
    assert found.opened == len(stores[1].openings) == 2
    for o in stores[1].openings:
        leaf = Leaf.unpack(o.record)
        assert hashlib.sha256(o.blind + o.payload).digest() == leaf.digest
        hashed = leaf_hash(epoch_prefix(SID, 0), o.record)
        assert root_from_inclusion(hashed, o.index, found.leaves, o.proof) == found.root


def reopen(stores: dict[int, TranscriptStore], folder: Path, epoch: int) -> dict[int, TranscriptStore]:
    for s in stores.values():
        s.close()
    return {p: open_store(folder, p, epoch) for p in stores}


def test_resume_repeats_and_goes_on(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    first = run_epochs(stores, range(5))
    before = (tmp_path / "p0" / leaf_file.LEAVES).read_bytes()
    again = reopen(stores, tmp_path, 2)
    assert run_epochs(again, range(2, 7))[:3] == first[2:]
    assert (tmp_path / "p0" / leaf_file.LEAVES).read_bytes().startswith(before)
    assert again[0].epochs == 7


def test_resume_detects_an_altered_message(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    for s in stores.values():
        s.begin_epoch(0)
        for o in range(3):
            s.record(1, (s.party + 1) % 3, (0, 0, o, kinds.OPEN), b"%d" % o)
        s.finalize_epoch()
    s = reopen(stores, tmp_path, 0)[0]
    s.begin_epoch(0)
    s.record(1, 1, (0, 0, 0, kinds.OPEN), b"0")
    with pytest.raises(ProtocolError) as altered:
        s.record(1, 1, (0, 0, 1, kinds.OPEN), b"x")
    assert altered.value.party == 1
    with pytest.raises(ProtocolError, match="had no") as added:
        s.record(1, 2, (0, 0, 9, kinds.OPEN), b"new")
    assert added.value.party == -1  # who is missing a message, or has one too many, cannot say whose fault it is
    with pytest.raises(ProtocolError, match="not repeated") as omitted:
        s.finalize_epoch()
    assert omitted.value.party == -1


def test_killed_in_an_epoch_what_was_received_before_a_send_is_remembered(tmp_path: Path) -> None:
    """No close, no finalise: the process is gone. The open epoch's leaves still bind the peer."""
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.record(1, 1, (0, 0, 0, kinds.OPEN), b"first")
    s.record(0, 2, (0, 0, 1, kinds.RESHARE), b"depends on it")
    s.catch_up()
    s.catch_up()  # the wait goes on
    s.record(1, 1, (0, 0, 2, kinds.OPEN), b"nothing sent since")
    s.close(sync=False)
    again = open_store(tmp_path, 0)
    again.begin_epoch(0)
    with pytest.raises(ProtocolError, match="differs"):
        again.record(1, 1, (0, 0, 0, kinds.OPEN), b"other")
    again.record(1, 1, (0, 0, 0, kinds.OPEN), b"first")
    with pytest.raises(ProtocolError, match="not repeated"):
        again.finalize_epoch()
    again.record(0, 2, (0, 0, 1, kinds.RESHARE), b"depends on it")
    with pytest.raises(ProtocolError, match="differs"):
        again.record(1, 1, (0, 0, 2, kinds.OPEN), b"another")
    again.record(1, 1, (0, 0, 2, kinds.OPEN), b"nothing sent since")
    assert again.finalize_epoch().leaves == 3
    again.begin_epoch(1)
    assert again.finalize_epoch().leaves == 0


@pytest.mark.parametrize("size", [32, payload_digests.LARGE, payload_digests.CHUNK + 1])
def test_killed_before_it_waits_what_was_sent_is_made_again_and_what_was_received_is_bound(
    tmp_path: Path, size: int
) -> None:
    """The leaf of what was sent is made while its sender waits; that of what was received before it is read."""
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.record(1, 1, (0, 0, 0, kinds.OPEN), b"first")
    s.record(0, 2, (0, 0, 1, kinds.RESHARE), bytes(size))
    s.close(sync=False)
    again = open_store(tmp_path, 0)
    again.begin_epoch(0)
    with pytest.raises(ProtocolError, match="differs"):
        again.record(1, 1, (0, 0, 0, kinds.OPEN), b"other")
    again.record(1, 1, (0, 0, 0, kinds.OPEN), b"first")
    again.record(0, 2, (0, 0, 1, kinds.RESHARE), bytes(size))
    assert again.finalize_epoch().leaves == 2 + (size > payload_digests.CHUNK)


def test_a_differing_repeat_of_what_was_sent_is_found_at_once(stores: dict[int, TranscriptStore]) -> None:
    s = stores[0]
    s.begin_epoch(0)
    for waits in (False, True):
        for op, size in enumerate((32, payload_digests.LARGE)):
            s.record(0, 1, (0, waits, op, kinds.OPEN), bytes(size))
            for _ in range(2 * waits):  # the wait goes on
                s.catch_up()
            s.record(0, 1, (0, waits, op, kinds.OPEN), bytes(size))
            with pytest.raises(ProtocolError, match="differs"):
                s.record(0, 1, (0, waits, op, kinds.OPEN), b"1" + bytes(size - 1))
    assert s.finalize_epoch().leaves == 4


@pytest.mark.parametrize("waits", [0, 1, 3])
def test_when_the_caller_waits_changes_no_leaf(tmp_path: Path, waits: int) -> None:
    """Many small ones and more large ones than may wait at a time."""
    found = []
    for name, often in (("never", 0), ("often", waits)):
        s = open_store(tmp_path / name, 0)
        s.begin_epoch(0)
        for op in range(60):
            s.record(0, 1 + op % 2, (0, 0, op, kinds.OPEN), bytes([op]) * (100 if op % 3 else payload_digests.CHUNK))
            s.record(1, 1 + op % 2, (0, 0, op, kinds.OPEN), bytes([op]) * 100)
            if often and op % often == 0:
                s.catch_up()
                s.catch_up()
        found.append((s.finalize_epoch(), s.records(0)))
        s.close()
    assert found[0] == found[1]


def test_a_leaf_that_a_full_disk_kept_out_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    for op in range(sent_payloads.TOGETHER):
        s.record(0, 1, (0, 0, op, kinds.OPEN), b"%d" % op)
    add, room = WriteAheadLog.add, [1]

    def full(log: WriteAheadLog, record: bytes) -> None:
        if not room:
            raise UvccError("cannot write open.bin: No space left on device")
        room.pop()
        add(log, record)

    monkeypatch.setattr(WriteAheadLog, "add", full)
    with pytest.raises(UvccError, match="No space"):
        s.catch_up()
    monkeypatch.undo()
    assert s.finalize_epoch().leaves == sent_payloads.TOGETHER


def test_leaves_of_small_messages_are_made_together_and_all_once_a_wait_goes_on(tmp_path: Path) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    made = []
    for op in range(sent_payloads.TOGETHER + 2):
        s.record(0, 1, (0, 0, op, kinds.OPEN), b"%d" % op)
        s.catch_up()
        made.append(len(list(open_records(s.folder, 0))))
    most = sent_payloads.TOGETHER
    assert made == [0] * (most - 1) + [most] * 3
    s.catch_up()  # the same wait, or the next with nothing more to tell of
    assert len(list(open_records(s.folder, 0))) == most + 2
    s.record(0, 1, (0, 0, 99, kinds.OPEN), bytes(payload_digests.LARGE))
    s.record(0, 1, (0, 0, 100, kinds.OPEN), b"small")
    s.catch_up()  # a large one is handed over at once, and what is small goes with it
    assert len(list(open_records(s.folder, 0))) == most + 3
    assert s.finalize_epoch().leaves == most + 4
    s.close()


def fill(s: TranscriptStore, ops: int) -> None:
    """An epoch in an order that is not the canonical one, with large messages, one of several pieces."""
    rng = random.Random(3)
    s.begin_epoch(0)
    s.record_local((0, 0, 0, kinds.POLICY), b"policy hash")
    for op in rng.sample(range(ops), ops):
        s.record(1, 1, (0, op % 3, op, kinds.OPEN), b"%d" % op)
        s.record(0, 2, (0, op % 3, op, kinds.RESHARE), b"%d" % op)
    for op, size in enumerate(
        (payload_digests.LARGE - 1, payload_digests.LARGE, payload_digests.CHUNK, 2 * payload_digests.CHUNK + 5)
    ):
        for direction in (0, 1):
            s.record(direction, 1, (0, 9, op, kinds.DEALER), memoryview(bytearray(rng.randbytes(size))))


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_an_epoch_that_does_not_fit_into_memory_has_the_same_root(tmp_path: Path, limit: int) -> None:
    found = []
    for name, most in (("whole", 10_000), ("spilled", limit)):
        s = TranscriptStore(tmp_path / name, limit=most, **PARTY)  # type: ignore[arg-type]
        fill(s, 100)
        found.append((s.finalize_epoch(), s.openings, s.records(0)))
        assert s.summary(0) == found[-1][0]
        s.close()
    assert found[0] == found[1]
    assert found[0][0].leaves == 1 + 200 + 2 * (1 + 1 + 1 + 3)
    assert (tmp_path / "whole" / leaf_file.LEAVES).read_bytes() == (
        tmp_path / "spilled" / leaf_file.LEAVES
    ).read_bytes()
    assert sorted(p.name for p in (tmp_path / "spilled").iterdir()) == [leaf_file.LEAVES, leaf_file.OPEN_EPOCH]


def test_a_large_message_has_a_leaf_for_every_frame_that_carries_it(tmp_path: Path) -> None:
    assert payload_digests.CHUNK == CHUNK
    body = random.Random(4).randbytes(2 * CHUNK + 7)
    s = TranscriptStore(tmp_path, **PARTY)  # type: ignore[arg-type]
    s.begin_epoch(0)
    s.record(0, 1, (0, 0, 0, kinds.OPEN), body)
    s.finalize_epoch()
    leaves = [Leaf.unpack(r) for r in s.records(0)]
    assert [(leaf.chunk, leaf.size) for leaf in leaves] == [(0, CHUNK), (1, CHUNK), (2, 7)]
    key = epoch_key(PARTY["pair_keys"][1], SID, 0)  # type: ignore[index]
    for leaf in leaves:
        piece = body[leaf.chunk * CHUNK : (leaf.chunk + 1) * CHUNK]
        assert make_record(key, leaf.key, piece)[0] == leaf.pack()


def test_repeats_of_leaves_that_lie_on_disk(tmp_path: Path) -> None:
    """An equal one counts once; a differing one ends the epoch at the latest, naming its sender."""
    s = TranscriptStore(tmp_path, limit=5, **PARTY)  # type: ignore[arg-type]
    s.begin_epoch(0)
    for op in (*range(20), 3):
        s.record(1, 2, (0, 0, op, kinds.OPEN), b"%d" % op)
    assert s.finalize_epoch().leaves == 20
    s.begin_epoch(1)
    for op in range(20):
        s.record(1, 2, (1, 0, op, kinds.OPEN), b"%d" % op)
    s.record(1, 2, (1, 0, 3, kinds.OPEN), b"other")
    with pytest.raises(ProtocolError, match=r"P2->P0 received .* differs") as found:
        s.finalize_epoch()
    assert found.value.party == 2


def test_a_resume_compares_with_an_epoch_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    for sealed in (True, False):
        s = TranscriptStore(tmp_path / str(sealed), limit=5, **PARTY)  # type: ignore[arg-type]
        fill(s, 30)
        whole = s.finalize_epoch() if sealed else None
        s.close()
        again = TranscriptStore(tmp_path / str(sealed), limit=5, **PARTY)  # type: ignore[arg-type]
        again.begin_epoch(0)
        with pytest.raises(ProtocolError, match="differs"):
            again.record(1, 1, (0, 1, 1, kinds.OPEN), b"other")
        with pytest.raises(ProtocolError, match="was not repeated"):
            again.finalize_epoch()
        again.close()
        last = TranscriptStore(tmp_path / str(sealed), limit=5, **PARTY)  # type: ignore[arg-type]
        fill(last, 30)
        assert last.finalize_epoch() == (whole or last.summary(0))


def test_who_changes_a_buffer_after_recording_it_changes_no_leaf(tmp_path: Path) -> None:
    found = []
    for change in (False, True):
        s = TranscriptStore(tmp_path / str(change), **PARTY)  # type: ignore[arg-type]
        s.begin_epoch(0)
        for op in range(20):
            buffer = bytearray(b"%d" % (op % 10) * payload_digests.LARGE)
            s.record(op & 1, 1, (0, 0, op, kinds.OPEN), memoryview(buffer))
            if change:
                buffer[:] = bytes(len(buffer))
        found.append(s.finalize_epoch().root)
    assert found[0] == found[1]


def large(op: int, size: int) -> memoryview:
    return memoryview(bytearray(random.Random(op).randbytes(size)))


@pytest.mark.parametrize("when", ["before the epoch", "in the epoch", "from another thread"])
def test_what_is_hashed_while_it_waits_has_the_same_leaves(tmp_path: Path, when: str) -> None:
    sizes = [10, payload_digests.AHEAD - 1, payload_digests.AHEAD, payload_digests.CHUNK, 3 * payload_digests.CHUNK + 7]
    roots = []
    for hash_ahead in (False, True):
        s = TranscriptStore(tmp_path / str(hash_ahead), **PARTY)  # type: ignore[arg-type]
        for epoch in (0, 1):
            messages = [(Tag(epoch, 4, op, kinds.DEALER), large(op, size)) for op, size in enumerate(sizes)]
            told = [threading.Thread(target=s.hash_ahead, args=(1, *message)) for message in messages if hash_ahead]
            if when == "before the epoch":
                for thread in told:
                    thread.run()
            s.begin_epoch(epoch)
            if when != "before the epoch":
                for thread in told:
                    thread.start() if "thread" in when else thread.run()
            for tag, payload in messages:
                s.record(1, 1, tag, payload)
                payload[:] = bytes(len(payload))  # whoever reads it may do with it what he likes
            for thread in told:
                if "thread" in when:
                    thread.join()
            roots.append((hash_ahead, s.finalize_epoch()))
        s.close()
    assert [r for f, r in roots if f] == [r for f, r in roots if not f]


def test_what_was_foreseen_and_never_read_is_no_leaf(tmp_path: Path) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.hash_ahead(1, Tag(0, 0, 0, kinds.OPEN), large(0, payload_digests.AHEAD))
    s.hash_ahead(1, Tag(0, 0, 1, 99), large(0, payload_digests.AHEAD))
    s.hash_ahead(0, Tag(0, 0, 2, kinds.OPEN), large(0, payload_digests.AHEAD))
    s.record(1, 2, (0, 0, 3, kinds.OPEN), b"read")
    assert s.finalize_epoch().leaves == 1
    s.close()
    s.hash_ahead(1, Tag(1, 0, 0, kinds.OPEN), large(0, payload_digests.AHEAD))


def test_a_foreseen_message_that_differs_from_the_one_before_the_crash_is_found(tmp_path: Path) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.hash_ahead(1, Tag(0, 0, 0, kinds.OPEN), large(0, payload_digests.AHEAD))
    s.record(1, 1, (0, 0, 0, kinds.OPEN), large(0, payload_digests.AHEAD))
    s.close(sync=False)
    again = open_store(tmp_path, 0)
    again.begin_epoch(0)
    again.hash_ahead(1, Tag(0, 0, 0, kinds.OPEN), large(1, payload_digests.AHEAD))
    with pytest.raises(ProtocolError, match="differs"):
        again.record(1, 1, (0, 0, 0, kinds.OPEN), large(1, payload_digests.AHEAD))


def test_two_crashes_keep_the_open_epoch(tmp_path: Path) -> None:
    s = open_store(tmp_path, 0)
    for epoch in (0, 1):
        s.begin_epoch(epoch)
        s.record(1, 1, (epoch, 0, 0, kinds.OPEN), b"%d" % epoch)
        if epoch == 0:
            s.finalize_epoch()
    s.close()
    middle = open_store(tmp_path, 0)  # resumed, crashed again while repeating epoch 0
    middle.begin_epoch(0)
    middle.close(sync=False)
    last = open_store(tmp_path, 0, 1)
    last.begin_epoch(1)
    with pytest.raises(ProtocolError):
        last.record(1, 1, (1, 0, 0, kinds.OPEN), b"changed")


@pytest.mark.parametrize("cut", [1, 30, RECORD.size, 500])
def test_power_loss_in_the_last_block(stores: dict[int, TranscriptStore], tmp_path: Path, cut: int) -> None:
    first = run_epochs(stores, range(3))
    for s in stores.values():
        s.close()
    path = tmp_path / "p0" / leaf_file.LEAVES
    path.write_bytes(path.read_bytes()[:-cut])
    again = {p: open_store(tmp_path, p, 1) for p in range(3)}
    assert again[0].epochs == 2
    assert run_epochs(again, range(1, 3)) == first[1:]


def test_power_loss_that_left_zeros(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    run_epochs(stores, range(3))
    for s in stores.values():
        s.close()
    path = tmp_path / "p0" / leaf_file.LEAVES
    data = path.read_bytes()
    path.write_bytes(data[:-200] + bytes(200))
    assert open_store(tmp_path, 0, 2).epochs == 2


@pytest.mark.parametrize("cut", [1, 30, RECORD.size, 500])
def test_a_process_killed_while_it_wrote_a_block_repeats_it(
    stores: dict[int, TranscriptStore], tmp_path: Path, cut: int
) -> None:
    """Its leaves are all in ``open.bin``, so nothing is repeated that it does not know."""
    first = run_epochs(stores, range(3))
    for s in stores.values():
        s.close()
    path = tmp_path / "p0" / leaf_file.LEAVES
    path.write_bytes(path.read_bytes()[:-cut])
    again = {p: open_store(tmp_path, p, 1, power_cut=False) for p in range(3)}
    assert (again[0].epochs, again[0].left_open) == (2, 2)
    assert run_epochs(again, range(1, 3)) == first[1:]


@pytest.mark.parametrize("resume", [0, 1, 2])
def test_where_no_power_cut_came_a_changed_bit_anywhere_is_damage(
    stores: dict[int, TranscriptStore], tmp_path: Path, resume: int
) -> None:
    """Also of epochs that are to be repeated; nothing of the file is cut off."""
    run_epochs(stores, range(3))
    for s in stores.values():
        s.begin_epoch(3)
        s.close()
    path = tmp_path / "p0" / leaf_file.LEAVES
    data, size = path.read_bytes(), leaf_file.HEADER.size
    blocks = [block for _, block in leaf_file.blocks(path)]
    places = [at for b in blocks[resume:] for at in (*range(b.at - size, b.at, 3), *range(b.at, b.end, 17))]
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(UnreadableError, match=r"p0/leaves\.bin: this worker's own record of epoch \d is damaged"):
            open_store(tmp_path, 0, resume, power_cut=False)
        assert path.read_bytes() == changed
    path.write_bytes(data)
    assert open_store(tmp_path, 0, resume, power_cut=False).left_open == 3


def test_refuses_what_is_not_its_own(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    run_epochs(stores, range(1))
    with pytest.raises(ConfigError, match="another process"):
        open_store(tmp_path, 0)
    stores[0].close()
    with pytest.raises(ConfigError, match="another session"):
        open_store(tmp_path, 0, sid=bytes(32))
    with pytest.raises(ConfigError, match="holds 1 epochs"):
        open_store(tmp_path, 0, 2)
    with pytest.raises(ConfigError, match="keys"):
        TranscriptStore(tmp_path / "x", party=0, sid_sub=SID, own_key=b"", pair_keys={1: b""})
    with pytest.raises(ConfigError, match="32 bytes"):
        TranscriptStore(tmp_path / "x", party=0, sid_sub=SID, own_key=bytes(32), pair_keys={1: bytes(32), 2: b"short"})


def test_first_difference_names_the_message(stores: dict[int, TranscriptStore]) -> None:
    run_epochs(stores, range(1))
    mine, theirs = stores[0].records(0), stores[1].records(0)
    assert first_difference(mine, theirs, 0, 1) == ""
    common = [i for i, r in enumerate(theirs) if {Leaf.unpack(r).src, Leaf.unpack(r).dst} == {0, 1}]
    changed = list(theirs)
    leaf = Leaf.unpack(changed[common[3]])
    changed[common[3]] = leaf._replace(digest=bytes(32)).pack()
    text = first_difference(mine, changed, 0, 1)
    assert f"P{leaf.src}->P{leaf.dst}" in text
    assert f"op {leaf.op}" in text
    assert "00000000" in text
    dropped = theirs[: common[5]] + theirs[common[5] + 1 :]
    assert "missing at P1" in first_difference(mine, dropped, 0, 1)
    assert "missing at P1" in first_difference(dropped, mine, 1, 0)
    assert "missing at P0" in first_difference([], theirs, 0, 1)


def test_replay_refuses_disorder_repeats_and_foreign_leaves(stores: dict[int, TranscriptStore]) -> None:
    run_epochs(stores, range(1))
    records = stores[0].records(0)
    assert summarise([b"".join(records)], SID, 0, 0).root == summarise(records, SID, 0, 0).root
    swapped = [records[1], records[0], *records[2:]]
    for bad, named in ((swapped, "comes after"), ([*records, records[-1]], "twice"), (stores[1].records(0), "no leaf")):
        with pytest.raises(VerificationError, match=named):
            summarise([b"".join(bad)], SID, 0, 0)


def test_damaged_epoch_order_is_refused(stores: dict[int, TranscriptStore], tmp_path: Path) -> None:
    run_epochs(stores, range(2))
    stores[0].close()
    path = tmp_path / "p0" / leaf_file.LEAVES
    (_, block), *_ = list(leaf_file.blocks(path))
    path.write_bytes(path.read_bytes()[block.end :])
    with pytest.raises(UnreadableError, match="where 0 belongs"):
        open_store(tmp_path, 0)


def test_full_disk_is_a_clear_error_and_loses_no_finished_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = open_store(tmp_path, 0)
    s.begin_epoch(0)
    s.record(0, 1, (0, 0, 0, kinds.OPEN), b"x")
    first = s.finalize_epoch()
    s.begin_epoch(1)
    s.record(0, 1, (1, 0, 0, kinds.OPEN), b"y")
    write = leaf_file.os.write
    monkeypatch.setattr(leaf_file.os, "write", lambda fd, data: write(fd, data[:10]) if len(data) > 50 else full())

    def full() -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(UvccError, match=r"leaves\.bin: No space left"):
        s.finalize_epoch()
    monkeypatch.undo()
    s.close(sync=False)
    again = open_store(tmp_path, 0, 1)
    assert again.epochs == 1
    assert again.summary(0) == first
    again.begin_epoch(1)
    again.record(0, 1, (1, 0, 0, kinds.OPEN), b"y")
    assert again.finalize_epoch().leaves == 1
