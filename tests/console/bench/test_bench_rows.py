"""Benchmark rows have the shape that the manual's tables are made from."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from uvcc_console.bench.demo import memory_mib
from uvcc_engine.contract.machine import benchrows as rows


def test_rows_carry_medians_and_ratios() -> None:
    found = rows.row("first_step", "seconds", "s", [4.0, 2.0, 3.0], 20.0)
    assert (found.value, found.min, found.max, found.runs) == (3.0, 2.0, 4.0, 3)
    assert found.ratio == pytest.approx(0.15)
    assert set(json.loads(rows.to_json([found]))[0]) == {
        "name", "metric", "value", "unit", "runs", "min", "max", "reference", "ratio", "bar", "met",
    }  # fmt: skip


def test_memory_counts_marked_processes_only() -> None:
    code = "import sys; block = bytearray(64 << 20); print('up', flush=True); sys.stdin.read()"
    env = {**os.environ, "UVCC_HOME": "/marked-by-this-test"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 60 < memory_mib("/marked-by-this-test") < 200
        assert memory_mib("/marked-by-nobody") == 0
        child.communicate(b"")
