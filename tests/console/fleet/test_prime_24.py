"""24 pods of the fake market, each a real process with SSH: rented, bootstrapped, preflighted; timed stage by stage."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.ssh_keys import operator_key
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import preflight, provision

PROFILE = Path(__file__).parents[3] / "profiles" / "prime-full-r8.yaml"
LIMIT_S = 120.0


@pytest.fixture
def ours(short: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_PRIME_API_KEY", KEY)
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    monkeypatch.setattr(provision.processes, "start", lambda *args: None)  # nothing is trained, so nothing is halted
    return short


@pytest.mark.slow
async def test_twenty_four_pods_are_ready_to_train_in_two_minutes(ours: Path, tmp_path: Path) -> None:
    (ours / "market").mkdir()
    took: dict[str, float] = {}
    async with PrimeHost(ours / "market") as host:
        changed = ["fleet.gpu=CPU_NODE", f"fleet.base_url={host.url}", "gates.disk_free_mib=64", "fleet.reserve=true"]
        name, profile = load(str(PROFILE), changed)
        plan = make_plan("full-1", name, profile)
        assert len(plan.requests) == 24
        run_dir = ours / "full-1"
        run_dir.mkdir()
        fleet = profile.fleet.model_dump(mode="json", exclude_defaults=True)
        journal = Journal(run_dir / "journal.sqlite", source="test")
        members = {n: Member(n, request) for n, request in plan.requests.items()}
        ctx = Rollout(plan, run_dir, Bus(journal), provider_for(fleet, run_dir), operator_key(run_dir), members)
        try:
            began = time.monotonic()
            for stage in (provision.quote, provision.provision, provision.bring_up, preflight.preflight):
                at = time.monotonic()
                said = await stage(ctx)
                took[stage.__name__] = round(time.monotonic() - at, 1)
                sys.stderr.write(f"{stage.__name__}: {took[stage.__name__]} s: {said}\n")
            total = time.monotonic() - began
        finally:
            left = await provision.teardown(ctx)
            ctx.bus.commit()
            await ctx.provider.close()
            journal.close()
        assert left == []
        assert host.fake.billing == []
    told = [e for _, e in iter_events(run_dir / "journal.sqlite") if isinstance(e, ev.EngineEvent)]
    passed = [e for e in told if e.event == "dp_preflight_ok"]
    assert len(passed) == 24
    assert {e.fields["ports_open"] for e in passed} <= {"9/9"}  # seven sisters and two other parties
    assert all(e.fields["all_reduce_dp"]["size"] == 8 for e in passed)
    assert all({"pair_p0", "pair_p1", "pair_p2"} & set(e.fields) for e in passed)
    sys.stderr.write(json.dumps({"pods": 24, "total_s": round(total, 1), **took}) + "\n")
    assert total <= LIMIT_S
