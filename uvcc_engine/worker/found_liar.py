"""What a worker leaves behind after a proof that failed: whom it suspects, signed, with what its peers signed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from uvcc_engine.contract.errors import FoundLiar
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.peer_protocol.peer_messages import AttachedNote, Topic
from uvcc_engine.transcript.signed import findings
from uvcc_engine.worker.admission import Admission
from uvcc_engine.worker.consensus import StepConsensus


def leave_finding(spec: WorkerSpec, admitted: Admission, table: StepConsensus, epoch: int, found: FoundLiar) -> None:
    """Write ``finding_<coord>.json``: the own statement first, then those of the peers that answer within seconds.

    What a peer sends counts only if it signed it and it is about this failure.
    """
    path = Path(spec.dir) / findings.file_name(admitted.coord)
    mine = findings.SignedFinding(
        policy=admitted.policy.hash.hex(),
        coord=str(admitted.coord),
        attempt=spec.attempt,
        epoch=epoch,
        suspects=list(found.own),
        why=found.why if len(found.own) == 1 else "",
    )
    record = findings.signed(mine, partial(admitted.identity.sign, findings.NAMESPACE))
    findings.write(path, admitted.policy, [record])
    records = [record]
    for peer, note in sorted(table.trade(AttachedNote(Topic.FINDING, epoch, record.encode())).items()):
        body = note.decode("ascii", "replace")
        theirs = findings.opened(body, admitted.policy)
        if theirs is not None and (theirs.party, theirs.place) == (peer, mine.place):
            records.append(body)
    findings.write(path, admitted.policy, records)
