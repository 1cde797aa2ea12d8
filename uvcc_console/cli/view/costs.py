"""``uvcc costs``: what the pods of every run cost, held against the provider's bill where its API tells it."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from uvcc_console.cli import common

COLUMNS: Final = (
    *("run", "pod", "try", "provider", "id", "asked", "ended", "outcome"),
    *("price_hr", "ours", "billed", "verdict"),
)
_ODD: Final = ("=", "+", "-", "@", "\t", "\r")


def run(argv: list[str]) -> int:
    parser = common.Parser(
        "costs",
        "List every create of every run of this machine, pods and their volumes (disk): what it cost by our clock, in "
        "US dollars, and by the provider's bill where its API tells one. VERDICT: agrees; over, billed is more than "
        "ours by over a tenth and 0.02 $; untold, no bill is known; open, it may still cost something; none, nothing "
        "was made. "
        f"--csv has the columns {', '.join(COLUMNS)}; times are UTC, and what is not known is empty.",
    )
    parser.add_json()
    parser.add_argument("--csv", action="store_true", help="print RFC 4180 CSV on standard output")
    args = parser.parse_args(argv)
    rows = [row for run_dir in common.run_dirs() for row in rows_of(run_dir)]
    if args.csv:
        writer = csv.writer(sys.stdout, lineterminator="\r\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(row[c]) for c in COLUMNS] for row in rows)
        return 0
    if args.json:
        common.emit(rows)
        return 0
    if not rows:
        common.say("no run of this machine has rented anything")
        return 0
    width = max(3, *(len(r["run"]) for r in rows))
    common.show(f"{'RUN':<{width}}  {'POD':<8} {'PROVIDER':<12} {'$/H':>8} {'OURS $':>9} {'BILLED $':>9} VERDICT")
    for r in rows:
        billed = "-" if r["billed"] is None else f"{r['billed']:.2f}"
        head = f"{r['run']:<{width}}  {r['pod']:<8} {r['provider']:<12}"
        common.show(f"{head} {r['price_hr']:>8.2f} {r['ours']:>9.2f} {billed:>9} {r['verdict']}")
    ours, told = sum(r["ours"] for r in rows), [r for r in rows if r["billed"] is not None]
    bills = f"; of these {len(told)} were billed {sum(r['billed'] for r in told):.2f} $"
    common.show(f"{len(rows)} creates, {ours:.2f} $ by our clock{bills if told else ''}")
    return 0


def rows_of(run_dir: Path) -> Iterator[dict[str, Any]]:
    """One run's creates in the order in which they were asked for. Dollars; ``billed`` None where it is not told."""
    from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents, books_of
    from uvcc_console.fleet.runclock import run_now

    pods = list(Intents.of(run_dir).tries().values())
    volumes = [t for t in Intents(run_dir / VOLUMES_FILE).tries().values() if not t.given]
    tries = sorted([*pods, *volumes], key=lambda t: (t.asked, t.name))
    now = run_now(run_dir) if tries else 0.0
    for t in tries:
        over = bool(books_of([t], now).over)
        verdict = "open" if t.open else "none" if t.outcome != "gone" else "over" if over else "agrees"
        yield {
            "run": run_dir.name,
            "pod": t.base.rpartition("-")[2] + (" disk" if t in volumes else ""),
            "try": t.name,
            "provider": t.provider,
            "id": t.id,
            "asked": _time(t.asked),
            "ended": "" if t.open else _time(t.ended),
            "outcome": t.outcome or "open",
            "price_hr": round(t.price_hr, 4),
            "ours": round(t.cost(now), 4),
            "billed": t.billed,
            "verdict": "untold" if verdict == "agrees" and t.billed is None else verdict,
        }


def _time(ts: float) -> str:
    try:
        return datetime.fromtimestamp(ts, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


def _cell(value: Any) -> str:
    """A value for a table: numbers as they are; a text that a spreadsheet would run as a formula is quoted as text."""
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(_ODD) else str(value)
