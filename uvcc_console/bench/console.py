"""``uvcc bench console``: the console in a real terminal under load, every figure beside its bar.

Rows: ``first_frame`` (command to first picture), ``idle_cpu_24`` (a quiet live run of 24 pods), ``ingest_24`` (lines
taken per second when 250,000 are offered) with ``ingest_24_gap`` (longest pause between two ticks meanwhile),
``ingest_20k_cpu``, ``halt_dispatch_ui`` (F9 pressed to the request being durable in the journal, under 20,000 lines/s),
``rss_1e6`` and ``rss_2e6`` (memory after a million lines and after another), ``chart_6x2000``; and those of
``attaching`` (a run of a million events), ``storm`` (F9 on two busy cores under pastes and resizes), ``halts`` (24 real
pods are halted) and ``pods`` (200 pods are followed).
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from uvcc_console.bench.live_console import PODS, READY, console, feed, live_run
from uvcc_console.bench.terminal import ESCAPE, F9, Terminal, python
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.paths import JOURNAL
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.machine.benchrows import Row, row

OFFERED = 250_000
WINDOW_S = 5.0  # of one and the same console, after another for each figure's spread: starting anew tells nothing more
FLOOD_S = 3.0


def first_frame(runs: int) -> Row:
    """``uvcc attach`` to its first picture, seconds."""
    times = []
    with live_run(PODS) as run_dir:
        code = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
        for _ in range(max(3, runs)):
            with Terminal(python("-c", code, "attach", "bench"), {"UVCC_HOME": str(run_dir.parents[1])}) as terminal:
                times.append(terminal.wait_for(READY))
    return row("first_frame", "seconds", "s", times, 0.7)


def _share(terminal: Terminal, seconds: float) -> float:
    before, start = terminal.cpu_s(), time.perf_counter()
    time.sleep(seconds)
    return (terminal.cpu_s() - before) / (time.perf_counter() - start)


def idle_cpu(runs: int) -> Row:
    """Share of a core with 24 pods that beat once a second and log nothing."""
    shares = []
    with live_run(PODS) as run_dir, console(run_dir) as (terminal, _):
        writer = feed(run_dir, 0, 1, WINDOW_S * runs + 2)
        time.sleep(1.0)
        shares = [_share(terminal, WINDOW_S) for _ in range(runs)]
        writer.wait()
    return row("idle_cpu_24", "share", "core", shares, 0.05)


def _lines(report: Path) -> tuple[int, float, float]:
    record = json.loads(report.read_text())
    return int(record["lines"]), float(record["at"]), float(record["gap"])


def ingest(runs: int) -> list[Row]:
    """Lines taken per second out of 250,000 offered, and the longest pause of the screen meanwhile."""
    rates, gaps = [], []
    with live_run(PODS) as run_dir, console(run_dir) as (_, report):
        writer = feed(run_dir, OFFERED, 1, FLOOD_S * runs + 2)
        time.sleep(1.5)
        for _ in range(runs):
            first, at, _ = _lines(report)
            time.sleep(FLOOD_S)
            last, until, gap = _lines(report)
            rates.append((last - first) / (until - at))
            gaps.append(gap)
        writer.wait()
    return [row("ingest_24", "rate", "lines/s", rates, 200_000), row("ingest_24_gap", "seconds", "s", gaps, 0.2)]


def ingest_cpu(runs: int) -> Row:
    """Share of a core at 20,000 lines a second."""
    with live_run(PODS) as run_dir, console(run_dir) as (terminal, _):
        writer = feed(run_dir, 20_000, 1, WINDOW_S * runs + 2)
        time.sleep(1.0)
        shares = [_share(terminal, WINDOW_S) for _ in range(runs)]
        writer.wait()
    return row("ingest_20k_cpu", "share", "core", shares, 0.30)


def halt_dispatch(presses: int = 30) -> list[Row]:
    """Milliseconds from F9 to the request being durable, under 20,000 lines a second: median and 99th percentile."""
    delays: list[float] = []
    with live_run(PODS) as run_dir, console(run_dir) as (terminal, _):
        writer = feed(run_dir, 20_000, 1, presses * 0.8 + 4)
        journal = Journal(run_dir / JOURNAL, readonly=True)
        seq = journal.last_seq()
        time.sleep(1.0)
        for i in range(presses):
            pressed = time.time()
            terminal.press(F9)
            seq, asked = _wait_for(journal, seq, "hold")
            delays.append((asked - pressed) * 1000)
            time.sleep(0.2 + 0.013 * (i % 7))
            terminal.press(ESCAPE)
            seq, _ = _wait_for(journal, seq, "release")
            time.sleep(0.2)
        journal.close()
        writer.kill()
        writer.wait()
    ranked = sorted(delays)
    p99 = ranked[min(len(ranked) - 1, round(0.99 * (len(ranked) - 1)))]
    return [row("halt_dispatch_ui", "p99", "ms", [p99], 100.0), row("halt_dispatch_ui", "p50", "ms", delays)]


def _wait_for(journal: Journal, seq: int, mode: str, limit: float = 10.0) -> tuple[int, float]:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        for found, event in journal.since(seq, kinds=(ev.HaltRequested.kind,)):
            if isinstance(event, ev.HaltRequested) and event.mode == mode:
                return found, time.time()
        time.sleep(0.001)
    raise UvccError(f"no {mode} within {limit:g} s", "the console did not act on the key")


def memory() -> list[Row]:
    """Resident memory after one and after two million lines, MiB."""
    found = []
    with live_run(PODS) as run_dir, console(run_dir) as (terminal, report):
        for total in (1_000_000, 2_000_000):
            writer = feed(run_dir, 150_000, 0, 1_000_000 / 150_000)
            writer.wait()
            end = time.monotonic() + 60
            while _lines(report)[0] < total * 0.98 and time.monotonic() < end:
                time.sleep(0.2)
            found.append(terminal.rss_mib())
    return [row("rss_1e6", "bytes", "MiB", [found[0]], 200.0), row("rss_2e6", "bytes", "MiB", [found[1]], 200.0)]


def chart(runs: int) -> Row:
    """Seconds to draw six curves of 2,000 points on 120 x 30 cells."""
    import math

    from uvcc_console.ui.drawing.glyphs import UNICODE
    from uvcc_console.ui.widgets.canvas import Curve, plot

    xs = array("d", range(2000))
    curves = [
        Curve(xs, array("d", [2 * math.exp(-x / 500) + 0.1 * math.sin(x * (k + 7)) for x in xs]), f"p{k % 3}")
        for k in range(6)
    ]
    times = []
    for _ in range(max(10, runs)):
        start = time.perf_counter()
        plot(curves, 120, 30, UNICODE)
        times.append(time.perf_counter() - start)
    return row("chart_6x2000", "seconds", "s", times, 0.010)


def bench(runs: int = 3, missing: Callable[[str], None] | None = None) -> list[Row]:
    """Every row that needs nothing but this machine's processor and a terminal.

    ``missing`` is told of what could not be measured, and the other rows are there all the same; without it the error
    is raised.
    """
    from uvcc_console.bench import attaching, halts, pods, storm

    parts: list[Callable[[], list[Row]]] = [
        lambda: [chart(runs), first_frame(runs)],
        lambda: attaching.attach(runs),
        lambda: [attaching.folding(runs)],
        lambda: [idle_cpu(runs)],
        lambda: [ingest_cpu(runs)],
        lambda: ingest(runs),
        halt_dispatch,
        storm.bench,
        memory,
        lambda: halts.bench(runs),
        lambda: pods.bench(runs),
    ]
    rows: list[Row] = []
    for part in parts:
        try:
            rows += part()
        except (UvccError, TimeoutError) as e:  # a machine that is overloaded, most likely
            if missing is None:
                raise
            missing(str(e))
    return rows
