"""``index.html`` of a package: one page without network or scripts, from the signed bundles and the journal.

Whatever it says of roots, values and keys is read from bundles that were verified now. What the operator alone says
(stages, pods, figures) stands under a heading that tells so.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, Final

from uvcc_console.core import events as ev
from uvcc_console.report import metrics, timestamps
from uvcc_console.report.package import Package, PhaseProof
from uvcc_console.report.record import RunRecord
from uvcc_console.report.run_log import stamp
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.text import clean, counted, size_words
from uvcc_engine.transcript.proof import public_log
from uvcc_engine.transcript.proof.bundle import Bundle
from uvcc_engine.transcript.proof.derived_files import signed_losses

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --good: #16803c; --bad: #b42318; --dim: #667; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; }
td { vertical-align: top; overflow-wrap: anywhere; } td:first-child { overflow-wrap: break-word; }
code { font: 0.85em ui-monospace, monospace; overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.dim { color: var(--dim); }
figure { margin: 1rem 0; } figure img { max-width: 100%; background: #fff; }
""".strip()
_ALLOWED: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_MOST_FIGURE: Final = 2_000_000  # bytes of one picture that is put into the page
_DATED: Final = (timestamps.SUFFIX, public_log.SUFFIX)
_SHOWN: Final = 24  # subsessions in the table of agreement
Cell = str | tuple[str, str]


