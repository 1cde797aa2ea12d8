"""Jobs of a Slurm cluster as pods: the console runs on a machine that has ``sbatch``, such as a login node.

A job starts an SSH server of its own for the run's key, as the user who queued it, and says where in a folder of the
shared home (:mod:`.slurm_job`). Slurm's own limit of time ends it when the run's life is over, whatever became of the
console.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, model_validator

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.own_machines import PlainOffer
from uvcc_console.fleet.cloud.plain_vendor import PlainVendor
from uvcc_console.fleet.cloud.vendor import EndedPod, PastPod, RentedPod, SshTarget
from uvcc_console.fleet.provider import POD_PREFIX, NoOffer
from uvcc_console.fleet.provider_kinds import GIVEN, FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock
from uvcc_console.fleet.vendors import slurm_job
from uvcc_console.fleet.vendors.slurm_job import FOLDER
from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider

log = logger(__name__)

NAME: Final = "slurm"
CALL_S: Final = 30.0
SAYS_S: Final = 300.0  # so long a job that runs may take to say where its server is
# a state that is not known is none of these: what may run is never taken for gone
_OVER: Final = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|LAUNCH_FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|RECONFIG_FAIL"
    "|REVOKED|TIMEOUT"
)
# why a job waits that no wait will start: Slurm keeps it in the queue, since an administrator might change the rules
_NEVER: Final = re.compile(
    r"Partition(TimeLimit|NodeLimit|Config)|BadConstraints|(Account|QOS)NotAllowed|Invalid(Account|QOS)"
    r"|(Assoc|QOS)Max\w+PerJob(Limit)?"
)
# what is wrong with this machine, not with the job, and what to do about it; it may pass, as a mount that is away
_CURES: Final = (
    (
        re.compile(r"configuration source|fetch_config|DNS SRV|slurm\.conf", re.IGNORECASE),
        "this machine knows no cluster: run uvcc on a login node, or set SLURM_CONF to the cluster's slurm.conf",
    ),
    (
        re.compile(r"munge|protocol authentication", re.IGNORECASE),
        "is munged up on this machine, with the cluster's key and a right clock? munge -n | unmunge tells",
    ),
)
_MEANS: Final = {
    "auth": "your user queues the jobs: does it have an account there? SBATCH_ACCOUNT names one",
    "limit": "squeue --me and sacctmgr show qos tell what is used and allowed; SBATCH_QOS names another",
}
_COLUMNS: Final = "%i|%T|%r|%j"
_ADDRESS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9._-]{0,63}) ([A-Za-z0-9][A-Za-z0-9.-]{0,253}) ([0-9]{1,5})\s*")
# exit code, what it printed, what it complained of
Answer = tuple[int, str, str]
Command = Callable[[Sequence[str], bytes], Awaitable[Answer]]


async def here(argv: Sequence[str], stdin: bytes) -> Answer:
    """Run one of Slurm's commands. Raises ConfigError where there is none, UnreachableError where it does not end."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as e:
        raise ConfigError(
            f"there is no {argv[0]} on this machine: {e}", "run uvcc on a login node of the cluster"
        ) from e
    try:
        async with asyncio.timeout(CALL_S):
            out, err = await process.communicate(stdin)
    except TimeoutError:
        raise UnreachableError(f"{argv[0]} gave no answer in {CALL_S:.0f} s", "is slurmctld up?") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


class SlurmFleet(FleetSettings):
    """``regions``: partitions that may be used; ``queue_hours``: so long a job may wait in its queue; ``price``: US
    dollars an hour that a job counts as. ``cpus`` and ``memory`` (GiB) of a job, where 0 is the cluster's own default.
    ``scratch``: the folder on each node in which pods have their homes; ``TMPDIR`` or ``/tmp`` there without it."""

    queue_hours: float = Field(default=12.0, gt=0)
    price: float = Field(default=0.0, ge=0)
    cpus: int = Field(default=0, ge=0)
    memory: int = Field(default=0, ge=0)
    scratch: str = Field(default="", pattern=r"^(/[A-Za-z0-9._/-]{1,200})?$")

    @model_validator(mode="after")
    def _one_cluster(self) -> SlurmFleet:
        if self.per_party:
            raise ValueError("a cluster is one operator: give each party a provider with fleet.parties")
        return self


