"""Figures: numbers from events that are checked one by one, files that open, nothing drawn without data."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report_run import RUN, START

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.report import metrics
from uvcc_console.report.figures import Figures, drawings, side_by_side, write_figures
from uvcc_console.report.logbundle import key_figures
from uvcc_console.report.record import RunRecord

pytest.importorskip("matplotlib")
STAGES, RANKS, REPLICAS, MICRO = 2, 2, 2, 3


def engine(name: str, at: float, level: str = "info", **fields: object) -> ev.EngineEvent:
    return ev.EngineEvent(ts=START + at, pod="p0r0", level=level, event=name, fields=fields, at=START + at)


@pytest.fixture(scope="module")
def parallel_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 workers with every event that the figures draw."""
    folder = tmp_path_factory.mktemp("parallel") / RUN
    folder.mkdir()
    found: list[ev.Event] = [
        ev.RunCreated(
            ts=START,
            run=RUN,
            profile_name="grid",
            job_kind="private",
            replicas=REPLICAS,
            pipeline_stages=STAGES,
            tensor=RANKS,
            stages=["full"],
        ),
        ev.PhaseStarted(ts=START, phase="full", engine_run=f"{RUN}.full", steps=1, sid_job="00" * 32),
    ]
    coords = [
        f"p{p}r{r}s{s}t{t}" for p in range(3) for r in range(REPLICAS) for s in range(STAGES) for t in range(RANKS)
    ]
    for i, coord in enumerate(coords):
        if coord != "p0r1s1t0":
            found.append(ev.WorkerProcess(ts=START + i, pod="p0r0", coord=coord, state="started", pid=1))
        for group, seconds in (("tp", 0.1), ("pp", 0.5), ("dp", 1.0)):
            found.append(engine("group_ready", i, coord=coord, group=group, seconds=seconds + i / 100))
        if coord != "p2r1s1t1":
            found.append(engine("dp_ready", i, coord=coord))
        found.append(engine("fwd_open_ok", i, coord=coord, count=MICRO))
        found.append(engine("bwd_open_ok", i, coord=coord, count=MICRO))
        found.append(ev.RootReported(ts=START + i, coord=coord, epoch=0, root="ab" * 32))
        found.append(ev.Metric(ts=START + i, coord=coord, step=1, values={"loss": 2.0, "toks_per_s": 100.0 + i}))
    for stage in range(STAGES):
        for m in range(MICRO):
            for phase, start in (("F", 10.0 + stage + m), ("B", 20.0 - stage + m)):
                at = {"step": 0, "microbatch": m, "phase": phase, "start": start, "end": start + 0.8}
                found.append(engine("pipeline_tick", 30, coord=f"p0r0s{stage}t0", **at))
    found.append(engine("peer_lost", 40, "error", group="pp", party=1))
    found.append(engine("protocol_error", 41, "error", party=1, what="x"))
    found.append(engine("watchdog_dump", 41, "warn", group="pp"))
    found.append(engine("protocol_error", 42, "warn", party=1, what="damaged frame", dropped=True))
    for at, retransmits in ((42, 3), (43, 5)):
        who = {"coord": "p0r0s0t0", "began": 1.5, "peer": 1}
        found.append(engine("plane_counters", at, **who, retransmits=retransmits, duplicates=2, rejected=1, stale=0))
    found.append(engine("plane_counters", 44, coord="p0r0s0t0", began=9.5, peer=1, retransmits=2))  # after a resume
    journal = Journal(folder / "journal.sqlite")
    journal.append(*found)
    journal.close()
    return folder


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as f:
        return list(csv.reader(f))


def test_numbers(parallel_run: Path) -> None:
    record = RunRecord.load(parallel_run)
    counted = metrics.counts(record)
    assert counted["epoch root"] == 24
    assert counted["dp ready"] == 23
    assert counted["fwd open ok"] == counted["bwd open ok"] == 24 * MICRO
    assert (counted["worker timeouts"], counted["transport aborts"]) == (1, 2)
    assert (counted["retransmits"], counted["duplicates discarded"], counted["frames rejected"]) == (7, 2, 1)
    assert dict(metrics.table(record))["pp initialisation min/p50/max"] == "0.500/0.615/0.730 s (n=24)"
    by_group = metrics.errors_by_group(record)
    assert by_group[("pp", "timeout")] == 1
    assert by_group[("plane", "abort")] == by_group[("pp", "abort")] == by_group[("plane", "rejected frame")] == 1
    assert by_group[("plane", "retransmit")] == 7
    ready, expected, p50 = metrics.dp_map(record)[(1, 1)]
    assert (ready, expected) == (6, 6)
    assert p50 == pytest.approx(1.13, abs=0.005)
    ticks = metrics.schedule(record)
    assert len(ticks) == 2 * STAGES * MICRO
    assert min(t.start for t in ticks) == 0.0
    assert ticks[0].end - ticks[0].start == pytest.approx(0.8)


