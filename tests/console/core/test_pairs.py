"""What is known of the traffic between two parties, from what their workers' planes counted."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.folding import pairs
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.journal import snapshot_cache
from uvcc_console.core.snapshot import EMPTY, ForecastView, Snapshot, WorkerView
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.panels.plane import pair_lines

COORDS = [f"p{p}r{r}s0t0" for r in range(2) for p in range(3)]
RUNNING = Snapshot(phase="full", workers=MappingProxyType({c: WorkerView(c, pod=c[:4], step=50) for c in COORDS}))


def said(s: Snapshot, at: float, coord: str, peer: Any, **counts: Any) -> Snapshot:
    fields = {"coord": coord, "peer": peer, "began": 3.5, **counts}
    e = ev.EngineEvent(ts=at, at=at, pod=coord[:4], level="info", event="plane_counters", fields=fields)
    return reduce(s, e)


def two_words(coord: str = "p0r0s0t0", peer: int = 1) -> Snapshot:
    s = said(RUNNING, 100.0, coord, peer, bytes_out=1_000, bytes_in=500, waited_ms=1_000, round_trip_us=240)
    return said(s, 110.0, coord, peer, bytes_out=21_000, bytes_in=10_500, waited_ms=6_000, round_trip_us=260)


def test_a_pace_is_what_happened_between_two_words_of_the_same_process() -> None:
    view = two_words().pairs["p0r0s0t0>1"]
    assert (view.out_s, view.in_s, view.wait_share) == (2_000.0, 1_000.0, 0.5)
    again = said(two_words(), 120.0, "p0r0s0t0", 1, bytes_out=10, began=117.0)
    assert again.pairs["p0r0s0t0>1"].out_s == -1.0  # another process counts from nothing
    assert not two_words().log  # every few seconds from each worker: not a line of the log


def test_the_pairs_of_parties_are_sums_over_their_workers_and_the_most_waited_for_leads() -> None:
    s = RUNNING
    for at in (100.0, 110.0):
        for r in range(2):
            for peer, wait in ((1, 100), (2, 300)):
                k = int(at - 90) // 10
                s = said(s, at, f"p0r{r}s0t0", peer, bytes_out=k * 50_000, waited_ms=k * wait, round_trip_us=1000 + r)
    first, second = pairs.by_party(s)
    assert (first.src, first.dst, second.dst) == (0, 2, 1)
    assert (first.out_s, first.workers, first.bytes_out) == (10_000.0, 2, 200_000)
    assert first.wait_share == pytest.approx(0.03)
    assert first.round_trip_s == pytest.approx(0.0010005)


@pytest.mark.parametrize(
    ("coord", "peer"),
    [("p0r0s0t0", 0), ("p0r0s0t0", 7), ("p0r0s0t0", "1"), ("p0r0s0t0", None), ("nobody", 1), ("p0r0s0t0" * 9, 1)],
)
def test_words_of_nobody_or_about_nobody_change_nothing(coord: str, peer: Any) -> None:
    assert said(RUNNING, 100.0, coord, peer, bytes_out=1).pairs == {}


@pytest.mark.parametrize("odd", [-1, 1 << 80, 2.5, "many", None, [1], float("nan")])
def test_odd_counts_of_a_pod_are_nothing_and_break_nothing(odd: Any) -> None:
    s = said(two_words(), 120.0, "p0r0s0t0", 1, bytes_out=odd, waited_ms=odd, round_trip_us=odd, retransmits=odd)
    assert len(pairs.by_party(s)) == 1
    assert pair_lines(View(snap=s, now=121.0), 100)


def test_an_odd_name_of_a_worker_is_no_pair() -> None:
    odd = replace(RUNNING, workers=MappingProxyType({"trainer": WorkerView("trainer")}))
    assert said(odd, 100.0, "trainer", 1, bytes_out=1).pairs == {}


def test_bytes_stand_beside_what_was_foretold_for_the_steps_done() -> None:
    assert pairs.foretold_so_far(RUNNING) is None
    forecast = ForecastView(200, 60.0, 1.0, 0.0, 0.0, bytes=400_000.0, bytes_error=8_000.0)
    s = replace(two_words(), prediction=forecast)
    assert pairs.foretold_so_far(s) == (100_000.0, 2_000.0)
    text = "\n".join("".join(part for part, _ in line) for line in pair_lines(View(snap=s, now=111.0), 100))
    assert "sent in all 21 kB  foretold for 50 steps: 100 kB, give or take 2 kB" in text
    assert "P0 to P1 2 kB/s 0.26 ms 50% 6.0 s 21 kB 0" in " ".join(text.split())


def test_a_kept_snapshot_brings_the_pairs_and_a_summary_leaves_them_out() -> None:
    s = two_words()
    assert snapshot_cache.from_plain(snapshot_cache.as_plain(s, 64)).pairs == s.pairs
    assert snapshot_cache.summary(s).pairs == EMPTY
