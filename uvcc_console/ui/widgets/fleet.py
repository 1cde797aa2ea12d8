"""Fleet: one row per worker (or per pod without one), worst first on request, with cursor and marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message

from uvcc_console.ui.drawing.format import age, counted, number, short
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut
from uvcc_console.ui.judging.view import FleetRow, View, fleet_rows, party_role
from uvcc_console.ui.widgets.fleet_grid import grid_lines, neighbour
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.table import Column, body, choose, head
from uvcc_console.ui.widgets.worker_detail import detail_lines

COLUMNS = (
    Column("cursor", "", 2),
    Column("pod", "pod", 10, stretch=True),
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
LOG_ONLY = frozenset(("level", "source", "file", "text"))
SORTS = {"default": "place", "worst": "worst first", "step": "step", "beat": "heartbeat age", "loss": "loss"}


@dataclass(frozen=True, slots=True)
class FleetState:
    """How the operator looks at the fleet: sort order, cursor row (and its pod), marked workers."""

    sort: str = "worst"
    cursor: str = ""
    marked: frozenset[str] = frozenset()
    board: bool | None = None
    pod: str = ""


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


def followed(state: FleetState, rows: Sequence[FleetRow]) -> FleetState:
    """Cursor and marks on the same pods though their rows are called otherwise: pods become workers, and back."""
    keys = {key_of(r): r.pod for r in rows}
    if state.cursor in keys:
        pod = keys[state.cursor]
        state = state if pod == state.pod else replace(state, pod=pod)
    elif state.cursor:
        same = next((r for r in rows if r.pod in (state.pod, state.cursor)), None)
        if same is not None:
            state = replace(state, cursor=key_of(same), pod=same.pod)
    gone = state.marked - keys.keys()
    if gone:
        pods = {name.split("s")[0] for name in gone} | gone
        now = frozenset(key_of(r) for r in rows if r.pod in pods)
        state = replace(state, marked=(state.marked & keys.keys()) | now)
    return state


def _float(row: FleetRow, key: str) -> float:
    value = row.beat.get(key)
    return float(value) if isinstance(value, (int, float)) else float("-inf")


def visible_rows(view: View, state: FleetState) -> list[FleetRow]:
    """Filtered and sorted rows. What a filter asks of log lines (levels) hides no worker."""
    rows = fleet_rows(view)
    if wanted := view.filter.without(LOG_ONLY):
        rows = [r for r in rows if wanted.matches(r.fields, " ".join(str(v) for v in r.fields.values()).lower())]
    return ordered(rows, state.sort)


def _paths(view: View, pod: str) -> str:
    known = view.snap.pods.get(pod)
    if known is None or not known.paths:
        return ""
    down = [name for name, (up, _) in known.paths.items() if not up]
    return f"{view.glyphs.fail}{','.join(down)}" if down else f"{view.glyphs.ok} {len(known.paths)} up"


def row_cells(view: View, row: FleetRow, state: FleetState, focused: bool, label: str = "") -> dict[str, Span]:
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
        "cursor": (label or sign, "hit bold" if label else "accent bold"),
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
        "state": (f"{h.glyph} {h.word.replace('stopped because of', 'due to')}", h.role),
    }


def _metric(row: FleetRow, key: str, stale: str, digits: int = 4) -> Span:
    value = row.beat.get(key)
    if not isinstance(value, (int, float)):
        return "", ""
    return number(float(value), digits), stale or "text"


def fleet_lines(
    view: View, state: FleetState, width: int, *, focused: bool = False, jump: Mapping[str, str] | None = None
) -> list[Line]:
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
        lines.append(
            body(
                chosen,
                row_cells(view, row, state, focused, (jump or {}).get(key_of(row), "")),
                more=view.glyphs.more,
                under=under,
            )
        )
    return [cut(line, width) for line in lines]


def labels(count: int) -> list[str]:
    """Short names for a jump: one letter each where that is enough, else two."""
    letters = "asdfghjklqwertyuiopzxcvbnm"
    if count <= len(letters):
        return list(letters[:count])
    return [a + b for a in letters for b in letters][:count]


class FleetPanel(Panel):
    """The fleet as a table or as a board, with a cursor."""

    title = "Fleet"
    number = "1"
    grows = True
    help = (
        "One row per worker: where it is, its step, the age of its last heartbeat (due every 5 s: late after 6 s, "
        "silent after 15 s, lost after 60 s) and the epoch root it reported. Stale values are dimmed.\n"
        "j k h l and arrows move · space marks, backspace clears the marks · o sorts (worst first, step, heartbeat "
        "age, loss, place) · v board or table · f jumps to a worker by letter · enter opens its page · "
        "/ filters, e.g. party=1 age>6"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("space", "mark", "mark"),
        ("backspace", "unmark", "clear marks"),
        ("o", "sort", "sort"),
        ("v", "board", "board or table"),
        ("f", "jump", "jump"),
        ("up", "line(-1)", "up"),
        ("down", "line(1)", "down"),
        ("left,h", "aside(-1)", "left"),
        ("right,l", "aside(1)", "right"),
        ("enter", "open", "open"),
    ]

    class Opened(Message):
        """The operator wants to see everything of one pod."""

        def __init__(self, pod: str) -> None:
            super().__init__()
            self.pod = pod

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.state = FleetState()
        self.jump: dict[str, str] = {}
        self._typed = ""

    @property
    def board(self) -> bool:
        """Whether the board is shown: as chosen, else on the panel's own page once the fleet is large."""
        if self.state.board is not None:
            return self.state.board
        return self.has_class("-paged") and len(self.view.snap.workers) > 9

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        if self.board:
            rows = visible_rows(view, replace(self.state, sort="default"))
            lines = grid_lines(view, rows, width, cursor=self._shown_cursor(), marked=self.state.marked)
            if not rows:
                lines = [[(f"nothing matches /{view.filter.source}", "muted")]]
        else:
            lines = fleet_lines(view, self.state, width, focused=self.has_focus, jump=self.jump)
        if self.has_class("-paged"):
            row = next((r for r in self._rows() if key_of(r) == self.state.cursor), None)
            detail = detail_lines(view, row, width)
            if detail and len(lines) + len(detail) < height:
                gap = height - len(lines) - len(detail)
                lines = [*lines, *([("", "")] for _ in range(min(gap, 2))), *detail]
        return lines

    def show(self, view: View) -> None:
        self.state = followed(self.state, fleet_rows(view))
        if self.has_focus and not self.state.cursor:
            rows = visible_rows(view, self.state)
            self.state = replace(self.state, cursor=key_of(rows[0]) if rows else "")
        super().show(view)

    def point_at(self, pod: str) -> None:
        """Put the cursor on a pod."""
        row = next((r for r in fleet_rows(self.view) if r.pod == pod), None)
        if row is not None:
            self._go(key_of(row))

    def _shown_cursor(self) -> str:
        return self.state.cursor if self.has_focus else ""

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
        if view.snap.malformed:
            parts.append(f"malformed lines: {sum(view.snap.malformed.values())}")
        if self.state.marked:
            parts.append(f"{len(self.state.marked)} marked")
        if view.filter:
            parts.append(f"/{view.filter.source}")
        below = "by place" if self.board else SORTS[self.state.sort]
        if self.jump:
            below = "type the letters of a worker"
        return f"Fleet {view.glyphs.dot} " + f" {view.glyphs.dot} ".join(parts), below

    def on_focus(self) -> None:
        self.action_line(0)

    def on_blur(self) -> None:
        self.jump = {}
        self.redraw()

    def _rows(self) -> list[FleetRow]:
        state = replace(self.state, sort="default") if self.board else self.state
        return visible_rows(self.view, state)

    def _go(self, name: str) -> None:
        self.state = replace(self.state, cursor=name)
        self.redraw()
        rows = self._rows()
        if self.board:
            at = next((i for i, line in enumerate(self.lines) if any("sel" in role for _, role in line)), 0)
        else:
            at = next((i for i, r in enumerate(rows) if key_of(r) == name), 0) + 1
        top, height = self.scroll_offset.y, self.content_region.height
        if not top <= at < top + height:
            self.scroll_to(y=max(0, at + 1 - height if at >= top + height else at), animate=False, force=True)

    def action_line(self, by: int) -> None:
        rows = self._rows()
        if not rows:
            return
        if self.board:
            self._go(neighbour(rows, self.state.cursor, 0, by))
            return
        names = [key_of(r) for r in rows]
        at = names.index(self.state.cursor) + by if self.state.cursor in names else 0
        self._go(names[min(len(names) - 1, max(0, at))])

    def action_aside(self, by: int) -> None:
        """To the same place in the next party."""
        if rows := self._rows():
            self._go(neighbour(rows, self.state.cursor, by, 0))

    def action_mark(self) -> None:
        """Mark or unmark the row under the cursor and go to the next."""
        if self.state.cursor:
            self.state = replace(self.state, marked=self.state.marked ^ {self.state.cursor})
            self.action_line(1)

    def action_unmark(self) -> None:
        """Forget every mark."""
        self.state = replace(self.state, marked=frozenset())
        self.redraw()

    def action_sort(self) -> None:
        """Next sort order."""
        names = list(SORTS)
        self.state = replace(self.state, sort=names[(names.index(self.state.sort) + 1) % len(names)])
        self.redraw()

    def action_board(self) -> None:
        """Board or table."""
        self.state = replace(self.state, board=not self.board)
        self.redraw()

    def action_jump(self) -> None:
        """Put a letter on every worker and wait for one."""
        self.state = replace(self.state, board=False)
        rows = self._rows()
        self.jump = {key_of(r): label for r, label in zip(rows, labels(len(rows)), strict=False)}
        self._typed = ""
        self.redraw()

    async def on_key(self, event: events.Key) -> None:
        """While letters are shown, they are typed; anything else ends it."""
        if not self.jump:
            return
        event.stop()
        event.prevent_default()
        self._typed += event.character or ""
        left = [name for name, label in self.jump.items() if label.startswith(self._typed)]
        if len(left) > 1 and event.character:
            return
        self.jump = {}
        if left and event.character:
            self._go(left[0])
        else:
            self.redraw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return not self.jump

    def action_open(self) -> None:
        """Open the page of the pod under the cursor."""
        row = next((r for r in self._rows() if key_of(r) == self.state.cursor), None)
        if row:
            self.post_message(self.Opened(row.pod))
