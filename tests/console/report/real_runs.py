"""Two real rollouts for the reports' tests: a clean one over direct links, and one over a relay under injected faults.

They run at once, once per test session however many workers pytest has: whoever comes first makes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

FAULTS = {"seed": 3, "drop": 0.03, "duplicate": 0.03, "corrupt": 0.03, "reorder": 0.05}
PATIENCE_S = 400.0
_JOB = "kind: private, model: mlp-digits, batch: 16, lr: 0.3, momentum: 0.9, seed: 7, test_rows: 20"
_REST = """
fleet:    {provider: local}
smoke:    {replicas: 1, steps: 1}
gates:    {loss_falls: false, result_hashes: 1, verifier: ok, halt_drill_s: 0}
limits:   {hourly: 0, total: 0, ttl: 1h, wait: 1m}
halt:     {lease: 60s, patience: 60s, auto: [hold, halt, term]}
"""
PROFILES = {
    "clean": f"""
job:      {{{_JOB}, steps: 3, checkpoint_every: 3, reveal: [loss, accuracy]}}
topology: {{replicas: 1, stages: 1, tensor: 2, microbatches: 1}}
link:     direct
{_REST}""",
    "faulty": f"""
job:      {{{_JOB}, steps: 4, checkpoint_every: 2, reveal: [loss, accuracy]}}
topology: {{replicas: 1, stages: 1, tensor: 1, microbatches: 1}}
link:     relay
env:      {{UVCC_PLANE_FAULTS: '{json.dumps(FAULTS)}'}}
{_REST}""",
}


def make(home: Path) -> dict[str, Path]:
    """Run both to their ends. Each process has this data folder and a temporary folder of its own."""
    temp = Path(tempfile.mkdtemp(prefix="uv", dir="/tmp"))  # socket paths below it must stay short
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_") or k == PRELOADED_ENV}
    env = {**kept, "UVCC_HOME": str(home), "TMPDIR": str(temp), "OMP_NUM_THREADS": "1"}
    running = {}
    for name, text in PROFILES.items():
        profile = home / f"{name}.yaml"
        profile.write_text(text)
        command = [sys.executable, "-m", "uvcc_console.cli.main", "rollout", str(profile), "--headless", "--yes"]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running[name] = subprocess.Popen([*command, "--seed", "7", "--json"], env=env, **pipes)  # type: ignore[call-overload]
    found = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        found[name] = Path(json.loads(out)["path"])
    shutil.rmtree(temp, ignore_errors=True)  # a pod's last process may still tidy up
    return found


def shared(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two runs' folders, made by the first test worker that asks."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    home = root / "real-runs"
    home.mkdir(exist_ok=True)
    done = home / "done.json"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            done.write_text(json.dumps({name: str(path) for name, path in make(home).items()}))
        return {name: Path(path) for name, path in json.loads(done.read_text()).items()}
