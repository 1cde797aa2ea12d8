"""One pod: its processes, its vital signs, its curves, its paths, its newest lines, and what can be done to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from textual.binding import BindingType
from textual.message import Message

from uvcc_console.core.snapshot import GpuView, PodView
from uvcc_console.ui.drawing.format import age, duration, number
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, spread, width_of
from uvcc_console.ui.drawing.spark import part_bar, spark
from uvcc_console.ui.judging.view import FleetRow, View, fleet_rows, party_role
from uvcc_console.ui.panels.chart_grid import ACCURACY, RATE, beside, chart
from uvcc_console.ui.panels.worker_detail import detail_lines
from uvcc_console.ui.registry.keys import ACTIONS, Context
from uvcc_console.ui.widgets.curves import names
from uvcc_console.ui.widgets.log_lines import entry_line
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.ring import RingLog

SPARK = 24
ROOMY = 19  # rows from which on a page of less than 100 columns has a curve of five rows
NARROW_WITH_CURVES = 15
_LINES = 300  # of a pod's newest lines that are looked at for those that stand on its page
_WORKERS = 4  # of a pod that are told one by one
_DONE_HERE = ("stackdump", "fetch", "restart", "replace", "shell", "tensorboard")


def rows_of(view: View, name: str) -> list[FleetRow]:
    """The pod's workers; the pod itself where it has none."""
    return [r for r in fleet_rows(view) if r.pod == name]


def head_line(view: View, pod: PodView, width: int) -> Line:
    """Who, where, in what state, for how much."""
    left: list[Span] = [(clean(pod.pod), f"{party_role(pod.party)} bold"), ("  ", "")]
    if view.snap.proves:  # what has no parties has no replicas of theirs either
        left.append((f"P{pod.party} replica {pod.replica} ", "text"))
    left.append((f"on {clean(pod.provider)}, {pod.state}", "muted"))
    if pod.said:
        left.append((f": {clean(pod.said)}", "muted"))
    right: list[Span] = [(f"${pod.price_hr:.2f}/h  " if pod.price_hr else "", "text"), (clean(pod.address), "muted")]
    return spread(left, right, width)


def _vital(name: str, strip: str, value: str, role: str = "text") -> Line:
    return [(fit(name, 9), "muted"), (strip, "accent"), (f"  {value}", role)]


def vital_lines(view: View, pod: PodView, width: int) -> list[Line]:
    """Processors, memory, disk, network and every card: how it went lately, and how it is."""
    g, wide = view.glyphs, max(6, min(SPARK, width - 47))
    lines: list[Line] = []
    if pod.cpu.last:
        strip = spark(pod.cpu.recent(wide), wide, g, low=0.0, high=1.0)
        lines.append(_vital("CPU", strip, f"{pod.cpu.last[1]:.0%}"))
    if pod.memory.last:
        lines.append(_vital("memory", spark(pod.memory.recent(wide), wide, g, low=0.0), f"{gib(pod.memory.last[1])}"))
    if pod.disk.last:
        lines.append(_vital("disk", spark(pod.disk.recent(wide), wide, g, low=0.0), f"{gib(pod.disk.last[1])} free"))
    if sent := sent_per_s(view, pod.pod):
        lines.append(_vital("network", spark(sent, wide, g, low=0.0), f"{number(sent[-1] / 1e6, 3)} MB/s sent"))
    for card in pod.gpus:
        strip = spark(pod.gpu.recent(wide), wide, g, low=0.0, high=100.0) if len(pod.gpus) == 1 else ""
        if not strip and card.used is not None:
            strip = part_bar(card.used / 100, wide, g)
        lines.append(_vital(f"GPU {card.index}", strip, gpu_words(card)))
    if not lines:
        lines.append([("no vital signs yet: they come every few seconds", "muted")])
    return [cut(line, width) for line in lines]


def gib(mib: float) -> str:
    """Mebibytes as an operator reads them."""
    return f"{mib:.0f} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def gpu_words(card: GpuView) -> str:
    """``93 %  61/80 GiB  66 °C  512/700 W``, as far as it is known."""
    parts = [f"{card.used:.0f} %" if card.used is not None else ""]
    if card.memory and card.memory_used is not None:
        parts.append(f"{card.memory_used / 1024:.0f}/{card.memory / 1024:.0f} GiB")
    parts.append(f"{card.celsius:.0f} °C" if card.celsius is not None else "")
    if card.watts is not None:
        parts.append(f"{card.watts:.0f}" + (f"/{card.most_watts:.0f} W" if card.most_watts else " W"))
    parts.append(f"{card.errors} memory errors" if card.errors else "")
    return "  ".join(p for p in parts if p)


