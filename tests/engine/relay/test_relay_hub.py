"""Queues of the relay: leases, deduplication, expiry, quotas, restarts. Clock and commits are the test's."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import NoReturn

import pytest
from relay_kit import PARTIES, Bench

from uvcc_engine.contract.peer_protocol.record_names import MAIL_KEPT_S
from uvcc_engine.relay import binary, db
from uvcc_engine.relay.config import Credential
from uvcc_engine.relay.segments import Segments


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, lease_s=10.0, ttl_s=100, dedup_s=1000.0)


def payloads(messages: list[binary.Message]) -> list[bytes]:
    return [bytes(m.payload) for m in messages]


def test_messages_come_in_order_and_once(bench: Bench) -> None:
    assert bench.send(0, 1, b"a", b"b") == bytes([binary.STORED] * 2)
    assert bench.send(2, 1, b"c") == bytes([binary.STORED])
    got = bench.take(1)
    assert [(m.sender, bytes(m.payload)) for m in got] == [(0, b"a"), (0, b"b"), (2, b"c")]
    assert bench.take(1) == []
    assert bench.ack(1, got) == [True, True, True]
    assert bench.ack(1, got) == [False, False, False]


def test_a_lease_that_ends_gives_the_message_back_in_its_place(bench: Bench) -> None:
    bench.send(0, 1, b"a", b"b", b"c")
    first = bench.take(1)
    bench.ack(1, first[1:2])
    bench.now += 9
    assert bench.take(1) == []
    bench.now += 2
    bench.send(0, 1, b"d")
    assert payloads(bench.take(1)) == [b"a", b"c", b"d"]


def test_another_consumer_or_a_resync_gets_what_was_leased_at_once(bench: Bench) -> None:
    bench.send(0, 1, b"a")
    assert payloads(bench.take(1, consumer=1)) == [b"a"]
    assert bench.take(1, consumer=1) == []
    assert payloads(bench.take(1, consumer=2)) == [b"a"]
    bench.hub.release_leases(PARTIES[1], 7)
    assert payloads(bench.take(1, consumer=2)) == [b"a"]


def test_boxes_groups_and_receivers_do_not_see_each_other(bench: Bench) -> None:
    bench.send(0, 1, b"for one")
    bench.send(0, 2, b"for two")
    bench.send(0, 1, b"other box", box=8)
    stranger = Credential(0, "other", frozenset({1}))
    bench.send(0, 1, b"other group", who=stranger)
    assert payloads(bench.take(1)) == [b"for one"]
    assert payloads(bench.take(2)) == [b"for two"]
    assert payloads(bench.take(1, box=8)) == [b"other box"]
    assert bench.take(0) == []


def test_only_permitted_receivers(bench: Bench) -> None:
    narrow = Credential(0, "g", frozenset({2}))
    assert bench.send(0, 1, b"x", who=narrow) == bytes([binary.FORBIDDEN])
    assert bench.send(0, 0, b"x") == bytes([binary.FORBIDDEN])
    assert bench.take(1) == []


def test_an_id_is_remembered_beyond_acknowledgement_and_restart(bench: Bench) -> None:
    bench.send(0, 1, b"a")
    assert bench.send(0, 1, b"a") == bytes([binary.DUPLICATE])
    bench.ack(1, bench.take(1))
    assert bench.send(0, 1, b"a") == bytes([binary.DUPLICATE])
    assert bench.send(0, 1, b"changed", ids=[b"id-a"]) == bytes([binary.COLLISION])
    bench.hub.tick()  # acknowledgements become durable
    bench.reopen()
    assert bench.send(0, 1, b"a") == bytes([binary.DUPLICATE])
    assert bench.send(0, 1, b"changed", ids=[b"id-a"]) == bytes([binary.COLLISION])
    assert bench.send(2, 1, b"a") == bytes([binary.STORED])  # another sender's ids are its own
    bench.now += 2000
    bench.hub.tick()
    bench.hub.forget()
    assert bench.send(0, 1, b"a") == bytes([binary.STORED])


def test_what_was_confirmed_survives_a_kill(bench: Bench) -> None:
    large = os.urandom(200_000)
    bench.send(0, 1, b"small", large)
    bench.take(1)
    bench.reopen()
    got = bench.take(1)
    assert payloads(got) == [b"small", large]
    bench.ack(1, got)
    bench.hub.tick()
    bench.reopen()
    assert bench.take(1) == []


def test_delivery_ids_of_different_starts_never_meet(bench: Bench) -> None:
    bench.send(0, 1, b"a")
    old = bench.take(1)
    bench.ack(1, old)
    bench.hub.tick()
    bench.reopen()
    bench.send(0, 1, b"b")
    assert bench.take(1)[0].delivery > old[0].delivery


def test_expiry_is_told_to_the_sender(bench: Bench) -> None:
    bench.send(0, 1, b"late", ttl=5)
    bench.send(0, 1, b"leased", ttl=5)
    bench.take(1)
    bench.now += 6
    bench.hub.tick()
    bench.hub.release_leases(PARTIES[1], 7)
    assert bench.take(1) == []
    notices = bench.take(0)
    assert [(m.slot, bytes(m.payload)) for m in notices] == [
        (binary.EXPIRED, b"\x01id-late"),
        (binary.EXPIRED, b"\x01id-leased"),
    ]
    bench.reopen()
    assert len(bench.take(0)) == 2  # a notice is as durable as a message
    assert bench.send(0, 1, b"late") == bytes([binary.STORED])  # it may be sent again


def test_what_was_taken_never_expires(bench: Bench) -> None:
    """Nobody is told that a message was lost which its receiver has, nor is its room given back twice."""
    bench.send(0, 1, b"taken", ttl=5)
    bench.send(0, 1, b"kept", ttl=500)
    bench.ack(1, bench.take(1)[:1])
    used = {key: (u.messages, u.bytes) for key, u in bench.hub.usage.items()}
    bench.now += 6
    bench.hub.tick()
    assert bench.take(0) == []
    assert bench.hub.totals.expired == 0
    assert {key: (u.messages, u.bytes) for key, u in bench.hub.usage.items()} == used
    assert bench.send(0, 1, b"taken") == bytes([binary.DUPLICATE])


def test_what_expires_while_it_is_leased_gives_its_room_back_once(bench: Bench) -> None:
    bench.send(0, 1, b"leased", ttl=5)
    leased = bench.take(1)
    bench.now += 6
    bench.hub.tick()
    bench.ack(0, bench.take(0))  # the notice of it
    assert bench.ack(1, leased) == [False]
    assert bench.take(1) == []
    assert {(u.messages, u.bytes) for u in bench.hub.usage.values()} == {(0, 0)}


def test_a_second_that_passes_ends_no_lease(bench: Bench) -> None:
    bench.send(0, 1, b"a")
    bench.take(1)
    bench.now += 1
    bench.hub.tick()
    assert bench.take(1) == []
    assert bench.hub.totals.redelivered == 0


def test_a_full_queue_is_a_visible_refusal(tmp_path: Path) -> None:
    bench = Bench(tmp_path, quota_messages=2, quota_bytes=1000)
    assert bench.send(0, 1, b"a", b"b", b"c") == bytes([binary.STORED, binary.STORED, binary.QUOTA])
    assert bench.send(2, 1, b"mine") == bytes([binary.STORED])  # the quota is per sender
    bench.ack(1, bench.take(1))
    assert bench.send(0, 1, b"c") == bytes([binary.STORED])
    assert bench.send(0, 1, b"x" * 1000) == bytes([binary.QUOTA])


def test_a_disk_that_refuses_is_reported_and_harms_nothing(bench: Bench) -> None:
    bench.writer.broken = sqlite3.OperationalError("database or disk is full")
    assert bench.send(0, 1, b"a") == bytes([binary.FAILED])
    assert bench.take(1) == []
    assert bench.hub.usage["g", 0].messages == 0
    bench.writer.broken = None
    assert bench.send(0, 1, b"a") == bytes([binary.STORED])
    bench.reopen()
    assert payloads(bench.take(1)) == [b"a"]


def test_nothing_is_visible_or_confirmed_before_its_commit(bench: Bench) -> None:
    bench.writer.held = []
    assert bench.send(0, 1, b"a") == b"pending"
    assert bench.send(0, 1, b"a") == b"pending"  # nor is a repeat
    assert bench.take(1) == []
    bench.writer.release()
    assert payloads(bench.take(1)) == [b"a"]


def test_a_slot_keeps_the_newest_for_a_few_seconds(bench: Bench) -> None:
    bench.send(0, 1, b"old", slot=3)
    bench.send(0, 1, b"new", slot=3)
    bench.send(2, 1, b"other", slot=3)
    assert payloads(bench.take(1)) == [b"new", b"other"]
    assert bench.take(1) == []
    bench.send(0, 1, b"stale", slot=3)
    bench.now += 11
    assert bench.take(1) == []


def test_payloads_beyond_the_memory_limit_come_from_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, memory_bytes=100_000)
    sent = [os.urandom(90_000) for _ in range(5)] + [b"small" * 10]
    bench.send(0, 1, *sent)
    assert bench.hub.state()["bytes_in_memory"] <= 100_000
    got = bench.take(1)
    assert payloads(got) == sent
    bench.ack(1, got)
    assert bench.hub.state()["bytes_in_memory"] == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_payload_that_its_segment_has_no_more_is_lost_and_may_come_again(tmp_path: Path, damage: str) -> None:
    """Handed out cut short it was a broken frame of an honest sender; kept as known, it could never be sent again."""
    bench = Bench(tmp_path, memory_bytes=1)
    first, second = os.urandom(90_000), os.urandom(90_000)
    bench.send(0, 1, first, second)
    [segment] = (tmp_path / "segments").glob("*.seg")
    if damage == "cut":
        os.truncate(segment, 150_000)
    elif damage == "gone":
        os.truncate(segment, 90_000)
    else:
        with segment.open("r+b") as f:
            f.seek(100_000)
            f.write(bytes(5))
    assert payloads(bench.take(1)) == [first]
    assert bench.hub.usage["g", 0].messages == 1
    assert bench.send(0, 1, second) == bytes([binary.STORED])
    bench.hub.tick()
    bench.reopen()
    assert payloads(bench.take(1)) == [first, second]


def test_a_disk_that_is_full_lets_no_segment_write_into_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the rest of a segment nor the next one found room, the closed one's number was written to again."""
    segments = Segments(tmp_path / "segments")
    assert segments.append([b"a" * 70_000]) == [(1, 0)]

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", full)
        patched.setattr(os, "open", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                segments.append([b"b" * 70_000])
    other = tmp_path / "other"
    with other.open("wb", buffering=0) as f:
        f.write(b"somebody else's")
        [(number, offset)] = segments.append([b"c" * 70_000])
        f.write(b", to the end")
    assert other.read_bytes() == b"somebody else's, to the end"
    assert segments.read(number, offset, 70_000) == b"c" * 70_000
    assert segments.read(1, 0, 70_000) == b"a" * 70_000
    segments.close()


def test_a_segment_that_nothing_needs_is_given_back_though_nothing_follows_it(tmp_path: Path) -> None:
    """Where the disk is short of room nothing is appended, and the file that was written to stayed for good."""
    segments = Segments(tmp_path / "segments")
    segments.append([b"a" * 70_000, b"b" * 70_000])
    segments.release(1)
    segments.give_back()
    assert segments.path(1).exists()
    segments.release(1)
    segments.give_back()
    assert not segments.path(1).exists()
    assert segments.append([b"c" * 70_000]) == [(2, 0)]
    segments.close()
    again = Segments(tmp_path / "segments")  # it has not written yet
    again.keep_only([2])
    again.release(2)
    assert not again.path(2).exists()
    again.close()


def test_a_write_that_stops_short_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda fd, some, at: whole(fd, b"".join(some)[:7], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:5], at))
    segments = Segments(tmp_path / "segments")
    places = [*segments.append([b"abcdefgh", b"ijklmnop"]), *segments.append([b"qrstuvwx"])]
    assert [segments.read(*place, 8) for place in places] == [b"abcdefgh", b"ijklmnop", b"qrstuvwx"]


