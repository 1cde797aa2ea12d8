"""The benchmark gives every row, in the shape that all benchmarks share."""

from __future__ import annotations

import json

import pytest

from uvcc_engine.bench.transcript import main


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "1", "--leaves", "2000", "--rounds", "2", "--jobs", "demo_direct", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    shape = {"name", "metric", "value", "unit", "runs", "min", "max", "reference", "ratio", "bar", "met"}
    assert all(set(r) == shape and r["min"] <= r["value"] <= r["max"] for r in rows)
    by_name = {r["name"]: r for r in rows}
    assert set(by_name) == {
        *(f"transcript.record.{n}B" for n in (64, 4096, 65536)),
        "transcript.finish_epoch",
        "transcript.demo_step",
        *(
            f"transcript.step.demo_direct.{part}"
            for part in ("slowdown", "slowdown_cpu", "recording", "recording_cpu", "beside", "agreeing", "leaves")
        ),
        "transcript.epoch.memory",
        "transcript.verify",
        "transcript.verify.memory",
        *(f"machine_{what}" for what in ("python", "copy", "append")),
    }
    assert by_name["transcript.verify"]["met"] is not None
    assert by_name["transcript.verify"]["unit"] == "leaves/s"
    assert by_name["transcript.verify.memory"]["value"] < 100e6
    assert 0.0 < by_name["transcript.step.demo_direct.recording_cpu"]["value"] < 1.0
    assert by_name["transcript.step.demo_direct.leaves"]["value"] > 30
    assert by_name["transcript.epoch.memory"]["value"] < 150e6
