"""Rosters and barriers: each domain's signed word about its own pods and its own progress, and who lies in them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import TOKENS, relay  # noqa: F401

from uvcc_console.federation.rendezvous import Rendezvous, barrier_name
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES, Topology
from uvcc_engine.transcript.signed import barriers
from uvcc_engine.transcript.signed import roster as rosters
from uvcc_engine.transcript.signed.barriers import BARRIER_NAMESPACE, Barrier, Barriers
from uvcc_engine.transcript.signed.roster import ROSTER_NAMESPACE, Roster, RosterPod
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed

DOMAINS = [Identity(bytes([n]) * 32, bytes([n + 8]) * 32) for n in range(4)]
KEYS = [d.public.ed25519 for d in DOMAINS]
STAGES = ["roster", "policy", "full"]


def proposal(**changes: Any) -> Proposal:
    whole = Proposal(
        version=1,
        name="digits",
        coordinator=KEYS[3],
        domains=(KEYS[0], KEYS[1], KEYS[2]),
        owners=(),
        job={"kind": "private", "model": "mlp-digits"},
        topology=Topology(2, 1, 2),
        code_hash="ab" * 32,
        reveal=(Revealed(value="loss", to="all"),),
        providers=("local", "prime", "slurm"),
        limits=ProposedLimits(hourly=0.0, total=0.0, ttl_s=3600.0),
        created=1,
        expires=2,
        nonce="cd" * 32,
    )
    return replace(whole, **changes)


P = proposal()


def pod(party: int, replica: int, **changes: Any) -> RosterPod:
    coords = tuple(f"p{party}r{replica}s0t{t}" for t in range(2))
    whole = RosterPod(
        pod=f"p{party}r{replica}",
        coords=coords,
        identity=Identity(os.urandom(32), os.urandom(32)).public,
        endpoints={c: f"198.51.100.{party}:{2000 + n}" for n, c in enumerate(coords)},
        host_key="SHA256:" + "a" * 43,
    )
    return replace(whole, **changes)


def roster(party: int, **changes: Any) -> Roster:
    whole = Roster(
        version=1,
        proposal=P.id,
        attempt=0,
        party=party,
        domain=KEYS[party],
        code_hash=P.code_hash,
        provider=P.providers[party],
        region="Oslo 1",
        pods=(pod(party, 0), pod(party, 1)),
    )
    return replace(whole, **changes)


def signed(one: Roster, by: int | None = None) -> str:
    who = DOMAINS[one.party if by is None else by]
    return rosters.signed(one, lambda payload: who.sign(ROSTER_NAMESPACE, payload))


def barrier(party: int, stage: str, seen: dict[int, Barrier] | None = None, **changes: Any) -> Barrier:
    whole = Barrier(
        version=1,
        proposal=P.id,
        attempt=0,
        party=party,
        stage=stage,
        status="reached",
        digest="ef" * 32,
        seen={str(p): b.mark for p, b in (seen or {}).items()},
    )
    return replace(whole, **changes)


def word(one: Barrier, by: int | None = None) -> str:
    who = DOMAINS[one.party if by is None else by]
    return barriers.signed(one, lambda payload: who.sign(BARRIER_NAMESPACE, payload))


def test_three_rosters_meet_at_a_relay_and_read_as_they_were_signed(relay: str) -> None:  # noqa: F811
    made = {party: roster(party) for party in range(PARTIES)}
    for party, one in made.items():
        Rendezvous(relay, TOKENS[party]).leave(f"roster/{P.id}/0/{party}", signed(one))
    there = Rendezvous(relay, TOKENS[0]).look_bodies(f"roster/{P.id}/")
    assert rosters.gathered(P, 0, there) == made
    assert rosters.gathered(P, 1, there) == {}
    assert rosters.gathered(proposal(nonce="00" * 32), 0, there) == {}
    assert made[1].pod(1).endpoints["p1r1s0t1"] == "198.51.100.1:2001"
    with pytest.raises(ConfigError, match="no pod of replica 2"):
        made[1].pod(2)


def test_a_roster_that_another_signed_is_none(relay: str) -> None:  # noqa: F811
    """Signed by a wrong key, altered, of another attempt, or put under another's name: it is not there."""
    mine = roster(1)
    swapped = replace(mine, pods=(pod(1, 0), mine.pods[1]))
    body = signed(mine)
    identity = swapped.pods[0].identity.x25519
    altered = body.replace(mine.pods[0].identity.x25519, identity)
    assert altered != body
    for bad in (signed(mine, by=2), altered, signed(roster(1, domain=KEYS[2]), by=2), signed(roster(1, attempt=1))):
        assert rosters.gathered(P, 0, [bad]) == {}
    there = Rendezvous(relay, TOKENS[2])
    there.leave(f"roster/{P.id}/0/1", signed(mine, by=2))  # P2 writes it where P1's is looked for
    there.leave(f"roster/{P.id}/0/2", body)
    assert rosters.gathered(P, 0, there.look_bodies(f"roster/{P.id}/0/")) == {1: mine}