def test_a_segment_that_nothing_needs_goes_once_another_is_written_to(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "segments", segment_bytes=4)
    ((number, _),) = segments.append([b"12345"])
    segments.release(number)
    assert segments.path(number).exists()  # it is the one that is written to
    segments.append([b"6"])
    assert not segments.path(number).exists()


def test_segments_without_content_are_deleted(bench: Bench) -> None:
    for n in range(20):
        bench.send(0, 1, bytes([n]) * 100_000)
    files = lambda: sorted(p.name for p in (bench.folder / "segments").glob("*.seg"))  # noqa: E731
    assert len(files()) == 2
    bench.ack(1, bench.take(1, max_bytes=1 << 30))
    bench.hub.tick()
    assert len(files()) == 1
    bench.reopen()
    assert files() == []


def test_a_batch_is_bounded_but_never_empty(bench: Bench) -> None:
    bench.send(0, 1, b"x" * 500, b"y" * 500, b"z" * 500)
    assert len(bench.take(1, max_bytes=100)) == 1
    assert len(bench.take(1, max_bytes=10_000)) == 2


class Sleeper:
    def __init__(self) -> None:
        self.woken = 0
        self.gone = False

    def wake(self) -> None:
        self.woken += 1

    def superseded(self) -> None:
        self.gone = True


