"""Real sessions of a model served under ``covert``, over links whose messages come as late as they can: whatever waits
where, and whoever wants to end, nobody waits for what is never sent.

Nothing here is timed. A message is on its way until all three parties wait; then a seed says which link brings its next
one. If all wait and nothing is on its way, that is a wait for ever, and the test says of what.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import CODE, Fleet, direct_links
from test_served_model import JOB as SERVED_JOB
from test_served_model import shared

from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.run_files import writer as writer_module
from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.data.sets import Floats
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.place import RankAddress
from uvcc_engine.plane.api import Tag
from uvcc_engine.sealing.queries import OpenedQuery
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.worker import served_session
from uvcc_engine.worker.admission import CODE_HASH, admit
from uvcc_engine.worker.consensus import StepConsensus
from uvcc_engine.worker.late_recorder import LateRecorder
from uvcc_engine.worker.ranks import Ranks
from uvcc_engine.worker.served_batches import BatchTerms, DeskWord, QueryBatch, WaitingQuery, agreed, held_to
from uvcc_engine.worker.served_session import ServedSession

torch.set_num_threads(1)
JOB = replace(SERVED_JOB, verify="covert", audit_one_in=2, steps=4, model="logistic-digits", checkpoint_every=2)
Arrivals = dict[int, dict[int, int]]
"""By query and party: at which turn of waiting it comes there, over all steps."""


class LateNet:
    """Links of three threads, each of which is slow: what is sent moves only when nobody can go on without it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._news = threading.Condition()
        self._under_way: dict[tuple[int, int, bool], deque[tuple[Tag | None, bytes]]] = {
            (a, b, control): deque() for a in range(3) for b in range(3) for control in (False, True) if a != b
        }
        self.there: dict[tuple[int, int], dict[Tag, bytes]] = {(a, b): {} for a in range(3) for b in range(3)}
        self.said: dict[tuple[int, int], deque[bytes]] = {(a, b): deque() for a in range(3) for b in range(3)}
        self._waits: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._running = {0, 1, 2}
        self.stuck: dict[int, str] = {}

    def put(self, a: int, b: int, tag: Tag | None, body: bytes) -> None:
        with self._news:
            self._under_way[a, b, tag is None].append((tag, body))

    def wait(self, party: int, what: str, ready: Callable[[], bool]) -> None:
        """Raises PeerLostError for a wait that cannot end."""
        with self._news:
            self._waits[party] = what, ready
            while not ready():
                if self.stuck:
                    raise PeerLostError(f"a wait for ever: {self.stuck}")
                if self._waits.keys() >= self._running and not any(there() for _, there in self._waits.values()):
                    self._move()
                else:
                    self._news.wait()
            del self._waits[party]

    def _move(self) -> None:
        """One message of one link, chosen by the seed; whoever it is for looks again, and so do the others."""
        full = [link for link, waiting in self._under_way.items() if waiting]
        if not full:
            self.stuck = {party: what for party, (what, _) in self._waits.items()}
        else:
            a, b, _ = link = self._random.choice(full)
            tag, body = self._under_way[link].popleft()
            if tag is None:
                self.said[a, b].append(body)
            else:
                self.there[a, b][tag] = body
        self._news.notify_all()

    def leave(self, party: int) -> None:
        with self._news:
            self._running.discard(party)
            self._waits.pop(party, None)
            self._news.notify_all()


