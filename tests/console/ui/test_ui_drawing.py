"""The pure parts: numbers, canvas, ring log, filters, the fleet's judgement and the meaning of F9."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
from ui_journals import T0, Story

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import LogEntry
from uvcc_console.ui.drawing import format as fmt
from uvcc_console.ui.drawing.glyphs import ASCII, UNICODE
from uvcc_console.ui.drawing.paint import clean, cut, fit, plain, spread, width_of, wrap
from uvcc_console.ui.judging import filters
from uvcc_console.ui.judging.condition import status_word
from uvcc_console.ui.judging.lamps import DEAD, Lamp
from uvcc_console.ui.judging.view import View, fleet_rows, stakes
from uvcc_console.ui.panels import charts, cost, fleet, halt_panel, ledger, result, rollout
from uvcc_console.ui.widgets import bars
from uvcc_console.ui.widgets.canvas import Band, Curve, Frame, nice_ticks, plot
from uvcc_console.ui.widgets.ring import RingLog
from uvcc_engine.contract.errors import ConfigError


def view_of(story: Story, after: float = 1.0, **options: object) -> View:
    """A view of a made-up run, some seconds after its last event."""
    return View(snap=fold(story.events), now=story.now + after, utc=True, **options)  # type: ignore[arg-type]


def text_of(lines: list) -> str:
    return "\n".join(plain(line) for line in lines)


# ---- numbers and text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.42, "0.4 s"), (12.4, "12 s"), (184, "3 m 04 s"), (3720, "1 h 02 m"), (183_600, "2 d 03 h"), (math.inf, "-")],
)
def test_durations_are_short_and_carry_their_unit(seconds: float, shown: str) -> None:
    assert fmt.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.31244, "0.3124"), (12.4, "12.40"), (125_000, "125k"), (3.1e-5, "3.1e-05"), (math.nan, "NaN"), (2.5e9, "2.50G")],
)
def test_numbers_have_four_significant_digits(value: float, shown: str) -> None:
    assert fmt.number(value) == shown


def test_text_from_machines_cannot_reach_the_terminal() -> None:
    assert clean("ok \x1b[2J\x07 gone") == "ok �[2J� gone"
    assert clean("right\u202eleft") == "right�left"
    assert clean("plain text") == "plain text"


def test_fit_cuts_and_pads_by_cells_not_characters() -> None:
    assert fit("日本語", 5) == "日本…"
    assert fit("日本語", 4) == "日 …"
    assert fit("ab", 5, "r") == "   ab"
    assert width_of([(fit("日本語テキスト", 9), "")]) == 9


def test_spread_keeps_the_right_end_and_cuts_the_left() -> None:
    line = spread([("left side that is long", "")], [("right", "")], 16)
    assert plain(line) == "left side… right"
    assert width_of(line) == 16


def test_wrap_never_exceeds_the_width() -> None:
    rows = wrap([("a rather long sentence with averyveryverylongword inside", "bad")], 12)
    assert all(width_of(r) <= 12 for r in rows)
    assert "".join(plain(r).replace(" ", "") for r in rows) == "aratherlongsentencewithaveryveryverylongwordinside"


def test_cut_marks_the_loss() -> None:
    assert plain(cut([("abc", "x"), ("defgh", "y")], 6)) == "abcde…"


# ---- canvas


def test_ticks_are_round_numbers_inside_the_range() -> None:
    assert nice_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(0.13, 0.49, 4) == [0.2, 0.3, 0.4]


def _braille_rows(lines: list) -> list[str]:
    return ["".join(c for c in plain(line) if "⠀" <= c <= "⣿" or c == " ") for line in lines]


def test_a_falling_line_falls_on_the_canvas() -> None:
    xs = array("d", range(50))
    lines = plot([Curve(xs, array("d", [50 - x for x in xs]), "p0")], 40, 10, UNICODE)
    assert len(lines) == 10
    first = [next((i for i, c in enumerate(plain(row)) if "⠀" < c <= "⣿"), -1) for row in lines[:8]]
    assert first == sorted(first)
    assert first[0] < 10 < first[-1]


def test_a_single_spike_among_thousands_of_points_is_never_lost() -> None:
    ys = array("d", [1.0] * 5000)
    ys[2500] = 9.0
    lines = plot([Curve(array("d", range(5000)), ys, "p0")], 60, 12, UNICODE)
    assert any("⠀" < c <= "⣿" for c in plain(lines[0]))


def test_a_gap_of_nan_breaks_the_line() -> None:
    ys = array("d", [1.0] * 10 + [math.nan] * 30 + [1.0] * 10)
    lines = plot([Curve(array("d", range(50)), ys, "p0")], 56, 6, UNICODE)
    drawn = next(plain(row) for row in lines if any("⠀" < c <= "⣿" for c in plain(row)))
    inner = drawn.split("│")[-1].split("┤")[-1]
    assert inner.strip() != inner.replace(" ", ""), "the line must be interrupted"


def test_log_scale_shows_powers_of_ten_and_ignores_zero() -> None:
    ys = array("d", [10.0**-k for k in range(5)] + [0.0])
    text = text_of(plot([Curve(array("d", range(6)), ys, "p0")], 40, 16, UNICODE, frame=Frame(log=True)))
    assert "0.0100" in text or "0.01" in text


def test_ascii_charts_use_ascii_only() -> None:
    xs = array("d", range(30))
    lines = plot([Curve(xs, array("d", [math.sin(x / 4) for x in xs]), "p0")], 40, 8, ASCII)
    assert text_of(lines).isascii()


def test_bands_lie_behind_and_cursor_in_front() -> None:
    xs = [float(x) for x in range(20)]
    band = Band(xs, [0.0] * 20, [4.0] * 20)
    curve = Curve(xs, [2.0] * 20, "p1")
    lines = plot([curve], 40, 8, UNICODE, bands=[band], frame=Frame(cursor=10.0))
    roles = {role for line in lines for _, role in line}
    assert {"faint", "p1", "accent"} <= roles or "mix" in roles


def test_nothing_to_draw_is_no_lines() -> None:
    assert plot([], 40, 8, UNICODE) == []
    assert plot([Curve([1.0], [math.nan], "p0")], 40, 8, UNICODE) == []


# ---- ring log


def entry(i: int, level: str = "info", source: str = "pod-p1") -> LogEntry:
    return LogEntry(T0 + i, level, source, f"line {i}")


def test_the_ring_keeps_the_newest_and_counts_what_it_dropped() -> None:
    ring = RingLog(cap=100)
    for start in range(0, 1000, 10):
        ring.extend([entry(i) for i in range(start, start + 10)])
    assert ring[len(ring) - 1].text == "line 999"
    assert 100 <= len(ring) <= 125
    assert ring.dropped + len(ring) == 1000


def test_the_filter_survives_trimming_and_counts_fresh_lines() -> None:
    ring = RingLog(cap=50)
    ring.set_filter(filters.parse("level=error"))
    fresh = ring.extend([entry(i, "error" if i % 10 == 0 else "info") for i in range(200)])
    assert fresh == 20
    assert all(ring[i].level == "error" for i in range(len(ring)))
    assert ring[len(ring) - 1].text == "line 190"
    ring.set_filter(filters.Filter())
    assert len(ring) == ring.total


def test_time_jumps_and_search_find_the_right_line() -> None:
    ring = RingLog()
    ring.extend([entry(i) for i in range(500)])
    assert ring[ring.at_time(T0 + 123.5)].text == "line 124"
    assert ring.find("LINE 77", 499, -1) == 77
    assert ring.find("nothing like it", 0, 1) is None


# ---- filters


FIELDS: dict[str, str | float] = {"party": 1, "loss": 3.5, "state": "late", "level": "warn", "pod": "pod-p1"}


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("", True),
        ("party=1 loss>3", True),
        ("party=1 loss>4", False),
        ("!party=2", True),
        ("state=LATE", True),
        ("state!=late", False),
        ("level>=warn", True),
        ("level>=error", False),
        ("pod~p[01]$", True),
        ("missing=1", False),
        ("!missing=1", True),
        ("needle", True),
        ("!needle", False),
        ("/ne+dle/", True),
        ('"a needle"', True),
        ('"needle a"', False),
    ],
)
def test_filters(source: str, passes: bool) -> None:
    assert filters.parse(source).matches(FIELDS, "there is a needle in here") is passes


@pytest.mark.parametrize("source", ["loss>many", "pod~(", "/(/"])
def test_filters_that_cannot_be_read_say_so(source: str) -> None:
    with pytest.raises(ConfigError):
        filters.parse(source)


def test_a_level_that_is_none_names_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no level 'loud'") as e:
        filters.parse("level>=loud")
    assert e.value.hint == "there are debug, info, warn, error"


# ---- the fleet


def test_a_silent_worker_is_worst_and_comes_first() -> None:
    story = Story(replicas=2).full(3)
    view = view_of(story)
    quiet = "p1r1s0t0"
    workers = dict(view.snap.workers)
    import dataclasses

    workers[quiet] = dataclasses.replace(workers[quiet], beat_ts=view.now - 20)
    view = dataclasses.replace(view, snap=dataclasses.replace(view.snap, workers=workers))
    rows = fleet.visible_rows(view, fleet.FleetState())
    assert rows[0].coord == quiet
    assert (rows[0].health.word, rows[0].health.role) == ("silent", "bad")
    assert {r.health.word for r in rows[1:]} == {"live"}


def test_heartbeat_ages_have_glyph_word_and_colour() -> None:
    seen = {}
    for after in (1.0, 8.0, 20.0, 90.0):
        story = Story().full(3)
        story.add(ev.CostTick(hourly=0, spent=0, forecast=0), after)  # the conductor goes on
        seen[after] = fleet_rows(view_of(story, 0.1))[0].health
    assert [h.word for h in seen.values()] == ["live", "late", "silent", "lost"]
    assert len({h.glyph for h in seen.values()}) == 4


def test_every_column_list_fits_its_width() -> None:
    view = view_of(Story(replicas=8).full(3))
    for width in (30, 44, 60, 78, 108, 160):
        assert all(width_of(line) <= width for line in fleet.fleet_lines(view, fleet.FleetState(), width)), width


def test_filters_apply_to_the_fleet() -> None:
    import dataclasses

    view = dataclasses.replace(view_of(Story(replicas=4).full(2)), filter=filters.parse("party=2 replica>1"))
    assert [r.coord for r in fleet.visible_rows(view, fleet.FleetState("place"))] == ["p2r2s0t0", "p2r3s0t0"]


# ---- bars and panels


@pytest.mark.parametrize("width", [40, 80, 120, 160, 220])
def test_no_line_of_any_panel_is_wider_than_asked(width: int) -> None:
    stories = [Story().planned(), Story().provisioning(), Story().full(5), Story().halted(1), Story().fork()]
    for story in [*stories, Story().failed(), Story(steps=5).finished(ok=False)]:
        for glyphs in (UNICODE, ASCII):
            view = view_of(story, glyphs=glyphs, run_dir="/data/runs/demo")
            drawn = [bars.header_line(view, width), bars.track_line(view, width), *bars.banner_lines(view, width)]
            drawn += [
                *ledger.ledger_lines(view, width),
                *rollout.rollout_lines(view, width),
                *cost.cost_lines(view, width),
            ]
            drawn += [*halt_panel.halt_lines(view, width), *result.result_lines(view, width)]
            drawn += charts.overview_lines(view, width, 14)
            assert max(width_of(line) for line in drawn) <= width
            if glyphs is ASCII:
                assert not {c for line in drawn for c in plain(line) if ord(c) > 127} - {"…"}


def test_the_banner_tells_of_a_silence_or_a_lag_only_while_it_lasts() -> None:
    story = Story().full(20)
    story.add(ev.Alert(level="warn", name="link", text="link auto: direct"))
    silence, lag = "no heartbeat for 17 s (last step 20, limit 15 s)", "P0 at 20, P1 at 20, P2 at 28"

    def shown() -> str:
        return text_of(bars.banner_lines(view_of(story), 160))

    def beat(coord: str, step: int, after: float = 0.0) -> None:
        record = {"step": step, "phase": "train"}
        story.add(ev.HeartbeatRead(pod=coord[:4], coord=coord, record=record), after)

    for coord in ("p0r0s0t0", "p2r0s0t0"):
        beat(coord, 20, 16.5)
    story.add(ev.Alert(level="error", name="stalled_heartbeat", text=silence, subject="p1r0s0t0"), 1.0)
    assert silence in shown()
    beat("p1r0s0t0", 20, 5.0)
    assert silence not in shown()
    assert "link auto: direct" in shown()
    beat("p2r0s0t0", 28)
    story.add(ev.Alert(level="warn", name="skew_between_parties", text=lag, subject="P0"))
    assert lag in shown()
    for coord in ("p0r0s0t0", "p1r0s0t0"):
        beat(coord, 28)
    assert lag not in shown()


def test_the_banner_tells_of_a_dead_conductor_until_the_next_one_lives_and_a_note_is_no_warning() -> None:
    story = Story().full(20)
    story.add(ev.Alert(level="info", name="link", text="auto chose direct: the parties reach each other"))
    text = "the conductor has died; its sidecar keeps the caps"
    assert "· link: auto chose direct" in text_of(bars.banner_lines(view_of(story), 160))
    story.add(ev.Alert(level="error", name="conductor", text=text), 1.0)
    view = view_of(story)
    assert text in text_of(bars.banner_lines(replace(view, conductor=Lamp(DEAD)), 160))
    assert text not in text_of(bars.banner_lines(view, 160))


def test_f9_is_in_every_footer_even_the_narrowest() -> None:
    view = view_of(Story().full(3))
    assert "F9" in plain(bars.footer_line(view, 14, [("r", "resume", True)]))


def test_no_stage_comes_next_in_a_run_that_has_ended() -> None:
    assert "next verify" in plain(bars.track_line(view_of(Story().full(3)), 80))
    track = plain(bars.track_line(view_of(Story().gave_up()), 80))
    assert "next" not in track
    assert "full" in track


def test_the_agreement_line_says_up_to_which_step() -> None:
    plainly = view_of(Story().full(7))
    assert plain(ledger.agreement_line(plainly)) == "P0 ═ P1 ═ P2  agree @ step 7"
    replaced = replace(plainly, snap=replace(plainly.snap, first_step=20))  # whose policy counts from 0 again
    assert plain(ledger.agreement_line(replaced)) == "P0 ═ P1 ═ P2  agree @ step 27"
    assert "newest root step 27" in text_of(ledger.ledger_lines(replaced, 100))
    assert plain(ledger.history_line(replaced, 100)).endswith("epochs since step 20")


def test_a_domain_of_its_own_does_not_wait_for_roots_that_come_at_the_end() -> None:
    def own(view: View) -> View:
        mine = {coord: w for coord, w in view.snap.workers.items() if coord.startswith("p0")}
        return replace(view, snap=replace(view.snap, apart=True, workers=mine, agreement=(), agreed_epoch=-1))

    assert "the others' roots come at the end" in plain(ledger.agreement_line(own(view_of(Story().full(7)))))
    ended = own(view_of(Story(steps=4).finished()))
    assert plain(ledger.agreement_line(ended)) == "P0 ═ P1 ═ P2  agree in every epoch"
    changed = replace(ended, changed={"full": ("proof_bundle.json",)})
    assert "agree in" not in plain(ledger.agreement_line(changed))


def test_a_fork_is_the_loudest_thing() -> None:
    view = view_of(Story().fork())
    assert status_word(view) == ("≠ FORK", "alarm")
    assert bars.banner_lines(view, 100)[0][0][1] == "alarm"
    assert "P1 and P2 disagree" in text_of(bars.banner_lines(view, 160))
    assert "≠" in plain(ledger.agreement_line(view))


def test_unknown_is_its_own_red_state_in_the_halt_matrix() -> None:
    view = view_of(Story().halted(unknown=1))
    lines = halt_panel.halt_lines(view, 140)
    assert "2/3 verified" in plain(lines[0])
    assert "1 UNKNOWN" in plain(lines[0])
    worst = lines[2]
    assert plain(worst).startswith("p2r0")
    assert ("alarm" in {role for text, role in worst if "UNKNOWN" in text}) is True


def test_stakes_colour_the_frame() -> None:
    assert stakes(view_of(Story().full(2))) == "full"
    assert stakes(view_of(Story().launched().phase("smoke", 2))) == "smoke"
    assert stakes(view_of(Story().planned())) == "plain"
    assert stakes(view_of(Story().full(2), replay="3 %")) == "replay"
    assert stakes(view_of(Story(steps=4).finished())) == "plain"


def test_the_result_names_what_was_proved() -> None:
    view = view_of(Story(steps=5).finished(), run_dir="/data/runs/demo")
    text = text_of(result.result_lines(view, 140))
    assert "✓ VERIFIED" in text
    assert "accuracy 96.11%" in text
    assert "the same from 3 workers" in text
    assert "/data/runs/demo/artifacts" in text
    bad = text_of(result.result_lines(view_of(Story(steps=5).finished(ok=False)), 140))
    assert "NOT VERIFIED" in bad
    assert "signature does not verify" in bad


def test_equal_parties_are_drawn_as_one_line_and_said_to_be_equal() -> None:
    curves, _, same = charts.curves_of(view_of(Story().full(5)), "loss")
    assert same
    assert len(curves) == 1
    differ, _, same = charts.curves_of(view_of(Story().full(5)), "samples_per_s")
    assert not same
    assert [c.role for c in differ] == ["p0", "p1", "p2"]


def test_replicas_become_mean_and_band() -> None:
    _, bands, _ = charts.curves_of(view_of(Story(replicas=3).full(5)), "loss")
    assert bands
    assert all(low < high for low, high in zip(bands[0].low, bands[0].high, strict=True))
