"""What heartbeats measure of steps that are longer than a worker waits between two heartbeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.folding.bulk_folding import Folding
from uvcc_console.core.folding.state import reduce
from uvcc_console.core.snapshot import Snapshot

C = "p0r0s0t0"


def _beat(ts: float, step: int, sent: int, phase: str = "train", **more: Any) -> ev.HeartbeatRead:
    record = {"ts": ts, "step": step, "phase": phase, "sent_bytes": sent} | more
    return ev.HeartbeatRead(ts=ts + 0.5, pod="p0r0", coord=C, record=record)


def _curves(beats: list[ev.HeartbeatRead]) -> tuple[list[float], list[float]]:
    """(seconds, bytes) a step, as both ways of folding see them."""
    s, folding = Snapshot(), Folding(Snapshot())
    for seq, beat in enumerate(beats, start=1):
        s = reduce(s, beat, seq)
        folding.add(beat, seq)
    for found in (s, folding.snapshot):
        lines = found.series[C]
        both = tuple(list(lines[name].ys()) for name in ("step_s", "bytes"))
        assert both == tuple(list(s.series[C][name].ys()) for name in ("step_s", "bytes"))
    return both  # type: ignore[return-value]


def test_a_step_that_has_several_heartbeats_took_all_of_the_time_between_its_first_and_the_next_step_s() -> None:
    """The last heartbeat before a step was over says where its seconds and bytes end, not where they began."""
    times = [(0.0, 0, 0), (4.0, 0, 40), (8.0, 0, 80), (10.0, 1, 100), (14.0, 1, 130), (18.0, 1, 170), (20.0, 2, 200)]
    seconds, sent = _curves([_beat(*one) for one in times])
    assert seconds == [10.0, 10.0]
    assert sent == [100.0, 100.0]


def test_a_hold_is_no_part_of_a_step() -> None:
    beats = [
        _beat(0.0, 1, 0),
        _beat(10.0, 2, 100),
        _beat(11.0, 2, 100, "hold"),
        _beat(71.0, 2, 100, msg="released"),
        _beat(75.0, 2, 140),
        _beat(81.0, 3, 200),
    ]
    assert _curves(beats)[0] == [10.0, 10.0]
    passed_over = [*beats[:2], *beats[3:]]
    assert _curves(passed_over)[0] == [10.0, 10.0]


def test_seconds_that_nobody_computed_in_are_no_step_of_training() -> None:
    """Of a hold whose end is told with the next step, of another phase, of a clock that was set back or does not go."""
    begun = [_beat(0.0, 1, 0), _beat(10.0, 2, 100)]
    for odd in (
        _beat(71.0, 3, 200, msg="released"),
        _beat(71.0, 3, 200, "eval"),
        _beat(5.0, 3, 200),
        _beat(10.0, 3, 200),
    ):
        assert _curves([*begun, odd])[0] == [10.0], odd.record


def test_bytes_are_of_one_process_that_counts_them() -> None:
    """Not of one that was started again and counts from nothing, nor of a heartbeat that tells no count."""
    begun = [_beat(0.0, 1, 500), _beat(10.0, 2, 600)]
    assert _curves([*begun, _beat(20.0, 3, 50), _beat(30.0, 4, 150)])[1] == [100.0, 100.0]
    assert _curves([*begun, _beat(20.0, 3, 600)])[1] == [100.0, 0.0]
    for odd in ("many", None, -1, 1e300):
        assert _curves([*begun, _beat(20.0, 3, 0, sent_bytes=odd), _beat(30.0, 4, 900)])[1] == [100.0], odd


def test_a_figure_that_is_no_number_is_no_point() -> None:
    beats = [_beat(0.0, 1, 0), _beat(10.0, 2, 100, mem_mib="much"), _beat(20.0, 3, 200, mem_mib=7.0)]
    beats[2] = replace(beats[2], record=beats[2].record | {"ts": "then"})
    s = Snapshot()
    for seq, beat in enumerate(beats, start=1):
        s = reduce(s, beat, seq)
    assert list(s.series[C]["mem_mib"].ys()) == [7.0]
    assert list(s.series[C]["step_s"].ys()) == [10.0]
