"""Two data owners share rows for a proposal from machines without torch, and whoever tampers is named."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import TOKENS, relay_of

from uvcc_console.cli.main import main
from uvcc_console.federation import data_owner, parcels
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.owner_parcels import OwnerParcels
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.rollout.federated import from_owners
from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError, UvccError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.contract.peer_protocol.record_names import APPROVALS, OWNER_SHARES, PROPOSALS
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.sealing import joint
from uvcc_engine.sealing.purpose import ProposedUse
from uvcc_engine.transcript.proof import input_attribution
from uvcc_engine.transcript.signed import approvals, owner_shares, roster
from uvcc_engine.transcript.signed.owner_shares import OWNER_NAMESPACE, OwnerShare
from uvcc_engine.transcript.signed.proposals import PROPOSAL_NAMESPACE, SignedProposal
from uvcc_engine.transcript.signed.roster import ROSTER_NAMESPACE, Roster, RosterPod
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed

LEAN = Path(__file__).resolve().parents[2] / "lean"
DOMAINS = [Identity(bytes([n + 1]) * 32, bytes([n + 9]) * 32) for n in range(4)]
KEYS = [d.public.ed25519 for d in DOMAINS]
PODS = [[Identity(bytes([60 + 3 * r + p]) * 32, bytes([90 + 3 * r + p]) * 32) for r in range(2)] for p in range(3)]
OWNER_TOKENS = [f"token-of-owner-{n}-0123456789" for n in range(3)]
FEATURES, ROWS, TESTED = 5, 40, 10


def job() -> dict[str, Any]:
    model = model_to_json(model_of_list([{"linear": 3}, "relu", "linear"], FEATURES, 2))
    return PrivateJob.from_json({"model": model, "test_rows": TESTED, "batch": 16}).to_json()


class Gathering:
    """A relay, three domains that approve what is proposed, and owners, each with a home of its own."""

    def __init__(
        self,
        root: Path,
        url: str,
        patch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        owners: int = 2,
    ) -> None:
        self.root, self.url, self._patch, self._capsys = root, url, patch, capsys
        self.out = self.err = ""
        self.there = [Rendezvous(url, token) for token in TOKENS]
        pins = []
        for n, key in enumerate(KEYS[:3]):
            (root / f"d{n}.pub").write_text(f"{key} d{n}\n")
            pins.append(str(root / f"d{n}.pub"))
        for n in range(owners):
            (root / f"o{n}").mkdir()
            (root / f"o{n}" / "token").write_text(OWNER_TOKENS[n])
            assert self.at(n, "init") == 0
            assert self.at(n, "pin", *pins) == 0
        self.owners = [Identity.load(self.home(n)) for n in range(owners)]
        self.proposal = self.propose()

    def home(self, owner: int) -> Path:
        return self.root / f"o{owner}" / "config" / "owner"

    def at(self, owner: int, *args: str) -> int:
        """Run ``uvcc owner`` as one of the owners."""
        self._patch.setenv("UVCC_HOME", str(self.root / f"o{owner}"))
        code = main(["owner", *args, *(self.relay(owner) if args[0] in ("requests", "share") else [])])
        self.out, self.err = self._capsys.readouterr()
        return code

    def relay(self, owner: int) -> list[str]:
        return ["--relay", self.url, "--token-file", str(self.root / f"o{owner}" / "token")]

    def propose(self, approve: tuple[int, ...] = (0, 1, 2), **changes: Any) -> Proposal:
        whole = Proposal(
            version=1,
            name="ward",
            coordinator=KEYS[3],
            domains=(KEYS[0], KEYS[1], KEYS[2]),
            owners=tuple(o.public.ed25519 for o in self.owners),
            job=job(),
            topology=Topology(2, 1, 1),
            code_hash="ab" * 32,
            reveal=(Revealed(value="loss", to="all"), Revealed(value="weights", to="owner")),
            providers=("local", "local", "local"),
            limits=ProposedLimits(hourly=0.0, total=0.0, ttl_s=3600.0),
            created=1,
            expires=2**40,
            nonce=os.urandom(32).hex(),
        )
        made = replace(whole, **changes)
        signed = SignedProposal.make(made, lambda payload: DOMAINS[3].sign(PROPOSAL_NAMESPACE, payload))
        self.there[0].leave(f"{PROPOSALS}{made.id}", signed.body)
        for n in range(3):
            word = approvals.Approval(
                of="proposal", sha256=made.id, party=n, decision="approve" if n in approve else "refuse"
            )
            body = approvals.signed(word, lambda payload, n=n: DOMAINS[n].sign(approvals.APPROVAL_NAMESPACE, payload))
            self.there[n].leave(f"{APPROVALS}{made.id}/{n}", body)
        return made

    def rosters(self, attempt: int = 0, *, by: dict[int, Identity] | None = None) -> dict[int, Roster]:
        """Have each domain sign the roster of its two pods; ``by``: who signs in a domain's place."""
        found = {}
        for p in range(3):
            pods = tuple(
                RosterPod(pod=f"p{p}r{r}", coords=(f"p{p}r{r}s0t0",), identity=PODS[p][r].public, endpoints={})
                for r in range(2)
            )
            found[p] = Roster(
                version=1,
                proposal=self.proposal.id,
                attempt=attempt,
                party=p,
                domain=KEYS[p],
                code_hash=self.proposal.code_hash,
                provider="local",
                region="here",
                pods=pods,
            )
            signer = (by or {}).get(p, DOMAINS[p])
            body = roster.signed(found[p], lambda payload, s=signer: s.sign(ROSTER_NAMESPACE, payload))
            self.there[p].leave(f"roster/{self.proposal.id}/{attempt}/{p}", body)
        return found

    def data(self, owner: int) -> tuple[Path, np.ndarray]:
        table = np.random.default_rng(owner).normal(size=(ROWS, FEATURES)).round(4)
        path = self.root / f"o{owner}" / "rows.csv"
        path.write_text("\n".join(",".join(map(str, [*row, n % 2])) for n, row in enumerate(table.tolist())) + "\n")
        return path, table

    def share(self, owner: int, *more: str) -> int:
        return self.at(owner, "share", self.proposal.id[:12], "--data", str(self.data(owner)[0]), "--yes", *more)

    def share_without_torch(self, owner: int) -> subprocess.CompletedProcess[str]:
        """``uvcc owner share`` in a process that can import neither torch nor numba."""
        code = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
        env = os.environ | {"PYTHONPATH": str(LEAN), "UVCC_HOME": str(self.root / f"o{owner}"), "TERM": "dumb"}
        command = ["owner", "share", self.proposal.id, "--data", str(self.data(owner)[0]), "--yes", *self.relay(owner)]
        program = [sys.executable, "-c", code, *command]
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=500, check=False)

    def parcels(self, party: int, rosters: dict[int, Roster]) -> OwnerParcels:
        attempt = rosters[0].attempt
        return OwnerParcels(self.there[party], self.proposal, attempt, rosters, party, self.root / f"d{party}")


