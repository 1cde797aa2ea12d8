"""What the three parties tell each other beside the protocol: votes on going on, roots, the resume step, the end.

At the start of a step every party sends its vote, with its signed root of the epoch before as a note; at the end of
the step it reads the other two. The largest vote wins, so all stop at the same step, and a fork of the transcript is
found one step after it happened, without a round of its own. The messages are those of
``contract.peer_protocol.peer_messages``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from uvcc_engine.contract.errors import PeerLostError, ProtocolError, UvccError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.peer_protocol import peer_messages
from uvcc_engine.contract.peer_protocol.peer_messages import (
    HOLD,
    AttachedNote,
    BatchTurn,
    HoldVote,
    PeerMessage,
    Resume,
    StepVote,
    Stopped,
    Vote,
)
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.run_files.writer import error_fields
from uvcc_engine.plane.api import Plane

HOLD_ROUND_S: Final = 0.05
_CHECK_S: Final = 1.0
_LAST_WORDS_S: Final = 0.5
_SWAP_S: Final = 30.0  # what is exchanged after a failure: who is honest found it as well, but may be slow
_STATEMENTS: Final = 64  # of one peer, about checkpoints that are not common yet
M = TypeVar("M", bound=PeerMessage)


class PeerStoppedError(PeerLostError):
    """Another party ended its run and said why; ``exit_code`` as for a lost peer."""

    def __init__(self, what: str, hint: str = "", *, party: int, halted: bool = False) -> None:
        """``halted``: it was asked to halt before the first step."""
        super().__init__(what, hint, party=party)
        self.halted = halted


class PeerSilentError(PeerLostError):
    """A peer whose link is up said nothing for as long as it was waited for."""


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

    def say(self, message: PeerMessage, notes: Mapping[int, bytes] | None = None) -> None:
        """Send one message to both peers; ``notes`` gives each the bytes that go with it."""
        for peer in self.peers:
            if notes is not None and isinstance(message, StepVote | BatchTurn | AttachedNote):
                message = replace(message, note=notes.get(peer, b""))
            self._plane.send_control(peer, peer_messages.encode(self._run, message))

    def hear(self, due: M, within_s: float | None = None) -> dict[int, M]:
        """The next message of each peer, which must be of the topic and about the step (turn, attempt) of ``due``.

        Raises ProtocolError if it is not, PeerStoppedError if the peer says that it stopped, PeerSilentError if none
        comes ``within_s``, PeerLostError.
        """
        return {peer: self._hear_from(peer, due, self._wait_s if within_s is None else within_s) for peer in self.peers}

    def _hear_from(self, peer: int, due: M, within_s: float) -> M:
        message = self._receive(peer, within_s)
        if not isinstance(message, type(due)) or (message.topic, message.place) != (due.topic, due.place):
            raise ProtocolError(
                f"P{peer} is at {peer_messages.where(message)} where {peer_messages.where(due)} was due",
                "all parties must run the same code from the same checkpoint",
                party=peer,
            )
        return message

    def _receive(self, peer: int, timeout: float) -> PeerMessage:
        heard = peer_messages.parse(self._await_body(peer, timeout))
        if isinstance(heard, Malformed):
            raise ProtocolError(f"P{peer} sent {heard.why}", party=peer)
        if heard.run != self._run:
            theirs = heard.run[:80]
            raise ProtocolError(f"P{peer} speaks for run {theirs!r}, this is {self._run!r}", party=peer)
        if isinstance(heard.message, Stopped):
            raise _stopped(heard.message, peer)
        return heard.message

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
                    raise PeerSilentError(what, "look at its pod", party=peer) from None
                self._check()

    def tell_stopped(self, error: BaseException, *, halted: bool = False) -> None:
        """Tell both peers why this party stops, so that they end within seconds. Never raises on a dead link.

        ``halted``: it was asked to halt before the first step.
        """
        told = error_fields(error)
        self._send_to_whom_listens(Stopped(told["error"], told.get("hint", ""), told.get("party"), halted))

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
        self.say(StepVote(step, mine, stated), notes)

    def close_step(self, step: int, mine: Vote) -> tuple[Vote, dict[int, bytes]]:
        """Read both votes of this step; returns the largest and the notes that came with them."""
        heard = self.hear(StepVote(step))
        return self.decide(mine, heard), {p: m.note for p, m in heard.items()}

    def decide(self, mine: Vote, heard: Mapping[int, StepVote]) -> Vote:
        """The largest of the votes of a step, which the whole fleet follows."""
        for peer, message in heard.items():
            if message.stated:
                self.keep_statement(peer, message.vote.saved, message.stated)
        return self.among_ranks(_largest([mine, *(m.vote for m in heard.values())]))

    def keep_statement(self, peer: int, saved: int, stated: str) -> None:
        self.statements[peer, saved] = stated
        mine = [at for at in self.statements if at[0] == peer]
        for at in mine[:-_STATEMENTS]:
            del self.statements[at]

    def exchange(self, due: AttachedNote, notes: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a note to each peer and wait for theirs of the same topic and step."""
        self.say(due, notes)
        return {p: m.note for p, m in self.hear(due).items()}

    def swap(self, peer: int, mine: AttachedNote) -> bytes | None:
        """Exchange a note with one peer only; None if it does not answer in kind within half a minute."""
        try:
            self._plane.send_control(peer, peer_messages.encode(self._run, mine))
            found = self._receive(peer, _SWAP_S)
        except (PeerLostError, ProtocolError):
            return None
        fits = isinstance(found, AttachedNote) and (found.topic, found.step) == (mine.topic, mine.step)
        return found.note if isinstance(found, AttachedNote) and fits else None

    def trade(self, mine: AttachedNote) -> dict[int, bytes]:
        """Exchange a note with both peers at the end of a step that failed; those that answer within half a minute.

        What else they had said of that step is passed over.
        """
        found: dict[int, bytes] = {}
        self._send_to_whom_listens(mine)
        for peer in self.peers:
            deadline = time.monotonic() + _SWAP_S
            try:
                while (left := deadline - time.monotonic()) > 0:
                    heard = self._receive(peer, left)
                    if isinstance(heard, AttachedNote) and (heard.topic, heard.step) == (mine.topic, mine.step):
                        found[peer] = heard.note
                        break
            except (PeerLostError, ProtocolError):
                continue
        return found

    def _send_to_whom_listens(self, message: PeerMessage) -> None:
        for peer in self.peers:
            with contextlib.suppress(UvccError, OSError):  # that peer is gone; the other may still listen
                self._plane.send_control(peer, peer_messages.encode(self._run, message))

    def hold(self, step: int, poll: Callable[[], Vote], stay: Callable[[Vote], None]) -> Vote:
        """Stay in a vote loop until all parties want to go on or one wants to halt; returns that decision.

        ``poll`` reads the own vote, ``stay`` is called with every round's decision (heartbeat).
        """
        pause = threading.Event()  # its timed wait ends early when a signal arrives
        turn = 0
        while True:
            mine = poll()
            said = HoldVote(step, turn, mine)
            self.say(said)
            decision = self.among_ranks(_largest([mine, *(m.vote for m in self.hear(said).values())]))
            if decision.vote != HOLD:
                return decision
            stay(decision)
            pause.wait(HOLD_ROUND_S)
            turn += 1

    def turn(self, said: BatchTurn, notes: Mapping[int, bytes]) -> tuple[Vote, dict[int, bytes]]:
        """One turn of waiting for queries: the largest vote, and what each peer said of its own."""
        self.say(said, notes)
        heard = self.hear(said)
        decision = self.among_ranks(_largest([said.vote, *(m.vote for m in heard.values())]))
        return decision, {p: m.note for p, m in heard.items()}

    def agree_step(
        self, mine: Resume, *, among_ranks: Callable[[set[int]], set[int]] = lambda steps: steps
    ) -> tuple[int, set[int]]:
        """The newest checkpoint step that all three parties hold verified (0 = from the start), and all such steps.

        Attempt, policy and start must be the same at all three, else ProtocolError; so must what is proved
        (``mine.verify``, as the policy says), and a party that works otherwise is named. ``among_ranks`` takes the
        steps that the three workers here have in common and returns those of the whole fleet.
        """
        self.say(mine)
        common = set(mine.steps)
        for peer, theirs in self.hear(mine).items():
            if theirs.verify != mine.verify:
                raise ProtocolError(
                    f"P{peer} works with verify {theirs.verify!r}, the policy says {mine.verify!r}",
                    "every party proves what the policy says; nothing was computed",
                    party=peer,
                )
            common &= set(theirs.steps)
        common = among_ranks(common)
        return max(common, default=0), common


def _largest(votes: list[Vote]) -> Vote:
    """The largest vote; its nonce is the first non-empty one among equals (the own vote comes first).

    ``saved`` is the smallest: the checkpoint that all of them have.
    """
    top = max(v.vote for v in votes)
    nonces = [v.nonce for v in votes if v.vote == top and v.nonce]
    return Vote(top, nonces[0] if nonces else "", min(v.saved for v in votes))


def _stopped(last: Stopped, peer: int) -> PeerStoppedError:
    named = peer if last.party is None else last.party
    what = f"P{peer} {'stopped' if named == peer else 'says'}: {last.error or 'no reason given'}"  # no evidence
    return PeerStoppedError(what, last.hint, party=named, halted=last.halted)