class SlurmClient(PlainVendor):
    """One user's jobs. ``minutes``: Slurm ends each after so long."""

    name = NAME
    free = True
    where = ""

    def __init__(
        self,
        *,
        minutes: int = 60,
        own: SlurmFleet | None = None,
        clock: Clock | None = None,
        command: Command = here,
    ) -> None:
        self.clock: Clock = clock or RunClock(None)
        self._minutes, self._own = minutes, own or SlurmFleet()
        self._command = command
        self._addresses: dict[str, SshTarget] = {}
        self._complaints: dict[str, str] = {}
        self._running: dict[str, float] = {}  # when a job without an address was first seen to run

    async def _run(self, *argv: str, stdin: bytes = b"") -> Answer:
        code, out, err = await self._command(argv, stdin)
        if code and (kind := _kind(err)) == "unreachable":
            hint = next((cure for words, cure in _CURES if words.search(err)), "is slurmctld up?")
            raise UnreachableError(f"{argv[0]}: {clean(err.strip())[:300]}", hint)
        elif code and kind != "missing":
            log.warning("%s is refused: %s", argv[0], clean(err))
            refused = CloudRefused(kind, code, clean(err.strip())[:300])
            refused.hint = _MEANS.get(kind, f"{argv[0]} by hand says the same; uvcc logs has it in full")
            raise refused
        return code, out, err

    async def permitted(self) -> None:
        await self._run("sbatch", "--version")

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Partitions that take jobs of this length and, where a GPU is wanted, have such."""
        if wanted.image or wanted.spot or wanted.disk:
            raise ConfigError("slurm knows no image, spot or disk", "leave out fleet.image, fleet.spot and fleet.disk")
        _, out, _ = await self._run("sinfo", "--noheader", "--format=%R|%a|%G|%l")
        found: list[PlainOffer] = []
        limits: dict[str, float] = {}
        for line in out.splitlines():
            parts = clean(line).split("|")
            if len(parts) != 4:
                raise UnreachableError("sinfo answered in another form", "is an alias or a wrapper in between?")
            partition, up, gres, most = parts
            limits[partition] = minutes_of(most)
            for gpu in re.findall(r"gpu:([A-Za-z][\w.-]*):\d+", gres) or [""]:
                offer = PlainOffer(partition, NAME, partition, gpu, wanted.gpus if gpu else 0, self._own.price)
                wait = self._own.queue_hours * 30  # minutes: a job that waits in its queue is left there
                found.append(replace(offer, stock=up == "up", steady=True, provisioning_time=wait))
        self._hold_to(limits, wanted.regions)
        return [offer for offer in dict.fromkeys(found) if limits[offer.region] >= self._minutes]

    def _hold_to(self, limits: Mapping[str, float], named: Sequence[str]) -> None:
        """Raises NoOffer where no partition of this name is there, or takes jobs of this length: Slurm would queue it
        all the same, for ever."""
        if not limits:
            return
        there = [name for name in limits if name in named] if named else list(limits)
        if not there:
            what = f"the cluster has no partition {' or '.join(named)}"
            raise NoOffer(what, f"fleet.regions may name {', '.join(sorted(limits))}", passing=False)
        if all(limits[name] < self._minutes for name in there):
            most = ", ".join(f"{name} lets a job run for {_span(limits[name])}" for name in there)
            hint = "lower limits.ttl, to which a job adds ten minutes, or name another partition in fleet.regions"
            raise NoOffer(f"partition {most}: a pod of this run asks for {_span(self._minutes)}", hint, passing=False)

    # jobs

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """Queue one job. Without an answer it may be there: its name tells."""
        argv = ["sbatch", "--parsable", f"--job-name={name}", f"--partition={offer.region}", f"--time={self._minutes}"]
        argv += ["--nodes=1", "--ntasks=1", "--export=HOME,PATH", "--output=/dev/null", "--no-requeue"]
        argv += [f"--gres=gpu:{offer.gpu_type}:{wanted.gpus}"] if offer.gpu_type else []
        argv += [f"--cpus-per-task={self._own.cpus}"] if self._own.cpus else []
        argv += [f"--mem={self._own.memory}G"] if self._own.memory else []
        _, out, _ = await self._run(*argv, stdin=slurm_job.script(key_id, self._own.scratch))
        job = out.strip().partition(";")[0]
        if not job.isdecimal():
            raise UnreachableError(f"sbatch answered {clean(out)[:80]!r}", "its outcome is unknown")
        return RentedPod(job, name, NAME, stage="PENDING", has_gpu=bool(offer.gpu_type))

    async def _jobs(self, *which: str) -> list[RentedPod]:
        """This user's jobs, also those that ended a short while ago. Raises UnreachableError for a line of another
        form: half a queue is never taken for all of it."""
        code, out, _ = await self._run("squeue", "--noheader", "--states=all", f"--format={_COLUMNS}", *which)
        found = []
        for line in filter(str.strip, out.splitlines() if not code else ()):
            parts = line.strip().split("|", 3)
            if len(parts) < 4 or not parts[0].partition("_")[0].isdecimal():
                raise UnreachableError("squeue answered in another form", "is an alias or a wrapper in between?")
            found.append(await self._job(*(clean(part) for part in parts)))
        return found

    async def _job(self, job: str, state: str, reason: str, name: str) -> RentedPod:
        mine = name.startswith(POD_PREFIX)
        over = _OVER.fullmatch(state) is not None
        ended = over or state == "COMPLETING"
        at = await self._address(job) if state == "RUNNING" and mine else None
        words, failed = state, ended
        if state == "PENDING":
            words = state if reason == "None" else f"{state} {reason}".strip()  # it has not been looked at yet
            failed = _NEVER.fullmatch(reason) is not None
        elif over and state != "CANCELLED" and mine and (why := await self._complaint(job)):
            words = f"{state}: {why}"
        elif state == "RUNNING" and mine and at is None:
            failed = self.clock.now() - self._running.setdefault(job, self.clock.now()) > SAYS_S
            words = f"{state}, but {FOLDER}/{job} does not say where" if failed else state
            words += ": do the nodes share this home?" if failed else ""
        logins = (at,) if at else ()
        return RentedPod(
            job, name, NAME, None, words, over, failed, failed, installed=at is not None, has_gpu=False, logins=logins
        )

    async def _address(self, job: str) -> SshTarget | None:
        """Where the job's server is, once it has said so."""
        if job not in self._addresses:
            said = _ADDRESS.fullmatch(await self._told(job, "address"))
            if said and 0 < int(said[3]) < 65536:
                self._addresses[job] = SshTarget(said[1], said[2], int(said[3]))
        return self._addresses.get(job)

    async def _complaint(self, job: str) -> str:
        """The last that a job which failed has said."""
        if job not in self._complaints:
            lines = (await self._told(job, "why")).strip().splitlines()
            self._complaints[job] = clean(lines[-1].strip())[:200] if lines else ""
        return self._complaints[job]

    async def _told(self, job: str, what: str) -> str:
        job = _number(job.partition("_")[0])
        _, out, _ = await self._command(["sh", "-c", f'tail -c 4096 "{FOLDER}/{job}/{what}" 2>/dev/null || :'], b"")
        return out

    async def pods(self) -> Sequence[RentedPod]:
        return [job for job in await self._jobs("--me") if not job.over]

    async def pod(self, pod_id: str) -> RentedPod | None:
        found = await self._jobs(f"--jobs={_number(pod_id)}")
        return next((job for job in found if job.id == pod_id), None)

    async def history(self) -> Sequence[PastPod]:
        """Slurm remembers ended jobs for some minutes."""
        return [EndedPod(j.id, j.name, terminated_at=j.stage, how=j.stage) for j in await self._jobs("--me") if j.over]

    async def delete(self, pod_id: str) -> bool:
        """scancel says nothing of a job that is over, or that there never was: the queue tells."""
        found = await self.pod(pod_id)
        await self._run("scancel", _number(pod_id))
        await self._command(["sh", "-c", f'rm -rf "{FOLDER}/{_number(pod_id)}"'], b"")
        return found is not None and not found.over

    async def close(self) -> None:
        return None


