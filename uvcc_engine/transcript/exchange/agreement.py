"""Agreement of the parties, epoch by epoch: signed roots, digests of common leaves, and who signed what to whom.

Each party sends both peers its signed root statement, together with the third party's statement of the epoch before as
it received it. A party that shows its two peers different roots is caught one epoch later with both of its signatures.
The statement signs the head of the tree over all epochs before (``history``), so a party that changes its mind about
any of them is caught, too. Whoever is accused is accused by two signed statements that contradict each other; both go
into ``contradictions.jsonl``. Where there are none, nobody is named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.transcript.exchange.agreement_message import About, AgreementMessage
from uvcc_engine.transcript.exchange.expected_root import as_expected
from uvcc_engine.transcript.exchange.own_files import Statements, none_missing, signed_lines
from uvcc_engine.transcript.leaves.history import History
from uvcc_engine.transcript.leaves.json_lines import LineLog
from uvcc_engine.transcript.leaves.leaf import RECORD, Leaf
from uvcc_engine.transcript.leaves.leaf_file import CONTRADICTIONS, PEERS, damaged
from uvcc_engine.transcript.leaves.replay import first_difference
from uvcc_engine.transcript.leaves.roots import EpochRoot, sid_of
from uvcc_engine.transcript.signed.statements import ResultStatement, RootStatement, Signed
from uvcc_engine.transcript.signing.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy


class ForkError(ProtocolError):
    """Two parties recorded different messages between them. ``epoch`` and ``party`` (the peer) say where."""

    def __init__(self, what: str, *, party: int, epoch: int) -> None:
        super().__init__(
            what, "the run stops; the first differing message is named where both sides can compare", party=party
        )
        self.epoch = epoch


class RootExchange:
    """One worker's side of the exchange. Peers' statements are kept in ``peers.jsonl``: they are evidence."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        coord: Coord,
        records: Callable[[int], list[bytes]],
        own: Statements,
        resume_epoch: int,
    ) -> None:
        """``own``: what this worker signed before, by epoch; of the first ``resume_epoch`` epochs all must be there.

        Raises UnreadableError if ``peers.jsonl`` is damaged, lacks an epoch, or does not fit what was signed.
        """
        self._policy = policy
        self._coord = coord
        self._records = records
        self._folder = folder
        self._kept: LineLog | None = None
        self._mine: tuple[EpochRoot, Signed] | None = None
        self._own: dict[int, Signed] = {}  # by epoch: the last two
        self._result: Signed | None = None
        self._history = History(sid_of(policy.sid_job, coord))
        self.log = LineLog(folder / PEERS)
        try:
            self._held = self._take(own, resume_epoch)  # (peer, epoch) -> what that peer signed
        except BaseException:
            self.log.close()
            raise

    def _at(self, party: int) -> Coord:
        """The worker of another party in this subsession."""
        return Coord(self._coord.replica, party, self._coord.stage, self._coord.tensor)

    def _take(self, own: Statements, resume_epoch: int) -> dict[tuple[int, int], Signed]:
        peers = [self._at(p) for p in self._policy.peers(self._coord.party)]
        found = signed_lines(self.log.path, self.log.take(), self._policy, peers)
        none_missing(self.log.path, found, resume_epoch)
        for epoch in range(resume_epoch):
            three = {c.party: found[c][epoch] for c in peers} | {self._coord.party: own[epoch]}
            if any(statement.head != self._history.head for _, statement in three.values()):
                raise damaged(self.log.path, f"the epochs before {epoch}", "they are not those that were signed")
            if epoch < resume_epoch - 1:
                self._history.add({p: signed.digest for p, (signed, _) in three.items()})
        return {(c.party, epoch): signed for c, all_ in found.items() for epoch, (signed, _) in all_.items()}

    def finished(self, root: EpochRoot, signed: Signed) -> None:
        """The epoch that messages and checks are about from now on."""
        self._mine = (root, signed)
        epoch = root.epoch
        self._own = {e: s for e, s in self._own.items() if e == epoch - 1} | {epoch: signed}
        self._held = {at: held for at, held in self._held.items() if at[1] >= epoch - 1}

    def resulted(self, signed: Signed) -> None:
        self._result = signed

    def settled(self) -> tuple[dict[int, bytes], bytes]:
        """What the next signature countersigns: both peers' roots of the last finished epoch, and the head over all.

        Raises ConfigError if that epoch was not checked with both peers.
        """
        if self._mine is None:
            return {}, self._history.head
        epoch = self._mine[0].epoch
        seen, digests = {}, {self._coord.party: self._mine[1].digest}
        for peer in self._policy.peers(self._coord.party):
            held = self._held.get((peer, epoch))
            if held is None:
                raise ConfigError(
                    f"epoch {epoch} was not agreed with P{peer}", "check its agreement before the next finish"
                )
            seen[peer] = held.root.root.root
            digests[peer] = held.digest
        if self._history.size == epoch:
            self._history.add(digests)
        return seen, self._history.head

    # ---- every epoch -------------------------------------------------------------------------------------------

    def _last(self) -> tuple[EpochRoot, Signed]:
        if self._mine is None:
            raise ConfigError("no epoch is finished", "finish one first")
        return self._mine

    def _third(self, peer: int) -> int:
        return PARTIES - self._coord.party - peer

    def _seen(self, peer: int, epoch: int) -> Signed | None:
        """The third party's statement as held here, for ``peer`` to compare."""
        return self._held.get((self._third(peer), epoch))

    def message(self, peer: int) -> bytes:
        root, signed = self._last()
        return AgreementMessage("root", signed, self._seen(peer, root.epoch - 1)).encode()

    def check(self, peer: int, body: bytes) -> None:
        root, _ = self._last()
        if (quick := self._foreseen(peer, body)) is not None:
            self._hold(peer, root.epoch, quick)
            return
        found = self._parse(peer, "root", body)
        signed, statement = found.signed, self._root_of(peer, peer, found.signed)
        if statement.root.epoch != root.epoch:
            raise self._wrong(peer, f"sent the root of epoch {statement.root.epoch} where {root.epoch} was due")
        held = self._held.get((peer, root.epoch))
        if held is not None and held.statement != signed.statement:
            raise self._two_statements(peer, signed, held)
        ours, theirs = root.pairs[peer], statement.root.pairs[self._coord.party]
        if ours != theirs:
            self._keep(peer, "fork", signed, self._last()[1])
            raise self._fork(peer, root.epoch, ours, theirs)
        self._compare_third(peer, root.epoch - 1, found.third)
        self._compare_history(peer, signed, statement)
        self._compare_values(peer, signed, statement)
        if held is None:
            self._hold(peer, root.epoch, signed)

    def _hold(self, peer: int, epoch: int, signed: Signed) -> None:
        self.log.append(signed.line)
        self._held[(peer, epoch)] = signed

    def _foreseen(self, peer: int, body: bytes) -> Signed | None:
        """What the peer signed, if all of it is right and spelled as it was foreseen here; None if it has to be read,
        compared part by part and, where that is so, accused."""
        root, signed = self._last()
        mine, before, third = signed.root, root.epoch - 1, self._third(peer)
        seen: dict[int, bytes] = {}
        shown, own = self._held.get((third, before)), self._own.get(before)
        if root.epoch:
            if shown is None or own is None:
                return None
            seen = {self._coord.party: own.root.root.root, third: shown.root.root.root}
        if (peer, root.epoch) in self._held:
            return None
        digests = {self._coord.party: root.pairs[peer], third: b""}
        theirs = EpochRoot(root.epoch, b"", 0, 0, digests)
        due = RootStatement(self._at(peer), mine.sid_job, theirs, seen, mine.head, mine.values, mine.proved)
        found = as_expected(body, due, shown)
        if found is None or found.root.root.pairs[self._coord.party] != root.pairs[peer]:
            return None
        public = self._policy.public(peer, self._coord.replica)
        return found if found.holds(public, ROOT_NAMESPACE) else None

    def _compare_third(self, peer: int, epoch: int, passed_on: Signed | None) -> None:
        """What ``peer`` was shown by the third party must be what was shown here."""
        third = self._third(peer)
        held = self._held.get((third, epoch))
        if held is None:
            return  # before the first epoch
        if passed_on == held:
            return  # word for word, signature included, what was checked here
        if passed_on is None:
            raise self._wrong(peer, f"does not say which root P{third} showed it for epoch {epoch}")
        statement = self._root_of(peer, third, passed_on)
        if statement.root.epoch != epoch:
            raise self._wrong(peer, f"passes on a root of P{third} of epoch {statement.root.epoch} instead of {epoch}")
        if passed_on.statement != held.statement:
            raise self._two_statements(third, passed_on, held)

    def _compare_history(self, peer: int, signed: Signed, theirs: RootStatement) -> None:
        """The peer must countersign what was shown here, and its head must extend the one it signed before."""
        ours, before = self._last()[1].root, theirs.root.epoch - 1
        for party, root in theirs.seen.items():
            shown = self._own.get(before) if party == self._coord.party else self._held.get((party, before))
            if shown is not None and shown.root.root.root != root:
                raise self._convicted(
                    peer,
                    f"countersigned another root of P{party} for epoch {before} than P{party} signed",
                    signed,
                    shown,
                )
        if theirs.head == ours.head:
            return
        what = f"signed a head over {before + 1} epochs that does not extend what it signed before"
        earlier = self._held.get((peer, before))
        raise self._convicted(peer, what, signed, earlier if earlier is not None else self._last()[1])

    def _compare_values(self, peer: int, signed: Signed, theirs: RootStatement) -> None:
        """What a step reveals is the same number everywhere; both have signed theirs."""
        mine = self._last()[1]
        ours = mine.root
        if dict(theirs.values) != dict(ours.values):
            shown = f"{dict(theirs.values)} for epoch {theirs.root.epoch}, this party {dict(ours.values)}"
            raise self._convicted(peer, f"signed that the step revealed {shown}", signed, mine)

    def _root_of(self, sender: int, signer: int, signed: Signed) -> RootStatement:
        """A signed root statement of ``signer`` that ``sender`` sent; anything wrong is the sender's doing."""
        try:
            statement = signed.root
        except UnreadableError as e:
            raise self._wrong(sender, f"sent an unreadable root of P{signer}: {e.what}") from e
        wanted = Coord(self._coord.replica, signer, self._coord.stage, self._coord.tensor)
        if statement.coord != wanted or statement.sid_job != self._policy.sid_job:
            raise self._wrong(sender, f"sent a root of {statement.coord} of another job or worker, not of {wanted}")
        if not signed.holds(self._policy.public(signer, self._coord.replica), ROOT_NAMESPACE):
            raise self._wrong(sender, f"sent a root of {wanted} whose signature does not hold")
        return statement

    # ---- after the result --------------------------------------------------------------------------------------

    def closing(self, peer: int) -> bytes:
        root, _ = self._last()
        if self._result is None:
            raise ConfigError("there is no result to close with", "call result first")
        return AgreementMessage("result", self._result, self._seen(peer, root.epoch)).encode()

    def check_closing(self, peer: int, body: bytes) -> None:
        root, _ = self._last()
        if self._result is None:
            raise ConfigError("there is no result to compare with", "call result first")
        found = self._parse(peer, "result", body)
        signed = found.signed
        try:
            theirs = ResultStatement.from_json(signed.statement)
        except UnreadableError as e:
            raise self._wrong(peer, f"sent an unreadable result: {e.what}") from e
        if not signed.holds(self._policy.public(peer, self._coord.replica), RESULT_NAMESPACE):
            raise self._wrong(peer, "sent a result whose signature does not hold")
        ours = ResultStatement.from_json(self._result.statement)
        if theirs.coord != self._at(peer) or theirs.sid_job != self._policy.sid_job:
            raise self._wrong(peer, f"sent a result of {theirs.coord} of another job or worker")
        if theirs.result_hash != ours.result_hash or theirs.epochs != ours.epochs:
            what = f"has result {theirs.result_hash.hex()}, this party {ours.result_hash.hex()}"
            raise self._convicted(peer, what, signed, self._result)
        self._compare_third(peer, root.epoch, found.third)
        self._compare_ends(peer, signed, theirs, ours)

    def _compare_ends(self, peer: int, signed: Signed, theirs: ResultStatement, ours: ResultStatement) -> None:
        """The result must close the history that was agreed: its own last root, the two that it saw, and the head."""
        third = self._third(peer)
        wanted = {self._coord.party: ours.root, third: ours.seen[third]}
        if theirs.root != ours.seen[peer] or dict(theirs.seen) != wanted or theirs.head != ours.head:
            what = f"signed a result over another history than it signed for the {ours.epochs} epochs"
            raise self._convicted(peer, what, signed, self._held[(peer, ours.epochs - 1)])

    # ---- disputes ----------------------------------------------------------------------------------------------

    def dispute(self, peer: int) -> bytes:
        root, _ = self._last()
        return b"".join(r for r in self._records(root.epoch) if {r[2], r[3]} == {self._coord.party, peer})

    def locate(self, peer: int, body: bytes) -> str:
        root, _ = self._last()
        if len(body) % RECORD.size:
            raise self._wrong(peer, "sent an unreadable list of leaves")
        theirs = sorted((body[i : i + RECORD.size] for i in range(0, len(body), RECORD.size)), key=_key)
        return first_difference(self._records(root.epoch), theirs, self._coord.party, peer)

    # ---- errors ------------------------------------------------------------------------------------------------

    def _parse(self, peer: int, about: About, body: bytes) -> AgreementMessage:
        found = AgreementMessage.parse(about, body)
        if isinstance(found, Malformed):
            raise self._wrong(peer, f"sent {found.why}")
        return found

    def _wrong(self, party: int, what: str) -> ProtocolError:
        return ProtocolError(f"P{party} {what}", "the run stops; the other parties' evidence is kept", party=party)

    def _two_statements(self, party: int, one: Signed, two: Signed) -> ProtocolError:
        """Both carry that party's signature and are about the same epoch."""
        a, b = (RootStatement.from_json(s.statement) for s in (one, two))
        shown = f"{a.root.root.hex()[:16]} and {b.root.root.hex()[:16]}"
        return self._convicted(party, f"signed two statements for epoch {a.root.epoch}: roots {shown}", one, two)

    def _convicted(self, party: int, what: str, one: Signed, two: Signed) -> ProtocolError:
        """An accusation and its proof: two signed statements that cannot both be true."""
        self._keep(party, what, one, two)
        return self._wrong(party, what)

    def _keep(self, party: int, what: str, one: Signed, two: Signed) -> None:
        if self._kept is None:
            self._kept = LineLog(self._folder / CONTRADICTIONS)
        self._kept.append(canonical({"one": one.to_json(), "party": party, "two": two.to_json(), "what": what}) + b"\n")
        self._kept.sync()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self.log.close()
        if self._kept is not None:
            self._kept.close()

    def _fork(self, peer: int, epoch: int, ours: bytes, theirs: bytes) -> ForkError:
        who = f"P{self._coord.party} and P{peer}"
        what = f"fork at epoch {epoch}: {who} recorded different messages ({ours.hex()[:16]}, {theirs.hex()[:16]})"
        return ForkError(what, party=peer, epoch=epoch)


def _key(record: bytes) -> Any:
    return Leaf.unpack(record).key
