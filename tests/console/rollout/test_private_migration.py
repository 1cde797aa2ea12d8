"""What a lost pod leads to, decided before anything is rented: who is lost, what is left, who hands it over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh import Completed
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import preflight, replacing
from uvcc_console.rollout.stages.links import relay
from uvcc_console.rollout.stages.migration import private_migration, share_transfer
from uvcc_console.rollout.stages.training import agree, silence
from uvcc_engine.contract.errors import ConfigError, UnreachableError, VerificationError
from uvcc_engine.contract.job.migration import record_hash
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty

HASH = "ab" * 32


@dataclass
class Link:
    """A pod's end: silent, or with COMMIT records of these steps."""

    steps: tuple[int, ...] = ()
    silent: bool = False
    sid: str = ""
    host_key: str = ""
    noise: list[str] = field(default_factory=list)

    async def run(self, command: str) -> Completed:
        if self.silent:
            raise UnreachableError("no answer")
        return Completed(0, b"", b"")

    async def sh(self, command: str) -> str:
        records = [json.dumps({"step": step, "sid_job": self.sid, "parties": []}) for step in self.steps]
        return "\n".join([*self.noise, *records])


class Market:
    """Which of the pods the provider still has, and how often it does not answer first."""

    name = "fake"

    def __init__(self, *names: str, silences: int = 0) -> None:
        self.names, self.silences = names, silences

    async def list(self, prefix: str) -> list[Pod]:
        self.silences -= 1
        if self.silences >= 0:
            raise UnreachableError("no answer")
        return [Pod(f"{prefix}{n}", 0, 0, "fake", n) for n in self.names]


class Recorded(Market):
    """It writes down which of them may still be there."""

    open: set[str]

    def begun(self, prefix: str) -> set[str]:
        return {f"{prefix}{name}" for name in self.open}


def identities(count: int) -> list[Identity]:
    return [Identity(bytes([n]) * 32, bytes([n + 1]) * 32) for n in range(count)]


def policy_of(topology: Topology, steps: int) -> Policy:
    made = identities(3 * topology.replicas)
    others = [tuple(i.public for i in made[3 + p :: 3]) for p in range(3)]
    parties = [PolicyParty(p, made[p].public, "fake", "here", others[p]) for p in range(3)]
    return Policy.build(
        job={"kind": "private", "steps": steps},
        model_hash=HASH,
        code_hash=HASH,
        topology=topology,
        parties=parties,
        owner=made[0].public.ed25519,
        commitments=[HASH] * 3,
        reveal=["loss"],
        limits={},
        nonce=HASH,
    )


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[Rollout]:
    _, profile = load("demo", ["topology.replicas=2", "smoke.replicas=2"])
    plan = make_plan("demo-1", "demo", profile)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    for name, m in members.items():
        m.pod = Pod(m.request.name, m.request.party, m.request.replica, "fake", name)
        m.link = Link()  # type: ignore[assignment]
        m.agent = object()  # type: ignore[assignment]
    key = asyncssh.generate_private_key("ssh-ed25519")
    yield Rollout(plan, tmp_path, Bus(journal), Market(*members), key, members)  # type: ignore[arg-type]
    journal.close()


def link(ctx: Rollout, name: str) -> Link:
    found = ctx.members[name].link
    assert isinstance(found, Link)
    return found


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_migration, "LOOK_S", 0.001)
    monkeypatch.setattr(private_migration, "VERDICT_S", 0.01)


@pytest.mark.usefixtures("no_waiting")
async def test_lost_is_what_neither_answers_nor_is_at_the_provider(ctx: Rollout) -> None:
    assert await private_migration.lost_pods(ctx) == []
    link(ctx, "p1r0").silent = True
    assert await private_migration.lost_pods(ctx) == []  # a link alone may be down
    others = [n for n in ctx.members if n != "p1r0"]
    ctx.provider = Market(*others, silences=2)  # type: ignore[assignment]
    assert await private_migration.lost_pods(ctx) == ["p1r0"]
    ctx.provider = Market(silences=1000)  # type: ignore[assignment]
    assert await private_migration.lost_pods(ctx) == []  # a provider that does not answer proves nothing
    link(ctx, "p1r0").silent = False
    ctx.members["p2r0"].agent = None  # its replacement did not come up
    assert await private_migration.lost_pods(ctx) == ["p2r0"]


