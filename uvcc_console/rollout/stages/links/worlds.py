"""Where the ranks of one party meet: the address that each rank's process group finds its sisters at."""

from __future__ import annotations

import time

from uvcc_console.core import events as ev
from uvcc_console.plan.plan import Phase, pod_name
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.links.ports import LOOPBACK, MASTERS, free_ports, host_of


async def meeting_places(ctx: Rollout, phase: Phase) -> dict[str, dict[str, str]]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of every worker of a phase, by coordinate.

    Empty where a party has one worker only. A party's first pod holds its rank 0, which serves the others: at an
    address that no other machine reaches, if the party has no other pod.
    """
    size = phase.topology
    if size.workers_per_party == 1:
        return {}
    parties = sorted({c.party for c in phase.coords()})
    masters = await free_ports({pod_name(p, 0): 1 for p in parties}, ctx.members, MASTERS)
    at: dict[int, tuple[str, int]] = {}
    for party in parties:
        name = pod_name(party, 0)
        at[party] = (host_of(ctx.members[name]) if size.replicas > 1 else LOOPBACK, masters[name][0])
        fields = {"phase": phase.name, "party": party, "addr": at[party][0], "port": at[party][1]}
        ctx.say(ev.EngineEvent(pod=name, level="info", event="dp_master_port_selected", fields=fields, at=time.time()))
    pods: dict[str, int] = {}
    found = {}
    for coord in sorted(phase.coords()):
        pod = phase.pod_of(coord)
        pods[pod] = pods.get(pod, -1) + 1
        address, port = at[coord.party]
        found[str(coord)] = {
            "RANK": str(size.local_rank(coord)),
            "LOCAL_RANK": str(pods[pod]),
            "WORLD_SIZE": str(size.workers_per_party),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    return found
