"""What one frame is drawn from, and the judgements every panel shares: health of a worker, stakes, status word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from uvcc_console.core import pod_states
from uvcc_console.core.alerts.expense import pace
from uvcc_console.core.answers.holding import HOLD_S as HOLD_S
from uvcc_console.core.answers.holding import holding as holding
from uvcc_console.core.answers.shown import CHANGED, REFUTED, UNCHECKED, VERIFIED, Changes, Shown, shown
from uvcc_console.core.folding import vitals
from uvcc_console.core.series import Series
from uvcc_console.core.snapshot import EMPTY, PodView, Snapshot, WorkerView
from uvcc_console.ui.drawing.glyphs import UNICODE, Glyphs
from uvcc_console.ui.judging.filters import Filter
from uvcc_console.ui.judging.lamps import Lamp
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.rollout_phases import PHASES
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files.waiting import Waiting

LATE_S = 6.0  # a heartbeat is due at least every 5 s
SILENT_S = 15.0
LOST_S = 60.0
NOT_MADE = "not made"
WAITS = "waits for "
"""How the word of a worker begins that waits for somebody; whom, and for how long, follows."""
NEWS_S = 5.9  # the conductor writes something every 5 s: when it does not, silence says nothing about workers


@dataclass(frozen=True, slots=True)
class View:
    """One frame: the snapshot, the time to measure ages against, and how the operator looks at it."""

    snap: Snapshot = field(default_factory=Snapshot)
    now: float = 0.0
    glyphs: Glyphs = UNICODE
    readonly: bool = False
    replay: str = ""
    filter: Filter = field(default_factory=Filter)
    run_dir: str = ""
    utc: bool = False
    conductor: Lamp = field(default_factory=Lamp)
    sidecar: Lamp = field(default_factory=Lamp)
    behind_s: float = 0.0
    changed: Changes = field(default_factory=lambda: EMPTY)
    pod: str = ""  # that the pod page is about
    crumbs: tuple[str, ...] = ()  # the way from the overview to what is shown

    @property
    def heard(self) -> float:
        """The time that ages of heartbeats are measured against: not much later than the last event of all."""
        return min(self.now, self.snap.updated + NEWS_S) if self.snap.updated else self.now

    @property
    def unheard(self) -> bool:
        """Whether nothing at all was written for longer than a conductor takes to write something, though pods live."""
        s = self.snap
        if self.replay or s.ended or not s.updated or self.now - s.updated <= NEWS_S:
            return False
        return bool(s.workers) or any(p.state not in pod_states.ABSENT for p in s.pods.values())

    @property
    def stale(self) -> bool:
        """Whether what is known of the workers is old for reasons that are not theirs: then nothing of it is green."""
        return bool(self.behind_s) or self.unheard or not (self.conductor.well or self.snap.ended)

    def result(self, phase: str) -> Shown:
        """A phase's result as every panel shows it."""
        return shown(self.snap, phase, self.changed)


