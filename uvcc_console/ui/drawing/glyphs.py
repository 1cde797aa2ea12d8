"""The signs of the console, once in Unicode and once in plain ASCII. A state is always glyph + word + colour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of single-cell signs."""

    name: str
    ok: str
    run: str
    wait: str
    todo: str
    fail: str
    skip: str
    live: str
    late: str
    silent: str
    unknown: str
    warn: str
    equal: str
    differ: str
    dash: str
    dot: str
    more: str
    full: str
    empty: str
    mark: str
    cursor: str
    times: str
    left: str
    up: str
    down: str
    heat: str
    axis_y: str
    axis_x: str
    axis_0: str
    braille: bool

    def stage(self, status: str) -> str:
        """The sign of a stage's status."""
        return {
            "ok": self.ok,
            "running": self.run,
            "waiting": self.wait,
            "failed": self.fail,
            "skipped": self.skip,
        }.get(status, self.todo)


UNICODE = Glyphs(
    name="unicode",
    ok="✓",
    run="▶",
    wait="◆",
    todo="○",
    fail="✗",
    skip="↷",
    live="●",
    late="◐",
    silent="○",
    unknown="?",
    warn="▲",
    equal="═",
    differ="≠",
    dash="─",
    dot="·",
    more="…",
    full="█",
    empty="░",
    mark="◼",
    cursor="▌",
    times="×",
    left="▌",
    up="▲",
    down="▼",
    heat="▁▂▃▄▅▆▇█",
    axis_y="┤",
    axis_x="┬",
    axis_0="┼",
    braille=True,
)
ASCII = Glyphs(
    name="ascii",
    ok="+",
    run=">",
    wait="!",
    todo="o",
    fail="x",
    skip="/",
    live="*",
    late="~",
    silent="o",
    unknown="?",
    warn="!",
    equal="=",
    differ="#",
    dash="-",
    dot="-",
    more="~",
    full="#",
    empty=".",
    mark="#",
    cursor=">",
    times="x",
    left="|",
    up="^",
    down="v",
    heat="_.-=+*%#",
    axis_y="|",
    axis_x="+",
    axis_0="+",
    braille=False,
)


def choose(ascii_only: bool) -> Glyphs:
    """The set to draw with."""
    return ASCII if ascii_only else UNICODE
