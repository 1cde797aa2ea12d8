"""Stage preflight: what would only fail later, found now, pod by pod, each with its remedy."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.rollout.context import Member, Rollout, all_of, each
from uvcc_console.rollout.stages import lm
from uvcc_console.rollout.stages.links import relay_link
from uvcc_console.rollout.stages.ports import python_of
from uvcc_engine.contract import wire
from uvcc_engine.contract.errors import UvccError

# versions that must be equal on all pods: results would differ, or messages could not be read
EQUAL = ("python", "torch", "numpy")
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


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be so, and what to do about it."""

    pod: str
    what: str
    remedy: str


async def preflight(ctx: Rollout) -> str:
    """Probe every pod and every pair that must talk. Raises UvccError naming the first problem; all are journalled."""
    probes = await each(ctx.members.values(), _probe)
    findings = judge(probes, ctx.plan.profile.gates.clock_skew_s, ctx.plan.profile.gates.disk_free_mib)
    rtts: dict[str, float] = {}
    if ctx.plan.profile.job.kind == "private" and ctx.plan.profile.link != "direct" and not findings:
        rtts = await _relay_round_trips(ctx)
    fits = await lm.fits(ctx) if ctx.plan.profile.job.kind == "lm" and not findings else {}
    findings += [Finding(n, str(f["error"]), str(f["cure"])) for n, f in fits.items() if not f["ok"]]
    for name, probe in probes.items():
        mine = [f for f in findings if f.pod == name]
        ctx.members[name].probe = probe
        fields = {
            "clock_skew_s": round(probe["skew_s"], 4),
            "disk_free_mib": probe["disk"]["free_mib"],
            "memory_mib": probe["memory"].get("available_mib", 0.0),
            "cpus": probe.get("cpus"),
            "gpus": [g.get("name") for g in probe.get("gpus", [])],
            "relay_rtt_ms": rtts.get(name),
        }
        fields |= {k: v for k, v in fits.get(name, {}).items() if k not in ("ok", "error", "cure")}
        if mine:
            fields |= {"problems": [f.what for f in mine]}
        event = "dp_preflight_failed" if mine else "dp_preflight_ok"
        ctx.say(ev.EngineEvent(pod=name, level="error" if mine else "info", event=event, fields=fields, at=time.time()))
    if findings:
        first = findings[0]
        raise UvccError(f"pod {first.pod}: {first.what}", first.remedy)
    shown = f", relay round trip {max(rtts.values()):.1f} ms at most" if rtts else ""
    return f"{len(probes)} pods{shown}"


async def _probe(member: Member) -> dict[str, Any]:
    before = time.time()
    ack = await member.channel.request(wire.PROBE, timeout=60.0)
    after = time.time()
    probe = {k: v for k, v in ack.items() if k not in ("op", "nonce", "ok")}
    # the pod's clock was read somewhere between the two: half the trip is the error, not the skew
    probe["skew_s"] = _outside(float(probe["clock"]["ts"]), before, after)
    return probe


def _outside(ts: float, before: float, after: float) -> float:
    """How far ``ts`` lies outside [before, after]; 0 inside."""
    return ts - after if ts > after else ts - before if ts < before else 0.0


def judge(probes: dict[str, dict[str, Any]], skew_s: float, disk_mib: int) -> list[Finding]:
    """What is wrong with the fleet as probed. Pure."""
    found: list[Finding] = []
    names = list(probes)
    for package in EQUAL:
        versions = {n: str(probes[n].get("versions", {}).get(package, "none")) for n in names}
        odd = next((n for n in names if versions[n] != versions[names[0]]), None)
        if odd:
            what = f"{package} is {versions[odd]}, on {names[0]} it is {versions[names[0]]}"
            found.append(Finding(odd, what, "use one image for all parties"))
    for name, probe in probes.items():
        if abs(probe["skew_s"]) > skew_s:
            what = f"its clock is {probe['skew_s']:+.1f} s off, gates.clock_skew_s is {skew_s:g}"
            found.append(Finding(name, what, "have the pod synchronise its clock, or replace it"))
        free = float(probe["disk"]["free_mib"])
        if free < disk_mib:
            what = f"{free:.0f} MiB of disk are free, gates.disk_free_mib is {disk_mib}"
            found.append(Finding(name, what, "free space on the pod, or take one with more disk"))
        if probe.get("gpu_error"):
            found.append(Finding(name, f"nvidia-smi: {probe['gpu_error']}", "replace the pod"))
    return found


async def _relay_round_trips(ctx: Rollout) -> dict[str, float]:
    """Start the relays of the first phase and time a request to its replica's from every pod, in milliseconds."""
    phase, stream = ctx.plan.phases.get("smoke") or ctx.plan.phases["full"], ctx.plan.profile.link == "stream"
    links = await all_of(relay_link(ctx, phase, replica=r, stream=stream) for r in range(phase.topology.replicas))

    async def ping(member: Member) -> float:
        link = links[member.request.replica]
        url, ca = f"{link['relay_url']}/healthz", f".uvcc/{link['ca_file']}" if link["ca_file"] else ""
        command = f"{python_of(member)} -S - {shlex.quote(url)} {shlex.quote(ca)}"
        return float(json.loads(await member.ssh.sh(command, stdin=_PING.encode()))["rtt_ms"])

    return await each(ctx.of_phase(phase), ping)
