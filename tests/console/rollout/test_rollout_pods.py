"""Pods come and go: intents before creates, creates that are cancelled, deletes that are proven, full disks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import asyncssh
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.fleet.provider import FunnelStep, Pod, PodRequest, Quote, QuoteLine
from uvcc_console.fleet.wheel import Wheel
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout import finish
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.conductor import compare_roots
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import provision, replacing
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError


class FakeProvider:
    """Pods in a dictionary. ``gate`` holds creates back; ``stubborn`` names refuse to go."""

    name = "fake"

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.stubborn: set[str] = set()
        self.deletes: list[str] = []
        self.price = 0.0
        self.wallet: float | None = None
        self.silent = False

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        funnel = (FunnelStep("offered", 9, 0), FunnelStep("on demand", 8, 1))
        return Quote(tuple(QuoteLine(r, "fake", "here", self.price) for r in requests), 0.0, funnel, self.wallet)

    async def create(self, request: PodRequest) -> Pod:
        self.asked.set()
        await self.gate.wait()
        return self.pods.setdefault(request.name, Pod(request.name, request.party, request.replica, "fake", "id"))

    async def wait_ready(self, pod: Pod) -> Pod:
        return replace(pod, user="u", host="192.0.2.1", port=22)

    async def delete(self, pod: Pod) -> None:
        self.deletes.append(pod.name)
        if pod.name in self.stubborn:
            raise UnreachableError(f"{pod.name} may still be there")
        self.pods.pop(pod.name, None)

    async def list(self, prefix: str) -> list[Pod]:
        if self.silent:
            raise UnreachableError("the provider does not answer")
        return [p for name, p in self.pods.items() if name.startswith(prefix)]

    async def close(self) -> None:
        pass


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rollout]:
    monkeypatch.setattr(provision, "BACKOFF_S", 0.0)
    monkeypatch.setattr(provision.processes, "start", lambda *args: None)
    _, profile = load("demo")
    plan = make_plan("demo-1", "demo", profile)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    key = asyncssh.generate_private_key("ssh-ed25519")
    yield Rollout(plan, tmp_path, Bus(journal), FakeProvider(), key, members)
    journal.close()


def provider_of(ctx: Rollout) -> FakeProvider:
    assert isinstance(ctx.provider, FakeProvider)
    return ctx.provider


async def test_a_fleet_over_the_cap_is_refused_before_anything_is_created(ctx: Rollout) -> None:
    provider_of(ctx).price = 2.0
    with pytest.raises(ConfigError, match=r"6\.00 \$/h, limits\.hourly is 0\.00"):
        await provision.quote(ctx)
    assert provider_of(ctx).pods == {}


async def test_the_quote_tells_prices_funnel_and_how_long_the_wallet_lasts(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.price, fake.wallet = 2.0, 60.0
    limits = ctx.plan.profile.limits.model_copy(update={"hourly": 10.0, "total": 50.0, "ttl": 7200.0})
    object.__setattr__(ctx.plan, "profile", ctx.plan.profile.model_copy(update={"limits": limits}))
    assert await provision.quote(ctx) == "3 pods, 6.00 $/h, 12.00 $ at most, the wallet lasts 10.0 h"
    events = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.EngineEvent)]
    assert [e.event for e in events] == ["quote"]
    assert events[0].fields["funnel"] == ["offered: 9 left, 0 removed", "on demand: 8 left, 1 removed"]
    fake.wallet = 11.0
    with pytest.raises(ConfigError, match=r"the wallet holds 11\.00 \$, the run may cost 12\.00"):
        await provision.quote(ctx)
    assert fake.pods == {}


def of_full_size(ctx: Rollout, *settings: str) -> Rollout:
    """The same rollout of two replicas, whose smoke needs one."""
    _, profile = load("local-smoke-r2", ["limits.hourly=100", "limits.total=100", *settings])
    plan = make_plan("demo-1", "local-smoke-r2", profile)
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    return replace(ctx, plan=plan, members=members)


async def test_the_quote_tells_what_the_smoke_rents_or_leaves_idle(ctx: Rollout) -> None:
    provider_of(ctx).price = 2.0
    shown = await provision.quote(of_full_size(ctx))
    assert shown == "6 pods, 12.00 $/h, of these 3 for 6.00 $/h until the smoke has passed, 12.00 $ at most"
    shown = await provision.quote(of_full_size(ctx, "fleet.reserve=true"))
    assert shown == "6 pods, 12.00 $/h, of these 3 idle through the smoke for 6.00 $/h (fleet.reserve), 12.00 $ at most"


def create_names(ctx: Rollout) -> list[str]:
    seen = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.PodChanged)]
    return [e.pod for e in seen if e.state == "creating"]


async def test_the_smoke_rents_only_what_it_needs(ctx: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def rented(ctx: Rollout, member: Member) -> None:
        asked.append(member.name)
        member.pod = await ctx.provider.create(member.request)

    monkeypatch.setattr(provision, "one_pod", rented)
    ctx = of_full_size(ctx)
    ctx.say(
        ev.RunCreated(
            run="demo-1",
            profile_name="local-smoke-r2",
            job_kind="private",
            replicas=2,
            pipeline_stages=1,
            tensor=1,
            stages=list(ctx.plan.stages),
        )
    )
    assert await provision.provision(ctx) == "3 pods, 3 more after the smoke"
    assert asked == create_names(ctx) == ["p0r0", "p1r0", "p2r0"]
    assert await provision.teardown(ctx) == []
    torn = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.PodChanged)]
    assert {e.pod for e in torn} == {"p0r0", "p1r0", "p2r0"}  # of the others there is nothing to prove

    asked.clear()
    ctx.say(ev.StageChanged(name="provision-full", status="running"))
    for member in ctx.members.values():  # the smoke's pods have their agents
        member.agent = cast(Any, object()) if member.name.endswith("r0") else None
    assert await provision.provision(ctx) == "6 pods"
    assert asked == ["p0r1", "p1r1", "p2r1"]


async def test_every_create_is_in_the_journal_before_the_provider_hears_of_it(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.gate.clear()
    work = asyncio.create_task(provision.provision(ctx))
    await fake.asked.wait()
    written = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.PodChanged)]
    assert [(e.pod, e.state) for e in written] == [("p0r0", "creating"), ("p1r0", "creating"), ("p2r0", "creating")]
    assert fake.pods == {}
    work.cancel()
    fake.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_a_create_that_is_cancelled_is_known_and_deleted(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.gate.clear()
    work = asyncio.create_task(provision.provision(ctx))
    await fake.asked.wait()
    work.cancel()
    asyncio.get_running_loop().call_soon(fake.gate.set)
    with pytest.raises(asyncio.CancelledError):
        await work
    assert len(fake.pods) == 3
    assert {p.state for p in ctx.bus.snapshot.pods.values()} == {"booting"}, "they are there: nobody is creating them"
    assert await provision.teardown(ctx) == []
    assert fake.pods == {}
    assert {p.state for p in ctx.bus.snapshot.pods.values()} == {"gone"}


async def test_every_host_that_fails_is_told_of_though_the_first_to_fail_ends_the_stage(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had three wrong hosts heard of one at each try."""
    fake, real = provider_of(ctx), provider_of(ctx).create
    later = asyncio.Event()

    async def create(request: PodRequest) -> Pod:
        if request.party == 1:
            asyncio.get_running_loop().call_soon(later.set)
            raise UvccError("host b refuses the key")
        await later.wait()
        if request.party == 2:
            raise UnreachableError("host c gave no answer in time")
        return await real(request)

    monkeypatch.setattr(fake, "create", create)
    with pytest.raises(UvccError, match="host b refuses the key"):
        await provision.provision(ctx)
    pods = ctx.bus.snapshot.pods
    assert {name: (pod.state, pod.detail) for name, pod in pods.items()} == {
        "p0r0": ("booting", ""),
        "p1r0": ("creating", "host b refuses the key"),
        "p2r0": ("creating", "host c gave no answer in time"),
    }
    said = [(entry.source, entry.text) for entry in ctx.bus.snapshot.log]
    assert ("p2r0", "host c gave no answer in time") in said
    await provision.teardown(ctx)


