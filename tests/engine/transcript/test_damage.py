"""A failing disk changes one bit of a worker's own files between two attempts: nobody else is accused of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evidence_kit import STEPS, World

from uvcc_engine.bench.work.rehearsal import VALUES, agree, exchange, state_digests
from uvcc_engine.contract.errors import ProtocolError, UnreadableError, UvccError, VerificationError
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file, write_ahead_log
from uvcc_engine.transcript.proof.verifier import verify

OPEN, RESUME = 3, 2  # the epoch that is open when all are killed; the one that the last checkpoint lets them go on at


class Killed:
    """Three workers that were killed in epoch ``OPEN``; every attempt begins with the files as they lay then."""

    def __init__(self, folder: Path) -> None:
        self.world, self.kept = World(folder / "run"), folder / "kept"
        self.world.open()
        self.world.steps(range(OPEN))
        for w in self.world.workers.values():
            w.begin(OPEN)
        exchange(self.world.workers, OPEN)
        for w in self.world.workers.values():
            w.recorder.catch_up()  # they waited for each other,
            w.recorder.catch_up()  # and the wait went on
            w.recorder.close(sync=False)
        self.world.close()
        shutil.copytree(folder / "run", self.kept)

    def file(self, name: str) -> Path:
        return self.world.transcript(0) / name

    def before(self, name: str) -> Path:
        return self.kept / "pod0" / self.world.transcript(0).name / name

    def restore(self) -> None:
        self.world.close()
        for p in range(3):
            shutil.rmtree(self.world.transcript(p))
            shutil.copytree(self.kept / f"pod{p}" / self.world.transcript(p).name, self.world.transcript(p))

    def flip(self, name: str, at: int, bit: int = 0) -> None:
        self.restore()
        data = bytearray(self.file(name).read_bytes())
        data[at] ^= 1 << bit
        self.file(name).write_bytes(bytes(data))

    def go_on(self) -> None:
        """Resume, repeat, finish and verify."""
        self.world.open(resume=RESUME)
        self.world.steps(range(RESUME, STEPS))
        self.world.end()
        self.world.close()
        found = verify(self.world.bundle())
        assert found.level == "transcripts"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    (folder := tmp_path_factory.mktemp("killed")).joinpath("run").mkdir()
    made = Killed(folder)
    yield made
    made.world.close()


def stopped_by(body: Callable[[], None]) -> UvccError | None:
    """The error that ends it."""
    try:
        body()
    except UvccError as e:
        return e
    return None


def outcome(killed: Killed, name: str, at: int, bit: int = 0) -> str:
    """What comes of a flipped bit: nothing, a refusal to go on, or a verification that fails. Never an accusation."""
    killed.flip(name, at, bit)
    error = stopped_by(killed.go_on)
    killed.world.close()
    where = f"{name}, byte {at}, bit {bit}: {error}"
    if error is None:
        return "went on"
    assert not isinstance(error, ProtocolError), where
    if isinstance(error, VerificationError):
        assert re.search(r"p0r0s0t0|of P0", error.what), where
        return "not verified"
    assert str(killed.world.transcript(0)) in error.what, where
    if isinstance(error, UnreadableError):
        assert str(killed.file(name)) in error.what, where
        assert "next attempt" in error.hint, where
        assert not re.search(r"P1|P2", str(error)), where
    return "refused"


def test_an_undamaged_run_goes_on(killed: Killed) -> None:
    killed.restore()
    killed.go_on()


@pytest.mark.parametrize(("name", "stride"), [(leaf_file.ROOTS, 61), (leaf_file.PEERS, 97), (leaf_file.OPENINGS, 29)])
def test_lines_are_refused_by_the_name_of_their_file(killed: Killed, name: str, stride: int) -> None:
    data = killed.before(name).read_bytes()
    assert len(data) > 500
    ends = [i for i, byte in enumerate(data) if byte == 10]
    seen = {outcome(killed, name, at, at % 8) for at in [*range(0, len(data), stride), *ends[:-1]]}
    assert seen == {"refused"}
    assert outcome(killed, name, ends[-1]) in ("refused", "went on")  # a line cut short was never whole


@pytest.mark.parametrize(
    ("of_head", "of_records"), [(17, 311), pytest.param(5, 71, marks=pytest.mark.ci(__file__))], ids=["some", "many"]
)
def test_leaves_are_refused_repeated_or_found_by_verify(killed: Killed, of_head: int, of_records: int) -> None:
    """Every so manieth byte of each block's head, and of its records."""
    blocks = [block for _, block in leaf_file.blocks(killed.before(leaf_file.LEAVES))]
    for block in blocks:
        head = range(block.at - leaf_file.HEADER.size, block.at, of_head)
        if block.epoch < RESUME:
            allowed = {"refused"}
        else:
            allowed = {"refused", "went on"}  # what was not synced is cut off, and executed again
        for at in head:
            assert outcome(killed, leaf_file.LEAVES, at, at % 8) in allowed
        for at in range(block.at, block.end, of_records):
            found = outcome(killed, leaf_file.LEAVES, at, at % 8)
            wanted = {RESUME - 1: "refused", RESUME: "went on"}.get(block.epoch, "not verified")
            assert found == wanted, (block.epoch, at)


