"""What is true of a run now, and what follows from it: the one judgement for first line, banners, advice and keys.

Nothing is green that is not so. While the picture is behind, while nobody conducts or while nothing is heard at all,
what is known of the workers is old: it is shown as old, never as death.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from uvcc_console.core import pod_states
from uvcc_console.core.answers.shown import final
from uvcc_console.core.snapshot import AGENT_PATHS, PodView, Snapshot
from uvcc_console.runs.disk_space import cure
from uvcc_console.ui.drawing.format import duration
from uvcc_console.ui.drawing.paint import Span, clean
from uvcc_console.ui.judging.lamps import DEAD, FROZEN, MOVING, STARTING, Lamp, needs_sidecar
from uvcc_console.ui.judging.view import (
    NEWS_S,
    View,
    fleet_rows,
    halting,
    holding,
    result_word,
    unknown_after_halt,
)
from uvcc_engine.contract.parsing.untrusted import as_float
from uvcc_engine.contract.text import counted

OUT_S: Final = 3.0  # a channel that breaks is mostly back within a second or two
QUIET_S: Final = 15.0  # the conductor writes the cost every 5 s
STEP_LATE_S: Final = 10.0
_BAD: Final = ("killed", "failed", "lost", "silent", "unknown")


@dataclass(frozen=True, slots=True)
class Judgement:
    """``name`` of the condition; why a resume is impossible now (empty: it is possible); ``advice`` on what to do."""

    name: str
    resume: str = ""
    advice: str = ""


def unknown_pods(s: Snapshot) -> int:
    """Pods that were told to halt and have proved nothing."""
    return sum(unknown_after_halt(s, pod) for pod in s.halt.acks)


def undecided(s: Snapshot) -> bool:
    """Whether a stage waits for the operator."""
    return s.stage is not None and s.stage.status in ("waiting", "failed")


def cut_off(s: Snapshot) -> list[PodView]:
    """Pods whose agent cannot be spoken to, for whatever reason, the one that has been so for longest first."""
    found = [p for p in s.pods.values() if p.state in pod_states.ATTACHABLE and _down(p) is not None]
    return sorted(found, key=lambda p: (_down(p) or 0.0, p.pod))


def _down(pod: PodView) -> float | None:
    """Since when the path through its agent is down; None where it is up or was never there."""
    return next((since for name in AGENT_PATHS for up, since in [pod.paths.get(name, (True, 0.0))] if not up), None)


def only_copies(s: Snapshot) -> bool:
    """Whether the pods hold the only checkpoints that a language model's full run has."""
    full_lm = bool(s.engine_run) and s.job_kind == "lm" and s.phase == "full"
    return full_lm and bool(s.checkpoints) and not s.home


def judge(s: Snapshot, *, conductor: Lamp, behind_s: float = 0.0) -> Judgement:
    """The run's condition as far as keys depend on it."""
    if s.ended:
        why = f"the run has ended ({s.status.replace('_', ' ')}); start a new one"
        return Judgement("ended", why)
    if behind_s:
        why = f"catching up, {duration(behind_s)} behind: wait for the present state"
        return Judgement("catching_up", why, "F9 halts at once, whatever is shown")
    if conductor.state == FROZEN:
        why = f"the conductor is frozen ({conductor.words})"
        return Judgement("frozen", why, f"kill -CONT lets it go on, uvcc teardown {s.run} ends it and the run")
    if conductor.state == DEAD:
        return Judgement("unconducted", "", "r takes it up, t tears it down")
    if undecided(s):
        if away := cut_off(s):
            who = away[0].pod if len(away) == 1 else f"{len(away)} pods"
            again = "" if only_copies(s) or s.followed else ", P replaces a pod"
            answers = "answers" if len(away) == 1 else "answer"
            return Judgement("undecided", "", f"r resumes once {who} {answers} again{again}, t tears down")
        return Judgement("undecided", "", "r resumes, t tears down")
    lost = unknown_pods(s) if s.status == "halted" else 0
    if lost:
        who = f"{lost} pods have" if lost > 1 else "a pod has"
        why = f"{who} not proved that they stopped: F9 asks again, t tears down"
        return Judgement("unknown", why, "F9 asks again, t tears down; until then they may run and cost")
    if s.status == "halted":
        return Judgement("halted", "halted; the conductor closes the stage first, then r resumes", "t tears down")
    if halting(s):
        return Judgement("halting", "a halt is under way: wait for its proof")
    if conductor.state == STARTING:
        return Judgement("starting", "its conductor is just starting")
    return Judgement("running", f"the run is {s.status.replace('_', ' ')}, not halted")


