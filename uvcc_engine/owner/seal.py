"""``uvcc-engine seal``: split and seal an owner's rows for one attempt of one proposal, however many they are.

It is given what the console has checked (a request: the proposal, its job, what it reveals, the owners, the pods' keys)
and has no network. The three files that it writes are each readable by one party's pods only; ``share.json`` beside
them says what the policy will commit to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.schema_text import write_fitted
from uvcc_engine.owner.client import sealed_name
from uvcc_engine.owner.joined_rows import FoundRows, joined_rows
from uvcc_engine.owner.rows import OwnerRows, rows_of
from uvcc_engine.sealing.components import Ring
from uvcc_engine.sealing.purpose import ProposedUse, Purpose
from uvcc_engine.sealing.streamed_inputs import share_rows
from uvcc_engine.transcript.signing.identity import Identity, PublicIdentity

SHARE: Final = owner_files.SHARE
_TELL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SealRequest:
    """``owners``: X25519 keys in their order, this owner's among them; ``pods``: of each replica three identities."""

    proposal: str
    attempt: int
    job: dict[str, Any]
    reveal: tuple[tuple[str, str], ...]
    owners: tuple[str, ...]
    pods: tuple[tuple[PublicIdentity, ...], ...]


def seal(args: argparse.Namespace) -> dict[str, Any]:
    """Read, split, seal and write. Raises UvccError naming what does not fit."""
    request = strict.read(SealRequest, files.read_json(args.request), "the request")
    owner, job = Identity.load(args.owner), PrivateJob.from_json(request.job)
    if owner.public.x25519 not in request.owners or len(set(request.owners)) != len(request.owners):
        raise ConfigError("the request names this owner not at all, or somebody twice", "is this the right key?")
    purpose = Purpose.of(job, request.owners, ProposedUse(request.proposal, request.attempt, request.reveal))
    rows = _rows(job, args, request.owners.index(owner.public.x25519))
    args.out.mkdir(parents=True, exist_ok=True, mode=0o700)
    out = [args.out / sealed_name(party) for party in range(PARTIES)]
    total = sum(shape[0] for shape in rows.shapes.values())
    blocks = _counted(rows.blocks(), total, args.progress)
    made = share_rows(rows.shapes, blocks, job.frac_bits, request.pods, owner, purpose, out)
    if rows.schema is not None and args.fitted is not None:
        write_fitted(args.fitted, rows.schema)
    told = {
        "owner": owner.public.x25519,
        "commitments": list(made.commitments),
        "files": [{"bytes": f.size, "sha256": f.sha256} for f in made.files],
        "rows": {n[:-2]: shape[0] for n, shape in rows.shapes.items() if n.endswith(("_x", "_y"))},
    }
    files.write_json(args.out / SHARE, told)
    return told


def _rows(job: PrivateJob, args: argparse.Namespace, number: int) -> OwnerRows:
    """What owner ``number`` contributes: rows, or its columns of the rows that all owners have."""
    if job.join is None:
        return rows_of(job, args)
    if args.data is None or args.schema is None or args.labels is not None or args.joined is None:
        raise ConfigError(
            "the job puts columns together by a key", "--data names a table with it, --schema its columns"
        )
    return joined_rows(job, job.join, number, args.data, args.schema, FoundRows.load(args.joined))


def _counted(blocks: Iterator[tuple[str, Ring]], total: int, progress: bool) -> Iterator[tuple[str, Ring]]:
    done, told = 0, 0.0
    for name, rows in blocks:
        yield name, rows
        done += len(rows)
        if progress and (done == total or time.monotonic() - told > _TELL_S):
            told = time.monotonic()
            print(f"progress {done} {total}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; what the policy binds goes to standard output as one JSON line."""
    parser = RaisingParser(prog="uvcc-engine seal", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--request", type=Path, required=True, help="what `uvcc owner share` checked (JSON)")
    parser.add_argument("--owner", type=Path, required=True, help="folder of the owner's key pair")
    parser.add_argument("--out", type=Path, required=True, help="folder for the sealed files")
    parser.add_argument("--data", type=Path, help="CSV, Parquet, .npz, .npy or IDX file; the packaged digits without")
    parser.add_argument("--labels", type=Path, help="labels file, where --data holds one array only")
    parser.add_argument("--schema", type=Path, help="what the columns of --data are: uvcc data infer writes one")
    parser.add_argument("--weights", type=Path, help="the model's weights (.npz), where the job's task is infer")
    parser.add_argument("--fitted", type=Path, help="with --schema: where its statistics are written")
    parser.add_argument("--joined", type=Path, help="where uvcc-engine align wrote the rows that all owners have")
    parser.add_argument("--progress", action="store_true", help="tell on standard error how many rows are done")
    parser.set_defaults(pin=None)
    args = parser.parse_args(argv)
    try:
        if args.weights is None:
            args.schema = owner_files.named_schema(args.data, args.schema)
        print(json.dumps(seal(args)))
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
