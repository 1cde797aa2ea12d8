"""The rehearsal of a network: its job and its reports come back as they were, and nothing that a pod says raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.peer_protocol.peer_messages import PairFigures
from uvcc_engine.contract.peer_protocol.preflight_job import (
    GroupFigures,
    PreflightJob,
    PreflightReport,
    PreflightTrouble,
)
from uvcc_engine.contract.run_files.records import Malformed

JOB = PreflightJob(timeout_s=3.0, reduce_mib=1.0, pair_mib=2.0, device="auto", peers={"1": {"party": 1}})
REPORT = PreflightReport(
    run="r",
    coord="p0r0s0t0",
    backend="gloo",
    groups={"dp": GroupFigures(2, 1.5, 90.0)},
    pairs={2: PairFigures(1.0, 2.0, 3.0)},
    trouble=(PreflightTrouble("pair 1", "no answer", "look there"),),
)
SAID: dict[str, Any] = json.loads(json.dumps(REPORT.to_json()))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_job_and_report_come_back_as_they_were() -> None:
    assert PreflightJob.from_json(json.loads(json.dumps(JOB.to_json()))) == JOB
    assert PreflightReport.parse(SAID) == REPORT


@pytest.mark.parametrize("odd", [
    {"timeout_s": 0.0},
    {"reduce_mib": -1.0},
    {"pair_mib": 1e9},
    {"device": "tpu"},
    {"peers": []},
    {"timeot_s": 1.0},
])  # fmt: skip
def test_a_job_that_is_none_is_refused_by_name(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(odd))):
        PreflightJob.from_json(JOB.to_json() | odd)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SAID)), JSON)
def test_whatever_a_pod_reports_is_a_report_or_malformed(key: str, odd: Any) -> None:
    assert isinstance(PreflightReport.parse(SAID | {key: odd}), PreflightReport | Malformed)
    assert isinstance(PreflightReport.parse(odd), Malformed)


def test_text_of_a_pod_is_cleaned() -> None:
    said = SAID | {"trouble": [{"part": "groups", "what": "\x1b[31mred", "hint": 3}]}
    found = PreflightReport.parse(said)
    assert isinstance(found, PreflightReport)
    assert "\x1b" not in found.trouble[0].what
