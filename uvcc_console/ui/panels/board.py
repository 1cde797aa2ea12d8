"""The board before training: how far all pods are inside each stage, and every pod as it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from uvcc_console.core import pod_states
from uvcc_console.core.snapshot import PodView, Snapshot
from uvcc_console.ui.drawing.format import duration
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, wrap
from uvcc_console.ui.drawing.spark import part_bar
from uvcc_console.ui.judging.view import View, fleet_rows, party_role, pod_health
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.text import counted

_HOLDS: Final = ("held", "halted", "gone", "released")


def expected(s: Snapshot) -> int:
    """Workers that the phase will have here: a domain of its own sees its own."""
    parties = 1 if s.apart else PARTIES if s.proves else max(1, len({p.party for p in s.pods.values()}))
    return parties * max(1, s.replicas) * max(1, s.pipeline_stages) * max(1, s.tensor)


def planned(s: Snapshot) -> int:
    """Pods that the plan has, before the first of them is there; 0 where that is not known."""
    return (1 if s.apart else PARTIES) * s.replicas if s.proves else 1 if s.run else 0


def progress(view: View) -> list[tuple[str, int, int, str]]:
    """(stage, how many are through, of how many, what they are then) for each stage that pods go through one by one."""
    s = view.snap
    pods = [p for p in s.pods.values() if p.state != "gone"]
    n = max(len(pods), planned(s))
    rented = sum(p.state in pod_states.RENTED for p in pods)
    reached = sum(p.state in pod_states.REACHED for p in pods)
    agents = sum(p.state == "agent" for p in pods)
    wired = sum(bool(p.paths) and all(up for up, _ in p.paths.values()) for p in pods)
    found = [
        ("provision", rented, n, "rented"),
        ("", reached, n, "reached over SSH"),
        ("bootstrap", agents, n, "agents up"),
        ("", wired, n, "with every path for a halt"),
    ]
    if s.followed:  # nothing is rented, and no agent comes there
        found = [("connect", reached, n, "reached")]
    found += _looked_at(s, pods, n)
    if s.phase and s.engine_run:
        rows = [r for r in fleet_rows(view) if r.coord]
        total = max(len(rows), expected(s))
        started = sum(w.state in ("started", "exited") for w in s.workers.values())
        beating = sum(bool(w.beat_ts) for w in s.workers.values())
        found += [(s.phase, started, total, "workers started"), ("", beating, total, "first heartbeat")]
    return [*found, *_drilled(s, n)]


def _looked_at(s: Snapshot, pods: Sequence[PodView], n: int) -> list[tuple[str, int, int, str]]:
    """How many pods preflight has probed, of a run that has one; all once it is over."""
    stage = next((v for v in s.stages if v.name == "preflight"), None)
    if stage is None:
        return []
    over = stage.status == "ok"
    return [("preflight", n if over else sum(p.detail == pod_states.LOOKED_AT for p in pods), n, "looked at")]


def _drilled(s: Snapshot, n: int) -> list[tuple[str, int, int, str]]:
    """How many pods hold, or have held, for the drill; all once it is over, nothing before it has begun."""
    stage = next((v for v in s.stages if v.name == "drill" and v.status != "pending"), None)
    if stage is None or (stage.status != "ok" and not s.halt.drill):
        return []
    held = sum(ack[0] in _HOLDS for ack in s.halt.acks.values())
    return [("drill", n if stage.status == "ok" else held, n, "held")]


def stage_of(name: str, view: View) -> tuple[str, str]:
    """Sign and role of a stage; of the part of one nothing."""
    stage = next((v for v in view.snap.stages if v.name == name), None)
    if stage is None:
        return " ", "muted"
    roles = {"ok": "ok", "running": "accent bold", "waiting": "warn bold", "failed": "bad"}
    return view.glyphs.stage(stage.status), roles.get(stage.status, "faint")


def progress_lines(view: View, width: int) -> list[Line]:
    """A bar for each part of a stage."""
    lines: list[Line] = []
    for name, done, total, words in progress(view):
        sign, role = stage_of(name, view)
        full = done >= total
        wide = max(6, min(30, width - 48))
        line: list[Span] = [(f"{sign} ", role), (fit(name, 10), role if name else "muted")]
        line += [(part_bar(done / total if total else 0.0, wide, view.glyphs), "ok" if full else "accent")]
        line += [(f" {done:>3}/{total:<3} ", "ok" if full else "title"), (words, "muted")]
        lines.append(cut(line, width))
    return lines


def _cell(view: View, pod: PodView, width: int) -> list[Span]:
    health = pod_health(pod, view.glyphs, view.snap)
    word = f"{health.word}: {clean(pod.detail)}" if pod.detail and health.rank == 0 else health.word
    name = fit(clean(pod.pod), min(10, max(5, width // 3)), more=view.glyphs.more)
    return [
        (f"{health.glyph} ", health.role),
        (name + " ", party_role(pod.party)),
        (fit(word, width - len(name) - 4), "muted"),
    ]


def pod_cells(view: View, pods: Sequence[PodView], width: int, rows: int) -> list[Line]:
    """Every pod, what is wrong first, in as many columns as it takes."""
    order = sorted(pods, key=lambda p: (pod_health(p, view.glyphs, view.snap).rank, p.replica, p.party))
    columns = max(1, min(-(-len(order) // max(1, rows)), width // 18))
    columns = max(columns, min(3, width // 24)) if len(order) >= 3 else columns
    each = (width - 2 * (columns - 1)) // columns
    down = -(-len(order) // columns)
    lines: list[Line] = []
    for y in range(down):
        line: list[Span] = []
        for x in range(columns):
            if (at := y * columns + x) < len(order):
                line += _cell(view, order[at], each)
                line.append(("  ", ""))
        lines.append(cut(line[:-1], width))
    return lines


def board_lines(view: View, width: int, height: int) -> list[Line]:
    """What there is to see before the first step; nothing before there are pods."""
    s = view.snap
    pods = [p for p in s.pods.values() if p.state != "gone"]
    if not s.run:
        return []
    bars = progress_lines(view, width)
    stage = s.stage
    took = duration(max(0.0, (stage.ended or view.now) - stage.started)) if stage and stage.started else ""
    what = f"{stage.name} {stage.status}" if stage else "planned"
    there = counted(len(pods), "pod") if pods else f"{counted(planned(s), 'pod')} planned,"
    where = "the folder" if s.followed else f"{there} before training"
    head: Line = [(f"{where}: ", "muted"), (what, "title"), (f" {took}", "muted")]
    # why it takes so long, which nothing else shows on a small screen: stock that is waited for, a price too high
    why = stage is not None and stage.status == "running" and stage.detail
    told = wrap([(clean(why), "warn")], width)[:2] if why else []
    if height and len(bars) + len(told) + 1 > height:  # what is through already is told by what is not
        through = sum(done >= total for _, done, total, _ in progress(view))
        most = max(1, height - len(told) - 1)
        bars = bars[max(0, min(through, len(bars) - most)) :]
    room = height - len(bars) - len(told) - 3
    cells = pod_cells(view, pods, width, max(1, room)) if room > 0 else []
    return [cut(head, width), *told, *bars, [("", "")], *cells][: max(1, height)]