async def test_a_pod_that_no_path_reaches_is_asked_for_before_its_phase_runs_out_of_patience(ctx: Rollout) -> None:
    """The only pod of a phase has no peer that notices its end."""

    def path(name: str, up: bool, ts: float) -> None:
        ctx.say(ev.LinkChanged(ts=ts, pod="p1r0", path=name, up=up))

    at = ev.PodChanged(ts=1000.0, pod="p1r0", party=1, replica=0, provider="fake", state="agent")
    ctx.say(at)
    path("ssh", True, 1000.0)
    gone = Market(*[n for n in ctx.members if n != "p1r0"])
    ctx.provider = gone  # type: ignore[assignment]
    assert await private_migration.taken_away(ctx, 5000.0) == []  # it is heard
    path("ssh", False, 2000.0)
    path("relay", True, 2000.0)
    assert await private_migration.taken_away(ctx, 5000.0) == []  # on another way
    path("relay", False, 2010.0)
    assert await private_migration.taken_away(ctx, 2039.0) == []  # not for long
    assert await private_migration.taken_away(ctx, 2041.0) == []  # it was our own way that was down, and is up again
    link(ctx, "p1r0").silent = True
    assert await private_migration.taken_away(ctx, 2041.0) == ["p1r0"]
    told = Recorded(*gone.names)
    told.open = set(ctx.members)
    ctx.provider = told  # type: ignore[assignment]
    assert await private_migration.taken_away(ctx, 2025.0) == []  # the list may be late
    told.open.discard("p1r0")
    assert await private_migration.taken_away(ctx, 2019.0) == []
    assert await private_migration.taken_away(ctx, 2025.0) == ["p1r0"]  # its own record tells of the end
    ctx.provider = Market(silences=1)  # type: ignore[assignment]
    assert await private_migration.taken_away(ctx, 2041.0) == []  # a provider that does not answer proves nothing
    ctx.provider = Market(*ctx.members)  # type: ignore[assignment]
    assert await private_migration.taken_away(ctx, 2041.0) == []


@pytest.mark.parametrize(
    ("lost", "held", "step", "sources"),
    [
        ("p1r0", {"p0r0": (5, 10), "p2r0": (5, 10), "p0r1": (5,), "p1r1": (5,), "p2r1": (5,)}, 10, ["p0r0", "p2r0"]),
        ("p1r0", {"p0r0": (5, 10), "p2r0": (5,), "p0r1": (), "p1r1": (5,), "p2r1": (5,)}, 5, ["p0r0", "p2r0"]),
        ("p1r1", {"p0r0": (5,), "p1r0": (5,), "p2r0": (5,), "p0r1": (9,), "p2r1": (9,)}, 5, ["p0r0", "p1r0", "p2r0"]),
        ("p1r0", {"p0r0": (40,), "p2r0": (40,)}, 0, []),  # that was the end: nothing is left to do after it
        ("p1r0", {}, 0, []),
    ],
)
async def test_the_newest_checkpoint_that_a_replicas_survivors_share_is_taken(
    ctx: Rollout, lost: str, held: dict[str, tuple[int, ...]], step: int, sources: list[str]
) -> None:
    phase = ctx.plan.phases["full"]
    old = policy_of(phase.topology, 40)
    for name, steps in held.items():
        ctx.members[name].link = Link(steps, sid=old.sid_job.hex(), noise=["{damaged"])  # type: ignore[assignment]
    survivors = [m for m in ctx.of_phase(phase) if m.name != lost]
    record, found = await private_migration.newest_commit(ctx, phase, old, survivors)
    assert record.get("step", 0) == step
    assert sorted(m.name for m in found) == sources


