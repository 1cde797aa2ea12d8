"""A program that knows nothing of us: its folder goes to its pod, is set up, run, ended by SIGTERM, and gives back."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV

TRAINER = """
import hashlib, os, sys, time
import helper
out = os.path.join("out", "model.txt")
os.makedirs("out", exist_ok=True)
assert not os.path.exists(out), "each phase has a copy of its own"
if not os.path.exists(DRILLED):
    open(DRILLED, "w").close()
    time.sleep(600)  # the drill ends it, however late it comes
assert hashlib.sha256(os.environ["THEIR_TOKEN"].encode()).hexdigest() == TOKEN
for step in range(int(os.environ["UVCC_STEPS"])):
    time.sleep(0.02)
with open(out, "w") as f:
    f.write(f"{helper.WORD} {os.environ['UVCC_STEPS']} {sys.prefix}")
"""
PROFILE = """
job:
  kind: command
  argv: [python, train.py]
  steps: 30
  code: mine
  setup: cp lib/helper.py "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  artifacts: [out]
  halt: sigterm
fleet: {provider: local}
secrets: [THEIR_TOKEN]
smoke: {steps: 25}
gates: {loss_falls: false, halt_drill_s: 90}
"""


@pytest.mark.ci("tests/console/fleet/test_code_on_pods.py")
@pytest.mark.timeout(900)
def test_it_goes_to_its_pod_and_comes_home(tmp_path: Path) -> None:
    code = tmp_path / "mine"
    (code / "lib").mkdir(parents=True)
    token = secrets.token_hex(16)
    known = f"DRILLED = {str(tmp_path / 'drilled')!r}\nTOKEN = {hashlib.sha256(token.encode()).hexdigest()!r}\n"
    (code / "train.py").write_text(known + TRAINER)
    (code / "lib" / "helper.py").write_text("WORD = 'hello'\n")
    (code / ".env").write_text("SECRET=1\n")
    (tmp_path / "theirs.yaml").write_text(PROFILE)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_") or k == PRELOADED_ENV}
    env = kept | {"UVCC_HOME": str(tmp_path / "home")}

    def uvcc(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "uvcc_console.cli.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    try:
        planned = uvcc("plan", str(tmp_path / "theirs.yaml"))
        assert "by SIGTERM alone" in planned.stdout
        assert "2 files" in planned.stdout
        assert "not .env (looks like a secret" in planned.stdout
        refused = uvcc("rollout", str(tmp_path / "theirs.yaml"), "--headless")
        assert refused.returncode == 2
        assert "THEIR_TOKEN of the profile's secrets is not set here" in refused.stderr
        assert not (tmp_path / "home" / "runs").exists()
        env["THEIR_TOKEN"] = token
        done = uvcc("rollout", str(tmp_path / "theirs.yaml"), "--headless")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        uvcc("teardown", "last")
    (run_dir,) = (tmp_path / "home" / "runs").iterdir()
    kept_here = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert [path for path in kept_here if token.encode() in path.read_bytes()] == []
    artifacts = run_dir / "artifacts"
    for phase, steps in (("smoke", "25"), ("full", "30")):
        word, count, prefix = (artifacts / phase / "p0r0" / "files" / "out" / "model.txt").read_text().split()
        assert (word, count) == ("hello", steps)
        assert prefix.endswith(".env")  # what was set up is its environment
    record = json.loads((artifacts / "code.json").read_text())
    assert [f["path"] for f in record["files"]] == ["lib/helper.py", "train.py"]
    watched = uvcc("watch", "last", "--no-follow", "--kind", "stage").stdout
    assert "SIGTERM ended 1 of 1 processes" in watched
    assert f"tree {record['sha256'][:12]}" in watched