def test_who_lies_in_a_roster_is_named() -> None:
    mine = roster(1)
    swapped = replace(mine, pods=(pod(1, 0), mine.pods[1]))
    with pytest.raises(ProtocolError, match=r"P1's domain .* signed two rosters of attempt 0") as twice:
        rosters.gathered(P, 0, [signed(mine), signed(swapped)])
    assert twice.value.party == 1
    assert rosters.gathered(P, 0, [signed(mine), signed(mine)]) == {1: mine}
    taken = replace(roster(2), pods=(pod(2, 0, identity=mine.pods[0].identity), pod(2, 1)))
    with pytest.raises(ProtocolError, match="P2's roster lists a key of a pod of P1"):
        rosters.gathered(P, 0, [signed(taken), signed(mine)])
    for changes, what in (
        ({"code_hash": "00" * 32}, "P1's roster runs the code 0000"),
        ({"provider": "local"}, "P1's roster is of pods at local, approved was prime"),
        ({"pods": (pod(1, 0),)}, "P1's roster lists the workers p1r0s0t0, p1r0s0t1"),
    ):
        with pytest.raises(ConfigError, match=what):
            rosters.gathered(P, 0, [signed(roster(1, **changes))])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"proposal": "x"},
        {"code_hash": ""},
        {"attempt": -1},
        {"attempt": 1 << 31},
        {"party": 3},
        {"domain": "ssh-rsa AAAA"},
        {"provider": ""},
        {"region": "a\nb"},
        {"pods": ()},
        {"pods": (pod(1, 1),)},
        {"pods": (pod(1, 0, coords=("p1r0s0t0",), endpoints={}),) * 2},
        {"pods": tuple(pod(1, n) for n in range(120))},
    ],
)
def test_a_roster_is_held_to_its_form(changes: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnreadableError)):
        replace(roster(1), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"pod": "p0r0"},
        {"coords": ()},
        {"coords": ("p1r0s0t0", "p1r0s0t0")},
        {"coords": ("p1r0s0t0", "p1r1s0t0")},
        {"coords": ("p01r0s0t0",)},
        {"endpoints": {"p1r0s0t7": "h:1"}},
        {"endpoints": {"p1r0s0t0": "h"}},
        {"endpoints": {"p1r0s0t0": "h:0"}},
        {"endpoints": {"p1r0s0t0": "h:65536"}},
        {"endpoints": {"p1r0s0t0": "a b:1"}},
        {"host_key": "MD5:00"},
    ],
)
def test_a_pod_of_a_roster_is_held_to_its_form(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        pod(1, 0, **changes)


BAD = ["", "[]", "{}", "\ud800", "[" * 9000, "null", '{"content":1,"signature":""}', '{"content":{"type":"roster"}}']


def test_readers_are_total() -> None:
    """Whatever a stranger leaves there is passed over, also what a domain itself signed in another form."""
    sign = DOMAINS[1]
    for content in (
        {"type": "roster"},
        {"type": "barrier", "proposal": P.id, "attempt": 0, "party": 1},
        {"type": "barrier", "proposal": P.id, "attempt": 0, "party": 1.5},
        {"type": "barrier", "proposal": P.id, "attempt": 0, "party": "1"},
        {"type": "roster", "proposal": P.id, "attempt": "0", "party": 1},
        {"type": "roster", "proposal": P.id, "attempt": [], "party": 1},
        {"type": "roster", **roster(1).to_json(), "pods": {"a": 1}, "domain": KEYS[1]},
        {"type": "barrier", **asdict(barrier(1, "policy")), "seen": {"9": "00" * 32}},
        {"type": "barrier", **asdict(barrier(1, "policy")), "status": "bored"},
    ):
        for namespace in (ROSTER_NAMESPACE, BARRIER_NAMESPACE):
            BAD.append(rosters.orders.sealed(content, lambda p, n=namespace: sign.sign(n, p)))  # type: ignore[misc]
    assert rosters.gathered(P, 0, BAD) == {}
    assert barriers.gathered(P, 0, BAD) == Barriers()
    mine = roster(0)
    assert rosters.gathered(P, 0, [*BAD, signed(mine)]) == {0: mine}


def test_stages_advance_over_all_three_and_in_order(relay: str) -> None:  # noqa: F811
    said: dict[int, Barrier] = {}
    for stage in STAGES:
        made = {p: barrier(p, stage, said) for p in range(PARTIES)}
        for party, one in made.items():
            Rendezvous(relay, TOKENS[party]).leave(barrier_name(one), word(one))
        said = made
    there = Rendezvous(relay, TOKENS[0]).look_bodies(f"barrier/{P.id}/")
    found = barriers.gathered(P, 0, there)
    assert found.of("full") == said
    barriers.in_order(found, STAGES)
    with pytest.raises(ProtocolError, match="no stage of this run"):
        barriers.in_order(found, STAGES[:2])
    assert barriers.gathered(P, 1, there) == Barriers()


def test_a_barrier_out_of_order_names_its_domain() -> None:
    first = {p: barrier(p, "roster") for p in range(PARTIES)}
    other = {**first, 2: barrier(2, "roster", digest="00" * 32)}
    begun = [word(b) for b in first.values()]
    for bodies, what in (
        ([*begun, word(barrier(1, "policy"))], "P1 signed policy over other barriers"),
        ([*begun, word(barrier(1, "policy", other))], "P1 signed policy over other barriers"),
        ([*begun[:2], word(barrier(1, "policy", first))], "P1 signed policy before P2 had reached roster"),
        ([*begun, word(barrier(0, "full", first))], "P0 signed full before P0, P1, P2 had reached policy"),
    ):
        with pytest.raises(ProtocolError, match=what):
            barriers.in_order(barriers.gathered(P, 0, bodies), STAGES)
    with pytest.raises(ProtocolError, match=r"P2's domain .* signed two barriers of roster"):
        barriers.gathered(P, 0, [*begun, word(other[2])])


def test_a_barrier_used_again_is_none() -> None:
    """Of another attempt, of another proposal, of another party, or under another's key: it says nothing here."""
    mine = barrier(1, "roster")
    elsewhere = proposal(nonce="00" * 32)
    assert barriers.gathered(P, 1, [word(mine)]) == Barriers()
    assert barriers.gathered(elsewhere, 0, [word(mine)]) == Barriers()
    assert barriers.gathered(P, 0, [word(mine, by=2), word(mine).replace('"party":1', '"party":2')]) == Barriers()
    approval = json.loads(word(mine))
    approval["content"]["type"] = "approval"
    assert barriers.gathered(P, 0, [json.dumps(approval)]) == Barriers()


def test_who_stops_is_heard_beside_what_it_had_reached() -> None:
    first = {p: barrier(p, "roster") for p in range(PARTIES)}
    halt = barrier(2, "roster", status="halt", reason="F9")
    found = barriers.gathered(P, 0, [*(word(b) for b in first.values()), word(halt)])
    assert found.of("roster") == first
    assert found.stopped == {2: halt}
    barriers.in_order(found, STAGES)
    for changes in ({"reason": "x" * 501}, {"reason": "a\nb"}, {"stage": "A"}, {"seen": {"0": "ab" * 32}}):
        with pytest.raises(ConfigError):
            replace(barrier(0, "roster"), **changes)
