"""Two real ranks, one of which does not come: their flight recorders, read while they hang, name it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lm_kit
import pytest

from uvcc_console.core.answers.flight import diagnose, newest
from uvcc_engine.contract.run_files import flight

RANK = """
import sys
from uvcc_engine.contract.run_files.writer import RunWriter, Ticker
from uvcc_engine.train.distributed import start_group
rank = int(sys.argv[2])
group = start_group("cpu", 5.0)
with RunWriter.open(sys.argv[1], "r", rank, f"p0r{rank}s0t0", lead=rank == 0) as writer:
    with Ticker(writer, group.trace.waiting_on, period_s=0.05):
        for step in range(3):
            group.largest([step])
        if rank == 1:
            sys.stdin.read()  # it never comes to the barrier
        else:
            group.barrier()
"""


def _ranks(directory: Path, port: int) -> list[subprocess.Popen[bytes]]:
    import os

    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(directory), str(r)],
            env={**os.environ, **world, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdin=subprocess.PIPE,
        )
        for r in range(2)
    ]


def _answers(directory: Path, ranks: list[subprocess.Popen[bytes]]) -> dict[str, dict[str, Any]]:
    """Ask until rank 0 is in its barrier; both answers to one question."""
    end, number = time.monotonic() + lm_kit.PATIENCE_S, 0
    found: dict[str, dict[str, Any]] = {}
    while time.monotonic() < end:
        assert all(r.poll() is None for r in ranks), "a rank ended"
        number += 1
        flight.ask(directory, "r", str(number))
        asked = time.monotonic()
        while time.monotonic() < min(end, asked + 3):
            for coord in ("p0r0s0t0", "p0r1s0t0"):
                path = directory / flight.name_of(coord)
                if path.exists():
                    found[coord] = json.loads(path.read_bytes())
            if len(found) == 2 and all(a["nonce"] == str(number) for a in found.values()):
                break
            with suppress(subprocess.TimeoutExpired):
                ranks[0].wait(0.02)
        last = found.get("p0r0s0t0", {}).get("tables", {}).get("sequence") or [{}]
        if last[-1].get("op") == "barrier" and all(a["nonce"] == str(number) for a in found.values()):
            return found
    raise AssertionError(f"no two answers with rank 0 in its barrier; last: {found}")


@pytest.mark.ci("tests/engine/train/test_lm_train.py")
def test_the_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    ranks = _ranks(tmp_path, lm_kit.free_port())
    try:
        answers = _answers(tmp_path, ranks)
    finally:
        for r in ranks:
            r.kill()
            r.communicate()
    assert answers["p0r0s0t0"]["waiting_on"] == "other ranks in barrier #4"
    assert "world #4 barrier, started" in newest({**answers["p0r0s0t0"], "tables": {
        "sequence": answers["p0r0s0t0"]["tables"]["sequence"]}})  # fmt: skip
    for answer in answers.values():
        answer["ts"] += 60.0  # they would hang on
    said = diagnose(answers)
    assert said[0].endswith("p0r1s0t0 is at #3 decide, the others at #4 barrier"), said
    torchs = [e for e in answers["p0r0s0t0"]["tables"]["collectives"] if "all_reduce" in e["op"]]
    assert [e["seq"] for e in torchs] == [1, 2, 3]
    assert torchs[0]["sizes"] == [[1]]
