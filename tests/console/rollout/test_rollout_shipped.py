"""Every profile beside the sources opens with what it does and costs, can be planned, and suits the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.plan.schema import LmJobSettings, PrivateJobSettings
from uvcc_engine.contract.job.private_job import PrivateJob as EngineJob
from uvcc_engine.sharding.stage import place_layers, stage_bounds
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.train.lm_job import check_plan, resolve

FOLDER = Path(__file__).parents[3] / "profiles"
PROFILES = sorted(p for p in FOLDER.glob("*.yaml") if not p.name.startswith("inventory-hosts"))


def test_the_promised_profiles_are_here() -> None:
    wanted = {"prime-smoke-r2", "prime-full-r8", "prime-phase6-r8s4t2m32", "m7c-1gpu", "m7c-2xa100"}
    assert wanted | {"inventory-example"} <= {p.stem for p in PROFILES}


SEEDS: dict[str, str] = {
    "NSA_DDP_STATIC_GRAPH": "1",
    "NSA_DDP_FIND_UNUSED": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}


def test_the_production_profile_carries_the_operators_flags() -> None:
    assert SEEDS.items() <= load("m7c-2xa100")[1].env.items()


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_a_profile_says_what_it_does_and_can_be_planned(path: Path) -> None:
    head = path.read_text().splitlines()[:4]
    assert [line.startswith("# ") for line in head] == [True, True, True, False]
    name, profile = load(str(path), [])
    plan = make_plan(f"{name}-1", name, profile)
    limits = profile.limits
    if profile.fleet.provider == "prime":
        assert 0 < limits.total <= limits.hourly * limits.ttl / 3600.0  # the total is the cap that is named above
        assert f"{limits.total:g} US dollars in all at most" in head[2]
    job = profile.job
    if isinstance(job, LmJobSettings):
        cfg = resolve(plan.phases["full"].job)
        check_plan(cfg, job.plan)
        assert {"parameters", "seq_len", "precision", "save_every"} <= set(job.plan)
        needs = {"gpt2": "tiktoken"}.get(cfg.data.tokenizer), {"fineweb_edu": "datasets"}.get(cfg.data.source)
        assert set(filter(None, needs)) == set(profile.fleet.packages)
    if isinstance(job, PrivateJobSettings):
        for phase in plan.phases.values():
            t = phase.topology
            engine_job = EngineJob.from_json(phase.job)
            model = fit_model(engine_job, workers=t.replicas * t.stages * t.tensor * t.microbatches)
            if t.stages * t.tensor > 1:
                place_layers(model, t.tensor)
                assert len(stage_bounds(model, t.stages)) == t.stages
            assert job.batch % (t.replicas * t.microbatches) == 0