@pytest.fixture(scope="module")
def drawn(parallel_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Figures, Path]:
    folder = tmp_path_factory.mktemp("drawn")
    return write_figures(parallel_run, folder), folder


def test_every_figure_is_written_thrice(drawn: tuple[Figures, Path]) -> None:
    done, folder = drawn
    names = {p.stem for p in done.written}
    wanted = {f"fig{i}" for i in (1, *range(3, 10))}
    assert {n.split("_")[0] for n in names if n.startswith("fig")} == wanted
    assert {"loss", "toks_per_s"} <= names
    assert done.skipped == {"samples_per_s": "no worker reported samples_per_s"}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{name}.svg").read_text()
        assert len(rows(folder / f"{name}.csv")) > 1
    grid = {row[0]: row[1:] for row in rows(folder / "fig1_topology.csv")}
    assert grid["coord"] == ["party", "replica", "stage", "tensor", "started", "groups_ready"]
    assert grid["p2r1s1t1"] == ["2", "1", "1", "1", "1", "tp pp dp"]
    assert grid["p0r1s1t0"] == ["0", "1", "1", "0", "0", "tp pp dp"]
    assert len(grid) == 25
    assert rows(folder / "fig3_init_cdf.csv")[-1] == ["dp", "1.23", "1.0"]
    assert ["fwd open ok", "72"] in rows(folder / "fig4_event_counts.csv")
    assert ["pp", "timeout", "1"] in rows(folder / "fig6_errors_by_group.csv")
    assert rows(folder / "fig7_dp_ready.csv")[0] == ["stage", "tensor", "ready", "expected"]


@pytest.mark.ci(__file__)
def test_drawing_again_gives_the_same_files(parallel_run: Path, drawn: tuple[Figures, Path], tmp_path: Path) -> None:
    write_figures(parallel_run, tmp_path)
    for path in drawn[1].iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_what_has_no_data_is_named_not_drawn(run_dir: Path) -> None:
    done = write_figures(run_dir)
    names = {p.stem for p in done.written}
    assert {"loss", "samples_per_s", "fig4_event_counts", "fig5_robustness"} <= names
    assert set(done.skipped) >= {"fig3_init_cdf", "fig7_dp_ready", "fig8_dp_init_p50", "fig9_schedule"}
    assert all(done.skipped.values())
    assert (run_dir / "artifacts/figs/loss.csv").is_file()


def test_each_phase_is_counted_and_drawn_by_itself(parallel_run: Path, tmp_path: Path) -> None:
    """A smoke on one replica before the full run: its groups, ticks and roots are not mixed into the full run's."""
    shutil.copytree(parallel_run, tmp_path / RUN)
    journal = tmp_path / RUN / "journal.sqlite"
    full = [e for _, e in iter_events(journal)]
    smoke = [ev.PhaseStarted(ts=START, phase="smoke", engine_run=f"{RUN}.smoke", steps=1, sid_job="11" * 32)]
    worker = {"pod": "p0r0", "coord": "p0r0s1t1", "state": "started"}
    smoke.append(ev.WorkerProcess(ts=START, **worker))  # type: ignore[arg-type]
    smoke.append(engine("group_ready", 0.0, coord="p0r0s0t0", group="dp", seconds=99.0))
    smoke.append(engine("pipeline_tick", 0.0, coord="p0r0s0t0", step=0, phase="F", microbatch=0, start=1.0, end=2.0))
    journal.unlink()
    made = Journal(journal, source="test")
    made.append(full[0], *smoke, *full[1:])
    made.close()
    record = RunRecord.load(tmp_path / RUN)
    size = record.during("smoke").size
    assert (size.replicas, size.stages, size.tensor) == (1, 2, 2)
    assert metrics.dp_map(record.during("smoke"))[(0, 0)] == (1, 3, 99.0)
    last = RunRecord.load(parallel_run)
    assert metrics.dp_map(record.during("full")) == metrics.dp_map(last)
    assert metrics.schedule(record.during("full")) == metrics.schedule(last)
    drawn = {d.name: d.rows for d in drawings(record)}
    assert max(row[1] for row in drawn["fig3_init_cdf"]) < 99.0
    assert {row[3] for row in drawn["fig7_dp_ready"]} == {3 * REPLICAS}
    text = "\n".join(key_figures(record))
    assert "- smoke: 1 replica x 2 stages x 2 tensor ranks" in text
    assert "| metric | whole run | smoke | full |" in text
    assert "| dp initialisation min/p50/max | 1.000/1.120/99.000 s (n=25) | 99.000/99.000/99.000 s (n=1) |" in text


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys; import uvcc_console.report.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_microbatches_on_their_way_together_are_drawn_side_by_side() -> None:
    assert side_by_side([(0, 3), (1, 4), (3, 5), (4, 6), (4.5, 7)]) == ([0, 1, 0, 1, 2], 3)
    assert side_by_side([(0, 1), (1, 2)]) == ([0, 0], 1)
    assert side_by_side([]) == ([], 1)
