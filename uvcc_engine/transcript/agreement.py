"""Agreement of the parties, epoch by epoch: signed roots, digests of common leaves, and who signed what to whom.

Each party sends both peers its signed root statement, together with the third party's statement of the epoch before as
it received it. A party that shows its two peers different roots is caught one epoch later with both of its signatures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.parallel.topology import PARTIES, Coord
from uvcc_engine.transcript.canonical import canonical
from uvcc_engine.transcript.leaf import RECORD, Leaf
from uvcc_engine.transcript.logs import LineLog
from uvcc_engine.transcript.policy import Policy
from uvcc_engine.transcript.replay import first_difference
from uvcc_engine.transcript.roots import EpochRoot
from uvcc_engine.transcript.sshsig import RESULT_NAMESPACE, ROOT_NAMESPACE
from uvcc_engine.transcript.statements import ResultStatement, RootStatement, Signed, exact

PEERS: Final = "peers.jsonl"


class ForkError(ProtocolError):
    """Two parties recorded different messages between them. ``epoch`` and ``party`` (the peer) say where."""

    def __init__(self, what: str, *, party: int, epoch: int) -> None:
        super().__init__(
            what, "the run stops; the first differing message is named where both sides can compare", party=party
        )
        self.epoch = epoch


class Agreement:
    """One worker's side of the exchange. Peers' statements are kept in ``peers.jsonl``: they are evidence."""

    def __init__(self, folder: Path, policy: Policy, coord: Coord, records: Callable[[int], list[bytes]]) -> None:
        self._policy = policy
        self._coord = coord
        self._records = records
        self.log = LineLog(folder / PEERS)
        self._held: dict[tuple[int, int], Signed] = {}  # (peer, epoch) -> what that peer signed
        for entry, _ in self.log.take():
            signed = Signed.from_json(entry)
            statement = RootStatement.from_json(signed.statement)
            self._held[(statement.coord.party, statement.root.epoch)] = signed
        self._mine: tuple[EpochRoot, Signed] | None = None
        self._result: Signed | None = None

    def finished(self, root: EpochRoot, signed: Signed) -> None:
        """The epoch that messages and checks are about from now on."""
        self._mine = (root, signed)
        for key in [k for k in self._held if k[1] < root.epoch - 1]:
            del self._held[key]

    def resulted(self, signed: Signed) -> None:
        self._result = signed

    def roots_of(self, epoch: int) -> dict[int, bytes]:
        """Both peers' checked roots of an epoch. Raises ConfigError if one was not checked."""
        found = {}
        for peer in self._policy.peers(self._coord.party):
            held = self._held.get((peer, epoch))
            if held is None:
                raise ConfigError(
                    f"epoch {epoch} was not agreed with P{peer}", "check its agreement before the next finish"
                )
            found[peer] = RootStatement.from_json(held.statement).root.root
        return found

    # ---- every epoch -------------------------------------------------------------------------------------------

    def _last(self) -> tuple[EpochRoot, Signed]:
        if self._mine is None:
            raise ConfigError("no epoch is finished", "finish one first")
        return self._mine

    def _third(self, peer: int) -> int:
        return PARTIES - self._coord.party - peer

    def _seen(self, peer: int, epoch: int) -> dict[str, Any] | None:
        """The third party's statement as held here, for ``peer`` to compare."""
        held = self._held.get((self._third(peer), epoch))
        return held.to_json() if held else None

    def message(self, peer: int) -> bytes:
        root, signed = self._last()
        return canonical({"root": signed.to_json(), "third": self._seen(peer, root.epoch - 1)})

    def check(self, peer: int, body: bytes) -> None:
        root, _ = self._last()
        found = self._parse(peer, body, ("root", "third"))
        signed, statement = self._root_of(peer, peer, found["root"])
        if statement.root.epoch != root.epoch:
            raise self._wrong(peer, f"sent the root of epoch {statement.root.epoch} where {root.epoch} was due")
        held = self._held.get((peer, root.epoch))
        if held is not None and held.statement != signed.statement:
            raise self._two_roots(peer, statement, RootStatement.from_json(held.statement))
        ours, theirs = root.pairs[peer], statement.root.pairs[self._coord.party]
        if ours != theirs:
            raise self._fork(peer, root.epoch, ours, theirs)
        self._compare_third(peer, root.epoch - 1, found["third"])
        if held is None:
            self.log.append(signed.line)
            self._held[(peer, root.epoch)] = signed

    def _compare_third(self, peer: int, epoch: int, data: Any) -> None:
        """What ``peer`` was shown by the third party must be what was shown here."""
        third = self._third(peer)
        held = self._held.get((third, epoch))
        if held is None:
            return  # before the first epoch, or the first after a resume: peers.jsonl of the peer still has it
        if data == held.to_json():
            return  # word for word, signature included, what was checked here
        if data is None:
            raise self._wrong(peer, f"does not say which root P{third} showed it for epoch {epoch}")
        signed, statement = self._root_of(peer, third, data)
        if statement.root.epoch != epoch:
            raise self._wrong(peer, f"passes on a root of P{third} of epoch {statement.root.epoch} instead of {epoch}")
        if signed.statement != held.statement:
            raise self._two_roots(third, statement, RootStatement.from_json(held.statement))

    def _root_of(self, sender: int, signer: int, data: Any) -> tuple[Signed, RootStatement]:
        """A signed root statement of ``signer`` that ``sender`` sent; anything wrong is the sender's doing."""
        try:
            signed = Signed.from_json(data)
            statement = RootStatement.from_json(signed.statement)
        except UnreadableError as e:
            raise self._wrong(sender, f"sent an unreadable root of P{signer}: {e.what}") from e
        wanted = Coord(self._coord.replica, signer, self._coord.stage, self._coord.tensor)
        if statement.coord != wanted or statement.sid_job != self._policy.sid_job:
            raise self._wrong(sender, f"sent a root of {statement.coord} of another job or worker, not of {wanted}")
        if not signed.holds(self._policy.public(signer, self._coord.replica), ROOT_NAMESPACE):
            raise self._wrong(sender, f"sent a root of {wanted} whose signature does not hold")
        return signed, statement

    # ---- after the result --------------------------------------------------------------------------------------

    def closing(self, peer: int) -> bytes:
        root, _ = self._last()
        if self._result is None:
            raise ConfigError("there is no result to close with", "call result first")
        return canonical({"result": self._result.to_json(), "third": self._seen(peer, root.epoch)})

    def check_closing(self, peer: int, body: bytes) -> None:
        root, _ = self._last()
        if self._result is None:
            raise ConfigError("there is no result to compare with", "call result first")
        found = self._parse(peer, body, ("result", "third"))
        try:
            signed = Signed.from_json(found["result"])
            theirs = ResultStatement.from_json(signed.statement)
        except UnreadableError as e:
            raise self._wrong(peer, f"sent an unreadable result: {e.what}") from e
        if not signed.holds(self._policy.public(peer, self._coord.replica), RESULT_NAMESPACE):
            raise self._wrong(peer, "sent a result whose signature does not hold")
        ours = ResultStatement.from_json(self._result.statement)
        if theirs.result_hash != ours.result_hash or theirs.epochs != ours.epochs:
            raise self._wrong(peer, f"has result {theirs.result_hash.hex()}, this party {ours.result_hash.hex()}")
        self._compare_third(peer, root.epoch, found["third"])

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

    def _parse(self, peer: int, body: bytes, fields: tuple[str, ...]) -> Mapping[str, Any]:
        try:
            return exact(json.loads(body), fields, "control message")
        except (ValueError, RecursionError, UnreadableError) as e:
            raise self._wrong(peer, f"sent an unreadable control message: {e}") from e

    def _wrong(self, party: int, what: str) -> ProtocolError:
        return ProtocolError(f"P{party} {what}", "the run stops; the other parties' evidence is kept", party=party)

    def _two_roots(self, party: int, one: RootStatement, two: RootStatement) -> ProtocolError:
        shown = f"{one.root.root.hex()[:16]} and {two.root.root.hex()[:16]}"
        return self._wrong(party, f"signed two statements for epoch {one.root.epoch}: roots {shown}")

    def _fork(self, peer: int, epoch: int, ours: bytes, theirs: bytes) -> ForkError:
        who = f"P{self._coord.party} and P{peer}"
        what = f"fork at epoch {epoch}: {who} recorded different messages ({ours.hex()[:16]}, {theirs.hex()[:16]})"
        return ForkError(what, party=peer, epoch=epoch)


def _key(record: bytes) -> Any:
    return Leaf.unpack(record).key
