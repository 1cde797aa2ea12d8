"""A domain waits for the data owners: each shares from its own machine once the rosters are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from uvcc_console.core.log import logger
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.owner_parcels import OwnerParcels
from uvcc_console.federation.owner_results import DOCUMENTS, results_box
from uvcc_console.federation.parcels import send
from uvcc_console.federation.seat import Seat
from uvcc_console.rollout.federated.told_waits import ToldWait
from uvcc_engine.contract.errors import PeerLostError, UnreachableError, UvccError
from uvcc_engine.transcript.signed import owner_shares

LOOK_S: Final = 1.0
log = logger(__name__)


async def shares_of_owners(
    parcels: OwnerParcels, replicas: int, wait_s: float, waits: Callable[[str], None]
) -> dict[str, Any]:
    """Wait until every owner's files are there, and lay them for this domain's pods; what the policy binds of them.

    ``waits`` is told for whom and since when: at once, whenever that changes, and each minute.
    Raises PeerLostError naming the owners who sent nothing in their time, ProtocolError naming one who lied.
    """
    clock = asyncio.get_running_loop().time
    end, missing = clock() + wait_s, list(range(len(parcels.proposal.owners)))
    waiting = ToldWait(waits, "shared", clock(), end, after_s=0.0)
    while missing:
        try:
            missing = await asyncio.to_thread(parcels.poll)
        except UnreachableError as e:
            log.warning("the rendezvous: %s", e)
        names = ", ".join(f"owner {n} ({fingerprint(parcels.proposal.owners[n])})" for n in missing)
        waiting.look(names, clock())
        if missing and clock() > end:
            raise PeerLostError(
                f"{names} has not shared after {wait_s:.0f} s", "ask that owner, then begin the next attempt", party=-1
            )
        if missing:
            await asyncio.sleep(LOOK_S)
    return await asyncio.to_thread(parcels.laid, replicas)


async def results_to_owners(seat: Seat, attempt: int, bodies: list[str], artifacts: Path, phase: str) -> None:
    """Send each owner what this domain's pods sealed, and what shows that it is of the run that was agreed.

    An owner that cannot be sent to can be handed the same by hand: it is among the artifacts, and only it opens it.
    """
    files = {name: artifacts / name for name in (*DOCUMENTS, f"{phase}/proof_bundle.json")}
    files |= {path.relative_to(artifacts).as_posix(): path for path in (artifacts / phase).glob("*/result_*.box")}
    there = {name: path for name, path in files.items() if path.is_file()}
    for number, key in enumerate(seat.proposal.owners):
        share = next((s for b in bodies if (s := owner_shares.share_opened(b, key)) is not None), None)
        if share is None:
            continue
        try:
            await asyncio.to_thread(
                send, seat.there(), results_box(seat.proposal.id, attempt, number), share.mailbox, there
            )
        except UvccError as e:
            log.warning("owner %d was not sent its results: %s", number, e)
