"""A package plays its run back: every event that the console had, without what is the operator's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from package_run import Package, copy_of, home
from report_run import RUN

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.report import archive, recording
from uvcc_console.report.record import JOURNAL, RunRecord
from uvcc_console.report.redact import RedactionError
from uvcc_console.ui.app import open_app
from uvcc_engine.contract.errors import UnreadableError


@pytest.fixture(scope="module")
def packed(made_package: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Path]:
    """A run packed as zip, and its archive, under a name of its own."""
    folder = tmp_path_factory.mktemp("recorded") / "home"
    package = copy_of(made_package, folder)
    journal = Journal(package.run_dir / JOURNAL)
    journal.append(
        ev.StageChanged(name="verify", status="ok", detail=f"look at {package.run_dir}/artifacts and {Path.home()}")
    )
    journal.close()
    (package.artifacts / recording.NAME).write_bytes(recording.recording(RunRecord.load(package.run_dir)))
    archive.pack_folder(package.artifacts, RUN, folder / "auditors.zip", "zip")
    return package, folder / "auditors.zip"


def snapshot(run_dir: Path) -> Snapshot:
    found = Snapshot()
    for seq, event in iter_events(run_dir / JOURNAL):
        found = reduce(found, event, seq)
    return found


def test_a_package_tells_what_the_journal_told(packed: tuple[Package, Path]) -> None:
    package, path = packed
    there = snapshot(package.run_dir)
    with recording.played(path) as run_dir:
        here = snapshot(run_dir)
        assert run_dir.name == RUN
        assert (run_dir / "artifacts" / "full" / "proof_bundle.json").is_file()
    assert not run_dir.exists()
    assert (here.run, here.status, here.pods) == (there.run, there.status, there.pods)
    assert [(s.name, s.status, s.ended) for s in here.stages] == [(s.name, s.status, s.ended) for s in there.stages]
    assert here.series.keys() == there.series.keys()
    assert [(line.ts, line.source) for line in here.log] == [(line.ts, line.source) for line in there.log]
    assert here.verdicts.keys() == there.verdicts.keys()


def test_nothing_of_the_operators_machine_is_in_it(packed: tuple[Package, Path]) -> None:
    text = (packed[0].artifacts / recording.NAME).read_text()
    assert str(packed[0].run_dir) not in text
    assert f"{Path.home()}/" not in text
    assert "/roots.jsonl" in text  # where the home folder is /root, this is none of its files
    assert "look at ./artifacts and ~" in text
    assert '"kind":"cursor"' not in text


def test_as_lines_without_a_screen(packed: tuple[Package, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with home(packed[0].run_dir.parent.parent):
        assert main(["replay", RUN, "--json"]) == 0
    own = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for place in (packed[1], packed[0].artifacts):
        assert main(["replay", str(place), "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(r["kind"], r["ts"]) for r in rows] == [(r["kind"], r["ts"]) for r in own if r["kind"] != "cursor"]


def test_a_screen_is_wanted_otherwise(packed: tuple[Package, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(packed[1])]) == 2
    assert f"uvcc replay {packed[1]} --json" in capsys.readouterr().err


async def test_the_console_plays_it(packed: tuple[Package, Path]) -> None:
    clock = [0.0]
    with recording.played(packed[1]) as run_dir:
        app = open_app(run_dir, readonly=True, replay=True, clock=lambda: clock[0], utc=True, tick_s=3600, budget_s=60)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.press(*["right_square_bracket"] * 21)
            assert app.snap.run == RUN
            assert app.snap.seq == snapshot(run_dir).seq
        app.source.close()


def test_what_looks_like_a_share_refuses_the_whole(made_package: Path, tmp_path: Path) -> None:
    package = copy_of(made_package, tmp_path / "home")
    journal = Journal(package.run_dir / JOURNAL)
    words = " ".join(f"0x{n * 0x9E3779B97F4A7C15 % 2**64:016x}" for n in range(1, 9))
    journal.append(ev.StageChanged(name="verify", status="ok", detail=words))
    journal.close()
    with pytest.raises(RedactionError, match=recording.NAME):
        recording.recording(RunRecord.load(package.run_dir))


@pytest.mark.parametrize("line", [b"[]", b'{"kind":3}', b"{", b"\xff", b'{"kind":"alert","kind":"stage"}'])
def test_a_recording_of_a_stranger(line: bytes, tmp_path: Path) -> None:
    """Refused, or shown as an event that is none; it never ends in a traceback."""
    (tmp_path / recording.NAME).write_bytes(line + b"\n")
    with pytest.raises(UnreadableError, match="line 1"), recording.played(tmp_path):
        pass
    (tmp_path / recording.NAME).write_bytes(b'{"kind":"alert","ts":"x","data":7}\n{"kind":"new","ts":1,"data":{}}\n')
    with recording.played(tmp_path) as run_dir:
        assert [e.kind for _, e in iter_events(run_dir / JOURNAL)] == [ev.LinesMalformed.kind]


def test_a_package_without_one_says_so(tmp_path: Path, packed: tuple[Package, Path]) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "old.zip", "w") as made:
        made.writestr("run/full/policy.json", b"{}")
    with pytest.raises(UnreadableError, match="holds no recording"), recording.played(tmp_path / "old.zip"):
        pass
