"""After a pod was lost for good: another comes in its place, and the run goes on from the last common checkpoint.

What was lost with the pod is its party's identity and shares, and nobody has a copy of either. So the phase goes on
under a policy of its own: it names the new pod's identity, cites the old policy and the checkpoint by its COMMIT record
(``job.start``), is signed by all three parties' agents, and has an engine run, a session id, masks and epochs of its
own. The surviving pods hand the shares over (``handover``). What the old policy proved stays in ``artifacts/PHASE-N``.

The COMMIT record is kept as a file, since the journal's texts are cleaned of line breaks, which its signatures have.
Then the journal says it (an engine event ``succession``) before anything else does: a conductor that dies in between is
followed by one that does the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_console.fleet.provider import Remembers
from uvcc_console.plan.plan import Phase
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.fleet import preflight, replacing
from uvcc_console.rollout.stages.training import agree
from uvcc_console.rollout.stages.verify import collect
from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol.agent_commands import RelayCommand
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.job.migration import Migration, record_hash
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.transcript.proof.bundle import POLICY_FILE
from uvcc_engine.transcript.terms.commit_record import RECORD
from uvcc_engine.transcript.terms.migration_plan import migration_after
from uvcc_engine.transcript.terms.policy import Policy

EVENT = "succession"
KIND = "handover"
ANSWER_S = 10.0  # a pod that says nothing for so long may be lost
VERDICT_S = 20.0  # so long the provider has to say that it is
LOOK_S = 3.0
ASKED_S = 10.0  # a pod that no path reaches for so long is asked for at its provider
UNREACHED_S = 30.0  # and is taken for lost where the provider does not show it, which a list that is late does as well
# one line per committed checkpoint: where it lies, then the record
_RECORDS = (
    "cd .uvcc/runs/{run}/checkpoints 2>/dev/null || exit 0\n"
    "for f in step-*/" + RECORD + '; do [ -f "$f" ] && tr -d "\\n" <"$f" && echo; done; :'
)


@dataclass(frozen=True, slots=True)
class PhaseMigration:
    """``engine_run`` goes on where ``before`` left off; ``number`` counts from 2.

    ``of``: hash of the policy before; ``start``: :class:`Migration` as JSON, empty if no checkpoint was committed;
    ``sources``: pods that hand their shares over; ``lost``: those that were replaced.
    """

    phase: str
    number: int
    engine_run: str
    before: str
    of: str
    start: Mapping[str, Any]
    sources: tuple[str, ...]
    lost: tuple[str, ...]

    def event(self) -> ev.EngineEvent:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields |= {"sources": list(self.sources), "lost": list(self.lost)}
        return ev.EngineEvent(pod="", level="warn", event=EVENT, fields=fields)


def all_of(ctx: Rollout) -> list[PhaseMigration]:
    """Every migration of the run in order, from the journal. Only the conductor's word counts, which names no pod:

    what a pod's workers report becomes an event of that pod, whatever they call it.
    """
    told = [
        e
        for _, e in iter_events(ctx.run_dir / processes.JOURNAL, (ev.EngineEvent.kind,))
        if isinstance(e, ev.EngineEvent) and not e.pod
    ]
    known, lists = PhaseMigration.__dataclass_fields__, ("sources", "lost")  # an older version said more
    own = [{n: v for n, v in e.fields.items() if n in known} for e in told if e.event == EVENT]
    return [PhaseMigration(**fields | {n: tuple(fields[n]) for n in lists}) for fields in own]


def latest(ctx: Rollout) -> dict[str, PhaseMigration]:
    """The migration in force of each phase that has one."""
    return {one.phase: one for one in all_of(ctx)}


def apply(ctx: Rollout) -> None:
    """Make the plan say what the migrations of the journal say, and set the old policy's evidence aside."""
    phases = dict(ctx.plan.phases)
    for one in latest(ctx).values():
        phase = phases[one.phase]
        job = {k: v for k, v in phase.job.items() if k != "start"}
        phases[one.phase] = replace(
            phase, engine_run=one.engine_run, job=job | ({"start": dict(one.start)} if one.start else {})
        )
        folder, aside = ctx.artifacts / one.phase, ctx.artifacts / f"{one.phase}-{one.number - 1}"
        if not aside.exists() and (folder / POLICY_FILE).exists() and _hash_in(folder) == one.of:
            folder.rename(aside)
    ctx.plan = replace(ctx.plan, phases=phases)


