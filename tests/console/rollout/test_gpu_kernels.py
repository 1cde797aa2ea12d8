"""Before a private run on GPUs its pods compile and try their kernels, in preflight; what is wrong ends it there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.fleet import gpu_kernels, preflight
from uvcc_engine.contract.errors import UnreachableError, UvccError

RIGHT = json.dumps({"ok": True, "kernels_s": 14.25})
WRONG = json.dumps({"ok": False, "error": "wrong bits from blind 1024"})


class Pod:
    """Answers a command as told; ``exit`` None is one that did not come to its end."""

    def __init__(self, name: str, text: str, code: int | None = 0) -> None:
        self.name, self.boot, self.heard = name, None, list[str]()
        self.probe: dict[str, Any] = {}
        self._done = SimpleNamespace(text=text, exit=code, trouble="timed out")
        self.ssh = self

    async def run(self, command: str, *, timeout: float) -> Any:
        self.heard.append(command)
        return self._done


def conducted(pods: list[Pod], *sets: str) -> Rollout:
    name, profile = load("local-smoke-r2", ["link=direct", "dp_preflight=false", *sets])
    said: list[Any] = []
    bus = SimpleNamespace(snapshot=SimpleNamespace(pods={}))
    more: dict[str, Any] = {"bus": bus, "say": said.append, "said": said, "federated": None, "due": lambda: pods}
    more |= {"members": {p.name: p for p in pods}, "wheel": SimpleNamespace(site_name="site"), "run_dir": Path("r")}
    return cast(Rollout, SimpleNamespace(plan=make_plan("r", name, profile), **more))


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, str]]]:
    """The GPUs of each pod; nothing else is wrong with any of them."""
    gpus: dict[str, list[dict[str, str]]] = {}

    async def probe(member: Any, on_gpus: bool) -> dict[str, Any]:
        return {"gpus": gpus[member.name], "skew_s": 0.0, "disk": {"free_mib": 9_999}, "memory": {}}

    monkeypatch.setattr(preflight, "probe_settled", probe)
    monkeypatch.setattr(preflight, "find_problems", lambda probes, wanted: [])
    return gpus


async def test_pods_with_gpus_try_them_and_say_how_long_it_took(probed: dict[str, Any]) -> None:
    pods = [Pod("p0r0", RIGHT), Pod("p1r0", RIGHT), Pod("p2r0", RIGHT)]
    probed |= {"p0r0": [{"name": "H100"}], "p1r0": [], "p2r0": [{"name": "H100"}]}
    ctx = conducted(pods)
    await preflight.preflight(ctx)
    assert [len(pod.heard) for pod in pods] == [1, 0, 1]
    assert pods[0].heard[0].endswith("-m uvcc_engine.mpc.kernels.gpu_trial")
    told = {event.pod: event.fields for event in cast(Any, ctx).said if hasattr(event, "fields")}
    assert told["p0r0"]["kernels_s"] == 14.25
    assert "kernels_s" not in told["p1r0"]


async def test_a_run_on_processors_tries_no_gpu(probed: dict[str, Any]) -> None:
    pods = [Pod("p0r0", WRONG)]
    probed |= {"p0r0": [{"name": "H100"}]}
    await preflight.preflight(conducted(pods, "job.device=cpu"))
    assert pods[0].heard == []


async def test_wrong_bits_end_the_preflight(probed: dict[str, Any]) -> None:
    pods = [Pod("p0r0", RIGHT), Pod("p1r0", WRONG, 1)]
    probed |= {pod.name: [{"name": "H100"}] for pod in pods}
    with pytest.raises(UvccError, match=r"pod p1r0: .*wrong bits from blind 1024") as found:
        await preflight.preflight(conducted(pods))
    assert "nothing was trained" in found.value.hint


async def test_a_pod_that_does_not_come_to_its_end_is_named() -> None:
    with pytest.raises(UnreachableError, match=r"pod p0r0 did not compile its GPU's kernels in 600 s \(timed out\)"):
        await gpu_kernels.compiled(conducted([Pod("p0r0", "", None)]), ["p0r0"])


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "null", '{"ok": true}', '{"kernels_s": "x"}', "[" * 99_999])
def test_whatever_a_pod_says_is_no_proof(text: str) -> None:
    assert gpu_kernels.told(text)["error"].endswith("it did not answer")
    assert gpu_kernels.told(f"noise\n{RIGHT}") == {"ok": True, "kernels_s": 14.25}
