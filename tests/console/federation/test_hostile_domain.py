"""A domain that signs what it likes, as often as it likes: whoever is to blame is named, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import relay  # noqa: F401
from test_consents import until, waiting
from test_data_owner import OWNER_TOKENS, Gathering, gathering  # noqa: F401
from test_peers import WAIT_S, Table, met, table  # noqa: F401
from test_roster import proposal, roster

from uvcc_console.core import events as ev
from uvcc_console.federation import parcels
from uvcc_console.federation import seat as seats
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.rollout.context import Halted
from uvcc_console.rollout.federated.barrier_ledger import MOST_AHEAD, MOST_STOPS, BarrierLedger
from uvcc_console.rollout.federated.consenting import MOST_KEPT
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError, UvccError
from uvcc_engine.contract.peer_protocol.record_names import OWNER_SHARES
from uvcc_engine.transcript.signed import barriers, consents, reports
from uvcc_engine.transcript.signed import roster as rosters
from uvcc_engine.transcript.signed.barriers import BARRIER_NAMESPACE, Barrier
from uvcc_engine.transcript.signed.consents import CONSENT_NAMESPACE, SignedConsent
from uvcc_engine.transcript.signed.reports import REPORT_NAMESPACE, DomainReport
from uvcc_engine.transcript.signed.roster import ROSTER_NAMESPACE

ONE, TWO, THREE = "11" * 32, "22" * 32, "33" * 32


def signing(table: Table, n: int, namespace: str) -> Callable[[bytes], str]:  # noqa: F811
    return lambda payload: table.seats[n].key.sign(namespace, payload)


def leaves(table: Table, n: int, *said: Barrier) -> list[str]:  # noqa: F811
    """Have a domain sign these barriers; the records."""
    return [barriers.signed(one, signing(table, n, BARRIER_NAMESPACE)) for one in said]


def of_p1(table: Table, **changes: Any) -> Barrier:  # noqa: F811
    whole = Barrier(
        version=1, proposal=table.proposal.id, attempt=0, party=1, stage="meet", status="halt", digest=ONE, seen={}
    )
    return replace(whole, **changes)


def test_a_flood_of_one_domains_barriers_keeps_no_others_out(table: Table) -> None:  # noqa: F811
    """P1 halts all again and again: as many records as a relay shows, at every look others."""
    ledger = BarrierLedger(table.proposal, 0, ["meet", "roster"])
    for look in range(3):
        flood = [of_p1(table, reason=f"once more, {look} {n}") for n in range(200)]
        flood += [of_p1(table, resumed=200 * look + n) for n in range(200)]
        ledger.take(leaves(table, 1, *flood))
    assert len(ledger.bodies) <= MOST_STOPS
    other = Barrier(
        version=1, proposal=table.proposal.id, attempt=0, party=2, stage="meet", status="reached", digest=ONE, seen={}
    )
    ledger.take(leaves(table, 2, other))
    assert ledger.found.of("meet") == {2: other}
    assert ledger.found.stopped[1].resumed == 599  # its newest word counts, though it is kept no more


def test_what_convicts_a_domain_is_kept(table: Table) -> None:  # noqa: F811
    ledger = BarrierLedger(table.proposal, 0, ["meet", "roster"])
    two = leaves(table, 1, *(of_p1(table, status="reached", digest=d) for d in (ONE, TWO)))
    with pytest.raises(ProtocolError, match="signed two barriers of meet") as lie:
        ledger.take(two)
    assert lie.value.party == 1
    assert list(ledger.bodies) == two
    with pytest.raises(ProtocolError, match="P1 signed a barrier of 'lunch', no stage of this run"):
        ledger.take(leaves(table, 1, of_p1(table, stage="lunch")))


def test_a_domain_that_cannot_be_met_is_named_and_nothing_is_noted_for_good(table: Table) -> None:  # noqa: F811
    """P2 says at every look that it begins a later attempt, or one that no domain ever begins."""
    there, clock = table.seats[2].there(), table.clock
    assert clock is not None

    def says(attempt: int, number: int) -> None:
        told = DomainReport(
            proposal=table.proposal.id, attempt=attempt, party=2, number=number, stage="meet", status="running"
        )
        there.leave(f"report/{table.proposal.id}/2", reports.signed(told, signing(table, 2, REPORT_NAMESPACE)))

    async def story(attempts: Callable[[int], int]) -> list[Any]:
        async with table.peers(0, 1) as peers:
            work = asyncio.gather(*(p.meet() for p in peers), return_exceptions=True)
            number = 0
            while not work.done():
                number += 1
                await asyncio.to_thread(says, attempts(number), number)
                clock.now += WAIT_S / 8
                await asyncio.sleep(0.1)
            return list(await work)

    for error in asyncio.run(story(lambda number: number)):
        assert isinstance(error, PeerLostError)
        assert "P2's domain begins one attempt after the other" in str(error)
    far = 100 * MOST_AHEAD
    for error in asyncio.run(story(lambda number: far + number)):
        assert isinstance(error, ProtocolError)
        assert "P2's domain says that it begins attempt 10000" in str(error)
    for seat in table.seats[:2]:
        noted = seat.key.folder / "attempts" / table.proposal.id
        assert int(noted.read_text()) < MOST_AHEAD


def test_words_for_every_resume_signed_beforehand_keep_nobodys_out(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            base = SignedConsent(version=1, proposal=table.proposal.id, attempt=0, party=1, what="resume", number=1)
            beforehand = [
                consents.signed(replace(base, number=n), signing(table, 1, CONSENT_NAMESPACE))
                for n in range(2, MOST_KEPT + 9)
            ]
            for p in peers:
                p.consents.take(0, beforehand)
            table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator"))
            for p in peers:
                with pytest.raises(Halted):
                    await p.guarded(asyncio.sleep(150))
            runners = waiting(peers)
            peers[0].sign("resume")
            await until(lambda: all(r.decided == ["resume"] for r in runners))
            assert all(len(p.consents.bodies) == MOST_KEPT + 1 for p in peers)

    asyncio.run(story())


def test_where_all_three_report_something_else_none_is_blamed(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            work = (p.reach("roster", d) for p, d in zip(peers, (ONE, TWO, THREE), strict=True))
            for error in await asyncio.gather(*work, return_exceptions=True):
                assert isinstance(error, ProtocolError)
                assert error.party == -1
                assert f"the domains all report another roster: P0 {ONE[:16]}, P1 {TWO[:16]}" in str(error)

    asyncio.run(story())


async def _roster_of_p0(table: Table, p: Peers, *lying: str) -> UvccError:  # noqa: F811
    """What ends P0's roster stage where these lie there; afterwards it leaves the run."""
    party, ctx = table.party(p)

    async def own(_: Any) -> Any:
        return _vouched(table, 0)

    party._own_roster = own  # type: ignore[method-assign]
    ctx.artifacts = table.root / "artifacts"
    for n, body in enumerate(lying):
        await asyncio.to_thread(table.seats[1].there().leave, f"roster/{table.proposal.id}/0/{n}", body)
    with pytest.raises(UvccError) as ended:
        await party._roster(ctx)
    await party.part(ctx, "failed", str(ended.value))
    return ended.value


