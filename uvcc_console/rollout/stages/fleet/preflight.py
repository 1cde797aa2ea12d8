"""Stage preflight: what would only fail later, found now, pod by pod, each with its hint."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core import pod_states
from uvcc_console.fleet import agent_lines
from uvcc_console.plan.long_steps import CPU_OFFER
from uvcc_console.plan.schema import CommandJobSettings, LmJobSettings, PrivateJobSettings, Profile
from uvcc_console.rollout.context import Member, Rollout, all_of, each
from uvcc_console.rollout.stages.fleet import gpu_kernels
from uvcc_console.rollout.stages.fleet.findings import Problem, Requirements, find_problems, free_memory
from uvcc_console.rollout.stages.links import fabric
from uvcc_console.rollout.stages.links.ports import fields_of, no_answer, python_of
from uvcc_console.rollout.stages.links.relay import relay_link
from uvcc_console.rollout.stages.training import lm
from uvcc_engine.contract.agent_protocol.agent_commands import ProbeCommand
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.parsing.untrusted import as_float
from uvcc_engine.contract.text import counted

PROBE_S = 180.0  # of a pod among many that share a machine
IMPORT_LOOKS, IMPORT_LOOK_S = 90, 2.0  # torch from a cold disk takes minutes
_CHEAPER = "pods without GPUs would do, and cost less: fleet.gpu CPU_NODE"
_VERDICT = ("ok", "error", "hint")
_GPU_PROCESSES = "nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv,noheader"
_PING = """
import json, ssl, sys, time, urllib.request
trust = ssl.create_default_context(cafile=sys.argv[2]) if sys.argv[2] else None
took = []
for _ in range(5):
    t = time.perf_counter()
    with urllib.request.urlopen(sys.argv[1], timeout=5, context=trust) as r:
        r.read()
    took.append(time.perf_counter() - t)
print(json.dumps({"rtt_ms": round(1000 * sorted(took)[2], 3)}))
"""


async def preflight(ctx: Rollout) -> str:
    """Probe every pod and every pair that must talk. Raises UvccError naming the first problem; all are journalled.

    The cheap looks come first; what costs a moment of every pod is not tried on a fleet that has failed already.
    """
    profile = ctx.plan.profile
    on_gpus = computes_on_gpus(profile)

    async def look_at(member: Member) -> dict[str, Any]:
        found = await probe_settled(member, on_gpus)
        known = ctx.bus.snapshot.pods.get(member.name)
        if known is not None and known.state == pod_states.AGENT:
            ctx.bus.record([ctx.pod_event(member, known.state, pod_states.LOOKED_AT)])
        return found

    probes = await each(ctx.due(), look_at)
    gpus = 0 if profile.fleet.gpu.startswith(CPU_OFFER) else profile.fleet.gpus * bool(profile.fleet.gpu)
    private = isinstance(profile.job, PrivateJobSettings)
    insists = isinstance(profile.job, PrivateJobSettings) and profile.job.device == "cuda"
    wanted = Requirements(profile.gates, max(gpus, int(insists)), on_gpus, kernels=on_gpus and private)
    findings = find_problems(probes, wanted)
    facts = {name: _facts(probe) for name, probe in probes.items()}
    for name, probe in probes.items():
        ctx.members[name].probe = probe

    def add(found: dict[str, dict[str, Any]]) -> None:
        for name, more in found.items():
            facts[name] |= more

    alone = ctx.federated is not None  # what needs another domain's pods shows when they meet
    if profile.job.kind == "private" and profile.link not in ("direct", "nats") and not findings and not alone:
        add({name: {"relay_rtt_ms": ms} for name, ms in (await relay_round_trips(ctx)).items()})
    if on_gpus and private and not findings:
        tried = await gpu_kernels.compiled(ctx, [name for name, probe in probes.items() if probe.get("gpus")])
        findings += [Problem(n, str(f["error"]), str(f["hint"])) for n, f in tried.items() if not f["ok"]]
        add({n: {k: v for k, v in f.items() if k not in _VERDICT} for n, f in tried.items()})
    if isinstance(profile.job, LmJobSettings) and not findings:
        fits = await lm.fits(ctx)
        findings += [Problem(n, str(f["error"]), str(f["hint"])) for n, f in fits.items() if not f["ok"]]
        add({n: {k: v for k, v in f.items() if k not in _VERDICT} for n, f in fits.items()})
        if (how := attention_check(profile, probes)) and not findings:
            tried = await lm.attention(ctx, how)
            findings += [Problem(n, str(f["error"]), str(f["hint"])) for n, f in tried.items() if not f["ok"]]
            add({n: {k: v for k, v in f.items() if k not in _VERDICT} for n, f in tried.items()})
    if profile.dp_preflight and not isinstance(profile.job, CommandJobSettings):
        for look in (fabric.ports,) if alone else (fabric.ports, fabric.ranks):
            if not findings:
                found = await look(ctx)
                findings += found.findings
                add(dict(found.facts))
    _tell(ctx, facts, findings)
    if (idle := _idle_gpus(probes)) and not wanted.cuda and not isinstance(profile.job, CommandJobSettings):
        text = f"{idle} GPUs stay idle: a {profile.job.kind} job of this profile computes on the pods' processors"
        ctx.say(ev.Alert(level="warn", name="gpu_idle", text=text, hint=_CHEAPER))
    if findings:
        first = findings[0]
        raise UvccError(f"pod {first.pod}: {first.what}", first.hint)
    return f"{counted(len(probes), 'pod')}{_summary(facts)}"


def attention_check(profile: Profile, probes: Mapping[str, Mapping[str, Any]]) -> str:
    """How a language model's attention is tried before it is trained: quick, full, or "" for not at all."""
    wanted = profile.gates.attention
    if wanted == "auto":
        wanted = "full" if computes_on_gpus(profile) and any(p.get("gpus") for p in probes.values()) else "off"
    return "" if wanted == "off" else wanted