def test_a_damaged_block_that_counts_is_not_cut_off(killed: Killed) -> None:
    """Evidence of epochs that are not repeated stays, however damaged it is."""
    killed.flip(leaf_file.LEAVES, 0)
    before = killed.file(leaf_file.LEAVES).read_bytes()
    with pytest.raises(UnreadableError, match=r"leaves\.bin: this worker's own record of epoch 0 is damaged"):
        killed.world.open(resume=RESUME)
    assert killed.file(leaf_file.LEAVES).read_bytes() == before


def open_again(killed: Killed) -> None:
    """All epochs that were finished are kept: the open one is compared with ``open.bin``."""
    killed.world.open(resume=OPEN)
    for w in killed.world.workers.values():
        w.begin(OPEN)
    exchange(killed.world.workers, OPEN)


@pytest.mark.ci(__file__)
def test_the_open_epoch_is_refused_by_the_name_of_its_file(killed: Killed) -> None:
    """Every byte of the head and of the records; a second process reads the same."""
    data = killed.before(leaf_file.OPEN_EPOCH).read_bytes()
    count = int.from_bytes(data[40:48], "little")
    assert count > 10
    start = write_ahead_log.PAGE
    places = [
        *range(56),
        *range(start, start + 2 * write_ahead_log.SLOT),
        *range(start, start + count * write_ahead_log.SLOT, 29),
    ]
    went_on = []
    for at in places:
        killed.flip(leaf_file.OPEN_EPOCH, at, at % 8)
        error = stopped_by(lambda: open_again(killed))
        killed.world.close()
        if error is None:
            went_on.append(at)
            continue
        assert isinstance(error, UnreadableError), (at, error)
        assert f"{killed.file(leaf_file.OPEN_EPOCH)}: this worker's own record of" in error.what
        assert "next attempt" in error.hint
        with pytest.raises(UnreadableError, match=r"open\.bin"):
            list(write_ahead_log.open_records(killed.world.transcript(0), OPEN))
    assert set(went_on) <= set(range(40, 48)), "only a count that is too high, or one too low, loses nothing"


def test_the_last_record_is_not_forgotten_when_the_count_is_one_too_low(killed: Killed) -> None:
    killed.restore()
    data = bytearray(killed.before(leaf_file.OPEN_EPOCH).read_bytes())
    count = int.from_bytes(data[40:48], "little")
    for stated, there in ((count - 1, count), (count + 3, count), (2**63, count)):
        data[40:48] = stated.to_bytes(8, "little")
        killed.file(leaf_file.OPEN_EPOCH).write_bytes(bytes(data))
        assert len(list(write_ahead_log.open_records(killed.world.transcript(0), OPEN))) == there
        open_again(killed)
        killed.world.close()
    data[40:48] = (count - 2).to_bytes(8, "little")
    killed.file(leaf_file.OPEN_EPOCH).write_bytes(bytes(data))
    with pytest.raises(UnreadableError, match=f"counts {count - 2} records and holds {count}"):
        open_again(killed)
    killed.world.close()


