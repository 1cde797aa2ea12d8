"""How the run ended: the numbers the policy reveals, the proof, and where everything lies."""

from __future__ import annotations

import os
from collections.abc import Sequence

from uvcc_console.ui.format import duration, money, number
from uvcc_console.ui.paint import Line, Span, clean, cut, wrap
from uvcc_console.ui.view import View
from uvcc_console.ui.widgets.panel import Panel


def home_short(path: str) -> str:
    """``~`` for the home folder."""
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if home != "/" and path.startswith(home + os.sep) else path


def shown(view: View) -> bool:
    """From the first full result or verdict until the end of time."""
    s = view.snap
    return "full" in s.verdicts or (s.status == "ok" and bool(s.results or s.verdicts))


def result_lines(view: View, width: int) -> list[Line]:
    """Verdict, values, hashes, artifacts."""
    s, g = view.snap, view.glyphs
    phase = "full" if "full" in s.verdicts or "full" in s.results else next(iter(s.verdicts), s.phase)
    verdict, values = s.verdicts.get(phase), s.results.get(phase, {})
    first: list[Span] = []
    if verdict is not None and verdict.ok:
        first.append((f" {g.ok} VERIFIED ", "green"))
    elif verdict is not None:
        first.append((f" {g.fail} NOT VERIFIED ", "alarm"))
    elif s.proves:
        first.append((f" {g.todo} not verified yet ", "amber"))
    else:
        first.append((f" {g.ok} DONE ", "green"))
    for name, value in values.items():
        shown_value = f"{value:.2%}" if "accuracy" in name and value <= 1 else number(value)
        first += [("   ", ""), (f"{name} ", "muted"), (shown_value, "title")]
    took = duration(max(0.0, (s.ended or view.now) - s.created))
    first += [("   ", ""), (f"{s.step} steps in {took}, {money(s.spent)}", "muted")]
    lines: list[Line] = [cut(first, width)]
    if verdict is not None and not verdict.ok:
        lines += wrap([(clean(verdict.detail), "bad")], width)
    hashes = {h for key, h in s.result_hashes.items() if key.startswith(f"{phase}/")}
    rows: list[tuple[str, str, str]] = []
    if verdict is not None:
        rows.append(("global root", verdict.global_root, "text"))
    if len(hashes) == 1:
        count = sum(key.startswith(f"{phase}/") for key in s.result_hashes)
        rows.append(("result hash", f"{hashes.copy().pop()}   {g.ok} the same from {count} workers", "text"))
    elif hashes:
        rows.append(("result hash", f"{g.fail} {len(hashes)} different hashes", "bad"))
    if view.run_dir:
        rows.append(("artifacts", f"{home_short(view.run_dir)}/artifacts", "text"))
    if s.status == "ok":
        rows.append(
            (
                "pods",
                f"{g.ok} all gone" if not s.leaks else f"{g.fail} left behind: {', '.join(s.leaks)}",
                "ok" if not s.leaks else "bad",
            )
        )
    rows += [("operated", sentence, "muted") for sentence in s.operation]
    for name, text, role in rows:
        lines.append(cut([(f"{name:<12}", "muted"), (clean(text), role)], width))
    return lines


class ResultPanel(Panel):
    """The end of the story."""

    title = "Result"
    grows = True
    help = "What the policy reveals of the result, the verifier's word, the global root and where the artifacts lie."

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return result_lines(view, width)

    def show(self, view: View) -> None:
        self.display = shown(view)
        super().show(view)
