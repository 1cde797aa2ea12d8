"""Pages of single panels: fleet as a board, charts up close, ledger, rollout, plane, cost, the replay's time line."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from ui_desk import desk
from ui_journals import RUN, Story, digest

from uvcc_console.core import events as ev
from uvcc_console.core.answers.shown import contradictions
from uvcc_console.core.answers.shown import shown as result_of
from uvcc_console.core.folding.state import fold, reduce
from uvcc_console.core.series import Series
from uvcc_console.runs.notices import Note
from uvcc_console.runs.notify import state_note
from uvcc_console.ui.drawing.glyphs import ASCII, UNICODE
from uvcc_console.ui.drawing.paint import plain, width_of
from uvcc_console.ui.feed import home_model
from uvcc_console.ui.feed.tape import Tape
from uvcc_console.ui.judging import rechecks
from uvcc_console.ui.judging.condition import status_word
from uvcc_console.ui.judging.view import View, fleet_rows
from uvcc_console.ui.panels import board, cost, fleet_grid, home, ledger, plane, result, rollout, worker_detail
from uvcc_console.ui.panels.charts import ChartsPanel
from uvcc_console.ui.panels.fleet import FleetPanel, FleetState, fleet_lines, labels
from uvcc_console.ui.widgets import curves, scrub

NO_FILES = rechecks.Rechecks(Path("nowhere"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def view_of(story: Story, after: float = 1.0) -> View:
    return View(snap=fold(story.events), now=story.now + after, utc=True)


def text_of(lines: list) -> str:
    return "\n".join(plain(line) for line in lines)


@pytest.mark.parametrize("width", [40, 78, 120, 156])
@pytest.mark.parametrize(
    "story", [Story().provisioning(), Story(replicas=4).full(12), Story().fork()], ids=["early", "full", "fork"]
)
def test_no_page_is_wider_than_asked(story: Story, width: int) -> None:
    view = view_of(story)
    rows = fleet_rows(view)
    drawn = [*fleet_grid.grid_lines(view, rows, width), *ledger.board_lines(view, width)]
    drawn += [*rollout.page_lines(view, width), *cost.page_lines(view, width), *plane.wait_lines(view, width)]
    drawn += [*plane.path_lines(view, width), *worker_detail.detail_lines(view, rows[0], width)]
    drawn.append(scrub.scrub_line(Tape(0, 60, 20, 2, True, ((10, "warn"), (59, "bad"))), view, width))
    assert max(width_of(line) for line in drawn) <= width


# ---- fleet


def test_the_board_has_a_column_per_party_and_a_row_per_replica() -> None:
    view = view_of(Story(replicas=3).full(4))
    lines = fleet_grid.grid_lines(view, fleet_rows(view), 120)
    rows = [plain(line) for line in lines if plain(line).startswith("r0")]
    assert len(rows) == 3
    assert all(row.count("●") == 3 for row in rows)


def test_the_boards_summary_counts_the_worst_first() -> None:
    view = view_of(Story(replicas=3).full(4))
    workers = dict(view.snap.workers)
    workers["p1r2s0t0"] = dataclasses.replace(workers["p1r2s0t0"], beat_ts=view.now - 30)
    view = dataclasses.replace(view, snap=dataclasses.replace(view.snap, workers=workers))
    lines = fleet_grid.summary_lines(view, fleet_rows(view), 120)
    assert plain(lines[1]).startswith("P1  ○ 1 silent p1r2s0t0  ● 2 live")


def test_the_cursor_walks_the_board_and_stops_at_its_border() -> None:
    rows = fleet_rows(view_of(Story(replicas=2).full(2)))
    assert fleet_grid.neighbour(rows, "p0r0s0t0", 1, 0) == "p1r0s0t0"
    assert fleet_grid.neighbour(rows, "p0r0s0t0", 0, 1) == "p0r1s0t0"
    assert fleet_grid.neighbour(rows, "p2r1s0t0", 1, 1) == "p2r1s0t0"
    assert fleet_grid.neighbour(rows, "", 0, 0) == "p0r0s0t0"


async def test_a_large_fleet_opens_as_a_board_and_v_turns_it_to_a_table(folder: Path) -> None:
    async with desk(Story(replicas=8).full(3), folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        await d.press("1")
        assert fleet.board
        await d.press("right", "down")
        assert fleet.state.cursor == "p1r1s0t0"
        assert "heartbeat" in d.text, "the worker under the cursor is described"
        await d.press("v")
        assert not fleet.board
        assert "worst first" in d.text


async def test_letters_jump_to_a_worker(folder: Path) -> None:
    async with desk(Story(replicas=2).full(3), folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        await d.press("f")
        target = [name for name, label in fleet.jump.items() if label == "d"]
        await d.press("d")
        assert [fleet.state.cursor] == target
        assert not fleet.jump
        await d.press("f", "escape")
        assert not fleet.jump
        assert not d.asked(ev.HaltRequested)[2:]


def test_labels_are_unique_and_as_short_as_possible() -> None:
    assert len(set(labels(24))) == 24
    assert {len(x) for x in labels(24)} == {1}
    assert len(set(labels(96))) == 96


def test_the_detail_of_a_worker_names_pod_paths_and_figures() -> None:
    view = view_of(Story(price=2.4, provider="prime").full(5))
    text = text_of(worker_detail.detail_lines(view, fleet_rows(view)[1], 150))
    for part in ("p1r0s0t0 on p1r0", "agent on prime", "$2.40/h", "path relay", "memory, MiB", "samples/s"):
        assert part in text


# ---- charts


def test_from_five_replicas_on_the_band_leaves_the_extremes_out() -> None:
    lines = [Series() for _ in range(8)]
    for i in range(8):
        for x in range(4):
            lines[i] = lines[i].append(x, 100.0 if i == 7 else float(i))
    mean, band = curves.mean_and_band(lines)
    assert band is not None
    assert max(band.high) == 6.0
    assert mean.last == (3.0, (sum(range(7)) + 100) / 8)


def test_replicas_that_lag_count_only_where_all_have_a_value() -> None:
    a, b = Series(), Series()
    for x in range(6):
        a = a.append(x, 1.0)
    for x in (0, 2, 4):
        b = b.append(x, 3.0)
    mean, _ = curves.mean_and_band([a, b])
    assert list(mean) == [(0.0, 2.0), (2.0, 2.0), (4.0, 2.0)]


async def test_zoom_follows_the_newest_steps_until_a_crosshair_or_a_pan_fixes_it(folder: Path) -> None:
    async with desk(Story().full(80), folder) as d:
        panel = d.app.main.query_one(ChartsPanel)
        panel.focus()
        await d.press("plus", "plus")
        assert panel.frame().x1 == 80
        await d.press("shift+left")
        assert panel.centre is not None
        assert panel.frame().x1 < 80
        await d.press("backspace")
        assert (panel.window, panel.cursor) == (1.0, None)
        await d.press("home", "home")
        assert panel.cursor == 1
        assert "step 1" in d.text


# ---- ledger


def test_the_board_marks_the_forked_epoch() -> None:
    view = view_of(Story().fork())
    history = plain(ledger.history_line(view, 100))
    assert history.count("═") == 40
    assert history.count("≠") == 1
    board = text_of(ledger.board_lines(view, 150))
    assert "FORK at epoch 41" in board
    assert board.count("· 41") == 3


def test_ledger_and_board_say_whose_lie_a_failed_proof_was() -> None:
    story = Story(steps=4)
    for pod, names in (("p0r0", ["P1"]), ("p1r0", ["P0"]), ("p2r0", ["P0", "P1"])):
        fields = {"step": 3, "suspects": names, "named": "", "open_to": ["P0", "P1"], "pair": ["P0", "P1"]}
        story.add(ev.EngineEvent(pod=pod, level="error", event="proof_failed", fields=fields))
    view = view_of(story)
    for lines in (ledger.ledger_lines(view, 150), ledger.board_lines(view, 150)):
        assert "a proof of step 3 failed, and nothing of it was revealed: P0 or P1 lied, and P2 did not" in text_of(
            lines
        )
    assert "a proof failed at step 3: P0 or P1 lied; nothing of the step was revealed" in view.snap.log[-1].text


def test_the_board_shows_result_hash_and_sessions() -> None:
    board = text_of(ledger.board_lines(view_of(Story(steps=4).finished()), 150))
    assert digest("result") in board
    assert "✓ verified, 3 workers" in board
    assert digest("sid", "full") in board
    assert "✓ full VERIFIED" in board


@pytest.mark.parametrize("width", [40, 58, 78, 118])
def test_no_identifier_of_the_board_is_cut(width: int) -> None:
    view = view_of(Story(steps=4).finished())
    lines = ledger.board_lines(view, width)
    assert max(width_of(line) for line in lines) <= width
    whole = "".join(plain(line).strip() for line in lines)
    verdict = view.snap.verdicts["full"]
    for identifier in (view.snap.sid_job, verdict.global_root, digest("result")):
        assert identifier in whole


def test_what_several_pods_say_of_their_links_is_one_line() -> None:
    text = text_of(plane.event_lines(view_of(Story(replicas=8).full(3)), 120, 40))
    ups = [line for line in text.split("\n") if "path relay up" in line]
    assert len(ups) == 1
    assert "24 pods" in ups[0]


def told_otherwise(story: Story) -> Story:
    """A pod goes on to say something better, of itself and of another worker."""
    for coord in story.coords[:2]:
        lie = {"accuracy": 0.9999, "loss": 0.0001}
        story.add(ev.ResultReported(pod="p1r0", coord=coord, phase="full", result_hash=digest("lie"), values=lie), 0.1)
    return story


def test_a_late_report_changes_nothing_that_was_verified() -> None:
    true, told = view_of(Story(steps=4).finished()), view_of(told_otherwise(Story(steps=4).finished()))
    for view in (true, told):
        shown = text_of([*result.result_lines(view, 150), *ledger.board_lines(view, 150)])
        shown += text_of(home.run_lines(home_model.RunSummary(Path("x"), view.snap, False, 1, NO_FILES), view, 150))
        assert "96.11%" in shown
        assert "99.99" not in shown
        assert "0.9999" not in shown
        assert digest("lie") not in shown
    assert [c.pod for c in contradictions(true.snap)] == []
    assert sorted((c.pod, c.coord) for c in contradictions(told.snap)) == [("p1r0", "p0r0s0t0"), ("p1r0", "p1r0s0t0")]


def test_what_a_language_model_wrote_is_shown_and_harmless() -> None:
    story = Story(steps=4).finished()
    text = "once\x1b[2J upon\u202e a\ntime " + "and again " * 200
    event = ev.EngineEvent(ts=story.now, pod="p0r0", level="info", event="sample_written", fields={"text": text})
    lines = result.result_lines(view_of(Story(steps=4).finished()), 80)
    told = result.result_lines(view_of(_with(story, event)), 80)
    assert "the model writes  once upon a time and again" in text_of(told)
    assert len(told) == len(lines) + result.SAMPLE_LINES
    assert "\x1b" not in text_of(told)
    assert len(fold(story.events).sample) <= 400


def test_the_result_says_whether_a_resume_was_exact() -> None:
    fields = {"first": 5, "last": 6, "rows": 2, "checkpoint": 6, "differs": -1}
    exact, unproven = "the resume is exact: steps 5 to 6 again", "the resume is not exact: nothing shows that"
    for more, said in (
        ({}, exact),
        ({"differs": 6}, "the resume is not exact: step 6 came out differently"),
        ({"differs": None}, unproven),
        ({"differs": -2}, unproven),
        ({"rows": 0, "checkpoint": -1}, unproven),
        ({"rows": "2", "checkpoint": []}, unproven),
    ):
        event = ev.EngineEvent(pod="p0r0", level="info", event="steps_repeated", fields=fields | more)
        assert said in text_of(result.result_lines(view_of(_with(Story(steps=4).finished(), event)), 80))


def _with(story: Story, event: ev.Event) -> Story:
    story.events.append(event)
    return story


def test_kept_pods_are_not_said_to_be_gone_and_the_command_that_ends_them_is_told() -> None:
    story = Story(steps=4, price=2.5, provider="prime").finished()
    story.events = [e for e in story.events if not (isinstance(e, ev.PodChanged) and e.state == "gone")]
    text = text_of(result.result_lines(view_of(story), 150))
    assert f"3 kept for $7.50/h until limits.ttl; uvcc teardown {RUN} ends them" in text
    assert "all gone" not in text
    assert "all gone" in text_of(result.result_lines(view_of(Story(steps=4).finished()), 150))


def test_nobody_creates_a_pod_whose_stage_has_failed() -> None:
    story = Story().provisioning()
    assert "creating" in text_of(fleet_lines(view_of(story), FleetState(), 110))
    story.add(ev.StageChanged(name="provision", status="failed", detail="host h refuses the key"))
    for lines in (fleet_lines(view_of(story), FleetState(), 110), board.board_lines(view_of(story), 110, 20)):
        assert "not made" in text_of(lines)
        assert "creating" not in text_of(lines)
    story.add(ev.StageChanged(name="provision", status="running"))
    assert "creating" in text_of(fleet_lines(view_of(story), FleetState(), 110))


def test_only_pods_of_this_machine_are_said_to_cost_nothing_and_no_word_of_it_is_cut() -> None:
    assert "local pods cost nothing" in text_of(cost.cost_lines(view_of(Story().full(2)), 46))
    hosts = text_of(cost.cost_lines(view_of(Story(provider="alpha").full(2)), 46))
    assert "no price is known of these pods" in hosts
    view = view_of(Story().full(2))
    followed = dataclasses.replace(view, snap=dataclasses.replace(view.snap, followed="/data/theirs"))
    for width in (30, 44):
        lines = cost.cost_lines(followed, width)
        assert "nothing is paid here" in " ".join(text_of(lines).split())
        assert max(map(width_of, lines)) <= width


def test_numbers_are_marked_as_reported_until_they_are_verified() -> None:
    story = Story(steps=4).finished()
    story.events = [e for e in story.events if not isinstance(e, ev.PhaseVerdict)]
    view = view_of(story)
    assert "reported, not verified" in text_of(result.result_lines(view, 150))
    assert "reported, not verified: 3 workers" in text_of(ledger.board_lines(view, 150))
    summary = home_model.RunSummary(Path("x"), view.snap, False, 1, NO_FILES)
    assert "reported, not verified" in text_of(home.run_lines(summary, view, 150))


def test_a_changed_file_takes_the_word_back_on_every_panel() -> None:
    view = dataclasses.replace(view_of(Story(steps=4).finished()), changed={"full": ("proof_bundle.json",)})
    assert status_word(view) == ("✗ CHANGED SINCE", "alarm")
    for lines in (result.result_lines(view, 150), ledger.ledger_lines(view, 150), ledger.board_lines(view, 150)):
        assert "but proof_bundle.json has changed since" in text_of(lines)
        assert "✓ full" not in text_of(lines)
    assert "CHANGED SINCE" in text_of(ledger.ledger_lines(view, 150, compact=True))
    summary = home_model.RunSummary(Path("x"), view.snap, False, 1, NO_FILES, view.changed)
    assert "but proof_bundle.json has changed since" in text_of(home.run_lines(summary, view, 150))
    assert "changed since" in (state_note(view.snap, view.changed) or Note("", "")).text


def test_much_evidence_is_read_beside_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "AT_ONCE", 0)
    story = Story(steps=4).finished()
    folder, snap = story.write(tmp_path / "run"), fold(story.events)
    looks = rechecks.Rechecks(folder)
    first = looks.look(snap, story.now)
    assert result_of(snap, "full", first).words().endswith("its files are being read again")
    assert looks.reading is not None
    looks.reading.result(120)
    assert result_of(snap, "full", looks.look(snap, story.now)).verified
    (folder / "artifacts/full/proof_bundle.json").write_bytes(b"fulL")
    looks.look(snap, story.now + rechecks.EVERY_S)
    assert looks.reading is not None
    looks.reading.result(120)
    assert result_of(snap, "full", looks.look(snap, story.now + rechecks.EVERY_S)).mark == "changed"
    looks.close()


# ---- plane


def waiting(story: Story) -> View:
    for coord, peer in (("p0r0s0t0", "P1"), ("p2r0s0t0", "P1")):
        record = {"step": 3, "phase": "train", "waiting_on": peer, "last_collective": {"seq": 17, "op": "OPEN"}}
        story.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record))
    record = {"step": 3, "phase": "train", "last_collective": {"seq": 12, "op": "RESHARE"}}
    story.add(ev.HeartbeatRead(pod="p1r0", coord="p1r0s0t0", record=record))
    return view_of(story)


def test_who_everybody_waits_for_is_named_and_the_first_that_differs() -> None:
    view = waiting(Story().full(3))
    text = text_of(plane.wait_lines(view, 120))
    assert "2 wait for P1" in text
    assert "furthest behind: p1r0s0t0" in text


@pytest.mark.parametrize("width", [78, 110])
@pytest.mark.parametrize(("whom", "told"), [("p1", "waits P1"), ("p1r1s0t0", "waits p1r1")])
def test_the_fleet_says_whom_a_worker_waits_for_however_long_it_waits(whom: str, told: str, width: int) -> None:
    story = Story().full(3)
    record = {"step": 3, "phase": "train", "waiting_on": whom, "waiting_s": 1234.5}
    story.add(ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record=record))
    assert told in text_of(fleet_lines(view_of(story), FleetState(), width))


def test_where_steps_are_short_the_planes_own_events_name_the_slow_pair() -> None:
    story = Story().full(3)
    for coord, named in (("p0r0s0t0", True), ("p2r0s0t0", False)):  # older engines do not say which worker waited
        fields = {"peer": 1, "since_s": 4.2} | ({"coord": coord} if named else {})
        story.add(ev.EngineEvent(pod=coord[:4], level="warn", event="waiting", fields=fields))
    view = view_of(story)
    text = text_of(plane.wait_lines(view, 120))
    assert "2 wait for p1" in text
    assert text.count("p1 4.2 s, ") == 2
    later = dataclasses.replace(view, now=view.now + 3600)
    assert "nobody reports waiting" in text_of(plane.wait_lines(later, 120))


def test_flight_recorders_name_who_is_behind_before_what_everybody_does() -> None:
    story = Story().full(3)
    newest = {c: "world #42 decide, started, 9.0 s old" for c in story.coords[:2]}
    said = "p0 world: nothing moved for 9 s; p0r1s0t0 is at #41 decide, the others at #42 decide"
    story.add(ev.FlightRead(folder="artifacts/flight/full-1", newest=newest, silent=["p2r0s0t0"], findings=[said]))
    text = text_of(plane.flight_lines(view_of(story), 140))
    assert text.index("nothing moved for 9 s") < text.index("p2r0s0t0 did not answer") < text.index("p0r0s0t0 ")


def test_a_dead_path_is_shown_before_it_is_needed() -> None:
    story = Story().full(3)
    story.add(ev.LinkChanged(pod="p1r0", path="ssh", up=False, detail="keepalive"))
    lines = plane.path_lines(view_of(story), 100)
    assert plain(lines[2]).startswith("p1r0"), "the pod with a dead path comes first"
    assert "✗ down" in plain(lines[2])


# ---- cost and rollout


def test_money_against_its_caps() -> None:
    text = text_of(cost.page_lines(view_of(Story(replicas=2, price=2.4, provider="prime").full(4)), 140))
    assert "$14.40 of $60.00" in text
    assert "per step" in text
    assert text.count("prime") == 6


def test_the_time_left_is_that_of_the_work_and_of_the_run_s_own_clock() -> None:
    """Somebody sets the machine's clock an hour ahead: neither the work nor the run's life is shorter for it."""
    story = Story(price=2.4).planned()
    created = next(e for e in story.events if isinstance(e, ev.RunCreated))
    profile = {**created.profile, "limits": {"hourly": 60, "total": 120, "ttl": 7200.0}}
    story.events[story.events.index(created)] = dataclasses.replace(created, profile=profile)
    snap = fold(story.events)
    at = snap.created + 1800.0
    told = reduce(snap, ev.CostTick(ts=at, hourly=2.4, spent=1.2, at=at))
    jumped = reduce(told, ev.CostTick(ts=at + 3605.0, hourly=2.4, spent=1.2, at=at + 5.0))
    for s, now, left in ((told, at + 60.0, "1 h 29 m"), (jumped, at + 3660.0, "1 h 29 m")):
        text = text_of(cost.page_lines(View(snap=s, now=now), 140))
        assert f"time left   {left} of the run's life" in text
    over = dataclasses.replace(told, ended=at)
    assert "time left" not in text_of(cost.page_lines(View(snap=over, now=at + 60.0), 140))
    full = Story(price=2.4).full(30)
    snap = dataclasses.replace(view_of(full).snap, profile=profile)
    text = text_of(cost.page_lines(View(snap=snap, now=snap.updated), 140))
    assert re.search(r"time left   \S.* of work at its pace · 1 h \d\d m of the run's life", text), text


def test_alerts_stand_below_the_gates_with_their_hints() -> None:
    story = Story().full(4)
    story.add(ev.Alert(level="warn", name="straggler", text="p1r0s0t0 is 3 times slower", hint="look at its disk"))
    text = text_of(rollout.page_lines(view_of(story), 140))
    assert text.index("gates") < text.index("3 times slower (look at its disk)")


# ---- the time line


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_the_time_line_marks_what_happened_and_where_we_are(glyphs: object) -> None:
    view = View(glyphs=glyphs)  # type: ignore[arg-type]
    line = scrub.scrub_line(Tape(0, 100, 50, 4, True, ((25, "warn"), (75, "bad"))), view, 101 + scrub.LEFT)
    cells = [(c, role) for text, role in line for c in text][scrub.LEFT :]
    assert cells[49][0] == view.glyphs.live
    assert [i for i, (c, r) in enumerate(cells) if r == "warn"] == [24]
    assert [i for i, (c, r) in enumerate(cells) if r == "bad"] == [74]
    far = "".join(text for text, _ in scrub.scrub_line(Tape(0, 45_240, 3720, 1, True, ()), view, 80))
    assert "1 h 02 m of 12 h 34 m " in far  # with its speed apart from it


async def test_a_click_on_the_time_line_goes_there(folder: Path) -> None:
    async with desk(Story().halted(), folder, replay=True) as d:
        source = d.app.source
        await d.pilot.click("#scrub", offset=(159, 0))
        assert source.now() == pytest.approx(source.end, abs=0.2)  # type: ignore[attr-defined]
        assert d.app.snap.status == "halted"
        await d.pilot.click("#scrub", offset=(30, 0))
        assert d.app.snap.status != "halted"
