"""Three conductors' ends of the rendezvous, over a real relay: they meet, advance, stop, and name who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import TOKENS, relay  # noqa: F401
from test_roster import pod, proposal, roster

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.federation import domain_key, parcels
from uvcc_console.federation.rendezvous import Rendezvous, barrier_name
from uvcc_console.federation.seat import Seat, SeatTerms, begin_attempt
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Halted
from uvcc_console.rollout.federated import peers as peers_module
from uvcc_console.rollout.federated import told_waits as waits_module
from uvcc_console.rollout.federated.own_party import FederatedParty
from uvcc_console.rollout.federated.parting_words import parting_words
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError, UvccError
from uvcc_engine.transcript.signed import barriers
from uvcc_engine.transcript.signed import roster as rosters
from uvcc_engine.transcript.signed.barriers import BARRIER_NAMESPACE, stages_of

T = TypeVar("T")
STAGES = stages_of(["full"])
ONE, TWO = "11" * 32, "22" * 32
WAIT_S, QUIET_S, STEP_S = 3600.0, 10.0, 0.5


class Clock:
    """The time of all domains. It goes on by a step when each that is there has looked at the relay since the last
    one, however long that takes: nobody is missed because the machine is busy.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.there = 1000.0, list[Peers]()
        time = SimpleNamespace(monotonic=lambda: self.now)
        for module in (peers_module, waits_module):
            patch.setattr(module, "time", time)
        patch.setattr(peers_module, "LOOK_S", 0.02)
        patch.setattr(waits_module, "AGAIN_S", 0.02)

    @contextlib.asynccontextmanager
    async def among(self, made: Sequence[Peers]) -> AsyncIterator[None]:
        """Go on for as long as these are there, each kept going; they may be joined by others for a while."""
        going = None if self.there else asyncio.create_task(self._run())
        self.there += made
        try:
            yield
        finally:
            for peers in made:
                self.there.remove(peers)
            if going is not None:
                going.cancel()
                await asyncio.gather(going, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            before = [(p, p._changed) for p in self.there]
            await asyncio.sleep(0.005)
            while any(p in self.there and p._changed is seen for p, seen in before):
                await asyncio.sleep(0.005)
            self.now += STEP_S

    async def end_of_patience(self, work: Awaitable[T], when: Callable[[], bool]) -> T:
        """What comes of a wait in vain: all the time that it has is over once everybody else has done its part."""
        waiting = asyncio.ensure_future(work)
        while not waiting.done():
            if when():
                self.now += 2 * WAIT_S
            await asyncio.sleep(0.02)
        return await waiting


class Table:
    """Three domains with keys of their own, and their seats at one relay."""

    def __init__(self, root: Path, url: str, patch: pytest.MonkeyPatch, wait_s: float, silence_s: float) -> None:
        keys = []
        for n in range(3):
            patch.setenv("UVCC_HOME", str(root / f"p{n}"))
            paths.ensure(paths.config_dir())
            keys.append(domain_key.create())
        self.root, self.url = root, url
        self.proposal = proposal(domains=tuple(key.public for key in keys), topology=proposal().topology)
        terms = SeatTerms(relay=url, wait_s=wait_s, silence_s=silence_s)
        self.seats = [Seat(self.proposal, n, key, TOKENS[n], terms) for n, key in enumerate(keys)]
        self.buses: dict[int, Bus] = {}
        self.clock: Clock | None = None

    @contextlib.asynccontextmanager
    async def peers(self, *who: int) -> AsyncIterator[list[Peers]]:
        """The ends of these domains, each kept going."""
        made, tasks = [], []
        for n in who:
            bus = self.buses[n] = Bus(Journal(self.root / f"p{n}.sqlite", source="test"))
            made.append(Peers(bus, self.seats[n], STAGES))
            tasks += [asyncio.create_task(bus.run()), asyncio.create_task(made[-1].run())]
        try:
            async with contextlib.nullcontext() if self.clock is None else self.clock.among(made):
                yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def in_vain(self, work: Awaitable[T], when: Callable[[], bool]) -> T:
        assert self.clock is not None
        return await self.clock.end_of_patience(work, when)

    def party(self, peers: Peers) -> tuple[FederatedParty, Any]:
        n = peers.seat.party
        ctx = SimpleNamespace(
            bus=self.buses[n], plan=SimpleNamespace(phases={"full": None}, stages=()), say=lambda *_: None
        )
        found = FederatedParty(ctx, peers.seat)  # type: ignore[arg-type]
        found.peers = peers
        return found, ctx


@pytest.fixture
def table(tmp_path: Path, relay: str, monkeypatch: pytest.MonkeyPatch) -> Table:  # noqa: F811
    made = Table(tmp_path, relay, monkeypatch, WAIT_S, QUIET_S)
    made.clock = Clock(monkeypatch)
    return made


async def met(peers: Sequence[Peers]) -> list[int]:
    return list(await asyncio.gather(*(p.meet() for p in peers)))


def test_three_domains_meet_and_advance_and_the_same_attempt_is_never_begun_again(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            assert await met(peers) == [0, 0, 0]
            for stage in STAGES[1:3]:
                found = await asyncio.gather(*(p.reach(stage, ONE) for p in peers))
                assert all(set(f) == {0, 1, 2} for f in found)
            # what the others say of themselves comes by visits of its own
            await table.buses[1].wait(lambda s: {d.party for d in s.domains.values()} == {0, 2}, 120)
        async with table.peers(0, 1, 2) as peers:  # all three begin anew; what lies there of the attempt before is old
            assert await met(peers) == [1, 1, 1]

    asyncio.run(story())


def test_domains_that_have_begun_more_attempts_take_the_others_along(table: Table) -> None:
    begin_attempt(table.seats[2], 6)

    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            assert await met(peers) == [7, 7, 7]

    asyncio.run(story())


def test_who_does_not_come_is_named_before_anything_is_rented(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1) as peers:
            with pytest.raises(PeerLostError, match="P2 had not come after 3600 s") as lost:
                await table.in_vain(met(peers), lambda: all(1 - n in table.buses[n].snapshot.domains for n in (0, 1)))
            assert lost.value.party == 2

    asyncio.run(story())


def test_who_falls_silent_is_named_and_the_others_are_told(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1) as peers:
            async with table.peers(2) as third:
                await met([*peers, *third])
            with pytest.raises(PeerLostError, match="P2's domain vanished"):
                await peers[0].guarded(asyncio.sleep(150))
            await peers[0].farewell("failed", "P2 is gone")
            with pytest.raises(PeerLostError, match=r"P2's domain vanished|P0's domain stopped at meet: P2 is gone"):
                await peers[1].guarded(asyncio.sleep(150))
            await table.buses[0].wait(lambda s: s.domains[2].status == "silent", 120)

    asyncio.run(story())


def test_a_halt_by_any_domain_reaches_all_and_a_failure_ends_what_others_do(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="halt", by="operator", reason="F9"))
            for n in (0, 2):
                with pytest.raises(Halted):
                    await peers[n].guarded(asyncio.sleep(150))
                await table.buses[n].wait(lambda s: (s.halt.mode, s.halt.by) == ("halt", "P1"), 120)
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            await peers[2].farewell("failed", "its disk is full")
            for n in (0, 1):
                with pytest.raises(PeerLostError, match="P2's domain stopped at meet: its disk is full"):
                    await peers[n].guarded(asyncio.sleep(150))

    asyncio.run(story())


def test_a_domain_whose_pods_do_not_come_up_tells_the_others_nothing_of_its_machines(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            why = f"no host can be claimed: trainer@10.9.8.7:2222 refuses {Path.home()}/.ssh/id"
            table.buses[2].commit(ev.StageChanged(name="provision", status="failed", detail=why))
            await table.buses[2].wait(lambda s: any(v.status == "failed" for v in s.stages), 120)
            await peers[2].farewell("failed", why)
            for n in (0, 1):
                with pytest.raises(PeerLostError) as told:
                    await peers[n].guarded(asyncio.sleep(150))
                assert "it could not bring up its pods, at provision; its own console says why" in told.value.what
                assert not {"trainer", "10.9.8.7", str(Path.home())} & {*re.split(r"[ @:]", told.value.what)}

    asyncio.run(story())


def test_an_end_in_training_is_told_without_logins_and_folders() -> None:
    pod_up = ev.PodChanged(
        pod="p2r0", party=2, replica=0, provider="inventory", state="agent", address="me@10.9.8.7:2222"
    )
    why = f"pod me@10.9.8.7:2222 is gone (me@10.9.8.7 refuses {Path.home()}/key): P1 says: cannot reach 10.9.8.6:20000"
    assert parting_words(fold([pod_up]), why) == (
        "pod p2r0 is gone (p2r0 refuses ~/key): P1 says: cannot reach 10.9.8.6:20000"
    )


def test_a_drill_and_a_hold_are_this_domains_own(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            table.buses[1].commit(ev.HaltRequested(nonce="n1", mode="hold", by="operator"))
            table.buses[1].commit(ev.HaltRequested(nonce="n2", mode="halt", by="operator", drill=True))
            found = await asyncio.gather(*(p.reach("roster", ONE) for p in peers))
            assert not peers[0].found.stopped
            assert set(found[0]) == {0, 1, 2}

    asyncio.run(story())


def test_a_domain_that_reports_something_else_is_named(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            said = await asyncio.gather(
                *(p.reach("roster", TWO if n == 1 else ONE) for n, p in enumerate(peers)), return_exceptions=True
            )
            for error in said:
                assert isinstance(error, ProtocolError)
                assert "P1's domain reports another roster" in str(error)

    asyncio.run(story())


def test_a_barrier_used_again_does_not_advance_anybody(table: Table) -> None:
    """P1's barrier of the first attempt, put there again in the second one by whoever holds it: nobody goes on."""

    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            await asyncio.gather(*(p.reach("roster", ONE) for p in peers))
            old = next(body for body in peers[0].ledger.bodies if '"stage":"roster"' in body and '"party":1' in body)
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            Rendezvous(table.url, TOKENS[2]).leave(f"barrier/{table.proposal.id}/1/roster/1", old)
            two = [peers[0], peers[2]]
            said = await table.in_vain(
                asyncio.gather(*(p.reach("roster", ONE) for p in two), return_exceptions=True),
                lambda: all(set(p.found.of("roster")) == {0, 2} for p in two),
            )
            assert ["P1 had not reached roster" in str(e) for e in said] == [True, True]

    asyncio.run(story())


def test_a_domain_that_signs_ahead_of_the_others_is_named(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            seat = table.seats[1]
            ahead = replace(peers[1]._barrier("meet", "reached", ONE), stage="shares")
            body = barriers.signed(ahead, lambda payload: seat.key.sign(BARRIER_NAMESPACE, payload))
            seat.there().leave(barrier_name(ahead), body)
            said = await asyncio.gather(*(p.reach("roster", ONE) for p in peers), return_exceptions=True)
            assert any("P1 signed shares" in str(e) for e in said)

    asyncio.run(story())


def _roster_of(table: Table, n: int, attempt: int = 0) -> Any:
    seat = table.seats[n]
    return roster(n, proposal=table.proposal.id, domain=seat.key.public, attempt=attempt)


def _vouching(table: Table, peers: Sequence[Peers], silent: int = -1, attempt: int = 0) -> list[asyncio.Task[Any]]:
    """The roster stage of every domain but ``silent``, with pods that a test made up."""
    work = []
    for p in peers:
        party, ctx = table.party(p)
        mine = _roster_of(table, p.seat.party, attempt)

        async def own(_: Any, mine: Any = mine) -> Any:
            return mine

        party._own_roster = own  # type: ignore[method-assign]
        if p.seat.party != silent:
            work.append(asyncio.create_task(party._roster(ctx)))
    return work


async def _in_vain(table: Table, peers: Sequence[Peers]) -> list[Any]:
    """The roster stage of the others, all of whose rosters are there, while P2 publishes none."""
    there = table.seats[0].there()

    def published() -> bool:
        lying = there.look_bodies(f"roster/{table.proposal.id}/0/")
        return set(rosters.gathered(table.proposal, 0, lying)) == {0, 1}

    work = _vouching(table, peers, silent=2)
    return list(await table.in_vain(asyncio.gather(*work, return_exceptions=True), published))


def test_a_domain_that_publishes_no_roster_is_named(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            for error in await _in_vain(table, peers):
                assert isinstance(error, PeerLostError)
                assert "P2's domain has not published a roster after 3600 s" in str(error)

    asyncio.run(story())


def test_a_roster_by_a_wrong_key_is_none_and_one_that_was_swapped_names_its_domain(table: Table) -> None:
    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            there = Rendezvous(table.url, TOKENS[0])
            wrong = rosters.signed(
                _roster_of(table, 2), lambda payload: table.seats[0].key.sign(rosters.ROSTER_NAMESPACE, payload)
            )
            there.leave(f"roster/{table.proposal.id}/0/2", wrong)
            assert rosters.gathered(table.proposal, 0, there.look_bodies(f"roster/{table.proposal.id}/0/")) == {}
            for said in await _in_vain(table, peers):
                assert "P2's domain has not published a roster" in str(said)
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            swapped = replace(_roster_of(table, 1, 1), pods=(pod(1, 0), pod(1, 1)))
            table.seats[1].there().leave(
                f"roster/{table.proposal.id}/1/again",
                rosters.signed(swapped, lambda p: table.seats[1].key.sign(rosters.ROSTER_NAMESPACE, p)),
            )
            work = _vouching(table, peers, attempt=1)
            whoever = asyncio.gather(*work, return_exceptions=True)
            said = await table.in_vain(whoever, lambda: any(w.done() for w in work))
            told = [str(e) for e in said if isinstance(e, ProtocolError)]
            assert told  # by whoever saw both; who saw one of them only is not joined by the others
            assert all("P1's domain" in t and "signed two rosters of attempt 1" in t for t in told)

    asyncio.run(story())


def test_parcels_arrive_whole_under_names_of_ours_and_a_liar_is_named(table: Table, tmp_path: Path) -> None:
    box = parcels.box_of(table.proposal.id, 0, "shares")
    there = [seat.there() for seat in table.seats]
    made = {"a.bin": b"x" * (2 * parcels.PIECE + 5), "empty": b"", "../up": b"up"}
    files = {}
    for n, (name, data) in enumerate(made.items()):
        files[name] = tmp_path / f"f{n}"
        files[name].write_bytes(data)
    parcels.send(there[0], box, 1, files)
    parcels.send(there[0], box, 1, files)  # sent again, it is there once
    incoming = parcels.Parcels(there[1], box, tmp_path / "in")
    while incoming.poll():
        pass
    assert set(incoming.arrived(0)) == set(made)
    assert incoming.arrived(2) == {}
    with DownloadFolder(tmp_path / "landed") as downloads:
        incoming.store(0, "a.bin", downloads, ("a.bin",))
        assert (tmp_path / "landed" / "a.bin").read_bytes() == made["a.bin"]
        with pytest.raises(UvccError):
            incoming.store(0, "../up", downloads, ("..", "up"))
    assert incoming.read(0, "../up", 10) == b"up"
    assert not (tmp_path / "up").exists()
    files["a.bin"].write_bytes(b"another")
    parcels.send(there[0], box, 1, {"a.bin": files["a.bin"]})
    with pytest.raises(ProtocolError, match=r"two files came as P0's 'a\.bin'") as lie:
        incoming.poll()
    assert lie.value.party == -1  # it is the relay that says whose they are
    there[2].mail("/enqueue", {"box": box, "messages": [{"msg_id": "1", "receiver": 1, "payload_b64": "AAAA"}]})
    with pytest.raises(ProtocolError, match="what came as P2's at the relay cannot be read"):
        parcels.Parcels(there[1], box, tmp_path / "in2").poll()


def test_whoever_is_interrupted_while_a_file_comes_goes_on_with_what_was_taken(table: Table, tmp_path: Path) -> None:
    box = parcels.box_of(table.proposal.id, 0, "results/0")
    sender, receiver = table.seats[0].there(), table.seats[1].there()
    data = b"y" * parcels.PIECE + b"z" * 7
    whole = (len(data), hashlib.sha256(data).hexdigest())
    parcels.enqueue(sender, box, 1, "weights.box", whole, 0, data[: parcels.PIECE])
    while parcels.Parcels(receiver, box, tmp_path / "in").poll():  # taken, told to the relay, and interrupted
        pass
    parcels.enqueue(sender, box, 1, "weights.box", whole, parcels.PIECE, data[parcels.PIECE :])
    for note in (tmp_path / "in" / "P0").glob("*.have"):
        (note.parent / "damaged.have").write_bytes(note.read_bytes()[:20])
    again = parcels.Parcels(receiver, box, tmp_path / "in")
    while again.poll():
        pass
    assert again.arrived(0) == {"weights.box": whole}
    assert parcels.Parcels(receiver, box, tmp_path / "in").arrived(0) == {"weights.box": whole}
    assert parcels.Parcels(receiver, box + 1, tmp_path / "in").arrived(0) == {}  # of another purpose
    with DownloadFolder(tmp_path / "landed") as downloads:
        again.store(0, "weights.box", downloads, ("weights.box",))
    assert (tmp_path / "landed" / "weights.box").read_bytes() == data
    assert parcels.Parcels(receiver, box, tmp_path / "in").arrived(0) == {}


def test_seats_are_held_to_their_form() -> None:
    for changes in ({"wait_s": 0.0}, {"silence_s": -1.0}):
        with pytest.raises(ConfigError):
            SeatTerms(relay="http://h", **changes)


def test_a_visit_asks_for_each_thing_once_over_one_connection(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an exchange costs beside a training: a connection a visit, and words only where some are due."""
    opened: list[str] = []
    asked: list[str] = []
    connect, request = HTTPConnection.connect, HTTPConnection.request

    def connecting(self: HTTPConnection) -> None:
        opened.append(self.host)
        connect(self)

    def asking(self: HTTPConnection, method: str, url: str, body: Any, headers: Any) -> None:
        want = json.loads(body)["want"]
        asked.append("left" if want == "\n" else want.partition("/")[0])
        request(self, method, url, body, headers)

    async def story() -> None:
        async with table.peers(0, 1, 2) as peers:
            await met(peers)
            monkeypatch.setattr(HTTPConnection, "connect", connecting)
            monkeypatch.setattr(HTTPConnection, "request", asking)
            going = [asyncio.create_task(p.guarded(asyncio.sleep(150))) for p in peers]
            while asked.count("barrier") < 12 or "report" not in asked:
                await asyncio.sleep(0.02)
            assert not any(task.done() for task in going)
            for task in going:
                task.cancel()
            await asyncio.gather(*going, return_exceptions=True)

    asyncio.run(story())
    visits = asked.count("barrier")
    assert len(opened) <= visits + 3  # those that were cut short
    assert asked.count("report") < visits
    assert set(asked) == {"barrier", "report", "left"}
