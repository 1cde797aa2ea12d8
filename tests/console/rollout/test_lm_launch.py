"""What stands between a language model's launch and its training: attention on the pod's device, and the first step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.plan.plan import FULL, make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.training import lm, phases
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.run_files.waiting import FIRST_STEP_S
from uvcc_engine.train.watchdog import Watchdog


def conducted(profile_name: str, *sets: str, **more: Any) -> Rollout:
    """A rollout as far as these stages see it."""
    name, profile = load(profile_name, list(sets))
    plan = make_plan("r", name, profile)
    wheel = SimpleNamespace(site_name="site")
    return cast(Rollout, SimpleNamespace(plan=plan, wheel=wheel, run_dir=Path("r"), **more))


class Pod:
    """Answers a command as told; ``exit`` None is one that did not come to its end."""

    def __init__(self, text: str, code: int | None = 0) -> None:
        self.name, self.boot, self.heard = "p0r0", None, list[tuple[str, float]]()
        self._done = SimpleNamespace(text=text, exit=code, trouble="timed out")
        self.ssh = self

    async def run(self, command: str, *, timeout: float) -> Any:
        self.heard.append((command, timeout))
        return self._done


RIGHT = json.dumps([{"name": "causality", "ok": True, "detail": ""}, {"name": "gradients", "ok": True, "detail": ""}])
WRONG = json.dumps([{"name": "causality", "ok": False, "detail": "edit at 7 seen at 3"}])


@pytest.mark.parametrize(("thoroughly", "flag"), [("full", True), ("quick", False)])
async def test_each_pod_of_the_full_run_tries_its_own_device(thoroughly: str, flag: bool) -> None:
    pods = [Pod(RIGHT), Pod(WRONG)]
    pods[1].name = "p0r1"
    found = await lm.attention(
        conducted("m7c-1gpu", of_phase=lambda phase: pods if phase.name == FULL else []), thoroughly
    )
    assert found["p0r0"] == {"ok": True, "attention": "causality, gradients"}
    assert (found["p0r1"]["ok"], "nothing was trained" in found["p0r1"]["hint"]) == (False, True)
    assert "edit at 7" in found["p0r1"]["error"]
    for pod in pods:
        ((command, limit),) = pod.heard
        assert "uvcc_engine.nsa.selftest --json" in command
        assert command.endswith("--full") is flag
        assert limit == lm.ATTENTION_S


async def test_a_pod_that_does_not_come_to_its_end_is_named() -> None:
    pods = [Pod("", None)]
    with pytest.raises(UnreachableError, match=r"pod p0r0 gave no word on its attention in 900 s \(timed out\)"):
        await lm.attention(conducted("m7c-1gpu", of_phase=lambda phase: pods), "full")


@pytest.mark.parametrize(
    ("profile", "sets", "limit"),
    [
        ("m7c-1gpu", (), FIRST_STEP_S),
        ("m7c-2xa100", (), FIRST_STEP_S),
        ("m7c-1gpu", ("halt.patience=10m",), 1800.0),  # who says that a step takes long is heard
        ("prime-smoke-r2", (), phases.START_S),
    ],
)
async def test_the_first_step_may_take_as_long_as_compiling_and_a_hub(
    profile: str, sets: tuple[str, ...], limit: float
) -> None:
    asked: list[float] = []

    class Bus:
        async def wait(self, condition: object, seconds: float) -> None:
            asked.append(seconds)
            raise TimeoutError

    ctx = conducted(profile, *sets, bus=Bus())
    with pytest.raises(UvccError, match=f"the workers made no step in {limit:.0f} s"):
        await phases.first_steps(ctx, ctx.plan.phases["smoke"])
    assert asked == [limit]


def test_the_rank_itself_waits_as_long_before_it_calls_its_first_step_a_stall(tmp_path: Path) -> None:
    now = [0.0]
    dog = Watchdog(tmp_path, 0, lambda age, limit, name: None, clock=lambda: now[0])
    now[0] = FIRST_STEP_S - 1
    assert not dog.check()
    now[0] = FIRST_STEP_S
    assert dog.check()
