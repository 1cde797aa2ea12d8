"""The benchmark of growth counts what real steps and real fleets cost."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from uvcc_engine.bench import scale
from uvcc_engine.bench.party.growth_step import measure
from uvcc_engine.bench.scenarios.growth_axes import AXES, OF_FLEET, Axis, evidence_costs, fleet_costs, group_costs
from uvcc_engine.bench.scenarios.whole_scale import lives
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json


def test_a_wider_model_says_more_and_takes_no_more_rounds() -> None:
    found = []
    for width in (8, 64):
        model = model_to_json(model_of_list([{"linear": width}, "relu", {"linear": 3}], 6, 3))
        found.append(measure({"model": model, "steps": 2, "batch": 4, "reveal": ["loss"]}))
    small, large = found
    assert (small["parameters"], large["parameters"]) == (6 * 8 + 8 + 8 * 3 + 3, 6 * 64 + 64 + 64 * 3 + 3)
    added = large["parameters"] - small["parameters"]
    assert large["bytes"] - small["bytes"] > 3 * 8 * added  # the update's product and its truncation
    assert large["rounds"] == small["rounds"] > 5
    assert small["cpu"] > 0


def test_proved_rows_are_proved() -> None:
    model = model_to_json(model_of_list([{"linear": 4}, "relu", {"linear": 3}], 6, 3))
    asked = {"model": model, "steps": 2, "batch": 4, "reveal": ["loss"]}
    plain, proved = measure(asked), measure(asked | {"verify": "proofs"})
    assert proved["rounds"] > plain["rounds"] + 6
    assert [axis.allowed["memory"] for axis in AXES if axis.name == "proved"] == [0.5]


@pytest.mark.slow
def test_two_ranks_leave_more_leaves_and_every_pod_tells_of_itself() -> None:
    one, two = (fleet_costs(Topology(1, 1, tensor, 1), 8, runs=1) for tensor in (1, 2))
    assert one["bytes"] > 100_000
    assert two["leaves"] > one["leaves"] > 50
    assert two["events"] > one["events"] > 0
    assert two["transcript"] > one["transcript"] > 60 * one["leaves"]  # a record of each, and what is signed
    assert two["rounds"] > 5 < one["rounds"]
    assert two["cpu"] > 0 < one["cpu"]
    assert two["memory"] > one["memory"] > 100e6
    assert set(two) == set(OF_FLEET)


@pytest.mark.slow
def test_a_fleet_beside_another_says_the_same_and_costs_what_one_does() -> None:
    alone, beside = (fleet_costs(Topology(), 8, beside=fleets, runs=1) for fleets in (1, 2))
    assert {c: alone[c] for c in ("bytes", "leaves")} == {c: beside[c] for c in ("bytes", "leaves")}
    assert beside["cpu"] > 0 < beside["memory"]


def test_a_groups_messages_grow_with_its_halvings() -> None:
    """Each of four operations is a message of every member for each of four halvings."""
    assert group_costs(9) == {"messages": 9 * 4 * 4}


def test_a_larger_fleet_leaves_its_auditor_more() -> None:
    one, two = evidence_costs(Topology()), evidence_costs(Topology(2))
    assert 1.5 < two["bundle"] / one["bundle"] < 2.5
    assert two["verify"] > one["verify"] > 0


def test_a_point_may_measure_its_own_cause() -> None:
    axis = Axis("weights", (1, 2, 3), lambda n: {"weights": n * 100.0, "bytes": n**2 * 8.0}, {"bytes": 1.0})
    row = scale.measured_rows(axis)[0]
    assert (row.name, row.met) == ("weights_bytes", False)
    assert [row.name for row in scale.measured_rows(axis)[1:3]] == ["weights_bytes", "weights_bytes@100"]
    assert {cost for one in AXES for cost in one.allowed} <= set(scale.UNITS)


def test_an_axis_that_nobody_measures_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown axis 'width'"):
        scale.main(["--axes", "width"])


def test_a_worker_that_nobody_has_waited_for_yet_has_ended_all_the_same() -> None:
    assert lives(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(ended.pid)
    assert not lives(ended.pid)
