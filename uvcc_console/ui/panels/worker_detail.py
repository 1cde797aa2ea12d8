"""Everything known of the one worker under the cursor."""

from __future__ import annotations

from typing import Final

from uvcc_console.core.alerts.progress import collective
from uvcc_console.ui.drawing.format import age, number
from uvcc_console.ui.drawing.paint import Line, Span, clean, cut, fit
from uvcc_console.ui.judging.view import FleetRow, View, party_role
from uvcc_console.ui.widgets.curves import TITLES
from uvcc_engine.contract.run_files.waiting import Waiting

_ROOT: Final = 16  # digits of a root that fit a narrow column beside its epoch; the ledger's page has all of them
_NARROW: Final = 38  # cells of a column of facts, at least

_RATES: Final = ("samples_per_s", "toks_per_s")
_WORDS: Final = {
    "rank": "rank",
    "pid": "process",
    "msg": "it says",
    "loss": TITLES["loss"],
    "samples_per_s": TITLES["samples_per_s"],
    "toks_per_s": TITLES["toks_per_s"],
    "dt_fetch_s": "fetching, s",
    "gate_entropy_mean": TITLES["gate_entropy_mean"],
    "gate_collapse_frac": "gates collapsed",
    "mem_mib": TITLES["mem_mib"],
    "halt_nonce": "halt",
    "attn_cmp": "attn compressed",
    "attn_sel": "attn selected",
    "attn_win": "attn window",
}
"""What of a heartbeat is shown, in the order of reading, and how it is called."""


def _facts(view: View, row: FleetRow) -> list[tuple[str, str, str]]:
    """(name, text, role) in the order of reading."""
    g, pod = view.glyphs, view.snap.pods.get(row.pod)
    facts = [("state", f"{row.health.glyph} {row.health.word}", row.health.role), ("phase", row.phase, "text")]
    if row.step >= 0:
        facts.append(("step", str(row.step), "text"))
    if row.age is not None:
        facts.append(("heartbeat", f"{age(row.age)} ago", row.health.role))
    for key, name in _WORDS.items():
        value = row.beat.get(key)
        if value in (None, "") or (key in _RATES and not value):  # a private run has no tokens
            continue
        facts.append((name, number(value, 5) if isinstance(value, float) else clean(str(value)), "text"))
    last, seq = collective(row.beat)
    if last:
        facts.append(("last collective", clean(f"#{seq} {last}" if seq >= 0 else last), "text"))
    if (waits := Waiting.of(row.beat)) is not None:
        facts.append(("waits for", clean(str(waits)), "warn"))
    if row.root:
        facts.append(("root", f"{row.root[:_ROOT]} {g.dot} {row.epoch}", "text"))
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
        if pod.said:
            facts.append(("said", clean(pod.said), "muted"))
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
    columns = max(1, min(3, width // 46), 2 if width >= 2 * _NARROW else 1)
    each = width // columns
    named = 19 if each >= 46 else 16
    down = -(-len(facts) // columns)
    lines: list[Line] = [title]
    for y in range(down):
        line: list[Span] = []
        for x in range(columns):
            at = x * down + y
            if at < len(facts):
                name, text, role = facts[at]
                line += [(fit(name, named), "muted"), (fit(text, each - named - 1), role), (" ", "")]
        lines.append(cut(line, width))
    return lines
