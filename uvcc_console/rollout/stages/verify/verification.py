"""Stages verify and gate: the proof bundle is checked before anything more is started or believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.alerts.quality import differing
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.core.words import figure, value_words
from uvcc_console.plan.plan import SMOKE, Phase
from uvcc_console.plan.schema import GatesPart
from uvcc_console.report.recheck import digests
from uvcc_console.rollout.context import Rollout
from uvcc_console.rollout.stages.verify.collect import fetch_phase, make_durable
from uvcc_engine.contract.errors import UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.text import counted
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof.bundle import NAME, assemble_folder
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.proof.verifier import verify


async def verify_phase(ctx: Rollout, phase: Phase) -> str:
    """Fetch the evidence, assemble the proof bundle, verify it with every transcript; the verdict is journalled."""
    await fetch_phase(ctx, phase)
    if ctx.federated is not None:
        await ctx.federated.evidence(ctx, phase)
    folder = ctx.artifacts / phase.name
    try:
        certificate, files = await asyncio.to_thread(_assemble_and_verify, ctx, phase)
    except (VerificationError, UnreadableError) as e:
        ctx.say(
            ev.PhaseVerdict(phase=phase.name, ok=False, global_root="", sid_job="", detail=str(e), bundle=str(folder))
        )
        raise
    await make_durable(ctx)
    ctx.say(
        ev.PhaseVerdict(
            phase=phase.name,
            ok=True,
            global_root=certificate.global_root,
            sid_job=certificate.sid_job,
            detail=f"{counted(certificate.epochs, 'epoch')}, {counted(certificate.leaves, 'leaf', 'leaves')}",
            bundle=str(folder / leaf_file.BUNDLE),
            values=dict(certificate.values),
            result_hashes=list(certificate.result_hashes),
            run_root=certificate.run_root,
            level=certificate.level,
            pinned=bool(_pins(ctx, phase)),
            files=files,
        )
    )
    await _date(ctx, phase)
    many = f"{counted(certificate.epochs, 'epoch')}, {counted(certificate.leaves, 'leaf', 'leaves')}"
    said = f"{many}, global root {certificate.global_root[:12]}"
    return said + "".join(f", {name} {value:.4f}" for name, value in certificate.values.items())


async def _date(ctx: Rollout, phase: Phase) -> None:
    """Have the verified bundle stamped and its root entered in the public log.

    What holds without a date or an entry is not held up for one: its lack is an alert.
    """
    wanted = ctx.plan.profile.evidence
    if wanted.log:
        from uvcc_console.report.publishing import PublicLog

        try:
            await PublicLog(wanted.log, wanted.log_key).enter_run(ctx.artifacts / phase.name)
        except UvccError as e:
            hint = f"enter it later: uvcc package {ctx.run_dir.name} --log {wanted.log}"
            ctx.say(ev.Alert(level="warn", name="public_log", text=e.what, hint=hint, subject=phase.name))
    if url := wanted.timestamp:
        from uvcc_console.report.timestamps import stamp

        try:
            await stamp(ctx.artifacts / phase.name / NAME, url)
        except UvccError as e:
            hint = f"stamp it later: uvcc package {ctx.run_dir.name} --timestamp {url}"
            ctx.say(ev.Alert(level="warn", name="timestamp", text=e.what, hint=hint, subject=phase.name))


def _pins(ctx: Rollout, phase: Phase) -> dict[str, str]:
    """The identities that the parties' first pods showed over SSH; of other domains' pods those that they vouch for."""
    if ctx.federated is not None:
        return ctx.federated.pins()
    first = [m for m in ctx.of_phase(phase) if m.request.replica == 0 and m.identity]
    return {f"P{m.request.party}": str(m.identity["ed25519"]) for m in first}


def _assemble_and_verify(ctx: Rollout, phase: Phase) -> tuple[Certificate, dict[str, str]]:
    """The certificate, and the checksums of the files that it is about."""
    path = assemble_folder(ctx.artifacts / phase.name)
    files = digests(path.parent)  # before they are read: what changes meanwhile is found to have changed
    return verify(path, allowed_signers=_pins(ctx, phase) or None), files


def _last(s: Snapshot, name: str) -> list[float]:
    """The last value of a figure, per worker that reports it."""
    return [line.last[1] for by_name in s.series.values() if (line := by_name.get(name)) is not None and line.last]


def _beats(s: Snapshot, name: str) -> list[float]:
    """A figure of the last heartbeats, per worker that reports it."""
    return [float(w.beat[name]) for w in s.workers.values() if isinstance(w.beat.get(name), int | float)]


def measure(s: Snapshot, gates: GatesPart, phase: str) -> Iterator[ev.GateMeasured]:
    """Every gate of the profile against what the smoke showed. Pure."""
    losses = [line for by_name in s.series.values() if (line := by_name.get("loss")) is not None and len(line) > 1]
    if gates.loss_falls:
        falls = [line.ys()[0] - line.ys()[len(line) - 1] for line in losses]
        shown = f"{min(falls):+.4f}" if falls else "no loss"
        yield ev.GateMeasured(name="loss_falls", ok=bool(falls) and min(falls) > 0, wanted="> 0", measured=shown)
    hashes = {h for key, h in s.result_hashes.items() if key.startswith(f"{phase}/")}
    if s.job_kind == "private":
        wanted = gates.result_hashes
        yield ev.GateMeasured(
            name="result_hashes", ok=len(hashes) == wanted, wanted=str(wanted), measured=str(len(hashes))
        )
    if gates.verifier == "ok" and s.job_kind == "private":
        verdict = s.verdicts.get(phase)
        word = "ok" if verdict and verdict.ok else verdict.detail if verdict else "not run"
        yield ev.GateMeasured(name="verifier", ok=word == "ok", wanted="ok", measured=word)
    for name, wanted_floor, found in (
        ("toks_per_s", gates.toks_per_s, _last(s, "toks_per_s")),
        ("gate_entropy", gates.gate_entropy, _beats(s, "gate_entropy_mean")),
    ):
        if wanted_floor > 0:
            shown = figure(min(found)) if found else "not reported"
            good = bool(found) and min(found) >= wanted_floor
            yield ev.GateMeasured(name=name, ok=good, wanted=f">= {wanted_floor:g}", measured=shown)
    for name, ceiling, off, found in (
        ("gate_collapse", gates.gate_collapse, 1.0, _beats(s, "gate_collapse_frac")),
        ("gpu_mem_mib", gates.gpu_mem_mib, 0.0, _beats(s, "gpu_mem_reserved_mib")),
        ("fetch_s", gates.fetch_s, 0.0, _beats(s, "dt_fetch_s")),
    ):
        if ceiling != off:
            shown = figure(max(found)) if found else "not reported"
            good = bool(found) and max(found) <= ceiling
            yield ev.GateMeasured(name=name, ok=good, wanted=f"<= {ceiling:g}", measured=shown)
    if gates.watchdog_dumps >= 0:
        dumps, most = s.watchdog_dumps, gates.watchdog_dumps
        yield ev.GateMeasured(name="watchdog_dumps", ok=dumps <= most, wanted=f"<= {most}", measured=str(dumps))
    if plan := _planned(s):
        yield _config(s, plan)
    if gates.halt_drill_s > 0:
        took = s.halt.last_drill_s
        shown = f"{took:.1f} s" if took is not None else "no drill"
        good = took is not None and took <= gates.halt_drill_s
        yield ev.GateMeasured(name="halt_drill_s", ok=good, wanted=f"<= {gates.halt_drill_s:g} s", measured=shown)


def _planned(s: Snapshot) -> Mapping[str, Any]:
    """Facts that the profile says must hold of what really runs."""
    job = s.profile.get("job")
    plan = job.get("plan") if isinstance(job, Mapping) else None
    return plan if isinstance(plan, Mapping) else {}


def _config(s: Snapshot, plan: Mapping[str, Any]) -> ev.GateMeasured:
    """The configuration audited again: what every lead rank wrote of itself, against the plan, before FULL is paid."""
    wrong = [f"{coord}: {text}" for coord, facts in sorted(s.facts.items()) for text in differing(plan, facts)]
    silent = sorted(k for k in plan if not any(k in facts for facts in s.facts.values()))
    wrong += [f"{', '.join(silent)} not reported"] if silent else []
    wanted = ", ".join(f"{k} {value_words(plan[k])}" for k in plan)
    return ev.GateMeasured(name="config", ok=not wrong, wanted=wanted, measured="; ".join(wrong) or "as planned")


async def gate(ctx: Rollout) -> str:
    """Hold the smoke against the profile's gates. Raises UvccError naming every gate that failed."""
    found = list(measure(ctx.bus.snapshot, ctx.plan.profile.gates, SMOKE))
    ctx.say(*found)
    failed = [f"{g.name} (wanted {g.wanted}, measured {g.measured})" for g in found if not g.ok]
    if failed:
        raise UvccError(f"gate not passed: {', '.join(failed)}", "fix the cause, or skip the gate knowingly")
    return ", ".join(f"{g.name} {g.measured}" for g in found)
