"""A kept snapshot is a shortcut, never another truth."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_console.cli.follow import jsonview
from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.core.folding.bulk_folding import Folding
from uvcc_console.core.journal import journal as journals
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.journal.journal import Journal, read_all, read_newest, read_summary
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.haltd import halt_snapshot as glances
from uvcc_console.plan import profile

COORDS = [f"p{p}r0s0t0" for p in range(3)]


def filled(path: Path, steps: int) -> Journal:
    """A run with everything that a snapshot holds: workers, curves, roots, a halt, a verdict, a forecast."""
    journal = Journal(path, source="test")
    made = ev.RunCreated(
        run="r",
        profile_name="demo",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=["plan", "full"],
        profile={"job": {"steps": steps, "reveal": ["loss"]}},
    )
    journal.append(made, ev.StageChanged(name="full", status="running"))
    for p, coord in enumerate(COORDS):
        journal.append(ev.PodChanged(pod=coord[:4], party=p, replica=0, provider="local", state="agent"))
        journal.append(ev.LinkChanged(pod=coord[:4], path="ssh", up=True))
    journal.append(ev.PhaseStarted(phase="full", engine_run="r.full", steps=steps, sid_job="ab" * 32))
    for step in range(steps):
        batch: list[ev.Event] = []
        for coord in COORDS:
            batch.append(ev.HeartbeatRead(pod=coord[:4], coord=coord, record={"step": step, "phase": "train"}))
            batch.append(ev.Metric(coord=coord, step=step, values={"loss": 2.0 - step / steps}))
            batch.append(ev.RootReported(coord=coord, epoch=step, root=f"{step:064x}", pairs={COORDS[0]: "aa"}))
        journal.append(*batch)
    journal.append(
        ev.HaltRequested(nonce="n", mode="hold", by="t"),
        ev.HaltAck(pod="p0r0", nonce="n", stage="held", step=3),
        ev.Forecast(steps=9, seconds=1.0, seconds_error=0.5),
        ev.FlightRead(folder="f", newest={"p0r0s0t0": "all_reduce"}, findings=["x"]),
        ev.PhaseVerdict(phase="full", ok=True, global_root="cd" * 32, sid_job="ab" * 32),
        ev.Alert(level="warn", name="a", text="odd"),
    )
    return journal


def test_a_kept_snapshot_is_the_folded_one(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite", 50)
    folded = read_all(journal)
    snapshot_cache.keep(tmp_path, folded, journal.mark(folded.seq))
    assert snapshot_cache.load(tmp_path, journal.mark) == folded
    journal.append(ev.StageChanged(name="full", status="ok"))
    assert read_newest(journal) == read_all(journal)


def test_a_conductor_can_take_up_a_run_from_what_was_kept(tmp_path: Path) -> None:
    _, found = profile.load("demo")
    made = {"profile_name": "demo", "job_kind": "private", "replicas": 1, "pipeline_stages": 1, "tensor": 1}
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    journal.append(ev.RunCreated(run="r", stages=["plan"], profile=found.model_dump(mode="json"), **made))
    folded = read_all(journal)
    snapshot_cache.keep(tmp_path, folded, journal.mark(folded.seq))
    kept = snapshot_cache.load(tmp_path, journal.mark)
    assert kept is not None
    assert profile.parse(kept.profile) == profile.parse(folded.profile) == found


def test_a_long_journal_is_folded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEEP_AFTER", 100)
    journal = filled(tmp_path / "journal.sqlite", 50)
    first = read_newest(journal)
    read: list[int] = []
    since = Journal.since
    monkeypatch.setattr(Journal, "since", lambda self, seq, *a, **k: read.append(seq) or since(self, seq, *a, **k))
    assert read_newest(journal) == first
    assert read == [first.seq]


def test_long_curves_are_thinned_but_keep_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_cache, "POINTS", 3 * snapshot_cache.LEAST_POINTS)
    journal = filled(tmp_path / "journal.sqlite", 500)
    folded = read_all(journal)
    snapshot_cache.keep(tmp_path, folded, journal.mark(folded.seq))
    found = snapshot_cache.load(tmp_path, journal.mark)
    assert found is not None
    for coord in COORDS:
        thin, whole = found.series[coord]["loss"], folded.series[coord]["loss"]
        assert len(thin) <= snapshot_cache.LEAST_POINTS + 1
        assert (thin.ys()[0], thin.last) == (whole.ys()[0], whole.last)
    assert len(found.workers) == 3


def test_what_does_not_fit_is_not_used(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite", 20)
    folded = read_all(journal)
    snapshot_cache.keep(tmp_path, folded, journal.mark(folded.seq))
    good = (tmp_path / snapshot_cache.NAME).read_bytes()
    body = json.loads(good)
    for change in (
        {"version": "another"},
        {"seq": folded.seq + 1},
        {"seq": 0},
        {"seq": "x"},
        {"mark": ""},
        {"snapshot": {"~": "Path", "x": 1}},
        {"snapshot": {"~": "Snapshot", "colour": 1}},
        {"snapshot": []},
        {"snapshot": {"~": "series", "x": "!", "y": ""}},
    ):
        (tmp_path / snapshot_cache.NAME).write_text(json.dumps({**body, **change}))
        assert snapshot_cache.load(tmp_path, journal.mark) is None
        assert read_newest(journal) == folded
    for junk in (b"", b"[]", b"\xff\xfe", b"[" * 100_000, good[:-10]):
        (tmp_path / snapshot_cache.NAME).write_bytes(junk)
        assert read_newest(journal) == folded


def test_another_journal_is_not_taken_for_the_one_that_was_folded(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite", 20)
    folded = read_all(journal)
    snapshot_cache.keep(tmp_path, folded, journal.mark(folded.seq))
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    db.execute("UPDATE events SET ts = ts + 1 WHERE seq = 1")
    db.commit()
    db.close()
    assert snapshot_cache.load(tmp_path, journal.mark) is None


def test_a_folder_that_may_not_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEEP_AFTER", 10)
    journal = filled(tmp_path / "journal.sqlite", 5)
    (tmp_path / snapshot_cache.NAME).mkdir()  # it can be neither read nor replaced
    assert isinstance(read_newest(journal), Snapshot)
    assert not list(tmp_path.glob(f".{snapshot_cache.NAME}.*"))


SUMMED = (
    "run",
    "status",
    "profile",
    "phase",
    "step",
    "steps_planned",
    "created",
    "ended",
    "verdicts",
    "results",
    "leaks",
)


def test_a_summary_says_of_a_run_what_the_whole_says(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal.sqlite", 50)
    whole = read_all(journal)
    assert jsonview.summary(read_summary(journal), tmp_path) == jsonview.summary(whole, tmp_path)
    assert (tmp_path / snapshot_cache.SUMMARY).stat().st_size < 20_000
    journal.append(
        ev.HeartbeatRead(pod="p0r0", coord=COORDS[0], record={"step": 48, "phase": "train"}),
        ev.Metric(coord=COORDS[0], step=60, values={"loss": 0.25}),
        ev.RunEnded(status="ok", leaks=["x"]),
    )
    whole, found = read_all(journal), read_summary(journal)
    assert jsonview.summary(found, tmp_path) == jsonview.summary(whole, tmp_path)
    assert [getattr(found, name) for name in SUMMED] == [getattr(whole, name) for name in SUMMED]
    assert {p: v.host_key for p, v in found.pods.items()} == {p: v.host_key for p, v in whole.pods.items()}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequence number of every event that is folded from now on."""
    folded: list[int] = []
    add = Folding.add
    monkeypatch.setattr(Folding, "add", lambda self, e, seq: folded.append(seq) or add(self, e, seq))
    return folded


