"""What a worker and its two peers still owe each other of the last finished epoch: its signed root, and the verdict.

Both go with the vote of the next step. A root is read at the end of that step, or before a checkpoint. Where the epoch
opened nothing its verdict was not told yet: then the votes are read before the step's first message is taken in, and
whoever does not sign, because a proof does not hold, says so in the same place. So a proof takes no round for its
verdicts, nothing is opened and no checkpoint is taken before they were heard, and who keeps its own back is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from uvcc_engine.contract.errors import PeerLostError, ProtocolError
from uvcc_engine.contract.peer_protocol.peer_messages import AttachedNote, StepVote, Topic, Vote
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.proofs.audit_draws import note_unfinished
from uvcc_engine.proofs.settling import VERDICT_BYTES, OwedVerdict
from uvcc_engine.sharding.fleet_proof import agree
from uvcc_engine.transcript.exchange.agreement import ForkError
from uvcc_engine.transcript.exchange.evidence import WorkerEvidence
from uvcc_engine.worker.consensus import PeerSilentError, StepConsensus

T = TypeVar("T")
M = TypeVar("M", StepVote, AttachedNote)


class RootAgreement:
    """One worker's part of agreeing on epochs, one after the other.

    ``limit_s``: for a living peer's verdict. ``begin``: opens an epoch, in which alone messages may be exchanged.
    """

    def __init__(
        self,
        rt: Runtime,
        table: StepConsensus,
        groups: PartyGroups,
        evidence: Callable[[], WorkerEvidence],
        limit_s: float,
        begin: Callable[[int], None],
    ) -> None:
        self._rt, self._table, self._groups = rt, table, groups
        self._proof, self._limit_s, self._begin = evidence, limit_s, begin
        self._agreed = True
        self._owed: OwedVerdict | None = None
        self._heard: Mapping[int, StepVote] | None = None

    @property
    def owed(self) -> OwedVerdict | None:
        """The verdict that is not told and heard yet."""
        return self._owed

    def finished(self, owed: OwedVerdict | None) -> None:
        """An epoch is over here, and signed unless its verdict is bad; it is to be agreed on with both peers."""
        self._agreed, self._owed = False, owed

    def open_step(self, epoch: int, mine: Vote, stated: str) -> None:
        """Send the vote of ``epoch``, and with it what is owed of the epoch before."""
        self._table.open_step(epoch, mine, self._notes(), stated)
        self._heard = None
        if self._owed is not None:
            known(self._rt.ledger).unheard = partial(self._hear_early, epoch)

    def close_step(self, epoch: int, mine: Vote) -> Vote:
        """Read the peers' votes of ``epoch``, and what they owed, if that was not read before; what all decide."""
        if self._rt.ledger is not None:
            self._rt.ledger.hear()
        heard, self._heard = self._heard or self._table.hear(StepVote(epoch)), None
        decision = self._table.decide(mine, heard)
        if not self._agreed:
            self._check({peer: vote.note for peer, vote in heard.items()})
        return decision

    def settle(self, step: int) -> None:
        """Agree on the last finished epoch now rather than in the next step: a checkpoint must not outrun agreement."""
        if self._agreed:
            return
        due, notes = AttachedNote(Topic.ROOT, step), self._notes()
        if self._owed is None:
            self._check(self._table.exchange(due, notes))
            return
        self._table.say(due, notes)
        following = self._owed.epoch + 1
        self._together(lambda: self._take_in(self._waited_for(due), lambda: self._begin(following)))

    def _notes(self) -> dict[int, bytes]:
        """What goes to each peer: the verdict, where it is owed, and the signed root, where there is one."""
        if self._agreed:
            return {}
        said, signs = (b"", True) if self._owed is None else (self._owed.said, self._owed.held)
        return {p: said + (self._proof().agreement(p) if signs else b"") for p in self._table.peers}

    def _hear_early(self, epoch: int) -> None:
        def votes() -> Mapping[int, StepVote]:
            heard = self._waited_for(StepVote(epoch))
            self._take_in(heard)
            return heard

        self._heard = self._together(votes)

    def _together(self, work: Callable[[], T]) -> T:
        """Hear what was owed; where a party has several workers, all of them hear what one does."""
        try:
            found = agree(self._groups, work)
        except (PeerLostError, ProtocolError) as error:
            note_unfinished(self._rt, error)
            raise
        self._owed = None
        return found

    def _waited_for(self, due: M) -> dict[int, M]:
        try:
            return self._table.hear(due, self._limit_s)
        except PeerSilentError as silent:
            what = f"party {silent.party} is alive and withholds its verdict of a proof for {self._limit_s:g} s"
            raise ProtocolError(what, "nothing of this step was revealed", party=silent.party) from silent

    def _take_in(
        self, heard: Mapping[int, StepVote | AttachedNote], before_dispute: Callable[[], None] = lambda: None
    ) -> None:
        """Verdicts first: whoever found a fault has signed nothing."""
        told = {peer: one.note[:VERDICT_BYTES] for peer, one in heard.items()}
        known(self._owed).hear(told, before_dispute)
        self._check({peer: one.note[VERDICT_BYTES:] for peer, one in heard.items()})

    def _check(self, notes: Mapping[int, bytes]) -> None:
        forks: list[ForkError] = []
        for peer, note in notes.items():
            try:
                self._proof().check(peer, note)
            except ForkError as fork:
                forks.append(fork)
        if forks:
            raise self._located(forks[0])
        self._agreed = True

    def _located(self, fork: ForkError) -> ForkError:
        """Exchange the leaves of a forked epoch with the peer, to name the first message that differs."""
        peer, proof = fork.party, self._proof()
        theirs = self._table.swap(peer, AttachedNote(Topic.DISPUTE, fork.epoch, proof.dispute(peer)))
        if theirs is None:
            return fork
        return ForkError(f"{fork.what}: {proof.locate(peer, theirs)}", party=peer, epoch=fork.epoch)
