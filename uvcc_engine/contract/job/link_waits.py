"""How long a worker's link waits and how often it looks, by how many workers its party has. Standard library only."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import Topology

PEER_TIMEOUT_S: Final = 10.0
"""Without any sign of life of a peer for this long the run ends; the plane says something every two seconds."""
FLEET_TIMEOUT_S: Final = 120.0
"""The same where a party has several workers: one that stands still for a minute must not end all of them."""
CROWD: Final = 8
"""So many workers of a party may share a machine's processors before they look and repeat less often."""
FIRST_CONTACT_S: Final = 600.0
"""How long the first worker waits for the last one to start."""


def patience(size: Topology) -> LinkSpec:
    """How long the plane waits and how often it looks, by the fleet's size.

    Workers that share processors answer late: a frame sent again after half a second, as between two machines, would
    only add to what delays the answer. A link that broke is noticed at once all the same.
    """
    if size.workers_per_party == 1:
        return LinkSpec(peer_timeout_s=PEER_TIMEOUT_S, first_contact_s=FIRST_CONTACT_S)
    crowd = max(1.0, size.workers_per_party / CROWD)
    waits = LinkSpec(
        peer_timeout_s=FLEET_TIMEOUT_S * crowd,
        first_contact_s=FIRST_CONTACT_S,
        order_s=30.0 * crowd,
        rto_s=4.0 * crowd,
        look_s=0.005 if crowd == 1.0 else 0.01 * crowd,
    )
    roomy = (os.cpu_count() or 1) >= 2 * size.workers_per_party
    return waits if roomy else replace(waits, spins=False, idle_s=min(0.02 * size.workers_per_party, 1.0))