def test_a_summary_that_is_damaged_or_far_behind_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "KEEP_AFTER", 100)
    journal = filled(tmp_path / "journal.sqlite", 50)
    good = read_summary(journal)
    for spoil in (lambda p: p.write_bytes(b"{"), lambda p: p.unlink(), lambda p: p.write_text(json.dumps({"seq": 3}))):
        spoil(tmp_path / snapshot_cache.SUMMARY)
        folded = counted(monkeypatch)
        assert jsonview.summary(read_summary(journal), tmp_path) == jsonview.summary(good, tmp_path)
        assert folded == []  # the snapshot is whole
        assert snapshot_cache.load(tmp_path, journal.mark, snapshot_cache.SUMMARY) is not None
    behind = snapshot_cache.load(tmp_path, journal.mark, snapshot_cache.SUMMARY)
    for step in range(150):
        journal.append(ev.Metric(coord=COORDS[0], step=100 + step, values={"loss": 0.1}))
    assert read_summary(journal).seq == good.seq + 150
    found = snapshot_cache.load(tmp_path, journal.mark, snapshot_cache.SUMMARY)
    assert behind is not None
    assert found is not None
    assert found.seq == good.seq + 150


BEATS = 100_000


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred thousand events, of which a conductor left snapshot and summary a thousand events ago."""
    from uvcc_console.bench import longrun

    home = tmp_path_factory.mktemp("long")
    longrun.build(home / "runs" / "long", BEATS, behind=1_000)
    return home


@pytest.mark.parametrize(
    ("words", "folded_at_most"),
    [(["status", "long", "--json"], 1_000), (["runs", "--json"], 1_000), (["pods", "--json"], 1_000)],
    ids=["status", "runs", "pods"],
)
def test_a_reader_folds_what_came_after_and_no_more(
    long_run: Path,
    words: list[str],
    folded_at_most: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(long_run))
    folded = counted(monkeypatch)
    main([*words])
    assert "long" in capsys.readouterr().out or words[0] == "pods"
    assert len(folded) <= folded_at_most * (2 if words[0] == "pods" else 1)


def test_what_a_halt_reads_does_not_grow_with_the_run(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[int] = []
    fold = glances.reduce
    monkeypatch.setattr(glances, "reduce", lambda s, e, seq: folded.append(seq) or fold(s, e, seq))
    s = glances.halt_snapshot(long_run / "runs" / "long")
    assert len(s.pods) == 24
    assert not s.ended
    assert len(folded) < 200


@pytest.mark.parametrize("verb", ["runs", "status"])
def test_a_glance_at_runs_loads_nothing_heavy(long_run: Path, verb: str) -> None:
    code = (
        "import sys; from uvcc_console.cli.main import main; main([sys.argv[1]]);"
        "heavy = {'cryptography', 'asyncio', 'asyncssh', 'pydantic', 'textual'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    env = {**os.environ, "UVCC_HOME": str(long_run)}
    done = subprocess.run([sys.executable, "-c", code, verb], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
