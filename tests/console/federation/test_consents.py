"""What several domains must sign for: whose word counts, for which resume, and who ends a wait that is vain."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import TOKENS, relay  # noqa: F401
from test_peers import Table, met, table  # noqa: F401
from test_roster import proposal

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.rollout.context import Halted
from uvcc_console.rollout.federated.peers import Peers
from uvcc_console.runs import domain
from uvcc_engine.contract.errors import ConfigError, PeerLostError, UvccError
from uvcc_engine.transcript.signed import consents
from uvcc_engine.transcript.signed.consents import CONSENT_NAMESPACE, SignedConsent
from uvcc_engine.transcript.terms.proposal import Consents, Proposal


@dataclass
class Runner:
    """Stages that wait for a decision, as ``StageRunner`` does after a halt."""

    deciding: bool = True
    decided: list[str] = field(default_factory=list)
    given_up: list[UvccError] = field(default_factory=list)

    def decide(self, action: str) -> None:
        self.decided.append(action)
        self.deciding = False

    def give_up(self, error: UvccError) -> None:
        if self.deciding:
            self.given_up.append(error)


def wants(table: Table, **counts: int) -> None:  # noqa: F811
    """Have the proposal want as many signatures."""
    table.proposal = replace(table.proposal, consent=Consents(**counts))
    table.seats = [replace(seat, proposal=table.proposal) for seat in table.seats]


def waiting(peers: Sequence[Peers]) -> list[Runner]:
    runners = [Runner() for _ in peers]
    for p, runner in zip(peers, runners, strict=True):
        p.attach(runner)  # type: ignore[arg-type]
    return runners


async def until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not wanted():
            await asyncio.sleep(0.02)


def test_a_word_counts_for_one_attempt_one_resume_and_under_its_own_domains_key(table: Table) -> None:  # noqa: F811
    p = table.proposal
    base = SignedConsent(version=1, proposal=p.id, attempt=3, party=1, what="resume", number=2)

    def body(consent: SignedConsent, by: int) -> str:
        return consents.signed(consent, lambda payload: table.seats[by].key.sign(CONSENT_NAMESPACE, payload))

    good = body(base, 1)
    assert consents.gathered(p, 3, [good, good]) == {"resume-2": {1}}
    assert consents.gathered(p, 4, [good]) == {}
    others = [body(base, 2), body(replace(base, proposal="ab" * 32), 1), body(replace(base, attempt=2), 1)]
    others += [good.replace('"number":2', '"number":3'), good.replace('"party":1', '"party":2'), "{}", "\ud800"]
    assert consents.gathered(p, 3, others) == {}
    assert consents.gathered(p, 3, [body(replace(base, number=3), 1), good]) == {"resume-3": {1}, "resume-2": {1}}
    wrong: list[dict[str, Any]] = [
        {"number": 0},
        {"what": "full"},
        {"attempt": -1},
        {"party": 3},
        {"version": 2},
        {"proposal": "x"},
    ]
    for change in wrong:
        with pytest.raises(ConfigError):
            replace(base, **change)


def test_all_three_go_on_once_two_signed_and_the_first_halt_is_over(table: Table) -> None:  # noqa: F811
    wants(table, resume=2)

    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            with pytest.raises(ConfigError, match="there is nothing to sign resume for now"):
                peers[0].sign("resume")
            table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator"))
            for p in peers:
                with pytest.raises(Halted):
                    await p.guarded(asyncio.sleep(150))
            runners = waiting(peers)
            peers[0].sign("resume")
            peers[0].sign("resume")
            await until(lambda: all(("resume-1", "P0") in table.buses[n].snapshot.consents for n in range(3)))
            assert [r.decided for r in runners] == [[], [], []]
            peers[2].sign("resume")
            await until(lambda: all(r.decided == ["resume"] for r in runners))
            assert [p.resumes for p in peers] == [1, 1, 1]
            halts = {n: table.buses[n].snapshot.halt.nonce for n in range(3)}
            await asyncio.gather(*(p.guarded(asyncio.sleep(1.5)) for p in peers))  # the halt before stops nobody now
            assert {n: table.buses[n].snapshot.halt.nonce for n in range(3)} == halts
            # whoever halted is shown as it is now, not as it was before the resume
            await until(lambda: all(table.buses[n].snapshot.domains[1].status == "running" for n in (0, 2)))

            table.buses[2].commit(ev.HaltRequested(nonce="n2", mode="halt", by="operator"))  # a new one does
            for p in peers:
                with pytest.raises(Halted):
                    await p.guarded(asyncio.sleep(150))
            for runner in runners:
                runner.deciding = True
            peers[1].sign("resume")
            await until(lambda: all(("resume-2", "P1") in table.buses[n].snapshot.consents for n in range(3)))
            assert [len(r.decided) for r in runners] == [1, 1, 1]  # words for the first resume are not for the second
            assert [r.given_up for r in runners] == [[], [], []]

    asyncio.run(story())


def test_who_halted_all_and_vanishes_after_the_resume_is_named(table: Table) -> None:  # noqa: F811
    wants(table, resume=1)

    async def story() -> None:
        async with table.peers(0, 2) as others:
            async with table.peers(1) as first:
                await met([*others, *first])
                table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator"))
                for p in (*others, *first):
                    with pytest.raises(Halted):
                        await p.guarded(asyncio.sleep(150))
                runners = waiting([*others, *first])
                others[0].sign("resume")
                await until(lambda: all(r.decided == ["resume"] for r in runners))
            with pytest.raises(PeerLostError, match="P1's domain vanished"):
                await others[0].guarded(asyncio.sleep(150))

    asyncio.run(story())


def test_a_replayed_word_of_an_earlier_attempt_lets_nobody_go_on(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            waiting(peers)
            peers[1].sign("resume")
            await until(lambda: all(p.resumes == 1 for p in peers))  # one is enough where the proposal wants none
            (old,) = peers[0].consents.bodies
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            runners = waiting(peers)
            Rendezvous(table.url, TOKENS[2]).leave(f"barrier/{table.proposal.id}/1/consent-resume-1/1", old)
            await asyncio.sleep(1.5)
            assert [r.decided for r in runners] == [[], [], []]

    asyncio.run(story())


def test_a_domain_that_ends_its_part_ends_the_wait_of_the_others(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator"))
            for p in peers:
                with pytest.raises(Halted):
                    await p.guarded(asyncio.sleep(150))
            runners = waiting(peers)
            await peers[1].farewell("torn_down", "teardown asked by cli")
            await until(lambda: bool(runners[0].given_up and runners[2].given_up))
            assert "P1's domain stopped at meet: teardown asked by cli" in str(runners[0].given_up[0])

    asyncio.run(story())


def test_a_domain_that_begins_another_attempt_meanwhile_is_named(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1) as peers:
            async with table.peers(2) as third:
                await met([*peers, *third])
            runners = waiting(peers)
            async with table.peers(2) as again:
                meeting = asyncio.create_task(again[0].meet())
                await until(lambda: all(r.given_up for r in runners))
                meeting.cancel()
                await asyncio.gather(meeting, return_exceptions=True)
            assert "P2's domain has begun attempt 1, this is 0" in str(runners[0].given_up[0])

    asyncio.run(story())


def test_how_many_must_sign_is_part_of_the_proposal_and_absent_where_nothing_needs_it() -> None:
    plain = proposal()
    assert "consent" not in plain.to_json()
    counted = replace(plain, consent=Consents(resume=2))
    assert Proposal.from_bytes(counted.canonical) == counted
    assert counted.id != plain.id
    with pytest.raises(ConfigError, match="4 signatures for full"):
        Consents(full=4)


def test_in_one_operators_run_a_word_counts_for_the_next_resume_only() -> None:
    created = ev.RunCreated(
        run="r",
        profile_name="t",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=[],
        profile={"consent": {"resume": 1}},
    )
    begun = ev.PhaseStarted(phase="full", engine_run="r.full", steps=9, sid_job="ab")
    s = fold([created, begun, ev.Consent(what="resume-1", by="P1")])
    assert domain.missing(s, "resume") == ""
    s = fold([replace(begun, attempt=1)], s)
    assert domain.missing(s, "resume") == "resume-2 needs the signatures of 1 of 3 domains; signed by nobody"
