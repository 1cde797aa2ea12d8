"""The network as the run will use it, tried before the run: ports both ways, ranks that add up, parties that talk.

Ports are dialled between pods that must reach each other without a relay: the pods of one party, whose ranks meet, and
for link ``direct`` the parties of a replica. Then the agents fork the run's own layout of ranks, of kind "preflight":
they meet in the groups and over the links of the full run and leave what they measured on their pods.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from uvcc_console.fleet import agent_lines
from uvcc_console.plan.plan import Phase, pod_name
from uvcc_console.plan.schema import LmJobSettings, PrivateJobSettings
from uvcc_console.rollout import priority
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.fleet.findings import Problem
from uvcc_console.rollout.stages.links.ports import python_of
from uvcc_console.rollout.stages.links.relay import TOKEN_FILE, dial_all, links_for, relay_tokens
from uvcc_console.rollout.stages.links.worlds import meeting_places
from uvcc_console.rollout.stages.training.agree import identity_of
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand, RelayCommand, SignalCommand, WatchCommand
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord
from uvcc_engine.contract.parsing.untrusted import load_json
from uvcc_engine.contract.peer_protocol.preflight_job import PATTERN, PreflightJob, PreflightReport
from uvcc_engine.contract.run_files.records import Malformed

NAME = "preflight"
START_S = 120.0
RANK_S = 30.0  # for the ranks of a party to meet; a world of many takes longer
PER_RANK_S = 2.0
POLL_S = 0.1
REDUCE_MIB = 2.0
PAIR_MIB = 2.0
_HINT_PORTS = "open the pods' ports to each other, or take pods of one network: a provider's firewall or port mapping"
_GATHER = f"""
import glob, json, os, sys
print(json.dumps([json.load(open(p)) for p in sorted(glob.glob(os.path.join(sys.argv[1], "{PATTERN}")))]))
"""


@dataclass(frozen=True, slots=True)
class Fabric:
    """What was found by pod: facts to show, and what must not be."""

    facts: Mapping[str, dict[str, Any]]
    findings: tuple[Problem, ...]


def phase_of(ctx: Rollout) -> Phase:
    """The layout of the pods at hand under a run id of its own, so that nothing of it meets the run's messages."""
    return replace(ctx.layout(), name=NAME, engine_run=f"{ctx.plan.run}.{NAME}", kind=NAME, steps=0)


async def ports(ctx: Rollout) -> Fabric:
    """Dial every pod from every pod that will need it. A way between parties is needed for link ``direct`` only."""
    members = ctx.due()
    wanted: dict[str, list[str]] = {m.name: [] for m in members}
    across: set[tuple[str, str]] = set()
    for a in members:
        for b in members:
            if a is b:
                continue
            if a.request.party == b.request.party:
                wanted[a.name].append(b.name)
            elif a.request.replica == b.request.replica and ctx.plan.profile.link in ("direct", "auto"):
                wanted[a.name].append(b.name)
                across.add((a.name, b.name))
    ways = await dial_all(ctx, wanted)
    findings, open_ways = [], dict.fromkeys(wanted, 0)
    for (source, target), way in ways.items():
        if isinstance(way, float):
            open_ways[source] += 1
        elif (source, target) not in across or ctx.plan.profile.link == "direct":
            findings.append(Problem(source, f"it cannot open a connection to {target}: {way}", _HINT_PORTS))
    facts = {n: {"ports_open": f"{open_ways[n]}/{len(wanted[n])}"} for n in wanted if wanted[n]}
    return Fabric(facts, tuple(findings))


async def ranks(ctx: Rollout) -> Fabric:
    """Have the agents fork the full run's ranks, let them measure, and gather what they left."""
    phase = phase_of(ctx)
    private = isinstance(ctx.plan.profile.job, PrivateJobSettings)
    links = await links_for(ctx, phase) if private else {}
    worlds = await meeting_places(ctx, phase) if private else {}
    provider = ctx.plan.profile.fleet.kind
    slow = priority.stretch(provider, sum(1 for _ in phase.coords()))
    limit = slow * (RANK_S + PER_RANK_S * phase.topology.workers_per_party)

    async def one(member: Member) -> list[PreflightReport | Malformed]:
        there = f".uvcc/runs/{phase.engine_run}"
        await member.ssh.sh(f"umask 077; rm -rf {there}/{PATTERN}; mkdir -p {there}")
        if private:
            token = relay_tokens(ctx, phase, member.request.replica)[member.request.party]
            await member.ssh.put(token.encode(), f"{there}/{TOKEN_FILE}")
        specs = [_spec(ctx, phase, c, links, worlds, limit) for c in phase.coords(member.name)]
        await member.channel.request(LaunchCommand(run=phase.engine_run, workers=specs), timeout=slow * START_S)
        await _ended(member, phase, 4 * limit)
        command = f"{python_of(member)} -S - {shlex.quote(there)}"
        return reports_of(await member.ssh.sh(command, stdin=_GATHER.encode()))

    try:
        found = await each(ctx.of_phase(phase), one)
    finally:
        await stop_relays(ctx, phase)
    return check_fabric(found, {m.name: len(phase.coords(m.name)) for m in ctx.of_phase(phase)})


