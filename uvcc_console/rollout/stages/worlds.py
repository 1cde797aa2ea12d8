"""Where the ranks of one party meet: the address that each rank's process group finds its sisters at."""

from __future__ import annotations

import shlex
import time

from uvcc_console.core import events as ev
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.plan import Phase, pod_name
from uvcc_engine.contract.errors import UnreachableError
from uvcc_engine.parallel.topology import PARTIES

# prints a port that is free now; rank 0 takes it within seconds
_PORT = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as s:
    print(s.getsockname()[1])
"""


async def meeting_places(ctx: Rollout, phase: Phase) -> dict[str, dict[str, str]]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of every worker of a phase, by coordinate.

    Empty where a party has one worker only. A party's first pod holds its rank 0, which serves the others.
    """
    size = phase.topology
    if size.workers_per_party == 1:
        return {}
    masters = await each([ctx.members[pod_name(p, 0)] for p in range(PARTIES)], _free_port)
    at: dict[int, tuple[str, int]] = {}
    for party in range(PARTIES):
        name = pod_name(party, 0)
        at[party] = (_address(ctx.members[name]), masters[name])
        fields = {"party": party, "addr": at[party][0], "port": at[party][1]}
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


def _address(member: Member) -> str:
    if member.pod is None or not member.pod.host:
        raise UnreachableError(f"pod {member.name} has no address yet", "provision it first")
    return member.pod.host


async def _free_port(member: Member) -> int:
    python = shlex.quote(member.boot.python if member.boot else "python3")
    address = _address(member)
    bind = address if address.startswith("127.") else "0.0.0.0"
    return int(await member.ssh.sh(f"{python} -S - {bind}", stdin=_PORT.encode()))