@pytest.fixture
def gathering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Gathering]:
    people = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with relay_of(tmp_path, people) as url:
        yield Gathering(tmp_path, url, monkeypatch, capsys)


def test_rows_of_two_owners_reach_the_pods_and_nobody_else(gathering: Gathering) -> None:
    g = gathering
    assert g.at(1, "share", g.proposal.id, "--yes") == 2
    assert "no signed roster of P0, P1, P2" in g.err
    rosters = g.rosters()
    assert g.at(1, "requests") == 0
    assert "weights to owner" in g.out
    assert "ready" in g.out
    assert g.share(1) == 2
    assert f"{fingerprint(g.proposal.owners[0])}: no key to seal with was announced yet" in g.err
    assert g.at(0, "requests", "--json") == 0
    (row,) = json.loads(g.out)["requests"]
    assert (row["place"], row["trouble"]) == (0, "")
    done = g.share_without_torch(0)
    assert done.returncode == 0, done.stderr
    assert "10 test rows, 30 train rows" in done.stdout
    waiting = [g.parcels(p, rosters) for p in range(PARTIES)]
    assert [w.poll() for w in waiting] == [[1]] * 3
    assert g.share(1) == 0, g.err
    assert "not read" not in g.out
    assert g.share(1, "--labels", "others.csv") == 0, g.err  # once more, with another file: nothing of it is shared
    assert re.search(r"not read +\S+rows.csv, others.csv: for attempt 0 this owner has sealed its rows before", g.out)
    assert [w.poll() for w in waiting] == [[]] * 3
    laid = [w.laid(2) for w in waiting]
    assert laid[0] == laid[1] == laid[2]
    assert laid[0]["owner"] == g.owners[0].public.x25519
    use = ProposedUse(g.proposal.id, 0, (("loss", "all"), ("weights", "owner")))
    held = []
    for p in range(PARTIES):
        for r, name in enumerate((f"sealed-p{p}.bin", f"sealed-p{p}r1.bin")):
            box = (g.root / f"d{p}" / name).read_bytes()
            given: dict[str, Any] = {"owner": laid[p]["owner"], "commitments": laid[p]["commitments"]}
            held.append(
                joint.open_set(box, party=p, identity=PODS[p][r], job=PrivateJob.from_json(job()), use=use, **given)
            )
            with pytest.raises(VerificationError, match="another recipient"):
                joint.open_set(
                    box, party=p, identity=PODS[(p + 1) % 3][r], job=PrivateJob.from_json(job()), use=use, **given
                )
    parts = [held[2 * p].tensors["train_x"] for p in range(PARTIES)]
    rows = parts[0][0] + parts[0][1] + parts[1][1]
    mine = {tuple(row) for owner in range(2) for row in np.rint(g.data(owner)[1] * 65536).astype(int).tolist()}
    assert rows.shape == (60, FEATURES)
    assert {tuple(row) for row in rows.tolist()} <= mine
    assert not list(g.home(0).rglob("sealed-*"))  # an owner keeps its receipt only
    share = data_owner.receipt(next((g.home(0) / "receipts").iterdir()), g.owners[0].public.ed25519)
    assert share.owners == tuple(o.public.x25519 for o in g.owners)


