"""Owners of different columns find the rows that all of them have: what each sees of it, and what is carried for them.

The owner's program makes tags, seals and compares; this carries its sealed boxes through the rendezvous. Two rounds:
each owner's secret for each other, in signed records, then its list of tags, as mail from owner to owner. What is done
is kept, so that an owner who came too early runs the same again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from uvcc_console.federation.data_owner import (
    RECEIPT,
    NotYetError,
    OwnerRequest,
    Patience,
    ask_for,
    folder_of,
    join_folder,
)
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.parcels import Parcels, box_of, send
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.plan.owndata import owners_program
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.column_join import ColumnJoin
from uvcc_engine.contract.peer_protocol.record_names import OWNER_JOINS
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signed import owner_shares
from uvcc_engine.transcript.signed.owner_shares import OWNER_NAMESPACE, OwnerJoin
from uvcc_engine.transcript.signing.identity import Identity

RESULT: Final = "matched.json"
_HEARD: Final = "heard.json"
_SENT: Final = "sent"
_LIST: Final = "tags.box"
Sleep = Callable[[float], None]
T = TypeVar("T")


def screen(join: ColumnJoin, number: int) -> list[str]:
    """What an owner reads before it looks for common rows: what it gives, and what that tells to whom."""
    mine = [f"{join.columns[number]} features"] if join.columns[number] else []
    mine += ["the labels"] if number == join.label else []
    lines = [f"you give     {' and '.join(mine)} of the rows whose {join.key!r} all {len(join.columns)} owners have"]
    return lines + [f"{'it tells' if not n else '':<13}{sentence}" for n, sentence in enumerate(join.leaks(number))]


def found(
    there: Rendezvous,
    base: Path,
    request: OwnerRequest,
    files: Sequence[str],
    owner: Identity,
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Sleep = time.sleep,
) -> str:
    """Find the common rows with the other owners; what stands for them and their order, for the owner to sign.

    ``files``: as ``uvcc-engine seal`` takes them. Waits up to ``wait_s`` for the others. Raises NotYetError naming
    those who have not come so far, UvccError with the owner's program's own words.
    """
    folder = join_folder(base, request)
    if (folder_of(base, request) / RECEIPT).exists():
        return ""  # it is sealed already
    table, program = _table(files), _Program(base, request, folder)
    if not (folder / RESULT).exists():
        heard = _secrets(there, request, owner, program, wait_s, tell, sleep)
        if not (folder / _SENT).exists():
            write_atomic(folder / _HEARD, json.dumps(_for_us(heard, owner)).encode(), mode=0o600)
            made = program.run("tags", "--heard", str(folder / _HEARD), *table)
            for number, name in made["files"].items():
                box = box_of(request.proposal.id, request.attempt, f"join/{number}")
                send(there, box, heard[int(number)].mailbox, {_LIST: folder / name})
            write_atomic(folder / _SENT, b"", mode=0o600)
        _lists(there, request, heard, folder, wait_s, tell, sleep)
        write_atomic(folder / RESULT, json.dumps(program.run("match")).encode(), mode=0o600)
    result = reading.read_json(folder / RESULT)
    tell(f"{result['common']} of your {result['rows']} rows are with all {len(request.owners)} owners")
    return str(result["digest"])


class _Program:
    def __init__(self, base: Path, request: OwnerRequest, folder: Path) -> None:
        self._args = ["--request", str(ask_for(base, request)), "--owner", str(base), "--folder", str(folder)]

    def run(self, verb: str, *more: str) -> dict[str, Any]:
        """One verb of ``uvcc-engine align``. Raises UvccError with its own words."""
        said: dict[str, Any] = json.loads(owners_program([verb, *self._args, *more], "align", limit_s=None))
        return said


def _table(files: Sequence[str]) -> list[str]:
    """Of the files that an owner names, those that say which rows it has. Raises ConfigError for any other."""
    given = dict(zip(files[::2], files[1::2], strict=True))
    for flag in ("--data", "--schema"):
        if flag not in given:
            what = "the proposal puts columns together by a key"
            raise ConfigError(
                what, f"{flag} is missing: --data names a table that has it, --schema what its columns are"
            )
    if odd := sorted(given.keys() - {"--data", "--schema"}):
        raise ConfigError(f"{odd[0]} has no meaning where columns are put together", "labels are a column of --data")
    return [part for flag in ("--data", "--schema") for part in (flag, given[flag])]


def _secrets(
    there: Rendezvous,
    request: OwnerRequest,
    owner: Identity,
    program: _Program,
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Sleep,
) -> dict[int, OwnerJoin]:
    """Leave this owner's secret for the others, and wait for theirs; by owner, this one's left out."""
    p = request.proposal
    join = OwnerJoin(
        proposal=p.id,
        attempt=request.attempt,
        owner=owner.public.x25519,
        mailbox=request.mailbox,
        secrets=program.run("hello"),
    )
    prefix = f"{OWNER_JOINS}{p.id}/{request.attempt}/"
    body = owner_shares.join_signed(join, lambda payload: owner.sign(OWNER_NAMESPACE, payload))
    there.leave(f"{prefix}{request.number}", body)

    def look() -> dict[int, OwnerJoin]:
        heard = owner_shares.joins_of(p, request.attempt, request.owners, there.look_bodies(prefix))
        return {number: said for number, said in heard.items() if number != request.number}

    return _when_all(request, look, "looks for common rows", Patience(wait_s, tell, sleep))


def _for_us(heard: Mapping[int, OwnerJoin], owner: Identity) -> dict[str, str]:
    return {said.owner: said.secrets.get(owner.public.x25519, "") for said in heard.values()}


def _lists(
    there: Rendezvous,
    request: OwnerRequest,
    heard: Mapping[int, OwnerJoin],
    folder: Path,
    wait_s: float,
    tell: Callable[[str], None],
    sleep: Sleep,
) -> None:
    """Take the other owners' lists of tags, sealed to this one, into files of the owner's program."""
    box = box_of(request.proposal.id, request.attempt, f"join/{request.number}")
    coming = Parcels(there, box, folder / "incoming", [said.mailbox for said in heard.values()])
    names = {number: f"tags-from-{number}.box" for number in heard}

    def look() -> dict[int, str]:
        while coming.poll():
            pass
        for number, said in heard.items():
            if not (folder / names[number]).exists() and _LIST in coming.arrived(said.mailbox):
                with DownloadFolder(folder) as downloads:
                    coming.store(said.mailbox, _LIST, downloads, (names[number],))
        return {number: name for number, name in names.items() if (folder / name).exists()}

    _when_all(request, look, "has sent its list of keys", Patience(wait_s, tell, sleep))


def _when_all(request: OwnerRequest, look: Callable[[], dict[int, T]], what: str, patience: Patience) -> dict[int, T]:
    """Look until every other owner's part is there. Raises NotYetError naming those whose part is not."""
    while True:
        there = look()
        missing = [n for n in range(len(request.owners)) if n != request.number and n not in there]
        if not missing:
            return there
        who = ", ".join(f"owner {n} ({fingerprint(request.proposal.owners[n])})" for n in missing)
        lacks = f"not yet of {who} is known that it {what}"
        if patience.over:
            raise NotYetError(lacks, "each owner runs uvcc owner share; run this again, or say --wait SECONDS")
        patience.wait(lacks)
