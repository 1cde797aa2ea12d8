"""The benchmarks over pods: what they measure is there. The figures themselves are quoted, never tested."""

from __future__ import annotations

import pytest

from uvcc_console.bench import halts, pods


def test_the_lines_of_many_pods_arrive_and_cost_something() -> None:
    (row,) = pods.bench(1, pods=3, seconds=1.0, least=0.01)  # a loaded machine is no failure
    assert (row.name, row.metric, row.reference) == ("pods_200_cpu", "share", 0.40)
    assert row.value > 0


@pytest.mark.slow
def test_real_pods_hold_and_halt_and_the_sidecar_says_when_it_sent() -> None:
    rows = {(r.name, r.metric): r for r in halts.bench(1, pods=3, presses=3)}
    assert set(rows) == {
        ("halt_dispatch_sidecar", "p99"),
        ("halt_dispatch_sidecar", "p50"),
        ("halt_24_held", "seconds"),
        ("halt_24_halted", "seconds"),
    }
    assert all(r.value > 0 for r in rows.values())
