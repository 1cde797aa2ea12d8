"""One domain's side of a federated rollout: it vouches for its own pods, and builds their run from three rosters."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from uvcc_console.core import events as ev
from uvcc_console.core.log import logger
from uvcc_console.federation.owner_parcels import OwnerParcels
from uvcc_console.federation.parcels import Parcels, box_of, send
from uvcc_console.federation.seat import Seat, claim
from uvcc_console.fleet import pins
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.wheel import build_wheel
from uvcc_console.plan.federated import barriers_of, under
from uvcc_console.plan.plan import FULL, SMOKE, Phase, pod_name
from uvcc_console.report import collector
from uvcc_console.rollout.context import Halted, Rollout, each
from uvcc_console.rollout.federated.exchange import ExchangeTable, exchange
from uvcc_console.rollout.federated.from_owners import results_to_owners, shares_of_owners
from uvcc_console.rollout.federated.peers import Peers
from uvcc_console.rollout.federated.told_waits import all_domains
from uvcc_console.rollout.stages.links.ports import LINKS, LOOPBACK, free_ports, host_of
from uvcc_console.rollout.stages.training import agree
from uvcc_engine.contract.agent_protocol.agent_commands import PolicyCommand
from uvcc_engine.contract.errors import (
    ConfigError,
    ProtocolError,
    UnreadableError,
    UvccError,
)
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.model_hash import model_hash
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.peer_protocol.record_names import ROSTERS
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE
from uvcc_engine.transcript.proof.input_attribution import OWNERS_FILE
from uvcc_engine.transcript.signed import approvals, barriers, consents, roster
from uvcc_engine.transcript.signed.barriers import COLLECT, MEET, ROSTER, SHARES
from uvcc_engine.transcript.signed.roster import ROSTER_NAMESPACE, Roster, RosterPod
from uvcc_engine.transcript.signing.identity import Identity, verify_signature
from uvcc_engine.transcript.signing.sshsig import POLICY_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, write_signatures

SHARE_FILE: Final = owner_files.SHARE
Act = Callable[[bool], Awaitable[str]]
T = TypeVar("T")
log = logger(__name__)


class FederatedParty:
    """What ``Rollout.federated`` is in a domain's own conductor."""

    def __init__(self, ctx: Rollout, seat: Seat) -> None:
        self.seat = seat
        self.peers = Peers(ctx.bus, seat, barriers_of(ctx.plan))
        self.rosters: dict[int, Roster] = {}
        self._bodies: list[str] = []
        self._shared: dict[str, Any] = {}
        self._owners: list[str] = []

    @property
    def domain(self) -> str:
        return self.seat.key.public

    @property
    def public_data(self) -> bool:
        """Whether the run trains on data that are nobody's: the proposal names no owner."""
        return not self.seat.proposal.owners

    def pins(self) -> dict[str, str]:
        """The identities of all three parties' first pods, each as its domain vouches for it."""
        return {f"P{p}": r.pod(0).identity.ed25519 for p, r in self.rosters.items()}

    def sign(self, what: str) -> None:
        """This domain's operator signs for something that several domains decide; see ``Peers.sign``."""
        self.peers.sign(what)

    # stages

    def acts(self, ctx: Rollout, acts: dict[str, Act]) -> dict[str, Act]:
        """The rollout's stages with those of a domain among them, each given up when another domain makes it vain."""
        ours = {MEET: self._meet, ROSTER: self._roster, SHARES: self._shares}
        made: dict[str, Act] = {}
        for name in ctx.plan.stages:
            if name in ours:
                made[name] = self._guarded(ctx, name, _once(ctx, ours[name]))
            elif name in acts:
                made[name] = self._guarded(ctx, name, acts[name])
        return made

    def _guarded(self, ctx: Rollout, name: str, act: Act) -> Act:
        async def run(resumed: bool) -> str:
            if name == COLLECT:
                self._keep_records(ctx)
            try:
                detail = await self.peers.guarded(_told(act, resumed))
            except Halted as e:
                raise Halted(e.step, "all three domains stop; uvcc resume signs to go on, uvcc teardown ends it") from e
            if name == barriers.DRILL:
                held = ctx.bus.snapshot.halt
                own = {"total": held.total, "verified": held.verified}
                await self.peers.guarded(self.peers.reach(name, _digest(own), equal=False))
            elif name in (SMOKE, FULL):
                hashes = sorted({h for key, h in ctx.bus.snapshot.result_hashes.items() if key.startswith(f"{name}/")})
                await self.peers.guarded(self.peers.reach(name, _digest(hashes)))
            elif name.startswith("verify-"):
                verdict = ctx.bus.snapshot.verdicts[name.removeprefix("verify-")]
                await self.peers.guarded(self.peers.reach(name, verdict.global_root))
            elif name == COLLECT:
                await results_to_owners(self.seat, self.peers.attempt, self._owners, ctx.artifacts, FULL)
                await self.peers.reach(name, _digest("collected"), waits=False)
            return detail

        return run

    async def _meet(self, ctx: Rollout) -> str:
        """Nothing is rented before all three domains are there, with the code that they approved."""
        wheel = await asyncio.to_thread(build_wheel, ctx.run_dir / "wheel")
        if wheel.sha256 != self.seat.proposal.code_hash:
            what = f"this installation's code is {wheel.sha256[:16]}, approved was {self.seat.proposal.code_hash[:16]}"
            raise ConfigError(what, "every domain installs the very release that the proposal names")
        self._place = await asyncio.to_thread(claim, self.seat, ctx.run_dir.name)  # held until this process ends
        _waiting(ctx, MEET, f"waits for the two other domains, {self.seat.terms.wait_s:.0f} s at most")
        attempt = await self.peers.meet()
        ctx.plan = under(ctx.plan, f"{self.seat.proposal.name[:40]}-{self.seat.proposal.id[:12]}-{attempt}")
        return f"all three domains are there, attempt {attempt}"

    async def _roster(self, ctx: Rollout) -> str:
        """Vouch for this domain's pods, and wait for what the others vouch for."""
        mine = await self._own_roster(ctx)
        roster.check(mine, self.seat.proposal)
        body = roster.signed(mine, lambda payload: self.seat.key.sign(ROSTER_NAMESPACE, payload))
        proposal, attempt, there = self.seat.proposal, self.peers.attempt, self.seat.there()
        at = f"{ROSTERS}{proposal.id}/{attempt}/"

        def look() -> dict[int, Roster]:
            lying = there.look_bodies(at)
            if body not in lying:
                there.leave(f"{at}{self.seat.party}", body)
            self._bodies = roster.signed_among(proposal, attempt, [body, *lying])
            return roster.gathered(proposal, attempt, self._bodies)

        self.rosters = await self._all(look, "published a roster")
        for theirs in self.rosters.values():
            roster.check_reachable(theirs)
        digests = {str(p): r.digest for p, r in sorted(self.rosters.items())}
        await self.peers.reach(ROSTER, _digest(digests))
        ctx.say(*(_vouched(p, pod) for p, r in self.rosters.items() if p != self.seat.party for pod in r.pods))
        others = ", ".join(f"P{p} {len(r.pods)} at {r.provider}" for p, r in sorted(self.rosters.items()))
        return f"three rosters: {others}"

    async def _own_roster(self, ctx: Rollout) -> Roster:
        assert ctx.wheel is not None
        phase, party = ctx.plan.phases[FULL], self.seat.party
        free = await free_ports({name: len(phase.coords(name)) for name in phase.pods()}, ctx.members, LINKS)
        pods = []
        for name in phase.pods():
            member = ctx.members[name]
            coords = [str(c) for c in phase.coords(name)]
            pods.append(
                RosterPod(
                    pod=name,
                    coords=tuple(coords),
                    identity=agree.identity_of(ctx, party, member.request.replica),
                    endpoints={c: f"{host_of(member)}:{free[name].pop()}" for c in coords},
                    host_key=pins.fingerprint(member.ssh.host_key),
                )
            )
        first = ctx.members[pod_name(party, 0)].pod
        assert first is not None
        return Roster(
            version=roster.VERSION,
            proposal=self.seat.proposal.id,
            attempt=self.peers.attempt,
            party=party,
            domain=self.domain,
            code_hash=ctx.wheel.sha256,
            provider=_host(self.seat.proposal.providers[party], ctx.plan.profile.fleet.kind, first.provider),
            region=first.region or "unknown",
            pods=tuple(pods),
            collector=await asyncio.to_thread(_collector),
        )

    async def _shares(self, ctx: Rollout) -> str:
        """Each domain gets the sealed shares of its own pods, and the commitments that all three hold them against.

        They come from the data owners. Without an owner the data are public, and the first domain shares them.
        """
        folder = ctx.run_dir / "owner" / "sealed"
        box = box_of(self.seat.proposal.id, self.peers.attempt, SHARES)
        if self.seat.proposal.owners:
            of = (self.seat.proposal, self.peers.attempt, self.rosters, self.seat.party)
            theirs = OwnerParcels(self.seat.there(), *of, folder)
            replicas = self.seat.proposal.topology.replicas
            self._shared = await shares_of_owners(
                theirs, replicas, self.seat.terms.wait_s, partial(_waiting, ctx, SHARES)
            )
            self._owners = await asyncio.to_thread(theirs.statements)
            await self.peers.reach(SHARES, _digest(self._shared))
            return "the owners' sealed shares are here; the commitments are equal at all three domains"
        if self.seat.party == 0:
            await agree.seal_inputs(ctx, self._request(ctx), folder)
            for party in range(1, PARTIES):
                files = {name: folder / name for name in (SHARE_FILE, _sealed(party))}
                await asyncio.to_thread(send, self.seat.there(), box, party, files)
        else:
            wanted = {SHARE_FILE, _sealed(self.seat.party)}
            parcels = Parcels(self.seat.there(), box, ctx.run_dir / "incoming" / SHARES)

            def look() -> dict[int, bool]:
                if not wanted <= set(parcels.arrived(0)):
                    parcels.poll()
                come = wanted <= set(parcels.arrived(0))
                return {p: True for p in range(PARTIES) if p or come}

            await self._all(look, "sent the sealed shares")
            with DownloadFolder(folder) as downloads:
                for name in sorted(wanted):
                    await asyncio.to_thread(parcels.store, 0, name, downloads, (name,))
        self._shared = _commitments(folder / SHARE_FILE)
        await self.peers.reach(SHARES, _digest(self._shared))
        return "sealed shares are here; the commitments are equal at all three domains"

    def _request(self, ctx: Rollout) -> dict[str, Any]:
        """What the first domain seals public data for: this attempt of this proposal, and these pods."""
        folder = ctx.run_dir / "owner" / "identity"
        owner = Identity.load(folder) if folder.exists() else Identity.create(folder)
        replicas = range(self.seat.proposal.topology.replicas)
        return {
            "proposal": self.seat.proposal.id,
            "attempt": self.peers.attempt,
            "job": dict(ctx.plan.phases[FULL].job),
            "reveal": [[r.value, r.to] for r in self.seat.proposal.reveal],
            "owners": [owner.public.x25519],
            "pods": [[self.rosters[p].pod(r).identity.to_json() for p in range(PARTIES)] for r in replicas],
        }

    # a phase

    def links(self, phase: Phase) -> dict[str, LinkSpec]:
        """The links of this domain's own workers: where its roster says, to where the others' rosters say."""
        found = {}
        for c in phase.coords():
            at = {
                p: r.pod(c.replica).endpoints[str(Coord(c.replica, p, c.stage, c.tensor))]
                for p, r in self.rosters.items()
            }
            host, _, port = at[c.party].rpartition(":")
            peers = {str(p): address for p, address in at.items() if p != c.party}
            found[str(c)] = LinkSpec(kind="direct", listen=f"{_bound(host)}:{port}", peers=peers)
        return found

    async def agree(self, ctx: Rollout, phase: Phase) -> tuple[Policy, Path]:
        """Draft the policy that follows from proposal, rosters and commitments; have it signed by three first pods.

        All three domains draft the same text, each for itself. This domain's pod signs it because this domain's key
        approves exactly it; the others' signatures are taken from the rendezvous and held against their rosters.
        """
        folder = ctx.artifacts / phase.name
        if (folder / SIGNATURES_FILE).exists():  # a resume runs under the policy that was signed
            return Policy.load(folder / POLICY_FILE), folder
        policy = self._draft(ctx, phase)
        agree.check_proposal(ctx, phase, policy)
        digest = policy.hash.hex()
        word = approvals.Approval(of="policy", sha256=digest, party=self.seat.party, decision="approve")
        approval = approvals.signed(word, lambda payload: self.seat.key.sign(approvals.APPROVAL_NAMESPACE, payload))
        signer = ctx.members[pod_name(self.seat.party, 0)]
        ack = await signer.channel.request(PolicyCommand(policy=policy.canonical.decode(), approval=approval))
        own = str(ack["signature"])
        await self.peers.reach(f"policy-{phase.name}", digest)
        there = self.seat.there()
        at = f"{self.seat.proposal.id}/{self.peers.attempt}/{phase.name}"

        def look() -> dict[int, str]:
            lying = there.look_signatures(at)
            if own not in lying:
                there.leave_signature(at, self.seat.party, own)
            return _signed(policy, [own, *lying])

        signatures = await self._all(look, f"signed the policy of {phase.name}")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(folder / POLICY_FILE, policy.canonical)
        write_signatures(folder / SIGNATURES_FILE, signatures)

        async def hand_over(name: str) -> None:
            member, there_on = ctx.members[name], agree.remote_dir(phase)
            await member.ssh.sh(f"umask 077; mkdir -p {there_on}")
            for file in (POLICY_FILE, SIGNATURES_FILE):
                await member.ssh.put(folder / file, f"{there_on}/{file}")
            await agree.put_base(ctx, phase, member)
            sealed = ctx.run_dir / "owner" / "sealed" / _sealed(self.seat.party)
            await member.ssh.put(sealed, f"{there_on}/{agree.INPUTS_FILE}")

        await each(ctx.of_phase(phase), lambda m: hand_over(m.name))
        return policy, folder

    def _draft(self, ctx: Rollout, phase: Phase) -> Policy:
        proposal, job = self.seat.proposal, dict(phase.job)
        replicas = range(phase.topology.replicas)
        parties = []
        for p, r in sorted(self.rosters.items()):
            public, *others = (r.pod(n).identity for n in replicas)
            parties.append(PolicyParty(p, public, r.provider, r.region, tuple(others)))
        about = f"{proposal.id}|{self.peers.attempt}|{phase.name}|{_digest([r.digest for r in self.rosters.values()])}"
        return Policy.build(
            job=job,
            model_hash=model_hash(job),
            code_hash=proposal.code_hash,
            topology=phase.topology,
            parties=parties,
            owner=str(self._shared["owner"]),
            commitments=list(self._shared["commitments"]),
            reveal=[(r.value, r.to) for r in proposal.reveal],
            limits=asdict(proposal.limits),
            nonce=hashlib.sha256(b"UVCC_FEDERATED_NONCE_V1" + about.encode()).hexdigest(),
            proposal=proposal.id,
            attempt=self.peers.attempt,
        )

    # evidence

    async def evidence(self, ctx: Rollout, phase: Phase) -> None:
        """Give the others this domain's transcripts, and take theirs: each verifies the whole for itself."""
        table = ExchangeTable(self.seat, self.peers, self.rosters, self._all)
        await exchange(table, ctx.run_dir, ctx.artifacts / phase.name, phase)

    def _keep_records(self, ctx: Rollout) -> None:
        """Rosters, barriers and consents, as they were signed, among what the run hands over."""
        ctx.artifacts.mkdir(parents=True, exist_ok=True, mode=0o700)
        _keep_json(ctx.artifacts / roster.FILE, self._bodies)
        _keep_json(ctx.artifacts / barriers.FILE, list(self.peers.ledger.bodies))
        if self.peers.consents.bodies:
            _keep_json(ctx.artifacts / consents.FILE, list(self.peers.consents.bodies))
        if self._owners:
            _keep_json(ctx.artifacts / OWNERS_FILE, self._owners)

    async def part(self, ctx: Rollout, status: str, detail: str) -> None:
        """Tell the others that this domain goes no further; what was signed until then is kept, whoever lied in it."""
        await self.peers.farewell(status, detail)
        if self.peers.attempt < 0 or (ctx.artifacts / barriers.FILE).exists():
            return
        try:
            self._keep_records(ctx)
        except (UvccError, OSError) as e:
            log.warning("what the domains signed could not be kept: %s", e)

    async def _all(self, look: Callable[[], dict[int, T]], what: str) -> dict[int, T]:
        return await all_domains(look, what, self.seat.terms.wait_s, self.peers.tell)


