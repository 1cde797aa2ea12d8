"""The ack matrix of a halt: what each pod has proved. Unknown is a state of its own and red."""

from __future__ import annotations

from collections.abc import Sequence

from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import halt_words
from uvcc_console.ui.drawing.format import duration, short
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, join, spread, width_of
from uvcc_console.ui.judging.condition import judge, unwritable
from uvcc_console.ui.judging.view import View, halting, holding, party_role
from uvcc_console.ui.widgets.panel import Panel
from uvcc_console.ui.widgets.table import Column, body, choose, head

COLUMNS = (
    Column("pod", "pod", 9),
    Column("sent", "sent", 5, "c"),
    Column("seen", "seen", 5, "c"),
    Column("held", "held", 9, "c"),
    Column("halted", "halted", 9, "c"),
    Column("checkpoint", "checkpoint", 13, importance=5),
    Column("gone", "proc gone", 9, "c", importance=1),
    Column("gpu", "GPU empty", 9, "c", importance=3),
    Column("ended", "pod gone", 8, "c", importance=4),
    Column("last", "last word", 16, importance=2, stretch=True),
)
_REACHED = {"unknown": -1, "sent": 0, "seen": 1, "held": 2, "released": 2, "halted": 3, "gone": 4}
_STAGES = ("sent", "seen", "held", "halted", "gone")
_STOPPED = "computation stopped"
_KEEP_S = 30.0
SILENT_S = 1.5


def shown(view: View) -> bool:
    """Whether the halt is worth room: while it runs, while its outcome is fresh, or while something is unknown."""
    h = view.snap.halt
    if not h.nonce or (view.behind_s and h.done):  # an old picture of a halt that is over: there may be a newer one
        return False
    unknown = any(stage == "unknown" for stage, *_ in h.acks.values())
    fresh = view.now - max((ts for *_, ts in h.acks.values()), default=h.asked) < _KEEP_S
    if view.snap.ended and view.snap.status != "halted":
        return False
    if h.drill:
        return not h.done
    if view.snap.status == "halted":
        return True
    return (
        halting(view.snap) or unknown or (fresh and h.mode == "halt") or (h.mode == "release" and fresh and not h.done)
    )


def headline(view: View) -> Line:
    """``HALT 3/3 verified at step 17, 1.2 s``, or what is still awaited."""
    s, h, g = view.snap, view.snap.halt, view.glyphs
    word = "DRILL" if h.drill else h.mode.upper()
    total = h.total or len(s.pods)
    proved = verified(s)
    unknown = sum(stage == "unknown" for stage, *_ in h.acks.values())
    if h.done and h.mode != "hold":
        role = "green" if h.verified == h.total else "alarm"
        text = f" {word} {halt_words(h.verified, h.total, h.step)}, {duration(h.seconds)} "
        out: list[Span] = [(text, role)]
    else:
        verb = {"hold": "held", "halt": "halted", "release": "released"}.get(h.mode, "acknowledged")
        out = [
            (f" {word} ", "amber"),
            (f" {proved}/{total} {verb}", "title"),
            (f"  {duration(view.now - h.asked)}", "muted"),
        ]
    if unknown:
        out += [("  ", ""), (f" {g.unknown} {unknown} UNKNOWN ", "alarm")]
    return out


def stopped_line(view: View) -> Line:
    """What else a headline says while some parties have stopped: that the others cannot go on. Empty otherwise."""
    s, h = view.snap, view.snap.halt
    total, proved = h.total or len(s.pods), verified(s)
    stopped = {s.pods[p].party for p, (stage, *_) in h.acks.items() if _REACHED.get(stage, -1) >= 2 and p in s.pods}
    if s.proves and stopped and proved < total and h.mode != "release":
        names = ", ".join(f"P{p}" for p in sorted(stopped))
        whom = "answers the others" if len(stopped) == 1 else "answer the other"
        return [("  ", ""), (f"{_STOPPED}: {names} no longer {whom}", "text")]
    return []


def verified(s: Snapshot) -> int:
    """Pods that have proved what the present mode asks for."""
    want = {"hold": 2, "halt": 3, "release": 2}.get(s.halt.mode, 3)
    if s.halt.mode == "release":
        return sum(stage == "released" for stage, *_ in s.halt.acks.values())
    return sum(_REACHED.get(stage, -1) >= want and stage != "released" for stage, *_ in s.halt.acks.values())