def refused(g: Gathering, words: str, *more: str) -> None:
    for n in range(2):
        g.at(n, "requests")
    assert g.share(0, *more) == 2
    assert words in g.err
    assert not (g.home(0) / "receipts").exists()


def test_a_swapped_pod_is_not_sealed_to_and_its_domain_is_named(gathering: Gathering) -> None:
    gathering.rosters(by={1: DOMAINS[3]})  # the coordinator lists a pod of its own
    refused(gathering, f"the roster that lies there as P1's is not signed by P1's domain ({fingerprint(KEYS[1])})")


def test_a_domain_that_was_not_pinned_is_named_with_who_proposed_it(gathering: Gathering) -> None:
    g = gathering
    g.proposal = g.propose(domains=(KEYS[0], g.owners[1].public.ed25519, KEYS[2]))
    g.rosters()
    refused(g, f"the coordinator {fingerprint(KEYS[3])} names as P1 a domain that you did not pin")


def test_without_all_three_approvals_nothing_is_shared(gathering: Gathering) -> None:
    g = gathering
    g.proposal = g.propose(approve=(0, 1))
    g.rosters()
    refused(g, f"P2's domain ({fingerprint(KEYS[2])}) refused")


def test_a_coordinator_who_told_two_tales_is_named(gathering: Gathering) -> None:
    g = gathering
    g.rosters()
    g.propose(nonce=g.proposal.nonce, reveal=(*g.proposal.reveal, Revealed(value="weights", to="all")))
    for n in range(2):
        g.at(n, "requests")
    assert g.share(0) != 0
    assert f"the coordinator {fingerprint(KEYS[3])} signed two texts" in g.err


def test_an_interrupted_upload_goes_on_where_it_stopped(gathering: Gathering, monkeypatch: pytest.MonkeyPatch) -> None:
    g = gathering
    rosters = g.rosters()
    for n in range(2):
        g.at(n, "requests")
    for module in (data_owner, parcels):
        monkeypatch.setattr(module, "PIECE", 512)
    sent: list[str] = []
    mail = Rendezvous.mail

    def cut(self: Rendezvous, path: str, asked: Any) -> Any:
        if path == "/enqueue" and len(sent) == 7:
            raise KeyboardInterrupt
        sent.extend(m["msg_id"] for m in asked.get("messages", []))
        return mail(self, path, asked)

    monkeypatch.setattr(Rendezvous, "mail", cut)
    assert g.share(0) == 130
    assert g.parcels(1, rosters).poll() == [0, 1]
    before = (next((g.home(0) / "receipts").iterdir()) / "receipt.json").read_bytes()
    sent.append("the line is back")
    assert g.share(0) == 0, g.err
    assert len(set(sent)) == len(sent)  # no piece twice
    assert (next((g.home(0) / "receipts").iterdir()) / "receipt.json").read_bytes() == before
    assert g.share(0) == 0  # nothing is sealed, or sent, a second time
    monkeypatch.setattr(Rendezvous, "mail", mail)
    for p in range(PARTIES):
        assert g.parcels(p, rosters).poll() == [1]


