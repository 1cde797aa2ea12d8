"""What is true of a run by its journal alone, and what of a screen is not so.

The judge reads events as they were written and shares nothing with the console but the words that it shows: no
snapshot, no condition, no health. ``looked`` names every false green and every false red of one picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.ui.app import UvccApp
from uvcc_console.ui.drawing.paint import Line
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_console.ui.panels.halt_panel import HaltPanel
from uvcc_console.ui.widgets.bars import BannerBar, HeaderBar, TrackBar

DUE_S = 6.0  # a heartbeat is due every 5 s
LOST_WORDS = re.compile(r"\b(lost|silent)\b|\d (s|m|h)\b")
PATH_WORDS = re.compile(r"\b(ssh|relay|lease)\b")
RED_S = 5.0
BROKEN = ("failed", "lost")


@dataclass
class Worker:
    pod: str
    pid: int = 0
    beat: float = 0.0
    step: int = -1
    phase: str = ""
    ended: str = ""  # killed | failed | done


@dataclass
class Truth:
    """What the events say. ``conducted``, ``guarded``: whether conductor and sidecar move, as a test knows."""

    conducted: bool = True
    guarded: bool = True
    newest: float = 0.0
    workers: dict[str, Worker] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)
    paths: dict[tuple[str, str], bool] = field(default_factory=dict)
    engine_run: str = ""
    nonce: str = ""
    mode: str = ""
    drill: bool = False
    proved: tuple[int, int] | None = None
    acks: dict[str, str] = field(default_factory=dict)
    waiting: bool = False
    over: bool = False
    fork: bool = False

    def tell(self, events: Iterable[ev.Event]) -> None:
        """These came next in the journal."""
        for e in events:
            self.newest = max(self.newest, e.ts)
            told = _TOLD.get(type(e))
            if told is not None:
                told(self, e)

    @property
    def step(self) -> int:
        return min((w.step for w in self.workers.values()), default=-1)

    @property
    def halting(self) -> bool:
        return bool(self.nonce) and not self.drill and self.mode in ("hold", "halt") and self.proved is None

    @property
    def unknown(self) -> set[str]:
        return {pod for pod, stage in self.acks.items() if stage == "unknown" and self.mode != "release"}

    def ill(self, coord: str) -> bool:
        """Whether something is wrong with this worker that no silence is needed to see."""
        w = self.workers[coord]
        return w.ended in ("killed", "failed") or self.pods.get(w.pod) in BROKEN or w.pod in self.unknown

    def ills(self, now: float) -> str:
        """What is not well, for whoever reads a finding."""
        names = ("conducted", "guarded", "halting", "waiting", "fork")
        said = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) != (name[-2:] == "ed")]
        return "; ".join(
            said
            + [
                f"{coord} {w.ended or 'goes on'}, pod {self.pods.get(w.pod, '')}, heard {now - w.beat:.1f} s ago"
                for coord, w in self.workers.items()
                if not self.lives(coord, now)
            ]
        )

    def begins(self, coord: str) -> bool:
        """Whether it was started and has said nothing yet."""
        w = self.workers[coord]
        return not w.ended and not self.ill(coord) and not w.beat

    def lives(self, coord: str, now: float) -> bool:
        """Whether it was heard of within the time in which a heartbeat is due, and nothing is known against it."""
        w = self.workers[coord]
        return not w.ended and not self.ill(coord) and bool(w.beat) and now - w.beat <= DUE_S


def _phase(t: Truth, e: ev.PhaseStarted) -> None:
    if e.engine_run != t.engine_run:
        t.workers.clear()
    for w in t.workers.values():  # those of the attempt before; this one's are being started
        w.ended, w.pid, w.beat = "", 0, 0.0
    t.engine_run, t.nonce, t.mode, t.proved, t.waiting = e.engine_run, "", "", None, False
    t.acks = {}


def _worker(t: Truth, e: ev.WorkerProcess) -> None:
    if e.engine_run not in ("", t.engine_run):
        return  # of the smoke, told again when a link comes back
    w = t.workers.setdefault(e.coord, Worker(e.pod))
    if e.state == "started" and e.pid != w.pid:  # another process, which has said nothing yet
        w.pid, w.beat, w.phase = e.pid, 0.0, ""
    w.pod = e.pod
    w.ended = "" if e.state == "started" else "killed" if e.signal else "failed" if e.rc else "done"


def _beat(t: Truth, e: ev.HeartbeatRead) -> None:
    w = t.workers.setdefault(e.coord, Worker(e.pod))
    w.pod, w.beat, w.step, w.phase = e.pod, e.ts, int(e.record.get("step", -1)), str(e.record.get("phase", ""))


def _asked(t: Truth, e: ev.HaltRequested) -> None:
    if e.nonce != t.nonce:
        t.acks = {}
    t.nonce, t.mode, t.drill, t.proved = e.nonce, e.mode, e.drill if e.nonce != t.nonce else t.drill, None


def _ack(t: Truth, e: ev.HaltAck) -> None:
    if e.nonce == t.nonce and not e.gpu:
        t.acks[e.pod] = e.stage


def _done(t: Truth, e: ev.HaltDone) -> None:
    if e.nonce == t.nonce and e.mode in ("halt", "release"):
        t.proved = (e.verified, e.total)


def _stage(t: Truth, e: ev.StageChanged) -> None:
    t.waiting = e.status in ("waiting", "failed")


def _pod(t: Truth, e: ev.PodChanged) -> None:
    t.pods[e.pod] = e.state


def _link(t: Truth, e: ev.LinkChanged) -> None:
    t.paths[e.pod, e.path] = e.up


def _forked(t: Truth, e: ev.ForkDetected) -> None:
    t.fork = True


def _ended(t: Truth, e: ev.RunEnded) -> None:
    t.over = True


_TOLD: dict[type[ev.Event], Callable[[Truth, Any], None]] = {
    ev.PhaseStarted: _phase,
    ev.WorkerProcess: _worker,
    ev.HeartbeatRead: _beat,
    ev.HaltRequested: _asked,
    ev.HaltAck: _ack,
    ev.HaltDone: _done,
    ev.StageChanged: _stage,
    ev.PodChanged: _pod,
    ev.LinkChanged: _link,
    ev.ForkDetected: _forked,
    ev.RunEnded: _ended,
}


# ---- what is shown


def _green(role: str) -> bool:
    return role.split()[0] in ("ok", "green") if role else False


def _red(role: str) -> bool:
    return role.split()[0] in ("bad", "alarm") if role else False


def _text(line: Line) -> str:
    return "".join(text for text, _ in line)


@dataclass
class Look:
    """One picture against the truth at that time: what is green and should not be, what is red and should not be."""

    greens: list[str] = field(default_factory=list)
    reds: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # neither: another number, another halt


class Findings:
    """Greens count at once, reds when they stand for longer than five seconds."""

    def __init__(self) -> None:
        self.bad: list[str] = []
        self.looks = 0
        self._since: dict[str, float] = {}

    def take(self, look: Look, now: float) -> None:
        self.looks += 1
        self.bad += [f"{now:.1f} false green: {what}" for what in look.greens]
        self.bad += [f"{now:.1f} {what}" for what in look.wrong]
        reds = {what.split(",")[0] for what in look.reds}
        self._since = {what: self._since.get(what, now) for what in reds}
        self.bad += [f"{now:.1f} false red: {what}" for what, at in self._since.items() if now - at > RED_S]


def looked(app: UvccApp, t: Truth, now: float) -> Look:
    """``t`` is what the journal held when the picture was painted, at ``now`` by the console's clock."""
    look = Look()
    header = app.main.query_one(HeaderBar).lines[0]
    behind = app.source.behind_s > 2.0
    _first_line(look, header, t, now, behind)
    _rows(look, app.main.query_one(FleetPanel).lines, t, now, behind)
    _lamps(look, app.main.query_one(TrackBar).lines[0], t, behind)
    banner = app.main.query_one(BannerBar)
    loud = " ".join(_text(line) for line in banner.lines) if banner.display else ""
    if "NOBODY CONDUCTS" in loud and (t.conducted or t.over):
        look.reds.append("banner: nobody conducts")
    if not behind:
        _halt(look, app.main.query_one(HaltPanel), t)
    return look


