"""Fleet: one row per worker (or per pod without one), worst first on request, with cursor and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import BindingType
from textual.message import Message

from uvcc_console.ui.format import age, counted, number, short
from uvcc_console.ui.paint import Line, Span, clean, cut
from uvcc_console.ui.view import FleetRow, View, fleet_rows, party_role
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.table import Column, body, choose, head

COLUMNS = (
    Column("cursor", "", 1),
    Column("pod", "pod", 11, stretch=True),
    Column("coord", "worker", 8, importance=6),
    Column("party", "party", 5, importance=8),
    Column("phase", "phase", 8, importance=3),
    Column("step", "step", 6, "r"),
    Column("beat", "heartbeat", 12, importance=1),
    Column("root", "root @ epoch", 15, importance=4),
    Column("loss", "loss", 7, "r", importance=5),
    Column("rate", "rate/s", 7, "r", importance=7),
    Column("mem", "MiB", 6, "r", importance=9),
    Column("link", "paths", 7, importance=10),
    Column("state", "state", 13),
)
SORTS = {"default": "place", "worst": "worst first", "step": "step", "beat": "heartbeat age", "loss": "loss"}


@dataclass(frozen=True, slots=True)
class FleetState:
    """How the operator looks at the fleet: sort order, cursor row, marked workers."""

    sort: str = "worst"
    cursor: str = ""
    marked: frozenset[str] = frozenset()


def key_of(row: FleetRow) -> str:
    """Names a row: its worker, or its pod."""
    return row.coord or row.pod


def ordered(rows: list[FleetRow], sort: str) -> list[FleetRow]:
    """Rows in the chosen order; ties keep their place."""
    if sort == "worst":
        return sorted(rows, key=lambda r: r.health.rank)
    if sort == "step":
        return sorted(rows, key=lambda r: r.step)
    if sort == "beat":
        return sorted(rows, key=lambda r: -(r.age if r.age is not None else 1e18))
    if sort == "loss":
        return sorted(rows, key=lambda r: -_float(r, "loss"))
    return rows


def _float(row: FleetRow, key: str) -> float:
    value = row.beat.get(key)
    return float(value) if isinstance(value, (int, float)) else float("-inf")


def visible_rows(view: View, state: FleetState) -> list[FleetRow]:
    """Filtered and sorted rows. A filter without a word about this panel (log levels) hides nothing by accident."""
    rows = fleet_rows(view)
    if view.filter:
        rows = [r for r in rows if view.filter.matches(r.fields, " ".join(str(v) for v in r.fields.values()).lower())]
    return ordered(rows, state.sort)


def _paths(view: View, pod: str) -> str:
    known = view.snap.pods.get(pod)
    if known is None or not known.paths:
        return ""
    down = [name for name, (up, _) in known.paths.items() if not up]
    return f"{view.glyphs.fail}{','.join(down)}" if down else f"{view.glyphs.ok} {len(known.paths)} up"


def row_cells(view: View, row: FleetRow, state: FleetState, focused: bool) -> dict[str, Span]:
    """Texts and roles of one row."""
    g, h = view.glyphs, row.health
    here = focused and key_of(row) == state.cursor
    sign = g.mark if key_of(row) in state.marked else (g.cursor if here else " ")
    stale = "faint" if h.rank <= 1 and row.coord else ""
    rate = row.beat.get("samples_per_s", row.beat.get("toks_per_s"))
    root = f"{short(row.root)} {g.dot} {row.epoch}" if row.root else g.dot
    paths = _paths(view, row.pod)
    beat_word = "" if row.age is None else f"{h.glyph} {age(row.age)}"
    return {
        "cursor": (sign, "accent bold"),
        "pod": (clean(row.pod), party_role(row.party)),
        "coord": (row.coord, "muted"),
        "party": (f"P{row.party}" if row.party >= 0 else "-", party_role(row.party)),
        "phase": (row.phase or row.pod_state, stale or "muted"),
        "step": (str(row.step) if row.step >= 0 else g.dot, stale or ("text" if row.step >= 0 else "faint")),
        "beat": (beat_word or g.dot, h.role if beat_word else "faint"),
        "root": (root, stale or ("text" if row.root else "faint")),
        "loss": _metric(row, "loss", stale),
        "rate": (number(float(rate), 3), stale or "text") if isinstance(rate, (int, float)) and rate else ("", ""),
        "mem": _metric(row, "mem_mib", stale, digits=5),
        "link": (paths, "bad" if g.fail in paths else "muted"),
        "state": (f"{h.glyph} {h.word}", h.role),
    }


def _metric(row: FleetRow, key: str, stale: str, digits: int = 4) -> Span:
    value = row.beat.get(key)
    if not isinstance(value, (int, float)):
        return "", ""
    return number(float(value), digits), stale or "text"


def fleet_lines(view: View, state: FleetState, width: int, *, focused: bool = False) -> list[Line]:
    """The table: a heading and one line per row."""
    rows = visible_rows(view, state)
    chosen = choose(COLUMNS, width)
    mark = view.glyphs.down
    lines: list[Line] = [
        head(chosen, sorted_by={"beat": "beat", "step": "step", "loss": "loss"}.get(state.sort, ""), mark=mark)
    ]
    if not rows:
        what = (
            f"nothing matches /{view.filter.source}"
            if view.filter
            else "no pods yet: they appear when provisioning starts"
        )
        lines.append([(f"  {what}", "muted")])
    for row in rows:
        under = "sel" if focused and key_of(row) == state.cursor else ""
        lines.append(body(chosen, row_cells(view, row, state, focused), more=view.glyphs.more, under=under))
    return [cut(line, width) for line in lines]


class FleetPanel(Panel):
    """The fleet table with a cursor."""

    title = "Fleet"
    number = "1"
    grows = True
    help = (
        "One row per worker: where it is, its step, the age of its last heartbeat (due every 5 s: late after 6 s, "
        "silent after 15 s, lost after 60 s) and the epoch root it reported. Stale values are dimmed.\n"
        "j k move · space marks · o sorts (worst first, step, heartbeat age, loss, place) · enter shows its log · "
        "/ filters, e.g. party=1 age>6"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("space", "mark", "mark"),
        ("o", "sort", "sort"),
        ("up", "line(-1)", "up"),
        ("down", "line(1)", "down"),
        ("enter", "open", "open"),
    ]

    class Opened(Message):
        """The operator wants to see one worker's lines."""

        def __init__(self, pod: str) -> None:
            super().__init__()
            self.pod = pod

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.state = FleetState()

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return fleet_lines(view, self.state, width, focused=self.has_focus)

    def heading(self, view: View) -> tuple[str, str]:
        rows = fleet_rows(view)
        bad = sum(r.health.rank <= 1 for r in rows)
        late = sum(r.health.rank == 2 for r in rows)
        parts = [counted(len(view.snap.pods), "pod")]
        if len(rows) > len(view.snap.pods):
            parts.append(counted(len(rows), "worker"))
        if bad:
            parts.append(f"{view.glyphs.fail} {bad} bad")
        if late:
            parts.append(f"{view.glyphs.late} {late} late")
        if self.state.marked:
            parts.append(f"{len(self.state.marked)} marked")
        if view.filter:
            parts.append(f"/{view.filter.source}")
        return f"Fleet {view.glyphs.dot} " + f" {view.glyphs.dot} ".join(parts), f"{SORTS[self.state.sort]}"

    def on_focus(self) -> None:
        self.action_line(0)

    def on_blur(self) -> None:
        self.redraw()

    def action_line(self, by: int) -> None:
        rows = visible_rows(self.view, self.state)
        if not rows:
            return
        names = [key_of(r) for r in rows]
        at = names.index(self.state.cursor) + by if self.state.cursor in names else 0
        at = min(len(names) - 1, max(0, at))
        self.state = FleetState(self.state.sort, names[at], self.state.marked)
        self.redraw()
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if at + 1 < top + 1 or at + 1 >= top + height:
            self.scroll_to(y=max(0, at + 2 - height if at + 1 >= top + height else at), animate=False, force=True)

    def action_mark(self) -> None:
        """Mark or unmark the row under the cursor and go to the next."""
        if self.state.cursor:
            marked = self.state.marked ^ {self.state.cursor}
            self.state = FleetState(self.state.sort, self.state.cursor, frozenset(marked))
            self.action_line(1)

    def action_sort(self) -> None:
        """Next sort order."""
        names = list(SORTS)
        sort = names[(names.index(self.state.sort) + 1) % len(names)]
        self.state = FleetState(sort, self.state.cursor, self.state.marked)
        self.redraw()

    def action_open(self) -> None:
        """Show the log of the pod under the cursor."""
        row = next((r for r in visible_rows(self.view, self.state) if key_of(r) == self.state.cursor), None)
        if row:
            self.post_message(self.Opened(row.pod))
