"""What an agent and its zygote say: each record comes back as it was, and whatever a line holds, nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.agent.processes.zygote_messages import (
    ForkFailed,
    ForkRequest,
    ImportsDone,
    WorkerExited,
    WorkerForked,
    ZygoteReport,
    encode,
    parse_report,
    parse_request,
)
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.run_files.records import Malformed

REPORTS: list[ZygoteReport] = [
    ImportsDone({"torch": "ImportError: none"}, 1, 2.5, "2", "12", "2.21.5", "there"),
    WorkerForked("r", "p0r0s0t0", ProcessId(7, 8, "boot"), 1.5),
    ForkFailed("r", "p0r0s0t0", "cannot fork: no memory"),
    WorkerExited(7, 9),
]
JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers())


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: r.KIND)
def test_every_report_comes_back_as_it_was(report: ZygoteReport) -> None:
    assert encode(report).endswith(b"\n")
    assert encode(report).count(b"\n") == 1
    assert parse_report(encode(report)) == report


def test_a_request_comes_back_as_it_was() -> None:
    request = ForkRequest(WorkerSpec(run="r", kind="command", coord="p0r0s0t0", argv=["true"], dir="/d"), "/d/log")
    assert parse_request(encode(request)) == request


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(REPORTS), st.sampled_from(["kind", "pid", "status", "run", "coord", "id", "missing"]), JSON)
def test_whatever_a_line_holds_is_a_report_or_malformed(report: ZygoteReport, key: str, odd: Any) -> None:
    line = json.dumps(json.loads(encode(report)) | {key: odd}).encode()
    assert isinstance(parse_report(line), ZygoteReport | Malformed)
    assert isinstance(parse_request(line), Malformed)


@pytest.mark.parametrize("line", [b"", b"[", b"3", b"\xff", b"[" * 9999, b'{"kind": [1]}', b'{"kind": "exited"}'])
def test_a_line_that_is_none_says_so(line: bytes) -> None:
    assert isinstance(parse_report(line), Malformed)
    assert isinstance(parse_request(line), Malformed)
