"""``uvcc-engine align``: how an owner finds, with the others, the rows that all of them have; no network is used.

``hello`` draws this owner's secret and seals it to each other owner; ``tags`` takes theirs, and seals this owner's list
of tags to each; ``match`` takes the others' lists and writes the order of the common rows, which ``seal`` follows. The
console carries the sealed boxes between the owners.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing import strict
from uvcc_engine.contract.run_files import files
from uvcc_engine.data.table_batches import table_batches
from uvcc_engine.owner import key_tags
from uvcc_engine.owner.joined_rows import FOUND, KEY, ORDER, FoundRows, column_schema, file_digests
from uvcc_engine.owner.key_tags import JoinUse
from uvcc_engine.owner.seal import SealRequest
from uvcc_engine.sharding.validation import check_counts
from uvcc_engine.transcript.signing.identity import Identity

_SECRET: Final = "secret"
_TAGS: Final = "tags"
_HELLO, _LIST = "secret", "tags"


def sent_name(number: int) -> str:
    """The file of what goes to another owner."""
    return f"tags-to-{number}.box"


def received_name(number: int) -> str:
    """The file of what another owner sent."""
    return f"tags-from-{number}.box"


class _Aligning:
    """One owner's side: the request, its key, and the folder that it keeps the state in."""

    def __init__(self, args: argparse.Namespace) -> None:
        request = strict.read(SealRequest, files.read_json(args.request), "the request")
        self.me, self.job = Identity.load(args.owner), PrivateJob.from_json(request.job)
        if self.job.join is None:
            raise ConfigError("the job puts no columns together", "uvcc owner share shares rows as they are")
        self.join = self.job.join
        self.join.check_owners(len(request.owners))
        if self.me.public.x25519 not in request.owners or len(set(request.owners)) != len(request.owners):
            raise ConfigError("the request names this owner not at all, or somebody twice", "is this the right key?")
        self.number = request.owners.index(self.me.public.x25519)
        self.others = {n: key for n, key in enumerate(request.owners) if n != self.number}
        self.use = JoinUse(request.proposal, request.attempt, request.owners, self.join)
        self.folder: Path = args.folder
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def keep(self, name: str, data: bytes) -> None:
        files.write_atomic(self.folder / name, data, mode=0o600)


def hello(args: argparse.Namespace) -> dict[str, Any]:
    """Draw this owner's secret, once, and seal it to each other owner: X25519 key -> box in hex."""
    at = _Aligning(args)
    if not (at.folder / _SECRET).exists():
        at.keep(_SECRET, key_tags.new_secret())
    secret = (at.folder / _SECRET).read_bytes()
    return {key: at.use.sealed(secret, _HELLO, at.me, key).hex() for key in at.others.values()}


def tags(args: argparse.Namespace) -> dict[str, Any]:
    """Make the list of tags of this owner's table, and seal it to each other owner.

    ``heard``: a JSON object, X25519 key -> the box that this owner sent. Raises UvccError naming row or owner.
    """
    at, heard = _Aligning(args), files.read_json(args.heard)
    column_schema(at.job, at.join, at.number, args.schema)
    secrets = {at.me.public.x25519: (at.folder / _SECRET).read_bytes()}
    for number, key in at.others.items():
        try:
            box = bytes.fromhex(heard[key])
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableError(f"owner {number} ({key[:12]}) sent no secret", "it shares first") from error
        secrets[key] = at.use.opened(box, _HELLO, at.me, key)
    joint, before = at.use.key(secrets), file_digests(args.data, args.schema)
    found = [tag for part in table_batches(args.data) for tag in key_tags.tags_of(part, at.join, joint)]
    key_tags.check_distinct(found, args.data.name)
    if file_digests(args.data, args.schema) != before:
        raise ConfigError(f"{args.data.name} changes while it is read", "share a file that nobody writes to")
    plain = key_tags.packed(found)
    for number, key in at.others.items():
        at.keep(sent_name(number), at.use.sealed(plain, _LIST, at.me, key))
    at.keep(KEY, joint)
    at.keep(_TAGS, b"".join(found))
    files.write_json(at.folder / FOUND, {"files": before}, mode=0o600)
    return {"rows": len(found), "files": {str(n): sent_name(n) for n in at.others}}


def match(args: argparse.Namespace) -> dict[str, Any]:
    """Take the lists that the others sent, and write the common rows' order. Raises UvccError naming an owner."""
    at = _Aligning(args)
    lists = []
    for number, key in at.others.items():
        box = (at.folder / received_name(number)).read_bytes()
        lists.append(key_tags.unpacked(at.use.opened(box, _LIST, at.me, key), f"owner {number} ({key[:12]})"))
    data, size = (at.folder / _TAGS).read_bytes(), key_tags.TAG_BYTES
    mine = [data[start : start + size] for start in range(0, len(data), size)]
    order = key_tags.common(mine, lists)
    held = at.job.test_rows + at.job.val_rows
    if not order:
        raise ConfigError(
            f"no key of your {len(mine)} rows is among those of all owners",
            f"does {at.join.key!r} hold the same keys, written alike, at each of them? join.form is {at.join.form}",
        )
    if len(order) <= held:
        what = f"the owners have {len(order)} rows in common, and the job tests and validates on {held}"
        raise ConfigError(what, "propose a job with fewer test rows")
    check_counts({"train_x": (len(order) - held,), "test_x": (at.job.test_rows,)}, at.job)
    at.keep(ORDER, b"".join(order))
    return {"rows": len(mine), "common": len(order), "digest": FoundRows.load(at.folder).digest}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; what the console carries on goes to standard output as one JSON line."""
    parser = RaisingParser(prog="uvcc-engine align", description=(__doc__ or "").partition("\n\n")[2])
    verbs = parser.add_subparsers(dest="verb", required=True)
    acts = {"hello": hello, "tags": tags, "match": match}
    for name, act in acts.items():
        verb = verbs.add_parser(name, help=(act.__doc__ or "").partition("\n")[0])
        verb.add_argument("--request", type=Path, required=True, help="what `uvcc owner share` checked (JSON)")
        verb.add_argument("--owner", type=Path, required=True, help="folder of the owner's key pair")
        verb.add_argument("--folder", type=Path, required=True, help="where this owner keeps what it found")
        if name == "tags":
            verb.add_argument("--heard", type=Path, required=True, help="what the other owners said (JSON)")
            verb.add_argument("--data", type=Path, required=True, help="CSV, Parquet or .npz, with the key's column")
            verb.add_argument("--schema", type=Path, help="what the columns of --data are")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(acts[args.verb](args)))
    except UvccError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
