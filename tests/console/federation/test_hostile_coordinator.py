"""A coordinator, or a domain, that wants more than was approved: each is refused and named, on the way it would take.

The relay, the verbs, the conductors' code and the pods' judgement are the real ones; only the pods' machines are not.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import COORDINATOR, TOKENS, relay  # noqa: F401
from test_peers import WAIT_S, Table, met
from test_rendezvous import People, people  # noqa: F401
from test_roster import DOMAINS, roster

from uvcc_console.federation import domain_key, rendezvous
from uvcc_console.rollout.federated import own_party
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.agent import party as pod_party
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.peer_protocol.record_names import APPROVALS, PROPOSALS
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.signed import approvals, proposals
from uvcc_engine.transcript.signed.proposals import PROPOSAL_NAMESPACE, SignedProposal, Standing
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.transcript.terms.proposal import Proposal, Revealed

EVERYTHING = Revealed(value="weights", to="all")


def approved_by_all(p: People) -> tuple[Standing, str]:
    """What three domains approved, and the coordinator's fingerprint."""
    wanted = p.propose()
    trusted = p.key("coordinator").read_text().rsplit(" ", 1)[0]
    for n in range(3):
        p.allows(f"p{n}", yes_for=[trusted])
        assert p.at(f"p{n}", "join", wanted, "--yes") == 0, p.err
    assert p.at("coordinator", "proposals") == 0
    return rendezvous.kept(wanted), domain_key.fingerprint(trusted)


def altered(p: People, first: Proposal, **changes: Any) -> SignedProposal:
    """Another text that the coordinator signs and puts there."""
    p.be("coordinator")
    ours = domain_key.load()
    second = SignedProposal.make(replace(first, **changes), lambda payload: ours.sign(PROPOSAL_NAMESPACE, payload))
    rendezvous.Rendezvous(p.url, COORDINATOR).leave(f"{PROPOSALS}{second.proposal.id}", second.body)
    return second


def rollout(p: People, who: str, proposal: str) -> int:
    token = str(p.root / who / "token")
    more = ["--domain", "--headless", "--relay", p.url, "--token-file", token]
    return p.at(who, "rollout", "demo", "--set", "job.steps=9", "--proposal", proposal, *more)


def test_an_approval_used_again_for_another_text_is_none(people: People) -> None:  # noqa: F811
    standing, coordinator = approved_by_all(people)
    first = standing.signed.proposal
    more = altered(people, first, nonce="77" * 32, reveal=(*first.reveal, EVERYTHING))
    there = rendezvous.Rendezvous(people.url, TOKENS[1])  # a domain that helps it
    for n, (_, body) in standing.said.items():
        there.leave(f"{APPROVALS}{more.proposal.id}/{n}", body)
    assert people.at("p0", "proposals", "--json") == 0
    rows = {row["proposal"]: row for row in json.loads(people.out)["proposals"]}
    assert rows[more.proposal.id]["said"] == {}
    assert rows[first.id]["approved"]
    assert rollout(people, "p0", more.proposal.id) == 2
    assert f"of the coordinator {coordinator} is not approved by P0, P1, P2" in people.err
    words = {str(n): body for n, (_, body) in standing.said.items()}
    with pytest.raises(UnreadableError, match="what P0 is said to have signed of the proposal, it did not sign"):
        Standing.from_json({"proposal": more.body, "approvals": words})


def test_a_refusal_stands_and_is_told_with_its_reason(people: People) -> None:  # noqa: F811
    standing, coordinator = approved_by_all(people)
    wanted = standing.signed.proposal.id
    assert people.at("p2", "join", wanted, "--refuse", "our board\x1b[31m has not met") == 1
    assert rollout(people, "p0", wanted) == 2
    said = f"of the coordinator {coordinator} is not approved by P2; refused by P2: our board"
    assert said in people.err
    assert "has not met (a refusal stands; uvcc propose makes another proposal)" in people.err
    assert "\x1b" not in people.err
    people.allows("p2", yes_for=[people.key("coordinator").read_text().rsplit(" ", 1)[0]])
    assert people.at("p2", "join", wanted, "--yes") == 2  # who changed its mind misleads nobody, itself included
    assert f"this domain refused {wanted[:12]} before, and a refusal stands" in people.err
    assert rollout(people, "coordinator", wanted) == 2
    assert "refused by P2" not in people.err  # whose key is no domain's is told so first


