"""One worker's checkpoints: taken between two steps, encrypted, written beside the training, committed by all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from uvcc_engine.checkpoint.commits import check_copies, checked_statement, signed_statement, write_record
from uvcc_engine.checkpoint.encryption import decrypt, encrypt, rest_key, state_name
from uvcc_engine.checkpoint.saver import CheckpointPlace, Saver
from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import ProtocolError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.peer_protocol import peer_messages
from uvcc_engine.contract.peer_protocol.peer_messages import AttachedNote, Topic, Vote
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.model.learning.state_digests import HALVES, blind_at, component_digest, half_of
from uvcc_engine.worker.admission import Admission
from uvcc_engine.worker.consensus import StepConsensus
from uvcc_engine.worker.outcome import state_blinds
from uvcc_engine.worker.ranks import Ranks

KEPT: Final = 4


def about(coord: str, step: int) -> str:
    """What a worker's encrypted state is bound to, so that none passes for another."""
    return f"{coord} at step {step}"


class Checkpoints:
    """What a session does with its run directory's checkpoints. Use it from the training thread only."""

    def __init__(self, spec: WorkerSpec, admitted: Admission, writer: RunWriter, ranks: Ranks) -> None:
        self.root = Path(spec.dir) / files.CHECKPOINTS
        self._spec, self._admitted, self._writer, self._ranks = spec, admitted, writer, ranks
        self._key = rest_key(admitted.identity, admitted.policy.sid_job)
        both = state_blinds(admitted.identity, admitted.policy, admitted.coord)
        self._blinds = dict(zip(HALVES, (both[:32], both[32:]), strict=True))
        self._saver: Saver | None = None
        self._stated = (-1, "")
        self._committed = -1

    def open(self) -> None:
        """Agree with the pod's other ranks on how their files are named from now on."""
        place = CheckpointPlace(
            root=self.root,
            run=self._spec.run,
            rank=self._spec.rank,
            pod=self._ranks.pod,
            leads=self._ranks.leads_pod,
            token=self._ranks.token(),
            topology=asdict(self._spec.topology),
            keep=KEPT,
        )
        self._saver = Saver(place, lambda step, sha: self._writer.event("checkpoint_written", step=step, sha256=sha))

    @property
    def _open(self) -> Saver:
        assert self._saver is not None, "not opened"
        return self._saver

    def close(self) -> None:
        """End the writing thread. Harmless twice."""
        if self._saver is not None:
            self._saver.close()

    # -- what is there -----------------------------------------------------------------------------------------------

    def survey(self) -> ck.FoundCheckpoints:
        """This run's checkpoints, every byte read; each altered one is told."""
        found = ck.survey(self.root, run=self._spec.run)
        for step, error in found.altered.items():
            self._writer.event("checkpoint_refused", level="warn", step=step, detail=str(error))
        return found

    def set_aside(self, after: int) -> None:
        """Move later checkpoints of this pod out of the way; the ranks of the pod call it together."""
        if self._ranks.leads_pod and (aside := ck.set_aside(self.root, after)) is not None:
            self._writer.event("checkpoints_set_aside", level="warn", after=after, folder=aside.name)

    def load(self, step: int) -> tuple[dict[str, Tensor], ck.RankState, ck.CheckpointManifest]:
        """This rank's tensors at ``step``, and what was noted with them.

        Raises VerificationError naming the file if the checkpoint was altered, is not this pod's, or holds no tensors.
        """
        manifest = ck.verify(ck.step_dir(self.root, step))
        part = manifest.rank(self._spec.rank)
        path = manifest.path / state_name(self._spec.rank)
        try:
            return load(decrypt(self._key, path.read_bytes(), about(self._spec.coord, step))), part, manifest
        except (UnreadableError, VerificationError, SafetensorError, OSError) as error:
            why = error.what if isinstance(error, UvccError) else str(error)
            raise VerificationError("checkpoint", f"{path} cannot be loaded: {why}", ck.EARLIER) from error

    # -- writing -----------------------------------------------------------------------------------------------------

    def take(self, step: int, tensors: Mapping[str, Tensor], epoch_root: str, extra: dict[str, Any]) -> str:
        """Begin to write the state after ``step`` steps; returns the SHA-256 (hex) of this rank's file."""
        sealed = encrypt(self._key, save(dict(tensors)), about(self._spec.coord, step))
        digests = [component_digest(half_of(tensors, h).items(), blind_at(self._blinds[h], step)) for h in HALVES]
        state = ck.RankState(
            rank=self._spec.rank,
            coord=self._spec.coord,
            epoch_root=epoch_root,
            cursors={"epoch": step, "attempt": self._spec.attempt},
            extra={**extra, "components": digests},
        )
        self._open.start(step, state, {state_name(self._spec.rank): sealed})
        return hashlib.sha256(sealed).hexdigest()

    def ballot(self, vote: Vote) -> tuple[Vote, str]:
        """A vote with what is on this worker's disk, and the signed statement about it, until all have it."""
        manifest = self._open.saved
        if manifest is None or manifest.step <= self._committed:
            return Vote(vote.vote, vote.nonce, manifest.step if manifest else -1), ""
        return Vote(vote.vote, vote.nonce, manifest.step), self._statement(manifest)

    def _statement(self, manifest: ck.CheckpointManifest) -> str:
        if not self._ranks.leads_pod:
            return ""
        if self._stated[0] != manifest.step:
            a = self._admitted
            self._stated = (manifest.step, signed_statement(a.identity, a.policy, a.coord, manifest))
        return self._stated[1]

    def commit(self, table: StepConsensus, saved: int) -> None:
        """Take note that every worker of the fleet has the checkpoint of ``saved``; the lead writes the record."""
        if saved <= self._committed:
            return
        self._committed = saved
        if not self._ranks.leads_pod or self._stated[0] != saved:
            return
        coord, policy = self._admitted.coord, self._admitted.policy
        said = {p: t for (p, step), t in table.statements.items() if step == saved} | {coord.party: self._stated[1]}
        if set(said) != {coord.party, *table.peers}:
            return  # a peer was a checkpoint ahead already; the record of that one follows
        held = {p: checked_statement(text, policy, replace(coord, party=p), saved) for p, text in said.items()}
        check_copies(held)
        write_record(self.root, policy, saved, held)
        table.statements = {at: text for at, text in table.statements.items() if at[1] > saved}
        self._writer.event(
            "checkpoint_committed", step=saved, manifests={str(p): h["manifest"] for p, h in held.items()}
        )

    def settle(self, table: StepConsensus) -> ck.CheckpointManifest | None:
        """Wait until the newest checkpoint is on every worker's disk, and commit it. All workers call it together."""
        manifest = self._open.wait()
        if manifest is None or manifest.step <= self._committed:
            return manifest
        mine = self._statement(manifest).encode()
        due = AttachedNote(Topic.SAVED, manifest.step)
        for peer, note in table.exchange(due, {p: mine for p in table.peers}).items():
            text = peer_messages.note_text(note)
            if isinstance(text, Malformed):
                raise ProtocolError(f"P{peer} sent {text.why}", party=peer)
            table.statements[peer, manifest.step] = text
        self.commit(table, table.among_ranks(Vote(saved=manifest.step)).saved)
        return manifest
