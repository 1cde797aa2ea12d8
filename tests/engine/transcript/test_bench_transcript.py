"""The benchmark gives every row, in the shape that all benchmarks share."""

from __future__ import annotations

import json

import pytest

from uvcc_engine.bench.scenarios import transcript_share
from uvcc_engine.bench.transcript import main


@pytest.mark.ci("tests/engine/transcript/test_write_ahead_log.py")
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
            for part in (
                "slowdown",
                "slowdown_cpu",
                "recording",
                "recording_cpu",
                "accounted",
                "waiting",
                "beside",
                "hashing",
                "agreeing",
                "leaves",
            )
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
    assert 0.0 < by_name["transcript.step.demo_direct.hashing"]["value"] < 1.0
    assert by_name["transcript.step.demo_direct.leaves"]["value"] > 30
    assert by_name["transcript.epoch.memory"]["value"] < 150e6


def test_the_hash_s_floor_counts_every_message_at_both_of_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of 1 MB/s, and three parties that record so many bytes of a step that takes two seconds of theirs."""
    monkeypatch.setattr(transcript_share, "digest_rate", lambda: 1e6)
    off, on = {"wall": 1.0, "cpu": 2 / 3}, {"wall": 1.0, "cpu": 1.0, "recording": 0.1, "waiting": 0.05}
    on |= {"beside": 0.1, "agreeing": 0.1}
    plain = {"wall": 1.0, "cpu": 0.7}
    took = [[[off, plain, on | {"leaves": 4, "hashed": hashed}]] * 3 for hashed in (300_000, 100_000, 200_000)]
    monkeypatch.setattr(transcript_share, "run_parties", lambda *job: took)
    rows = {row.name: row for row in transcript_share.share_rows("demo", 3)}
    assert rows["transcript.step.demo.hashing"].value == pytest.approx(0.3)
    assert rows["transcript.step.demo.slowdown_cpu"].value == pytest.approx(1.05), (
        "of the step whose parts are not timed"
    )
    assert rows["transcript.step.demo.recording_cpu"].value == pytest.approx(0.15)
    assert rows["transcript.step.demo.accounted"].value == pytest.approx(3 * 0.35 / 2), "of all three parties"
    assert rows["transcript.step.demo.recording"].value == pytest.approx(0.1)
    assert rows["transcript.step.demo.waiting"].value == pytest.approx(0.05)


def test_the_rate_of_sha256_is_a_processor_s() -> None:
    assert 1e7 < transcript_share.digest_rate() < 1e11
