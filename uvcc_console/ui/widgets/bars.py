"""The lines at the top and the bottom: who we are and how it goes, the stages, what is loud, and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final

from textual import events
from textual.message import Message

from uvcc_console.core.alerts import lasts
from uvcc_console.core.snapshot import LogEntry, Snapshot
from uvcc_console.ui.drawing.format import clock, duration, money
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, join, spread, width_of, wrap
from uvcc_console.ui.judging.condition import health_spans, judge, stalled_s, status_word, undecided, warnings
from uvcc_console.ui.judging.lamps import DEAD, STARTING, Lamp, halt_paths, needs_sidecar
from uvcc_console.ui.judging.past import advice_here, as_told, without_commands
from uvcc_console.ui.judging.view import View, eta, halting, holding, stakes, unknown_after_halt
from uvcc_console.ui.registry.keys import SKIPPABLE
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.job.proof_mode import COVERT, PRODUCTS, PROOFS, Proving
from uvcc_engine.contract.text import counted

BADGE = {"full": "alarm", "smoke": "amber", "replay": "blue", "plain": "grey"}


def progress_bar(view: View, width: int, *, dim: bool = False) -> list[Span]:
    """How far the phase is: bar and percentage."""
    s, g = view.snap, view.glyphs
    if s.steps_planned <= 0 or s.step < 0:
        return []
    part = min(1.0, s.step / s.steps_planned)
    full = int(part * width)
    roles = ("faint", "faint") if dim else ("accent", "text")
    return [(g.full * full, roles[0]), (g.empty * (width - full), "faint"), (f" {part:.0%}", roles[1])]


def _progress(view: View, cells: int) -> tuple[list[Span], list[Span], list[Span]]:
    """Step, bar of so many cells, time left. Where no step arrives the first two are dim, and no time is promised."""
    s = view.snap
    stalled = stalled_s(view)
    dim = bool(stalled) or view.stale
    step: list[Span] = []
    if s.steps_planned:
        at = s.step if s.step >= 0 else 0
        role = "faint" if dim else "muted"
        step = [("step ", role), (f"{at}", role if dim else "title"), (f"/{s.steps_planned}", role), ("  ", "")]
    elif s.followed and s.step >= 0:  # nobody says how many there will be
        step = [("step ", "faint" if dim else "muted"), (f"{s.step}", "faint" if dim else "title"), ("  ", "")]
    bar = progress_bar(view, cells, dim=dim)
    bar = [*bar, ("  ", "")] if bar else []
    if stalled and not view.stale:
        return step, bar, [(f"no step for {duration(stalled)}", "warn"), ("  ", "")]
    left = eta(s, view.now) if s.status == "running" and not dim and not halting(s) else None
    return step, bar, [] if left is None else [("eta ", "muted"), (duration(left), "text"), ("  ", "")]


def header_line(view: View, width: int) -> Line:
    """Badge, run, status, health, step, time left, cost, clock; what matters least goes first for lack of room.

    A long bar takes no room from the run's name.
    """
    wide = width >= 120
    for cells in (16, 8, 4) if wide else (4,):
        left, right = _ends(view, width, cells)
        named = _identity(view, width - width_of(left) - width_of(right) - 2, wide)
        if any(clean(view.snap.run) in text for text, _ in named):
            break
    return spread(left, [*named, *right], width)


def _badge(view: View) -> str:
    """What is under way: the phase, before it the stage."""
    s = view.snap
    stage = s.stage.name if s.stage is not None and not s.ended else "plan"
    return clean(s.phase or stage).upper()


def _ends(view: View, width: int, cells: int) -> tuple[list[Span], list[Span]]:
    """What stands at the left and at the right of the first line, with a bar of so many cells."""
    s = view.snap
    badge = "REPLAY" if view.replay else _badge(view)
    word, role = status_word(view)
    left: list[Span] = [(f" {badge} ", BADGE[stakes(view)]), (" ", ""), (f" {word} ", role), (" ", "")]
    if health := health_spans(view):
        left += [*health, ("  ", "")]
    wide = width >= 120
    # where there is no room for the run's name there is room for this, in half of 160 columns, too
    if width >= 78 and not wide and s.operation:
        left += [("1 domain of 3", "text") if s.apart else ("1 operator", "warn"), ("  ", "")]
    step, bar, until = _progress(view, cells)
    readonly: list[Span] = [("read-only", "warn"), ("  ", "")] if view.readonly else []
    right: list[Span] = []
    if not wide or s.hourly or s.spent:
        right += [(f"{money(s.hourly)}/h ", "text" if s.hourly else "muted")]
        right += [(money(s.spent), "title" if s.spent else "muted"), ("   " if wide else "  ", "")]
    time = [(view.replay or clock(view.now, utc=view.utc), "blue" if view.replay else "muted"), (" ", "")]
    percent = bar[-2:] if bar else []
    far: list[Span] = [*step, *percent]
    near: list[Span] = [*step[:-1], percent[0], (" ", "")] if percent else step  # the same with single blanks
    free = [] if s.hourly or s.spent else [([*told, *until, *readonly], time) for told in (far, near)]
    timeless: list[tuple[list[Span], list[Span]]] = []  # what time it is can be seen elsewhere
    if percent and until and not view.replay:
        ends = [list(right), []] if s.hourly or s.spent else [[]]
        timeless = [([*told, *readonly, *until[:-1]], end) for end in ends for told in (near, near[1:])]
    part = [] if s.hourly else [([*step, *percent, *readonly], time)]
    for parts, end in (
        ([*step, *bar, *until, *readonly], [*right, *time]),
        ([*step, *percent, *until, *readonly], [*right, *time]),
        *free,  # how far it is tells more than that it costs nothing
        *timeless,
        ([*step, *until, *readonly], [*right, *time]),
        ([*step, *until, *readonly], time),
        *part,
        ([*step, *readonly], time),
        (readonly, time),
    ):
        if width_of(left) + width_of(parts) + width_of(end) < width:
            break
    return [*left, *parts], list(end)


def shape_words(s: Snapshot, g: Glyphs) -> str:
    """Parties, replicas, stages and tensor ranks of a private run; the ranks of any other."""
    if not s.proves:
        return counted(len(s.workers), "rank") if s.workers else "ranks"
    inner = f" {g.times} {s.pipeline_stages} {g.times} {s.tensor}" if s.pipeline_stages * s.tensor > 1 else ""
    return f"3 parties {g.times} {s.replicas}{inner}"


def proof_words(proving: Proving) -> str:
    """What is proved, in the words of the first line: no more than that."""
    rare = f"1 step in {proving.audit_one_in} audited"
    return {PRODUCTS: "products proved", PROOFS: "every message proved", COVERT: rare}.get(proving.mode, "")


def _identity(view: View, room: int, wide: bool) -> list[Span]:
    """Run, shape, who operates it and drill time; the least important go first when there is no room."""
    s, g = view.snap, view.glyphs
    run: list[Span] = [(clean(s.run), "title"), ("   ", "")]
    shape: list[Span] = [(f"{clean(s.profile_name)} {g.dot} {shape_words(s, g)}   ", "muted")]
    words = proof_words(s.proving) if s.proves else ""
    proved: list[Span] = [(f"{words}   ", "muted")] if words else []
    who: Span = ("one domain of three   ", "text") if s.apart else ("one operator   ", "warn")
    operators: list[Span] = [who] if s.operation and wide else []
    drill: list[Span] = []
    if s.halt.last_drill_s is not None:
        drill = [("drill ", "muted"), (f"{g.ok} {s.halt.last_drill_s:.1f} s   ", "text")]
    short: list[Span] = [("1 domain of 3   ", "text") if s.apart else ("1 operator   ", "warn")] if operators else []
    for parts in (
        [*run, *shape, *proved, *operators, *drill],
        [*run, *proved, *operators, *drill],
        [*run, *proved, *operators],
        [*run, *operators],
        [*run, *short],
        run if width_of(operators or run) > room or not operators else operators,
    ):
        if width_of(parts) <= room:
            return parts
    return []


def lamps(view: View, *, wide: bool) -> list[Span]:
    """Conductor, halt sidecar and every path of a halt, each with a sign, a word and a colour."""
    s, g = view.snap, view.glyphs
    if s.ended or view.replay or not s.pods:
        return []
    names = ("conductor", "sidecar") if wide else ("cond", "haltd")
    found = [(names[0], view.conductor)]
    if needs_sidecar(s):
        found.append((names[1], view.sidecar))
    parts = [[(f"{name} ", "muted"), _lamp(view, lamp)] for name, lamp in found]
    for name, (up, known) in halt_paths(s).items():
        role = "ok" if up == known else "bad" if up == 0 else "warn"
        if known == 0 or view.behind_s or (role == "ok" and view.stale):
            role = "muted"
        sign = g.live if up == known else g.fail if up == 0 else g.late
        parts.append([(f"{name} ", "muted"), (f"{sign} {up}/{known}" if wide or up < known else sign, role)])
    return [*join(parts), (" ", "")]


def _lamp(view: View, lamp: Lamp) -> Span:
    if lamp.state == STARTING:
        return view.glyphs.todo, "muted"
    return (view.glyphs.live, "ok") if lamp.well else (f"{view.glyphs.fail} {lamp.state}", "bad")


def track_line(view: View, width: int) -> Line:
    """The way here, the rollout's stages, done, running with its name, still to come; and the lamps."""
    if view.crumbs:
        room = width - width_of(lamps(view, wide=False)) - _LEAST_STAGES
        way = _crumbs(view, room)
        return [*way, *track_line(replace(view, crumbs=()), max(10, width - width_of(way)))]
    for wide in (True, False):
        signs = lamps(view, wide=wide)
        stages = _stages(view, width)
        if signs and width_of(stages) + width_of(signs) + 2 > width:
            stages = _stages(view, width - width_of(signs) - 2)
        if not signs or (width_of(stages) + width_of(signs) + 2 <= width and (not wide or _full(view, stages))):
            break
    return spread(stages, signs, width) if signs else stages