@dataclass
class LatePlane:
    """``plane.api.Plane`` of one party over a :class:`LateNet`."""

    net: LateNet
    party: int
    recorder: LateRecorder
    silent: tuple[int, int]
    sent: list[int] = field(default_factory=list)

    def send(self, dst: int, tag: Tag, payload: Any) -> None:
        self.recorder.record(0, dst, tag, payload)
        self.sent.append(tag.kind)
        if (self.party, tag.kind) == self.silent:
            return
        self.net.put(self.party, dst, tag, bytes(payload))

    def recv(self, src: int, tag: Tag) -> memoryview:
        box = self.net.there[src, self.party]
        self.net.wait(self.party, f"{tag} of {src}", lambda: tag in box)
        body = box.pop(tag)
        self.recorder.record(1, src, tag, body)
        return memoryview(body)

    def arrived(self, wants: Iterable[tuple[int, Tag]]) -> bool:
        return all(tag in self.net.there[src, self.party] for src, tag in wants)

    def wait_any(self, wants: Sequence[Sequence[tuple[int, Tag]]], other: Callable[[], bool] | None = None) -> None:
        self.net.wait(self.party, f"any of {wants}", lambda: any(map(self.arrived, wants)))

    def send_control(self, dst: int, body: bytes) -> None:
        self.net.put(self.party, dst, None, body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        said = self.net.said[src, self.party]
        self.net.wait(self.party, f"a word of {src}", lambda: bool(said))
        return said.popleft()

    def close(self, *, graceful: bool = True) -> None:
        return None


class ScriptedDesk:
    """A desk at which queries lie from a turn on that a test says; the first party finds at a turn that nobody asks."""

    def __init__(self, party: int, arrivals: Arrivals, idle_from: int) -> None:
        self._party, self._arrivals, self._idle_from = party, arrivals, idle_from
        self.turn = self.swept = 0
        self.beats: list[str] = []
        self.decided: dict[int, QueryBatch] = {}
        self.answered: dict[int, list[str]] = {}

    def word(self, step: int, idle_s: float) -> DeskWord:
        self.turn += 1
        gone = {q.id for batch in self.decided.values() for q in batch}
        here = [n for n, at in self._arrivals.items() if at.get(self._party, 1 << 30) <= self.turn]
        waiting = tuple(
            one for one in (WaitingQuery(f"{n:064x}", n % 2, 1 + n % 3) for n in here) if one.id not in gone
        )
        return DeskWord(waiting, self.decided.get(step), self.turn >= self._idle_from)

    def agree(self, words: Mapping[int, DeskWord], step: int, terms: BatchTerms) -> QueryBatch | None:
        before = {q.id for at, batch in self.decided.items() if at < step for q in batch}
        kept, refused = held_to(terms, words, before)
        assert not refused, "all three are honest"
        return agreed(kept, step, terms.most_rows)

    def decide(self, step: int, batch: QueryBatch) -> list[OpenedQuery]:
        self.decided[step] = batch
        found = []
        for query in batch:
            rings = np.random.default_rng(int(query.id, 16)).integers(-(1 << 20), 1 << 20, (3, query.rows, 64))
            mine, following = rings[self._party], rings[(self._party + 1) % 3]
            found.append(OpenedQuery(query.id, query.client, query.rows, mine, following))
        return found

    def deliver(self, answers: Sequence[tuple[OpenedQuery, str, bytes]]) -> None:
        self.answered[max(self.decided)] = [query.id for query, _, _ in answers]

    def forget_stale(self, common: Sequence[DeskWord]) -> None:
        self.swept += 1

    def figures(self) -> dict[str, Any]:
        return {"waiting": 0, "answered": 0, "clients": 0, "refused": 0}

    def open(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def forget(self, before: int) -> None: ...
    def close(self, patience_s: float = 0.0) -> None: ...


@dataclass
class Orders:
    """What comes where; ``ends``: which party wants to end the run from which turn of its waiting on; ``holds``: which
    wants to hold it, at which of the times that it is asked; ``silent``: who keeps back its messages of which kind."""

    arrivals: Arrivals = field(default_factory=dict)
    idle_from: int = 1 << 30
    ends: tuple[int, int] | None = None
    holds: tuple[int, range] = (0, range(0))
    silent: tuple[int, int] = (-1, -1)


def serve(folder: Path, seed: int, orders: Orders, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each party's outcome, desk, and the kinds of what it sent."""
    weights: tuple[Floats, ...] = tuple(initial_weights(find_model(JOB.model), 3, 16))
    fleet = Fleet(folder, None, JOB, direct_links(), shared(weights, JOB))  # type: ignore[arg-type]
    site = folder / "site"
    site.mkdir()
    (site / CODE_HASH).write_text(CODE)
    net, found, desks = LateNet(seed), list[Any]([None] * 3), dict[str, ScriptedDesk]()

    def desk(at: Path, served: Any, *, party: int, **more: Any) -> ScriptedDesk:
        desks[str(party)] = ScriptedDesk(party, orders.arrivals, orders.idle_from)
        return desks[str(party)]

    monkeypatch.setattr(served_session, "QueryDesk", desk)

    def work(party: int) -> None:
        recorder = LateRecorder()
        plane = LatePlane(net, party, recorder, orders.silent)
        try:
            spec = fleet.spec(party)
            fleet.dir(party).mkdir()
            with RunWriter.open(fleet.dir(party), spec.run, spec.rank, spec.coord, lead=spec.lead) as writer:
                asked = itertools.count()

                def held(run: str = spec.run) -> HaltRequest | None:
                    who, when = orders.holds
                    return HaltRequest("hold", "n1", run) if next(asked) in when and who == party else None

                beat = writer.heartbeat

                def beaten(step: int, phase: str, msg: str = "", **more: Any) -> bool:
                    desks[str(party)].beats.append(f"{phase} {msg}")
                    return beat(step, phase, msg, **more)

                writer.heartbeat = beaten  # type: ignore[method-assign]
                writer.poll_halt = held  # type: ignore[method-assign]
                place = RankAddress(Coord(0, party, 0, 0), Topology())
                ranks = Ranks(PartyGroups.open(place, on_event=lambda name, fields: None))
                table = StepConsensus(plane, spec.run)

                def ends() -> bool:
                    return (
                        orders.ends is not None and orders.ends[0] == party and desks[str(party)].turn >= orders.ends[1]
                    )

                session = ServedSession(spec, admit(spec, site=site), writer, plane, recorder, table, ranks, ends)
                try:
                    found[party] = session.run(), desks[str(party)], plane.sent
                finally:
                    session.close()
        except Exception as error:  # noqa: BLE001  # raised again in the test's own thread
            found[party] = error
        finally:
            net.leave(party)

    threads = [threading.Thread(target=work, args=(party,)) for party in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, Exception):
            raise one
    assert not net.stuck
    return found


ORDERS = {
    "nobody asks": Orders(idle_from=3),
    "it comes to one party after the other": Orders({1: {0: 1, 1: 4, 2: 2}, 2: {0: 5, 1: 1, 2: 3}}, idle_from=9),
    "one comes to a single party": Orders({1: {1: 1}, 2: {0: 2, 1: 2, 2: 2}}, idle_from=6),
    "one wants to hold while nobody asks": Orders(idle_from=6, holds=(1, range(2, 5))),
    "one wants to hold as a batch begins": Orders({1: {0: 1, 1: 1, 2: 1}}, idle_from=4, holds=(2, range(1, 4))),
    "one wants to end while nobody asks": Orders(ends=(2, 4)),
    "one wants to end as a batch begins": Orders({1: {0: 1, 1: 1, 2: 1}, 2: {0: 3, 1: 3, 2: 3}}, ends=(1, 3)),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci(__file__)) for seed in (1, 2, 3))])
