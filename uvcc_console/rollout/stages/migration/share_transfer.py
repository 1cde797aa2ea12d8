"""Have the surviving pods hand a checkpoint's shares to the pods of the policy that goes on from it.

Each seals what it holds to whom the new policy entitles to it; the boxes pass through the console, which cannot open
them. The receiver checks them against what all three parties of the old policy committed.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from uvcc_console.fleet import agent_lines
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.context import Member, Rollout, all_of, each
from uvcc_console.rollout.stages.migration.private_migration import KIND, PhaseMigration, handover_folder
from uvcc_engine.contract.agent_protocol.agent_commands import LaunchCommand, SignalCommand, WatchCommand
from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.job.migration import record_hash
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.parsing.safepaths import shown
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.proof.bundle import POLICY_FILE, SIGNATURES_FILE
from uvcc_engine.transcript.terms.commit_record import RECORD

HANDOVER_S = 300.0
MOST_BOXES = 9 * 4096
MOST_BYTES = 64 << 30
POLL_S = 0.1


async def hand_over(ctx: Rollout, phase: Phase, made: PhaseMigration) -> None:
    """Bring every pod of the phase its boxes; safe to repeat. The pods hold the new policy and its signatures already.

    Raises UvccError with a pod's own words if it refuses to hand over, VerificationError if the COMMIT record that was
    kept is another than the policy cites.
    """
    home = handover_folder(ctx, phase.engine_run)
    check_kept(home, made)
    boxes = await each((ctx.members[name] for name in made.sources), lambda m: _made(ctx, phase, made, m, home))
    old = ctx.artifacts / f"{phase.name}-{made.number - 1}" / POLICY_FILE
    names = sorted({name for found in boxes.values() for name in found})
    await all_of(_given(phase, m, home, old, names) for m in ctx.of_phase(phase))


def check_kept(home: Path, made: PhaseMigration) -> None:
    """Whether the COMMIT record in ``home`` is the one that a migration starts from. Raises UvccError if it is not."""
    if record_hash(files.read_json(home / RECORD)) != made.start["commit"]:
        what = f"{home / RECORD} is not the COMMIT record that {made.engine_run} starts from"
        raise VerificationError("handover", what, f"bring it back as it was, or replace {', '.join(made.lost)} again")


async def _made(ctx: Rollout, phase: Phase, made: PhaseMigration, member: Member, home: Path) -> list[str]:
    """Have one pod make its boxes and fetch them; their names."""
    run = f"{phase.engine_run}.{KIND}"
    spec = WorkerSpec(
        run=run,
        kind=KIND,
        coord=str(Coord(member.request.replica, member.request.party, 0, 0)),
        topology=phase.topology,
        job={"from": f"runs/{made.before}", "policy": f"runs/{made.before}/{POLICY_FILE}", "step": made.start["step"]},
        policy=f"runs/{phase.engine_run}/{POLICY_FILE}",
        signatures=f"runs/{phase.engine_run}/{SIGNATURES_FILE}",
    )
    await member.channel.request(LaunchCommand(run=run, workers=[spec]), timeout=HANDOVER_S)
    if rc := await _ended(member, run):
        said = await member.ssh.run(f"cat .uvcc/runs/{run}/exit*.json 2>/dev/null || tail -n 1 .uvcc/runs/{run}/*.log")
        raise UvccError(f"pod {member.name} does not hand over ({rc}): {_words(said.text)}", "tear down, run anew")
    listed = await member.ssh.sh(f"cd .uvcc/runs/{run}/start && ls *.box 2>/dev/null || :")
    names = boxes_of(member.name, listed)
    with DownloadFolder(home) as downloads:
        for name in names:
            await member.ssh.get(f".uvcc/runs/{run}/start/{name}", downloads, (name,), limit=MOST_BYTES, growing=True)
    return names


def boxes_of(pod: str, listed: str) -> list[str]:
    """The boxes that a pod says it made. It names each as made by itself: no pod replaces another's.

    Raises VerificationError for any other name, which would be put on the other parties' pods as well.
    """
    box = re.compile(rf"c[0-2]_p[0-2]r[0-9]{{1,4}}_by_{re.escape(pod)}\.box")
    names = listed.split()
    for name in names:
        if not box.fullmatch(name):
            raise VerificationError("handover", f"pod {pod} offers {shown(name)} as a box", "look at that pod by hand")
    if len(set(names)) != len(names) or len(names) > MOST_BOXES:
        raise VerificationError("handover", f"pod {pod} offers {len(names)} boxes, some of them twice")
    return names


def _words(text: str) -> str:
    try:
        return str(json_of(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no word"


async def _ended(member: Member, run: str) -> int:
    """The exit code of this pod's handover. Raises UvccError if it takes too long."""
    try:
        async with asyncio.timeout(HANDOVER_S):
            while True:
                workers = agent_lines.workers(await member.channel.request(WatchCommand(run=run)), member.name)
                if all(w.state == "exited" for w in workers):
                    return max((w.rc if w.rc is not None else 1 for w in workers), default=1)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        await member.channel.request(SignalCommand(run=run, signal="KILL"))
        raise UvccError(f"pod {member.name} did not hand over in {HANDOVER_S:.0f} s", "see its log; retry") from None


async def _given(phase: Phase, member: Member, home: Path, old: Path, names: Sequence[str]) -> None:
    """Put one pod's boxes, the old policy and the COMMIT record where its workers look for them."""
    there = f".uvcc/runs/{phase.engine_run}/start"
    await member.ssh.sh(f"umask 077; mkdir -p {shlex.quote(there)}")
    mine = [n for n in names if f"_p{member.request.party}r{member.request.replica}_by_" in n]
    for path, name in [(old, POLICY_FILE), (home / RECORD, RECORD), *((home / n, n) for n in mine)]:
        await member.ssh.put(path, f"{there}/{name}")
