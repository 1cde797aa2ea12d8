"""Nothing on the screen is false: not while it is behind, not when a process is gone, not in its advice."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_runs import recorded
from ui_desk import FakeProcesses, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.ui.drawing.frames import Frames
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.feed.source import BEHIND_S, JournalSource
from uvcc_console.ui.judging.condition import status_word
from uvcc_console.ui.judging.lamps import DEAD, FROZEN, START_LOOKS, STARTING, Lamp, Watchman
from uvcc_console.ui.judging.view import View, eta, fleet_rows
from uvcc_console.ui.panels import fleet, halt_panel
from uvcc_console.ui.registry.keys import ACTIONS, Context
from uvcc_console.ui.widgets import bars

STUCK = Lamp(FROZEN, "pid 4242 has not moved for 9 s: a signal stopped it")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def ticking(story: Story, seconds: float) -> Story:
    """The conductor goes on for so long, and no worker says anything."""
    for _ in range(int(seconds)):
        story.add(ev.CostTick(hourly=0, spent=0, forecast=0), 1.0)
    return story


def no_agent(story: Story, *pods: str, seconds: int = 10) -> Story:
    """The agents of these pods die, and the conductor goes on."""
    for pod in pods or ("p1r0",):
        story.add(ev.LinkChanged(pod=pod, path="ssh", up=False, detail="closed"))
        story.add(ev.LinkChanged(pod=pod, path="ssh", up=False, detail="no agent answers in /root/.uvcc"))
    return ticking(story, seconds)


def view_of(story: Story, after: float = 1.0, **options: object) -> View:
    return View(snap=fold(story.events), now=story.now + after, utc=True, **options)  # type: ignore[arg-type]


# ---- behind is said


@pytest.mark.ci(__file__)
async def test_a_fresh_attach_to_a_long_run_is_catching_up_and_never_shows_death(folder: Path) -> None:
    story = Story(replicas=8).full(200, seconds=1.0)
    async with desk(story, folder, budget_s=0.0, after=300.0) as d:
        seen = 0
        while d.app.source.behind and seen < 12:
            d.app.frames.paint_next()
            for _ in range(60):
                d.app.source.poll()
            d.app.tick()
            await d.pilot.pause()
            first = d.text.splitlines()[0]
            assert not re.search(r"\b(lost|silent|bad)\b", d.text), d.text
            if d.app.source.behind_s > 2:
                seen += 1
                assert "CATCHING UP, " in first
                assert " behind" in first
                assert "RUNNING" not in first
        assert seen > 10


def test_a_starved_console_of_24_pods_shows_nobody_lost_who_was_heard_within_five_seconds(tmp_path: Path) -> None:
    """A crowded machine, by counts: looks come seldom, and each folds only so many events. One worker does die."""
    story = Story(replicas=8).full(3, seconds=1.0)
    run_dir = story.write(tmp_path / "run")
    dead, born, written = story.coords[5], story.now, len(story.events)
    heard, spent, dice = dict.fromkeys(story.coords, born), itertools.count(), random.Random(7)
    source = JournalSource(run_dir / "journal.sqlite", clock=lambda: story.now, used=lambda: next(spent) / 1000)
    journal = Journal(run_dir / "journal.sqlite", source="test", clock=lambda: story.now)
    behind = lost = 0
    for _ in range(60):
        for _ in range(dice.choice((1, 1, 1, 2, 5))):
            story.now += 1.0
            for coord in (c for c in story.coords if c != dead or story.now < born + 60):
                record = {"step": int(story.now - born) + 3, "phase": "train"}
                story.add(ev.HeartbeatRead(pod=story.pod(coord), coord=coord, record=record))
                heard[coord] = story.now
        journal.append(*story.events[written:])
        written = len(story.events)
        source.budget_s = dice.choice((0.01, 0.04, 0.06, 0.4))
        source.poll()
        view = View(snap=source.snapshot, now=source.now(), utc=True, behind_s=source.behind_s, run_dir=str(run_dir))
        behind += source.behind_s > BEHIND_S
        for row in (found for found in fleet_rows(view) if found.coord):
            amiss = row.health.role in ("bad", "warn")
            assert not amiss or story.now - heard[row.coord] > 5.0, (row.coord, row.health.word)
            lost += amiss
    assert behind > 5
    assert lost > 5
    journal.close()
    source.close()


async def test_while_it_is_behind_it_paints_twice_a_second_at_most() -> None:
    now = [0.0]
    frames = Frames(lambda: now[0])
    painted = 0
    for _ in range(400):
        now[0] += 0.01
        frames.take([])
        painted += frames.due(behind=True)
    assert painted <= 9
    assert frames.due(behind=False)


def test_no_log_line_is_lost_between_two_pictures() -> None:
    now = [0.0]
    frames = Frames(lambda: now[0])
    lines = list(fold(Story().full(3).events).log)
    assert frames.due(behind=True)
    frames.take(lines[:5])
    assert not frames.due(behind=True)
    frames.take(lines[5:9])
    assert frames.give() == lines[:9]
    frames.take(None)
    frames.take(lines)
    assert frames.give() is None


def test_a_journal_that_takes_nothing_is_no_death_of_workers() -> None:
    view = view_of(Story(replicas=8).full(30), after=120.0)
    assert {row.health.word for row in fleet_rows(view)} == {"live"}
    word, role = status_word(view)
    assert "NO NEWS" in word
    assert role == "amber"
    assert ("24/24 live", "muted") in bars.header_line(view, 160)


@pytest.mark.parametrize("width", [80, 160])
def test_nothing_is_green_once_nothing_came_for_longer_than_a_conductor_takes(width: int) -> None:
    """Long before that is loud: who was well when last heard of may not be so any more."""
    story = Story(replicas=2).full(30)
    for after, green in ((5.0, True), (7.0, False)):
        view = view_of(story, after)
        shown = [bars.header_line(view, width), bars.track_line(view, width)]
        shown += fleet.fleet_lines(view, fleet.FleetState(), width)[1:]
        greens = [text for line in shown for text, role in line if role.startswith("ok")]
        lamps_and_stages = [text for text in greens if "live" in text or "RUNNING" in text or "6/6" in text]
        assert bool(lamps_and_stages) == green
        assert not [t for line in shown for t, role in line if role in ("bad", "alarm") and t != " FULL "]
    assert "RUNNING" in head(view, width)
    assert ("6/6 live", "muted") in bars.header_line(view, width)


def test_workers_that_are_silent_while_the_conductor_goes_on_are_shown_so() -> None:
    view = view_of(ticking(Story().full(30), 70))
    assert {row.health.word for row in fleet_rows(view)} == {"lost"}


def test_a_conductor_that_starts_gets_its_time_in_looks_without_progress_not_in_seconds() -> None:
    watch = Watchman()
    for seq in range(200):  # the journal grows: it is at work, however long it takes
        assert watch.look(Lamp(STARTING), seq).state == STARTING
    for _ in range(START_LOOKS - 1):
        assert watch.look(Lamp(STARTING), 199).state == STARTING
    assert watch.look(Lamp(STARTING), 199).state == DEAD
    assert watch.look(Lamp(STARTING), 199, behind=True).state == STARTING
    assert watch.look(Lamp(DEAD), 200).state == DEAD


async def test_a_conductor_that_has_just_died_is_said_at_the_next_look(folder: Path) -> None:
    processes = FakeProcesses()
    async with desk(Story().full(5), folder, processes=processes) as d:
        processes.living.clear()
        d.app.check_processes()
        d.app.tick()
        await d.settle()
        assert "UNCONDUCTED" in d.text.splitlines()[0]


# ---- the first line


def head(view: View, width: int = 160) -> str:
    return plain(bars.header_line(view, width))


def spans(view: View, width: int = 160) -> dict[str, str]:
    return {text.strip(): role for text, role in bars.header_line(view, width)}


def test_a_narrow_first_line_says_who_operates_the_run() -> None:
    alone = view_of(Story(replicas=1).full(30))
    apart = replace(alone, snap=replace(alone.snap, apart=True))
    for width in (78, 80):  # a pane that is half of 160 is a little narrower than half
        assert "1 operator" in head(alone, width)
        assert "1 domain of 3" in head(apart, width)
    assert "operator" not in head(apart, 80)


def test_the_first_line_says_what_the_run_proves_and_nothing_where_it_proves_nothing() -> None:
    view = view_of(Story(replicas=1).full(30))
    for mode, said in (
        ("proofs", "every message proved"),
        ("covert", "1 step in 10 audited"),
        ("products", "products proved"),
        ("off", ""),
    ):
        profile = {**view.snap.profile, "job": {**view.snap.profile["job"], "verify": mode}}
        shown = head(replace(view, snap=replace(view.snap, profile=profile)))
        assert said in shown
        assert ("proved" in shown) == (mode in ("products", "proofs"))


def test_the_first_line_counts_who_lives_and_is_green_only_if_all_do() -> None:
    well = view_of(Story(replicas=8).full(30))
    assert spans(well)["24/24 live"] == "ok"
    assert spans(well)["● RUNNING"] == "ok bold"
    workers = dict(well.snap.workers)
    for coord in list(workers)[:3]:
        workers[coord] = dataclasses.replace(workers[coord], beat_ts=well.now - 20)
    ill = dataclasses.replace(well, snap=dataclasses.replace(well.snap, workers=workers))
    assert spans(ill)["21/24 live"] == "warn"
    assert spans(ill)["3 silent"] == "bad"
    assert not any(role.startswith("ok") for role in spans(ill).values())


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_health_is_in_the_first_line_at_every_width(width: int) -> None:
    for story, words in (
        (Story(replicas=8, price=2.4).full(30), "24/24 live"),
        (Story().halted(), "halted 3/3"),
        (Story().halted(unknown=1), "1 unknown"),
        (ticking(Story(replicas=8).full(30), 40), "24 silent"),
    ):
        assert words in head(view_of(story), width)


def test_the_badge_says_which_stage_it_is_before_there_is_a_phase() -> None:
    for story, badge in (
        (Story().planned(), "QUOTE"),
        (Story().provisioning(), "PROVISION"),
        (Story().full(30), "FULL"),
    ):
        assert head(view_of(story), 60).startswith(f" {badge} ")


def test_no_step_no_promise() -> None:
    view = view_of(ticking(Story().full(168), 46))
    assert "eta" not in head(view)
    assert spans(view)["168"] == "faint"
    assert "RUNNING" in head(view)
    assert "● RUNNING" not in head(view)
    story = Story().full(168)
    for _ in range(46):  # they live, and make no step
        for coord in story.coords:
            record = {"rank": 0, "step": 168, "phase": "train", "waiting_on": "p2"}
            story.add(ev.HeartbeatRead(pod=story.pod(coord), coord=coord, record=record), 0.34)
    waiting = view_of(story)
    assert "no step for 48 s" in head(waiting)
    assert "eta" not in head(waiting)
    assert "● RUNNING" not in head(waiting)


# ---- what next

STORIES = {
    "running": lambda: Story().full(30),
    "no_news": lambda: Story().full(30),
    "silent": lambda: ticking(Story().full(30), 46),
    "held": lambda: Story().full(30).halt("hold", step=30),
    "halting": lambda: Story().full(30).halt("hold", acks=False),
    "halted": lambda: Story().full(40).halt(step=40),
    "waiting": lambda: Story().halted(),
    "unknown": lambda: Story().full(40).halt(step=40, unknown=1),
    "unknown, waiting": lambda: Story().halted(unknown=1),
    "agent dead": lambda: no_agent(Story().full(30)),
    "agent dead, failed": lambda: no_agent(Story().gave_up()),
    "fork": lambda: Story().fork(),
    "failed": lambda: Story().failed(),
    "gave up": lambda: Story().gave_up(),
    "finished": lambda: Story(steps=30).finished(),
}
LAMPS = {"moving": Lamp(), "starting": Lamp(STARTING), "frozen": STUCK, "dead": Lamp(DEAD)}
SAYS = {
    "resume": r"\br (resumes|takes it up)|\br takes",
    "retry": r"\bR retries",
    "skip": r"\bx skips",
    "teardown": r"\bt tears",
    "halt": r"F9 (asks|starts|halts)",
    "replace": r"\bP replaces",
}


@pytest.mark.parametrize("behind_s", [0.0, 200.0], ids=["present", "behind"])
@pytest.mark.parametrize("sidecar", ["moving", "dead"])
@pytest.mark.parametrize("conductor", LAMPS)
@pytest.mark.parametrize("name", STORIES)
def test_whatever_is_advised_is_possible(name: str, conductor: str, sidecar: str, behind_s: float) -> None:
    after = 40.0 if name == "no_news" else 1.0
    options = {"conductor": LAMPS[conductor], "sidecar": LAMPS[sidecar], "behind_s": behind_s}
    view = view_of(STORIES[name](), after, **options)
    context = Context(view.snap, conductor=view.conductor, behind_s=behind_s)
    lines = [*bars.banner_lines(view, 160), *(halt_panel.halt_lines(view, 160) if halt_panel.shown(view) else [])]
    text = "\n".join(plain(line) for line in lines)
    for action, pattern in SAYS.items():
        if re.search(pattern, text):
            assert ACTIONS[action].reason(context) == "", text
    why = ACTIONS["resume"].reason(context)
    assert not re.search(r"the run is (\w+), not \1", why)
    header = bars.header_line(view, 160)
    if behind_s or conductor in ("frozen", "dead") or name in ("silent", "no_news"):
        assert not any(role == "ok bold" for _, role in header), header


@pytest.mark.parametrize("name", ["unknown", "unknown, waiting"])
@pytest.mark.parametrize("conductor", LAMPS)
def test_a_pod_that_proved_nothing_is_loud_whatever_else_is_wrong(name: str, conductor: str) -> None:
    view = view_of(STORIES[name](), conductor=LAMPS[conductor])
    text = " ".join(plain(line) for line in bars.banner_lines(view, 160))
    assert "1 of 3 pods proved nothing of the halt   F9 asks again" in text


def test_a_halted_run_with_an_unknown_pod_says_what_to_do_and_r_says_why_not() -> None:
    view = view_of(STORIES["unknown"]())
    text = "\n".join(plain(line) for line in [*bars.banner_lines(view, 160), *halt_panel.halt_lines(view, 160)])
    assert "F9 asks again" in text
    assert "r resumes" not in text
    assert "not proved that they stopped" in ACTIONS["resume"].reason(Context(view.snap))


@pytest.mark.parametrize("width", [80, 160])
def test_a_dead_sidecar_and_a_frozen_conductor_are_loud_with_what_follows(width: int) -> None:
    dead = view_of(Story().full(30), sidecar=Lamp(DEAD))
    text = " ".join(plain(line) for line in bars.banner_lines(dead, width))
    assert "THE HALT SIDECAR IS DEAD" in text
    assert "the conductor starts another" in text
    frozen = view_of(Story().full(30), conductor=STUCK)
    text = " ".join(plain(line) for line in bars.banner_lines(frozen, width))
    assert "4242" in text
    assert "kill -CONT" in text
    assert status_word(frozen)[1] == "alarm"


@pytest.mark.parametrize("width", [80, 160])
def test_a_full_disk_here_is_loud_though_no_journal_can_tell_of_it(width: int) -> None:
    view = view_of(Story().full(30), conductor=Lamp(words="the disk of /h/r is full (0.0 MiB free)"))
    text = " ".join(plain(line) for line in bars.banner_lines(view, width))
    assert "the disk of /h/r is full" in text
    assert "make room there" in text
    assert "full" not in " ".join(plain(line) for line in bars.banner_lines(view_of(Story().full(30)), width))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_dead_agent_is_loud_with_whether_a_halt_comes_through_and_what_to_do(width: int) -> None:
    def loud(view: View) -> str:
        return " ".join(plain(line).strip() for line in bars.banner_lines(view, width))

    story = no_agent(Story().full(30))
    view = view_of(story)
    assert re.search(r"p1r0 IS OUT OF REACH for 1\d s: no agent answers in", loud(view))
    assert "F9 halts it by relay; P replaces it" in loud(view)
    assert status_word(view)[1] in ("amber", "alarm")
    assert not any(role.startswith("ok") for role in spans(view).values())
    story.add(ev.LinkChanged(pod="p1r0", path="relay", up=False))
    assert "no halt comes to it now" in loud(view_of(story))
    both = loud(view_of(no_agent(story, "p0r0")))
    assert re.search(r"2 PODS ARE OUT OF REACH, p1r0 for \d+ s", both)
    assert "P replaces a pod" in both
    waits = view_of(no_agent(Story().failed()))
    assert "r resumes once p1r0 answers again, P replaces a pod, t tears down" in loud(waits)
    for quiet in (replace(view, behind_s=9.0), replace(view, conductor=Lamp(DEAD)), replace(view, replay="x1")):
        assert "OUT OF REACH" not in loud(quiet), "nobody can know, or nobody dials"
    story.add(ev.LinkChanged(pod="p0r0", path="ssh", up=True))
    story.add(ev.LinkChanged(pod="p1r0", path="ssh", up=True))
    assert "OUT OF REACH" not in loud(view_of(story))


# ---- lamps


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lamps_for_conductor_sidecar_and_each_path_of_a_halt(width: int) -> None:
    story = Story().full(30)
    well = plain(bars.track_line(view_of(story), width))
    assert "full" in well
    for word in ("cond", "ssh", "relay", "lease"):
        assert word in well
    story.add(ev.LinkChanged(pod="p1r0", path="relay", up=False))
    ill = view_of(story, sidecar=Lamp(DEAD))
    found = bars.track_line(ill, width)
    text = plain(found)
    assert "2/3" in text
    assert "✗ dead" in text
    assert [role for part, role in found if "2/3" in part] == ["warn"]


# ---- the cause first


@pytest.mark.parametrize("width", [80, 160])
def test_the_killed_worker_leads_and_its_peers_say_because_of_whom(width: int) -> None:
    story = Story(replicas=2).full(30)
    order = ["p0r0s0t0", "p1r0s0t0", "p2r1s0t0", "p0r1s0t0", "p1r1s0t0"]
    story.add(ev.WorkerProcess(pod="p2r0", coord="p2r0s0t0", state="exited", signal="SIGKILL"), 0.4)
    for i, coord in enumerate(order):  # one of them is put to an end by its agent
        ended = {"signal": "SIGTERM"} if i == 3 else {"rc": 4}
        story.add(ev.WorkerProcess(pod=coord[:4], coord=coord, state="exited", **ended), 1.0)
    view = view_of(story)
    rows = fleet.visible_rows(view, fleet.FleetState())
    assert (rows[0].coord, rows[0].health.word) == ("p2r0s0t0", "SIGKILL")
    words = [row.health.word for row in rows[1:]]
    assert words.count("stopped because of p2r0") == 4
    lines = [plain(line) for line in fleet.fleet_lines(view, fleet.FleetState(), width)]
    assert "SIGKILL" in lines[1]
    assert sum("due to p2r0" in line for line in lines) == 4


# ---- one number


def test_every_surface_counts_steps_alike(tmp_path: Path) -> None:
    from uvcc_console.cli.follow.headless import ProgressLine
    from uvcc_console.cli.view import status

    story = Story().full(40)
    s = fold(story.events)
    assert "step 40/200" in head(view_of(story))
    assert "step 40 of 200" in status.text(s, tmp_path, story.now)
    assert "step 40/200" in ProgressLine().line(s)


@pytest.mark.parametrize(("patience", "early"), [(2, True), (0, False)])
def test_a_training_that_its_validation_ended_is_not_left_looking_unfinished(
    tmp_path: Path, patience: int, early: bool
) -> None:
    """A served model ends before its last step, too, and nothing of validation is said of it."""
    from uvcc_console.cli.view import status

    story = Story().full(40)
    first = next(i for i, e in enumerate(story.events) if isinstance(e, ev.RunCreated))
    told = dict(story.events[first].profile)
    told["job"] = {**told.get("job", {}), "patience": patience}
    events = [replace(e, profile=told) if i == first else e for i, e in enumerate(story.events)]
    s = fold(events)
    assert "ended early" not in status.text(s, tmp_path, story.now)  # its workers still train
    done = replace(s, workers={coord: replace(w, phase="done") for coord, w in s.workers.items()})
    assert ("ended early by its validation" in status.text(done, tmp_path, story.now)) == early


def test_how_long_it_takes_is_told_after_a_resume_too_and_the_pause_before_is_no_slow_step() -> None:
    """A language model says no samples a second: its pace is that of the console's own clock."""
    run = recorded("lm")
    events = list(run.events[: run.moments["resumed"]])
    s = fold(events)
    assert s.attempt > 0
    left = eta(s, s.updated)
    assert left is not None
    line = next(by["at"] for by in s.series.values() if "at" in by)
    times, steps = line.ys(), line.xs()
    whole = (times[-1] - times[0]) / (steps[-1] - steps[0])
    assert 0 < left / (s.steps_planned - s.step) < whole, "the time that it stood still does not count"
    assert "eta" in head(View(snap=s, now=s.updated))


def test_no_alarm_is_raised_by_silence_while_machines_are_waited_for() -> None:
    story = Story().planned()
    story.add(ev.StageChanged(name="provision", status="running", detail="waits for stock"))
    waits = view_of(story, after=600.0)
    assert "NO NEWS" not in status_word(waits)[0]
    assert "UNCONDUCTED" in status_word(replace(waits, conductor=Lamp(DEAD)))[0]  # its end is told all the same
    story.add(story.pod_event(story.coords[0], "creating"))
    assert "NO NEWS" in status_word(view_of(story, after=600.0))[0]