def computes_on_gpus(profile: Profile) -> bool:
    """Whether workers of this profile need a torch that reaches the GPUs. Secret shares are computed there unless
    ``job.device`` says cpu, a language model unless ``runtime.device`` does; what a command does is its own affair.
    """
    job = profile.job
    if isinstance(job, PrivateJobSettings):
        return job.device != "cpu"
    return isinstance(job, LmJobSettings) and job.overrides.get("runtime", {}).get("device", "auto") != "cpu"


def _idle_gpus(probes: dict[str, dict[str, Any]]) -> int:
    return sum(len(probe.get("gpus") or ()) for probe in probes.values())


def _facts(probe: dict[str, Any]) -> dict[str, Any]:
    imports = probe.get("imports") or {}
    facts = {
        "clock_skew_s": round(probe["skew_s"], 4),
        "disk_free_mib": probe["disk"]["free_mib"],
        "memory_mib": free_memory(probe["memory"]) or 0.0,
        "cpus": probe.get("cpus"),
        "gpus": [g.get("name") for g in probe.get("gpus", [])],
        "driver": next((g.get("driver_version") for g in probe.get("gpus", [])), None),
        "cuda": imports.get("cuda") or None,
        "nccl": imports.get("nccl") or None,
    }
    return {k: v for k, v in facts.items() if v is not None}


def _tell(ctx: Rollout, facts: dict[str, dict[str, Any]], findings: list[Problem]) -> None:
    """One event per pod."""
    for name, fields in facts.items():
        mine = [f for f in findings if f.pod == name]
        if mine:
            fields |= {"problems": [f.what for f in mine], "hints": [f.hint for f in mine]}
        event = "dp_preflight_failed" if mine else "dp_preflight_ok"
        ctx.say(ev.EngineEvent(pod=name, level="error" if mine else "info", event=event, fields=fields, at=time.time()))


def _summary(facts: dict[str, dict[str, Any]]) -> str:
    """The slowest of everything that was measured."""
    rtts = [f["relay_rtt_ms"] for f in facts.values() if "relay_rtt_ms" in f]
    pairs = [v for f in facts.values() for k, v in f.items() if k.startswith("pair_")]
    sums = [v for f in facts.values() for k, v in f.items() if k.startswith("all_reduce_")]
    said = [f"relay round trip {max(rtts):.1f} ms at most"] if rtts else []
    if pairs:
        least = min(min(p["out_mib_s"], p["in_mib_s"]) for p in pairs)
        said.append(f"between parties {max(p['rtt_ms'] for p in pairs):.1f} ms and {least:.1f} MiB/s at worst")
    if sums:
        said.append(f"all_reduce {min(s['mib_s'] for s in sums):.0f} MiB/s at worst ({sums[0]['backend']})")
    return "".join(f", {s}" for s in said)


async def probe_settled(member: Member, on_gpus: bool) -> dict[str, Any]:
    """A probe that can tell whether torch reaches the GPUs: a pod that still imports it is asked again for a while."""
    probe = await probe_member(member)
    for _ in range(IMPORT_LOOKS):
        if probe.get("imports") or not (on_gpus and probe.get("gpus")):
            break
        await asyncio.sleep(IMPORT_LOOK_S)
        probe = await probe_member(member)
    return probe


async def probe_member(member: Member) -> dict[str, Any]:
    before = time.time()
    ack = await member.channel.request(ProbeCommand(), timeout=PROBE_S)
    after = time.time()
    probe = agent_lines.probed(ack, member.name)
    # the pod's clock was read somewhere between the two: half the trip is the error, not the skew
    probe["skew_s"] = _outside(float(probe["clock"]["ts"]), before, after)
    if probe.get("gpus"):
        probe["gpu_processes"] = parse_processes(await member.ssh.sh(_GPU_PROCESSES, timeout=30.0))
    return probe


def parse_processes(listed: str) -> list[dict[str, Any]]:
    """``pid, gpu`` lines of nvidia-smi; anything else (no permission, not supported) is no process."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines()]
    return [{"pid": int(r[0]), "gpu": r[1]} for r in rows if len(r) == 2 and r[0].isdigit()]


def _outside(ts: float, before: float, after: float) -> float:
    """How far ``ts`` lies outside [before, after]; 0 inside."""
    return ts - after if ts > after else ts - before if ts < before else 0.0


async def relay_round_trips(ctx: Rollout) -> dict[str, float]:
    """Start relays as a phase does and time a request to its replica's from every pod, in milliseconds."""
    phase, stream = fabric.phase_of(ctx), ctx.plan.profile.link == "stream"
    links = await all_of(relay_link(ctx, phase, replica=r, stream=stream) for r in range(phase.topology.replicas))

    async def ping(member: Member) -> float:
        link = links[member.request.replica]
        url, ca = f"{link.relay_url}/healthz", f".uvcc/{link.ca_file}" if link.ca_file else ""
        command = f"{python_of(member)} -S - {shlex.quote(url)} {shlex.quote(ca)}"
        said = await member.ssh.sh(command, stdin=_PING.encode())
        took = as_float(fields_of(member, said).get("rtt_ms"), 0.0)
        if took is None:
            raise no_answer(member, said)
        return took

    try:
        return await each(ctx.of_phase(phase), ping)
    finally:
        await fabric.stop_relays(ctx, phase)
