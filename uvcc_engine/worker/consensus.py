"""What the three parties tell each other beside the protocol: votes on going on, roots, the resume step, the end.

At the start of a step every party sends its vote, with its signed root of the epoch before as a note; at the end of
the step it reads the other two. The largest vote wins, so all stop at the same step, and a fork of the transcript is
found one step after it happened, without a round of its own. Messages are JSON on the plane's control stream: sealed,
in order, never part of the transcript.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import PeerLostError, ProtocolError, UvccError
from uvcc_engine.contract.job.proof_mode import OFF
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.run_files.control import MODES, HaltRequest
from uvcc_engine.contract.run_files.writer import error_fields
from uvcc_engine.plane.api import Plane
from uvcc_engine.worker import peer_messages

GO_ON: Final = 0
HOLD: Final = 1
HALT: Final = 2
HOLD_ROUND_S: Final = 0.05
_CHECK_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5
_SWAP_S: Final = 5.0
_STATEMENTS: Final = 64  # of one peer, about checkpoints that are not common yet
_NONCE: Final = 128


@dataclass(frozen=True, slots=True)
class Vote:
    """What a party wants (0 go on, 1 hold, 2 halt) and the halt request's nonce, if one caused it.

    ``saved``: the step of the newest checkpoint on its disk, -1 if there is none.
    """

    vote: int = GO_ON
    nonce: str = ""
    saved: int = -1

    @classmethod
    def of(cls, request: HaltRequest | None) -> Vote:
        """The vote that a control file asks for."""
        return cls() if request is None else cls(request.vote, request.nonce)

    @property
    def mode(self) -> str:
        return MODES[self.vote]


class PeerStoppedError(PeerLostError):
    """Another party ended its run and said why; ``exit_code`` as for a lost peer."""


class StepConsensus:
    """The control conversation of one party with the other two.

    ``wait_s`` bounds every wait for a message; the plane itself reports a dead peer earlier. ``check`` is called once a
    second while it waits, and may raise to give up. ``among_ranks`` takes what the three workers here decided and
    returns what the whole fleet decides; set it where a party has several ranks.
    """

    def __init__(
        self, plane: Plane, run: str, *, wait_s: float = 900.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self.party = plane.party
        self.peers = tuple(p for p in range(PARTIES) if p != plane.party)
        self._plane = plane
        self._run = run
        self._wait_s = wait_s
        self._check = check
        self.among_ranks: Callable[[Vote], Vote] = lambda vote: vote
        self.statements: dict[tuple[int, int], str] = {}
        """What peers signed about their checkpoints, by (party, step)."""

    # -- messages ----------------------------------------------------------------------------------------------------

    def say(self, topic: str, per_peer: Mapping[int, Mapping[str, Any]] | None = None, **fields: Any) -> None:
        """Send one message to both peers; ``per_peer`` adds the fields that differ between them."""
        for peer in self.peers:
            more = per_peer[peer] if per_peer else {}
            self._plane.send_control(peer, _encode({"topic": topic, "run": self._run, **fields, **more}))

    def hear(self, topic: str, **expected: Any) -> dict[int, dict[str, Any]]:
        """The next message of each peer, which must be of this topic and carry the expected fields.

        Raises ProtocolError if it is not, PeerStoppedError if the peer says that it stopped, PeerLostError.
        """
        found: dict[int, dict[str, Any]] = {}
        for peer in self.peers:
            message = self._receive(peer, self._wait_s)
            if message["topic"] != topic or not all(peer_messages.same(message.get(k), v) for k, v in expected.items()):
                where = ", ".join(f"{k} {v}" for k, v in expected.items())
                topic_there, step_there = message["topic"], message.get("step", "")
                at = f"{peer_messages.shown(topic_there, 40)} {peer_messages.shown(step_there, 40)}".strip()
                raise ProtocolError(
                    f"P{peer} is at {at} where {topic} {where} was due".replace("  ", " "),
                    "all parties must run the same code from the same checkpoint",
                    party=peer,
                )
            found[peer] = message
        return found

    def _receive(self, peer: int, timeout: float) -> dict[str, Any]:
        message = peer_messages.message(self._await_body(peer, timeout), peer)
        if message["run"] != self._run:
            theirs = peer_messages.shown(message["run"], 80)
            raise ProtocolError(f"P{peer} speaks for run {theirs!r}, this is {self._run!r}", party=peer)
        if message["topic"] == "stopped":
            raise _stopped(message, peer)
        return message

    def _await_body(self, peer: int, timeout: float) -> bytes:
        left = timeout
        while True:
            part = min(left, _CHECK_S)
            try:
                return self._plane.recv_control(peer, part)
            except TimeoutError:
                left -= part
                if left <= 0:
                    what = f"P{peer} said nothing for {timeout:g} s"
                    raise PeerLostError(what, "look at its pod", party=peer) from None
                self._check()

    def tell_stopped(self, error: BaseException) -> None:
        """Tell both peers why this party stops, so that they end within seconds. Never raises on a dead link."""
        for peer in self.peers:
            try:
                self._plane.send_control(peer, _encode({"topic": "stopped", "run": self._run, **error_fields(error)}))
            except (UvccError, OSError):
                continue  # that peer is gone; the other may still listen

    def reason_of(self, error: PeerLostError) -> PeerLostError:
        """Why a peer is gone: what it or the third party said before it went, else ``error`` itself."""
        for peer in sorted(self.peers, key=lambda p: p != error.party):
            deadline = time.monotonic() + _LAST_WORDS_S
            while (left := deadline - time.monotonic()) > 0:
                try:
                    self._receive(peer, left)
                except PeerStoppedError as stopped:
                    return stopped
                except (UvccError, OSError):
                    break
        return error

    # -- steps -------------------------------------------------------------------------------------------------------

    def open_step(self, step: int, mine: Vote, notes: Mapping[int, bytes], stated: str = "") -> None:
        """Send this step's vote, with a note to each peer (``notes`` may be empty).

        ``stated``: the signed statement about the checkpoint of ``mine.saved``; peers find it in their ``statements``.
        """
        self.say("vote", _attached(self.peers, notes), step=step, stated=stated, **_vote_json(mine))

    def close_step(self, step: int, mine: Vote) -> tuple[Vote, dict[int, bytes]]:
        """Read both votes of this step; returns the largest and the notes that came with them."""
        heard = self.hear("vote", step=step)
        for peer, message in heard.items():
            if stated := peer_messages.text(message.get("stated", ""), peer, "statement", peer_messages.MOST_TEXT):
                self._keep(peer, _vote_of(message, peer).saved, stated)
        decision = self.among_ranks(_largest([mine, *(_vote_of(m, p) for p, m in heard.items())]))
        return decision, {p: peer_messages.note(m, p) for p, m in heard.items()}

    def _keep(self, peer: int, saved: int, stated: str) -> None:
        self.statements[peer, saved] = stated
        mine = [at for at in self.statements if at[0] == peer]
        for at in mine[:-_STATEMENTS]:
            del self.statements[at]

    def exchange(self, topic: str, notes: Mapping[int, bytes], **expected: Any) -> dict[int, bytes]:
        """Send a note to each peer and wait for theirs of the same topic and ``expected`` fields."""
        self.say(topic, _attached(self.peers, notes), **expected)
        return {p: peer_messages.note(m, p) for p, m in self.hear(topic, **expected).items()}

    def swap(self, peer: int, topic: str, note: bytes, **expected: Any) -> bytes | None:
        """Exchange a note with one peer only; None if it does not answer in kind within seconds."""
        body = {"topic": topic, "run": self._run, "note": base64.b64encode(note).decode(), **expected}
        try:
            self._plane.send_control(peer, _encode(body))
            message = self._receive(peer, _SWAP_S)
            if message["topic"] != topic or not all(peer_messages.same(message.get(k), v) for k, v in expected.items()):
                return None
            return peer_messages.note(message, peer)
        except (PeerLostError, ProtocolError):
            return None

    def hold(self, step: int, poll: Callable[[], Vote], stay: Callable[[Vote], None]) -> Vote:
        """Stay in a vote loop until all parties want to go on or one wants to halt; returns that decision.

        ``poll`` reads the own vote, ``stay`` is called with every round's decision (heartbeat).
        """
        pause = threading.Event()  # its timed wait ends early when a signal arrives
        turn = 0
        while True:
            mine = poll()
            self.say("hold", step=step, turn=turn, **_vote_json(mine))
            heard = self.hear("hold", step=step, turn=turn)
            decision = self.among_ranks(_largest([mine, *(_vote_of(m, p) for p, m in heard.items())]))
            if decision.vote != HOLD:
                return decision
            stay(decision)
            pause.wait(HOLD_ROUND_S)
            turn += 1

    def agree_step(
        self,
        steps: list[int],
        *,
        among_ranks: Callable[[set[int]], set[int]] = lambda steps: steps,
        verify: str = OFF,
        **expected: Any,
    ) -> tuple[int, set[int]]:
        """The newest checkpoint step that all three parties hold verified (0 = from the start), and all such steps.

        ``verify``: what the policy has proved; a party that works otherwise is named.

        ``expected`` (attempt, policy hash) must be the same at all three, else ProtocolError. ``among_ranks`` takes the
        steps that the three workers here have in common and returns those of the whole fleet.
        """
        self.say("resume", steps=steps, verify=verify, **expected)
        common = set(steps)
        for peer, message in self.hear("resume", **expected).items():
            if (theirs := message.get("verify", OFF)) != verify:
                shown = peer_messages.shown(theirs, 40)
                raise ProtocolError(
                    f"P{peer} works with verify {shown!r}, the policy says {verify!r}",
                    "every party proves what the policy says; nothing was computed",
                    party=peer,
                )
            common &= peer_messages.steps(message.get("steps"), peer)
        common = among_ranks(common)
        return max(common, default=0), common


def _encode(message: Mapping[str, Any]) -> bytes:
    return sorted_json(message).encode()


def _attached(peers: tuple[int, ...], notes: Mapping[int, bytes]) -> dict[int, dict[str, str]]:
    return {p: {"note": base64.b64encode(notes.get(p, b"")).decode()} for p in peers}


def _vote_json(vote: Vote) -> dict[str, Any]:
    return {"vote": vote.vote, "nonce": vote.nonce, "saved": vote.saved}


def _vote_of(message: Mapping[str, Any], peer: int) -> Vote:
    vote = peer_messages.number(message.get("vote"), peer, "vote", low=GO_ON, high=HALT)
    nonce = peer_messages.text(message.get("nonce"), peer, "vote", _NONCE)
    saved = peer_messages.number(message.get("saved", -1), peer, "vote", low=-1)
    if not nonce.isprintable():
        raise ProtocolError(f"P{peer} sent a malformed vote", party=peer)
    return Vote(vote, nonce, saved)


def _largest(votes: list[Vote]) -> Vote:
    """The largest vote; its nonce is the first non-empty one among equals (the own vote comes first).

    ``saved`` is the smallest: the checkpoint that all of them have.
    """
    top = max(v.vote for v in votes)
    nonces = [v.nonce for v in votes if v.vote == top and v.nonce]
    return Vote(top, nonces[0] if nonces else "", min(v.saved for v in votes))


def _stopped(message: Mapping[str, Any], peer: int) -> PeerStoppedError:
    party = message.get("party")
    named = next((p for p in range(PARTIES) if peer_messages.same(party, p)), peer)
    what = peer_messages.shown(message.get("error")) or "no reason given"
    what = f"P{peer} {'stopped' if named == peer else 'says'}: {what}"  # its word, not evidence
    return PeerStoppedError(what, peer_messages.shown(message.get("hint")), party=named)