def _first_line(look: Look, header: Line, t: Truth, now: float, behind: bool) -> None:
    word = next(((text, role) for text, role in header if text.isupper() and len(text.split()) > 1), ("", ""))
    live = all(t.lives(c, now) for c in t.workers)
    goes_on = all(t.lives(c, now) or t.begins(c) or w.ended == "done" for c, w in t.workers.items())
    well = goes_on and t.conducted and t.guarded and not (t.halting or t.waiting or t.fork or behind)
    for text, role in header:
        good = live and t.conducted and not behind if "live" in text else well
        if "halted" in text:  # a proof stands whatever else is dead
            good = t.proved is not None and t.proved[0] == t.proved[1]
        if _green(role) and not good and not t.over:
            look.greens.append(f"first line: {text.strip()}, though {t.ills(now)}{', behind' if behind else ''}")
    if _red(word[1]) and well:
        look.reds.append(f"first line: {word[0].strip()}")
    if (found := re.search(r"(\d+)/(\d+) live", _text(header))) and not behind and not t.over:
        alive = sum(t.lives(c, now) for c in t.workers)
        if int(found[1]) > alive and any(_green(role) for text, role in header if "live" in text):
            look.greens.append(f"first line: {found[0]}, true {alive}")
    if (found := re.search(r"step (\d+)/", _text(header))) and not behind and int(found[1]) != max(0, t.step):
        look.wrong.append(f"step {found[1]}, true {t.step}")


