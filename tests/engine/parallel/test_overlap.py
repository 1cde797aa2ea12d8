"""Several microbatches in work at a time: another order of work, the same messages, masks, weights and losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from training_kit import train

from uvcc_engine.bench.scenarios.hidden_wait import BAR, hidden_rows
from uvcc_engine.contract.errors import ConfigError, PeerLostError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.parallel.group import Communicator
from uvcc_engine.parallel.schedule import Kind, PipelineAction, find_deadlock
from uvcc_engine.sharding.microbatches import IN_FLIGHT, in_flight
from uvcc_engine.sharding.overlap import Overlap, Passage

JOB = PrivateJob(steps=2, batch=8, lr=0.5, momentum=0.9, test_rows=20)


@pytest.mark.parametrize(
    "size",
    [
        Topology(1, 1, 1, 4),
        *(pytest.param(size, marks=pytest.mark.ci(__file__)) for size in (Topology(2, 1, 1, 4), Topology(1, 2, 2, 4))),
    ],
    ids=str,
)
def test_the_order_of_work_changes_no_message_and_no_bit(size: Topology) -> None:
    alone, together = train(JOB, size, in_flight=1), train(JOB, size, in_flight=4, skew=3)
    for c, value in together.items():
        assert value["losses"] == alone[c]["losses"]
        assert value["sent"] == alone[c]["sent"]  # by tag; each was sent once
        for name, tensor in value["state"].items():
            assert np.array_equal(tensor, alone[c]["state"][name]), (c, name)
    ticks = {
        k: [e for n, e in found[Coord(0, 0, 0, 0)]["events"] if n == "pipeline_tick" and e["phase"] == "F"]
        for k, found in (("alone", alone), ("together", together))
    }
    assert not overlaps(ticks["alone"])
    assert overlaps(ticks["together"])
    for found in (alone, together):
        check_streams([found[Coord(0, 0, s, 0)]["trace"] for s in range(size.stages)])


def check_streams(traces: Sequence[Sequence[tuple[str, int, int]]]) -> None:
    """What the stages really did cannot get stuck, a stream for each direction, even if sends wait for receives; with
    the first gradient's receive in front of the first activation's send, on one stream, it does."""
    kinds: dict[tuple[str, int], Kind] = {
        ("F", 1): "send_act",
        ("F", 0): "recv_act",
        ("B", 1): "send_grad",
        ("B", 0): "recv_grad",
    }
    done = [[PipelineAction(kinds[way, sent], m) for way, m, sent in trace] for trace in traces]
    for names in (("send_act", "recv_act"), ("send_grad", "recv_grad")):
        assert find_deadlock([[a for a in actions if a.kind in names] for actions in done]) == []
    if len(traces) > 1:
        early = PipelineAction("recv_grad", 0)
        planted = [[early, *(a for a in done[0] if a != early)], *done[1:]]
        assert find_deadlock(planted)[0] == "stage 0 waits in recv_grad of microbatch 0"


def overlaps(ticks: Sequence[dict[str, Any]]) -> bool:
    spans = sorted((t["start"], t["end"]) for t in ticks)
    return any(later[0] < first[1] for first, later in itertools.pairwise(spans))


class Script:
    """A plane on which a test says what has arrived, and a pass of some rounds that notes when it goes on."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.notes: list[str] = []
        self.waits = 0

    def arrived(self, wants: Iterable[str]) -> bool:
        return set(wants) <= self.here

    def wait_any(self, wants: Sequence[Sequence[str]], other: Any = None) -> None:
        self.waits += 1
        self.here |= set(wants[-1])  # the youngest's messages come first


class Pass:
    """Stands in for ``Progress``: some rounds, each waiting for one message."""

    def __init__(self, script: Script, name: str, rounds: int) -> None:
        self._script, self._name, self._rounds, self._at = script, name, rounds, 0
        self.result = name
        script.notes.append(f"{name} starts")

    @property
    def done(self) -> bool:
        return self._at == self._rounds

    def wants(self) -> list[str]:
        return [f"{self._name}.{self._at}"]

    def advance(self) -> None:
        self._at += 1
        self._script.notes.append(f"{self._name}.{self._at}")


def passage(script: Script, kind: str, m: int, rounds: int, *, after: Iterable[tuple[str, int]] = ()) -> Passage:
    name = f"{kind}{m}"
    return Passage((kind, m), frozenset(after), lambda: True, lambda: Pass(script, name, rounds), script.notes.append)  # type: ignore[arg-type, return-value]


def run(script: Script, depth: int, passes: list[Passage]) -> Overlap:
    overlap = Overlap(script, depth, Communicator("tp", [0], 0))  # type: ignore[arg-type]
    overlap.run(passes)
    return overlap


def test_another_pass_computes_while_one_waits() -> None:
    script = Script()
    run(script, 2, [passage(script, "F", 0, 2), passage(script, "F", 1, 2)])
    assert script.notes == ["F0 starts", "F1 starts", "F1.1", "F1.2", "F1", "F0.1", "F0.2", "F0"]
    assert script.waits == 2  # the last pass waits by itself


def test_a_backward_pass_starts_after_its_forward_pass_and_passes_start_in_order() -> None:
    script = Script()
    run(
        script,
        3,
        [passage(script, "F", 0, 2), passage(script, "B", 0, 1, after=[("F", 0)]), passage(script, "F", 1, 1)],
    )
    assert script.notes.index("F0") < script.notes.index("B0 starts") < script.notes.index("F1 starts")


def test_no_more_passes_are_in_work_than_asked_for() -> None:
    for depth in (1, 2, 3):
        script = Script()
        run(script, depth, [passage(script, "F", m, 1 + m % 3) for m in range(7)])
        live = most = 0
        for note in script.notes:
            live += note.endswith("starts")
            live -= note in {f"F{m}" for m in range(7)}
            most = max(most, live)
        assert (live, most) == (0, depth)


def test_a_failure_of_a_pass_is_the_failure_of_the_step() -> None:
    script = Script()

    class Broken(Pass):
        def advance(self) -> None:
            raise PeerLostError("party 1 is silent", party=1)

    good = passage(script, "F", 0, 1)
    bad = Passage(("F", 1), frozenset(), lambda: True, lambda: Broken(script, "F1", 1), script.notes.append)  # type: ignore[arg-type, return-value]
    with pytest.raises(PeerLostError, match="party 1"):
        run(script, 2, [good, bad])


def test_the_number_in_flight_is_checked() -> None:
    assert in_flight({}) == IN_FLIGHT
    assert in_flight({"UVCC_MICROBATCHES_IN_FLIGHT": "3"}) == 3
    for bad in ("0", "-1", "many", "63", ""):
        with pytest.raises(ConfigError, match="IN_FLIGHT"):
            in_flight({"UVCC_MICROBATCHES_IN_FLIGHT": bad})


@pytest.mark.slow  # three parties, 20 ms apart, for a minute
def test_most_of_the_wait_for_distant_parties_is_hidden_behind_compute() -> None:
    hidden, computing, step = hidden_rows()
    assert [r.name for r in (hidden, computing, step)] == ["hidden_20ms", "computing_20ms", "step_20ms"]
    assert hidden.value >= BAR
    assert step.ratio is not None
    assert step.ratio < 1.0
