"""NCCL & plane: who waits for whom, the last collective of every worker, flight recorders, the paths to each pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from uvcc_console.core.alerts.progress import collective
from uvcc_console.core.folding import pairs
from uvcc_console.ui.drawing.format import age, clock, duration, volume
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, wrap
from uvcc_console.ui.judging.view import FleetRow, View, coord_parts, fleet_rows, party_role
from uvcc_console.ui.widgets.log_lines import source_word
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.ring import RingLog
from uvcc_console.ui.widgets.table import Column, body, choose, head
from uvcc_engine.contract.run_files.event_names import Area
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.contract.text import counted

PATHS = ("ssh", "relay", "peer", "lease", "api")
RECENT_S = 60.0
MUCH = 0.5  # of its time that a worker waits for one other: from here on it is worth a colour
WAITS = (
    Column("coord", "worker", 9),
    Column("step", "step", 6, "r"),
    Column("phase", "phase", 8, importance=3),
    Column("seq", "seq", 7, "r", importance=1),
    Column("last", "last collective", 21, importance=1),
    Column("waits", "waits for", 18, stretch=True, most=40),
    Column("beat", "heartbeat", 10, importance=2),
)


def waits_for(row: FleetRow, view: View) -> tuple[str, str]:
    """(whom, in words) a worker waits for, by its heartbeat; else for whom it waited for long not long ago.

    Where steps are short every heartbeat comes between two waits: then only the plane's own events name the slow pair.
    """
    now = Waiting.of(row.beat)
    if now is not None:
        return now.whom, str(now)
    wait = view.snap.waits.get(row.coord) or view.snap.waits.get(row.pod)
    if wait is None or view.now - wait.ts > RECENT_S:
        return "", ""
    return wait.peer, f"{wait.peer} {wait.since_s:.1f} s, {age(view.now - wait.ts)} ago"


def blame(rows: Sequence[FleetRow], view: View) -> list[tuple[str, int]]:
    """Whom the workers wait for, most waited-for first."""
    return Counter(whom for r in rows if (whom := waits_for(r, view)[0])).most_common()


def first_behind(rows: Sequence[FleetRow]) -> str:
    """The first worker whose collective sequence number or step is lower than the others', or ""."""
    numbers = [(seq, r) for r in rows if (seq := collective(r.beat)[1]) >= 0]
    values = numbers or [(r.step, r) for r in rows if r.step >= 0]
    if not values or min(v for v, _ in values) == max(v for v, _ in values):
        return ""
    return min(values, key=lambda v: v[0])[1].coord


def wait_lines(view: View, width: int) -> list[Line]:
    """Summary of who holds everybody up, then a row per worker, those who wait first."""
    g = view.glyphs
    rows = [r for r in fleet_rows(view) if r.coord]
    if not rows:
        return [[("no workers yet", "muted")]]
    waited = blame(rows, view)
    lines: list[Line] = []
    if waited:
        top: list[Span] = [(f"{g.late} ", "warn")]
        for name, count in waited[:4]:
            verb = "waits" if count == 1 else "wait"
            top += [(f"{count} {verb} for ", "muted"), (clean(name), "warn bold"), ("   ", "")]
        lines.append(cut(top, width))
    else:
        lines.append([(f"{g.ok} nobody reports waiting", "ok")])
    if behind := first_behind(rows):
        lines.append([("furthest behind: ", "muted"), (behind, "warn bold")])
    chosen = choose(WAITS, width)
    lines.append(cut(head(chosen), width))
    for r in sorted(rows, key=lambda r: (not r.beat.get("waiting_on"), not waits_for(r, view)[0], r.step)):
        name, seq = collective(r.beat)
        last = r.beat.get("last_collective")
        if isinstance(last, Mapping) and last.get("state") not in (None, "completed"):
            name = f"{name} {last['state']}"
        waits = waits_for(r, view)[1]
        cells: dict[str, Span] = {
            "coord": (r.coord, party_role(r.party)),
            "step": (str(r.step) if r.step >= 0 else g.dot, "text"),
            "phase": (clean(r.phase), "muted"),
            "seq": (str(seq) if seq >= 0 else "", "text"),
            "last": (clean(name) or g.dot, "text" if name else "faint"),
            "waits": (clean(waits) or g.dot, "warn" if waits else "faint"),
            "beat": (f"{r.health.glyph} {age(r.age)}" if r.age is not None else g.dot, r.health.role),
        }
        lines.append(cut(body(chosen, cells, more=g.more), width))
    return lines


PAIRS = (
    Column("pair", "from to", 9),
    Column("rate", "sends", 11, "r"),
    Column("trip", "round trip", 11, "r"),
    Column("share", "waits", 6, "r"),
    Column("waited", "waited", 10, "r", importance=1),
    Column("sent", "sent", 10, "r", importance=2),
    Column("again", "again", 6, "r", importance=3),
)


def _trip(seconds: float) -> str:
    """``0.24 ms``, ``21 ms``, ``1.2 s``."""
    ms = 1000 * seconds
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.0f} ms" if ms < 1000 else duration(seconds)