def minutes_of(text: str) -> float:
    """Slurm's ``days-hours:minutes:seconds``, or words for no limit."""
    days, _, rest = text.rpartition("-")
    parts = [int(part) if part.isdecimal() else -1 for part in (rest or "-1").split(":")]
    if min(parts) < 0 or len(parts) > 3 or (days and not days.isdecimal()):
        return math.inf
    if days:
        parts += [0] * (3 - len(parts))  # 1-12 is a day and twelve hours
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def _span(minutes: float) -> str:
    return f"{minutes / 60:.3g} h" if minutes >= 120 else f"{minutes:.0f} min"


def _number(job: str) -> str:
    if not job.isdecimal() or not job.isascii():
        raise UnreachableError(f"{job[:80]!r} is no number of a job", "slurm numbers its jobs")
    return job


def _kind(err: str) -> str:
    """What a complaint of Slurm's means. Its commands give an exit code and prose: this one place reads the words."""
    low = err.lower()
    if "invalid job id" in low or "already completing or completed" in low:
        return "missing"
    if any(words.search(err) for words, _ in _CURES):
        return "unreachable"
    if "unable to contact" in low or "timed out" in low or "connection refused" in low or "communication" in low:
        return "unreachable"
    if "access" in low or "permission" in low or "invalid account" in low or "user not found" in low:
        return "auth"
    if "limit" in low or "policy" in low:
        return "limit"
    return "capacity" if "not available" in low else "invalid"


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider

    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    own = SlurmFleet.model_validate({k: v for k, v in fleet.items() if k in SlurmFleet.model_fields})
    clock = RunClock(run_dir if known else None)
    client = SlurmClient(minutes=math.ceil(ttl_s / 60) + 10, own=own, clock=clock)
    return CloudProvider(client, fleet, run_dir)


KIND: Final = ProviderKind(NAME, SlurmFleet, make, volumes=GIVEN)
