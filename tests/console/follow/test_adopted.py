"""A run that somebody else started, adopted: its journal, its halt by the control file, and that nothing is ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from uvcc_console.cli.main import main
from uvcc_console.cli.steer import halt
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.paths import JOURNAL
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.follow import adopting
from uvcc_console.follow.adopted import AdoptedRun
from uvcc_console.follow.adopting import Adoption
from uvcc_console.follow.shells import LocalShell
from uvcc_console.follow.target import read_target
from uvcc_console.haltd import order_socket
from uvcc_console.rollout.bus import Bus
from uvcc_console.runs import processes, sweep
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.halting.halt_switch import HaltSwitch
from uvcc_console.ui.judging.lamps import MOVING, Lamp
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.chart_grid import overview_lines
from uvcc_console.ui.panels.fleet import FleetState, fleet_lines, visible_rows
from uvcc_console.ui.panels.fleet_grid import grid_lines
from uvcc_console.ui.panels.pod_page import pod_lines
from uvcc_console.ui.widgets.bars import header_line, track_line
from uvcc_engine.contract.machine.shortpath import short

TRAINER = """
import sys, time
from uvcc_engine.contract import RunWriter

with RunWriter.open(sys.argv[1], run="mine-1") as run:
    def save():
        path = run.directory / "model.txt"
        path.write_text("1")
        return path
    run.describe({"steps": 100000})
    for step in range(1, 100000):
        time.sleep(0.02)
        run.step(step, loss=2.0 / step, lr=0.1, toks_per_s=5.0, save=save)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder whose detached processes end with the test."""
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get("UVCC_HOME") == str(tmp_path / "home"):
                process.kill()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Path]:
    """The run directory of a trainer that somebody started."""
    process = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path / "theirs")])
    yield tmp_path / "theirs"
    process.kill()
    process.wait()


def until(found: Callable[[], bool], limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


def snapshot(run_dir: Path) -> Snapshot:
    journal = Journal(run_dir / JOURNAL, readonly=True)
    try:
        return read_all(journal)
    finally:
        journal.close()


def looked_at(s: Snapshot) -> None:
    """What the console draws of a folder: it fits, shows its curves, and has no word of parties or proofs."""
    view = View(snap=s, now=s.updated, conductor=Lamp(MOVING), sidecar=Lamp(MOVING))
    for width, height in ((78, 20), (158, 45)):
        curves = overview_lines(view, width, height)
        fleet = fleet_lines(view, FleetState(), width)
        page = pod_lines(view, "p0r0", width, height)
        bars = [header_line(view, width), track_line(view, width)]
        board = grid_lines(view, visible_rows(view, FleetState()), width)
        shown = "\n".join(plain(line) for line in (*bars, *fleet, *board, *curves, *page))
        assert f"step {s.step}" in plain(bars[0])
        assert all(len(plain(line)) <= width for line in (*bars, *fleet, *curves, *page))
        assert "FOLLOW" in plain(bars[0])
        assert "loss" in plain(curves[0])
        assert not re.search(r"\bP0\b|replica|\bpart(y|ies)\b|root @|[Ll]edger|verified", shown), shown


def adopted(target: str, capsys: pytest.CaptureFixture[str], home: Path) -> tuple[Path, dict[str, object]]:
    assert main(["adopt", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return home / "runs" / str(found["run"]), found


def test_it_is_followed_drilled_halted_with_its_checkpoint_and_costs_nothing(
    home: Path, trainer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", f"sh -c 'echo \"$0\" >> {tmp_path / 'notices'}'")
    until(lambda: (trainer / "training.csv").exists())
    run_dir, found = adopted(str(trainer), capsys, home)
    assert (found["contract"], found["no_halt"]) == (True, "")
    until(lambda: snapshot(run_dir).step > 0)
    s = snapshot(run_dir)
    assert (s.status, s.engine_run, s.steps_planned) == ("running", "mine-1", 100000)
    assert set(s.series["p0r0s0t0"]) >= {"loss", "lr", "toks_per_s"}
    assert processes.running(run_dir, processes.CONDUCTOR) == processes.running(run_dir, processes.HALTD) != 0
    assert sweep.fate_of(f"uvcc-{s.run}-p0r0") == sweep.LIVE
    assert main(["halt", s.run, "--drill"]) == 0
    assert main(["halt", s.run]) == 0
    until(lambda: bool(snapshot(run_dir).ended))
    s = snapshot(run_dir)
    assert (s.status, s.halt.verified, s.halt.total) == ("halted", 1, 1)
    left = json.loads((trainer / "exit.json").read_text())
    assert left["status"] == "halted"
    assert s.halt.acks["p0r0"][2] == left["checkpoint"] != ""
    assert (s.spent, s.hourly, s.leaks) == (0.0, 0.0, ())
    told = tmp_path / "notices"  # no console was ever attached
    until(lambda: told.exists() and "halted" in told.read_text().lower())


def test_a_bare_folder_says_why_it_cannot_be_halted_and_a_tear_down_touches_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "log.csv").write_text("step,loss,anything\n1,2,3\n2,1,4\n")
    run_dir, found = adopted(str(folder), capsys, home)
    assert found["contract"] is False
    until(lambda: "loss" in snapshot(run_dir).series.get("p0r0s0t0", {}) and snapshot(run_dir).step == 2)
    s = snapshot(run_dir)
    assert set(s.series["p0r0s0t0"]) >= {"loss", "anything"}
    looked_at(s)
    decision = HaltSwitch().press(1.0, 1.0, s, 0)
    assert decision.mode == ""
    assert "no run contract" in decision.why
    assert main(["halt", s.run]) == 2
    assert "no run contract" in capsys.readouterr().err
    assert main(["pod", s.run, "restart", "p0r0"]) != 0
    assert "only followed" in capsys.readouterr().err
    assert main(["status", s.run]) == 0
    assert "step 2," in capsys.readouterr().out  # of how many, nobody has said
    assert main(["teardown", s.run]) == 0
    assert "was touched" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == ["log.csv"]
    assert snapshot(run_dir).status == "torn_down"


def test_one_that_was_killed_is_taken_up_again_without_telling_anything_twice(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "log.csv").write_text("loss\n3\n2\n")
    run_dir, _ = adopted(str(folder), capsys, home)
    until(lambda: snapshot(run_dir).step == 2)
    psutil.Process(processes.running(run_dir, processes.CONDUCTOR)).kill()
    until(lambda: not processes.running(run_dir, processes.CONDUCTOR))
    with (folder / "log.csv").open("a") as f:
        f.write("1\n")
    assert main(["resume", run_dir.name]) == 0
    until(lambda: snapshot(run_dir).step == 3)
    journal = Journal(run_dir / JOURNAL, readonly=True)
    rows = [e.step for _, e in journal.since(0, kinds=(ev.Metric.kind,)) if isinstance(e, ev.Metric)]
    journal.close()
    assert rows == [1, 2, 3]


@pytest.mark.ci(__file__)
def test_a_halt_waits_for_the_follower_that_it_starts(
    home: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before has died; a busy machine needs longer for another than for a sidecar in whose place one halts."""
    until(lambda: (trainer / "training.csv").exists())
    run_dir = adopting.create(Adoption(read_target(str(trainer))))
    journal = Journal(run_dir / JOURNAL, source="test")
    journal.append(
        ev.PodChanged(pod="p0r0", party=0, replica=0, provider="adopted", state="ready"),
        ev.Followed(pod="p0r0", target=str(trainer), contract=True),
    )
    journal.close()
    monkeypatch.setattr(halt, "START_S", 0.0)
    assert main(["halt", run_dir.name]) == 0
    until(lambda: bool(snapshot(run_dir).ended))
    assert snapshot(run_dir).status == "halted"