def _vouched(table: Table, n: int, **changes: Any) -> Any:  # noqa: F811
    made = roster(n, proposal=table.proposal.id, domain=table.seats[n].key.public)
    return replace(made, pods=tuple(replace(pod, **changes) for pod in made.pods))


def _signed_roster(table: Table, n: int, **changes: Any) -> str:  # noqa: F811
    return rosters.signed(_vouched(table, n, **changes), signing(table, n, ROSTER_NAMESPACE))


def test_a_roster_that_says_of_no_worker_where_it_listens_names_its_domain(table: Table) -> None:  # noqa: F811
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            bodies = _signed_roster(table, 1, endpoints={}), _signed_roster(table, 2)
            error = await _roster_of_p0(table, peers[0], *bodies)
            assert isinstance(error, ProtocolError)
            assert error.party == 1
            assert "P1's roster does not say where p1r0s0t0, p1r0s0t1, p1r1s0t0, p1r1s0t1 listens" in str(error)

    asyncio.run(story())


def test_both_rosters_of_a_domain_that_signed_two_are_kept_when_a_run_fails(table: Table) -> None:  # noqa: F811
    """What is told with "keep both" lies in the artifacts of the run that ended for it."""
    two = [_signed_roster(table, 1), _signed_roster(table, 1, host_key="")]

    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            error = await _roster_of_p0(table, peers[0], *two)
            assert "signed two rosters of attempt 0" in str(error)

    asyncio.run(story())
    kept = json.loads((table.root / "artifacts" / rosters.FILE).read_text())
    assert set(two) < set(kept)
    assert len(json.loads((table.root / "artifacts" / barriers.FILE).read_text())) >= 3


