"""Several ranks of a party on a GPU: NCCL, or the host, carries their sums, and all bits are those of processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("ranks_on_gpu.py")


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["off", "proofs"])
@pytest.mark.parametrize("size", ["1 1 2 1", "1 2 1 2", "2 2 2 2"])
@pytest.mark.parametrize("carried", ["cuda", "cpu"])
def test_ranks_on_a_gpu_have_the_bits_of_processors(carried: str, size: str, verify: str) -> None:
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs a GPU and Triton")
    command = [sys.executable, str(PROGRAM), *size.split(), carried, verify]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PROGRAM.parents[1] / "parallel", PROGRAM.parents[3])))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["backends"] == ["nccl" if carried == "cuda" else "unix"]
