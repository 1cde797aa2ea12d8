"""Fleet: one row per worker (or per pod without one), worst first on request, with cursor and marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message

from uvcc_console.ui.drawing.paint import Line, Span, cut
from uvcc_console.ui.judging.view import FleetRow, View, fleet_rows
from uvcc_console.ui.panels.fleet_columns import COLUMNS, ordered, usual
from uvcc_console.ui.panels.fleet_columns import chosen as columns
from uvcc_console.ui.panels.fleet_grid import grid_lines, neighbour
from uvcc_console.ui.panels.worker_detail import detail_lines
from uvcc_console.ui.widgets.heat import heat_lines
from uvcc_console.ui.widgets.panel import Hints, Panel
from uvcc_console.ui.widgets.table import body, choose, head
from uvcc_engine.contract.text import counted

ROOMY = 36  # rows of a terminal from which on the strip of heat leaves enough of them to the table
_LEAST_DETAIL = 5  # rows below the table from which on the worker under the cursor is described there
LOG_ONLY = frozenset(("level", "source", "file", "text"))
SORTS = ("worst", "place")
_SORTED = {"worst": "worst first", "place": "by place"}


@dataclass(frozen=True, slots=True)
class FleetState:
    """How the operator looks at the fleet: order, cursor row (and its pod), marked workers, columns (none: usual)."""

    sort: str = "worst"
    cursor: str = ""
    marked: frozenset[str] = frozenset()
    board: bool | None = None
    pod: str = ""
    reverse: bool = False
    columns: tuple[str, ...] = ()


def key_of(row: FleetRow) -> str:
    """Names a row: its worker, or its pod."""
    return row.coord or row.pod


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


def visible_rows(view: View, state: FleetState) -> list[FleetRow]:
    """Filtered and sorted rows. What a filter asks of log lines (levels) hides no worker."""
    rows: Sequence[FleetRow] = fleet_rows(view)
    if wanted := view.filter.without(LOG_ONLY):
        rows = [r for r in rows if wanted.matches(r.fields, " ".join(str(v) for v in r.fields.values()).lower())]
    return ordered(rows, state.sort, reverse=state.reverse)


def row_cells(
    view: View, row: FleetRow, state: FleetState, names: Sequence[str], focused: bool, label: str = ""
) -> dict[str, Span]:
    """Texts and roles of one row in the columns ``names``."""
    g = view.glyphs
    here = focused and key_of(row) == state.cursor
    sign = g.mark if key_of(row) in state.marked else (g.cursor if here else " ")
    stale = "faint" if row.health.rank <= 1 and row.coord else ""
    first: dict[str, Span] = {"cursor": (label or sign, "hit bold" if label else "accent bold")}
    cells = first | {name: COLUMNS[name].cell(view, row, stale) for name in names}
    if row.coord and by_worker(view, names):
        cells["pod"] = (row.coord, cells["pod"][1])
    return cells


def by_worker(view: View, names: Sequence[str]) -> bool:
    """Whether the first column tells workers rather than pods: where no other tells those of a pod apart."""
    apart = {"coord", "rank"} & set(names)
    return "pod" in names and not apart and len(view.snap.workers) > len(view.snap.pods)


def sort_sign(view: View, state: FleetState) -> str:
    """Which way the sorted column runs."""
    column = COLUMNS.get(state.sort)
    falls = (column.falls if column else False) != state.reverse
    return view.glyphs.down if falls else view.glyphs.up


def sort_words(view: View, state: FleetState) -> str:
    """The order in words, for the border."""
    column = COLUMNS.get(state.sort)
    words = _SORTED.get(state.sort) or f"by {column.column.title if column else state.sort} {sort_sign(view, state)}"
    return f"{words}, reversed" if state.reverse and column is None else words


def fleet_lines(
    view: View, state: FleetState, width: int, *, focused: bool = False, jump: Mapping[str, str] | None = None
) -> list[Line]:
    """The table: a heading and one line per row."""
    rows = visible_rows(view, state)
    chosen = choose(columns(view, state.columns), width)
    names = [c.key for c, _ in chosen if c.key in COLUMNS]
    if by_worker(view, names):
        chosen = [(replace(c, title="worker") if c.key == "pod" else c, w) for c, w in chosen]
    mark = sort_sign(view, state)
    lines: list[Line] = [head(chosen, sorted_by=state.sort, mark=mark)]
    if not rows:
        lines.append([(f"  {nothing_words(view)}", "muted")])
    for row in rows:
        under = "sel" if focused and key_of(row) == state.cursor else ""
        lines.append(
            body(
                chosen,
                row_cells(view, row, state, names, focused, (jump or {}).get(key_of(row), "")),
                more=view.glyphs.more,
                under=under,
            )
        )
    return [cut(line, width) for line in lines]


def nothing_words(view: View) -> str:
    """Why no worker is shown."""
    if view.filter:
        return f"nothing matches /{view.filter.source}"
    if view.snap.followed:
        return "nothing was reached yet"
    return "no pods yet: they appear when provisioning starts"


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
        "j k h l and arrows move · space marks, backspace clears the marks: D F W P then act on all of them · o sorts "
        "by the next column, O the other way round, :sort NAME · c chooses columns · v board or table · f jumps by "
        "letter · enter opens the pod · "
        "/ filters, e.g. party=1 age>6"
    )
    hints: ClassVar[Hints] = (
        ("enter", "open"),
        ("o", "sort"),
        ("c", "columns"),
        ("v", "board"),
        ("space", "mark"),
        ("f", "jump"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        ("space", "mark", "mark"),
        ("backspace", "unmark", "clear marks"),
        ("o", "sort", "sort"),
        ("O", "reverse", "reverse"),
        ("c", "columns", "columns"),
        ("v", "board", "board or table"),
        ("f", "jump", "jump"),
        ("up", "line(-1)", "up"),
        ("down", "line(1)", "down"),
        ("left,h", "aside(-1)", "left"),
        ("right,l", "aside(1)", "right"),
        ("enter", "open", "open"),
    ]

    class ColumnsWanted(Message):
        """The operator wants to choose columns; these are shown."""

        def __init__(self, names: Sequence[str]) -> None:
            super().__init__()
            self.names = names

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
        self._above: list[Line] = []

    @property
    def board(self) -> bool:
        """Whether the board is shown: as chosen, else on the panel's own page once the fleet is large."""
        if self.state.board is not None:
            return self.state.board
        return self.has_class("-paged") and len(self.view.snap.workers) > 9

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        if self.board:
            rows = visible_rows(view, replace(self.state, sort="place"))
            lines = grid_lines(view, rows, width, cursor=self._shown_cursor(), marked=self.state.marked)
            if not rows:
                lines = [[(nothing_words(view), "muted")]]
        else:
            lines = fleet_lines(view, self.state, width, focused=self.has_focus, jump=self.jump)
        self._above = self._heat(view, width)
        lines = [*self._above, *lines]
        if self.has_class("-paged"):
            row = next((r for r in self.rows_in_order() if key_of(r) == self.state.cursor), None)
            room = height - len(lines)
            detail = detail_lines(view, row, width) if room >= _LEAST_DETAIL else []
            gap = min(2, max(1, room - len(detail)))
            lines = [*lines, *([("", "")] for _ in range(gap if detail else 0)), *detail[: room - gap]]
        return lines

    def _heat(self, view: View, width: int) -> list[Line]:
        """The strip above the table, where there is room for it."""
        roomy = self.app.size.height >= ROOMY or self.has_class("-paged")
        return heat_lines(view, fleet_rows(view), width, self._shown_cursor()) if roomy and not self.board else []

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self.board:
            return super().get_content_height(container, viewport, width)
        rows = len(visible_rows(self.view, self.state))  # a line each: hundreds are not drawn to be counted
        return len(self._heat(self.view, width)) + 1 + max(1, rows)

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
        below = "by place" if self.board else sort_words(view, self.state)
        if self.jump:
            below = "type the letters of a worker"
        return f"Fleet {view.glyphs.dot} " + f" {view.glyphs.dot} ".join(parts), below

    def on_focus(self) -> None:
        self.action_line(0)

    def on_blur(self) -> None:
        self.jump = {}
        self.redraw()

    def rows_in_order(self) -> list[FleetRow]:
        state = replace(self.state, sort="place") if self.board else self.state
        return visible_rows(self.view, state)

    def _go(self, name: str) -> None:
        self.state = replace(self.state, cursor=name)
        self._in_sight()

    def _in_sight(self) -> None:
        """Draw anew, and scroll to the cursor: what it is on may stand elsewhere now."""
        self.redraw()
        name, rows = self.state.cursor, self.rows_in_order()
        if not name:
            return
        if self.board:
            at = next((i for i, line in enumerate(self.lines) if any("sel" in role for _, role in line)), 0)
        else:
            at = next((i for i, r in enumerate(rows) if key_of(r) == name), 0) + 1 + len(self._above)
        top, height = self.scroll_offset.y, self.content_region.height
        if not top <= at < top + height:
            self.scroll_to(y=max(0, at + 1 - height if at >= top + height else at), animate=False, force=True)

    def action_line(self, by: int) -> None:
        rows = self.rows_in_order()
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
        if rows := self.rows_in_order():
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
        """Sort by the next column, from the left; before the first come worst first and place."""
        names = [*SORTS, *self.shown_columns]
        at = names.index(self.state.sort) if self.state.sort in names else -1
        self.sort_by(names[(at + 1) % len(names)])

    def action_reverse(self) -> None:
        """Reverse the order of the rows."""
        self.state = replace(self.state, reverse=not self.state.reverse)
        self._in_sight()

    def sort_by(self, name: str, *, reverse: bool = False, falling: bool | None = None) -> None:
        """Sort by a column, ``worst`` or ``place``; by the same again: the other way round.

        ``falling``: which way a column shall run, whatever it does by itself.
        """
        if falling is not None:
            reverse = COLUMNS[name].falls != falling
        again = name == self.state.sort and not reverse and falling is None
        self.state = replace(self.state, sort=name, reverse=not self.state.reverse if again else reverse, board=False)
        self._in_sight()

    @property
    def shown_columns(self) -> Sequence[str]:
        """The columns as chosen, else the usual ones."""
        return self.state.columns or usual(self.view)

    def show_columns(self, names: tuple[str, ...]) -> None:
        """Show these columns; none: the usual ones."""
        self.state = replace(self.state, columns=names, board=False)
        self.redraw()

    def marked_pods(self) -> list[str]:
        """The pods of the marked rows, in their order."""
        return list(dict.fromkeys(r.pod for r in fleet_rows(self.view) if key_of(r) in self.state.marked))

    def on_click(self, event: events.Click) -> None:
        """On a heading: sort by it. On a row: the cursor goes there; again opens it."""
        at = event.y - 1 + self.scroll_offset.y - len(self._above) if self.styles.border_top[0] else event.y
        if self.board or at < 0 or self.pulled(event):
            return
        if at == 0:
            x = event.x - (2 if self.styles.border_left[0] else 0)
            for column, wide in choose(columns(self.view, self.state.columns), self.content_region.width):
                if 0 <= x < wide and column.key in COLUMNS:
                    self.sort_by(column.key)
                x -= wide + 1
            return
        rows = self.rows_in_order()
        if at <= len(rows):
            again = key_of(rows[at - 1]) == self.state.cursor
            self._go(key_of(rows[at - 1]))
            if again:
                self.action_open()

    def action_columns(self) -> None:
        """Ask which columns to show."""
        self.post_message(self.ColumnsWanted(self.shown_columns))

    def action_board(self) -> None:
        """Change between the board of places and the table of pods."""
        self.state = replace(self.state, board=not self.board)
        self.redraw()

    def action_jump(self) -> None:
        """Put a letter on every worker and wait for one."""
        self.state = replace(self.state, board=False)
        rows = self.rows_in_order()
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
        row = next((r for r in self.rows_in_order() if key_of(r) == self.state.cursor), None)
        if row:
            self.post_message(self.Opened(row.pod))
