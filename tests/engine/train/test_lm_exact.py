"""A resumed training ends in the very bits of one that was never interrupted, for several ranks as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lm_kit import free_port

pytestmark = pytest.mark.timeout(400)  # a busy machine
HERE = Path(__file__).parent


def exact(folder: Path, world: int, accumulate: str) -> dict[str, list[str]]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE / "exact_rank.py"), str(folder), accumulate, "2"]
    env = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r)}, stderr=subprocess.PIPE, text=True) for r in range(world)
    ]
    said = [p.communicate(timeout=350)[1] for p in ranks]
    assert [p.returncode for p in ranks] == [0] * world, said
    found: dict[str, list[str]] = json.loads((folder / "exact.json").read_text())
    return found


@pytest.mark.parametrize(
    ("world", "accumulate"),
    [
        (1, "2"),
        (2, "2"),
        pytest.param(2, "1,4", marks=pytest.mark.slow),
        pytest.param(4, "1,2,4", marks=pytest.mark.slow),
    ],
)
def test_a_resume_is_exact_for_every_way_of_reducing(tmp_path: Path, world: int, accumulate: str) -> None:
    found = exact(tmp_path / "run", world, accumulate)
    assert len(found) == 4 * len(accumulate.split(","))
    assert {name for name, (straight, again) in found.items() if straight != again} == set()