def quiet_s(view: View) -> float:
    """For how long the journal of a run that goes on has taken nothing; 0 where that is as it should be.

    Where no pod lives (machines are waited for) nothing ticks: whether its conductor moves is told by the lamp.
    """
    s = view.snap
    silent = view.now - s.updated
    running = s.status == "running" and not undecided(s) and not view.replay and not view.behind_s
    lives = any(p.state not in pod_states.ABSENT for p in s.pods.values()) or bool(s.workers)
    return silent if running and lives and s.updated and silent > QUIET_S else 0.0


# ---- health


def tally(view: View) -> tuple[Counter[str], int]:
    """How many workers do how, and how many there are."""
    kinds = Counter(row.health.kind for row in fleet_rows(view) if row.coord)
    return kinds, sum(kinds.values())


def stalled_s(view: View) -> float:
    """For how long no worker has made a step though some are to; 0 while steps come."""
    s = view.snap
    training = [w for w in s.workers.values() if w.phase == "train" and w.step_ts]
    if not training or s.status != "running" or s.ended or halting(s):
        return 0.0
    silent = view.now - max(w.step_ts for w in training)
    pace = next((line.recent(20) for by in s.series.values() if (line := by.get("step_s"))), None)
    limit = max(STEP_LATE_S, 4 * sum(pace) / len(pace)) if pace else STEP_LATE_S
    return silent if silent > limit else 0.0


def health_spans(view: View) -> list[Span]:
    """``24/24 live``, ``3 silent``, ``halted 2/3``, ``2/3 pods``: in a word or two, green only where it is so."""
    s = view.snap
    kinds, total = tally(view)
    if s.ended:
        return []
    if not total:
        pods = [p for p in s.pods.values() if p.state != "gone"]
        up = sum(p.state in pod_states.REACHED for p in pods)
        broken = sum(p.state in pod_states.BROKEN for p in pods)
        well = bool(pods) and up == len(pods) and not view.stale
        out: list[Span] = [(f"{up}/{counted(len(pods), 'pod')}", "ok" if well else "muted")] if pods else []
        return [*out, (f" {broken} failed", "bad")] if broken else out
    bad: list[Span] = [(f" {kinds[kind]} {kind}", "bad") for kind in _BAD if kinds[kind]]
    if s.status == "halted" or (halting(s) and kinds["halted"]):
        stopped = kinds["halted"] + kinds["done"]
        proved = s.halt.done and s.halt.verified == s.halt.total and stopped == total
        return [(f"halted {stopped}/{total}", "ok" if proved else "warn"), *bad]
    if kinds["held"]:
        return [(f"held {kinds['held']}/{total}", "warn"), *bad]
    if kinds["done"] and kinds["done"] == total:
        return [(f"{total}/{total} done", "muted")]
    if kinds["starting"] == total:
        return [(f"0/{total} live", "muted")]
    live = kinds["live"]
    role = "muted" if view.stale else "ok" if live == total else "warn"
    late: list[Span] = [(f" {kinds['late']} late", "warn")] if kinds["late"] else []
    return [(f"{live}/{total} live", role), *bad, *late]


def status_word(view: View) -> tuple[str, str]:
    """(word, role) that sums the run up."""
    s, g = view.snap, view.glyphs
    if s.fork:
        return f"{g.differ} FORK", "alarm"
    if view.behind_s and not s.ended:
        return f"{g.late} CATCHING UP, {duration(view.behind_s)} behind", "amber"
    if holding(s, view.now) is not None:
        return f"{g.wait} HOLD", "amber"
    if halting(s):
        return f"{g.wait} HALTING", "amber"
    if s.status == "failed":
        return f"{g.fail} FAILED", "alarm"
    if s.status == "halted":
        unknown = unknown_pods(s)
        return (f"{g.unknown} {unknown} UNKNOWN", "alarm") if unknown else (f"{g.wait} HALTED", "amber")
    if s.status == "unreadable":
        return f"{g.fail} UNREADABLE", "alarm"
    if s.status == "torn_down":
        return f"{g.skip} TORN DOWN", "grey"
    if s.status == "ok":
        return result_word(final(s, view.changed), g) if s.verdicts else (f"{g.ok} DONE", "grey")
    stage = s.stage
    if stage and stage.status == "waiting":
        return f"{g.wait} WAITS FOR YOU", "amber"
    if view.conductor.state == FROZEN and not view.replay:
        return f"{g.fail} FROZEN", "alarm"
    if view.conductor.state == DEAD and not view.replay:
        return f"{g.fail} UNCONDUCTED", "alarm"
    if quiet := quiet_s(view):
        return f"{g.late} NO NEWS {duration(quiet)}", "amber"
    if s.status == "running":
        return _running(view)
    return f"{g.todo} {s.status.upper()}", "muted"


