"""Everything known of the one worker under the cursor."""

from __future__ import annotations

from uvcc_console.ui.drawing.format import age, number
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit
from uvcc_console.ui.judging.view import FleetRow, View, party_role

_SHOWN = ("rank", "pid", "msg", "loss", "samples_per_s", "toks_per_s", "dt_fetch_s", "gate_entropy_mean")
_MORE = ("gate_collapse_frac", "mem_mib", "last_collective", "waiting_on", "halt_nonce")
_PATHS = ("attn_cmp", "attn_sel", "attn_win")


def _facts(view: View, row: FleetRow) -> list[tuple[str, str, str]]:
    """(name, text, role) in the order of reading."""
    g, pod = view.glyphs, view.snap.pods.get(row.pod)
    facts = [("state", f"{row.health.glyph} {row.health.word}", row.health.role), ("phase", row.phase, "text")]
    if row.step >= 0:
        facts.append(("step", str(row.step), "text"))
    if row.age is not None:
        facts.append(("heartbeat", f"{age(row.age)} ago", row.health.role))
    for key in (*_SHOWN, *_MORE, *_PATHS):
        value = row.beat.get(key)
        if value not in (None, ""):
            facts.append((key, number(value, 5) if isinstance(value, float) else clean(str(value)), "text"))
    if row.root:
        facts.append(("root", f"{row.root[:32]} {g.dot} {row.epoch}", "text"))
    if pod is not None:
        facts += [("pod", f"{pod.state} on {pod.provider}", "text"), ("address", clean(pod.address), "text")]
        if view.snap.job_kind == "lm" and row.pod in view.snap.checkpoints:
            home = view.snap.home.get(row.pod)
            word = f"step {home[0]}" if home else "no checkpoint yet"
            facts.append(("home", word, "text" if home else "warn"))
        if pod.price_hr:
            facts.append(("price", f"${pod.price_hr:.2f}/h", "text"))
        for name, (up, since) in pod.paths.items():
            word = f"{g.ok} up" if up else f"{g.fail} down"
            facts.append((f"path {name}", f"{word} {age(view.now - since)}", "ok" if up else "bad"))
        if pod.detail:
            facts.append(("said", clean(pod.detail), "muted"))
    if odd := view.snap.malformed.get(row.pod):
        facts.append(("malformed lines", str(odd), "warn"))
    return [(name, text, role) for name, text, role in facts if text]


def detail_lines(view: View, row: FleetRow | None, width: int) -> list[Line]:
    """A heading and the facts in as many columns as fit."""
    if row is None:
        return []
    title: list[Span] = [
        (clean(row.coord or row.pod), f"{party_role(row.party)} bold"),
        (f" on {clean(row.pod)}", "muted"),
    ]
    facts = _facts(view, row)
    columns = max(1, min(3, width // 46))
    each = width // columns
    down = -(-len(facts) // columns)
    lines: list[Line] = [title]
    for y in range(down):
        line: list[Span] = []
        for x in range(columns):
            at = x * down + y
            if at < len(facts):
                name, text, role = facts[at]
                line += [(fit(name, 19), "muted"), (fit(text, each - 20), role), (" ", "")]
        lines.append(cut(line, width))
    return lines
