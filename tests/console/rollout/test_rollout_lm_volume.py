"""A language model's checkpoints on a volume: the pod in a lost one's place finds them, and nothing is fetched home."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from test_rollout_lm import Operator, operator  # noqa: F401
from test_rollout_lm_home import SETTINGS, _trains

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import ConfigError

LM = {"kind": "lm", "steps": 4}
PRIVATE = {"kind": "private", "model": "mlp-digits", "steps": 4}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_another_pod_goes_on_from_the_volume(operator: Operator, tmp_path: Path) -> None:  # noqa: F811
    me, disk = operator, tmp_path / "volume"
    disk.mkdir()
    settings = (*SETTINGS, f"fleet.volume={{path: {disk}}}", "job.fetch_checkpoint=false")
    me.start(
        "rollout", "local-lm-smoke", "--headless", "--yes", "--quiet", *(x for s in settings for x in ("--set", s))
    )
    s = me.wait("a checkpoint", lambda s: s.checkpoints.get("p0r0", (-1, ""))[0] >= 40, 600.0)
    run = me.run_dir.name
    (lying,) = disk.glob("uvcc-checkpoints/*.full/p0r0")
    assert checkpoint.steps_present(lying)[0] >= 40
    (there,) = me.home.glob("uvcc-*/p0r0/.uvcc/runs/*.full/checkpoints")
    assert os.readlink(there) == str(lying)
    attempt, address = s.attempt, s.pods["p0r0"].address
    said = me.run("pod", run, "replace", "p0r0", "--timeout", "600", "--json")
    assert "found on its volume" in said
    s = me.wait("steps of the new pod", lambda s: _trains(s, s.attempt, 40) and s.attempt > attempt, 300.0)
    assert s.pods["p0r0"].address != address
    events = [e for _, e in iter_events(me.run_dir / "journal.sqlite")]
    (restored,) = [e for e in events if isinstance(e, ev.EngineEvent) and e.event == "pod_restored" and not e.pod]
    assert (restored.fields["volumes"], restored.fields["steps"]["p0r0"] >= 40) == (["p0r0"], True)
    assert not list((me.run_dir / "artifacts").rglob("*.safetensors"))
    assert not any(isinstance(e, ev.CheckpointHome) for e in events)
    me.run("teardown", run)
    assert not list(disk.glob("uvcc-checkpoints/*/p0r0"))
    shutil.rmtree(disk)


@pytest.mark.parametrize(
    ("job", "fleet", "said"),
    [
        (LM, {"provider": "skypilot", "volume": {"size_gb": 50}}, "volumes in zones of Runpod: infra names none"),
        (LM, {"provider": "skypilot", "infra": ["aws"], "volume": {"name": "a"}}, "infra aws has none"),
        (LM, {"provider": "skypilot", "infra": ["runpod/CA"], "volume": {"size_gb": 50}}, "write runpod/CA/CA-MTL-3"),
        (LM, {"provider": "runpod", "volume": {"path": "/data"}}, "volume.size_gb says how large"),
        (LM, {"provider": "runpod", "volume": {"size_gb": 50, "name": "a"}}, "give one of them"),
        (LM, {"provider": "runpod", "volume": {"name": "a", "price": 1.0}}, "costs you, whether the run is or not"),
        (LM, {"provider": "runpod", "volume": {"name": "../a"}}, "fleet.volume.name"),
        (LM, {"provider": "vast", "volume": {"size_gb": 50, "mount": "/usr/lib"}}, "would hide what the image has"),
        (LM, {"provider": "vast", "volume": {"size_gb": 50, "mount": "/root"}}, "would hide what the image has"),
        (LM, {"provider": "vast", "volume": {"size_gb": 50, "mount": "/a/../b"}}, "fleet.volume.mount"),
        (
            LM,
            {"provider": "lambda", "volume": {"size_gb": 50, "mount": "/data"}},
            "says itself where a volume is mounted",
        ),
        (
            LM,
            {"provider": "prime", "volume": {"size_gb": 50, "mount": "/data"}},
            "says itself where a volume is mounted",
        ),
        (LM, {"provider": "slurm", "volume": {"path": "/data", "mount": "/a"}}, "volume.path names a folder"),
        (LM, {"provider": "slurm", "volume": {"size_gb": 50}}, "volume.path names a folder"),
        (LM, {"provider": "local", "volume": {"path": "data"}}, "fleet.volume.path"),
        (LM, {"provider": "runpod", "volume": {"size": 50}}, "unknown key fleet.volume.size"),
        (PRIVATE, {"provider": "runpod", "volume": {"size_gb": 50}}, "open under their own pod's key alone"),
        ({"kind": "command", "argv": ["x"], "steps": 4}, {"volume": {"path": "/data"}}, "has no checkpoints"),
        (LM, {"provider": "runpod", "volume": {"size_gb": 50}, "fallbacks": [{"provider": "closet"}]}, "closet"),
    ],
)
def test_what_cannot_be_is_named_in_the_plan(job: dict[str, object], fleet: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"job": job, "fleet": fleet})
    assert said in f"{error.value} {error.value.hint}"
