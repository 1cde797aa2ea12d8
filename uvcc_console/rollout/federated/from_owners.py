"""A domain waits for the data owners: each shares from its own machine once the rosters are there."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvcc_console.core.log import logger
from uvcc_console.federation.domain_key import fingerprint
from uvcc_console.federation.owner_parcels import OwnerParcels
from uvcc_engine.contract.errors import PeerLostError, UnreachableError

LOOK_S: Final = 1.0
log = logger(__name__)


async def shares_of_owners(parcels: OwnerParcels, replicas: int, wait_s: float) -> dict[str, Any]:
    """Wait until every owner's files are there, and lay them for this domain's pods; what the policy binds of them.

    Raises PeerLostError naming the owners who sent nothing in their time, ProtocolError naming one who lied.
    """
    clock = asyncio.get_running_loop().time
    end, missing = clock() + wait_s, list(range(len(parcels.proposal.owners)))
    while missing:
        try:
            missing = await asyncio.to_thread(parcels.poll)
        except UnreachableError as e:
            log.warning("the rendezvous: %s", e)
        if missing and clock() > end:
            names = ", ".join(f"owner {n} ({fingerprint(parcels.proposal.owners[n])})" for n in missing)
            raise PeerLostError(
                f"{names} has not shared after {wait_s:.0f} s", "ask that owner, then begin the next attempt", party=-1
            )
        if missing:
            await asyncio.sleep(LOOK_S)
    return await asyncio.to_thread(parcels.laid, replicas)