def _hash_in(folder: Any) -> str:
    return Policy.load(folder / POLICY_FILE).hash.hex()


async def lost_pods(ctx: Rollout) -> list[str]:
    """Pods that do not answer and that their provider does not have any more, or says are ending without having been
    asked to, as a spot machine does that was outbid. A lost link alone proves nothing.

    So is one whose replacement did not come up to its agent.
    """
    absent = [m.name for m in ctx.due() if m.pod is None or m.agent is None]
    silent = [m for m in ctx.due() if m.name not in absent and not await _answers(m)]
    if not silent:
        return absent
    for _ in range(int(VERDICT_S / LOOK_S)):
        try:
            there = {p.name for p in await ctx.provider.list(ctx.plan.prefix) if not p.ending}
        except UnreachableError:
            there = set(m.request.name for m in silent)
        if all(m.request.name not in there for m in silent):
            return absent + [m.name for m in silent]
        await asyncio.sleep(LOOK_S)
    return absent + [m.name for m in silent if m.request.name not in there]


async def taken_away(ctx: Rollout, now: float) -> list[str]:
    """Pods that no path has reached for ``UNREACHED_S``, nor does now, and that their provider does not have any more;
    where it tells of their end itself, after ``ASKED_S``.

    One look, so that whoever waits for the end of a phase without peers that would notice can ask on the way: its limit
    for silence may be a quarter of an hour.
    """

    def unreached(member: Member, least: float) -> bool:
        view = ctx.bus.snapshot.pods.get(member.name)
        paths = view.paths.values() if view is not None and not member.in_hand else ()
        return bool(paths) and all(not up and now - since > least for up, since in paths)

    quiet = [m for m in ctx.due() if unreached(m, ASKED_S) and not await _answers(m)]
    if not quiet:
        return []
    try:
        async with asyncio.timeout(ANSWER_S):
            listed = await ctx.provider.list(ctx.plan.prefix)
    except (UnreachableError, TimeoutError):
        return []
    there, ending = {p.name for p in listed if not p.ending}, {p.name for p in listed if p.ending}
    if isinstance(ctx.provider, Remembers):  # what ended by the provider's own record is written down as that
        begun = ctx.provider.begun(ctx.plan.prefix)
        ending |= {m.request.name for m in quiet if m.request.name not in begun}
    missing = [m for m in quiet if m.request.name not in there]
    return [m.name for m in missing if m.request.name in ending or unreached(m, UNREACHED_S)]


async def _answers(member: Member) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            return (await member.ssh.run("true")).exit == 0
    except (UvccError, TimeoutError):
        return False


def check(ctx: Rollout, names: Sequence[str]) -> Phase:
    """The phase that would go on without these pods. Raises ConfigError where it cannot."""
    job, s = ctx.plan.profile.job, ctx.bus.snapshot
    phase = ctx.plan.phases.get(s.phase)
    if not isinstance(job, PrivateJobSettings):
        raise ConfigError(f"a {job.kind} job has no shares to hand over", "start a new run")
    if phase is None or s.engine_run != phase.engine_run:
        raise ConfigError("no phase was started yet", "before the smoke a pod is replaced as it is")
    if job.task != "train":
        raise ConfigError(f"a job of task {job.task} has no checkpoints", "start a new run")
    if ctx.plan.profile.fleet.attach_prefix:
        raise ConfigError(f"{', '.join(names)} was taken over, not rented", "start it again where it came from")
    if not (ctx.artifacts / phase.name / POLICY_FILE).exists():
        raise ConfigError(f"the policy of {phase.engine_run} is not here", "start a new run")
    return phase


