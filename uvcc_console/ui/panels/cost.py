"""Cost: rate, spent, forecast and limits; per pod and per step on its own page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from uvcc_console.core import pod_states
from uvcc_console.core.alerts.expense import expected
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.fleet.provider_kinds import DEFAULT
from uvcc_console.ui.drawing.format import duration, money
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit, width_of, wrap
from uvcc_console.ui.judging.condition import stalled_s
from uvcc_console.ui.judging.view import View, eta, halting, party_role
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.text import counted


def limit_of(s: Snapshot, name: str) -> float:
    """A cap of the profile in dollars; 0 when it has none."""
    limits = s.profile.get("limits")
    value = limits.get(name) if isinstance(limits, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else 0.0


def free_words(s: Snapshot) -> str:
    """Why nothing is paid; of hosts of one's own nobody here knows what they cost."""
    if s.followed:
        return "somebody else's machine: nothing is paid here"
    if not s.pods:
        return "nothing is running"
    here = all(pod.provider == DEFAULT for pod in s.pods.values())
    return "local pods cost nothing" if here else "no price is known of these pods"


def _share(part: float) -> str:
    return "bad" if part > 0.9 else "warn" if part > 0.7 else "text"


def cost_lines(view: View, width: int) -> list[Line]:
    """Rate, spent, what it will be when the run is done, and what it may be at most, against the profile's limits."""
    s, g = view.snap, view.glyphs
    line: list[Span] = [(money(s.hourly), "title"), ("/h   ", "muted"), (money(s.spent), "title"), (" spent", "muted")]
    if (done := expected(s)) is not None:
        line += [("   ", ""), (f"about {money(done)}", "text"), (" when done", "muted")]
    lines: list[Line] = [cut(line, width)]
    notes: list[Span] = []
    if (total := limit_of(s, "total")) > 0:
        part = s.spent / total
        notes += [(f"{part:.0%} of {money(total)}", _share(part))]
    if s.forecast and not s.ended:
        notes += [(f" {g.dot} " if notes else "", "muted"), (f"at most {money(s.forecast)}", "text")]
    if s.runway_h is not None:
        notes += [(f" {g.dot} " if notes else "", "muted"), (f"runway {duration(s.runway_h * 3600)}", "text")]
    if notes:
        lines.append(cut(notes, width))
    elif not s.hourly and not s.spent:
        free: Line = [(free_words(s), "muted")]
        lines += [free] if width_of(free) <= width else wrap(free, width)
    return lines


def _bar(view: View, name: str, value: float, cap: float, width: int) -> Line:
    g = view.glyphs
    part = min(1.0, value / cap) if cap else 0.0
    full = int(part * width)
    return [
        (f"{name:<12}", "muted"),
        (g.full * full, _share(part) if part > 0.7 else "accent"),
        (g.empty * (width - full), "faint"),
        (f"  {money(value)} of {money(cap)}", _share(part)),
    ]


def _time_left(view: View) -> list[Line]:
    """Of the work at its own pace, and of the run's life by its own clock: which ends first is what counts."""
    s = view.snap
    going = s.status == "running" and not view.stale and not stalled_s(view) and not halting(s)
    work = eta(s, view.now) if going else None
    ttl = limit_of(s, "ttl")
    life = s.created + ttl - view.now - s.clock_shift if ttl and s.created and not s.ended else None
    line: list[Span] = []
    if work is not None:
        short = life is not None and work > life
        line += [(duration(work), "bad" if short else "text"), (" of work at its pace", "muted")]
    if life is not None:
        line += [(f" {view.glyphs.dot} " if line else "", "muted"), (duration(life), "warn" if life < 600 else "text")]
        line += [(" of the run's life", "muted")]
    return [[("time left   ", "muted"), *line]] if line else []


def page_lines(view: View, width: int) -> list[Line]:
    """Everything about money: bars against the caps, per pod, per step."""
    s, g = view.snap, view.glyphs
    lines: list[Line] = [*cost_lines(view, width), [("", "")]]
    room = max(10, min(60, width - 44))
    for name, value, cap in (
        ("per hour", s.hourly, limit_of(s, "hourly")),
        ("spent", s.spent, limit_of(s, "total")),
        ("when done", expected(s) or 0.0, limit_of(s, "total")),
        ("at most", s.forecast if not s.ended else 0.0, limit_of(s, "total")),
    ):
        if cap > 0 and (value or name in ("per hour", "spent")):
            lines.append(cut(_bar(view, name, value, cap, room), width))
    lines += [cut(line, width) for line in _time_left(view)]
    if s.step > 0 and s.spent:
        lines.append(
            [
                ("per step    ", "muted"),
                (f"${s.spent / s.step:.4f}", "text"),
                (f" over {counted(s.step, 'step')}", "muted"),
            ]
        )
    heading = f"{'pod':<12}{'provider':<18}{'state':<10}{'$/h':>8}{'share':>8}"
    lines += [[("", "")], cut([(heading, "muted")], width)]
    for pod in sorted(s.pods.values(), key=lambda p: (-p.price_hr, p.pod)):
        costs = s.hourly and pod.state not in pod_states.ABSENT  # of one that is gone the price is only remembered
        share = f"{pod.price_hr / s.hourly:.0%}" if costs else g.dot
        lines.append(
            cut(
                [
                    (fit(clean(pod.pod), 12), party_role(pod.party)),
                    (fit(clean(pod.provider), 18), "text"),
                    (fit(pod.state, 10), "muted"),
                    (f"{pod.price_hr:>8.2f}{share:>8}", "text"),
                ],
                width,
            )
        )
    return lines


class CostPanel(Panel):
    """What the run has cost, costs per hour, and may cost at most."""

    title = "Cost"
    number = "7"
    grows = True
    help = (
        "What runs per hour and what is spent; what it will be when the run is done, at its own pace; what it may be "
        "at most, by the limits of the profile."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return page_lines(view, width) if self.has_class("-paged") else cost_lines(view, width)