_LEAST_STAGES: Final = 12
"""Cells that the stages keep beside a long way here."""


def _crumbs(view: View, room: int) -> list[Span]:
    """``overview > Fleet > p1r0``, the last one where we are; of a long way the middle goes, for the lamps stay."""
    first, *way, here = view.crumbs
    arrow, more = " > ", view.glyphs.more
    for kept in range(len(way), -1, -1):
        names = [first, *([more] if kept < len(way) else []), *way[len(way) - kept :]]
        out: list[Span] = [(" ", ""), *((clean(name) + arrow, "muted") for name in names)]
        out += [(clean(here), "accent bold"), ("  ", "")]
        if width_of(out) <= room:
            return out
    return [(" ", ""), (clean(here), "accent bold"), ("  ", "")]


def _comes_next(s: Snapshot) -> str:
    """The stage that comes next; of a run that has ended none does, whatever it had before it."""
    return "" if s.ended else next((v.name for v in s.stages if v.status == "pending"), "")


def _full(view: View, line: Line) -> bool:
    """Whether the stage that comes next is still named."""
    waiting = _comes_next(view.snap)
    return not waiting or any(waiting in text for text, _ in line)


def _stages(view: View, width: int) -> list[Span]:
    s, g = view.snap, view.glyphs
    roles = {"ok": "ok", "running": "accent bold", "waiting": "warn bold", "failed": "bad", "skipped": "muted"}
    full: list[Span] = []
    for v in s.stages:
        role = roles.get(v.status, "faint")
        name_role = "muted" if v.status == "ok" else role
        full += [(f"{g.stage(v.status)} ", role), (v.name, name_role), ("  ", "")]
    if not full:
        return [(" no stages yet", "faint")]
    if width_of(full) + 1 <= width:
        return [(" ", ""), *full]
    short: list[Span] = [(" ", "")]
    for v in s.stages:
        named = v.status in ("running", "waiting", "failed")
        text = f" {g.stage(v.status)} {v.name} " if named else g.stage(v.status)
        short.append((text, roles.get(v.status, "faint")))
    if after := _comes_next(s):
        short.append((f"  next {after}", "muted"))
    return cut(short, width)