def _running(view: View) -> tuple[str, str]:
    g, (kinds, _) = view.glyphs, tally(view)
    if any(kinds[kind] for kind in _BAD):
        return f"{g.fail} RUNNING", "alarm"
    unguarded = needs_sidecar(view.snap) and not view.sidecar.well
    if kinds["late"] or view.unheard or _out(view) or stalled_s(view) or unguarded:
        return f"{g.late} RUNNING", "amber"
    return f"{g.live} RUNNING", "ok bold"


# ---- what is loud


def _out(view: View) -> list[PodView]:
    """Pods that have been out of reach for longer than a channel takes to come back."""
    if view.behind_s or not view.conductor.well or view.snap.status == "halted":
        return []
    return [p for p in cut_off(view.snap) if view.now - (_down(p) or 0.0) > OUT_S]


def _out_of_reach(view: View, away: list[PodView]) -> tuple[str, str, str]:
    """What is said of pods that are out of reach: for how long, why, whether a halt comes through, what to do."""
    s, first = view.snap, away[0]
    who = f"{clean(first.pod)} IS" if len(away) == 1 else f"{len(away)} PODS ARE"
    longest = "" if len(away) == 1 else f", {clean(first.pod)}"
    why = f": {clean(first.trouble)}" if first.trouble else ""
    text = f"{view.glyphs.fail} {who} OUT OF REACH{longest} for {duration(view.now - (_down(first) or 0.0))}{why}"
    ways = [name for name in first.paths if name != "lease"]  # what nobody sends: the pod's own last resort
    left = [name for name in ways if all(p.paths.get(name, (False, 0.0))[0] for p in away)]
    it = "it" if len(away) == 1 else "them"
    parts = [] if s.no_halt else [f"F9 halts {it} by {', '.join(left)}" if left else f"no halt comes to {it} now"]
    parts += [] if s.followed or only_copies(s) else [f"P replaces {'it' if len(away) == 1 else 'a pod'}"]
    return "alarm", text, "; ".join(parts) or "it is asked again and again"


def unwritable(view: View) -> bool:
    """Whether nothing new can be written down: what is done meanwhile, a halt with it, cannot be seen here."""
    return view.conductor.state == MOVING and bool(view.conductor.words)


def _who_ends_it(view: View) -> str:
    """What becomes of a run that nobody conducts: a sidecar that lives renews the pods' leases, and then ends it."""
    if not view.sidecar.well:
        return "its pods go on until their lease ends"
    limits = view.snap.profile.get("limits")
    wait = as_float(limits.get("wait")) if isinstance(limits, Mapping) else None
    soon = view.snap.apart or wait is None  # no other conductor can take up one domain's part of a run
    if soon or wait is None:
        return "its sidecar ends it soon"
    told = next((a.ts for a in reversed(view.snap.alerts) if (a.alert, a.level) == ("conductor", "error")), None)
    if told is None:
        return f"its sidecar ends it after {duration(wait)}"
    return f"its sidecar ends it in {duration(max(0.0, told + wait - view.now))}"


def warnings(view: View) -> list[tuple[str, str, str]]:
    """(role, text, hint) of what is wrong around the run, loudest first."""
    s, g = view.snap, view.glyphs
    if s.ended or view.replay:
        return []
    out: list[tuple[str, str, str]] = []
    now = judge(s, conductor=view.conductor, behind_s=view.behind_s)
    if now.name == "unconducted":
        out.append(("alarm", f"{g.fail} NOBODY CONDUCTS THIS RUN: {_who_ends_it(view)}", now.advice))
    elif now.name == "frozen":
        out.append(("alarm", f"{g.fail} THE CONDUCTOR IS FROZEN: {clean(view.conductor.words)}", now.advice))
    elif unwritable(view):
        out.append(("alarm", f"{g.fail} {clean(view.conductor.words)}", cure(view.conductor.words)))
    lost = unknown_pods(s) if s.status == "halted" and not view.behind_s else 0
    if lost:
        text = f"{g.unknown} {lost} of {counted(len(s.pods), 'pod')} proved nothing of the halt"
        hint = now.advice if now.name == "unknown" else "F9 asks again; until then they may run and cost"
        out.append(("alarm", text, hint))
    if away := _out(view):
        out.append(_out_of_reach(view, away))
    if needs_sidecar(s) and not view.sidecar.well:
        what = "IS FROZEN" if view.sidecar.state == FROZEN else "IS DEAD"
        hint = "the conductor starts another" if view.conductor.state == MOVING else "F9 starts another"
        out.append(("alarm", f"{g.fail} THE HALT SIDECAR {what}", hint))
    return out


__all__ = [
    "NEWS_S",
    "Judgement",
    "health_spans",
    "judge",
    "quiet_s",
    "stalled_s",
    "status_word",
    "tally",
    "undecided",
    "unknown_pods",
    "unwritable",
    "warnings",
]
