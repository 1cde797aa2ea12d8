"""Votes, digests and the resume step among three parties."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.contract.peer_protocol.peer_messages import (
    GO_ON,
    HALT,
    HOLD,
    AttachedNote,
    Resume,
    StepVote,
    Topic,
    Vote,
)
from uvcc_engine.contract.run_files.control import HaltRequest
from uvcc_engine.plane.api import Buffer, Tag
from uvcc_engine.worker.consensus import PeerStoppedError, StepConsensus


class ControlOnly:
    """A plane whose control stream is a queue per pair; it carries nothing else."""

    def __init__(self, party: int, mail: dict[tuple[int, int], queue.Queue[bytes]]) -> None:
        self.party = party
        self.mail = mail

    def send_control(self, dst: int, body: bytes) -> None:
        self.mail[(self.party, dst)].put(body)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        try:
            return self.mail[(src, self.party)].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def send(self, dst: int, tag: Tag, payload: Buffer) -> None:
        raise AssertionError("votes are never part of the transcript")

    def recv(self, src: int, tag: Tag) -> memoryview:
        raise AssertionError("votes are never part of the transcript")

    def close(self, *, graceful: bool = True) -> None:
        return


def mailboxes() -> dict[tuple[int, int], queue.Queue[bytes]]:
    return {(a, b): queue.Queue() for a in range(3) for b in range(3) if a != b}


def tables(
    run: str = "r", wait_s: float = 120.0, mail: dict[tuple[int, int], queue.Queue[bytes]] | None = None
) -> list[StepConsensus]:
    mail = mailboxes() if mail is None else mail
    return [StepConsensus(ControlOnly(p, mail), run, wait_s=wait_s) for p in range(3)]


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run one callable per party at the same time; results or exceptions in order."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ProtocolError, PeerLostError) as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(caught, work))


def step(table: StepConsensus, number: int, vote: Vote) -> Vote:
    table.open_step(number, vote, {p: b"root of P%d for P%d" % (table.party, p) for p in table.peers})
    decision, notes = table.close_step(number, vote)
    assert notes == {p: b"root of P%d for P%d" % (p, table.party) for p in table.peers}
    return decision


@pytest.mark.parametrize("votes", [(0, 0, 0), (0, 1, 0), (2, 0, 1), (1, 1, 0)])
def test_the_largest_vote_decides_for_all(votes: tuple[int, int, int]) -> None:
    mine = [Vote(v, f"n{v}" if v else "") for v in votes]
    got = together([lambda t=t, v=v: step(t, 3, v) for t, v in zip(tables(), mine, strict=True)])
    assert got == [Vote(max(votes), f"n{max(votes)}" if max(votes) else "")] * 3


def test_an_exchange_gives_each_peer_its_own_note() -> None:
    notes = [{p: bytes([t.party, p]) for p in t.peers} for t in tables()]
    got = together(
        [lambda t=t, n=n: t.exchange(AttachedNote(Topic.ROOT, 2), n) for t, n in zip(tables(), notes, strict=True)]
    )
    assert got == [{p: bytes([p, me]) for p in range(3) if p != me} for me in range(3)]


def test_a_party_at_another_step_or_run_is_named() -> None:
    mail = mailboxes()
    t = tables(mail=mail)
    got = together([lambda i=i: step(t[i], 5 if i < 2 else 6, Vote()) for i in range(3)])
    assert [e.party for e in got] == [2, 2, 0]
    strangers = [StepConsensus(ControlOnly(p, mail), "other" if p == 1 else "r", wait_s=120.0) for p in range(3)]
    for q in mail.values():
        while not q.empty():
            q.get()
    got = together([lambda i=i: step(strangers[i], 1, Vote()) for i in range(3)])
    assert got[0].party == 1
    assert "speaks for run 'other'" in got[0].what


def test_hold_lasts_until_every_party_is_released() -> None:
    scripts = [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    stays: list[list[Vote]] = [[], [], []]

    def run(i: int, t: StepConsensus) -> Vote:
        turns = iter(scripts[i])

        def poll() -> Vote:
            v = next(turns)
            return Vote(v, "n" if v else "")

        return t.hold(7, poll, stays[i].append)

    assert together([lambda i=i, t=t: run(i, t) for i, t in enumerate(tables())]) == [Vote()] * 3
    assert stays == [[Vote(HOLD, "n")] * 2] * 3


def test_one_halt_ends_a_hold_for_all() -> None:
    got = together(
        [
            lambda i=i, t=t: t.hold(7, lambda: Vote(HALT if i == 1 else HOLD, f"n{i}"), lambda v: None)
            for i, t in enumerate(tables())
        ]
    )
    assert got == [Vote(HALT, "n1")] * 3


def test_the_newest_common_checkpoint_is_chosen() -> None:
    for steps, wanted in (([[30, 20, 10], [20, 10], [30, 20]], 20), ([[30], [20], [10]], 0), ([[], [5], [5]], 0)):
        got = together([lambda t=t, s=s: t.agree_step(Resume(tuple(s))) for t, s in zip(tables(), steps, strict=True)])
        assert [step for step, _ in got] == [wanted] * 3
        assert {frozenset(common) for _, common in got} == {frozenset(set.intersection(*map(set, steps)))}


def test_a_party_that_stops_tells_why_and_who() -> None:
    t = tables()
    t[0].tell_stopped(ProtocolError("P1 opened two values", "look at P1", party=1))
    with pytest.raises(PeerStoppedError) as error:
        t[2].hear(StepVote(1))
    assert error.value.party == 1
    assert error.value.what == "P0 says: P1 opened two values"
    lost = PeerLostError("P0 is gone", party=0)
    found = t[1].reason_of(lost)
    assert (found.what, found.party) == ("P0 says: P1 opened two values", 1)
    assert t[1].reason_of(lost) is lost  # nothing more was said


def test_silence_and_nonsense_are_named() -> None:
    t = tables(wait_s=0.01)
    with pytest.raises(PeerLostError, match="P1 said nothing"):
        t[0].hear(StepVote(0))
    bad_vote = {"topic": "vote", "run": "r", "vote": 9, "nonce": "", "step": 1}
    for body in (b"\xff", b"[1]", json.dumps(bad_vote).encode()):
        mail = mailboxes()
        mail[1, 0].put(body)
        t = tables(mail=mail)
        t[2].say(StepVote(1))
        with pytest.raises(ProtocolError) as error:
            t[0].close_step(1, Vote())
        assert error.value.party == 1


def test_votes_follow_the_control_file() -> None:
    assert Vote.of(None) == Vote(GO_ON)
    assert Vote.of(HaltRequest("hold", "n")) == Vote(HOLD, "n")
    assert Vote.of(HaltRequest("release", "n")).vote == GO_ON
    assert Vote.of(HaltRequest("halt", "n")).mode == "halt"


def _says(body: bytes, **more: Any) -> StepConsensus:
    """The table of party 0, to whom party 1 says this and party 2 something right."""
    mail: dict[tuple[int, int], queue.Queue[bytes]] = {
        (a, b): queue.Queue() for a in range(3) for b in range(3) if a != b
    }
    mail[1, 0].put(body)
    right = {"topic": "vote", "run": "r", "step": 3, "vote": 0, "nonce": "", "saved": -1, "stated": "", "note": ""}
    mail[2, 0].put(json.dumps(right | more).encode())
    return StepConsensus(ControlOnly(0, mail), "r", wait_s=0.2)


ODD_FIELDS: list[dict[str, Any]] = [
    {"vote": True},
    {"vote": 1.0},
    {"vote": 3},
    {"vote": -1},
    {"vote": [0]},
    {"vote": None},
    {"step": 3.0},
    {"step": "3"},
    {"step": True},
    {"step": {}},
    {"nonce": 7},
    {"nonce": "n" * 129},
    {"nonce": "\x1b[2J"},
    {"saved": True},
    {"saved": -2},
    {"saved": 1e3},
    {"saved": 10**400},
    {"saved": None},
    {"stated": 3},
    {"stated": "s" * 70_000},
    {"note": 3},
    {"note": None},
    {"note": "@"},
    {"note": "ä"},
    {"note": ["x"]},
    {"topic": 3},
    {"topic": "x" * 100_000},
    {"run": None},
    {"run": "other\x1b[31m" * 1000},
    {"run": ["r"]},
]


@pytest.mark.parametrize("odd", ODD_FIELDS, ids=lambda odd: str(odd)[:40])
def test_an_odd_field_of_a_vote_is_a_protocol_error_that_names_its_sender(odd: dict[str, Any]) -> None:
    right = {"topic": "vote", "run": "r", "step": 3, "vote": 0, "nonce": "", "saved": -1, "stated": "", "note": ""}
    _says(json.dumps(right).encode()).close_step(3, Vote())
    with pytest.raises(ProtocolError) as raised:
        _says(json.dumps({**right, **odd}).encode()).close_step(3, Vote())
    assert raised.value.party == 1
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b'{"topic":NaN}', b"\xff\xfe", b"9" * 6000, b'"x"', b"{}"],
    ids=lambda b: str(b[:12]),
)
def test_what_is_no_message_at_all_is_a_protocol_error_too(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed") as raised:
        _says(body).close_step(3, Vote())
    assert raised.value.party == 1


@pytest.mark.parametrize("steps", [None, "12", {"1": 1}, [True], [1.0], [-1], [1 << 60], [None], [0] * 200_000, [[1]]])
def test_an_odd_list_of_checkpoints_is_a_protocol_error(steps: Any) -> None:
    with pytest.raises(ProtocolError, match="list of checkpoints") as raised:
        said = json.dumps({"topic": "resume", "run": "r", "steps": steps}).encode()
        _says(said, topic="resume", steps=[1]).agree_step(Resume((1,)))
    assert raised.value.party == 1


def test_the_last_words_of_a_peer_are_short_and_clean() -> None:
    words: dict[str, Any] = {"topic": "stopped", "run": "r", "error": "\x1b[2J" + "x" * 10_000, "party": True}
    with pytest.raises(PeerStoppedError) as raised:
        _says(json.dumps({**words, "hint": {"a": 1}}).encode()).hear(StepVote(0))
    assert raised.value.party == 1
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_statements_of_a_peer_do_not_pile_up() -> None:
    table = tables()[0]
    for step in range(500):
        table.keep_statement(1, step, "s")
        table.keep_statement(2, step, "s")
    assert len(table.statements) == 128
    assert (1, 499) in table.statements


class LateAnswer(ControlOnly):
    """One that hands a message over when it was asked for that many seconds in vain. No second of them passes."""

    def __init__(self, party: int, mail: dict[tuple[int, int], queue.Queue[bytes]], late_s: float) -> None:
        super().__init__(party, mail)
        self._left = dict.fromkeys((p for p in range(3) if p != party), late_s)

    def recv_control(self, src: int, timeout: float | None = None) -> bytes:
        if self._left[src] > 0:
            self._left[src] -= timeout or 0.0
            raise TimeoutError
        return super().recv_control(src, timeout)


def test_what_is_exchanged_after_a_failure_waits_for_a_peer_that_is_slow() -> None:
    """It found the same failure: a fork without the message that differs, a finding without its statement."""
    mail = mailboxes()
    slow = StepConsensus(LateAnswer(0, mail, 20.0), "r")
    for peer in slow.peers:
        StepConsensus(ControlOnly(peer, mail), "r").say(AttachedNote(Topic.FINDING, 3, b"signed by P%d" % peer))
    assert slow.trade(AttachedNote(Topic.FINDING, 3, b"mine")) == {1: b"signed by P1", 2: b"signed by P2"}
    slow = StepConsensus(LateAnswer(0, mail, 20.0), "r")
    StepConsensus(ControlOnly(1, mail), "r").say(AttachedNote(Topic.DISPUTE, 3, b"its leaves"))
    assert slow.swap(1, AttachedNote(Topic.DISPUTE, 3, b"mine")) == b"its leaves"
