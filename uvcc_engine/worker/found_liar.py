"""What a worker leaves behind after a proof that failed: whom it suspects, signed, with what its peers signed."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from uvcc_engine.contract.errors import FoundLiar, ProofFailedError, UvccError
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.peer_protocol.peer_messages import AttachedNote, Topic
from uvcc_engine.transcript.signed import proof_findings
from uvcc_engine.worker.admission import Admission
from uvcc_engine.worker.consensus import StepConsensus
from uvcc_engine.worker.high_water import HighWaterMark


def end_attempt(
    mark: HighWaterMark, spec: WorkerSpec, admitted: Admission, table: StepConsensus, epoch: int, error: UvccError
) -> None:
    """If a proof did not hold: nobody goes on with this attempt, and what was found lies signed in the worker's folder.

    Raises UvccError if the word about the attempt cannot be left.
    """
    if not isinstance(error, ProofFailedError):
        return
    mark.refute()
    if error.finding is not None:
        with contextlib.suppress(UvccError, OSError):  # a full disk must not hide what is told anyway
            _leave(spec, admitted, table, epoch, error.finding)


def _leave(spec: WorkerSpec, admitted: Admission, table: StepConsensus, epoch: int, found: FoundLiar) -> None:
    """Write ``finding_<coord>.json``: the own statement first, then those of the peers that answer in time.

    What a peer sends counts only if it signed it and it is about this failure.
    """
    path = Path(spec.dir) / proof_findings.file_name(admitted.coord)
    mine = proof_findings.SignedFinding(
        policy=admitted.policy.hash.hex(),
        coord=str(admitted.coord),
        attempt=spec.attempt,
        epoch=epoch,
        suspects=list(found.own),
        why=found.why if len(found.own) == 1 else "",
    )
    record = proof_findings.signed(mine, partial(admitted.identity.sign, proof_findings.NAMESPACE))
    proof_findings.write(path, admitted.policy, [record])
    records = [record]
    for peer, note in sorted(table.trade(AttachedNote(Topic.FINDING, epoch, record.encode())).items()):
        body = note.decode("ascii", "replace")
        theirs = proof_findings.opened(body, admitted.policy)
        if theirs is not None and (theirs.party, theirs.place) == (peer, mine.place):
            records.append(body)
    proof_findings.write(path, admitted.policy, records)
