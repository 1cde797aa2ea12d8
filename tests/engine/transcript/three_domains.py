"""A run of three domains as a package, with real keys: proposal, rosters, barriers and two phases' evidence."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.bench.work import rehearsal
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.proof.bundle import NAME, read_bundle
from uvcc_engine.transcript.signed import approvals, barriers, proposals, roster
from uvcc_engine.transcript.signed.approvals import Approval
from uvcc_engine.transcript.signed.barriers import Barrier
from uvcc_engine.transcript.signed.proposals import SignedProposal, Standing
from uvcc_engine.transcript.signed.roster import Roster, RosterPod
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed

DOMAINS = [Identity(bytes([n + 1]) * 32, bytes([n + 9]) * 32) for n in range(4)]
KEYS = [d.public.ed25519 for d in DOMAINS]
STEPS = {"smoke": 1, "full": 2}


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def signer(party: int, namespace: str) -> Callable[[bytes], str]:
    return lambda payload: DOMAINS[party].sign(namespace, payload)


@dataclass
class DomainsRun:
    """The package's folder, and what its domains signed. ``says``: by stage and party, what a domain reports there
    in place of the truth; ``leaves_out``: barriers that lack."""

    root: Path
    proposal: Proposal
    rosters: dict[int, Roster]
    phases: tuple[str, ...] = ("smoke", "full")
    says: dict[tuple[str, int], str] = field(default_factory=dict)
    leaves_out: set[tuple[str, int]] = field(default_factory=set)
    more: list[Barrier] = field(default_factory=list)

    def reports(self) -> dict[str, str]:
        """What each stage has in common."""
        found = {barriers.ROSTER: digest({str(p): r.digest for p, r in sorted(self.rosters.items())})}
        for name in self.phases:
            bundle = read_bundle(self.root / name / NAME, trusted=lambda _: True)
            inputs = {"owner": bundle.policy.owner, "commitments": list(bundle.policy.commitments)}
            found |= {barriers.SHARES: digest(inputs), f"policy-{name}": bundle.policy.hash.hex()}
            found |= {name: digest(list(bundle.result_hashes)), f"verify-{name}": bundle.epochs[-1]["global_root"]}
        return found

    def sign(self, phases: tuple[str, ...] = ("smoke", "full")) -> None:
        """Have the domains sign their way through these phases, each barrier over the three before."""
        reports, seen, bodies = self.reports(), dict[str, str](), list[str]()
        for stage in barriers.stages_of(phases, drill="smoke" in phases):
            made = {}
            for p in range(PARTIES):
                told = self.says.get((stage, p), reports.get(stage, digest(stage)))
                made[p] = Barrier(
                    version=1,
                    proposal=self.proposal.id,
                    attempt=self.rosters[0].attempt,
                    party=p,
                    stage=stage,
                    status="reached",
                    digest=told,
                    seen=seen,
                )
            made = {p: b for p, b in made.items() if (stage, p) not in self.leaves_out}
            bodies += [barriers.signed(b, signer(p, barriers.BARRIER_NAMESPACE)) for p, b in made.items()]
            if len(made) < PARTIES:
                break
            seen = {str(p): b.mark for p, b in made.items()}
        bodies += [barriers.signed(b, signer(b.party, barriers.BARRIER_NAMESPACE)) for b in self.more]
        (self.root / barriers.FILE).write_text(json.dumps(bodies))

    def write(self) -> None:
        rosters = [roster.signed(r, signer(p, roster.ROSTER_NAMESPACE)) for p, r in self.rosters.items()]
        (self.root / roster.FILE).write_text(json.dumps(rosters))
        made = Standing(SignedProposal.make(self.proposal, signer(3, proposals.PROPOSAL_NAMESPACE)))
        for p in range(PARTIES):
            word = Approval(of="proposal", sha256=self.proposal.id, party=p, decision="approve")
            made = made.hearing(approvals.signed(word, signer(p, approvals.APPROVAL_NAMESPACE)))
        (self.root / proposals.FILE).write_text(json.dumps(made.to_json()))
        self.sign(self.phases)


def proposal_of(job: Mapping[str, Any]) -> Proposal:
    return Proposal(
        version=1,
        name="digits",
        coordinator=KEYS[3],
        domains=(KEYS[0], KEYS[1], KEYS[2]),
        owners=(),
        job=dict(job),
        topology=Topology(),
        code_hash=rehearsal.CODE_HASH,
        reveal=(Revealed(value="loss", to="all"), Revealed(value="accuracy", to="all")),
        providers=("north", "west", "south"),
        limits=ProposedLimits(hourly=0.0, total=0.0, ttl_s=0.0),
        created=1,
        expires=2,
        nonce="ab" * 32,
    )


def _roster(proposal: Proposal, identity: Identity, party: int, attempt: int) -> Roster:
    coord = f"p{party}r0s0t0"
    return Roster(
        version=1,
        proposal=proposal.id,
        attempt=attempt,
        party=party,
        domain=KEYS[party],
        code_hash=rehearsal.CODE_HASH,
        provider=proposal.providers[party],
        region=("eu", "us", "ap")[party],
        pods=(RosterPod(pod=f"p{party}r0", coords=(coord,), identity=identity.public, endpoints={coord: "h:1"}),),
    )


def make(
    root: Path,
    *,
    of_phase: Mapping[str, Mapping[str, Any]] | None = None,
    job: Mapping[str, Any] | None = None,
    attempt: int = 0,
    rosters_of: int | None = None,
) -> DomainsRun:
    """A package of both phases. ``of_phase``: fields of a phase's policy that are not as proposed; ``rosters_of``: the
    attempt of which the rosters say that they are."""
    wanted = {"kind": "private", "steps": STEPS["full"], "lr": 0.1, **(job or {})}
    proposal = proposal_of(wanted)
    genuine, identities = rehearsal.make_policy, list[Identity]()
    with pytest.MonkeyPatch.context() as patch:
        for name, steps in STEPS.items():
            folder = root / name
            folder.mkdir(parents=True)

            def of_three(*args: Any, name: str = name, **more: Any) -> Policy:
                identities[:] = args[0]
                data = genuine(*args, **more).to_json()
                data["job"] |= dict(job or {})
                data["inputs"] |= {"proposal": proposal.id, "attempt": attempt}
                data["operation"] |= {"operators": "three"}
                return Policy.from_json(data | dict((of_phase or {}).get(name, {})))

            patch.setattr(rehearsal, "make_policy", of_three)
            rehearsal.rehearse(folder, steps=steps, ops=1, nonce=digest(name))
            shutil.rmtree(folder / "identity")
    told = attempt if rosters_of is None else rosters_of
    run = DomainsRun(root, proposal, {p: _roster(proposal, i, p, told) for p, i in enumerate(identities)})
    run.write()
    return run


def stopped(run: DomainsRun, party: int, stage: str, reason: str) -> Barrier:
    """A domain's word that it goes no further."""
    whole = Barrier(
        version=1,
        proposal=run.proposal.id,
        attempt=0,
        party=party,
        stage=stage,
        status="failed",
        digest=digest(reason),
        reason=reason,
        seen={},
    )
    return replace(whole)
