"""Stage collect: evidence comes home with checksums; shares, keys and checkpoints stay where they were born."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.plan import code_tree
from uvcc_console.plan.plan import Phase
from uvcc_console.report import collector
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.rollout import file_listing
from uvcc_console.rollout.context import Member, Rollout, each
from uvcc_console.rollout.stages.verify.outputs import fetch_outputs
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.text import counted

SUMS = "SHA256SUMS"
FETCH_S = 6 * 3600.0  # however much a pod announces
LAST_S = 300.0  # so long a teardown waits for what the pods still give
MOST_STALLS = 8
AGENT_LOG = 16 << 20


def folder_of(ctx: Rollout, phase: Phase, member: Member) -> Path:
    """``artifacts/<phase>/p{party}r{replica}``."""
    return ctx.artifacts / phase.name / member.name


async def fetch(ctx: Rollout, phase: Phase, member: Member) -> int:
    """Bring one pod's evidence of a phase home; returns the number of files.

    What the pod may not give is named in a warning, the rest is fetched. A file whose checksum differs from the pod's
    is fetched once more; then, or where one stalls, the others still come and VerificationError or UnreachableError
    is raised at the end.
    """
    remote = f".uvcc/runs/{phase.engine_run}"
    listing = await member.ssh.sh(file_listing.WHOLE.format(folder=remote), timeout=120.0, limit=file_listing.LISTING)
    home = folder_of(ctx, phase, member)
    if listing.strip() == file_listing.NONE:
        if (home / SUMS).exists():
            return 0  # the pod was replaced since its evidence came home
        raise UvccError(f"pod {member.name} holds nothing of {phase.engine_run}", "was it replaced? see its log")
    offer = file_listing.read_offer(listing, {str(c) for c in phase.coords(member.name)})
    if said := offer.complaint():
        text = f"pod {member.name} offers what it may not: {said}"
        ctx.say(ev.Alert(level="warn", name="collect", text=text, hint=_HOSTILE, subject=member.name))
    with DownloadFolder(home) as downloads:
        troubles = await _take(member.ssh, remote, downloads, offer)
        if troubles:
            raise troubles[0]
        sums = "".join(f"{file.sha256}  {name}\n" for name, file in sorted(offer.files.items()))
        downloads.write((SUMS,), sums.encode())
    return len(offer.files)


_HOSTILE = "the pod is faulty or hostile: its other evidence is here, look at it before you believe it"


async def _take(link: PodLink, remote: str, downloads: DownloadFolder, offer: file_listing.Listing) -> list[UvccError]:
    """Fetch what is not here yet; what went wrong, in order.

    A file that stalls takes others of its session with it, so what stalled is asked for once more, one by one.
    """
    slots = asyncio.Semaphore(8)
    troubles: list[UvccError] = []
    stalled: dict[str, file_listing.ListedFile] = {}

    async def one(name: str, file: file_listing.ListedFile, tries: int = 2) -> None:
        async with slots:
            if len(stalled) >= MOST_STALLS or await asyncio.to_thread(_same, downloads.root / name, file.sha256):
                return
            try:
                await link.get(f"{remote}/{name}", downloads, file.parts, limit=file.size, sha256=file.sha256)
                return
            except UnreachableError as e:
                stalled[name] = file
                if tries == 1:
                    troubles.append(e)
                return
            except UvccError as e:
                if tries == 1 or not isinstance(e, VerificationError):
                    return troubles.append(e)
        await one(name, file, tries - 1)

    try:
        async with asyncio.timeout(FETCH_S):
            async with asyncio.TaskGroup() as group:
                for name, file in offer.files.items():
                    group.create_task(one(name, file))
            left = {n: f for n, f in offer.files.items() if stalled and not _there(downloads.root / n, f)}
            stalled.clear()
            for name, file in left.items():
                await one(name, file, tries=1)
    except TimeoutError:
        troubles.append(UnreachableError(f"pod {link.name} takes more than {FETCH_S / 3600:.0f} h", "fetch again"))
    return troubles


def _there(path: Path, file: file_listing.ListedFile) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == file.size


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _same(path: Path, digest: str) -> bool:
    return path.is_file() and not path.is_symlink() and _sha256(path) == digest


async def fetch_phase(ctx: Rollout, phase: Phase) -> int:
    """Evidence of every pod of a phase; returns the number of files. One pod's failure does not keep the others'."""
    members = ctx.of_phase(phase)
    outputs = await each(members, lambda m: fetch_outputs(ctx, phase, m))
    done = await asyncio.gather(*(fetch(ctx, phase, m) for m in members), return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise describe(one) from one
    return sum(outputs.values()) + sum(n for n in done if isinstance(n, int))


async def collect(ctx: Rollout) -> str:
    """Fetch what is new of every phase, the agents' logs, write the artifacts of the whole run, and sign its manifest.

    Raises VerificationError if it was signed before and a file was changed since.
    """
    await asyncio.to_thread(collector.reopen, ctx.run_dir)
    started = started_phases(ctx)
    count = 0
    for phase in started:
        count += await fetch_phase(ctx, phase)
    await each(ctx.live(), lambda m: _agent_log(ctx, m))
    if (tree := code_tree.kept(ctx.run_dir)) is not None:  # which code it was, beside what came of it
        with DownloadFolder(ctx.artifacts) as downloads:
            downloads.write((code_tree.RECORD,), json.dumps(tree.record(), indent=1).encode())
    ctx.bus.commit()
    await asyncio.to_thread(collector.private_key)  # its public half goes into allowed_signers
    written = await asyncio.to_thread(write_artifacts, ctx.run_dir)
    await asyncio.to_thread(collector.seal, ctx.run_dir)
    await make_durable(ctx)
    return f"{counted(count, 'file')} of {counted(len(ctx.live()), 'pod')}, {counted(len(written), 'artifact')}"


async def make_durable(ctx: Rollout) -> None:
    """Have all evidence that is here outlive a power cut: once the pods are gone there is no other copy.

    Raises UvccError naming what the disk did not take.
    """
    await asyncio.to_thread(files.sync_tree, ctx.artifacts)


def started_phases(ctx: Rollout) -> list[Phase]:
    """Phases whose engine run was launched, in the order of the plan."""
    names = {v.name for v in ctx.bus.snapshot.stages if v.status != "pending"}
    return [p for name, p in ctx.plan.phases.items() if name in names]


async def _agent_log(ctx: Rollout, member: Member) -> None:
    """The end of the agent's log, which no run's evidence depends on."""
    try:
        text = await member.ssh.tail(".uvcc/agent.log", limit=AGENT_LOG)
    except UvccError as e:
        ctx.say(ev.Alert(level="warn", name="collect", text=f"no agent log: {e}", subject=member.name))
        return
    with DownloadFolder(ctx.artifacts / "agents") as downloads:
        downloads.write((f"{member.name}.log",), text)


async def last_words(ctx: Rollout) -> None:
    """Evidence of a run that is torn down before its end: as much as the pods still give, and not for long."""

    async def one(phase: Phase, member: Member) -> None:
        try:
            async with asyncio.timeout(LAST_S):
                await fetch(ctx, phase, member)
                await fetch_outputs(ctx, phase, member)
        except (UvccError, ExceptionGroup, TimeoutError) as e:
            why = f"it takes longer than {LAST_S:.0f} s" if isinstance(e, TimeoutError) else describe(e)
            text = f"no evidence from {member.name}: {why}"
            ctx.say(ev.Alert(level="warn", name="collect", text=text, subject=member.name))

    for phase in started_phases(ctx):
        await asyncio.gather(*(one(phase, m) for m in ctx.of_phase(phase) if m.link is not None))