def statement(g: Gathering, listed: dict[int, Roster], owner: int = 0, **changes: Any) -> str:
    file = owner_shares.ShareFile(bytes=3, sha256="00" * 32)
    share = OwnerShare(
        version=1,
        proposal=g.proposal.id,
        attempt=0,
        owner=g.owners[owner].public,
        owners=tuple(o.public.x25519 for o in g.owners),
        rosters=(listed[0].digest, listed[1].digest, listed[2].digest),
        commitments=("11" * 32,) * 3,
        files=(file, file, file),
        rows={},
        mailbox=16 + owner,
    )
    made = replace(share, **changes)
    return owner_shares.share_signed(made, lambda payload: g.owners[owner].sign(OWNER_NAMESPACE, payload))


def test_a_statement_holds_for_its_attempt_its_pods_and_its_owners_alone(gathering: Gathering) -> None:
    g = gathering
    rosters = g.rosters()
    thief = DOMAINS[3].public
    good = statement(g, rosters)
    assert set(owner_shares.gathered(g.proposal, 0, rosters, [good, "", "[" * 9000])) == {0}
    ours = [o.public.x25519 for o in g.owners]
    for body, words in (
        (statement(g, rosters, attempt=1), "owner 0 .* sealed for attempt 1"),
        (statement(g, rosters, proposal="ee" * 32), "of the proposal eeeeeeee"),
        (statement(g, rosters, owners=(thief.x25519, *ours)), "other owners than the proposal names"),
        (statement(g, rosters, owners=tuple(reversed(ours))), "other owners than the proposal names"),
        (statement(g, rosters, rosters=(rosters[0].digest, "22" * 32, rosters[2].digest)), "other pods of P1"),
    ):
        with pytest.raises(ConfigError, match=words):
            owner_shares.gathered(g.proposal, 0, rosters, [body])
    with pytest.raises(ProtocolError, match="signed two statements"):
        owner_shares.gathered(g.proposal, 0, rosters, [good, statement(g, rosters, commitments=("33" * 32,) * 3)])
    swapped = statement(g, rosters, 1, owners=(thief.x25519, ours[1]))
    with pytest.raises(ConfigError, match="another key of owner 0"):
        owner_shares.gathered(g.proposal, 0, rosters, [good, swapped])
    assert owner_shares.share_opened(good, thief.ed25519) is None


def test_a_file_that_the_owner_did_not_sign_is_refused(gathering: Gathering) -> None:
    g = gathering
    rosters = g.rosters()
    owner = Rendezvous(g.url, OWNER_TOKENS[0])
    owner.leave(f"{OWNER_SHARES}{g.proposal.id}/0/0", statement(g, rosters))
    (g.root / "sealed-p1.bin").write_bytes(b"abc")
    box = parcels.box_of(g.proposal.id, 0, "owner/0")
    files = {"sealed-p1.bin": g.root / "sealed-p1.bin"}
    for other in (g.there[2], Rendezvous(g.url, OWNER_TOKENS[1])):  # what is not of the owner's own number is dropped
        parcels.send(other, box, 1, files)
    assert g.parcels(1, rosters).poll() == [0, 1]
    parcels.send(owner, box, 1, files)
    with pytest.raises(ProtocolError, match="came as owner 0's is not the one that it signed"):
        g.parcels(1, rosters).poll()


def test_two_keys_of_one_owner_are_found(gathering: Gathering) -> None:
    g = gathering
    other = Identity(g.owners[0]._key.private_bytes_raw(), b"x" * 32)
    bodies = [
        owner_shares.key_signed(one.public, lambda payload, one=one: one.sign(OWNER_NAMESPACE, payload))
        for one in (g.owners[0], other)
    ]
    with pytest.raises(ProtocolError, match=r"owner 0 .* announced two keys"):
        owner_shares.keys_of(g.proposal.owners, bodies)
    assert owner_shares.keys_of(g.proposal.owners, [bodies[0], "{}"]) == {0: g.owners[0].public}
    with pytest.raises(UvccError, match="made once"):
        data_owner.create(g.home(0))