def sent_per_s(view: View, pod: str) -> list[float]:
    """Bytes a second that the pod's workers sent, by their newest steps."""
    lines = [view.snap.series.get(r.coord, {}) for r in rows_of(view, pod)]
    found: list[float] = []
    for by_name in lines:
        moved, took = by_name.get("bytes"), by_name.get("step_s")
        if moved is None or took is None:
            continue
        n = min(len(moved), len(took), SPARK)
        rates = [b / t if t > 0 else 0.0 for b, t in zip(moved.recent(n), took.recent(n), strict=True)]
        found = [a + b for a, b in zip(found[-n:], rates, strict=False)] if found else rates
    return found


def path_words(view: View, pod: PodView) -> list[Span]:
    """Every way to the pod, up or down, and since when."""
    g = view.glyphs
    out: list[Span] = [("paths    ", "muted")]
    for name, (up, since) in pod.paths.items():
        word = f"{g.ok} {name} up {age(view.now - since)}" if up else f"{g.fail} {name} down {age(view.now - since)}"
        out += [(word, "ok" if up else "bad"), ("   ", "")]
    return out if len(out) > 1 else [*out, ("none known", "warn")]


def process_lines(view: View, name: str, width: int) -> list[Line]:
    """A line for each worker of the pod: how it is, at which step, which process, how much memory it holds."""
    out: list[Line] = []
    workers = [r for r in rows_of(view, name) if r.coord]
    for row in workers[:_WORKERS]:
        line: list[Span] = [(f"{row.coord} ", party_role(row.party)), (f"{row.health.glyph} ", row.health.role)]
        line.append((row.health.word, row.health.role))
        pid, held = row.beat.get("pid"), row.beat.get("mem_mib")
        told = (
            row.phase if row.phase != row.health.word else "",
            f"step {row.step}" if row.step >= 0 else "",
            f"process {pid}" if pid else "",
            f"{held:.0f} MiB" if isinstance(held, (int, float)) else "",
            f"heard {age(row.age)} ago" if row.age is not None else "",
        )
        line += [(f"  {clean(word)}", "text") for word in told if word]
        out.append(cut(line, width))
    if len(workers) > _WORKERS:
        out.append([(f"and {len(workers) - _WORKERS} more workers", "muted")])
    return out


def action_lines(view: View, width: int) -> list[Line]:
    """What can be done here, over as many lines as it takes; what cannot now is faint."""
    context = Context(
        view.snap,
        readonly=view.readonly,
        replay=bool(view.replay),
        conductor=view.conductor,
        behind_s=view.behind_s,
    )
    out: list[list[Span]] = [[("do       ", "muted"), ("l", "key"), (" its log", "muted")]]
    for name in _DONE_HERE:
        a = ACTIONS[name]
        possible = not a.reason(context)
        if view.replay and not possible:  # nothing is done to a pod of the past
            continue
        part: list[Span] = [(a.label, "key" if possible else "faint"), (f" {a.name}", "muted" if possible else "faint")]
        if width_of(out[-1]) + 2 + width_of(part) > width:
            out.append([(" " * 9, ""), *part])
        else:
            out[-1] += [("  ", ""), *part]
    return [cut(line, width) for line in out]