def test_a_waiting_consumer_is_woken_by_the_commit(bench: Bench) -> None:
    one, two = Sleeper(), Sleeper()
    bench.hub.await_mail(PARTIES[1], 7, one)
    bench.send(0, 1, b"a")
    assert one.woken == 1
    bench.hub.await_mail(PARTIES[1], 7, two)
    assert one.gone
    assert not two.gone
    bench.hub.stop_awaiting(PARTIES[1], 7, one)  # too late, changes nothing
    bench.hub.drain()
    assert two.woken == 1


def test_queries_are_served_without_sorting_and_commits_are_full(bench: Bench) -> None:
    connection = db.connect(bench.folder / "relay.db")
    for query, arguments in ((db.PENDING, ()), (db.PAYLOAD, (1,))):
        plan = " ".join(str(row[3]) for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", arguments))
        assert "TEMP B-TREE" not in plan
        assert "PRIMARY KEY" in plan or "SCAN messages" in plan
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_what_lies_there_for_somebody_who_is_away_outlasts_a_weekend(bench: Bench) -> None:
    """As long as its sender asked, up to the relay's own bound; the run's own messages still end within minutes."""
    bench.send(0, 1, b"results", ttl=MAIL_KEPT_S)
    bench.send(0, 1, b"a step's")
    bench.now += 3 * 86_400.0
    bench.hub.tick()
    assert payloads(bench.take(1)) == [b"results"]
    bench.now += MAIL_KEPT_S
    bench.hub.tick()
    assert bench.take(1) == []