def test_a_follower_that_does_not_answer_finds_the_order_in_the_journal(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was frozen between the call and the answer; this process has nobody there whom it could halt by itself."""
    run_dir = adopting.create(Adoption(read_target(str(tmp_path))))
    processes.write_record(run_dir, processes.HALTD)
    asked = ev.HaltRequested(nonce="n", mode="hold", by="cli")
    with socket.socket(socket.AF_UNIX) as door:
        with short(run_dir / order_socket.SOCKET) as path:
            door.bind(path)
        door.listen(1)
        way = halt.open_route(run_dir)
        door.accept()[0].close()
        way.ask(asked)
        way.close()
    assert "the order is in the journal" in capsys.readouterr().err
    journal = Journal(run_dir / JOURNAL, readonly=True)
    (found,) = [e for _, e in journal.since(0, kinds=(ev.HaltRequested.kind,)) if isinstance(e, ev.HaltRequested)]
    journal.close()
    assert (found.nonce, found.mode) == ("n", "hold")


@pytest.mark.parametrize("way", ["journal", "door"])
async def test_what_was_asked_before_it_has_looked_is_done(
    home: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Where the last follower has died a halt starts another, and its order is there before that knows the folder."""
    until(lambda: (trainer / "training.csv").exists())
    run_dir = adopting.create(Adoption(read_target(str(trainer))))
    asked = ev.HaltRequested(nonce="early", mode="halt", by="test")
    journal = Journal(run_dir / JOURNAL, source="test")
    answered = ev.Intent(action="restart", by="test", args={"pod": "p0r0", "order": "answered"})
    journal.append(answered, ev.ActionDone(action="restart", pod="p0r0", ok=False, order="answered"))
    journal.append(ev.Intent(action="restart", by="test", args={"pod": "p0r0", "order": "early"}))
    if way == "journal":
        journal.append(asked)
    known, reached = Bus(journal), asyncio.Event()

    async def reach(_: object) -> None:
        await reached.wait()

    monkeypatch.setattr(LocalShell, "open", reach)
    async with asyncio.timeout(240):
        following = asyncio.create_task(AdoptedRun(run_dir, known).run())
        while way == "door" and not await asyncio.to_thread(order_socket.ask, run_dir, asked):
            await asyncio.sleep(0.02)
        reached.set()
        assert await following == "halted"
    s = snapshot(run_dir)
    assert (s.halt.nonce, s.halt.done, s.halt.verified, s.halt.total) == ("early", True, 1, 1)
    done = [e.order for _, e in journal.since(0, kinds=(ev.ActionDone.kind,)) if isinstance(e, ev.ActionDone)]
    journal.close()
    assert done == ["answered", "early"]


def test_the_control_file_follows_the_one_rule_of_requests(tmp_path: Path) -> None:
    from uvcc_console.follow.control_file import ControlFileChannel
    from uvcc_console.follow.reader import FolderReader
    from uvcc_console.follow.shells import LocalShell
    from uvcc_engine.contract.agent_protocol.agent_commands import HaltCommand, SignalCommand
    from uvcc_engine.contract.agent_protocol.agent_messages import HaltStage
    from uvcc_engine.contract.agent_protocol.wire import AckCode
    from uvcc_engine.contract.run_files.control import HALT, HOLD, RELEASE, read_halt

    (tmp_path / ".HALT").symlink_to(tmp_path / "elsewhere")

    async def ask() -> list[tuple[bool, AckCode]]:
        reader = FolderReader(LocalShell(), str(tmp_path))
        reader.run = "mine-1"
        channel = ControlFileChannel(reader, lambda: True, lambda told: None)
        found = []
        for mode, nonce in ((HOLD, "a"), (RELEASE, "b"), (RELEASE, "a"), (HOLD, "a"), (HALT, "c"), (RELEASE, "c")):
            answer = channel.post(HaltCommand(run="mine-1", mode=mode, deadline_s=60.0), nonce=nonce)
            assert answer is not None
            ack = await answer
            found.append((ack.ok, ack.code))
        signalled = channel.post(SignalCommand(run="mine-1", signal="TERM"), nonce="c.term")
        assert signalled is not None
        assert not (await signalled).ok  # nothing there is ever ended by a signal
        return found

    async def witnessed() -> list[tuple[str, str]]:
        """A run without a name when it was asked to halt, whose exit record tells one, is the one that was asked."""
        told: list[HaltStage] = []
        reader = FolderReader(LocalShell(), str(tmp_path))
        channel = ControlFileChannel(reader, lambda: True, told.append)
        (tmp_path / ".HALT").unlink()
        answer = channel.post(HaltCommand(run="", mode=HALT, deadline_s=60.0), nonce="d")
        assert answer is not None
        assert (await answer).ok
        reader.run = "mine-1"
        channel.heard(ev.EngineEvent(pod="p0r0", level="info", event="exit", fields={"step": 3}))
        return [(stage.run, stage.stage) for stage in told]

    acks = asyncio.run(ask())
    assert [ok for ok, _ in acks] == [True, False, True, False, True, False]
    assert [code for ok, code in acks if not ok] == [AckCode.OTHER, AckCode.OVERTAKEN, AckCode.FINAL]
    assert not (tmp_path / "elsewhere").exists()  # a link in its place was replaced
    asked = read_halt(tmp_path, "mine-1")
    assert asked is not None
    assert (asked.mode, asked.nonce) == ("halt", "c")
    assert asyncio.run(witnessed()) == [("", "gone")]
