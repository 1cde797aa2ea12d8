"""What a private worker calls so that its run can be verified by somebody who was not there.

evidence = WorkerEvidence.open(run_dir, identity, policy, coord)
evidence.input(commitment)                       # the sealed inputs it unsealed
for epoch in range(start, steps):
    evidence.begin(epoch)
    ...                                          # the plane records into evidence.recorder
    root = evidence.finish(epoch, values)        # with what the step revealed
    plane.send_control(peer, evidence.agreement(peer))           # to both peers, may be read a step later,
    evidence.check(peer, plane.recv_control(peer))               # but before the next finish
evidence.begin(steps)                            # opening the result is an epoch of its own
root = evidence.outcome(values, state_digests)   # RESULT leaf and last root
... agreement/check once more
result = evidence.result()                       # signed over the peers' last roots, too
... closing/check_closing
evidence.close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.private_job import MAY_LACK
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.exchange.agreement import RootExchange
from uvcc_engine.transcript.exchange.own_files import Statements, none_missing, opened_lines, signed_lines
from uvcc_engine.transcript.formats import kinds, reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.json_lines import LineLog
from uvcc_engine.transcript.leaves.roots import EpochRoot, sid_of
from uvcc_engine.transcript.leaves.store import TranscriptStore
from uvcc_engine.transcript.signed.statements import (
    ResultStatement,
    RootStatement,
    Signed,
    Verdict,
    result_core,
    sign_result,
    sign_root,
)
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity
from uvcc_engine.transcript.signing.sshsig import RESULT_NAMESPACE
from uvcc_engine.transcript.terms.policy import Policy

_BLIND: Final = "blind"


def blinding_keys(identity: Identity, policy: Policy, coord: Coord) -> dict[int, bytes]:
    """The keys that blind a worker's leaves: by peer, and its own under its own party."""
    peers = policy.peers(coord.party, coord.replica)
    keys = {p: identity.pair_secret(public, policy.sid_job, _BLIND) for p, public in peers.items()}
    return {**keys, coord.party: identity.own_secret(policy.sid_job, _BLIND)}


