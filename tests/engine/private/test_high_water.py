"""No epoch is begun twice under the same masks unless the transcript binds what was received the first time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files import files
from uvcc_engine.worker import high_water
from uvcc_engine.worker.high_water import AHEAD, HighWaterMark, RepeatError

SID, COORD = "ab" * 32, Coord(0, 1, 0, 0)


class Pod:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._patch = root, monkeypatch
        self.boot("one")
        for name in ("identity", "runs/a", "runs/b"):
            (root / name).mkdir(parents=True)

    def boot(self, name: str) -> None:
        self._patch.setattr(high_water, "boot_id", lambda: name)

    def claim(self, attempt: int = 0, run: str = "a") -> HighWaterMark:
        return HighWaterMark.claim(self.root / "identity", SID, COORD, attempt, self.root / "runs" / run)

    def went(self, epochs: int) -> HighWaterMark:
        mark = self.claim()
        mark.admit(0, -1)
        for epoch in range(epochs):
            mark.begin(epoch)
        return mark

    def demand(self, run: str = "a") -> object:
        return json.loads((self.root / "runs" / run / files.least_attempt_name(str(COORD))).read_text())


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


@pytest.mark.parametrize(("finalised", "left_open"), [(6, -1), (5, 5)])
def test_a_killed_worker_goes_on_over_a_whole_transcript(pod: Pod, finalised: int, left_open: int) -> None:
    pod.went(6).close()
    pod.claim().admit(finalised, left_open)


@pytest.mark.parametrize(("finalised", "left_open"), [(5, -1), (5, 4), (4, 4), (0, -1)])
def test_a_transcript_that_lacks_what_was_begun_takes_the_next_attempt(
    pod: Pod, finalised: int, left_open: int
) -> None:
    pod.went(6).close()
    with pytest.raises(RepeatError, match=f"holds {finalised} epochs of the 6 .*: its files were taken") as refused:
        pod.claim().admit(finalised, left_open)
    assert refused.value.least == 1
    assert pod.demand() == {"least": 1}
    pod.claim(1).admit(0, -1)  # other masks: nothing is repeated


def test_after_another_boot_all_that_was_reserved_counts(pod: Pod) -> None:
    pod.went(6).close()
    pod.boot("two")
    with pytest.raises(RepeatError, match=f"of the {AHEAD} that this identity may have begun.* after a power cut"):
        pod.claim().admit(6, -1)


def test_a_run_that_was_halted_in_good_order_goes_on_after_another_boot(pod: Pod) -> None:
    mark = pod.went(6)
    mark.settle()
    mark.close()
    pod.boot("two")
    again = pod.claim()
    again.admit(6, -1)
    again.begin(6)
    again.close()
    with pytest.raises(RepeatError):
        pod.claim().admit(6, -1)  # the second boot's own count goes on


def test_where_the_boot_is_unknown_only_what_is_durable_counts(pod: Pod) -> None:
    pod.boot("")
    pod.went(6).close()
    with pytest.raises(RepeatError):
        pod.claim().admit(6, -1)


def test_a_lost_count_counts_as_all_that_was_reserved(pod: Pod) -> None:
    pod.went(6).close()
    (path,) = (pod.root / "identity" / "marks").glob("*.begun")
    path.write_bytes(b"\0\0")  # cut short
    with pytest.raises(RepeatError):
        pod.claim().admit(6, -1)


def test_a_second_directory_takes_another_attempt_and_the_first_one_is_over(pod: Pod) -> None:
    pod.went(2).close()
    with pytest.raises(RepeatError, match=r"begun in \.\./runs/a, not in \.\./runs/b") as refused:
        pod.claim(run="b")
    assert refused.value.least == 1
    assert pod.demand("b") == {"least": 1}
    pod.claim(1, run="b").admit(0, -1)
    for attempt in (0, 1):
        with pytest.raises(RepeatError) as refused:
            pod.claim(attempt)
        assert refused.value.least == 2
    pod.claim(2).admit(0, -1)


def test_a_home_that_was_moved_as_a_whole_is_the_same_directory(pod: Pod) -> None:
    pod.went(2).close()
    pod.root = pod.root.rename(pod.root.with_name("moved"))
    pod.claim().admit(2, -1)


def test_an_attempt_before_the_one_that_was_begun_is_refused(pod: Pod) -> None:
    pod.claim(3).close()
    with pytest.raises(RepeatError) as refused:
        pod.claim(2)
    assert refused.value.least == 3


def test_epochs_are_reserved_before_they_begin_and_many_at_once(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    mark = pod.claim()
    keep = files.write_json
    monkeypatch.setattr(files, "write_json", lambda path, value, **how: (written.append(value), keep(path, value)))
    for epoch in range(2 * AHEAD + 1):
        mark.begin(epoch)
        assert written[-1]["reserved"] > epoch
    assert len(written) == 3
    mark.begin(0)  # repeated over its record: nothing new
    assert len(written) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"attempt":0}', '{"attempt":"0","directory":"a","boot":"","reserved":0}']
)
def test_a_damaged_mark_is_refused(pod: Pod, text: str) -> None:
    pod.went(2).close()
    (path,) = (pod.root / "identity" / "marks").glob("*.json")
    path.write_text(text)
    with pytest.raises(UnreadableError, match="no high-water mark"):
        pod.claim()


def test_an_attempt_of_which_a_proof_failed_is_not_gone_on_with(pod: Pod) -> None:
    mark = pod.went(6)
    mark.refute()
    mark.close()
    assert pod.demand() == {"least": 1}
    with pytest.raises(RepeatError, match="a proof of attempt 0 did not hold") as refused:
        pod.claim().admit(5, 5)
    assert refused.value.least == 1
    pod.claim(1).admit(0, -1)
    pod.claim(1).admit(0, -1)  # the word is about the attempt that failed
