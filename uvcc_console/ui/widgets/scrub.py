"""The time line of a replay: where we are, how fast, and where something happened. A click jumps there."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message

from uvcc_console.ui.drawing.format import duration
from uvcc_console.ui.drawing.paint import Line, Span, cut
from uvcc_console.ui.feed.tape import Tape
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.bars import Bar

LEFT = 34  # room for 1 h 02 m of 12 h 34 m


def scrub_line(tape: Tape, view: View, width: int) -> Line:
    """``> 0.0 s of 61 s x4 ----|------o----``."""
    g = view.glyphs
    word = (g.run if tape.playing else g.wait) + " " + f"{duration(tape.at - tape.start)} of {duration(tape.span)}"
    left: list[Span] = [
        (f" {word:<{LEFT - 9}}", "title"),
        (f"{g.times}{tape.speed:<6g}", "blue" if tape.playing else "amber"),
    ]
    room = max(4, width - LEFT - 1)
    cells = [(g.dash, "faint")] * room
    for ts, role in tape.marks:
        cells[min(room - 1, max(0, int((ts - tape.start) / tape.span * (room - 1))))] = (g.axis_x, role)
    here = min(room - 1, max(0, int((tape.at - tape.start) / tape.span * (room - 1))))
    cells = [(sign, "accent" if i < here and role == "faint" else role) for i, (sign, role) in enumerate(cells)]
    cells[here] = (g.live, "title")
    return cut([*left, (" ", ""), *cells], width)


class ScrubBar(Bar):
    """Shown in a replay only."""

    DEFAULT_CSS = "ScrubBar { display: none; }"

    class Sought(Message):
        """A click at this part (0..1) of the recording."""

        def __init__(self, part: float) -> None:
            super().__init__()
            self.part = part

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.tape = Tape()

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return [scrub_line(self.tape, view, width)]

    def show_tape(self, tape: Tape) -> None:
        """Take the newest position."""
        self.tape = tape
        self.display = True
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        room = max(4, self.content_region.width - LEFT - 1)
        self.post_message(self.Sought(min(1.0, max(0.0, (event.x - LEFT) / (room - 1)))))