def _cells(view: View, pod: str) -> dict[str, Span]:
    s, g = view.snap, view.glyphs
    party = s.pods[pod].party if pod in s.pods else -1
    cells: dict[str, Span] = {"pod": (clean(pod), party_role(party)), "gpu": _gpu(view, pod)}
    ended = pod in s.pods and s.pods[pod].state == "gone"
    cells["ended"] = (g.ok, "ok") if ended else (g.dot, "faint")
    ack = s.halt.acks.get(pod)
    if ack is None:
        last = f"{g.unknown} not known here" if unwritable(view) else f"{g.todo} not sent yet"
        return cells | {"last": (last, "warn")}
    stage, step, checkpoint, ts = ack
    if stage == "unknown":
        cells |= {name: (g.unknown, "bad") for name in (*_STAGES, "gpu")}
        return cells | {"last": (f"{g.unknown} UNKNOWN", "alarm")}
    reached = _REACHED.get(stage, -1)
    for i, name in enumerate(_STAGES):
        if i <= reached:
            where = f" @{step}" if name in ("held", "halted") and step >= 0 else ""
            cells[name] = (f"{g.ok}{where}", "ok")
        else:
            cells[name] = (g.dot, "faint")
    if checkpoint:
        cells["checkpoint"] = (short(checkpoint, 12), "text")
    word = "released" if stage == "released" else stage
    return cells | {"last": (f"{g.ok} {word} +{max(0.0, ts - s.halt.asked):.1f} s", "ok")}


def _gpu(view: View, pod: str) -> Span:
    """What nvidia-smi on the pod said after its processes were gone; nothing is assumed before it spoke."""
    g, word = view.glyphs, view.snap.halt.gpus.get(pod, "")
    if word == "empty":
        return g.ok, "ok"
    if word == "used":
        return f"{g.fail} used", "bad"
    if word == "none":
        return "n/a", "muted"
    return (g.unknown, "bad") if word else (g.dot, "faint")


def halt_lines(view: View, width: int) -> list[Line]:
    """Headline with the countdown, then pod by pod what is proved, worst first."""
    s, g = view.snap, view.glyphs
    left = holding(s, view.now)
    tail: list[Span] = []
    if left is not None:
        tail = [(" F9 ", "alarm"), (" halts now  ", "text"), (" Esc ", "green"), (f" releases  {left:.1f} s ", "title")]
    elif s.status == "halted":
        tail = _next(view)
    top, stopped = list(headline(view)), stopped_line(view)
    if stopped and width - width_of(tail) - width_of([*top, stopped[0]]) >= len(_STOPPED) + 6:
        top += stopped  # a part of a word would say nothing
    lines: list[Line] = [spread(top, tail, width)]
    quiet = not s.halt.done and not s.halt.acks and view.now - s.halt.asked > SILENT_S
    if quiet and not view.replay:
        why = "no sign of the halt sidecar yet" if not unwritable(view) else "its evidence cannot be written down"
        text = f" {g.unknown} {why}. In another terminal: uvcc halt {clean(s.run)} "
        lines.append(cut([(text, "alarm")], width))
    pods = sorted({*s.pods, *s.halt.acks}, key=lambda p: (_rank(s, p), p))
    chosen = choose(COLUMNS, width, 1)
    if pods:
        lines.append(cut(head(chosen), width))
    for pod in pods:
        lines.append(cut(body(chosen, _cells(view, pod), more=view.glyphs.more), width))
    return lines


def _next(view: View) -> list[Span]:
    """What the operator can do once it is over: only what is possible now."""
    now = judge(view.snap, conductor=view.conductor, behind_s=view.behind_s)
    keys = {"unknown": (("F9", " asks again"), ("t", " tears down")), "halted": (("t", " tears down"),)}
    found = keys.get(now.name, () if now.resume else (("r", " resumes"), ("t", " tears down")))
    found = tuple(pair for pair in found if pair[0] == "F9" or not view.readonly)
    return [*join([[(key, "key"), (word, "text")] for key, word in found])] if not view.replay else []


def _rank(s: Snapshot, pod: str) -> int:
    ack = s.halt.acks.get(pod)
    return -2 if ack is None else _REACHED.get(ack[0], -1)


class HaltPanel(Panel):
    """Appears when a halt is asked for and stays until its outcome is old news."""

    title = "HALT"
    grows = True
    help = (
        "What each pod has proved for this halt: the order sent, seen by its agent, held at a step, halted with a "
        "checkpoint, process gone, its GPUs empty (n/a: it has none), the pod itself gone at its provider. UNKNOWN "
        "means no proof either way: treat the pod as running and costing."
    )

    def draw(self, view: View, width: int, height: int) -> Sequence[Line]:
        return halt_lines(view, width)

    def show(self, view: View) -> None:
        comes, self.display = shown(view) and not self.display, shown(view)
        if comes:  # what it showed of an earlier halt would stand there until it has its size
            self.view, self.lines = view, []
            self._head()
        super().show(view)

    def heading(self, view: View) -> tuple[str, str]:
        h = view.snap.halt
        return ("halt drill" if h.drill else "HALT"), f"asked by {clean(h.by)} {view.glyphs.dot} nonce {short(h.nonce)}"