@pytest.mark.parametrize("name", ORDERS)
def test_nobody_waits_for_what_is_never_sent(
    name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = ORDERS[name]
    found = serve(tmp_path / "fleet", seed, orders, monkeypatch)
    outcomes, desks = [one[0] for one in found], [one[1] for one in found]
    assert {o.status for o in outcomes} == {"halted" if orders.ends else "done"}
    assert len({o.step for o in outcomes}) == 1
    assert desks[0].decided == desks[1].decided == desks[2].decided
    assert desks[0].answered == desks[1].answered == desks[2].answered
    sent = [kind for one in found for kind in one[2]]
    assert sent.count(kinds.PROOF) > sent.count(kinds.AUDIT) > 0 or orders.ends  # somebody was drawn, and proved
    everywhere = {f"{n:064x}" for n, at in orders.arrivals.items() if len(at) == 3}
    if not orders.ends:
        assert outcomes[0].step == JOB.steps
        assert all(desk.swept == desk.turn for desk in desks)  # also where others' queries keep it busy
        assert {one for batch in desks[0].answered.values() for one in batch} == everywhere


def test_who_waits_for_long_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines a second of each worker went into the journal for as long as nobody asked: 230 MB a day."""
    monkeypatch.setattr(writer_module, "SAME_STEP_EVERY_S", 0.0)
    found = serve(tmp_path / "fleet", 0, Orders(idle_from=60, holds=(1, range(20, 22))), monkeypatch)
    for _, desk, _ in found:
        assert desk.turn > 60
        waiting = [beat for beat in desk.beats if beat.startswith("serve 0 queries")]
        assert 0 < len(waiting) <= 2 + JOB.steps
        assert desk.beats[desk.beats.index("serve released") + 1].startswith("serve 0 queries")


@pytest.mark.parametrize("kind", [kinds.COIN, kinds.AUDIT, kinds.PROOF])
def test_what_is_kept_back_is_found_to_be_waited_for(
    kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerLostError, match=f"a wait for ever: .*kind={kind}"):
        serve(tmp_path / "fleet", 0, Orders(idle_from=2, silent=(1, kind)), monkeypatch)
