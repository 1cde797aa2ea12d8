"""A language model's checkpoints come home while it trains, and can be brought back to a pod that replaces a lost one.

Its weights are the operator's own. (A private run's shares never leave the pods where they were born: nothing here
touches them.) Each newest checkpoint is fetched in the background, part by part, within the profile's bandwidth; the
fetch goes on where a lost link cut it off. It counts as home once its manifest and the SHA-256 of every file hold and
the tensors' header says that they would load. What a pod says about sizes and names is checked before it is believed.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
from pathlib import Path
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_console.plan.plan import FULL, Phase
from uvcc_console.plan.schema import LmJobSettings
from uvcc_console.rollout.context import Member, Rollout
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.checkpoints.tensors import check_tensors
from uvcc_engine.contract.errors import UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.run_files import files

log = logger(__name__)

PART: Final = 1 << 20
MOST_MANIFEST: Final = 64 << 20
SPARE: Final = 1 << 30  # so much disk stays free here
LOOK_S: Final = 2.0
AGAIN_S: Final = 15.0
TABLES: Final = (files.TRAINING, files.VAL)
FETCHING: Final = ".fetching"


def folder_of(ctx: Rollout, phase: Phase, pod: str) -> Path:
    """Where a pod's checkpoints of a phase are at home."""
    return ctx.artifacts / phase.name / pod / files.CHECKPOINTS


def steps_at_home(ctx: Rollout, phase: Phase) -> set[int]:
    """Steps of which every pod of the phase has a checkpoint at home."""
    return set.intersection(*(set(checkpoint.steps_present(folder_of(ctx, phase, name))) for name in phase.pods()))


def newest_at_home(ctx: Rollout, phase: Phase, pod: str) -> checkpoint.CheckpointManifest | None:
    """The newest checkpoint at home, every byte read again. Raises VerificationError if it was altered meanwhile."""
    root = folder_of(ctx, phase, pod)
    steps = checkpoint.steps_present(root)
    return checkpoint.verify_step(root, steps[0], run=phase.engine_run) if steps else None


async def keep_home(ctx: Rollout) -> None:
    """Fetch each newest checkpoint of the full run, for ever; what goes wrong is told once and tried again."""
    job = ctx.plan.profile.job
    if not isinstance(job, LmJobSettings) or not job.fetch_checkpoint:
        return
    told: dict[str, str] = {}
    while True:
        failed = False
        phase = ctx.plan.phases[FULL]
        for name in phase.pods():
            step, sha256 = ctx.bus.snapshot.checkpoints.get(name, (-1, ""))
            member = ctx.members[name]
            known = ctx.bus.snapshot.home.get(name, (-1, ""))
            if ctx.bus.snapshot.engine_run != phase.engine_run or (step, sha256) == known or step < 0:
                continue
            if member.link is None or member.in_hand:
                continue
            try:
                rate = job.fetch_mib_s * (1 << 20)
                await bring_home(ctx, phase, member, step, sha256, keep=job.fetch_keep, rate=rate)
                told.pop(name, None)
            except (UvccError, OSError) as e:
                failed = True
                text = describe(e).what
                if told.get(name) != text:
                    told[name] = text
                    hint = "it is tried again; until then the pod has the only copy"
                    said = f"the checkpoint of step {step} is not home: {text}"
                    ctx.say(ev.Alert(level="warn", name="checkpoint_home", text=said, hint=hint, subject=name))
        await asyncio.sleep(AGAIN_S if failed else LOOK_S)


async def bring_home(
    ctx: Rollout, phase: Phase, member: Member, step: int, sha256: str, *, keep: int, rate: float
) -> None:
    """Fetch one checkpoint at ``rate`` bytes a second at most, verify it, and let all but the ``keep`` newest go.

    Raises UvccError: what had arrived stays and is gone on from. A checkpoint that the pod has deleted meanwhile is no
    error; a newer one is there.
    """
    async with member.homing:
        root = folder_of(ctx, phase, member.name)
        final = checkpoint.step_dir(root, step)
        if not await asyncio.to_thread(_holds, final, sha256):
            remote = f".uvcc/runs/{phase.engine_run}/{files.CHECKPOINTS}/{final.name}"
            if (await member.ssh.run(f"test -d {shlex.quote(remote)}")).exit == 1:
                return
            work = root / f"{FETCHING}-step-{step}-{sha256[:12]}"
            _forget_others(root, work)
            work.mkdir(parents=True, exist_ok=True, mode=0o700)
            await _fetch(member, remote, work, step, sha256, phase.engine_run, rate)
            await asyncio.to_thread(_settle, root, work, final)
        await _tables(ctx, phase, member)
        for old in checkpoint.steps_present(root)[keep:]:
            if old != step:
                await asyncio.to_thread(shutil.rmtree, checkpoint.step_dir(root, old))
        if ctx.bus.snapshot.home.get(member.name) != (step, sha256):
            path, size = os.fspath(final.relative_to(ctx.run_dir)), sum(p.stat().st_size for p in final.iterdir())
            home = ev.CheckpointHome(
                pod=member.name, engine_run=phase.engine_run, step=step, sha256=sha256, path=path, bytes=size
            )
            ctx.say(home)


def _holds(folder: Path, sha256: str) -> bool:
    try:
        _verified(folder, sha256)
        return True
    except VerificationError:
        return False


