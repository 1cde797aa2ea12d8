"""Test vectors of a federated run's signed texts: keys from public seeds, each record with what it says, and liars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

KEYS: Final = ("alpha", "beta", "gamma", "north", "south")
"""Three domains and two owners. Their private keys are SHA-256 of ``UVCC_VECTOR`` and the name: known to everybody."""


def _raw(name: str, what: str) -> bytes:
    return hashlib.sha256(f"UVCC_VECTOR {name} {what}".encode()).digest()


def _identity(name: str) -> Any:
    from uvcc_engine.transcript.signing.identity import Identity

    return Identity(_raw(name, "sign"), _raw(name, "agree"))


def _signer(name: str, namespace: str) -> Callable[[bytes], str]:
    return lambda payload: str(_identity(name).sign(namespace, payload))


def _proposal() -> Any:
    from uvcc_engine.contract.job.topology import Topology
    from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed

    line = {name: _identity(name).public.ed25519 for name in KEYS}
    dense = {"type": "dense", "inputs": 4, "outputs": 2}
    return Proposal(
        version=1,
        name="ward",
        coordinator=line["alpha"],
        domains=(line["alpha"], line["beta"], line["gamma"]),
        owners=(line["north"], line["south"]),
        job={
            "kind": "private",
            "steps": 5,
            "batch": 8,
            "lr": 0.25,
            "model": {"classes": 2, "features": 4, "layers": [dense]},
        },
        topology=Topology(1, 1, 1),
        code_hash=_raw("code", "hash").hex(),
        reveal=(Revealed(value="loss", to="all"), Revealed(value="weights", to="owner")),
        providers=("local", "local", "local"),
        limits=ProposedLimits(hourly=1.5, total=20.0, ttl_s=3600.0),
        created=1_700_000_000,
        expires=1_700_086_400,
        nonce=_raw("nonce", "hash").hex(),
    )


def _rosters(proposal: Any) -> list[Any]:
    from uvcc_engine.transcript.signed.roster import Roster, RosterPod

    return [
        Roster(
            version=1,
            proposal=proposal.id,
            attempt=0,
            party=p,
            domain=proposal.domains[p],
            code_hash=proposal.code_hash,
            provider="local",
            region="here",
            pods=(
                RosterPod(
                    pod=f"p{p}r0",
                    coords=(f"p{p}r0s0t0",),
                    identity=_identity(f"pod {p}").public,
                    endpoints={f"p{p}r0s0t0": f"192.0.2.{p + 1}:7000"},
                ),
            ),
        )
        for p in range(3)
    ]


def _barriers(proposal: Any, rosters: list[Any]) -> list[Any]:
    from uvcc_engine.contract.parsing.canonical import canonical
    from uvcc_engine.transcript.signed import barriers as b

    found: list[Any] = []
    seen: dict[str, str] = {}
    digests = canonical({str(p): r.digest for p, r in enumerate(rosters)})
    for stage, said in ((b.MEET, canonical(0)), (b.ROSTER, digests)):
        at = [
            b.Barrier(
                version=1,
                proposal=proposal.id,
                attempt=0,
                party=p,
                stage=stage,
                status="reached",
                digest=hashlib.sha256(said).hexdigest(),
                seen=seen,
            )
            for p in range(3)
        ]
        found, seen = [*found, *at], {str(x.party): x.mark for x in at}
    last = asdict(found[-1]) | {"party": 1, "stage": b.SHARES, "status": b.FAILED, "reason": "no shares", "seen": seen}
    return [*found, b.Barrier(**last)]


def statements() -> str:
    """Every signed text of a small federated run, and texts that must be refused."""
    from uvcc_engine.transcript.signed import approvals, barriers, consents, orders, owner_shares, reports, roster
    from uvcc_engine.transcript.signed.owner_shares import OwnerPart, OwnerShare, ShareFile
    from uvcc_engine.transcript.signed.proposals import PROPOSAL_NAMESPACE, SignedProposal

    p = _proposal()
    names, rosters = KEYS[:3], _rosters(p)
    words = [approvals.Approval(of="proposal", sha256=p.id, party=n, decision="approve") for n in range(3)]
    refusal = approvals.Approval(of="proposal", sha256=p.id, party=2, decision="refuse", reason="too few rows")
    report = reports.DomainReport(
        proposal=p.id, attempt=0, party=1, number=7, stage="full", status="running", step=3, steps=5
    )
    north, south = _identity("north"), _identity("south")
    share = OwnerShare(
        version=1,
        proposal=p.id,
        attempt=0,
        owner=north.public,
        owners=(north.public.x25519, south.public.x25519),
        rosters=(rosters[0].digest, rosters[1].digest, rosters[2].digest),
        commitments=(_raw("c", "0").hex(), _raw("c", "1").hex(), _raw("c", "2").hex()),
        files=(
            ShareFile(bytes=900, sha256=_raw("f", "0").hex()),
            ShareFile(bytes=1200, sha256=_raw("f", "1").hex()),
            ShareFile(bytes=1200, sha256=_raw("f", "2").hex()),
        ),
        rows={"test": 4, "train": 16},
        mailbox=16,
    )
    parts = [OwnerPart(share.owners[0], share.commitments), OwnerPart(share.owners[1], share.commitments)]
    made = {
        "proposal": [SignedProposal.make(p, _signer("alpha", PROPOSAL_NAMESPACE)).body],
        "approval": [
            approvals.signed(word, _signer(names[word.party], approvals.APPROVAL_NAMESPACE))
            for word in (*words, refusal)
        ],
        "roster": [roster.signed(r, _signer(names[r.party], roster.ROSTER_NAMESPACE)) for r in rosters],
        "barrier": [
            barriers.signed(b, _signer(names[b.party], barriers.BARRIER_NAMESPACE)) for b in _barriers(p, rosters)
        ],
        "consent": [
            consents.signed(c, _signer(names[c.party], consents.CONSENT_NAMESPACE))
            for c in (
                consents.SignedConsent(version=1, proposal=p.id, attempt=0, party=0, what="full"),
                consents.SignedConsent(version=1, proposal=p.id, attempt=0, party=2, what="resume", number=1),
            )
        ],
        "report": [reports.signed(report, _signer("beta", reports.REPORT_NAMESPACE))],
        "owner-key": [
            owner_shares.key_signed(i.public, _signer(who, owner_shares.OWNER_NAMESPACE))
            for who, i in (("north", north), ("south", south))
        ],
        "owner-share": [owner_shares.share_signed(share, _signer("north", owner_shares.OWNER_NAMESPACE))],
    }
    good = roster.signed(rosters[1], _signer("beta", roster.ROSTER_NAMESPACE))
    said = json.loads(good)
    said["content"]["region"] = "there"
    more = {"type": "roster", **rosters[1].to_json(), "note": "x"}
    newer = {"type": "roster", **rosters[1].to_json(), "version": 2}
    refused = [
        {"why": "a field was altered after signing", "record": json.dumps(said, separators=(",", ":"))},
        {
            "why": "signed under another namespace",
            "record": roster.signed(rosters[1], _signer("beta", approvals.APPROVAL_NAMESPACE)),
        },
        {
            "why": "signed by another domain",
            "record": roster.signed(rosters[1], _signer("gamma", roster.ROSTER_NAMESPACE)),
        },
        {
            "why": "a field that no roster has",
            "record": orders.sealed(more, _signer("beta", roster.ROSTER_NAMESPACE)),
        },
        {
            "why": "a version that is not known",
            "record": orders.sealed(newer, _signer("beta", roster.ROSTER_NAMESPACE)),
        },
        {"why": "no JSON", "record": good[:-1]},
        {"why": "a key that stands twice", "record": good.replace('{"content":{', '{"content":{"party":1,', 1)},
        {"why": "a third field beside the two", "record": good[:-1] + ',"more":1}'},
    ]
    from docs.make.vectors import written

    return written(
        "Signed texts of one federated run (statements). `keys` are public; all private keys follow from public words.",
        keys={n: {"ed25519": _identity(n).public.ed25519, "x25519": _identity(n).public.x25519} for n in KEYS},
        proposal={"canonical": p.canonical.decode(), "id": p.id},
        records=made,
        rosters=[r.digest for r in rosters],
        marks=[b.mark for b in _barriers(p, rosters)],
        owners={
            "parts": [{"owner": x.owner, "commitments": list(x.commitments)} for x in parts],
            "commitments": list(owner_shares.set_commitments(parts)),
            "head of sizes 900, 800": owner_shares.set_head(parts, [900, 800]).hex(),
        },
        parcel=_parcel(p.id),
        refused_as_rosters_of_beta=refused,
    )


def _parcel(proposal: str) -> dict[str, Any]:
    """One message of the mail between domains, caught where it would leave."""
    from uvcc_console.federation import parcels

    caught: dict[str, Any] = {}

    class _Catching:
        def mail(self, path: str, asked: Any) -> None:
            caught.update(path=path, **asked)

    box, data = parcels.box_of(proposal, 0, "owner/0"), b"sealed bytes"
    whole = (len(data), hashlib.sha256(data).hexdigest())
    parcels.enqueue(_Catching(), box, 1, "sealed-p1.bin", whole, 0, data)  # type: ignore[arg-type]
    return {"proposal": proposal, "attempt": 0, "purpose": "owner/0", "file": data.hex(), "sent": caught}