def test_a_run_that_computed_on_other_inputs_than_the_owners_signed_is_refused(gathering: Gathering) -> None:
    g = gathering
    listed = g.rosters()
    bodies = [statement(g, listed, n) for n in range(2)]
    ours = [o.public.x25519 for o in g.owners]
    parts = [owner_shares.OwnerPart(key, ("11" * 32,) * 3) for key in ours]

    def policy(**changes: Any) -> Policy:
        given: dict[str, Any] = {
            "job": g.proposal.job,
            "model_hash": "11" * 32,
            "code_hash": g.proposal.code_hash,
            "topology": g.proposal.topology,
            "parties": [
                PolicyParty(p, PODS[p][0].public, "local", "here", (PODS[p][1].public,)) for p in range(PARTIES)
            ],
            "owner": ours[0],
            "commitments": owner_shares.set_commitments(parts),
            "reveal": [(r.value, r.to) for r in g.proposal.reveal],
            "limits": {"hourly": 0.0, "total": 0.0, "ttl_s": 3600.0},
            "proposal": g.proposal.id,
        }
        return Policy.build(**(given | changes))

    assert not g.proposal.differs(policy())
    assert "inputs.proposal" in g.proposal.differs(policy(proposal="ee" * 32))
    assert Policy.from_bytes(policy(attempt=3).canonical).attempt == 3
    assert set(input_attribution.check(bodies, g.proposal, listed, policy())) == {0, 1}
    alone = owner_shares.set_commitments(parts[:1])
    for found, made, words in (
        (bodies, policy(proposal="", attempt=0), "inputs are of no proposal"),
        (bodies, policy(attempt=1), "owner 0 .* sealed for attempt 0"),
        (bodies[:1], policy(), "owner 1 signed no statement"),
        (
            bodies,
            policy(owner=DOMAINS[3].public.x25519),
            f"{DOMAINS[3].public.x25519[:12]}, the proposal's first owner",
        ),
        (bodies, policy(commitments=alone), "commits to other inputs than the owners signed"),
        (bodies, policy(commitments=owner_shares.set_commitments(parts[::-1])), "commits to other inputs"),
    ):
        with pytest.raises(VerificationError, match=words):
            input_attribution.check(found, g.proposal, listed, made)


def test_an_audit_needs_what_was_sealed(gathering: Gathering) -> None:
    g = gathering
    (g.root / "run").mkdir()
    assert g.at(0, "audit", str(g.root / "run")) == 2
    assert "policy.json" in g.err
    given = {"model_hash": "11" * 32, "code_hash": "ab" * 32, "topology": g.proposal.topology, "owner": "x"}
    parties = [PolicyParty(p, PODS[p][0].public, "local", "here", (PODS[p][1].public,)) for p in range(PARTIES)]
    terms: dict[str, Any] = {
        "job": job(),
        "parties": parties,
        "commitments": ["11" * 32] * 3,
        "reveal": [],
        "limits": {},
    }
    for proposal, words in (("", "--sealed names"), (g.proposal.id, "nothing was shared for the proposal")):
        made = Policy.build(**given, **terms, proposal=proposal)
        (g.root / "run" / "policy.json").write_bytes(made.canonical)
        assert g.at(0, "audit", str(g.root / "run")) == 2
        assert words in g.err


def test_a_domain_says_for_which_owners_it_waits_until_they_have_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_owners, "LOOK_S", 0.0)
    named = [fingerprint(key) for key in KEYS[:2]]
    visits = [[0, 1], [0, 1], [1], []]
    parcels = SimpleNamespace(
        proposal=SimpleNamespace(owners=KEYS[:2]), poll=lambda: visits.pop(0), laid=lambda replicas: {"of": replicas}
    )
    told: list[str] = []
    found = asyncio.run(from_owners.shares_of_owners(parcels, 2, 30.0, told.append))  # type: ignore[arg-type]
    assert found == {"of": 2}
    both, second = [re.sub(r"\d\d:\d\d:\d\d UTC", "T", one) for one in told]
    assert both == f"waits for owner 0 ({named[0]}), owner 1 ({named[1]}) since T (not shared yet), 30 s more at most"
    assert second.startswith(f"waits for owner 1 ({named[1]}) since T (not shared yet), ")
    visits[:] = [[1]]
    with pytest.raises(PeerLostError, match=r"owner 1 \(\d{5} .*\) has not shared after -1 s"):
        asyncio.run(from_owners.shares_of_owners(parcels, 2, -1.0, told.append))  # type: ignore[arg-type]