def _spec(
    ctx: Rollout,
    phase: Phase,
    coord: Coord,
    links: Mapping[str, LinkSpec],
    worlds: Mapping[str, dict[str, str]],
    limit: float,
) -> WorkerSpec:
    profile = ctx.plan.profile
    job = PreflightJob(timeout_s=limit, reduce_mib=REDUCE_MIB, pair_mib=PAIR_MIB)
    if isinstance(profile.job, LmJobSettings):
        job = replace(job, device=str(profile.job.overrides.get("runtime", {}).get("device", "auto")))
    elif isinstance(profile.job, PrivateJobSettings):
        peers = {str(p): identity_of(ctx, p, coord.replica).to_json() for p in range(PARTIES)}
        pods = range(phase.topology.replicas if worlds else 0)
        job = replace(
            job, device=profile.job.device, peers=peers, pods=[identity_of(ctx, coord.party, r).to_json() for r in pods]
        )
    return WorkerSpec(
        run=phase.engine_run,
        kind=NAME,
        coord=str(coord),
        topology=phase.topology,
        job=job.to_json(),
        link=links.get(str(coord), LinkSpec()),
        env={
            **priority.environment(profile.fleet.kind, *phase.sharing()),
            **profile.env,
            **worlds.get(str(coord), {}),
        },
    )


async def _ended(member: Member, phase: Phase, patience_s: float) -> None:
    """Wait for the end of this pod's ranks. Raises UvccError if they take too long; they are ended then."""
    try:
        async with asyncio.timeout(patience_s):
            while True:
                ack = await member.channel.request(WatchCommand(run=phase.engine_run))
                if all(w.state == "exited" for w in agent_lines.workers(ack, member.name)):
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        await member.channel.request(SignalCommand(run=phase.engine_run, signal="KILL"))
        what = f"pod {member.name}: its ranks did not end in {patience_s:.0f} s"
        raise UvccError(what, "see the workers' logs on the pod") from None


async def stop_relays(ctx: Rollout, phase: Phase) -> None:
    """End the relays of a rehearsal; one that does not answer ends with its pod."""
    hosts = [m for m in ctx.of_phase(phase) if m.name == pod_name(0, m.request.replica) and m.agent is not None]
    stops = (m.channel.request(RelayCommand(run=phase.engine_run, action="stop")) for m in hosts)
    await asyncio.gather(*stops, return_exceptions=True)


def reports_of(text: str) -> list[PreflightReport | Malformed]:
    """What a pod's ranks left, as its shell printed it. Total."""
    try:
        listed = load_json(text)
    except ValueError:
        listed = None
    return [PreflightReport.parse(one) for one in listed] if isinstance(listed, list) else [Malformed("no list")]


def check_fabric(reports: Mapping[str, Sequence[PreflightReport | Malformed]], expected: Mapping[str, int]) -> Fabric:
    """Facts and findings out of the ranks' reports, by pod. Pure."""
    facts: dict[str, dict[str, Any]] = {}
    findings = []
    for pod, listed in reports.items():
        found = [report for report in listed if isinstance(report, PreflightReport)]
        for odd in [report for report in listed if isinstance(report, Malformed)][: expected[pod]]:
            findings.append(Problem(pod, f"it left {odd.why}", "replace the pod: what it says is damaged"))
        if len(found) < expected[pod]:
            what = f"{expected[pod] - len(found)} of its {expected[pod]} ranks ended without a report"
            findings.append(Problem(pod, what, "see the workers' logs on the pod: memory, or torch"))
        for report in found:
            for trouble in report.trouble:
                hint = f"{trouble.hint}; " if trouble.hint else ""
                findings.append(Problem(pod, f"{report.coord}: {trouble.what}", hint + _HINT_PORTS))
        facts[pod] = _slowest(found)
    return Fabric(facts, tuple(findings))


def _slowest(reports: Sequence[PreflightReport]) -> dict[str, Any]:
    """Of each group its slowest rank, of each pair what its rank measured."""
    facts: dict[str, Any] = {}
    for report in reports:
        for name, group in report.groups.items():
            known = facts.get(f"all_reduce_{name}")
            if known is None or group.mib_s < known["mib_s"]:
                facts[f"all_reduce_{name}"] = {**asdict(group), "backend": report.backend}
        for peer, pair in report.pairs.items():
            facts[f"pair_p{peer}"] = asdict(pair)
    return facts