@dataclass(frozen=True, slots=True)
class Health:
    """How a worker does: the lowest ``rank`` is worst. Glyph, word and colour always come together.

    ``kind``: killed | failed | unknown | lost | silent | late | held | halted | live | starting | done, to count by.
    """

    rank: int
    role: str
    glyph: str
    word: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One worker, or one pod that has no worker yet."""

    pod: str
    party: int
    replica: int
    stage: int
    tensor: int
    coord: str
    phase: str
    step: int
    age: float | None
    root: str
    epoch: int
    health: Health
    beat: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    pod_state: str = ""
    vitals: Mapping[str, float] = field(default_factory=lambda: EMPTY)

    @property
    def fields(self) -> dict[str, str | float]:
        """What a filter can ask for."""
        known: dict[str, str | float] = {
            "pod": self.pod,
            "party": self.party,
            "replica": self.replica,
            "stage": self.stage,
            "tensor": self.tensor,
            "coord": self.coord,
            "phase": self.phase,
            "step": self.step,
            "age": self.age if self.age is not None else -1.0,
            "state": self.health.word,
            "root": self.root,
        }
        for key in ("loss", "toks_per_s", "samples_per_s", "mem_mib", "rank", "waiting_on", "dt_fetch_s"):
            value = self.beat.get(key)
            if isinstance(value, (int, float, str)):
                known[key] = value
        known.update(self.vitals)
        return known


def _vitals(pod: PodView | None, series: Mapping[str, Series] | None = None) -> Mapping[str, float]:
    """A pod's vital signs and its worker's newest step time, by the names of their columns."""
    if pod is None:
        return EMPTY
    steps = series.get("step_s") if series else None
    memory = vitals.memory_mib(pod)
    found = {
        "cpu": pod.cpu.last[1] * 100 if pod.cpu.last else None,
        "gpu": vitals.utilisation(pod),
        "gmem": 100 * memory[0] / memory[1] if memory and memory[1] else None,
        "temp": vitals.celsius(pod),
        "power": vitals.watts(pod),
        "step_s": steps.last[1] if steps is not None and steps.last else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def coord_parts(coord: str) -> tuple[int, int, int, int]:
    """(party, replica, stage, tensor) of ``p0r1s0t0``; -1 where the text is not a coordinate."""
    try:
        read = Coord.parse(coord)
    except ConfigError:
        return -1, -1, -1, -1
    return read.party, read.replica, read.stage, read.tensor


def party_role(party: int) -> str:
    """The colour of a party."""
    return f"p{party}" if 0 <= party < 3 else "muted"


def _exited(w: WorkerView, g: Glyphs) -> Health:
    if w.signal:  # what was killed is the cause; those that gave up afterwards come behind it
        return Health(-1, "bad", g.fail, w.signal, "killed")
    if w.rc:
        return Health(0, "bad", g.fail, f"exit {w.rc}", "failed")
    if w.phase == "halted":
        return Health(6, "warn", g.wait, "halted", "halted")
    return Health(9, "muted", g.ok, "done", "done")


def unknown_after_halt(snap: Snapshot, pod: str) -> bool:
    """Whether a halt was asked for and this pod has proved nothing: treat it as running and costing."""
    ack = snap.halt.acks.get(pod)
    return ack is not None and ack[0] == "unknown" and snap.halt.mode != "release"


def halt_proven(snap: Snapshot, pod: str) -> bool:
    """Whether this pod has proved that its workers halted: nobody may read what they wrote where none conducts."""
    ack = snap.halt.acks.get(pod)
    return ack is not None and ack[0] in ("halted", "gone") and snap.halt.mode == "halt" and not snap.halt.drill


def worker_health(w: WorkerView, snap: Snapshot, now: float, g: Glyphs, *, behind: bool = False) -> Health:
    """Judge one worker by its process, its phase and the age of its heartbeat; no age counts while we are behind."""
    if unknown_after_halt(snap, w.pod):
        return Health(0, "bad", g.unknown, "unknown", "unknown")
    if w.state == "exited":
        return _exited(w, g)
    if snap.ended:
        return Health(8, "muted", g.dot, "ended", "done")
    if w.phase == "halted" or halt_proven(snap, w.pod):
        return Health(6, "warn", g.wait, "halted", "halted")
    if not w.beat_ts:
        return Health(4, "muted", g.todo, "starting", "starting")
    if w.phase == "done":
        return Health(9, "muted", g.ok, "done", "done")
    age = 0.0 if behind else now - w.beat_ts
    if snap.no_halt and age > SILENT_S:  # a table that is not written to tells nothing of whoever writes it
        return Health(2, "warn", g.late, "no news", "late")
    if age > LOST_S:
        return Health(1, "bad", g.fail, "lost", "lost")
    if age > SILENT_S:
        return Health(1, "bad", g.silent, "silent", "silent")
    if age > LATE_S:
        return Health(2, "warn", g.late, "late", "late")
    if w.phase == "hold":
        return Health(5, "warn", g.wait, "held", "held")
    if (waiting := Waiting.of(w.beat)) is not None:
        return Health(3, "warn", g.late, f"{WAITS}{waiting}", "live")
    return Health(7, "ok", g.live, "live", "live")


def pod_health(pod: PodView, g: Glyphs, snap: Snapshot) -> Health:
    """Judge a pod that runs no worker. Nobody creates it any more where the stage that was to do so has failed."""
    if pod.state == pod_states.CREATING and snap.stage is not None and snap.stage.status == "failed":
        return Health(0, "bad", g.fail, NOT_MADE)
    if pod.state in pod_states.BROKEN:
        return Health(0, "bad", g.fail, pod.state)
    if pod.state in pod_states.CHANGING:
        return Health(4, "warn", g.late, pod.state)
    if pod.state in pod_states.REACHED:
        return Health(7, "ok", g.live, pod.state)
    return Health(8, "muted", g.todo, pod.state or "planned")


def cause(snap: Snapshot) -> str:
    """The pod whose worker ended first by a signal, else the pod that was lost; what others did follows from it."""
    killed = [w for w in snap.workers.values() if w.state == "exited" and w.signal]
    if killed:
        return min(killed, key=lambda w: w.exited).pod
    lost = [w.pod for w in snap.workers.values() if (p := snap.pods.get(w.pod)) and p.state in pod_states.BROKEN]
    return lost[0] if lost else ""


def _faded(health: Health, view: View) -> Health:
    """What was well when it was last heard of is not shown as well now where the picture is old."""
    return replace(health, role="muted") if health.role == "ok" and view.stale else health


_newest: tuple[View, Sequence[FleetRow]] = (View(), ())


def fleet_rows(view: View) -> Sequence[FleetRow]:
    """Every worker and every pod without one, in the order (replica, party, stage, tensor).

    Nearly every panel asks for them, so those of the newest frame are kept.
    """
    global _newest
    known, rows = _newest
    if known is not view:
        rows = _judged_rows(view)
        _newest = (view, rows)
    return rows


def _judged_rows(view: View) -> Sequence[FleetRow]:
    snap, g = view.snap, view.glyphs
    first = cause(snap)
    rows: list[FleetRow] = []
    busy: set[str] = set()
    for w in snap.workers.values():
        p, r, s, t = coord_parts(w.coord)
        pod = snap.pods.get(w.pod)
        gone = pod is not None and pod.state in pod_states.BROKEN
        health = worker_health(w, snap, view.heard, g, behind=bool(view.behind_s))
        if gone and pod:
            health = Health(-2 if w.pod == first else -1, "bad", g.fail, f"pod {pod.state}", "lost")
        elif health.rank < 0 and first and w.pod != first:
            health = replace(health, rank=0)
        elif health.kind == "failed" and first and w.pod != first:
            health = replace(health, word=f"stopped because of {first}")
        over = bool(snap.ended) or (w.state == "exited" and health.rank > 1)
        age = max(0.0, view.heard - w.beat_ts) if w.beat_ts and not over else None
        state = pod.state if pod else ""
        place = (w.pod, p, r, s, t, w.coord, w.phase, w.step, age, w.root, w.root_epoch)
        signs = _vitals(pod, snap.series.get(w.coord))
        rows.append(FleetRow(*place, _faded(health, view), w.beat, state, signs))
        busy.add(w.pod)
    for pod in snap.pods.values():
        if pod.pod not in busy:
            health = _faded(pod_health(pod, g, snap), view)
            here = (pod.pod, pod.party, pod.replica, 0, 0, "")
            state = "" if health.word == NOT_MADE else pod.state
            rows.append(FleetRow(*here, "", -1, None, "", -1, health, EMPTY, state, _vitals(pod)))
    rows.sort(key=lambda row: (row.replica, row.party, row.stage, row.tensor, row.pod))
    return tuple(rows)


def stakes(view: View) -> str:
    """What a mistake would cost here: full | smoke | replay | plain. Colours the frame."""
    if view.replay:
        return "replay"
    if view.snap.ended or not view.snap.phase:
        return "plain"
    return view.snap.phase if view.snap.phase in PHASES else "plain"


def halting(snap: Snapshot) -> bool:
    """Whether a halt (or a hold that ran out) is under way and not finished."""
    h = snap.halt
    return bool(h.nonce) and not h.drill and h.mode in ("hold", "halt") and not (h.done and h.mode == "halt")


def result_mark(found: Shown, g: Glyphs) -> tuple[str, str, str]:
    """(glyph, words, role) for a result's mark."""
    return {
        VERIFIED: (g.ok, "VERIFIED", "green"),
        CHANGED: (g.fail, "CHANGED SINCE", "alarm"),
        REFUTED: (g.fail, "NOT VERIFIED", "alarm"),
        UNCHECKED: (g.todo, "NOT RECHECKED", "amber"),
    }.get(found.mark, (g.todo, "not verified yet", "amber"))


def result_word(found: Shown, g: Glyphs) -> tuple[str, str]:
    """(glyph and words, role) for a result's mark."""
    glyph, words, role = result_mark(found, g)
    return f"{glyph} {words}", role


def eta(snap: Snapshot, now: float) -> float | None:
    """Seconds until the phase's last step at its own average pace; None before there is a pace."""
    left = snap.steps_planned - snap.step
    if left <= 0 or snap.step < 1:
        return None
    batch = snap.profile.get("job", {}).get("batch") if isinstance(snap.profile.get("job"), Mapping) else None
    for by_name in snap.series.values():
        rate = by_name.get("samples_per_s")
        if rate and rate.last and batch and rate.last[1] > 0:
            recent = rate.recent(20)
            return left * float(batch) * len(recent) / max(1e-9, sum(recent))
    if (a_step := pace(snap)) is not None:
        return left * a_step
    stage = snap.stage
    if snap.attempt or stage is None or not stage.started or now <= stage.started:
        return None
    return left * (now - stage.started) / snap.step