def pair_lines(view: View, width: int) -> list[Line]:
    """What each party sends to another, how long that takes and is waited for; then the bytes against the forecast."""
    g, s = view.glyphs, view.snap
    found = pairs.by_party(s)
    if not found:
        return []
    chosen = choose(PAIRS, width)
    last = max(p.ts for p in found)
    head_: Line = [("between parties, whom is waited for most first", "muted bold")]
    lines: list[Line] = [[*head_, (f"  {age(view.now - last)} ago", "faint")], cut(head(chosen), width)]
    for p in found:
        slow = p.wait_share is not None and p.wait_share >= MUCH
        cells: dict[str, Span] = {
            "pair": (f"P{p.src} to P{p.dst}", party_role(p.src)),
            "rate": (f"{volume(p.out_s)}/s" if p.out_s is not None else g.dot, "text"),
            "trip": (_trip(p.round_trip_s) if p.round_trip_s is not None else g.dot, "text"),
            "share": (f"{p.wait_share:.0%}" if p.wait_share is not None else g.dot, "warn bold" if slow else "text"),
            "waited": (duration(p.waited_s / p.workers), "text"),
            "sent": (volume(p.bytes_out), "text"),
            "again": (str(p.retransmits), "warn" if p.retransmits else "faint"),
        }
        lines.append(cut(body(chosen, cells, more=g.more), width))
    moved, foretold = pairs.moved_so_far(s), pairs.foretold_so_far(s)
    total: list[Span] = [("sent in all ", "muted"), (volume(moved), "text")]
    if foretold is not None:
        off = abs(moved - foretold[0]) > 2 * max(foretold[1], 0.02 * foretold[0])
        count = counted(s.step, "step")
        words = f"  foretold for {count}: {volume(foretold[0])}, give or take {volume(foretold[1])}"
        total.append((words, "warn" if off else "muted"))
    return [*lines, cut(total, width)]


def path_lines(view: View, width: int) -> list[Line]:
    """Which paths reach each pod, so that the operator knows before pressing F9 what would deliver it."""
    g, s = view.glyphs, view.snap
    known = [p for p in PATHS if any(p in pod.paths for pod in s.pods.values())]
    if not known:
        return []
    columns = (Column("pod", "pod", 12), *(Column(p, p, 14) for p in known))
    chosen = choose(columns, width)
    lines: list[Line] = [[("paths that would carry a halt", "muted bold")], cut(head(chosen), width)]
    for pod in sorted(s.pods.values(), key=lambda p: (all(up for up, _ in p.paths.values()), p.pod)):
        cells: dict[str, Span] = {"pod": (clean(pod.pod), party_role(pod.party))}
        for path in known:
            if path not in pod.paths:
                cells[path] = (f"{g.unknown} unknown", "warn")
                continue
            up, since = pod.paths[path]
            word = f"{g.ok} up" if up else f"{g.fail} down"
            cells[path] = (f"{word} {age(view.now - since)}", "ok" if up else "bad")
        lines.append(cut(body(chosen, cells, more=g.more), width))
    return lines


def flight_lines(view: View, width: int) -> list[Line]:
    """The last reading of the flight recorders: what is wrong first, then each worker's newest collective."""
    f, g = view.snap.flight, view.glyphs
    if f is None:
        return []
    head_: list[Span] = [("flight recorders ", "muted bold"), (clock(f.ts, utc=view.utc), "faint")]
    head_.append((f"  {len(f.newest)} answered, kept in {clean(f.folder)}", "muted"))
    lines: list[Line] = [cut(head_, width)]
    for text in f.findings:
        lines += wrap([(f"{g.late} ", "warn"), (clean(text), "warn bold")], width, "  ")
    lines += [cut([(f"{g.unknown} {clean(coord)} did not answer", "bad")], width) for coord in f.silent]
    if not f.findings and not f.silent:
        lines.append([(f"{g.ok} nothing differs", "ok")])
    for coord, text in sorted(f.newest.items()):
        lines.append(cut([(fit(coord, 10), party_role(coord_parts(coord)[0])), (clean(text), "text")], width))
    return lines


def event_lines(view: View, width: int, rows: int) -> list[Line]:
    """The newest events of links and collectives."""
    ring = RingLog()  # what several pods say at once is one line, as in the log
    ring.extend([e for e in view.snap.log[-600:] if e.area == Area.LINK])
    found = [ring[at] for at in range(max(0, len(ring) - max(0, rows)), len(ring))]
    if not found or rows < 2:
        return []
    lines: list[Line] = [[("newest events of links and collectives", "muted bold")]]
    for e in found[-(rows - 1) :]:
        role = {"error": "bad", "warn": "warn"}.get(e.level, "text")
        source = fit(source_word(e, 16), 16, more=view.glyphs.more)
        lines.append(
            cut([(clock(e.ts, utc=view.utc), "faint"), (f" {source} ", "muted"), (clean(e.text), role)], width)
        )
    return lines


class PlanePanel(Panel):
    """Messages between parties and collectives inside them."""

    title = "NCCL & plane"
    number = "4"
    help = (
        "Who waits for whom across parties and inside them, the last collective of every worker with its sequence "
        "number (the first that differs is named), what each party sends to another with its round trip and how long "
        "it is waited for, all bytes against the forecast, and which paths reach each pod. C reads every flight "
        "recorder and lays them side by side."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        lines = wait_lines(view, width)
        if between := pair_lines(view, width):
            lines += [[("", "")], *between]
        if recorders := flight_lines(view, width):
            lines += [[("", "")], *recorders]
        if paths := path_lines(view, width):
            lines += [[("", "")], *paths]
        if events := event_lines(view, width, height - len(lines) - 1):
            lines += [[("", "")], *events]
        return lines
