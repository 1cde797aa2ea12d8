"""What a protocol runs on: the party's place, its random streams, its message rounds, and what they cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger, needs_claim
from uvcc_engine.mpc.foundation.prg import OWN, STREAMS, Draws, Forecaster, PairKeys, derive_key
from uvcc_engine.mpc.foundation.range_watch import RangeWatch
from uvcc_engine.mpc.foundation.rounds import Fork, MpcProtocol, Round, RoundInbox, RoundOutbox, message_kind, par
from uvcc_engine.mpc.foundation.staging import HostStaging, Staging, staging_for
from uvcc_engine.mpc.kernels.choose import kernels_for
from uvcc_engine.plane.api import Plane, Tag
from uvcc_engine.transcript.formats import kinds

__all__ = ["MpcProtocol", "ProtocolProgress", "Round", "Runtime", "par"]

T = TypeVar("T")


class ProtocolTask:
    """A protocol on its way: waiting for a round (``request``) or for its branches (``left``). ``promised``: entries
    that it and its branches sent as covered by claims; ``filed``: entries of the claims that they filed."""

    __slots__ = ("filed", "left", "parent", "place", "promised", "request", "results", "steps")

    def __init__(self, steps: Generator[Any, Any, Any], parent: ProtocolTask | None, place: int) -> None:
        self.steps = steps
        self.parent = parent
        self.place = place
        self.request: Round | None = None
        self.results: list[Any] = []
        self.left = self.promised = self.filed = 0


class Runtime:
    """One party's session of one (stage, tensor) subsession. Used by one thread."""

    def __init__(
        self,
        party: int,
        plane: Plane,
        keys: PairKeys,
        sid_sub: bytes,
        attempt: int = 0,
        *,
        stream: int = 0,
        device: str | torch.device = "cpu",
        prg: str = "aes",
        few_rounds: bool = True,
        staging: Staging | None = None,
        ahead: Forecaster | None = None,
    ) -> None:
        """``few_rounds``: where there is a choice, fewer rounds with more bytes and work. The same at all parties.

        ``staging``: the border between shares and messages, if not the device's own; ``ahead`` draws the next epoch's
        numbers beside this one, if it draws them where this runtime computes.
        """
        if party not in (0, 1, 2):
            raise ConfigError(f"party {party}", "there are three parties: 0, 1 and 2")
        if len(sid_sub) != 32:
            raise ConfigError(f"sid_sub has {len(sid_sub)} bytes", "use uvcc_engine.contract.ids.sid_sub")
        self.party = party
        self.next = (party + 1) % 3
        self.prev = (party + 2) % 3
        self.plane = plane
        self.stream = self._program = stream
        self._last_words = False
        self.device = torch.device(device)
        self.kernels = kernels_for(self.device)
        if prg not in STREAMS:
            raise ConfigError(f"random generator {prg!r}", f"one of: {', '.join(STREAMS)}")
        kind = STREAMS[prg]
        secrets = {party: keys.prev, self.next: keys.next, OWN: keys.own}
        labels = {party: f"component{party}", self.next: f"component{self.next}", OWN: f"own{party}"}
        self.streams = {
            c: kind(derive_key(secret, sid_sub, attempt, labels[c], kind.key_bytes), labels[c])
            for c, secret in secrets.items()
        }
        here = ahead if ahead is not None and ahead.device.type == self.device.type else None
        self.forecast = here.forecast(self.streams, stream) if here is not None else None
        self._epoch = -1
        self._op = 0
        self._sent = {self.next: 0, self.prev: 0}
        self._received = {self.next: 0, self.prev: 0}
        self.staging = staging_for(self.device) if staging is None else staging
        self._outbox = {self.next: RoundOutbox(self.staging), self.prev: RoundOutbox(self.staging)}
        self.few_rounds = few_rounds
        self.range_watch: RangeWatch | None = None  # only where one process holds all three parties
        self.ledger: ClaimLedger | None = None  # where products, or all messages, are to be proved
        self.instalment: Callable[[], ProtocolProgress[Any] | None] | None = None  # a part of the step's proof, if due
        self.rounds = 0
        self.bytes_sent = 0
        self.dealt_bytes = 0  # of them: a dealer's, which depend on no data
        self.messages = 0

    @property
    def epoch(self) -> int:
        """The epoch that is being computed, from 0; every message carries it."""
        return self._epoch

    @property
    def proves_everything(self) -> bool:
        """Whether no message may go that no claim covers: protocols then take their forms that can be proved."""
        return self.ledger is not None and self.ledger.everything

    def begin_epoch(self, epoch: int) -> None:
        """Enter ``epoch`` (the training step). Epochs only increase: a second visit would repeat masks.

        Raises ProtocolError for one.
        """
        if epoch <= self._epoch:
            raise ProtocolError(
                f"epoch {epoch} after epoch {self._epoch} would repeat masks",
                "open a new session to resume a checkpoint, or take the next attempt",
            )
        self._epoch = epoch
        self.stream, self._last_words = self._program, False
        self._op = 0
        self._sent = {self.next: 0, self.prev: 0}
        self._received = {self.next: 0, self.prev: 0}
        if self.forecast is not None:
            self.forecast.begin(epoch)

    def leave_program(self, stream: int) -> None:
        """Go on in a stream that no program uses, counting its messages from 0: nothing that a peer still sends or
        waits for in the program is taken for what follows, and what does not reach a peer any more ends nothing. There
        is no way back before the next epoch."""
        self.stream, self._last_words = stream, True
        self._sent = {self.next: 0, self.prev: 0}
        self._received = {self.next: 0, self.prev: 0}

    def beside(self, stream: int) -> Runtime:
        """A runtime of the same session in a stream of its own, which computes in the host's memory and counts what it
        costs by itself. It has no ledger, and is in no epoch yet. One for each stream: two would draw alike."""
        found = copy.copy(self)
        found.streams = {c: one.twin() for c, one in self.streams.items()}  # each gives its places in order
        found.device, found.forecast = torch.device("cpu"), None
        found.kernels, found.staging = kernels_for(found.device), staging_for(found.device)
        found._outbox = {peer: RoundOutbox(found.staging) for peer in self._outbox}
        found._sent, found._received = dict.fromkeys(self._sent, 0), dict.fromkeys(self._received, 0)
        found.stream = found._program = stream
        found._epoch, found._op, found._last_words = -1, 0, False
        found.ledger = found.instalment = found.range_watch = None
        found.rounds = found.bytes_sent = found.dealt_bytes = found.messages = 0
        return found

    def draws(self) -> Draws:
        """Random streams of the next operation. Every party must call this at the same place of the program."""
        if self._epoch < 0:
            self.begin_epoch(0)
        draws = Draws(self.streams, self._epoch, self.stream, self._op, self.device, self.forecast)
        self._op += 1
        return draws

    @property
    def on_processors(self) -> bool:
        """Whether shares lie in the host's memory."""
        return isinstance(self.staging, HostStaging)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Between two protocols: meanwhile compute, draw and send in the host's memory, as proofs do, whose loops are
        compiled for processors. What a protocol is given has to lie there."""
        if self.on_processors:
            yield
            return
        kept = self.device, self.kernels, self.staging, self._outbox, self.forecast
        self.device, self.forecast = torch.device("cpu"), None
        self.kernels, self.staging = kernels_for(self.device), staging_for(self.device)
        self._outbox = {peer: RoundOutbox(self.staging) for peer in self._outbox}
        try:
            yield
        finally:
            self.device, self.kernels, self.staging, self._outbox, self.forecast = kept

    def time_draws(self) -> None:
        """From now on measure the processor time of drawing random numbers; see :attr:`drawing_s`."""
        for stream in self.streams.values():
            stream.timed = True

    @property
    def drawing_s(self) -> float:
        """Processor seconds of this thread that went into random numbers while they were measured."""
        return sum(stream.seconds for stream in self.streams.values())

    def watch(self, z: Tensor, *, parties: int, shift: int) -> None:
        """Show a range watch, if there is one, this party's summand of what the next operation truncates."""
        if self.range_watch is not None:
            self.range_watch.note((self._epoch, self.stream, self._op), z, parties=parties, shift=shift)

    def run(self, steps: MpcProtocol[T]) -> T:
        """Drive a protocol to its result. One round at a time, at most a few messages per peer and round.

        Within a round every protocol is resumed as soon as its own parts are there, and what it sends next leaves at
        once if it is large: a vector in chunks flows through several rounds at a time. Protocols run in torch's
        inference mode: there are no gradients of ring elements, and small operations take a tenth less without.
        """
        progress = self.start(steps)
        while not progress.done:
            progress.advance()
        return progress.result

    def start(self, steps: MpcProtocol[T]) -> ProtocolProgress[T]:
        """Bring a protocol to its first round; one at a time. The caller advances it, and others on other streams."""
        if self._epoch < 0:
            self.begin_epoch(0)
        return ProtocolProgress(self, steps)

    def _resume(self, task: ProtocolTask, answer: list[Any] | None) -> list[ProtocolTask]:
        """Advance a task to its next round. Returns the tasks that wait now in its place (with its branches)."""
        task.request = None
        before = 0 if self.ledger is None else self.ledger.filed
        try:
            request = task.steps.send(answer)
        except StopIteration as done:
            self._note_filed(task, before)
            return self._finish(task, done.value)
        self._note_filed(task, before)
        if isinstance(request, Fork):
            task.left = len(request.branches)
            task.results = [None] * task.left
            if not request.branches:
                return self._resume(task, [])
            waiting: list[ProtocolTask] = []
            for place, branch in enumerate(request.branches):
                waiting += self._resume(ProtocolTask(branch, task, place), None)
            return waiting
        task.request = request
        for peer, kind, data in request.sends:
            if kind == kinds.DEALER:
                self.dealt_bytes += data.numel() * data.element_size()
            if self.ledger is not None:
                self.ledger.check_message(kind, proved=request.proved, opening=request.opening)
                if request.proved and not request.opening and needs_claim(kind, data):
                    task.promised += data.numel()
            for message in self._outbox[peer].add(kind, data):
                self._send(peer, *message)
        return [task]

    def _note_filed(self, task: ProtocolTask, before: int) -> None:
        if self.ledger is not None:
            task.filed += self.ledger.filed - before

    def _finish(self, task: ProtocolTask, result: Any) -> list[ProtocolTask]:
        parent = task.parent
        if parent is None:
            if self.ledger is not None:
                self.ledger.check_promises(task.promised, task.filed)
            task.results = [result]
            return []
        parent.results[task.place] = result
        parent.promised, parent.filed = parent.promised + task.promised, parent.filed + task.filed
        parent.left -= 1
        return self._resume(parent, parent.results) if parent.left == 0 else []

    def _flush(self) -> None:
        for peer, outbox in self._outbox.items():
            for message in outbox.flush():
                self._send(peer, *message)

    def _send(self, peer: int, kind: int, payload: memoryview) -> None:
        try:
            self.plane.send(peer, Tag(self._epoch, self.stream, self._sent[peer], kind), payload)
        except (PeerLostError, ProtocolError):
            if not self._last_words:
                raise
        self._sent[peer] += 1
        self.bytes_sent += payload.nbytes
        self.messages += 1

    def _take(self, inbox: RoundInbox, peer: int) -> Tensor:
        parts = inbox.next_message()
        if parts is not None:
            if self.ledger is not None and not self.ledger.sisters:
                self.ledger.hear()
            tag = Tag(self._epoch, self.stream, self._received[peer], message_kind([kind for _, kind, _, _ in parts]))
            self._received[peer] += 1
            inbox.fill(self.plane.recv(peer, tag), parts, peer, tag)
        return inbox.take()