def page(package: Package) -> str:
    """The HTML page as text."""
    record = package.record
    name = record.run_dir.name
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_ALLOWED}">',
        f"<title>{_text(name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Run <code>{_text(name)}</code></h1>",
        *_verdicts(package),
    ]
    for phase, bundle in reversed(list(record.bundles.items())):  # the last phase is what the run was for
        parts += _phase(phase, bundle, package.proof(phase), record.during(phase))
    parts += _operators_word(package)
    parts += ["</body></html>"]
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    """Text from anywhere: no terminal controls, no markup."""
    return escape(clean(str(value), 2000))


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    yield "<table>"
    if head:
        yield "<tr>" + "".join(f"<th>{_text(h)}</th>" for h in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(_cell(c) for c in row) + "</tr>"
    yield "</table>"


def _cell(cell: Cell) -> str:
    """A text, or (kind, text) with kind "code", "good", "bad" or "dim"."""
    if isinstance(cell, str):
        return f"<td>{_text(cell)}</td>"
    kind, text = cell
    return f"<td><code>{_text(text)}</code></td>" if kind == "code" else f'<td class="{kind}">{_text(text)}</td>'


# ---- what was verified ---------------------------------------------------------------------------------------------


def _verdicts(package: Package) -> Iterator[str]:
    yield "<p>Three domains trained a model together on shares of data that none of them may see. This page says what"
    yield "they agreed to, what each of them signed, and what was checked. The run's operator wrote it: believe it only"
    yield "after you have run <code>verify.py</code> as <code>HOWTO.md</code> says.</p>"
    yield "<h2>What was verified, and what was not</h2>"
    rows: list[Sequence[Cell]] = []
    for phase in package.record.phases:
        proof = package.proof(phase)
        if proof.certificate is None:
            rows.append((phase, ("bad", proof.refusal), proof.error))
            continue
        keys = "keys as the pods showed them to the operator" if proof.pinned else "NOBODY PINNED THE KEYS"
        leaves = f"{proof.certificate.leaves} leaves"
        recomputed = "all recomputed" if proof.whole or proof.certificate.level == "transcripts" else "not recomputed"
        word: Cell = ("good", "holds") if proof.whole else ("bad", "holds as far as checked")
        rows.append(
            (
                phase,
                word,
                f"{counted(proof.certificate.epochs, 'epoch')}, {leaves}, {recomputed}; {keys}; {stamp(proof.at)}",
            )
        )
    yield from _table(("phase", "verdict", "what was checked"), rows)
    if altered := package.altered():
        yield "<p class='bad'>Files that are not as their pods sent them:</p>"
        yield from _table((), [(("code", name), why) for name, why in altered.items()])
    if dated := sorted({p.name for end in _DATED for p in package.record.artifacts.glob(f"*/*{end}")}):
        names = ", ".join(f"<code>{_text(name)}</code>" for name in dated)
        yield f"<p>Others dated it: {names}. This page did not ask them; <code>HOWTO.md</code> says how to.</p>"
    yield (
        "<p>Not verified by anything in this package: that a domain that lies computed rightly what no sentence below "
        "calls proved, and when it happened.</p>"
    )


def _phase(phase: str, bundle: Bundle, proof: PhaseProof, part: RunRecord) -> Iterator[str]:
    policy, size = bundle.policy, bundle.policy.topology
    yield f"<h2>Phase {_text(phase)}: what was agreed</h2>"
    shape = size_words(size.replicas, size.stages, size.tensor, f"{PARTIES} parties x ")
    shown = ", ".join(f"{value} to {to}" for value, to in policy.reveal) or "nothing"
    rows: list[Sequence[Cell]] = [
        ("policy", ("code", policy.hash.hex())),
        ("job", f"{policy.job.get('kind')}, {counted(policy.steps, 'step')}"),
        ("workers", shape),
        ("data of", ("code", policy.owner)),
        ("revealed", shown),
        ("model", ("code", policy.model_hash)),
        ("code", ("code", policy.code_hash)),
    ]
    rows += [("operated", sentence) for sentence in policy.operation.sentences(policy.proving)]
    rows += [("warning", ("bad", w)) for w in (proof.certificate.warnings if proof.certificate else ())]
    yield from _table((), rows)
    yield "<h2>By whom</h2>"
    yield from _table(
        ("party", "provider", "region", "public key"),
        [
            (
                f"P{p.party}",
                p.provider,
                p.region,
                ("code", p.public.ed25519 + (" (demo key)" if p.public.seeded else "")),
            )
            for p in policy.parties
        ],
    )
    yield "<h2>What came out</h2>"
    results: list[Sequence[Cell]] = [(k, str(v)) for k, v in sorted(bundle.workers[0].result[1].values.items())]
    results += [("result hash", ("code", h)) for h in bundle.result_hashes]
    results += [
        ("run root", ("code", bundle.run_root)),
        ("last global root", ("code", bundle.epochs[-1]["global_root"])),
    ]
    yield from _table((), results)
    yield from _epochs(bundle, part)
    yield from _agreement(bundle)
    yield from _curve(bundle)


def _epochs(bundle: Bundle, part: RunRecord) -> Iterator[str]:
    """When the roots of each epoch came in, which is the operator's word, beside what they make together."""
    yield "<h2>Epochs, as they ended</h2>"
    ends: dict[int, dict[str, float]] = {}
    for e in part.of(ev.RootReported):
        ends.setdefault(e.epoch, {}).setdefault(e.coord, e.ts)
    zero = min((e.ts for e in part.of(ev.PhaseStarted)), default=0.0)
    if ends and zero:
        points = [(epoch, max(at.values()) - zero) for epoch, at in sorted(ends.items())]
        if drawn := _plot(points, "epoch", "seconds since the start"):
            yield f'<figure><img alt="when each epoch ended" src="{drawn}"></figure>'
        yield "<p class='dim'>Times are the operator's; the roots are what all workers signed.</p>"
    rows: list[Sequence[Cell]] = []
    for each in bundle.epochs:
        at = ends.get(int(each["epoch"]), {})
        when = f"{min(at.values()) - zero:.1f} to {max(at.values()) - zero:.1f} s" if at and zero else "not told"
        rows.append((str(each["epoch"]), when, ("code", each["global_root"])))
    yield from _table(("epoch", "roots came in", "global root"), _ends_of(rows))


def _ends_of(rows: list[Sequence[Cell]]) -> list[Sequence[Cell]]:
    """A long table's beginning and end."""
    return rows if len(rows) <= 12 else [*rows[:6], tuple("..." for _ in rows[0]), *rows[-6:]]


def _agreement(bundle: Bundle) -> Iterator[str]:
    """For every subsession: in how many epochs two parties recorded the same messages."""
    yield "<h2>Who recorded the same messages</h2>"
    parts = {w.coord: w for w in bundle.workers}
    anchors = [c for c in parts if c.party == 0]
    rows: list[Sequence[Cell]] = []
    for c in anchors[:_SHOWN]:
        row: list[Cell] = [f"replica {c.replica}, stage {c.stage}, tensor {c.tensor}"]
        for one, two in ((0, 1), (0, 2), (1, 2)):
            a, b = (parts[Coord(c.replica, p, c.stage, c.tensor)].roots for p in (one, two))
            same = sum(x.root.pairs[two] == y.root.pairs[one] for (_, x), (_, y) in zip(a, b, strict=False))
            row.append(("good" if same == len(a) else "bad", f"{same} of {counted(len(a), 'epoch')}"))
        rows.append(row)
    yield from _table(("workers", "P0 and P1", "P0 and P2", "P1 and P2"), rows)
    if len(anchors) > _SHOWN:
        yield f"<p class='dim'>and {len(anchors) - _SHOWN} more</p>"


def _curve(bundle: Bundle) -> Iterator[str]:
    losses = sorted(signed_losses(bundle).items())
    if not losses:
        yield "<p class='dim'>The policy reveals no losses on the way.</p>"
        return
    yield f"<h2>Loss, as all three signed it ({len(losses)} points)</h2>"
    drawn = _plot(losses, "step", "loss")
    if drawn:
        yield f'<figure><img alt="signed loss by step" src="{drawn}"></figure>'
    yield from _table(("step", "loss"), _ends_of([(str(step), f"{loss:.6g}") for step, loss in losses]))


def _plot(points: Sequence[tuple[int, float]], across: str, up: str) -> str:
    """A picture as a data address; "" without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    with matplotlib.rc_context({"svg.hashsalt": "uvcc", "font.size": 9}):
        figure = Figure(figsize=(7.0, 3.0), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([s for s, _ in points], [v for _, v in points], marker=".", linewidth=1)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return _address(out.getvalue())


def _address(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


# ---- what the operator says ----------------------------------------------------------------------------------------


def _operators_word(package: Package) -> Iterator[str]:
    record = package.record
    s = record.snapshot
    yield "<h2>What the operator's journal tells</h2>"
    yield "<p class='dim'>Not signed by the domains; signed by the operator, in the manifest.</p>"
    rows: list[Sequence[Cell]] = [
        ("status", s.status + (f": {s.detail}" if s.detail else "")),
        ("profile", s.profile_name),
        ("planned", stamp(s.created)),
        ("last event", stamp(s.updated)),
    ]
    yield from _table((), rows)
    yield from _table(("stage", "state", "seconds", ""), [_stage(v) for v in s.stages])
    if s.gates:
        gates: list[Sequence[Cell]] = [
            (g.name, g.wanted, g.measured, ("good", "passed") if g.ok else ("bad", "missed")) for g in s.gates
        ]
        yield from _table(("gate", "wanted", "measured", ""), gates)
    if record.phases:
        yield from _table(("figure", "value"), list(metrics.table(record.during(record.phases[-1]))))
    for path in sorted((record.artifacts / "figs").glob("*.svg")):
        if path.stat().st_size <= _MOST_FIGURE and not path.is_symlink():
            yield f'<figure><img alt="{_text(path.stem)}" src="{_address(path.read_bytes())}">'
            yield f"<figcaption class='dim'>{_text(path.stem)}</figcaption></figure>"


def _stage(view: Any) -> Sequence[Cell]:
    took = f"{view.ended - view.started:.1f}" if view.ended > view.started > 0 else ""
    state: Cell = ("good", view.status) if view.status == "ok" else view.status
    return (view.name, state, took, view.detail)
