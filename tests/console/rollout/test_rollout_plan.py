"""The plan: run ids, stages, pods interleaved over parties, what a seed fixes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import asyncssh
import pytest

from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Provider
from uvcc_console.plan import measurable
from uvcc_console.plan.plan import KEEPING, derive, make_plan, new_run_id
from uvcc_console.plan.profile import load, parse
from uvcc_console.plan.schema import LmJobSettings
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages import acts_of
from uvcc_engine.contract.errors import ConfigError


def test_run_ids_say_what_and_when() -> None:
    assert new_run_id("demo", 1795226152.0, "ab12") == "demo-20261121-0155-ab12"
    assert new_run_id("Prime smoke_R2!", 0.0, "0000") == "prime-smoke-r2-19700101-0000-0000"
    assert len({new_run_id("x", 0.0) for _ in range(50)}) > 40


def test_pods_are_interleaved_over_parties_and_named_after_the_run() -> None:
    _, profile = load("demo", ["topology.replicas=2", "topology.stages=2", "topology.tensor=2"])
    plan = make_plan("demo-1", "demo", profile)
    assert list(plan.requests) == ["p0r0", "p1r0", "p2r0", "p0r1", "p1r1", "p2r1"]
    assert plan.requests["p1r1"].name == "uvcc-demo-1-p1r1"
    assert all(r.name.startswith(plan.prefix) for r in plan.requests.values())
    full = plan.phases["full"]
    assert [str(c) for c in full.coords("p2r1")] == ["p2r1s0t0", "p2r1s0t1", "p2r1s1t0", "p2r1s1t1"]
    assert plan.phases["smoke"].pods() == ["p0r0", "p1r0", "p2r0"]


def test_stages_follow_the_kind_of_job() -> None:
    _, profile = load("demo")
    private = make_plan("r", "demo", profile).stages
    assert private == (
        *("plan", "quote", "provision", "bootstrap", "preflight", "drill", "smoke", "verify-smoke", "gate"),
        *("full", "verify-full", "collect", "teardown"),
    )
    command = parse({"job": {"kind": "command", "argv": ["true"], "steps": 3}, "smoke": {"steps": 0}})
    assert make_plan("r", "c", command).stages == (
        *("plan", "quote", "provision", "bootstrap", "preflight", "full", "collect", "teardown"),
    )


@pytest.mark.parametrize("name", ["m7c-1gpu", "m7c-2xa100", "local-lm-smoke"])
def test_the_gates_of_shipped_language_model_profiles_can_be_measured(name: str) -> None:
    _, profile = load(name)
    assert isinstance(profile.job, LmJobSettings)
    measurable.check(profile.job, profile.smoke.steps, profile.gates)


async def test_a_gate_that_no_row_will_show_is_refused_before_anything_is_rented(tmp_path: Path) -> None:
    job = {"kind": "lm", "config": "m7c_125m_80g", "steps": 20000}

    async def planned(**changes: object) -> str:
        plan = make_plan("r", "m", parse({"job": job, **changes}))
        members = {name: Member(name, request) for name, request in plan.requests.items()}
        journal = Journal(tmp_path / "journal.sqlite", source="test")
        key = asyncssh.generate_private_key("ssh-ed25519")
        ctx = Rollout(plan, tmp_path, Bus(journal), cast(Provider, None), key, members)
        try:
            return await acts_of(ctx)["plan"](False)
        finally:
            journal.close()

    for job["config"] in ("auto", "m7c_125m_80g"):
        with pytest.raises(ConfigError, match=r"gates.loss_falls needs 2 rows, a smoke of 50 steps that logs every 50"):
            await planned(smoke={"steps": 50})
    job["overrides"] = {"train": {"log_every": 25}}
    assert await planned(smoke={"steps": 50}) == "lm: full 20000 steps on 1 pod, smoke 50 steps on 1 pod"
    with pytest.raises(ConfigError, match=r"gates.gate_entropy needs 1 rows, a smoke of 20 steps"):
        await planned(smoke={"steps": 20}, gates={"loss_falls": False, "gate_entropy": 0.5})


LATER = ("provision-full", "bootstrap-full", "preflight-full")


def test_pods_that_the_smoke_does_not_need_come_after_its_gates() -> None:
    profile_name, profile = load("prime-full-r8")
    plan = make_plan("r", profile_name, profile)
    at = plan.stages.index("gate") + 1
    assert plan.stages[at : at + 4] == (*LATER, "full")
    assert len(plan.requests) == 24
    assert list(plan.requests)[:6] == plan.phases["smoke"].pods()
    assert plan.later == tuple(plan.requests)[6:]
    assert set(LATER) <= KEEPING  # a market without stock costs neither the smoke's pods nor its evidence


@pytest.mark.parametrize(
    "otherwise",
    ["fleet.reserve=true", "smoke.replicas=8", "smoke.steps=0", "fleet.attach_prefix=uvcc-another-run-"],
)
def test_nothing_is_left_for_later_where_it_would_save_nothing(otherwise: str) -> None:
    profile_name, profile = load("prime-full-r8", [otherwise])
    plan = make_plan("r", profile_name, profile)
    assert plan.later == ()
    assert not set(LATER) & set(plan.stages)


def test_a_job_of_one_domain_has_one_pod_with_all_its_ranks() -> None:
    profile = parse({"job": {"kind": "command", "argv": ["true"], "steps": 3, "ranks": 4}})
    plan = make_plan("r", "c", profile)
    assert list(plan.requests) == ["p0r0"]
    assert [str(c) for c in plan.phases["full"].coords("p0r0")] == ["p0r0s0t0", "p0r1s0t0", "p0r2s0t0", "p0r3s0t0"]
    with pytest.raises(ConfigError, match="no meaning for a command job"):
        make_plan(
            "r", "c", parse({"job": {"kind": "command", "argv": ["true"], "steps": 3}, "topology": {"stages": 2}})
        )


def test_a_seed_fixes_what_would_be_drawn() -> None:
    assert derive(5, "nonce", "full") == derive(5, "nonce", "full")
    assert len({derive(5, "nonce", "full"), derive(6, "nonce", "full"), derive(5, "nonce", "smoke")}) == 3
    assert derive(None, "nonce", "full") != derive(None, "nonce", "full")
    assert derive(5, "a", "bc") != derive(5, "ab", "c")


async def test_an_image_whose_torch_is_too_old_is_refused_before_anything_is_rented(tmp_path: Path) -> None:
    fleet = {"provider": "prime", "gpu": "H100_80GB", "image": "cuda_12_4_pytorch_2_4"}
    job = {"kind": "lm", "config": "m7c_125m_80g", "steps": 20000, "overrides": {"train": {"log_every": 10}}}
    plan = make_plan("r", "m", parse({"job": job, "fleet": fleet, "smoke": {"steps": 50}, "limits": {"total": 4}}))
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    key = asyncssh.generate_private_key("ssh-ed25519")
    try:
        ctx = Rollout(plan, tmp_path, Bus(journal), cast(Provider, None), key, members)
        with pytest.raises(ConfigError, match=r"fleet.image is cuda_12_4_pytorch_2_4: torch 2\.4 is too old"):
            await acts_of(ctx)["plan"](False)
    finally:
        journal.close()