@pytest.mark.parametrize("changed", ["reveal", "owners"])
def test_a_text_changed_after_its_approval_names_its_coordinator(people: People, changed: str) -> None:  # noqa: F811
    """More is revealed, or the coordinator is the first owner, to whom the weights go."""
    standing, coordinator = approved_by_all(people)
    first = standing.signed.proposal
    changes = {"reveal": (*first.reveal, EVERYTHING), "owners": (first.coordinator, *first.owners)}
    second = altered(people, first, **{changed: changes[changed]})
    for who, shown in (("p0", first.id), ("p1", second.proposal.id)):
        assert rollout(people, who, shown) == 1
        assert f"the coordinator {coordinator} signed two texts" in people.err
        assert len(list((people.key(who).parent / rendezvous.EVIDENCE).glob("*.json"))) == 1


def test_a_coordinator_that_is_first_owner_is_refused_where_owners_are_named(people: People) -> None:  # noqa: F811
    standing, _ = approved_by_all(people)
    first = standing.signed.proposal
    second = altered(people, first, nonce="77" * 32, owners=(first.coordinator,))
    people.allows("p0", yes_for=[first.coordinator], owners=["ssh-ed25519 AAAA"])
    assert people.at("p0", "join", second.proposal.id, "--yes") == 1
    assert f"REFUSED      owners: {first.coordinator} is none of ours" in people.out


class Bench:
    """Three conductors at the point where a policy is signed, each with a pod that judges as pods do."""

    def __init__(self, table: Table, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.table, self.root = table, root
        self.job = PrivateJob.from_json({"model": "mlp-digits", "steps": 3}).to_json()
        made = replace(
            table.proposal,
            job=self.job,
            topology=Topology(),
            coordinator=DOMAINS[3].public.ed25519,
            reveal=(Revealed(value="loss", to="all"), Revealed(value="accuracy", to="all")),
        )
        table.proposal = made
        table.seats = [replace(seat, proposal=made) for seat in table.seats]
        standing = Standing(SignedProposal.make(made, lambda payload: DOMAINS[3].sign(PROPOSAL_NAMESPACE, payload)))
        for n, seat in enumerate(table.seats):
            word = approvals.Approval(of="proposal", sha256=made.id, party=n, decision="approve")
            standing = standing.hearing(
                approvals.signed(word, lambda payload, k=seat.key: k.sign(approvals.APPROVAL_NAMESPACE, payload))
            )
        self.standing = standing
        patch.setattr(pod_party, "code_hash", lambda: made.code_hash)
        self.pods = [Identity.create(root / f"pod{n}" / "identity") for n in range(3)]
        for n, seat in enumerate(table.seats):
            (root / f"pod{n}" / files.DOMAIN_KEY).write_text(seat.key.public)
        self.rosters = {n: self._roster(n) for n in range(3)}

    def _roster(self, n: int) -> Any:
        seat = self.table.seats[n]
        whole = roster(n, proposal=seat.proposal.id, domain=seat.key.public)
        return replace(whole, pods=(replace(whole.pods[0], identity=self.pods[n].public),))

    def agreeing(self, peers: Peers, owner: str = "01" * 32) -> tuple[Any, Any]:
        """The work of one conductor: draft, have it signed, take the others' signatures; and its party."""
        n = peers.seat.party
        party, _ = self.table.party(peers)
        party.rosters = self.rosters
        party._shared = {"owner": owner, "commitments": ["22" * 32] * 3}
        run = self.root / f"run{n}"
        run.mkdir(exist_ok=True)
        (run / proposals.FILE).write_text(json.dumps(self.standing.to_json()))

        async def request(command: Any) -> dict[str, Any]:
            return pod_party.sign_policy(self.root / f"pod{n}", command.policy, command.approval)

        members = {f"p{n}r0": SimpleNamespace(channel=SimpleNamespace(request=request))}
        ctx = SimpleNamespace(run_dir=run, artifacts=run / "artifacts", members=members, of_phase=lambda _: [])
        phase = SimpleNamespace(name="full", job=self.job, topology=Topology(), coords=list)
        return party.agree(ctx, phase), party  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, relay: str, monkeypatch: pytest.MonkeyPatch) -> Bench:  # noqa: F811
    return Bench(Table(tmp_path, relay, monkeypatch, WAIT_S, 600.0), tmp_path, monkeypatch)


