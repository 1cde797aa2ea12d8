"""The domains exchange the transcripts of a phase through the relay's mail, so that each of them verifies the whole."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_console.federation.parcels import Parcels, box_of, manifest, send
from uvcc_console.federation.seat import Seat
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.federated.peers import Peers
from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.parsing.safepaths import Refused, safe_relative
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats.reading import parse_json
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.signed.roster import Roster

MANIFEST: Final = "MANIFEST"
_LARGEST_LIST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ExchangeTable:
    """Who exchanges. ``gather`` looks again and again until a look names all three parties."""

    seat: Seat
    peers: Peers
    rosters: Mapping[int, Roster]
    gather: Callable[[Callable[[], dict[int, bool]], str], Awaitable[dict[int, bool]]]


async def exchange(table: ExchangeTable, run_dir: Path, home: Path, phase: Phase) -> None:
    """Give the others this domain's transcripts below ``home``, and lay theirs beside them.

    Each domain signs the list of what it sends. Raises ProtocolError naming one that lists what is no transcript of its
    own workers, or as whose something else came; PeerLostError naming one that sends nothing.
    """
    seat, stage = table.seat, f"evidence-{phase.name}"
    own = {
        path.relative_to(home).as_posix(): path
        for c in phase.coords()
        for path in (home / phase.pod_of(c) / leaf_file.folder_name(str(c))).iterdir()
        if path.is_file()
    }
    listed = run_dir / f"{stage}.json"
    write_atomic(listed, canonical({name: list(v) for name, v in manifest(own).items()}))
    box = box_of(seat.proposal.id, table.peers.attempt, stage)
    others = [p for p in range(PARTIES) if p != seat.party]
    for party in others:
        await asyncio.to_thread(send, seat.there(), box, party, {**own, MANIFEST: listed})
    found = await table.peers.reach(stage, hashlib.sha256(listed.read_bytes()).hexdigest(), equal=False)
    parcels = Parcels(seat.there(), box, run_dir / "incoming" / stage)
    lists: dict[int, dict[str, Any]] = {}

    def look() -> dict[int, bool]:
        if not all(_whole(parcels, p, lists.get(p)) for p in others):
            parcels.poll()
        for p in others:
            if p not in lists and MANIFEST in parcels.arrived(p):
                lists[p] = _manifest(parcels.read(p, MANIFEST, _LARGEST_LIST), p, found[p].digest)
        return {p: True for p in range(PARTIES) if p not in others or _whole(parcels, p, lists.get(p))}

    await table.gather(look, f"sent its transcripts of {phase.name}")
    with DownloadFolder(home) as downloads:
        for party in others:
            allowed = {(pod.pod, leaf_file.folder_name(c)) for pod in table.rosters[party].pods for c in pod.coords}
            for name in sorted(lists[party]):
                parts = safe_relative(name)
                if isinstance(parts, Refused) or len(parts) != 3 or parts[:2] not in allowed:
                    what = f"P{party}'s domain sent {name[:80]!r} as a transcript of its workers"
                    raise ProtocolError(what, "it may send those of its own workers only", party=party)
                await asyncio.to_thread(parcels.store, party, name, downloads, parts)


def _whole(parcels: Parcels, party: int, listed: dict[str, Any] | None) -> bool:
    here = parcels.arrived(party)
    return listed is not None and all(here.get(name) == tuple(v) for name, v in listed.items())


def _manifest(data: bytes, party: int, digest: str) -> dict[str, Any]:
    """A list of files, if it is the one whose digest that domain signed. Raises ProtocolError."""
    if hashlib.sha256(data).hexdigest() == digest:
        found = parse_json(data, "a list of transcripts")
        if isinstance(found, dict) and all(isinstance(v, list) and len(v) == 2 for v in found.values()):
            return found
    what = f"the list of transcripts that came as P{party}'s is not the one that its domain signed"
    raise ProtocolError(what, "the relay altered it, or that domain lies: ask it")
