"""How the run ended: the numbers the policy reveals, the proof, and where everything lies."""

from __future__ import annotations

import os
from collections.abc import Sequence

from uvcc_console.core.answers.shown import CHANGED, REFUTED, UNCHECKED, Shown, final
from uvcc_console.core.pod_states import ABSENT
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import engine_words, repeats_exactly
from uvcc_console.ui.drawing.format import duration, money, number
from uvcc_console.ui.drawing.glyphs import Glyphs
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, wrap
from uvcc_console.ui.judging.view import View, result_word
from uvcc_console.ui.widgets.panel import Panel
from uvcc_engine.contract.run_files.files import STEPS_REPEATED
from uvcc_engine.contract.text import counted

SAMPLE_LINES = 3


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
    found = final(s, view.changed)
    word, tone = result_word(found, g) if s.proves or s.verdicts else (f"{g.ok} DONE", "green")
    first: list[Span] = [(f" {word} ", tone)]
    for name, value in found.values.items():
        shown_value = f"{value:.2%}" if "accuracy" in name and value <= 1 else number(value)
        first += [("   ", ""), (f"{name} ", "muted"), (shown_value, "title")]
    if found.values and found.caveat:
        first.append((f"   {found.caveat}", "warn"))
    took = duration(max(0.0, (s.ended or view.now) - s.created))
    first += [("   ", ""), (f"{counted(s.step, 'step')} in {took}, {money(s.spent)}", "muted")]
    lines: list[Line] = [cut(first, width)]
    if found.mark == REFUTED:
        lines += wrap([(clean(found.detail), "bad")], width)
    elif found.mark in (CHANGED, UNCHECKED):
        lines += wrap([(clean(found.words(utc=view.utc)), "bad" if found.mark == CHANGED else "warn")], width)
    rows: list[tuple[str, str, str]] = []
    if found.global_root:
        rows.append(("global root", found.global_root, "text"))
    if len(found.hashes) == 1:
        rows.append(("result hash", f"{found.hashes[0]}   {_backing(found, g)}", "text"))
    elif found.hashes and not found.certified:
        rows.append(("result hash", f"{g.fail} {len(found.hashes)} different hashes", "bad"))
    elif found.hashes:
        rows.append(("result hash", f"{len(found.hashes)} verified: each subsession holds a part", "text"))
    if view.run_dir:
        rows.append(("artifacts", f"{home_short(view.run_dir)}/artifacts", "text"))
    if s.status == "ok":
        rows.append(("pods", *_pods_words(s, g)))
    rows += [("operated", sentence, "muted") for sentence in s.operation]
    for name, text, role in rows:
        line: list[Span] = [(f"{name:<12}", "muted"), (clean(text), role)]
        whole = name.endswith(("root", "hash"))  # nobody can compare a part of it
        lines += _whole(line, width) if whole else [cut(line, width)]
    if s.repeated:
        text, _ = engine_words(STEPS_REPEATED, s.repeated)
        exact = repeats_exactly(s.repeated)
        lines += wrap([(f"{g.ok if exact else g.warn} ", "ok" if exact else "warn"), (clean(text), "text")], width)
    if s.sample:
        lines += wrap([("the model writes  ", "muted"), (clean(s.sample), "text")], width)[:SAMPLE_LINES]
    return lines


def _pods_words(s: Snapshot, g: Glyphs) -> tuple[str, str]:
    """What became of the pods, and its role. Kept ones may cost money, and go by a command."""
    if s.leaks:
        return f"{g.fail} left behind: {', '.join(s.leaks)}", "bad"
    kept = [pod for pod in s.pods.values() if pod.state not in ABSENT]
    if kept and s.ended and not s.followed:
        paid = sum(pod.price_hr for pod in kept)
        cost = f" for {money(paid)}/h" if paid else ""
        return f"{g.warn} {len(kept)} kept{cost} until limits.ttl; uvcc teardown {clean(s.run)} ends them", "warn"
    return f"{g.ok} all gone", "ok"


def _whole(line: Line, width: int) -> list[Line]:
    """A line whose second part stands whole, on as many rows as it takes."""
    (name, tone), (text, role) = line
    room = max(8, width - len(name))
    rows: list[Line] = []
    for at, part in enumerate(_pieces(text, room)):
        rows.append(cut([(name if at == 0 else " " * len(name), tone), (part, role)], width))
    return rows


def _pieces(text: str, room: int) -> list[str]:
    """An identifier in pieces, and what is said of it with the last of them or below."""
    long, _, said = text.partition("   ")
    pieces = [long[i : i + room] for i in range(0, len(long), room)] or [""]
    if said and len(pieces[-1]) + 3 + len(said) <= room:
        pieces[-1] += f"   {said}"
    elif said:
        pieces.append(said)
    return pieces


def _backing(found: Shown, g: Glyphs) -> str:
    """What a result hash stands on."""
    if found.verified:
        return f"{g.ok} verified, the same from {counted(found.workers, 'worker')}"
    return f"reported by {counted(found.workers, 'worker')}" if not found.certified else "of the certificate"


class ResultPanel(Panel):
    """The outcome of the run: verdict, values, hashes and artifacts."""

    title = "Result"
    grows = True
    help = (
        "What came of the run and where the artifacts lie. Once verified, the numbers are the certificate's, whatever "
        "a pod reports; the files are held against their checksums again and again, and a change takes the word back. "
        "Before, the numbers are what the pods report."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return result_lines(view, width)

    def show(self, view: View) -> None:
        self.display = shown(view)
        super().show(view)