class WorkerEvidence:
    """Transcript, signed roots and signed result of one worker. One user thread, like the plane."""

    def __init__(
        self, folder: Path, identity: Identity, policy: Policy, coord: Coord, resume_epoch: int, power_cut: bool
    ) -> None:
        """See :meth:`open`."""
        self.coord = coord
        self.policy = policy
        self.folder = folder
        self._identity = identity
        keys = blinding_keys(identity, policy, coord)
        self.recorder = TranscriptStore(
            folder,
            party=coord.party,
            sid_sub=sid_of(policy.sid_job, coord),
            own_key=keys.pop(coord.party),
            pair_keys=keys,
            resume_epoch=resume_epoch,
            power_cut=power_cut,
        )
        self._logs: list[LineLog] = []
        self._closers = ExitStack()
        self._own: Statements = {}  # what was signed before and is repeated, by epoch
        self._opened_before: dict[tuple[int, int], bytes] = {}
        try:
            self._agreement = self._read_own(resume_epoch)
        except BaseException:
            self.close()
            raise
        self._local: list[tuple[int, int, bytes]] = []  # kind, op, payload of leaves for the next epoch
        if resume_epoch == 0:
            self._local.append((kinds.POLICY, 0, policy.hash))
            if policy.migration is not None:
                self._local.append((kinds.START, 0, policy.migration.leaf))
        self.last_root: EpochRoot | None = None
        self._open_epoch = -1
        self._outcome: tuple[Mapping[str, float], Sequence[str], int] | None = None
        if resume_epoch:
            signed, statement = self._own[resume_epoch - 1]
            self.last_root = statement.root
            self._agreement.finished(statement.root, signed)
        self._own = {epoch: known for epoch, known in self._own.items() if epoch >= resume_epoch}

    def _read_own(self, resume_epoch: int) -> RootExchange:
        """What this worker wrote before, held against its own signatures and those of its peers."""
        folder, policy, coord = self.folder, self.policy, self.coord
        self._roots, self._openings = self._log(leaf_file.ROOTS), self._log(leaf_file.OPENINGS)
        mine = signed_lines(self._roots.path, self._roots.take(), policy, [coord])
        none_missing(self._roots.path, mine, resume_epoch)
        self._own = mine[coord]
        self._opened_before = opened_lines(
            self._openings.path, self._openings.take(), self._own, policy, coord, resume_epoch
        )
        for epoch in range(resume_epoch):
            self.recorder.confirm(self._own[epoch][1].root, whole=epoch == resume_epoch - 1)
        agreement = RootExchange(folder, policy, coord, self.recorder.records, self._own, resume_epoch)
        self._closers.callback(agreement.close)
        self._logs.append(agreement.log)
        return agreement

    def _log(self, name: str) -> LineLog:
        log = LineLog(self.folder / name)
        self._closers.callback(log.close)
        self._logs.append(log)
        return log

    @classmethod
    def open(
        cls,
        run_dir: Path,
        identity: Identity,
        policy: Policy,
        coord: Coord,
        peers: Mapping[int, PublicIdentity] | None = None,
        resume_epoch: int | None = None,
        *,
        power_cut: bool = True,
    ) -> WorkerEvidence:
        """Open ``run_dir/transcript_<coord>``; with ``resume_epoch`` go on there, repeating what was recorded after it.

        ``power_cut``: whether the machine may have lost its power since: what of the repeated epochs is not whole is
        then removed.

        Raises ConfigError if the policy names another identity, coordinate or peers, or the transcript is of another
        session; UnreadableError if it is damaged.
        """
        if policy.party_of(identity.public) != coord.party:
            raise ConfigError(f"this identity is P{policy.party_of(identity.public)}, the worker is {coord}")
        size = policy.topology
        if coord.replica >= size.replicas or coord.stage >= size.stages or coord.tensor >= size.tensor:
            raise ConfigError(f"{coord} is outside the policy's topology", f"it has {size}")
        if policy.public(coord.party, coord.replica) != identity.public:
            raise ConfigError(f"this identity is of another pod of P{coord.party} than {coord}", "launch it there")
        if peers is not None and dict(peers) != policy.peers(coord.party, coord.replica):
            raise ConfigError("the peers' identities are not those of the policy", "use policy.peers(party, replica)")
        return cls(run_dir / leaf_file.folder_name(coord), identity, policy, coord, resume_epoch or 0, power_cut)

    # ---- events inside the party -------------------------------------------------------------------------------

    def input(self, commitment: str) -> None:
        """Note that the sealed input file with this SHA-256 was unsealed; recorded in the first epoch.

        Raises ConfigError if the policy commits this party to another file.
        """
        wanted = self.policy.commitments[self.coord.party]
        if commitment != wanted:
            raise ConfigError(
                f"the sealed inputs are {commitment[:12]}, the policy wants {wanted[:12]}", "send them again"
            )
        if self.recorder.next_epoch == 0:
            self._local.append((kinds.INPUT, 0, bytes.fromhex(commitment)))

    def checkpoint(self, step: int, sha256: str) -> None:
        """Note a checkpoint that the policy's schedule asks for, and make all before it durable.

        The leaf goes into the next epoch (or the open one). A worker that resumes from such a checkpoint notes it
        again. Checkpoints outside the schedule (a halt) are not noted, else a halted run would have other roots:
        call :meth:`sync` for those.
        """
        self._local.append((kinds.CHECKPOINT, step, canonical({"sha256": sha256, "step": step})))
        if self._open_epoch >= 0:
            self._record_local()
        self.sync()

    def _record_local(self) -> None:
        for kind, op, payload in self._local:
            self.recorder.record_local((self._open_epoch, 0, op, kind), payload)
        self._local.clear()

    # ---- epochs ------------------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Open an epoch; waiting local leaves (policy, inputs, checkpoint) are recorded first."""
        self.recorder.begin_epoch(epoch)
        self._open_epoch = epoch
        self._record_local()

    def finish(self, epoch: int, values: Mapping[str, float] | None = None, proved: Verdict | None = None) -> EpochRoot:
        """Finalise and sign the epoch with the ``values`` that its step revealed to all, and what was ``proved`` of it.

        Raises ConfigError if the epoch before was not checked with both peers, or if the values are not those that the
        policy wants of this step, or a proof lacks; UnreadableError if the epoch is repeated and is not what was
        signed.
        """
        if epoch != self._open_epoch:
            raise ConfigError(f"cannot finish epoch {epoch}: epoch {self._open_epoch} is open")
        values = values or {}
        due = set(self.policy.step_values(epoch))
        if due != set(values) | (due & MAY_LACK):
            what = f"epoch {epoch} states {sorted(values)}, the policy wants {sorted(due)}"
            raise ConfigError(what, "state what it reveals")
        return self._signed(epoch, values, proved)

    def _signed(self, epoch: int, values: Mapping[str, float], proved: Verdict | None) -> EpochRoot:
        if (proved is not None) != self.policy.proves:
            what = f"epoch {epoch} of a policy with verify {self.policy.proving.mode!r}"
            raise ConfigError(what, "prove what it says")
        seen, head = self._agreement.settled()
        root = self.recorder.finalize_epoch()
        statement = RootStatement(self.coord, self.policy.sid_job, root, seen, head, dict(values), proved)
        signed = sign_root(self._identity, statement)
        before = self._own.pop(epoch, None)
        if before is not None and before[0].line != signed.line:
            raise self._other_than_before(epoch)
        for opening in self.recorder.openings:
            line = canonical(opening.to_json()) + b"\n"
            known = self._opened_before.get((epoch, opening.index))
            if known is None:
                self._openings.append(line)
            elif known != line:
                raise self._other_than_before(epoch)
        if before is None:
            self._roots.append(signed.line)
        self._agreement.finished(root, signed)
        self.last_root, self._open_epoch = root, -1
        return root

    def leave_unsigned(self, epoch: int) -> None:
        """Finalise the epoch and sign nothing about it: a proof of it does not hold, and the attempt ends with that.

        Raises as :meth:`finish`.
        """
        if epoch != self._open_epoch:
            raise ConfigError(f"cannot leave epoch {epoch}: epoch {self._open_epoch} is open")
        self.recorder.finalize_epoch()
        self._open_epoch = -1

    def _other_than_before(self, epoch: int) -> UnreadableError:
        return UnreadableError(
            f"{self.folder}: epoch {epoch}, repeated, is not the one that this worker signed before",
            "its own files or its own computation changed; take the next attempt",
        )

    def outcome(
        self,
        values: Mapping[str, float],
        state_digests: Sequence[str],
        proved: Verdict | None = None,
        steps: int | None = None,
    ) -> EpochRoot:
        """Record the outcome in the open epoch (or a new one), which becomes the last, and finish that.

        ``values``: what the policy reveals to all; ``state_digests``: hex SHA-256 of the three blinded final share
        components; ``steps``: after how many it ended, where those are not the policy's. Exchange the agreement about
        this epoch before :meth:`result`. Raises ConfigError for an unlisted value.
        """
        for name in values:
            if not self.policy.reveals(name):
                raise ConfigError(f"the policy does not reveal {name!r}", "list it under reveal, or keep it shared")
        if self._open_epoch < 0:
            self.begin(self.recorder.next_epoch)
        steps = self.policy.steps if steps is None else steps
        core = result_core(self.policy.sid_job, steps, values, state_digests)
        self.recorder.record_local((self._open_epoch, 0, 0, kinds.RESULT), core)
        root = self._signed(self._open_epoch, {}, proved)  # no step: the result states what it reveals
        self._outcome = dict(values), list(state_digests), steps
        return root

    def result(self) -> dict[str, Any]:
        """Sign the outcome over the whole history, the peers' roots of the last epoch included.

        Returns what belongs into result.json, less ``run``. Raises ConfigError if there is no outcome, or the last
        epoch was not checked with both peers; UnreadableError if another result was signed before.
        """
        if self._outcome is None or self.last_root is None:
            raise ConfigError("there is no outcome to sign", "call outcome first")
        (values, digests, steps), root = self._outcome, self.last_root
        seen, head = self._agreement.settled()
        statement = ResultStatement(
            self.coord, self.policy.sid_job, root.epoch + 1, root.root, seen, head, steps, values, digests
        )
        signed = sign_result(self._identity, statement)
        self._same_as_before(signed)
        write_atomic(self.folder / leaf_file.RESULT, signed.line)
        self.sync()
        self._agreement.resulted(signed)
        return {**statement.to_json(), "signature": signed.signature}

    def _same_as_before(self, signed: Signed) -> None:
        """A result that was signed once is not signed differently; a file that does not hold is written anew."""
        try:
            before = read_signed(self.folder / leaf_file.RESULT)
        except UnreadableError:
            return
        if before.holds(self._identity.public, RESULT_NAMESPACE) and before.statement != signed.statement:
            raise self._other_than_before(signed.statement["epochs"] - 1)

    # ---- agreement with the peers ------------------------------------------------------------------------------

    def agreement(self, peer: int) -> bytes:
        """Control message about the last finished epoch for ``peer``: own signed root, and the third party's before."""
        return self._agreement.message(peer)

    def check(self, peer: int, body: bytes) -> None:
        """Check a peer's :meth:`agreement` against the last finished epoch.

        Raises ForkError (a ProtocolError naming both parties and the epoch) if the common leaves differ, ProtocolError
        naming the culprit if a signature fails or a party signed two statements that contradict each other.
        """
        self._agreement.check(peer, body)

    def closing(self, peer: int) -> bytes:
        """Control message after :meth:`result` and its agreement: signed result, third party's last root."""
        return self._agreement.closing(peer)

    def check_closing(self, peer: int, body: bytes) -> None:
        """Check a peer's :meth:`closing`. Raises ProtocolError naming the party if the results differ."""
        self._agreement.check_closing(peer, body)

    def dispute(self, peer: int) -> bytes:
        """After a ForkError: the last epoch's leaves common with ``peer``, to be exchanged in a control message."""
        return self._agreement.dispute(peer)

    def locate(self, peer: int, body: bytes) -> str:
        """Which message ``peer`` recorded differently, from its :meth:`dispute`."""
        return self._agreement.locate(peer, body)

    # ---- durability --------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make all finished epochs durable: call it before a checkpoint counts as written."""
        for log in self._logs:
            log.sync()
        self.recorder.sync()

    def close(self) -> None:
        """Close all files; a second call does nothing. Raises UvccError where the disk refuses what is left."""
        try:
            self.recorder.close()
        finally:
            self._closers.close()


def read_signed(path: Path) -> Signed:
    """A signed statement from its file. Raises UnreadableError."""
    return Signed.from_json(reading.read_json(path))