def banner_lines(view: View, width: int) -> list[Line]:
    """What must be seen now, loudest first, each with what to press. Empty when all is well."""
    s, g = view.snap, view.glyphs
    out: list[Line] = []

    def block(role: str, text: str, hint: str = "") -> None:
        hint = advice_here(view, hint)
        rows = [*wrap([(f"{text}", role)], width - 4, "")]
        beside = f"   {hint}" if hint and width_of(rows[-1]) + len(hint) + 6 <= width else ""
        rows += wrap([(hint, role)], width - 4, "") if hint and not beside else []
        for i, row in enumerate(rows):
            tail = beside if i == len(rows) - 1 else ""
            body = [("  ", role), *row, (tail, role)]
            pad = width - width_of(body)
            out.append(cut([*body, (" " * max(0, pad), role)], width))

    if s.fork:
        block("alarm", f"{g.differ * 3} {clean(s.fork)} {g.differ * 3}", "" if view.replay else "F9 holds")
    stage = s.stage
    waits = undecided(s) and not s.ended
    what = as_told(view, clean(stage.detail if waits and stage else s.detail))
    now = judge(s, conductor=view.conductor, behind_s=view.behind_s)
    keys = now.advice if now.name == "undecided" and not view.replay else ""
    if stage is not None and stage.name in SKIPPABLE and keys:
        keys = "R retries, x skips, t tears down"
    if keys:
        what = without_commands(what)
    if keys and stage and stage.again > view.now and not halting(s):
        keys += f"; by itself in {duration(stage.again - view.now)}"
    elif keys and stage and stage.until > 0:
        keys += f"; {duration(max(0.0, stage.until - view.now))} left"
    if s.status == "failed":
        where = f"{stage.name}: " if stage and waits else ""
        block("alarm", f"{g.fail} FAILED {where}{what}", keys)
    elif s.status == "halted":
        if not s.halt.nonce or waits:
            block("amber", f"{g.wait} HALTED {what.removeprefix('halted ')}", keys)
    elif waits and stage:
        block("amber", f"{g.wait} {stage.name} waits for you: {what}", keys)
    if s.leaks:
        look = "" if view.replay else "look again with: uvcc pods --sweep"
        block("alarm", f"{g.fail} LEFT BEHIND: {clean(', '.join(s.leaks))}", look)
    for role, text, hint in warnings(view):
        block(role, text, hint)
    if s.status == "running" and not view.behind_s and (a := _newest_alert(view)) is not None:
        role = {"error": "bad", "warn": "warn"}.get(a.level, "muted")
        sign = g.dot if role == "muted" else g.warn  # a note is no warning
        out.append(cut([(f"  {sign} {clean(a.source)}: {as_told(view, clean(a.text))}", role)], width))
    return out