def test_only_what_a_domain_signed_of_this_attempt_is_kept() -> None:
    p = proposal()
    assert rosters.signed_among(p, 0, ["", "{}", "[" * 9000, json.dumps({"content": {"type": "roster"}})]) == []


def test_an_owner_that_withdraws_what_it_signed_has_shared_all_the_same(gathering: Gathering) -> None:  # noqa: F811
    """Its record is gone before a domain lays the files: a relay that was started again has forgotten it."""
    g = gathering
    pods = g.rosters()
    for n in range(2):
        g.at(n, "requests")
    for n in range(2):
        assert g.share(n) == 0, g.err
    waiting_for = g.parcels(1, pods)
    assert waiting_for.poll() == []
    there = Rendezvous(g.url, OWNER_TOKENS[1])
    for n in range(600):  # more than a writer has room for at a relay
        there.leave(f"{OWNER_SHARES}other/{n}", "x")
    assert waiting_for.poll() == []
    laid = waiting_for.laid(1)
    assert laid["owner"] == g.owners[0].public.x25519
    assert len(waiting_for.statements()) == 2


def test_what_a_relay_altered_is_found_out_and_accuses_nobody(
    table: Table,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    box, name = parcels.box_of(table.proposal.id, 0, "shares"), "sealed-p1.bin"
    (tmp_path / name).write_bytes(b"sealed")
    parcels.send(table.seats[0].there(), box, 1, {name: tmp_path / name})
    honest = Rendezvous.mail

    def damaged(self: Rendezvous, path: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        found = honest(self, path, asked)
        for message in found.get("messages", []):
            whole = bytearray(base64.b64decode(message["payload_b64"]))
            whole[-1] ^= 1
            message["payload_b64"] = base64.b64encode(whole).decode()
        return found

    monkeypatch.setattr(Rendezvous, "mail", damaged)
    coming = parcels.Parcels(table.seats[1].there(), box, tmp_path / "in")
    while coming.poll():
        pass
    with pytest.raises(ProtocolError, match="has another digest or size"):
        coming.read(0, name, 100)
    with DownloadFolder(tmp_path / "landed") as downloads, pytest.raises(ProtocolError) as told:
        coming.store(0, name, downloads, (name,))
    assert told.value.party == -1
    assert "what came as P0's 'sealed-p1.bin' has another digest" in str(told.value)
    assert "the relay altered it, or it was sent so" in str(told.value)


def test_a_file_that_the_relay_never_takes_is_not_sent(
    table: Table,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def refuses(self: Rendezvous, path: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        raise UvccError("the relay takes nothing")

    monkeypatch.setattr(Rendezvous, "mail", refuses)
    monkeypatch.setattr(parcels, "time", SimpleNamespace(sleep=slept.append))
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(UvccError, match="the relay takes nothing"):
        parcels.send(table.seats[0].there(), 7, 1, {"a": tmp_path / "a"})
    assert slept == sorted(slept)
    assert 1.0 < sum(slept) < 60.0


def test_a_domain_has_one_conductor_of_a_proposal(table: Table) -> None:  # noqa: F811
    """An operator who starts a second one would sign against himself, for the others to keep."""
    slept: list[float] = []
    first = seats.claim(table.seats[0], "run-a")
    seats.claim(table.seats[1], "run-b").close()  # another domain's is its own
    with pytest.raises(ConfigError, match=r"another conductor of this domain runs this proposal: run-a") as told:
        seats.claim(table.seats[0], "run-c", slept.append)
    assert "uvcc teardown run-a" in told.value.hint
    assert 5.0 < sum(slept) < 30.0
    first.close()  # as its process's end does
    seats.claim(table.seats[0], "run-c").close()