def curve_blocks(view: View, name: str, width: int, height: int) -> list[Line]:
    """Loss, rate and, where it is measured, accuracy of this pod alone, side by side."""
    series = {r.coord: view.snap.series[r.coord] for r in rows_of(view, name) if r.coord in view.snap.series}
    own = replace(view, snap=replace(view.snap, series=MappingProxyType(series)))
    known = names(own)
    groups = (("loss",), (*RATE, "step_s"), ACCURACY)
    shown = [n for group in groups if (n := next((x for x in group if x in known), ""))] or known[:2]
    shown = shown[: max(1, min(len(shown), width // 44))]
    if not shown or height < 4:
        return []
    each = (width - 2 * (len(shown) - 1)) // len(shown)
    return beside([(chart(own, n, each, height), each) for n in shown])


def log_lines(view: View, name: str, width: int, rows: int) -> list[Line]:
    """The newest lines of the pod, in words; what a line adds to them, mostly hashes, only where it is bad."""
    ring = RingLog(_LINES)  # what all workers of the pod say at once is one line, as in the log itself
    ring.extend([e for e in view.snap.log if name in e.source.partition("/")[0].split()][-_LINES:])
    mine = [ring[at] for at in range(max(0, len(ring) - max(0, rows)), len(ring))]
    shown = [e if e.level in ("warn", "error") else replace(e, detail="") for e in mine]
    return [cut(entry_line(e, view.glyphs, wide=width >= 100, utc=view.utc), width) for e in shown]


def pod_lines(view: View, name: str, width: int, height: int) -> list[Line]:
    """The lines of the page of one pod."""
    pod = view.snap.pods.get(name)
    if pod is None:
        return [[(f"there is no pod {clean(name)}" if name else "no pod chosen: Enter on one in Fleet", "muted")]]
    lines: list[Line] = [head_line(view, pod, width), *action_lines(view, width), cut(path_words(view, pod), width)]
    vitals = vital_lines(view, pod, width if width < 100 else width // 2 - 2)
    workers = [r for r in rows_of(view, name) if r.coord]
    facts: list[Line] = []
    for row in workers[:_WORKERS]:
        facts += detail_lines(view, row, width if width < 100 else width - width // 2)
    if len(workers) > _WORKERS:
        facts.append([(f"and {len(workers) - _WORKERS} more workers", "muted")])
    if height >= ROOMY:
        lines.append([("", "")])
    if width >= 100:
        lines += beside([(vitals, width // 2 - 2), (facts, width - width // 2)])
    else:
        processes = process_lines(view, name, width)
        curves = curve_blocks(view, name, width, 5 if height >= ROOMY else 4) if height >= NARROW_WITH_CURVES else []
        room = height - len(lines) - len(vitals) - len(processes) - len(curves) - 6
        lines += [*vitals, *processes, *(facts if room >= len(facts) else []), *curves]
    left = height - len(lines) - 1
    if left >= 12:
        lines += [[("", "")], *curve_blocks(view, name, width, min(14, left - 6))]
    left = height - len(lines) - 1
    if left > 1:
        title: Line = [(f"newest lines of {clean(name)} ", "muted bold"), ("(l: all of them)", "faint")]
        lines += [title, *log_lines(view, name, width, left)]
    return lines


class PodPanel(Panel):
    """The pod that was opened. Left and right go to its neighbours."""

    title = "Pod"
    number = "pod"
    help = (
        "One pod: its processes, how busy its processors, memory, disk, network and cards are, its curves, the paths "
        "that a halt can take to it, its newest lines.\n"
        "left right previous and next pod · l its whole log · the keys of the line 'do' act on this pod · Esc back"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("left,h", "aside(-1)", "previous pod"),
        ("right", "aside(1)", "next pod"),
        ("l,enter", "log", "its log"),
    ]

    class Wanted(Message):
        """Another pod, or this one's log."""

        def __init__(self, pod: str, log: bool = False) -> None:
            super().__init__()
            self.pod, self.log = pod, log

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return pod_lines(view, view.pod, width, height)

    def heading(self, view: View) -> tuple[str, str]:
        pod = view.snap.pods.get(view.pod)
        up = f" {view.glyphs.dot} {pod.state}" if pod is not None else ""
        workers = [r for r in rows_of(view, view.pod) if r.coord]
        done = max((view.now - r.age for r in workers if r.age is not None), default=0.0)
        heard = f"heard {duration(max(0.0, view.now - done))} ago" if done else ""
        return f"Pod {view.pod}{up}", heard

    def action_aside(self, by: int) -> None:
        """The previous or the next pod, in the order of their places."""
        known = list(dict.fromkeys(r.pod for r in fleet_rows(self.view)))
        if self.view.pod in known:
            self.post_message(self.Wanted(known[(known.index(self.view.pod) + by) % len(known)]))

    def action_log(self) -> None:
        """Show the log of this pod alone."""
        self.post_message(self.Wanted(self.view.pod, log=True))
