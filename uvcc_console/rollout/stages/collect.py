"""Stage collect: evidence comes home with checksums; shares, keys and checkpoints stay where they were born."""

from __future__ import annotations

import asyncio
import hashlib
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from uvcc_console.core import events as ev
from uvcc_console.report.artifacts import write_artifacts
from uvcc_console.rollout.context import Member, Rollout, describe, each
from uvcc_console.rollout.plan import Phase
from uvcc_engine.contract.errors import UvccError, VerificationError

# what may leave a pod; everything else (checkpoints, sealed inputs, identities) may not
WANTED = (
    "transcript_*/*",
    "earlier*_transcript_*/*",  # of an attempt that was given up
    "roots*.jsonl",
    "signatures*.json",
    "policy*.json",
    "openings*.json*",
    "result*.json",
    "exit*.json",
    "result_*.box",  # sealed to the data owner: they may pass through anybody's hands
    "seeds_*.box",
    "training.csv",
    "val.csv",
    "metrics.json",
    "events.jsonl",
    "heartbeat_rank*.jsonl",
    "worker_*.log",
    "stackdump_*.txt",
    "run.json",
    "run.info",
)
NEVER = ("checkpoints/*", "inputs*", "sealed*", "identity*", "*.key", "*token*", "*.safetensors")
SUMS = "SHA256SUMS"
_NONE = "no such run here"
_LIST = (
    f"[ -d {{folder}} ] || {{{{ echo {_NONE}; exit 0; }}}}\n"
    "cd {folder} && find . -type f ! -path './checkpoints/*' -exec sha256sum {{}} +"
)


def wanted(name: str) -> bool:
    """Whether a file of a run directory may be fetched."""
    return any(fnmatch(name, p) for p in WANTED) and not any(fnmatch(name, p) for p in NEVER)


def parse_sums(text: str) -> dict[str, str]:
    """``sha256sum`` output -> {relative name: hex digest} of what may be fetched."""
    found = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        relative = str(PurePosixPath(name.strip()))
        if len(digest) == 64 and not relative.startswith(("..", "/")) and wanted(relative):
            found[relative] = digest
    return found


def folder_of(ctx: Rollout, phase: Phase, member: Member) -> Path:
    """``artifacts/<phase>/p{party}r{replica}``."""
    return ctx.artifacts / phase.name / member.name


async def fetch(ctx: Rollout, phase: Phase, member: Member) -> int:
    """Bring one pod's evidence of a phase home; returns the number of files.

    A file whose checksum differs from the pod's is fetched once more, then refused with VerificationError.
    """
    remote = f".uvcc/runs/{phase.engine_run}"
    listing = await member.ssh.sh(_LIST.format(folder=remote), timeout=120.0)
    home = folder_of(ctx, phase, member)
    if listing.strip() == _NONE:
        if (home / SUMS).exists():
            return 0  # the pod was replaced since its evidence came home
        raise UvccError(f"pod {member.name} holds nothing of {phase.engine_run}", "was it replaced? see its log")
    sums = parse_sums(listing)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    slots = asyncio.Semaphore(8)

    async def one(name: str, digest: str) -> None:
        local = home / name
        local.parent.mkdir(parents=True, exist_ok=True)
        async with slots:
            for _ in range(2):
                await member.ssh.get(f"{remote}/{name}", local)
                found = await asyncio.to_thread(_sha256, local)
                if found == digest:
                    return
        raise VerificationError(
            "fetch", f"{name} of pod {member.name} arrived as {found[:12]}, there it is {digest[:12]}"
        )

    stale = {name: digest for name, digest in sums.items() if not _same(home / name, digest)}
    async with asyncio.TaskGroup() as group:
        for name, digest in stale.items():
            group.create_task(one(name, digest))
    (home / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    return len(sums)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _same(path: Path, digest: str) -> bool:
    return path.is_file() and _sha256(path) == digest


async def fetch_phase(ctx: Rollout, phase: Phase) -> int:
    """Evidence of every pod of a phase; returns the number of files."""
    counts = await each(ctx.of_phase(phase), lambda m: fetch(ctx, phase, m))
    return sum(counts.values())


async def collect(ctx: Rollout) -> str:
    """Fetch what is new of every phase, the agents' logs, and write the artifacts of the whole run."""
    started = _started(ctx)
    count = 0
    for phase in started:
        count += await fetch_phase(ctx, phase)
    await each(ctx.live(), lambda m: _agent_log(ctx, m))
    ctx.bus.commit()
    written = await asyncio.to_thread(write_artifacts, ctx.run_dir)
    return f"{count} files of {len(ctx.live())} pods, {len(written)} artifacts"


def _started(ctx: Rollout) -> list[Phase]:
    """Phases whose engine run was launched, in the order of the plan."""
    names = {v.name for v in ctx.bus.snapshot.stages if v.status != "pending"}
    return [p for name, p in ctx.plan.phases.items() if name in names]


async def _agent_log(ctx: Rollout, member: Member) -> None:
    text = await member.ssh.read(".uvcc/agent.log")
    folder = ctx.artifacts / "agents"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / f"{member.name}.log").write_bytes(text)


async def last_words(ctx: Rollout) -> None:
    """Evidence of a run that is torn down before its end: as much as the pods still give, each for itself."""

    async def one(phase: Phase, member: Member) -> None:
        try:
            await fetch(ctx, phase, member)
        except (UvccError, ExceptionGroup) as e:
            text = f"no evidence from {member.name}: {describe(e)}"
            ctx.say(ev.Alert(level="warn", name="collect", text=text, subject=member.name))

    for phase in _started(ctx):
        await asyncio.gather(*(one(phase, m) for m in ctx.of_phase(phase) if m.link is not None))