class ProtocolProgress(Generic[T]):
    """A protocol between two of its rounds. Where an instalment of the proof is due between them it goes first, in
    rounds of its own: what this one has sent waits at the peers, who are at the same place."""

    def __init__(self, rt: Runtime, steps: MpcProtocol[T]) -> None:
        """See :meth:`Runtime.start`."""
        self._rt = rt
        self._root = ProtocolTask(steps, None, 0)
        with torch.inference_mode():
            self._enter(rt._resume(self._root, None))

    def _enter(self, waiting: list[ProtocolTask]) -> None:
        """Send what the last round left; note what the next one waits for."""
        rt, self._waiting = self._rt, waiting
        self._wants: list[tuple[int, Tag]] | None = None
        rt._flush()
        self._inboxes = {peer: RoundInbox(rt.staging) for peer in (rt.next, rt.prev)}
        self._instalment: ProtocolProgress[Any] | None = None
        if not waiting:
            return
        rt.rounds += 1
        for task in waiting:
            assert task.request is not None
            for want in task.request.wants:
                self._inboxes[want[0]].expect(want)
        for inbox in self._inboxes.values():
            inbox.seal()
        if rt.instalment is not None:
            self._instalment = rt.instalment()

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return not self._waiting

    @property
    def patient(self) -> bool:
        """Whether what it waits for need not come."""
        if self._instalment is not None:
            return self._instalment.patient
        return any(task.request is not None and task.request.patient for task in self._waiting)

    @property
    def result(self) -> T:
        """What the protocol returned; only once it is :attr:`done`."""
        found: T = self._root.results[0]
        return found

    def wants(self) -> list[tuple[int, Tag]]:
        """The messages of the round that it is in: from whom, and which."""
        if self._instalment is not None:
            return self._instalment.wants()
        if self._wants is None:
            rt = self._rt
            self._wants = [
                (peer, Tag(rt.epoch, rt.stream, rt._received[peer] + k, kind))
                for peer, inbox in self._inboxes.items()
                for k, kind in enumerate(inbox.kinds())
            ]
        return self._wants

    def advance(self) -> None:
        """Take this round's messages, waiting for those that are not there, and go on to the next round."""
        if self._instalment is not None:
            self._instalment.advance()
            if self._instalment.done:
                self._instalment = None
            return
        with torch.inference_mode():
            following: list[ProtocolTask] = []
            for task in self._waiting:
                assert task.request is not None
                following += self._rt._resume(task, self._answers(task.request))
            self._enter(following)

    def _answers(self, asked: Round) -> list[Any]:
        """What a round asked for; None for what a patient one does not get."""
        found: list[Any] = []
        lost: set[int] = set()
        for peer, *_ in asked.wants:
            try:
                found.append(None if peer in lost else self._rt._take(self._inboxes[peer], peer))
            except (PeerLostError, ProtocolError):
                if not asked.patient:
                    raise
                lost.add(peer)
                found.append(None)
        return found