def _rows(look: Look, lines: list[Line], t: Truth, now: float, behind: bool) -> None:
    for coord, w in t.workers.items():
        line = next((x for x in lines if w.pod in _text(x).split()), None)
        if line is None:
            continue
        state = [(text, role) for text, role in line if text.strip() and (_green(role) or _red(role))]
        green = [text for text, role in state if _green(role) and "live" in text]
        if green and not behind and not t.lives(coord, now) and not t.over:
            look.greens.append(f"row {coord}: live, last heard {now - w.beat:.1f} s ago, {w.ended or 'no end'}")
        heard = t.begins(coord) or (w.beat and t.newest - w.beat <= DUE_S)
        for text, role in state:
            if _red(role) and (path := PATH_WORDS.search(text)):
                if t.paths.get((w.pod, path[1])):
                    look.reds.append(f"row {coord}: {text.strip()}")
                continue
            if t.ill(coord):  # a worker that was killed is red, with whatever age it has reached
                continue
            if _red(role) and LOST_WORDS.search(text) and (heard or behind):
                look.reds.append(
                    f"row {coord}: {text.strip()}, heard {t.newest - w.beat:.1f} s before the newest event"
                )
            elif _red(role) and not LOST_WORDS.search(text) and "live" not in text:
                look.reds.append(f"row {coord}: {text.strip()}")


def _lamps(look: Look, track: Line, t: Truth, behind: bool) -> None:
    if t.over:
        return
    for i, (text, role) in enumerate(track[1:], 1):
        name = track[i - 1][0].strip()
        if name in ("cond", "conductor", "haltd", "sidecar"):
            true = t.conducted if name.startswith("cond") else t.guarded
            if _green(role) and not true:
                look.greens.append(f"lamp {name}")
            if _red(role) and true:
                look.reds.append(f"lamp {name}: {text}")
        elif name in {path for _, path in t.paths} and not behind:
            ups = [
                up
                for (pod, path), up in t.paths.items()
                if path == name and t.pods.get(pod) in ("agent", "ready", "lost")
            ]
            if _green(role) and not all(ups):
                look.greens.append(f"lamp {name}")
            if _red(role) and any(ups):
                look.reds.append(f"lamp {name}: {text}")


def _halt(look: Look, panel: HaltPanel, t: Truth) -> None:
    if not panel.display:
        if t.halting and not t.over:
            look.wrong.append("a halt is under way and its panel is not shown")
        return
    shown = panel.heading(panel.view)[1]
    if t.nonce and t.nonce[:6] not in shown:
        look.wrong.append(f"panel of another halt: {shown}, true {t.nonce}")
        return
    if not panel.lines:  # it has just come, and has no size before the next picture
        return
    head = _text(panel.lines[0])
    if found := re.search(r"(\d+)/(\d+) verified", head):
        if t.proved is None or t.proved != (int(found[1]), int(found[2])):
            look.greens.append(f"HALT panel: {found[0]}, true {t.proved}")
    elif any(_green(role) for text, role in panel.lines[0] if "verified" in text):
        look.greens.append("HALT panel is green")
    for pod, stage in t.acks.items():
        line = next((x for x in panel.lines[1:] if pod in _text(x).split()), None)
        if line is not None and stage == "unknown" and any(_green(role) for _, role in line):
            look.greens.append(f"HALT panel: {pod} is unknown")
        if line is not None and stage != "unknown" and any(_red(role) and "UNKNOWN" in text for text, role in line):
            look.reds.append(f"HALT panel: {pod} is {stage}")
