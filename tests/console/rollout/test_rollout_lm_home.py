"""A language model's checkpoints on a real pod: home while it trains, refused when altered, chosen, restored."""

from __future__ import annotations

import json

import pytest
from test_rollout_lm import Operator, operator  # noqa: F401

from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.checkpoints import checkpoint

SETTINGS = (
    "job.steps=100000",
    "job.overrides.train.eval_every=0",
    "job.overrides.train.save_every=20",
    "job.plan={}",
    "smoke.steps=0",
    "halt.patience=60s",
    "limits.stall=10m",
)

pytestmark = pytest.mark.timeout(1800)


def _trains(s: Snapshot, attempt: int, beyond: int) -> bool:
    live = all(w.state == "started" and w.phase == "train" for w in s.workers.values())
    return s.attempt == attempt and s.status == "running" and live and s.step > beyond


@pytest.mark.slow
def test_checkpoints_come_home_are_chosen_and_restored(operator: Operator) -> None:  # noqa: F811
    me = operator
    sets = [x for setting in SETTINGS for x in ("--set", setting)]
    me.start("rollout", "local-lm-smoke", "--headless", "--yes", "--quiet", *sets)
    s = me.wait("a checkpoint at home", lambda s: s.home and s.home["p0r0"][0] >= 40, 600.0)
    run = me.run_dir.name
    at_home = me.run_dir / "artifacts" / "full" / "p0r0" / "checkpoints"
    assert len(checkpoint.steps_present(at_home)) <= 2

    # the newest on the pod is altered: refused by name, and gone back behind only by decision
    me.run("halt", run, "--now")
    s = me.wait("halt", lambda s: s.stage and s.stage.status == "waiting", 300.0)
    (there,) = me.home.glob("uvcc-*/p0r0/.uvcc/runs/*.full/checkpoints")
    newest, before = checkpoint.steps_present(there)[:2]
    tensors = there / f"step-{newest}" / "rank0.safetensors"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 1
    tensors.write_bytes(data)
    me.start("resume", run).wait(300)
    s = me.wait("a refusal", lambda s: s.status == "failed", 300.0)
    assert s.stage is not None
    assert f"step-{newest}/rank0.safetensors was altered" in s.stage.detail
    assert "--from STEP" in s.stage.detail
    assert s.stage.until > s.stage.ended
    missing = me.start("resume", run, "--from", "7")
    assert missing.wait(300) == 1
    s = me.wait("the steps there are", lambda s: s.stage and "no checkpoint of step 7" in s.stage.detail, 300.0)
    assert str(before) in s.stage.detail  # type: ignore[union-attr]
    me.run("resume", run, "--from", str(before), "--set", "train.lr=0.000123", "--timeout", "300")
    attempt = me.snapshot().attempt
    s = me.wait("steps", lambda s: _trains(s, attempt, before), 300.0)
    assert checkpoint.steps_present(there.parent / "aside1_checkpoints") == [newest]
    assert json.loads((there.parent / "run.json").read_text())["config"]["train"]["lr"] == 0.000123

    # the pod is replaced: another machine goes on with what came home
    me.wait("home again", lambda s: s.home and s.home["p0r0"][0] > newest, 600.0)
    address = me.snapshot().pods["p0r0"].address
    said = me.run("pod", run, "replace", "p0r0", "--timeout", "600", "--json")
    assert "restored from home" in said
    s = me.wait("steps of the new pod", lambda s: _trains(s, s.attempt, newest) and s.attempt > attempt, 300.0)
    assert s.pods["p0r0"].address != address
    me.run("teardown", run)
