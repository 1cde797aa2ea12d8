"""What a federation adds to a step: turns with and without the exchange, and which steps they are held to."""

from __future__ import annotations

import time
from typing import Any

import pytest

from uvcc_console.bench import federation
from uvcc_console.bench.bars import BARS
from uvcc_console.bench.federation import Turn, TurnStep, paired
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.rollout.federated import peers as peers_module
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.topology import PARTIES


def test_only_whole_steps_count_and_neighbours_are_held_against_each_other() -> None:
    turns = [Turn(0.0, 4.0, on=True), Turn(4.0, 8.0, on=False), Turn(8.0, 12.0, on=False), Turn(12.0, 16.0, on=True)]
    times = [(0.0, 2.0), (2.0, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 5.5), (8.0, 11.0), (13.0, 15.0)]
    steps = [TurnStep(begin, end, cpu=n) for n, (begin, end) in enumerate(times)]

    def wall(step: TurnStep) -> float:
        return step.seconds

    assert paired(turns, steps, wall) == ([1.0, 2.0], [1.0, 3.0])  # one long step of three counts as one
    assert paired(turns, steps, lambda step: step.cpu) == ([1.0, 6.0], [4.0, 5.0])
    assert paired(turns[:3], steps, wall) == ([1.0], [1.0])  # a turn without a neighbour is held against nothing
    assert paired(turns[2:], steps[:4], wall) == ([], [])


@pytest.mark.ci(__file__)
def test_the_exchange_goes_on_in_turns_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 2.1

    def trained(self: federation.Trainers) -> list[list[tuple[float, float, float]]]:
        begin = time.monotonic()
        time.sleep(seconds)
        steps = [(begin + n * 0.05, begin + n * 0.05 + 0.04, 0.02) for n in range(int(seconds / 0.05))]
        return [steps] * PARTIES

    told: list[tuple[bool, int]] = []
    reports: list[Any] = []
    leave, turn = Rendezvous.leave_report, federation.take_turn

    def leave_counted(self: Rendezvous, *args: Any) -> None:
        reports.append(args)
        leave(self, *args)

    async def turn_counted(peers: Any, training: Any, turn_s: float, relay: Any, *, on: bool) -> Turn:
        before = len(reports)
        found = await turn(peers, training, turn_s, relay, on=on)
        told.append((on, len(reports) - before))
        return found

    monkeypatch.setattr(federation.Trainers, "train", trained)
    monkeypatch.setattr(federation, "take_turn", turn_counted)
    monkeypatch.setattr(Rendezvous, "leave_report", leave_counted)
    monkeypatch.setattr(peers_module, "REPORT_S", 0.1)
    monkeypatch.setattr(peers_module, "LOOK_S", 0.05)
    step, work, conductor, relay, taken = federation.rows_of("", 1, 0.7)
    assert (step.name, step.metric, conductor.name) == ("federation_step", "ratio", "federation_conductor")
    assert (work.name, work.value, work.reference) == ("federation_work", 1.0, pytest.approx(0.02 * PARTIES))
    assert (relay.name, relay.metric) == ("federation_relay", "share")
    assert 0 < relay.max < 1
    assert (taken.name, taken.metric) == ("federation_taken", "share")
    assert 0 < taken.value < 1
    assert BARS["federation_taken", "share"].value == 0.02
    assert step.value == pytest.approx(1.0, abs=1e-3)  # these steps took as long in either
    assert step.reference == pytest.approx(0.04)
    assert 0 < conductor.value < 1
    assert {on for on, _ in told} == {True, False}
    assert all(number > 0 if on else number == 0 for on, number in told[:-1]), told
    assert [BARS[f"federation_{what}", "ratio"].value for what in ("step", "work")] == [1.02, 1.02]


def test_a_turn_that_the_end_cut_short_says_no_share() -> None:
    whole, cut = Turn(0.0, 2.0, on=True, cpu=0.6, relay=0.2), Turn(2.0, 2.01, on=True, cpu=0.0, relay=0.02)
    conductor, relay, _ = federation.shares("", [whole, cut], 2.0)
    assert (conductor.value, relay.max, relay.runs) == (pytest.approx(0.1), pytest.approx(0.1), 1)
    with pytest.raises(UvccError, match="no turn with the exchange was whole"):
        federation.shares("", [cut, Turn(2.0, 4.0, on=False)], 2.0)


def test_turns_that_hold_no_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation.Trainers, "train", lambda _: [[(0.0, 1.0, 0.1)]] * PARTIES)
    with pytest.raises(UvccError, match="no turn holds a whole step"):
        federation.rows_of("_20ms", 1, 0.1)
