"""The plane's benchmark runs, names its rows as agreed, and its soak holds."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from uvcc_engine.bench import plane
from uvcc_engine.contract.machine.benchrows import row, to_json, to_text


def test_a_row_is_a_median_and_its_ratio() -> None:
    made = row("x", "rate", "msg/s", [3.0, 1.0, 2.0], 4.0)
    assert asdict(made) == {
        "name": "x",
        "metric": "rate",
        "value": 2.0,
        "unit": "msg/s",
        "runs": 3,
        "min": 1.0,
        "max": 3.0,
        "reference": 4.0,
        "ratio": 0.5,
        "bar": None,
        "met": None,
    }
    assert json.loads(to_json([made])) == [asdict(made)]
    assert "msg/s" in to_text([made])


def measure(capsys: pytest.CaptureFixture[str], *parts: str) -> dict[tuple[str, str], dict[str, float]]:
    found = []
    for part in parts:
        assert plane.main(["--quick", "--runs", "1", "--json", "--only", part]) == 0
        found += json.loads(capsys.readouterr().out)
    return {(r["name"], r["metric"]): r for r in found}


@pytest.mark.ci("tests/engine/plane/test_plane_live.py")
def test_the_direct_rows_are_held_against_the_echo(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(capsys, "direct")
    ours = {at: r for at, r in rows.items() if not at[0].startswith("machine_")}
    assert set(ours) == {("direct_1m", "rate"), ("direct_rtt_1k", "p50"), ("direct_rtt_1k", "p99")}
    assert all(r["value"] > 0 and r["reference"] > 0 and r["ratio"] > 0 for r in ours.values())
    big, loop = rows["direct_1m", "rate"], rows["machine_sealed_loop", "rate"]
    assert big["reference"] == loop["value"] > 0
    assert big["bar"] == pytest.approx(plane.SEALED_SHARE * loop["value"])
    assert big["met"] == (big["value"] >= big["bar"])
    speed = {name: rows[name, "rate"]["ratio"] for name in ("machine_python", "machine_copy", "machine_append")}
    assert rows["direct_rtt_1k", "p50"]["bar"] == pytest.approx(120 / speed["machine_python"])


@pytest.mark.slow
def test_the_relay_rows_have_the_agreed_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure(capsys, "relay", "idle")
    assert {at for at in rows if not at[0].startswith("machine_")} == {
        ("relay_http_1k", "rate"),
        ("relay_stream_1k", "rate"),
        ("relay_stream_1m", "rate"),
        ("disk_fsync_1m", "rate"),
        ("relay_idle_192", "share"),
        ("relay_idle_192", "p99"),
    }


@pytest.mark.ci("tests/engine/plane/test_plane_live.py")
def test_a_short_soak_loses_and_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--faults", "--workers", "6", "--messages", "1500", "--kills", "1", "--json", "--seed", "3"]
    assert plane.main(command) == 0
    rows = {r["name"]: r["value"] for r in json.loads(capsys.readouterr().out)}
    assert rows["soak_lost"] == rows["soak_twice"] == 0
    assert rows["soak"] > 0