def test_the_journal_says_what_a_phase_goes_on_as(ctx: Rollout) -> None:
    phase = ctx.plan.phases["full"]
    old = policy_of(phase.topology, 40)
    folder = ctx.artifacts / "full"
    folder.mkdir(parents=True)
    (folder / "policy.json").write_bytes(old.canonical)
    start = {"of": old.hash.hex(), "step": 10, "commit": HASH, "root": old.hash.hex(), "restored": [1]}
    made = private_migration.PhaseMigration(
        "full", 2, "demo-1.full-2", phase.engine_run, old.hash.hex(), start, ("p0r0",), ("p1r0",)
    )
    ctx.say(made.event())
    assert private_migration.all_of(ctx) == [made]
    for _ in range(2):  # also by the next conductor
        private_migration.apply(ctx)
        now = ctx.plan.phases["full"]
        assert (now.engine_run, now.job["start"]) == ("demo-1.full-2", start)
        assert {k: v for k, v in now.job.items() if k != "start"} == dict(phase.job)
        assert not folder.exists()
        assert Policy.load(ctx.artifacts / "full-1" / "policy.json").hash == old.hash
    assert private_migration.migration_number(now) == 2
    assert ctx.plan.phases["smoke"].engine_run == "demo-1.smoke"


async def test_the_pods_are_given_the_very_record_that_their_policy_starts_from(
    ctx: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the conductor that hands over knows of it by the journal alone, whose texts have no line breaks."""
    phase = ctx.plan.phases["full"]
    ctx.say(ev.PhaseStarted(phase="full", engine_run=phase.engine_run, steps=40, sid_job=""))
    old = policy_of(phase.topology, 40)
    (ctx.artifacts / "full").mkdir(parents=True)
    (ctx.artifacts / "full" / "policy.json").write_bytes(old.canonical)
    signed = [{"coord": f"p{p}r0s0t0", "signature": f"-----BEGIN SSH SIGNATURE-----\nAA{p}\n"} for p in range(3)]
    record = {"step": 10, "sid_job": old.sid_job.hex(), "parties": signed}
    survivors = [m for m in ctx.of_phase(phase) if m.name != "p1r0"]
    done: list[str] = []

    async def newest(*given: object) -> tuple[dict[str, Any], list[Member]]:
        return record, survivors

    async def noted(ctx: Rollout, *names: object) -> None:
        done.append(str(names[0]) if names else "preflight")

    monkeypatch.setattr(private_migration, "newest_commit", newest)
    monkeypatch.setattr(private_migration, "_evidence", noted)
    monkeypatch.setattr(private_migration, "_end_relays", noted)
    monkeypatch.setattr(replacing, "replace_pod", noted)
    monkeypatch.setattr(preflight, "preflight", noted)
    monkeypatch.setattr(agree, "parties_of", lambda ctx, phase: old.parties)
    assert "goes on from step 10" in await private_migration.go_on(ctx, ["p1r0"])
    assert done[1:3] == ["p1r0", "preflight"]
    made = private_migration.latest(ctx)["full"]
    assert made.start["commit"] == record_hash(record)
    kept = private_migration.handover_folder(ctx, made.engine_run)
    share_transfer.check_kept(kept, made)
    assert json.loads((kept / "COMMIT.json").read_text()) == record
    (kept / "COMMIT.json").write_text(json.dumps(record | {"step": 11}))
    with pytest.raises(
        VerificationError, match=r"COMMIT\.json is not the COMMIT record that demo-1\.full-2 starts from"
    ):
        share_transfer.check_kept(kept, made)


def test_what_cannot_go_on_is_refused_before_anything_is_rented(ctx: Rollout) -> None:
    with pytest.raises(ConfigError, match="no phase was started"):
        private_migration.check(ctx, ["p1r0"])
    phase = ctx.plan.phases["full"]
    ctx.say(ev.PhaseStarted(phase="full", engine_run=phase.engine_run, steps=40, sid_job=""))
    with pytest.raises(ConfigError, match=r"policy of demo-1\.full is not here"):
        private_migration.check(ctx, ["p1r0"])
    old = policy_of(phase.topology, 40)
    once = {"of": HASH, "step": 5, "commit": HASH, "root": HASH, "restored": [0]}
    second = replace(old, job={**old.job, "start": once})
    private_migration.check_restorable(second, {"step": 10}, {0})
    with pytest.raises(ConfigError, match=r"parties \[0, 1\] would have been handed"):
        private_migration.check_restorable(second, {"step": 10}, {1})
    profile = ctx.plan.profile
    ctx.plan = replace(ctx.plan, profile=profile.model_copy(update={"job": load("local-lm-smoke")[1].job}))
    with pytest.raises(ConfigError, match="lm job has no shares to hand over"):
        private_migration.check(ctx, ["p0r0"])


def test_inputs_are_shared_anew_for_another_pod_and_once_for_the_same(ctx: Rollout) -> None:
    made = identities(6)
    for member, identity in zip(ctx.members.values(), made, strict=True):
        member.identity = identity.public.to_json()
    phase = ctx.plan.phases["full"]
    pods = agree.identities_of_pods(ctx, phase)
    first, parties = agree.sealed_inputs(ctx, pods)
    parties.parent.mkdir()
    parties.write_text(json.dumps(pods))
    assert agree.sealed_inputs(ctx, agree.identities_of_pods(ctx, phase)) == (first, parties)
    ctx.members["p1r0"].identity = Identity(b"x" * 32, b"y" * 32).public.to_json()
    other, its_parties = agree.sealed_inputs(ctx, agree.identities_of_pods(ctx, phase))
    assert other != first
    assert its_parties != parties
    assert agree.sealed_inputs(ctx, agree.identities_of_pods(ctx, phase)) == (other, its_parties)


def test_workers_that_stop_unasked_are_trouble_once_the_rest_is_silent(ctx: Rollout) -> None:
    phase = ctx.plan.phases["full"]
    ctx.say(ev.PhaseStarted(phase="full", engine_run=phase.engine_run, steps=40, sid_job=""))
    for c in map(str, phase.coords()):
        pod = c.partition("s")[0]
        ctx.say(ev.WorkerProcess(pod=pod, coord=c, state="started", pid=7))
        ctx.say(ev.HeartbeatRead(ts=100.0, pod=pod, coord=c, record={"step": 3}))
    assert silence.deserted(ctx.bus.snapshot, phase, 1000.0) is None
    ctx.say(ev.WorkerProcess(pod="p0r0", coord="p0r0s0t0", state="exited", pid=7, rc=0))
    assert silence.deserted(ctx.bus.snapshot, phase, 110.0) is None  # its result may be on its way
    found = silence.deserted(ctx.bus.snapshot, phase, 120.0)
    assert found is not None
    assert found.what.startswith("p0r0s0t0 stopped before the last step")
    ctx.say(ev.HaltRequested(nonce="n", mode="halt", by="cli"))
    assert silence.deserted(ctx.bus.snapshot, phase, 120.0) is None  # somebody asked, and the ladder has the word


def test_the_credentials_of_a_replaced_pod_open_nothing_where_the_phase_goes_on(ctx: Rollout) -> None:
    """They were kept by phase: a pod that came back could have read and deleted the mail of who took its place."""
    phase = ctx.plan.phases["full"]
    before = [relay.relay_tokens(ctx, phase, replica) for replica in range(2)]
    assert [relay.relay_tokens(ctx, phase, replica) for replica in range(2)] == before  # a resume meets the same relay
    after = [relay.relay_tokens(ctx, replace(phase, engine_run=f"{phase.engine_run}-2"), r) for r in range(2)]
    every = [token for made in (*before, *after) for token in made]
    assert len(set(every)) == len(every) == 12
