"""A command that never looks at the control file: its halt drill fails and says why, and nobody is said to be held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

TRAINER = """
import os, time
from uvcc_engine.contract import RunWriter
steps = int(os.environ["UVCC_STEPS"])
with RunWriter.from_env() as run:
    for step in range(1, steps + 1):
        time.sleep(0.02)
        run.metrics(step, loss=2.0 / step, lr=0.1, toks_per_s=1.0)
        run.heartbeat(step, "train")
    run.exit("done", step=steps)
"""
PROFILE = """
job:   {{kind: command, argv: [{python}, {trainer}], steps: 60}}
fleet: {{provider: local}}
smoke: {{steps: 40}}
gates: {{loss_falls: true, halt_drill_s: 20}}
"""


@pytest.mark.ci("tests/console/rollout/test_readme_trainer.py")
@pytest.mark.timeout(900)
def test_a_trainer_that_does_not_look_fails_its_drill_by_name(tmp_path: Path) -> None:
    trainer, profile = tmp_path / "deaf.py", tmp_path / "deaf.yaml"
    trainer.write_text(TRAINER)
    profile.write_text(PROFILE.format(python=sys.executable, trainer=trainer))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_") or k == PRELOADED_ENV}
    env = kept | {"UVCC_HOME": str(tmp_path / "home")}

    def uvcc(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "uvcc_console.cli.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    try:
        done = uvcc("rollout", str(profile), "--headless")
        assert done.returncode != 0
        assert "the halt drill verified 0 of 1 pod" in done.stdout + done.stderr
        assert "does not look at the control file" in done.stdout + done.stderr
        assert "call RunWriter.step once a step" in done.stdout + done.stderr
    finally:
        ended = uvcc("teardown", "last")
    assert ended.returncode == 0, ended.stdout + ended.stderr
