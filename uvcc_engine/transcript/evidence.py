"""What a private worker calls so that its run can be verified by somebody who was not there.

evidence = WorkerEvidence.open(run_dir, identity, policy, coord)
evidence.input(commitment)                       # the sealed inputs it unsealed
for epoch in range(start, steps):
    evidence.begin(epoch)
    ...                                          # the plane records into evidence.recorder
    root = evidence.finish(epoch)
    plane.send_control(peer, evidence.agreement(peer))           # to both peers, may be read a step later,
    evidence.check(peer, plane.recv_control(peer))               # but before the next finish
evidence.begin(steps)                            # opening the result is an epoch of its own
result = evidence.result(values, state_digests)  # RESULT leaf, last root, signatures
... agreement/check once more, then closing/check_closing
evidence.close()
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.parallel.topology import Coord
from uvcc_engine.transcript import files, kinds, reading
from uvcc_engine.transcript.agreement import Agreement
from uvcc_engine.transcript.canonical import canonical
from uvcc_engine.transcript.identity import Identity, PublicIdentity
from uvcc_engine.transcript.logs import LineLog
from uvcc_engine.transcript.policy import Policy
from uvcc_engine.transcript.roots import EpochRoot, sid_of
from uvcc_engine.transcript.statements import (
    ResultStatement,
    RootStatement,
    Signed,
    result_core,
    sign_result,
    sign_root,
)
from uvcc_engine.transcript.store import TranscriptStore

_BLIND: Final = "blind"


def blinding_keys(identity: Identity, policy: Policy, coord: Coord) -> dict[int, bytes]:
    """The keys that blind a worker's leaves: by peer, and its own under its own party."""
    peers = policy.peers(coord.party, coord.replica)
    keys = {p: identity.pair_secret(public, policy.sid_job, _BLIND) for p, public in peers.items()}
    return {**keys, coord.party: identity.own_secret(policy.sid_job, _BLIND)}


class WorkerEvidence:
    """Transcript, signed roots and signed result of one worker. One user thread, like the plane."""

    def __init__(self, folder: Path, identity: Identity, policy: Policy, coord: Coord, resume_epoch: int) -> None:
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
        )
        self._roots = LineLog(folder / files.ROOTS)
        self._openings = LineLog(folder / files.OPENINGS)
        self._agreement = Agreement(folder, policy, coord, self.recorder.records)
        self._signed_before = {o["statement"]["epoch"]: line for o, line in self._roots.take()}
        self._opened_before = {(o["epoch"], o["index"]): line for o, line in self._openings.take()}
        if missing := set(range(resume_epoch)) - self._signed_before.keys():
            self.close()
            raise UnreadableError(f"{self._roots.path} lacks epoch {min(missing)}", "take the next attempt")
        self._local: list[tuple[int, int, bytes]] = []  # kind, op, payload of leaves for the next epoch
        if resume_epoch == 0:
            self._local.append((kinds.POLICY, 0, policy.hash))
            if policy.origin is not None:
                self._local.append((kinds.START, 0, policy.origin.leaf))
        self.last_root: EpochRoot | None = None
        self._open_epoch = -1
        if resume_epoch:
            self.last_root = self.recorder.summary(resume_epoch - 1)
            signed = Signed.from_json(json.loads(self._signed_before[resume_epoch - 1]))
            self._agreement.finished(self.last_root, signed)

    @classmethod
    def open(
        cls,
        run_dir: Path,
        identity: Identity,
        policy: Policy,
        coord: Coord,
        peers: Mapping[int, PublicIdentity] | None = None,
        resume_epoch: int | None = None,
    ) -> WorkerEvidence:
        """Open ``run_dir/transcript_<coord>``; with ``resume_epoch`` go on there, repeating what was recorded after it.

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
        return cls(run_dir / files.folder_name(coord), identity, policy, coord, resume_epoch or 0)

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

    def finish(self, epoch: int) -> EpochRoot:
        """Finalise and sign the epoch. Raises ConfigError if the one before was not checked with both peers."""
        if epoch != self._open_epoch:
            raise ConfigError(f"cannot finish epoch {epoch}: epoch {self._open_epoch} is open")
        seen = self._agreement.roots_of(epoch - 1) if epoch else {}
        root = self.recorder.finalize_epoch()
        for opening in self.recorder.openings:
            line = canonical(opening.to_json()) + b"\n"
            self._append(self._openings, self._opened_before.get((epoch, opening.index)), line)
        signed = sign_root(self._identity, RootStatement(self.coord, self.policy.sid_job, root, seen))
        self._append(self._roots, self._signed_before.get(epoch), signed.line)
        self._agreement.finished(root, signed)
        self.last_root, self._open_epoch = root, -1
        return root

    def _append(self, log: LineLog, before: bytes | None, line: bytes) -> None:
        if before is None:
            log.append(line)
        elif before != line:
            raise ProtocolError(
                f"{log.path.name}: a repeated epoch gives another line than before",
                "a peer's root changed; take the next attempt",
                party=self.coord.party,
            )

    def result(self, values: Mapping[str, float], state_digests: Sequence[str]) -> dict[str, Any]:
        """Record and sign the outcome in the open epoch (or a new one), which becomes the last.

        ``values``: what the policy reveals to all; ``state_digests``: hex SHA-256 of the three blinded final share
        components. Returns what belongs into result.json, less ``run``. Raises ConfigError for an unlisted value.
        """
        for name in values:
            if not self.policy.reveals(name):
                raise ConfigError(f"the policy does not reveal {name!r}", "list it under reveal, or keep it shared")
        if self._open_epoch < 0:
            self.begin(self.recorder.next_epoch)
        steps, sid = self.policy.steps, self.policy.sid_job
        core = result_core(sid, steps, values, state_digests)
        self.recorder.record_local((self._open_epoch, 0, 0, kinds.RESULT), core)
        root = self.finish(self._open_epoch)
        statement = ResultStatement(
            self.coord, sid, root.epoch + 1, root.root, steps, dict(values), list(state_digests)
        )
        signed = sign_result(self._identity, statement)
        _replace(self.folder / files.RESULT, signed.line)
        self.sync()
        self._agreement.resulted(signed)
        return {**statement.to_json(), "signature": signed.signature}

    # ---- agreement with the peers ------------------------------------------------------------------------------

    def agreement(self, peer: int) -> bytes:
        """Control message about the last finished epoch for ``peer``: own signed root, and the third party's before."""
        return self._agreement.message(peer)

    def check(self, peer: int, body: bytes) -> None:
        """Check a peer's :meth:`agreement` against the last finished epoch.

        Raises ForkError (a ProtocolError naming both parties and the epoch) if the common leaves differ, ProtocolError
        naming the culprit if a signature fails or a party signed two roots for one epoch.
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
        for log in (self._openings, self._roots, self._agreement.log):
            log.sync()
        self.recorder.sync()

    def close(self) -> None:
        """Close all files. Harmless twice."""
        self.recorder.close()
        for log in (self._openings, self._roots, self._agreement.log):
            log.close()


def _replace(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)


def read_signed(path: Path) -> Signed:
    """A signed statement from its file. Raises UnreadableError."""
    return Signed.from_json(reading.read_json(path))