_ALERT_S: Final = 60.0


def _newest_alert(view: View) -> LogEntry | None:
    """The newest alert that is not old; a silence, say, or a lag only while it lasts, and a conductor's death only
    until the next one lives."""
    s = view.snap
    recent = (a for a in reversed(s.alerts) if view.now - a.ts < _ALERT_S)
    if view.conductor.state != DEAD:
        recent = (a for a in recent if (a.alert, a.level) != ("conductor", "error"))
    return next((a for a in recent if lasts(s, view.heard, a.alert, a.source)), None)


def footer_line(view: View, width: int, keys: Sequence[tuple[str, str, bool]]) -> Line:
    """The keys. F9 always comes first and always fits; disabled ones are faint."""
    left_s = holding(view.snap, view.now)
    if left_s is not None:
        line: list[Span] = [(" F9 ", "alarm"), (" HALT now  ", "title"), (" Esc ", "green"), (" release  ", "title")]
        return cut([*line, (f"halts by itself in {left_s:.1f} s", "warn")], width)
    lost = any(unknown_after_halt(view.snap, pod) for pod in view.snap.halt.acks)
    over = (
        view.replay or bool(view.snap.no_halt) or ((bool(view.snap.ended) or view.snap.status == "halted") and not lost)
    )
    out: list[Span] = [(" F9 ", "grey" if over else "alarm"), (" HALT ", "faint" if over else "title")]
    for key, name, enabled in keys:
        part: list[Span] = [
            ("  ", ""),
            (key, "key" if enabled else "faint"),
            (f" {name}", "muted" if enabled else "faint"),
        ]
        if width_of(out) + width_of(part) > width:
            break
        out += part
    return out


def key_at(line: Line, keys: Sequence[tuple[str, str, bool]], x: int) -> tuple[str, str]:
    """The key and name that stand at this cell of a footer; empty for none, and for F9: no click halts a run."""
    texts, at = [text for text, _ in line], 0
    for i, text in enumerate(texts):
        for key, name, _ in keys:
            wide = width_of(line[i : i + 2])
            if text == key and texts[i + 1 : i + 2] == [f" {name}"] and at <= x < at + wide:
                return key, name
        at += width_of(line[i : i + 1])
    return "", ""


class Bar(Panel, can_focus=False):
    """A line or two without border or focus."""

    DEFAULT_CSS = "Bar { height: 1; border: none; padding: 0; overflow: hidden; scrollbar-size: 0 0; }"


class HeaderBar(Bar):
    """Header and stage track."""

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return [header_line(view, width)]

    def show(self, view: View) -> None:
        for name in BADGE:
            self.set_class(stakes(view) == name, f"-{name}")
        super().show(view)


class TrackBar(Bar):
    """The stages."""

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return [track_line(view, width)]


class BannerBar(Bar):
    """What is loud; takes no room when nothing is."""

    grows: ClassVar[bool] = True

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return banner_lines(view, width)

    def show(self, view: View) -> None:
        self.display = bool(banner_lines(view, 80))
        super().show(view)


class FooterBar(Bar):
    """The keys of this moment; a click on one does as the key."""

    class Clicked(Message):
        """The message that this key was clicked."""

        def __init__(self, key: str, name: str) -> None:
            super().__init__()
            self.key, self.name = key, name

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.keys: Sequence[tuple[str, str, bool]] = ()

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return [footer_line(view, width, self.keys)]

    def on_click(self, event: events.Click) -> None:
        """Do as the key under the mouse."""
        key, name = key_at(self.lines[0], self.keys, event.x) if self.lines else ("", "")
        if key and not self.pulled(event):
            self.post_message(self.Clicked(key, name))


__all__ = [
    "BannerBar",
    "Bar",
    "FooterBar",
    "HeaderBar",
    "TrackBar",
    "banner_lines",
    "footer_line",
    "header_line",
    "join",
    "track_line",
]