async def test_teardown_finds_pods_that_the_journal_does_not_know_and_leaves_foreign_ones(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    for name in ("uvcc-demo-1-p1r0", "uvcc-demo-11-p0r0", "somebody-else"):
        fake.pods[name] = Pod(name, 1, 0, "fake", name)
    assert await provision.teardown(ctx) == []
    assert set(fake.pods) == {"uvcc-demo-11-p0r0", "somebody-else"}


async def test_a_pod_that_is_not_proven_gone_is_named(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.pods["uvcc-demo-1-p2r0"] = Pod("uvcc-demo-1-p2r0", 2, 0, "fake", "id")
    fake.stubborn.add("uvcc-demo-1-p2r0")
    assert await provision.teardown(ctx) == ["uvcc-demo-1-p2r0"]
    assert fake.deletes == ["uvcc-demo-1-p2r0"] * provision.DELETE_TRIES
    assert ctx.bus.snapshot.pods["p2r0"].state == "lost"
    assert ctx.bus.snapshot.alerts


async def test_a_list_that_is_refused_keeps_no_pod_from_being_deleted(ctx: Rollout, monkeypatch) -> None:
    """Whatever the refusal is, also one that is no lost link: a key that the provider does not take any more."""
    fake = provider_of(ctx)

    async def refused(prefix: str) -> list[Pod]:
        raise ConfigError("the provider answers 401", "set another key")

    for name in ("p0r0", "p1r0", "p2r0"):
        ctx.members[name].pod = await fake.create(ctx.members[name].request)
    fake.stubborn.add("uvcc-demo-1-p1r0")
    monkeypatch.setattr(fake, "list", refused)
    assert await provision.teardown(ctx) == ["uvcc-demo-1-p1r0"]
    assert set(fake.pods) == {"uvcc-demo-1-p1r0"}
    told = [(e.name, e.subject, e.hint) for _, e in iter_events(ctx.run_dir / "journal.sqlite") if e.kind == "alert"]
    assert told == [  # each once, with how often and what next
        ("list", "", "uvcc pods --sweep looks again"),
        ("delete", "uvcc-demo-1-p1r0", "uvcc pods --end uvcc-demo-1-p1r0"),
    ]
    assert "(6 times)" in ctx.bus.snapshot.alerts[0].text
    assert "end it with: uvcc pods --end uvcc-demo-1-p1r0" in ctx.bus.snapshot.pods["p1r0"].detail


async def test_what_a_provider_never_asked_for_is_no_leak_though_it_does_not_answer(ctx: Rollout, monkeypatch) -> None:
    fake = provider_of(ctx)
    fake.silent = True
    begun: set[str] = set()
    monkeypatch.setattr(FakeProvider, "begun", lambda self, prefix: begun, raising=False)
    assert await provision.teardown(ctx) == []
    begun.add("uvcc-demo-1-p2r0")  # by its notes: a create was sent, and nobody knows what came of it
    fake.stubborn.add("uvcc-demo-1-p2r0")
    assert await provision.teardown(ctx) == ["uvcc-demo-1-p2r0"]
    assert fake.deletes == ["uvcc-demo-1-p2r0"] * provision.DELETE_TRIES


class FullDisk(Journal):
    """A journal whose disk is full."""

    def append(self, *batch: ev.Event) -> int:
        raise UvccError("cannot write the journal: disk full", "free disk space")


async def test_a_full_disk_creates_nothing_but_deletes_everything(
    ctx: Rollout, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = provider_of(ctx)
    fake.pods["uvcc-demo-1-p0r0"] = Pod("uvcc-demo-1-p0r0", 0, 0, "fake", "id")
    full = FullDisk(tmp_path / "full.sqlite", source="test")
    ctx.bus = Bus(full)
    with pytest.raises(UvccError, match="disk full"):
        await provision.provision(ctx)
    assert list(fake.pods) == ["uvcc-demo-1-p0r0"]
    ctx.tolerant = True
    assert await provision.teardown(ctx) == []
    assert fake.pods == {}
    assert "not journalled" in caplog.text
    full.close()


async def test_what_a_full_disk_refused_is_written_once_there_is_room(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = ev.HeartbeatRead(pod="p0r0", coord="p0r0s0t0", record={"step": 4})
    ctx.bus.record([beat])
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", FullDisk.append)
        with pytest.raises(UvccError, match="disk full"):
            ctx.bus.commit()
    ctx.bus.commit()
    assert ctx.bus.snapshot.workers["p0r0s0t0"].step == 4


async def test_two_parties_that_disagree_are_named_at_once(ctx: Rollout) -> None:
    compare_roots(ctx.bus)
    ctx.bus.commit(
        ev.RunCreated(run="r", profile_name="", job_kind="", replicas=1, pipeline_stages=1, tensor=1, stages=[])
    )
    pairs = {
        "p0r0s0t0": {"p1r0s0t0": "aa", "p2r0s0t0": "bb"},
        "p1r0s0t0": {"p0r0s0t0": "aa", "p2r0s0t0": "cc"},
        "p2r0s0t0": {"p0r0s0t0": "bb", "p1r0s0t0": "dd"},
    }
    ctx.bus.commit(*(ev.RootReported(coord=c, epoch=3, root="00", pairs=p) for c, p in pairs.items()))
    ctx.bus.commit()
    forks = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.ForkDetected)]
    assert [(f.epoch, f.parties) for f in forks] == [(3, [1, 2])]
    assert ctx.bus.snapshot.agreed_epoch == -1


async def test_a_provider_that_does_not_answer_has_not_said_that_nothing_is_there(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.pods["uvcc-demo-1-p0r0"] = Pod("uvcc-demo-1-p0r0", 0, 0, "fake", "id")
    ctx.members["p0r0"].pod = fake.pods["uvcc-demo-1-p0r0"]
    fake.silent = True
    assert sorted(await provision.teardown(ctx)) == ["uvcc-demo-1-p1r0", "uvcc-demo-1-p2r0"]  # p0r0's end was proven
    states = {p.pod: p.state for p in ctx.bus.snapshot.pods.values()}
    assert states == {"p0r0": "gone", "p1r0": "lost", "p2r0": "lost"}


async def test_the_sidecar_runs_before_there_is_anything_to_pay_for(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = provider_of(ctx)
    started: list[tuple[str, int]] = []
    start = lambda folder, name, *args: started.append((name, len(fake.pods)))  # noqa: E731
    monkeypatch.setattr(provision.processes, "start", start)
    fake.gate.clear()
    work = asyncio.create_task(provision.provision(ctx))
    await fake.asked.wait()
    assert started == [(provision.processes.HALTD, 0)]
    work.cancel()
    fake.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await work


def attaching(ctx: Rollout, prefix: str) -> Rollout:
    fleet = ctx.plan.profile.fleet.model_copy(update={"attach_prefix": prefix})
    plan = make_plan("demo-2", "demo", ctx.plan.profile.model_copy(update={"fleet": fleet}))
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    return replace(ctx, plan=plan, members=members)


async def test_pods_that_an_earlier_run_kept_are_taken_over_and_none_is_created(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connected(ctx: Rollout, member: Member) -> None:
        return None

    monkeypatch.setattr(provision, "connect", connected)
    fake = provider_of(ctx)
    for p in range(3):
        fake.pods[f"uvcc-demo-1-p{p}r0"] = Pod(f"uvcc-demo-1-p{p}r0", p, 0, "fake", f"id{p}")
    second = attaching(ctx, "uvcc-demo-1-")
    await provision.provision(second)
    assert not fake.asked.is_set()  # no create
    assert {m.pod.provider_id for m in second.members.values() if m.pod} == {"id0", "id1", "id2"}
    assert await provision.teardown(second) == []
    assert fake.pods == {}


async def test_a_pod_that_is_not_there_cannot_be_taken_over(ctx: Rollout) -> None:
    fake = provider_of(ctx)
    fake.pods["uvcc-demo-1-p0r0"] = Pod("uvcc-demo-1-p0r0", 0, 0, "fake", "id")
    with pytest.raises(ConfigError, match=r"no pod uvcc-demo-1-p[12]r0 to attach to"):
        await provision.provision(attaching(ctx, "uvcc-demo-1-"))
    assert not fake.asked.is_set()
    assert list(fake.pods) == ["uvcc-demo-1-p0r0"]


@pytest.mark.parametrize("prefix", ["somebody-", "uvcc-", "uvcc-demo"])
def test_a_prefix_that_could_meet_foreign_pods_is_refused(ctx: Rollout, prefix: str) -> None:
    with pytest.raises(ConfigError, match="attach_prefix"):
        attaching(ctx, prefix)


@pytest.mark.parametrize(("keep", "status", "left"), [(True, "ok", 1), (True, "failed", 0), (False, "ok", 0)])
async def test_pods_are_kept_only_if_asked_for_and_only_after_a_good_end(
    ctx: Rollout, keep: bool, status: str, left: int
) -> None:
    fake = provider_of(ctx)
    fake.pods["uvcc-demo-1-p0r0"] = Pod("uvcc-demo-1-p0r0", 0, 0, "fake", "id")
    fleet = ctx.plan.profile.fleet.model_copy(update={"keep_pods": keep})
    object.__setattr__(ctx.plan, "profile", ctx.plan.profile.model_copy(update={"fleet": fleet}))
    assert await finish.finish(ctx, status, "") == (status, "")
    assert len(fake.pods) == left
    teardown = next(s for s in ctx.bus.snapshot.stages if s.name == "teardown")
    assert teardown.status == ("skipped" if left else "ok")
    assert ("uvcc pods --end uvcc-demo-1-... ends one" in teardown.detail) == bool(left)


@pytest.fixture
def agents(ctx: Rollout, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pods whose agent was brought up, in order; every new machine shows a host key of its own."""
    up: list[str] = []

    async def connected(ctx: Rollout, member: Member) -> None:
        known = ctx.bus.snapshot.pods.get(member.name)
        assert not (known and known.host_key), "the old machine's key would refuse the new one"

    async def agent(ctx: Rollout, member: Member) -> None:
        up.append(member.name)

    monkeypatch.setattr(provision, "connect", connected)
    monkeypatch.setattr(provision, "one_agent", agent)
    ctx.wheel = Wheel(ctx.run_dir / "x.whl", "ab")
    return up


async def test_one_lost_pod_is_replaced_and_the_others_stay(ctx: Rollout, agents: list[str]) -> None:
    await provision.provision(ctx)
    fake = provider_of(ctx)
    others = {n: p for n, p in fake.pods.items() if "p1r0" not in n}
    ctx.bus.commit(ctx.pod_event(ctx.members["p1r0"], "lost"))
    known = ctx.bus.snapshot.pods["p1r0"]
    ctx.bus.commit(
        ev.PodChanged(pod="p1r0", party=1, replica=0, provider="fake", state="lost", host_key="ssh-ed25519 A")
    )
    ctx.members["p1r0"].identity = {"ed25519": "old"}
    said = await replacing.replace_pod(ctx, "p1r0")
    assert said == "p1r0 is now u@192.0.2.1:22 (fake)"
    assert fake.deletes == ["uvcc-demo-1-p1r0"]
    assert len(fake.pods) == 3
    assert {n: p for n, p in fake.pods.items() if "p1r0" not in n} == others
    assert agents == ["p1r0"]
    assert ctx.members["p1r0"].identity == {}
    now = ctx.bus.snapshot.pods["p1r0"]
    assert (known.state, now.state, now.host_key) == ("lost", "ready", "")
    story = [
        e.state
        for _, e in iter_events(ctx.run_dir / "journal.sqlite")
        if isinstance(e, ev.PodChanged) and e.pod == "p1r0"
    ]
    assert story[-5:] == ["deleting", "gone", "creating", "booting", "ready"]
    assert await provision.teardown(ctx) == []


async def test_no_second_pod_is_rented_while_the_first_may_still_cost(ctx: Rollout, agents: list[str]) -> None:
    await provision.provision(ctx)
    fake = provider_of(ctx)
    fake.stubborn.add("uvcc-demo-1-p1r0")
    fake.asked.clear()
    with pytest.raises(UnreachableError, match="may still be there"):
        await replacing.replace_pod(ctx, "p1r0")
    assert not fake.asked.is_set()
    assert agents == []
    assert ctx.bus.snapshot.pods["p1r0"].state == "lost"
    with pytest.raises(ConfigError, match="no pod p9r9"):
        await replacing.replace_pod(ctx, "p9r9")


class Noting(FakeProvider):
    """It writes down what it is about to make."""

    looks = 0

    def begun(self, prefix: str) -> set[str]:
        return set()

    async def list(self, prefix: str) -> list[Pod]:
        self.looks += 1
        await asyncio.Event().wait()  # an API that takes every question and answers none
        raise AssertionError


async def test_the_end_of_a_run_that_asked_for_nothing_does_not_wait_for_an_api_that_is_away(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision, "NOTHING_S", 0.01)
    fake = Noting()
    ctx.provider = fake
    assert await provision.teardown(ctx) == []
    assert fake.looks == 1
    alerts = [e for _, e in iter_events(ctx.run_dir / "journal.sqlite") if isinstance(e, ev.Alert)]
    assert alerts == []
