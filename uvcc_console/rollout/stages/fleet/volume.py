"""A language model's checkpoints on a volume (``fleet.volume``): its pods write them there, and a new pod finds them.

On each pod the run's folder of checkpoints is a link into the volume. What lies there is one run's and one pod's, by
their names. A pod that comes in a lost one's place believes nothing of it: the console compares the manifest's hash
with the one that the lost pod told, and the trainer reads every byte before it goes on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.fleet.cloud.intents import mount_of
from uvcc_console.fleet.provider_kinds import GIVEN, TOLD, kind_of
from uvcc_console.plan.plan import Phase
from uvcc_console.rollout.context import Member, Rollout
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import files

FOLDER: Final = "uvcc-checkpoints"
SLOW_S: Final = 120.0
_LAY: Final = """umask 077
set -- {at}
root=$1
[ -d "$root" ] || {{ echo "there is no $root on it" >&2; exit 1; }}
{mounted}there="$root/{folder}/{engine_run}/{pod}"
mkdir -p "$there" {run} && [ -w "$there" ] || {{ echo "$root cannot be written to" >&2; exit 1; }}
if [ -L {here} ]; then
  [ "$(readlink {here})" = "$there" ] || {{ echo "its checkpoints lie elsewhere" >&2; exit 1; }}
elif [ -d {here} ]; then
  cp -a {here}/. "$there"/ && mv {here} {here}.before && ln -s "$there" {here}
else
  ln -s "$there" {here}
fi
"""
_MOUNTED: Final = (
    '[ "$(stat -c %d "$root")" != "$(stat -c %d "$root/..")" ] || { echo "nothing is mounted at $root" >&2; exit 1; }\n'
)


def wanted(ctx: Rollout, member: Member) -> bool:
    """Whether this pod's checkpoints lie on a volume."""
    return ctx.plan.profile.fleet.of(member.request.party).volume is not None


async def lay(ctx: Rollout, phase: Phase, members: Sequence[Member]) -> None:
    """Have these pods write the phase's checkpoints to their volumes. Raises UvccError naming the pod that cannot."""
    for member in members:
        if not wanted(ctx, member):
            continue
        fleet = ctx.plan.profile.fleet.of(member.request.party)
        assert fleet.volume is not None
        kind = kind_of(fleet.provider)
        given = kind.volumes == GIVEN
        pattern = shlex.quote(_root(ctx, member)) if given else _mount(ctx, member)
        run = f".uvcc/runs/{phase.engine_run}"
        script = _LAY.format(
            at=pattern,
            mounted="" if given else _MOUNTED,
            folder=FOLDER,
            engine_run=phase.engine_run,
            pod=member.name,
            run=run,
            here=f"{run}/{files.CHECKPOINTS}",
        )
        try:
            await member.ssh.sh(script, timeout=SLOW_S)
        except UvccError as e:
            raise UvccError(f"the volume of pod {member.name}: {e.what}", "see fleet.volume") from e


def _root(ctx: Rollout, member: Member) -> str:
    """The folder of this pod's volume that the vendor told, or that the profile names; "" where neither is known."""
    volume = ctx.plan.profile.fleet.of(member.request.party).volume
    return (volume.path if volume is not None else "") or mount_of(ctx.run_dir, member.request.name)


def _mount(ctx: Rollout, member: Member) -> str:
    """Where a volume is mounted, for the shell. Raises UvccError where its vendor has not told.

    Of a run whose folder does not say it yet the kind of provider does: a volume's own name begins with its pod's.
    """
    if told := _root(ctx, member):
        return shlex.quote(told)
    provider, pod = ctx.plan.profile.fleet.of(member.request.party).provider, member.request.name
    at = kind_of(provider).volumes
    if at == TOLD:
        raise UvccError(f"{provider} does not say where the volume of pod {member.name} is mounted", "uvcc resume")
    return f"{at.replace('{pod}', pod)}x*" if "{pod}" in at else at


async def has(ctx: Rollout, phase: Phase, member: Member) -> int:
    """The step of the newest checkpoint that the pod before told of, if the volume has that very one; -1 if not."""
    step, sha256 = ctx.bus.snapshot.checkpoints.get(member.name, (-1, ""))
    if step < 0 or not wanted(ctx, member):
        return -1
    path = f".uvcc/runs/{phase.engine_run}/{files.CHECKPOINTS}/step-{step}/{checkpoint.MANIFEST}"
    said = await member.ssh.run(f"sha256sum {path}", timeout=SLOW_S)
    return step if said.exit == 0 and said.text.partition(" ")[0] == sha256 else -1


async def clear(ctx: Rollout) -> None:
    """At the end: what the run wrote to a folder or volume that stays goes, unless it shall stay as well.

    A volume of the run's own goes as a whole.
    """
    for member in ctx.live():
        fleet = ctx.plan.profile.fleet.of(member.request.party)
        root = _root(ctx, member)
        if fleet.volume is None or fleet.volume.size_gb or fleet.volume.keep or member.link is None or not root:
            continue
        runs = [f"{root}/{FOLDER}/{p.engine_run}" for p in ctx.plan.phases.values()]
        pods = " ".join(shlex.quote(f"{run}/{member.name}") for run in runs)
        emptied = " ".join(shlex.quote(run) for run in runs)
        try:
            await member.ssh.sh(f"rm -rf {pods}; rmdir {emptied} 2>/dev/null || :", timeout=SLOW_S)
        except UvccError as e:
            text = f"checkpoints stay in {root}/{FOLDER}: {describe(e).what}"
            ctx.say(ev.Alert(level="warn", name="volume", text=text, subject=member.name))