def _signed(policy: Policy, lying: list[str]) -> dict[int, str]:
    """Which of these are signatures of the policy, by party."""
    found: dict[int, str] = {}
    for text in dict.fromkeys(lying):
        for party in range(PARTIES):
            if party not in found and verify_signature(policy.public(party), POLICY_NAMESPACE, policy.canonical, text):
                found[party] = text
    return found


def _commitments(path: Path) -> dict[str, Any]:
    """What the policy binds of the shares. Raises ProtocolError if that is not to be read from P0's file."""
    try:
        found = reading.read_json(path)
        named = {"owner": str(found["owner"]), "commitments": [str(c) for c in found["commitments"]]}
    except (UnreadableError, KeyError, TypeError) as e:
        hint = "the relay altered them, or that domain runs other code: ask it"
        raise ProtocolError("what came as P0's commitments cannot be read", hint) from e
    return named


def _sealed(party: int) -> str:
    """The name of a party's sealed shares; all its pods open the same file."""
    return f"sealed-p{party}.bin"


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def _keep_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1).encode() + b"\n", mode=0o600)


def _bound(host: str) -> str:
    """Where a worker listens that the others know under this address."""
    return LOOPBACK if host == LOOPBACK else "0.0.0.0"


def _collector() -> str:
    collector.private_key()  # made at first use
    return collector.public_line()


def _host(named: str, kind: str, operator: str) -> str:
    """Who hosts this party, in the proposal's words: it names a kind of provider, or one operator of a market."""
    return kind if named == kind else operator


def _vouched(party: int, pod: RosterPod) -> ev.Event:
    return ev.PodVouched(pod=pod.pod, party=party, replica=pod.where.replica, identity=pod.identity.ed25519)


def _once(ctx: Rollout, stage: Callable[[Rollout], Awaitable[str]]) -> Act:
    async def act(resumed: bool) -> str:
        return await stage(ctx)

    return act


def _waiting(ctx: Rollout, stage: str, for_whom: str) -> None:
    ctx.say(ev.StageChanged(name=stage, status="running", detail=for_whom))


async def _told(act: Act, resumed: bool) -> str:
    return await act(resumed)
