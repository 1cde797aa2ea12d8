"""The fleet as a board: a column per party, a row per (replica, stage, tensor); hundreds of workers on one screen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from uvcc_console.ui.drawing.format import age, short
from uvcc_console.ui.drawing.paint import Line, Span, cut, fit
from uvcc_console.ui.judging.view import FleetRow, View

Place = tuple[int, int, int]


def places(rows: Sequence[FleetRow]) -> list[Place]:
    """(replica, stage, tensor) of every row of the board, in order."""
    return sorted({(r.replica, r.stage, r.tensor) for r in rows})


def summary_lines(view: View, rows: Sequence[FleetRow], width: int) -> list[Line]:
    """One line per party: how many do how well, slowest and fastest step."""
    lines: list[Line] = []
    for party in sorted({r.party for r in rows}):
        mine = [r for r in rows if r.party == party]
        words: dict[tuple[str, str, str], list[FleetRow]] = {}
        for r in sorted(mine, key=lambda r: r.health.rank):
            words.setdefault((r.health.glyph, r.health.word, r.health.role), []).append(r)
        line: list[Span] = [(f"{party_word(view, party)} ", f"p{party} bold" if 0 <= party < 3 else "muted")]
        for (glyph, word, role), those in words.items():
            line.append((f" {glyph} {len(those)} {word}{_whose(those)} ", role))
        steps = [r.step for r in mine if r.step >= 0]
        if steps:
            spread = f"step {min(steps)}" + (f" to {max(steps)}" if max(steps) != min(steps) else "")
            line.append((f"  {spread}", "warn" if max(steps) - min(steps) > 2 else "muted"))
        lines.append(cut(line, width))
    return lines


def _whose(rows: Sequence[FleetRow]) -> str:
    """Which of hundreds is not well, and where to look for it on the board: its worker, or the pod of all of them."""
    if rows[0].health.rank >= 6:
        return ""
    names = list(dict.fromkeys(r.pod for r in rows)) if len(rows) > 1 else [rows[0].coord or rows[0].pod]
    return f" {names[0]}" + (" ..." if len(names) > 1 else "")


def party_word(view: View, party: int) -> str:
    """``P1``; of a run without parties a plain word."""
    return f"P{party}" if view.snap.proves or not view.snap.job_kind else "run"


def cell(row: FleetRow | None, width: int, view: View, *, sign: str, under: str) -> list[Span]:
    """Glyph, step, heartbeat age and root prefix of one worker, as far as the width allows."""
    if row is None:
        return [(fit(f" {view.glyphs.dot}", width), "faint")]
    h = row.health
    beat = age(row.age) if row.age is not None else h.word
    step = str(row.step) if row.step >= 0 else view.glyphs.dot
    parts = [(sign, f"accent bold {under}".strip()), (f"{h.glyph} ", f"{h.role} {under}".strip())]
    parts.append((f"{step:>6} ", f"text {under}".strip()))
    if width >= 18:
        told = beat if h.rank >= 6 else h.word
        parts.append((fit(told, 9), f"{'muted' if h.rank >= 6 else h.role} {under}".strip()))
    if width >= 30:
        parts.append((f" {short(row.root, 8) if row.root else view.glyphs.dot}", f"muted {under}".strip()))
    line = cut(parts, width)
    used = sum(len(text) for text, _ in line)
    return [*line, (" " * max(0, width - used), under)]


def grid_lines(
    view: View, rows: Sequence[FleetRow], width: int, *, cursor: str = "", marked: Collection[str] = ()
) -> list[Line]:
    """The board: summary per party, heading, then the rows of places."""
    if not rows:
        return [[("no pods yet", "muted")]]
    by_place = {(r.party, (r.replica, r.stage, r.tensor)): r for r in rows}
    parties = sorted({r.party for r in rows})
    label = 12 if any(s or t for _, s, t in places(rows)) else 6
    each = max(10, (width - label) // max(1, len(parties)))
    lines: list[Line] = [*summary_lines(view, rows, width), [("", "")]]
    head: list[Span] = [(fit("", label), "")]
    for party in parties:
        head.append((fit(f"  {party_word(view, party)}", each), f"p{party} bold" if 0 <= party < 3 else "muted"))
    lines.append(cut(head, width))
    for place in places(rows):
        r, s, t = place
        name = f"r{r:02d}" + (f" s{s} t{t}" if label > 6 else "")
        line: list[Span] = [(fit(name, label), "muted")]
        for party in parties:
            row = by_place.get((party, place))
            key = (row.coord or row.pod) if row else ""
            sign = view.glyphs.mark if key in marked else view.glyphs.cursor if key and key == cursor else " "
            under = "sel" if key and key == cursor else ""
            line += cell(row, each - 1, view, sign=sign, under=under)
            line.append((" ", ""))
        lines.append(cut(line, width))
    return lines


def neighbour(rows: Sequence[FleetRow], current: str, dx: int, dy: int) -> str:
    """The worker next to ``current`` on the board; itself at the border."""
    known = {(r.party, (r.replica, r.stage, r.tensor)): r for r in rows}
    here = next((k for k, r in known.items() if (r.coord or r.pod) == current), None)
    if here is None:
        first = rows[0] if rows else None
        return (first.coord or first.pod) if first else ""
    parties, order = sorted({r.party for r in rows}), places(rows)
    x = min(len(parties) - 1, max(0, parties.index(here[0]) + dx))
    y = min(len(order) - 1, max(0, order.index(here[1]) + dy))
    found = known.get((parties[x], order[y]))
    return (found.coord or found.pod) if found else current