def test_pages_that_a_power_cut_lost_are_no_damage(killed: Killed) -> None:
    """Some read as zeros, some as what an earlier epoch had there: their messages are simply not known any more."""
    killed.restore()
    path = killed.file(leaf_file.OPEN_EPOCH)
    data = bytearray(killed.before(leaf_file.OPEN_EPOCH).read_bytes())
    other = write_ahead_log.WriteAheadLog(killed.world.folder, killed.world.workers[0].recorder._sid, OPEN - 1)
    other.begin(OPEN - 1)
    other.add(bytes(60))
    other.close()
    stale = (killed.world.folder / leaf_file.OPEN_EPOCH).read_bytes()[write_ahead_log.PAGE :][: write_ahead_log.SLOT]
    first = write_ahead_log.PAGE
    data[first : first + write_ahead_log.SLOT] = stale
    data[first + write_ahead_log.SLOT : first + 2 * write_ahead_log.SLOT] = bytes(write_ahead_log.SLOT)
    path.write_bytes(bytes(data))
    count = int.from_bytes(data[40:48], "little")
    assert len(list(write_ahead_log.open_records(killed.world.transcript(0), OPEN))) == count - 2
    open_again(killed)


def test_a_peer_that_sends_something_else_than_before_is_still_named(killed: Killed) -> None:
    killed.restore()
    killed.world.open(resume=OPEN)
    w = killed.world.workers[0]
    w.begin(OPEN)
    records = list(write_ahead_log.open_records(killed.world.transcript(0), OPEN))
    direction, kind, src, _, op, chunk, stream, _, _ = next(
        write_ahead_log.RECORD.unpack(r) for r in records if write_ahead_log.RECORD.unpack(r)[0] == 1
    )
    assert (direction, chunk) == (1, 0)
    assert kind in (kinds.OPEN, kinds.RESHARE, kinds.DEALER)
    with pytest.raises(ProtocolError, match=f"P{src} sent another message") as found:
        w.recorder.record(1, src, (OPEN, stream, op, kind), b"something else")
    assert found.value.party == src


@pytest.mark.parametrize("stop", ["outcome", "agreed", "one result", "all results", "closed"])
@pytest.mark.parametrize("resume", [STEPS, STEPS - 1])
def test_a_run_killed_at_its_end_ends_in_the_same_bytes(tmp_path: Path, stop: str, resume: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight, broken = World(tmp_path / "a"), World(tmp_path / "b")
    for world in (straight, broken):
        world.open()
        world.steps(range(STEPS))
    straight.end()
    w = broken.workers
    for e in w.values():
        e.begin(STEPS)
    exchange(w, STEPS)
    for e in w.values():
        e.outcome(VALUES, state_digests())
    if stop != "outcome":
        agree(w)
    if stop not in ("outcome", "agreed"):
        for e in list(w.values())[: 1 if stop == "one result" else 3]:
            e.result()
    if stop == "closed":
        w[0].check_closing(1, w[1].closing(0))
    for e in w.values():
        e.recorder.close(sync=False)
    broken.open(resume=resume)
    broken.steps(range(resume, STEPS))
    broken.end()
    for world in (straight, broken):
        world.close()
    for p in range(3):
        for name in (leaf_file.LEAVES, leaf_file.ROOTS, leaf_file.OPENINGS, leaf_file.PEERS, leaf_file.RESULT):
            one, two = straight.transcript(p) / name, broken.transcript(p) / name
            assert one.read_bytes() == two.read_bytes(), (p, name)
    assert verify(broken.bundle()).run_root == verify(straight.bundle()).run_root


def test_no_second_result_is_signed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.open()
    world.steps(range(STEPS))
    world.end()
    path = world.transcript(0) / leaf_file.RESULT
    before = json.loads(path.read_bytes())
    w = world.workers[0]
    assert w._outcome is not None
    w._outcome = ({"loss": 9.0, "accuracy": 1.0}, *w._outcome[1:])
    with pytest.raises(UnreadableError, match="is not the one that this worker signed before"):
        w.result()
    assert json.loads(path.read_bytes()) == before
    world.close()