async def reached_the_shares(peers: list[Peers]) -> None:
    await met(peers)
    for stage in ("roster", "shares"):
        await asyncio.gather(*(p.reach(stage, "11" * 32) for p in peers))


def test_three_conductors_sign_one_policy_and_only_it(bench: Bench) -> None:
    async def story() -> None:
        async with bench.table.peers(0, 1, 2) as peers:
            await reached_the_shares(peers)
            found = await asyncio.gather(*(bench.agreeing(p)[0] for p in peers))
            assert len({policy.hash for policy, _ in found}) == 1

    asyncio.run(story())


@pytest.mark.parametrize("how", ["reveal", pytest.param("owner", marks=pytest.mark.ci(__file__))])
def test_a_domain_whose_policy_gives_more_than_was_approved_is_named_and_gets_no_signature(
    bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1's conductor is altered: it wants the weights opened, or results sealed to a key of its own."""

    async def story() -> None:
        async with bench.table.peers(0, 1, 2) as peers:
            await reached_the_shares(peers)
            work = [bench.agreeing(p, "0e" * 32 if how == "owner" and p.seat.party == 1 else "01" * 32) for p in peers]
            hostile: list[Policy] = []
            honest = work[1][1]._draft

            def draft(ctx: Any, phase: Any) -> Policy:
                made = honest(ctx, phase)
                hostile.append(replace(made, reveal=(*made.reveal, ("weights", "all"))) if how == "reveal" else made)
                return hostile[0]

            work[1][1]._draft = draft
            if how == "reveal":  # what P1's own conductor would say, did it not lie to itself
                with pytest.raises(ConfigError, match="is not what the domains approved: reveal"):
                    own_party.agree.check_proposal(
                        SimpleNamespace(run_dir=bench.root / "run1", artifacts=bench.root),  # type: ignore[arg-type]
                        SimpleNamespace(name="full"),  # type: ignore[arg-type]
                        draft(None, SimpleNamespace(name="full", job=bench.job, topology=Topology())),
                    )
            check = own_party.agree.check_proposal
            monkeypatch.setattr(
                own_party.agree, "check_proposal", lambda c, p, policy: policy in hostile or check(c, p, policy)
            )
            said = await asyncio.gather(*(w for w, _ in work), return_exceptions=True)
            for n in (0, 2):
                error = said[n]
                assert isinstance(error, ProtocolError), error
                assert "P1's domain reports another policy-full than the two others" in str(error)
                assert error.party == 1
            lying = peers[0].seat.there().look_signatures(f"{bench.table.proposal.id}/0/full")
            assert not set(own_party._signed(hostile[0], lying)) & {0, 2}

    asyncio.run(story())


def test_a_pods_signature_is_not_had_for_an_approval_of_another_policy(bench: Bench) -> None:
    """An approval that P1's domain gave in this very run, shown to its pod again with another text."""

    async def story() -> None:
        async with bench.table.peers(0, 1, 2) as peers:
            await reached_the_shares(peers)
            phase = SimpleNamespace(name="full", job=bench.job, topology=Topology())
            work, party = bench.agreeing(peers[1])
            work.close()
            policy = party._draft(None, phase)
            key = bench.table.seats[1].key
            word = approvals.Approval(of="policy", sha256=policy.hash.hex(), party=1, decision="approve")
            body = approvals.signed(word, lambda payload: key.sign(approvals.APPROVAL_NAMESPACE, payload))
            assert pod_party.sign_policy(bench.root / "pod1", policy.canonical.decode(), body)["party"] == 1
            more = replace(policy, reveal=(*policy.reveal, ("weights", "all")))
            with pytest.raises(ConfigError, match="approved another text, the policy") as refused:
                pod_party.sign_policy(bench.root / "pod1", more.canonical.decode(), body)
            assert f"P1's domain ({key.public})" in refused.value.what

    asyncio.run(story())