async def go_on(ctx: Rollout, names: Sequence[str]) -> str:
    """Replace the pods ``names`` and let their phase go on; its workers must have ended. Returns what was done.

    Nothing is rented before it is clear that the run can go on. Raises ConfigError where it cannot, UvccError if a new
    pod cannot be had or does not pass preflight.
    """
    phase = check(ctx, names)
    old = Policy.load(ctx.artifacts / phase.name / POLICY_FILE)
    survivors = [m for m in ctx.of_phase(phase) if m.name not in names]
    record, sources = await newest_commit(ctx, phase, old, survivors)
    check_restorable(old, record, {ctx.members[n].request.party for n in names if ctx.members[n].request.replica == 0})
    await _evidence(ctx, phase, survivors)
    for name in names:
        await replacing.replace_pod(ctx, name)
    await preflight.preflight(ctx)
    start = migration_after(old, record, agree.parties_of(ctx, phase)).to_json() if record else {}
    number = migration_number(phase) + 1
    run = f"{ctx.plan.run}.{phase.name}-{number}"
    made = PhaseMigration(
        phase.name,
        number,
        run,
        phase.engine_run,
        old.hash.hex(),
        start,
        tuple(m.name for m in sources),
        tuple(names),
    )
    if record:
        with DownloadFolder(handover_folder(ctx, run)) as folder:
            folder.write((RECORD,), json.dumps(record).encode())
    ctx.say(made.event())
    apply(ctx)
    await _end_relays(ctx, phase)
    where = f"step {record['step']}" if record else "the beginning: no committed checkpoint is left"
    return f"{', '.join(names)} replaced; {run} goes on from {where}"


def handover_folder(ctx: Rollout, engine_run: str) -> Path:
    """Where what the pods of ``engine_run`` go on from lies on this machine: the COMMIT record, and sealed boxes."""
    return ctx.run_dir / KIND / engine_run


def migration_number(phase: Phase) -> int:
    tail = phase.engine_run.rpartition("-")[2]
    return int(tail) if phase.engine_run.endswith(f".{phase.name}-{tail}") else 1


async def newest_commit(
    ctx: Rollout, phase: Phase, old: Policy, survivors: Sequence[Member]
) -> tuple[dict[str, Any], list[Member]]:
    """The newest COMMIT record that a replica's surviving pods all hold, and these pods; nothing if there is none.

    A whole replica can give everybody their shares. Two pods of one can where the third's party gets them as a whole,
    which is so if its first pod, the one that signs, was lost.
    """
    best: tuple[dict[str, Any], list[Member]] = ({}, [])
    for replica in range(phase.topology.replicas):
        mine = [m for m in survivors if m.request.replica == replica]
        absent = {0, 1, 2} - {m.request.party for m in mine}
        if len(absent) > 1 or (absent and replica > 0):
            continue
        held = [await _records(ctx, phase, m) for m in mine]
        common = set.intersection(*({record_hash(r) for r in found} for found in held))
        for record in held[0]:
            fits = record.get("sid_job") == old.sid_job.hex() and old.first_step < record["step"] < old.steps
            if fits and record_hash(record) in common and record["step"] > best[0].get("step", 0):
                best = (record, mine)
    return best


async def _records(ctx: Rollout, phase: Phase, member: Member) -> list[dict[str, Any]]:
    """The COMMIT records that a pod holds; they are checked on the pods, where they are used."""
    found = []
    for line in (await member.ssh.sh(_RECORDS.format(run=phase.engine_run))).splitlines():
        try:
            record = json_of(line)
        except ValueError:
            text = f"a COMMIT record of {phase.engine_run} on {member.name} is damaged: its checkpoint cannot be used"
            ctx.say(ev.Alert(level="error", name="checkpoint_unverified", text=text, subject=member.name))
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def check_restorable(old: Policy, record: Mapping[str, Any], unvouched: set[int]) -> None:
    """Whether the engine will let these parties be restored. Raises ConfigError before anything is rented."""
    if not record:
        return
    before = old.migration.restored if old.migration is not None else ()
    restored = tuple(sorted({*before, *unvouched}))
    Migration(old.hash.hex(), int(record["step"]), record_hash(record), old.hash.hex(), restored)


async def _evidence(ctx: Rollout, phase: Phase, survivors: Sequence[Member]) -> None:
    """What the surviving pods recorded under the old policy comes home; it is no reason not to go on."""
    for member in survivors:
        try:
            await collect.fetch(ctx, phase, member)
        except (UvccError, ExceptionGroup) as e:
            text = f"no evidence of {phase.engine_run} from {member.name}: {describe(e)}"
            ctx.say(ev.Alert(level="warn", name="collect", text=text, subject=member.name))


async def _end_relays(ctx: Rollout, phase: Phase) -> None:
    hosts = [m for m in ctx.of_phase(phase) if m.request.party == 0 and m.agent is not None]
    stops = (m.channel.request(RelayCommand(run=phase.engine_run, action="stop")) for m in hosts)
    await asyncio.gather(*stops, return_exceptions=True)  # what is left ends with the pod
