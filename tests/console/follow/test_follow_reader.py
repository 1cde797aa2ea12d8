"""A folder of this machine, read again and again with the shell that every machine has."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.follow import listing, reader
from uvcc_console.follow.file_tail import LONGEST, Tail
from uvcc_console.follow.reader import FolderReader
from uvcc_console.follow.shells import LocalShell
from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.errors import UnreadableError


class Watched:
    """A reader whose every look scans, and what it has found so far."""

    def __init__(self, folder: Path, cursors: dict[str, list[int]] | None = None) -> None:
        self.clock = 0.0
        self.reader = FolderReader(LocalShell(), str(folder), cursors, monotonic=lambda: self.clock)
        self.events: list[ev.Event] = []

    async def look(self) -> list[ev.Event]:
        self.clock += 2 * reader.SCAN_S
        found = await self.reader.look()
        self.events += [*self.reader.begun(), *found]
        return found

    def of(self, kind: type[ev.Event], events: Sequence[ev.Event] | None = None) -> list[ev.Event]:
        return [e for e in (self.events if events is None else events) if isinstance(e, kind)]

    def losses(self, events: Sequence[ev.Event] | None = None) -> list[tuple[int, float]]:
        found = self.of(ev.Metric, events)
        return [(e.step, e.values["loss"]) for e in found if isinstance(e, ev.Metric) and "loss" in e.values]

    @property
    def cursors(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for event in self.of(ev.CursorMoved):
            assert isinstance(event, ev.CursorMoved)
            found |= event.cursors
        return found


async def test_a_table_that_grows_by_half_lines_is_truncated_and_replaced(tmp_path: Path) -> None:
    watched, table = Watched(tmp_path), tmp_path / "log.csv"
    assert await watched.look() == []  # it appears later
    table.write_text("step,loss\n1,2.0\n2,1.")
    assert watched.losses(await watched.look()) == [(1, 2.0)]
    with table.open("a") as f:
        f.write("5\n")
    assert watched.losses(await watched.look()) == [(2, 1.5)]
    table.write_text("step,loss\n1,9\n")
    found = await watched.look()
    assert watched.losses(found) == [(1, 9.0)]
    assert [e.fields["reason"] for e in found if isinstance(e, ev.EngineEvent)] == ["truncated"]
    other = tmp_path / "new"
    other.write_text("step,loss\n1,7\n2,6\n3,5\n")
    other.replace(table)
    found = await watched.look()
    assert watched.losses(found) == [(1, 7.0), (2, 6.0), (3, 5.0)]
    assert [e.fields["reason"] for e in found if isinstance(e, ev.EngineEvent)] == ["rotated"]


async def test_what_was_written_long_ago_is_no_sign_of_life_of_now(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2.0\n")
    os.utime(tmp_path / "log.csv", (1_000_000, 1_000_000))
    watched = Watched(tmp_path)
    (beat,) = watched.of(ev.HeartbeatRead, await watched.look())
    assert abs(beat.ts - 1_000_000) < 5
    assert watched.reader.why_no_halt == reader.BARE


async def test_a_new_reader_goes_on_from_its_cursor_with_names_and_rows_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("loss\n2\n1\n")
    (tmp_path / "b.csv").write_text("loss\n4\n")
    watched = Watched(tmp_path)
    await watched.look()
    again = Watched(tmp_path, watched.cursors)
    assert again.of(ev.Metric, await again.look()) == []
    with (tmp_path / "b.csv").open("a") as f:
        f.write("3\n")
    with (tmp_path / "a.csv").open("a") as f:
        f.write("0.5\n")
    rows = [(e.step, dict(e.values)) for e in again.of(ev.Metric, await again.look()) if isinstance(e, ev.Metric)]
    assert rows == [(3, {"loss": 0.5}), (2, {"b/loss": 3.0})]


async def test_a_hostile_folder_is_read_within_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside.csv"
    outside.write_text("step,loss\n1,666\n")
    folder = tmp_path / "run; touch hacked $(touch hacked) 'x"
    folder.mkdir()
    (folder / "link.csv").symlink_to(outside)
    (folder / "sub").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.csv")
    (folder / "\x1b[31m.csv").write_text("step,loss\n1,666\n")
    (folder / "two\nlines.csv").write_text("step,loss\n1,666\n")
    (folder / "-rf $(touch hacked).csv").write_text("step,loss\n1,2.0\n" + "x" * (2 * LONGEST) + "\n2,1\n")
    (folder / "bad.jsonl").write_bytes(b'\xff\x00{"step": NaN}\n' + b"[" * 5000 + b"\n")
    watched = Watched(folder)
    await watched.look()
    assert 666.0 not in [loss for _, loss in watched.losses()]
    assert (2, 1.0) in watched.losses()
    assert watched.reader.followed == ["-rf $(touch hacked).csv", "bad.jsonl"]
    assert not list(tmp_path.rglob("hacked"))
    assert any("names that cannot be shown" in e.text for e in watched.events if isinstance(e, ev.Alert))
    assert sum(e.count for e in watched.events if isinstance(e, ev.LinesMalformed)) >= 2


async def test_of_very_many_files_the_contracts_come_first_and_the_rest_is_told(tmp_path: Path) -> None:
    for i in range(listing.MOST_LISTED + 50):
        (tmp_path / f"many{i}.csv").touch()
        (tmp_path / f"many{i}.log").touch()
    watched = Watched(tmp_path)
    await watched.look()
    assert len(watched.reader.followed) == reader.MOST_FOLLOWED
    assert any("more than 512 files" in e.text for e in watched.events if isinstance(e, ev.Alert))
    with RunWriter.open(tmp_path, run="mine-1") as run:
        run.step(1, loss=2.0)
    await watched.look()
    assert watched.reader.contract
    assert (1, 2.0) in watched.losses()


async def test_a_file_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("step,loss\n1,666\n2,667\n")
    folder = tmp_path / "run"
    folder.mkdir()
    table = folder / "log.csv"
    table.write_text("step,loss\n")
    watched = Watched(folder)
    await watched.look()
    table.unlink()
    table.symlink_to(secret)
    said = await LocalShell().run(listing.read_script(str(folder), "log.csv", 0, 100))
    assert (said.exit, said.out) == (3, b"")
    await watched.look()
    assert watched.losses() == []


@pytest.mark.parametrize(("name", "why"), [("nothing", "there is no folder"), ("file", "it is a file")])
async def test_a_folder_that_is_none_is_named_with_the_cure(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnreadableError, match=why):
        await Watched(tmp_path / name).look()


async def test_a_run_directory_is_read_as_an_agents_lines_are(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with RunWriter.open(tmp_path, run="mine-1") as run:
        run.describe({"config": {"train": {"steps": 3}}})
        for step in range(1, 4):
            run.step(step, loss=2.0 / step, lr=0.1, toks_per_s=10.0)
        await watched.look()
        assert (watched.reader.contract, watched.reader.run, watched.reader.steps) == (True, "mine-1", 3)
        assert watched.reader.why_no_halt == ""
        assert not watched.reader.over
        run.val(3, 0.7, 2.0)
        run.exit("done", step=3)
    await watched.look()
    assert watched.reader.over
    phases = [(e.engine_run, e.steps) for e in watched.events if isinstance(e, ev.PhaseStarted)]
    assert phases == [("mine-1", 3)]
    states = [(e.state, e.rc) for e in watched.events if isinstance(e, ev.WorkerProcess)]
    assert states == [("started", None), ("exited", 0)]
    assert [step for step, _ in watched.losses()] == [1, 2, 3, 3]


async def test_a_run_whose_name_only_its_exit_tells_is_the_same_run_to_its_end(tmp_path: Path) -> None:
    """A trainer that describes itself nowhere: what was drawn of it stays when it ends."""
    watched = Watched(tmp_path)
    with RunWriter.open(tmp_path, run="mine-1") as run:
        run.step(1, loss=2.0)
        await watched.look()
        run.exit("halted", step=1)
    await watched.look()
    assert watched.reader.over
    assert watched.reader.run == "mine-1"
    assert [e.engine_run for e in watched.events if isinstance(e, ev.PhaseStarted)] == [tmp_path.name]


async def test_heartbeats_of_several_ranks_that_name_no_worker_are_told_apart(tmp_path: Path) -> None:
    for rank in (0, 1):
        beat = json.dumps({"ts": 1.0, "rank": rank, "step": 4 + rank, "phase": "train"})
        (tmp_path / f"heartbeat_rank{rank}.jsonl").write_text(beat + "\n")
    (tmp_path / "heartbeat_rankx.jsonl").write_text("{}\n")
    watched = Watched(tmp_path)
    await watched.look()
    found = {e.coord: e.record["step"] for e in watched.events if isinstance(e, ev.HeartbeatRead)}
    assert found == {"p0r0s0t0": 4, "p0r1s0t0": 5}


def test_a_large_file_is_read_from_its_last_part_on() -> None:
    tail = Tail(whole=100, last=10)
    assert tail.look(listing.FileStat(5, 1000, 0.0)) == ""
    assert tail.wants(listing.FileStat(5, 1000, 0.0)) == (990, 10)
    assert tail.take(b"alf\n7,8\n9") == ["7,8"]  # the line that it came into is not a line
    assert tail.cursor == [5, 998]
