"""The COMMIT record: three parties' signatures under one checkpoint, written once it is on disk at every worker.

A worker's votes say which checkpoint is the newest on its disk; the least over all votes of the fleet is the newest
that everybody has. From then on it can be resumed whatever is lost of one party, and the lead worker of each pod puts
the record beside the checkpoint: what the pod and its two peers each hold, as signed by their identities. The run
directory keeps every record in one file beside, which comes home with the evidence; ``transcript.commits`` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvcc_engine.contract.checkpoints import checkpoint as ck
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.run_files import files
from uvcc_engine.model.learning.state_digests import whole_digest
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.commit_record import (
    NAMESPACE,
    RECORD,
    RECORDS,
    Said,
    Statement,
    check_copies,
    check_record,
    checked_statement,
)
from uvcc_engine.transcript.terms.policy import Policy

__all__ = [
    "NAMESPACE",
    "RECORD",
    "RECORDS",
    "Said",
    "Statement",
    "check_copies",
    "check_record",
    "checked_statement",
    "read_record",
    "signed_statement",
    "write_record",
]


def signed_statement(identity: Identity, policy: Policy, coord: Coord, manifest: ck.CheckpointManifest) -> str:
    """This pod's statement about a checkpoint of its own, signed by its lead worker, as one line of JSON."""
    said = Statement(str(coord), policy.sid_job.hex(), manifest.step, manifest.sha256, _components(manifest))
    signature = identity.sign(NAMESPACE, said.payload)
    return json.dumps({"manifest": said.manifest, "components": said.components, "signature": signature})


def _components(manifest: ck.CheckpointManifest) -> tuple[str, str]:
    """Digests of the pod's two components, from what each of its ranks noted."""
    noted = [list(manifest.ranks[rank].extra["components"]) for rank in sorted(manifest.ranks)]
    return whole_digest([lo for lo, _ in noted]), whole_digest([hi for _, hi in noted])


def write_record(root: Path, policy: Policy, step: int, statements: Mapping[int, Said]) -> None:
    """Put the record beside the checkpoint of ``step``, and among the run's. Raises UvccError if the disk refuses."""
    record = {"sid_job": policy.sid_job.hex(), "step": step, "parties": [dict(statements[p]) for p in range(PARTIES)]}
    files.write_json(ck.step_dir(root, step) / RECORD, record, mode=0o600)
    kept = files.LineFile(root.parent / RECORDS)
    try:
        kept.append(sorted_json(record))
    finally:
        kept.close()


def read_record(folder: Path, policy: Policy) -> dict[str, Any]:
    """The record of a checkpoint, with its three signatures checked.

    Raises UnreadableError if there is none, VerificationError if it does not hold for this checkpoint.
    """
    manifest, found = ck.read_manifest(folder), files.read_json(folder / RECORD)
    held = check_record(found, policy)
    if found["step"] != manifest.step or manifest.sha256 not in {h["manifest"] for h in held.values()}:
        raise VerificationError("commit", f"{folder} is not the checkpoint that was committed", "use an earlier one")
    return found
