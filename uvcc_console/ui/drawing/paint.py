"""Lines of coloured text: what panels draw and what becomes strips on the screen.

A span is (text, role); a role is one or more words such as ``"bad"`` or ``"p0 bold"``. Panels are pure functions from
a view to lines, so that they are tested, exported as text and measured without a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip

Span = tuple[str, str]
Line = Sequence[Span]

_UNSAFE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    r"\U000e0000-\U000e0fff]"
)


def clean(text: str) -> str:
    """Without anything that could move the cursor, hide or reorder text: log lines come from untrusted machines."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(lambda m: " " if m.group() == "\t" else "�", text)


def literal(text: str) -> str:
    """Text for a title or label that reads markup: as it is, and cleaned."""
    return clean(text).replace("[", "\\[")


def ascii_text(text: str) -> str:
    """The same cells in ASCII: ``~`` for an ellipsis, ``?`` for what has no sign."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else "~" if c == "…" else "?" * cell_len(c) for c in text)


def width_of(line: Line) -> int:
    """Cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def plain(line: Line) -> str:
    """A line's text alone."""
    return "".join(text for text, _ in line).rstrip()


def fit(text: str, width: int, align: str = "l", more: str = "…") -> str:
    """Exactly ``width`` cells: cut with ``more`` or padded on the side opposite to ``align`` (l | r | c)."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + more if width > 1 else set_cell_size(text, max(0, width))
    gap = width - size
    if align == "r":
        return " " * gap + text
    if align == "c":
        return " " * (gap // 2) + text + " " * (gap - gap // 2)
    return text + " " * gap


def spread(left: Line, right: Line, width: int) -> list[Span]:
    """``left`` and ``right`` at the two ends; when both do not fit, the left one is cut."""
    room = width - width_of(right)
    if room < 1:
        return list(cut(right, width))
    used = width_of(left)
    if used <= room - 1:
        return [*left, (" " * (room - used), ""), *right]
    return [*cut(left, room - 1), (" ", ""), *right]


def cut(line: Line, width: int) -> list[Span]:
    """At most ``width`` cells of a line, an ellipsis marking the loss."""
    if width_of(line) <= width:
        return list(line)
    out: list[Span] = []
    room = width - 1
    for text, role in line:
        size = cell_len(text)
        if size > room:
            out.append((set_cell_size(text, room) + "…", role))
            break
        out.append((text, role))
        room -= size
    return out


def join(parts: Iterable[Line], separator: Span = ("  ", "")) -> list[Span]:
    """Lines one after another with a separator between."""
    out: list[Span] = []
    for part in parts:
        if out and part:
            out.append(separator)
        out.extend(part)
    return out


def wrap(line: Line, width: int, indent: str = "") -> list[list[Span]]:
    """Break a line at spaces into lines of at most ``width`` cells."""
    rows: list[list[Span]] = [[]]
    used = 0
    for text, role in line:
        for word in re.findall(r"\s+|\S+", text):
            size = cell_len(word)
            if used and used + size > width:
                rows.append([(indent, "")] if indent else [])
                used = cell_len(indent)
                if word.isspace():
                    continue
            while size > width - used > 0 and not word.isspace():
                head = set_cell_size(word, width - used)
                rows[-1].append((head, role))
                word, size = word[len(head) :], cell_len(word[len(head) :])
                rows.append([(indent, "")] if indent else [])
                used = cell_len(indent)
            rows[-1].append((word, role))
            used += size
    return [r for r in rows if r] or [[]]


_ATTRIBUTES = {
    "bold": Style(bold=True),
    "italic": Style(italic=True),
    "reverse": Style(reverse=True),
    "underline": Style(underline=True),
    "dim": Style(dim=True),
}
# role -> (foreground variable, background variable, attributes); what a theme lacks falls back to its own colours
ROLES: dict[str, tuple[str, str, str]] = {
    "text": ("foreground", "", ""),
    "muted": ("uvcc-muted", "", ""),
    "faint": ("uvcc-faint", "", ""),
    "title": ("foreground", "", "bold"),
    "accent": ("primary", "", ""),
    "ok": ("success", "", ""),
    "warn": ("warning", "", ""),
    "bad": ("error", "", "bold"),
    "p0": ("uvcc-p0", "", ""),
    "p1": ("uvcc-p1", "", ""),
    "p2": ("uvcc-p2", "", ""),
    "mix": ("foreground", "", ""),
    "sel": ("", "uvcc-select", ""),
    "alarm": ("uvcc-on-alarm", "uvcc-alarm", "bold"),
    "amber": ("uvcc-on-amber", "uvcc-amber", "bold"),
    "blue": ("uvcc-on-blue", "uvcc-blue", "bold"),
    "green": ("uvcc-on-green", "uvcc-green", "bold"),
    "grey": ("foreground", "uvcc-select", "bold"),
    "key": ("primary", "", "bold"),
    "hit": ("uvcc-on-amber", "uvcc-amber", ""),
}
# roles with a background of their own, which a selection must not hide
BLOCKS = frozenset({"alarm", "amber", "blue", "green", "grey"})
_NO_COLOUR = {"alarm": "reverse bold", "amber": "reverse", "blue": "reverse", "green": "reverse", "hit": "reverse"}
_NO_COLOUR |= {"bad": "bold underline", "warn": "bold", "key": "bold", "title": "bold", "sel": "reverse"}
_NO_COLOUR |= {"grey": "reverse"}
_FALLBACK = {"uvcc-muted": "foreground-muted", "uvcc-faint": "foreground-disabled", "uvcc-p0": "primary"}
_FALLBACK |= {"uvcc-p1": "warning", "uvcc-p2": "success", "uvcc-select": "panel", "uvcc-alarm": "error"}
_FALLBACK |= {"uvcc-amber": "warning", "uvcc-blue": "primary", "uvcc-green": "success"}
_FALLBACK |= {f"uvcc-on-{name}": "background" for name in ("alarm", "amber", "blue", "green")}


class Palette:
    """Roles resolved to terminal styles for one theme."""

    def __init__(self, variables: Mapping[str, str], *, colour: bool = True, ascii_only: bool = False) -> None:
        self._variables = variables
        self._colour = colour
        self._ascii = ascii_only
        self._known: dict[str, Style] = {"": Style.null()}

    def style(self, role: str) -> Style:
        """The style of a role such as ``"bad"`` or ``"p1 bold"``."""
        found = self._known.get(role)
        if found is None:
            found = Style.null()
            for word in role.split():
                found += self._word(word)
            self._known[role] = found
        return found

    def _word(self, word: str) -> Style:
        if word in _ATTRIBUTES:
            return _ATTRIBUTES[word]
        fg, bg, attributes = ROLES[word]
        if not self._colour:
            attributes, fg, bg = _NO_COLOUR.get(word, attributes), "", ""
        style = Style(color=self._rich(fg), bgcolor=self._rich(bg))
        for name in attributes.split():
            style += _ATTRIBUTES[name]
        return style

    def _rich(self, variable: str) -> RichColor | None:
        if not variable:
            return None
        value = self._variables.get(variable) or self._variables.get(_FALLBACK.get(variable, ""), "")
        if not value:
            return None
        try:
            return Color.parse(value.split()[0]).rich_color
        except ValueError:
            return None

    def strip(self, line: Line, width: int, base: Style) -> Strip:
        """A line as a strip of exactly ``width`` cells on the widget's own background."""
        line = [(clean(text), role) for text, role in line]  # whatever a panel forgot, the terminal never gets it
        if self._ascii:
            line = [(ascii_text(text), role) for text, role in line]
        segments = [Segment(text, base + self.style(role)) for text, role in line if text]
        return Strip(segments).adjust_cell_length(width, base)
