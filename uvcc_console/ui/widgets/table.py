"""Tables that give up their least important columns first when the terminal is narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from uvcc_console.ui.drawing.paint import Span, fit


@dataclass(frozen=True, slots=True)
class Column:
    """One column: key of its cells, heading, width in cells, alignment, importance (0 is never dropped).

    ``stretch`` takes the spare room, up to ``most`` cells where that is given; the other columns share the rest.
    """

    key: str
    title: str
    width: int
    align: str = "l"
    importance: int = 0
    stretch: bool = False
    most: int = 0


SHARE: Final = 4
"""Cells at most by which each column is widened, so that what belongs together is not torn apart."""


def choose(columns: Sequence[Column], width: int, gap: int = 1) -> list[tuple[Column, int]]:
    """The columns that fit with their final widths, the most important first; spare room goes to the stretching one.

    A narrow column may come in where a wider one of more importance finds no room any more.
    """
    used = sum(c.width + gap for c in columns if not c.importance) - gap
    taken = {c.key for c in columns if not c.importance}
    for c in sorted((c for c in columns if c.importance), key=lambda c: c.importance):
        if used + gap + c.width <= width or not taken:
            taken.add(c.key)
            used += gap + c.width
    kept = [c for c in columns if c.key in taken]
    spare = max(0, width - sum(c.width for c in kept) - gap * (len(kept) - 1))
    stretching = next((c for c in kept if c.stretch), None)
    if stretching is None or not stretching.most:
        return [(c, c.width + (spare if c is stretching else 0)) for c in kept]
    own = min(spare, max(0, stretching.most - stretching.width))
    named = [c for c in kept if c.title]
    share, odd = divmod(min(spare - own, SHARE * len(named)), len(named))
    wider = {c.key: share + (i < odd) for i, c in enumerate(named)}
    return [(c, c.width + wider.get(c.key, 0) + (own if c is stretching else 0)) for c in kept]


def head(chosen: Sequence[tuple[Column, int]], gap: int = 1, *, sorted_by: str = "", mark: str = "") -> list[Span]:
    """The heading line; the sorted column is marked."""
    out: list[Span] = []
    for i, (c, width) in enumerate(chosen):
        if i:
            out.append((" " * gap, ""))
        title = f"{c.title}{mark}" if c.key == sorted_by else c.title
        out.append((fit(title, width, c.align), "muted bold" if c.key == sorted_by else "muted"))
    return out


def body(
    chosen: Sequence[tuple[Column, int]], cells: Mapping[str, Span], gap: int = 1, *, more: str = "…", under: str = ""
) -> list[Span]:
    """One row; ``under`` is a role (such as a selection) that lies under every cell."""
    out: list[Span] = []
    for i, (c, width) in enumerate(chosen):
        if i:
            out.append((" " * gap, under))
        text, role = cells.get(c.key, ("", ""))
        out.append((fit(text, width, c.align, more), f"{role} {under}".strip()))
    return out