def _verified(folder: Path, sha256: str) -> checkpoint.CheckpointManifest:
    """Every byte is as the manifest says, and what holds tensors would load. Raises VerificationError."""
    manifest = checkpoint.verify(folder, sha256)
    for name in _names(manifest):
        if name.endswith(".safetensors"):
            check_tensors(folder / name)
    return manifest


def _names(manifest: checkpoint.CheckpointManifest) -> dict[str, int]:
    """The files that a manifest lists with their sizes. Raises VerificationError for what no checkpoint has."""
    return {name: size for state in manifest.ranks.values() for name, (size, _) in state.described().items()}


async def _fetch(member: Member, remote: str, work: Path, step: int, sha256: str, run: str, rate: float) -> None:
    """The manifest first: it says what there is to fetch, and how much."""
    raw = await member.ssh.read_part(f"{remote}/{checkpoint.MANIFEST}", 0, MOST_MANIFEST)
    (work / checkpoint.MANIFEST).write_bytes(raw)
    manifest = checkpoint.read_manifest(work)
    if (manifest.sha256, manifest.step, manifest.run) != (sha256, step, run):
        raise VerificationError("checkpoint", f"pod {member.name} has another checkpoint of step {step} than it said")
    sizes = _names(manifest)
    missing = sum(sizes.values()) - sum((work / n).stat().st_size for n in sizes if (work / n).exists())
    if missing > shutil.disk_usage(work).free - SPARE:
        raise UvccError(f"a checkpoint of {missing} bytes more does not fit here", f"free disk space at {work}")
    for name, size in sizes.items():
        await pull(member, f"{remote}/{name}", work / name, size, rate)
    try:
        await asyncio.to_thread(_verified, work, sha256)
    except VerificationError:
        shutil.rmtree(work)  # a part of it arrived wrong: nothing of it can be gone on from
        raise


async def pull(member: Member, remote: str, local: Path, size: int, rate: float) -> None:
    """Append what is missing of a file of ``size`` bytes, at ``rate`` bytes a second at most. Raises UvccError."""
    loop = asyncio.get_running_loop()
    with local.open("ab") as out:
        at = out.tell()
        if at > size:
            out.truncate(size)
            at = size
        began, first = loop.time(), at
        while at < size:
            data = await member.ssh.read_part(remote, at, min(PART, size - at))
            if not data:
                raise UnreadableError(f"{remote} of pod {member.name} ends at byte {at} of {size}", "it was replaced?")
            await asyncio.to_thread(out.write, data)
            at += len(data)
            ahead = (at - first) / rate - (loop.time() - began)
            if ahead > 0 and at < size:
                await asyncio.sleep(ahead)
        out.flush()
        os.fsync(out.fileno())


def _settle(root: Path, work: Path, final: Path) -> None:
    """Let a whole checkpoint appear under its name; one of the same step from before goes."""
    if final.exists():
        shutil.rmtree(final)
    os.rename(work, final)
    files.fsync_dir(root)


def _forget_others(root: Path, work: Path) -> None:
    """What was begun of a checkpoint that is no longer the newest."""
    for entry in root.glob(f"{FETCHING}-*") if root.is_dir() else ():
        if entry != work:
            shutil.rmtree(entry, ignore_errors=True)


async def _tables(ctx: Rollout, phase: Phase, member: Member) -> None:
    """The tables so far: a pod that is restored goes on with them. They are no reason to fail."""
    there = f".uvcc/runs/{phase.engine_run}"
    for name in TABLES:
        try:
            data = await member.ssh.read_part(f"{there}/{name}", 0, MOST_MANIFEST)
            await asyncio.to_thread(files.write_atomic, folder_of(ctx, phase, member.name) / name, data)
        except UvccError as e:
            log.info("%s does not come home: %s", name, e, pod=member.name)


# ---- and back ------------------------------------------------------------------------------------------------------


async def bring_back(ctx: Rollout, phase: Phase, member: Member, step: int) -> None:
    """Put a checkpoint from home onto a pod, under the name and in the way that its workers commit one.

    Raises VerificationError if it is not whole at home any more.
    """
    root = folder_of(ctx, phase, member.name)
    manifest = await asyncio.to_thread(checkpoint.verify_step, root, step, run=phase.engine_run)
    run = f".uvcc/runs/{phase.engine_run}"
    there, arriving = f"{run}/{files.CHECKPOINTS}/step-{step}", f"{run}/{files.CHECKPOINTS}/step-{step}.tmp-from-home"
    await member.ssh.sh(f"umask 077; rm -rf {arriving}; mkdir -p {arriving}")
    for name in (*_names(manifest), checkpoint.MANIFEST):
        await member.ssh.put(manifest.path / name, f"{arriving}/{name}", timeout=3600.0)
    for name in TABLES:
        if (root / name).exists() and (await member.ssh.run(f"test -e {run}/{name}")).exit == 1:
            await member.ssh.put(root / name, f"{run}/{name}", mode=0o644)
    aside = f"{run}/{files.CHECKPOINTS}/step-{step}.old-from-home"
    moved = f"rm -rf {aside} && if [ -e {there} ]; then mv {there} {aside}; fi && mv {arriving} {there} && sync"
    await member.ssh.sh(moved, timeout=300.0)
