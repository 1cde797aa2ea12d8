"""Flight recorders side by side: who is behind, who called something else, and no blame while things move."""

from __future__ import annotations

from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.answers import flight
from uvcc_console.core.folding.state import fold


def entry(seq: int, op: str = "all_reduce", ts: float = 100.0, state: str = "started", **more: Any) -> dict[str, Any]:
    return {"group": "world", "seq": seq, "op": op, "state": state, "ts": ts, **more}


def answer(*entries: dict[str, Any], ts: float = 110.0, table: str = "sequence") -> dict[str, Any]:
    return {"ts": ts, "tables": {table: list(entries)}}


def test_the_one_that_is_behind_is_named_once_nothing_moves() -> None:
    answers = {f"p0r{r}s0t0": answer(entry(41), entry(42)) for r in range(3)}
    answers["p0r1s0t0"] = answer(entry(41, state="completed"))
    (said,) = flight.diagnose(answers)
    assert said == "p0 world: nothing moved for 10 s; p0r1s0t0 is at #41 all_reduce, the others at #42 all_reduce"


def test_nobody_is_blamed_while_collectives_come_and_go() -> None:
    answers = {"p0r0s0t0": answer(entry(900, ts=109.9)), "p0r1s0t0": answer(entry(880, ts=109.0))}
    assert flight.diagnose(answers) == []
    assert flight.newest(answers["p0r1s0t0"]) == "world #880 all_reduce, started, 1.0 s old"


def test_whoever_called_something_else_is_named_even_while_things_move() -> None:
    answers = {f"p0r{r}s0t0": answer(entry(7, ts=109.9, sizes=[[4]])) for r in range(3)}
    answers["p0r2s0t0"] = answer(entry(7, ts=109.9, sizes=[[5]]))
    assert flight.diagnose(answers) == ["p0 world: p0r2s0t0 called all_reduce [[5]] as #7, the others all_reduce [[4]]"]


def test_parties_and_groups_with_traffic_between_two_are_not_compared() -> None:
    apart = {"p0r0s0t0": answer(entry(3)), "p1r0s0t0": answer(entry(9))}
    pairwise = {"p0r0s0t0": answer(entry(3, "send 1 to 1")), "p0r1s0t0": answer(entry(9, "all_reduce"))}
    assert flight.diagnose(apart) == flight.diagnose(pairwise) == []


def test_torchs_table_counts_where_the_trainer_numbered_nothing_and_damage_is_no_table() -> None:
    answers = {f"p0r{r}s0t0": answer(entry(4 + r), table="collectives") for r in range(2)}
    assert "p0r0s0t0 is at #4" in flight.diagnose(answers)[0]
    answers["p0r1s0t0"]["tables"]["collectives"] = {"error": "RuntimeError: changed"}
    assert flight.diagnose(answers) == []
    assert flight.newest({"ts": 1.0, "waiting_on": "p2", "waiting_s": 3.0}) == "waits for p2 for 3.0 s"


def test_a_reading_stands_in_the_snapshot_until_the_next_phase() -> None:
    read = ev.FlightRead(folder="artifacts/flight/x", newest={"p0r0s0t0": "idle"}, findings=["p0 world: late"], ts=5.0)
    s = fold([ev.PhaseStarted(phase="full", engine_run="r.full", steps=1, sid_job=""), read])
    assert s.flight is not None
    assert (s.flight.ts, s.flight.findings) == (5.0, ("p0 world: late",))
    assert s.log[-1].level == "warn"
    s = fold([ev.PhaseStarted(phase="full", engine_run="r.full", steps=1, sid_job="", attempt=1)], s)
    assert s.flight is None
