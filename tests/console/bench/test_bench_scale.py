"""The benchmark of growth reads a run as the console does, and more workers cost more."""

from __future__ import annotations

from uvcc_console.bench.live_console import live_run
from uvcc_console.bench.scale import ALLOWED, UNITS, folded


def test_every_worker_adds_to_the_journal_and_to_the_state() -> None:
    found = []
    for workers in (3, 30):
        with live_run(workers) as run_dir:
            found.append(folded(run_dir, workers))
    few, many = found
    assert 5 < many["journal"] / few["journal"] < 15
    assert many["snapshot"] > 3 * few["snapshot"] > 0
    assert many["fold"] > few["fold"] > 0
    assert many["judge"] > 0
    assert set(ALLOWED) <= set(UNITS)
