"""``uvcc status RUN --line``: a run in one short line, for the status bar of tmux or a prompt."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.core import settings
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.runs.processes import HALTD, going, running


def line(s: Snapshot, run_dir: Path, now: float, *, colours: bool = False) -> str:
    """``RUNNING full 168/200 84% 24/24 live eta 21 m $12.10``; in ``colours`` as tmux understands them."""
    from uvcc_console.ui.drawing.format import duration, money
    from uvcc_console.ui.drawing.glyphs import choose
    from uvcc_console.ui.judging.condition import health_spans, stalled_s, status_word
    from uvcc_console.ui.judging.lamps import DEAD, Lamp
    from uvcc_console.ui.judging.view import View, eta

    conductor, sidecar = (
        Lamp() if well else Lamp(DEAD) for well in (going(run_dir, s.created, now), running(run_dir, HALTD))
    )
    lamps = (Lamp(), Lamp()) if s.ended else (conductor, sidecar)
    view = View(snap=s, now=now, glyphs=choose(settings.truth("ascii")), conductor=lamps[0], sidecar=lamps[1])
    word, role = status_word(view)
    parts = [(word, role)]
    if s.steps_planned and not s.ended:
        at = max(0, s.step)
        parts.append((f"{s.phase} {at}/{s.steps_planned} {at / s.steps_planned:.0%}", "text"))
    spans = health_spans(view)
    parts.append(("".join(text for text, _ in spans), spans[0][1] if spans else ""))
    left = eta(s, now) if s.status == "running" and not view.stale and not stalled_s(view) else None
    parts.append((f"eta {duration(left)}" if left is not None else "", "text"))
    parts.append((money(s.spent) if s.spent else "", "text"))
    told = [(text.strip(), role) for text, role in parts if text.strip()]
    if not colours:
        return " ".join(text for text, _ in told)
    return " ".join(f"#[{_TMUX[tone]}]{text}#[default]" if (tone := _tone(role)) else text for text, role in told)


_TMUX = {"good": "fg=green", "warn": "fg=yellow", "bad": "fg=red,bold"}


def _tone(role: str) -> str:
    if role in ("ok", "ok bold", "green"):
        return "good"
    return "bad" if role in ("bad", "alarm") else "warn" if role in ("warn", "amber") else ""
