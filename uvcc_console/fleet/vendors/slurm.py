"""Jobs of a Slurm cluster as pods: the console runs on a machine that has ``sbatch``, such as a login node.

A job starts an SSH server of its own for the run's key, as the user who queued it, and says where in a folder of the
shared home. Slurm's own limit of time ends it when the run's life is over, whatever became of the console.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from uvcc_console.fleet.provider import POD_PREFIX
from uvcc_console.fleet.provider_kinds import GIVEN, FleetSettings, ProviderKind
from uvcc_console.fleet.runclock import FILE as CLOCK
from uvcc_console.fleet.runclock import RunClock
from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.text import clean

if TYPE_CHECKING:
    from uvcc_console.fleet.cloud.saga import CloudProvider

log = logger(__name__)

NAME: Final = "slurm"
CALL_S: Final = 30.0
FOLDER: Final = "$HOME/.uvcc-slurm"
_LIVE: Final = frozenset({"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED"})
_COLUMNS: Final = "%i|%T|%r|%j"
_ADDRESS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9._-]{0,63}) ([A-Za-z0-9][A-Za-z0-9.-]{0,253}) ([0-9]{1,5})\s*")
# exit code, what it printed, what it complained of
Answer = tuple[int, str, str]
Command = Callable[[Sequence[str], bytes], Awaitable[Answer]]

_JOB: Final = """#!/bin/sh
set -eu
umask 077
dir="%(folder)s/$SLURM_JOB_ID"
mkdir -p "$dir"
trap 'rm -rf "$dir"' EXIT
trap 'exit 143' TERM INT
printf '%%s\\n' '%(key)s' >"$dir/authorized_keys"
ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
sshd=$(command -v sshd || echo /usr/sbin/sshd)
for try in 1 2 3 4 5 6 7 8 9; do
  port=$((20000 + (SLURM_JOB_ID * 31 + try * 997 + $$) %% 20000))
  printf '%%s\\n' "Port $port" "HostKey $dir/host_key" "AuthorizedKeysFile $dir/authorized_keys" 'PidFile none' \\
    'StrictModes no' 'PasswordAuthentication no' 'KbdInteractiveAuthentication no' 'UsePAM no' \\
    'Subsystem sftp internal-sftp' >"$dir/sshd_config"
  "$sshd" -D -e -f "$dir/sshd_config" &
  server=$!
  sleep 1
  kill -0 "$server" 2>/dev/null && break
done
echo "$(id -un) ${SLURMD_NODENAME:-$(hostname)} $port" >"$dir/address.part"
mv "$dir/address.part" "$dir/address"
wait "$server"
"""


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


class SlurmClient(PlainVendor):
    """One user's jobs. ``minutes``: Slurm ends each after so long."""

    name = NAME
    free = True
    where = ""

    def __init__(
        self,
        *,
        minutes: int = 60,
        price: float = 0.0,
        queue_hours: float = 12.0,
        clock: Clock | None = None,
        command: Command = here,
    ) -> None:
        self.clock: Clock = clock or RunClock(None)
        self._minutes, self._price, self._queue_hours = minutes, price, queue_hours
        self._command = command
        self._addresses: dict[str, SshTarget] = {}

    async def _run(self, *argv: str, stdin: bytes = b"") -> Answer:
        code, out, err = await self._command(argv, stdin)
        if code and (kind := _kind(err)) == "unreachable":
            raise UnreachableError(f"{argv[0]}: {clean(err.strip())[:300]}", "is slurmctld up?")
        elif code and kind != "missing":
            log.warning("%s is refused: %s", argv[0], clean(err))
            raise CloudRefused(kind, code, clean(err.strip())[:300])
        return code, out, err

    async def permitted(self) -> None:
        await self._run("sbatch", "--version")

    async def offers_for(self, wanted: OfferFilter) -> Sequence[PlainOffer]:
        """Partitions that take jobs and, where a GPU is wanted, have such."""
        if wanted.image or wanted.spot or wanted.disk:
            raise ConfigError("slurm knows no image, spot or disk", "leave out fleet.image, fleet.spot and fleet.disk")
        _, out, _ = await self._run("sinfo", "--noheader", "--format=%R|%a|%G")
        found: dict[tuple[str, str], PlainOffer] = {}
        for line in out.splitlines():
            parts = clean(line).split("|")
            if len(parts) != 3:
                raise UnreachableError("sinfo answered in another form", "is an alias or a wrapper in between?")
            partition, up, gres = parts
            types = re.findall(r"gpu:([A-Za-z][\w.-]*):\d+", gres) or [""]
            for gpu in types:
                found[partition, gpu] = PlainOffer(
                    partition,
                    NAME,
                    partition,
                    gpu,
                    wanted.gpus if gpu else 0,
                    self._price,
                    stock=up == "up",
                    steady=True,
                    provisioning_time=self._queue_hours * 30.0,  # a job that waits in its queue is left there
                )
        return list(found.values())

    # jobs

    async def rent(
        self, offer: PlainOffer, wanted: OfferFilter, *, name: str, image: str, key_id: str, cap: float
    ) -> RentedPod:
        """Queue one job. Without an answer it may be there: its name tells."""
        script = _JOB % {"folder": FOLDER, "key": key_id.replace("'", "")}
        argv = ["sbatch", "--parsable", f"--job-name={name}", f"--partition={offer.region}", f"--time={self._minutes}"]
        argv += ["--nodes=1", "--ntasks=1", "--export=HOME,PATH", "--output=/dev/null", "--no-requeue"]
        argv += [f"--gres=gpu:{offer.gpu_type}:{wanted.gpus}"] if offer.gpu_type else []
        _, out, _ = await self._run(*argv, stdin=script.encode())
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
        at = await self._address(job) if state == "RUNNING" and name.startswith(POD_PREFIX) else None
        over = state not in _LIVE and state != "COMPLETING"
        words = f"{state} {reason}".strip() if state == "PENDING" else state
        ended = over or state == "COMPLETING"
        logins = (at,) if at else ()
        return RentedPod(
            job, name, NAME, None, words, over, ended, ended, installed=at is not None, has_gpu=False, logins=logins
        )

    async def _address(self, job: str) -> SshTarget | None:
        """Where the job's server is, once it has said so."""
        if job not in self._addresses and job.isdecimal():
            _, out, _ = await self._command(["sh", "-c", f'cat "{FOLDER}/{job}/address" 2>/dev/null || :'], b"")
            if (said := _ADDRESS.fullmatch(out)) and 0 < int(said[3]) < 65536:
                self._addresses[job] = SshTarget(said[1], said[2], int(said[3]))
        return self._addresses.get(job)

    async def pods(self) -> Sequence[RentedPod]:
        return [job for job in await self._jobs("--me") if not job.over]

    async def pod(self, pod_id: str) -> RentedPod | None:
        found = await self._jobs(f"--jobs={_number(pod_id)}")
        return next((job for job in found if job.id == pod_id), None)

    async def history(self) -> Sequence[PastPod]:
        """Slurm remembers ended jobs for some minutes."""
        return [EndedPod(j.id, j.name, terminated_at=j.stage, how=j.stage) for j in await self._jobs("--me") if j.over]

    async def delete(self, pod_id: str) -> bool:
        code, _, _ = await self._run("scancel", _number(pod_id))
        return code == 0

    async def close(self) -> None:
        return None


def _number(job: str) -> str:
    if not job.isdecimal() or not job.isascii():
        raise UnreachableError(f"{job[:80]!r} is no number of a job", "slurm numbers its jobs")
    return job


def _kind(err: str) -> str:
    """What a complaint of Slurm's means. Its commands give an exit code and prose: this one place reads the words."""
    low = err.lower()
    if "invalid job id" in low or "already completing or completed" in low:
        return "missing"
    if "unable to contact" in low or "timed out" in low or "connection refused" in low or "communication" in low:
        return "unreachable"
    if "access" in low or "permission" in low or "invalid account" in low or "user not found" in low:
        return "auth"
    if "limit" in low or "policy" in low:
        return "limit"
    return "capacity" if "not available" in low else "invalid"


class SlurmFleet(FleetSettings):
    """``regions``: partitions that may be used; ``queue_hours``: so long a job may wait in its queue; ``price``: US
    dollars an hour that a job counts as."""

    queue_hours: float = Field(default=12.0, gt=0)
    price: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one_cluster(self) -> SlurmFleet:
        if self.per_party:
            raise ValueError("a cluster is one operator: give each party a provider with fleet.parties")
        return self


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> CloudProvider:
    from uvcc_console.fleet.cloud.intents import Intents
    from uvcc_console.fleet.cloud.saga import CloudProvider

    known = (run_dir / CLOCK).exists() or Intents.of(run_dir).path.exists()
    queue = float(fleet.get("queue_hours", 12.0))
    price, minutes = float(fleet.get("price", 0.0)), math.ceil(ttl_s / 60) + 10
    clock = RunClock(run_dir if known else None)
    client = SlurmClient(minutes=minutes, price=price, queue_hours=queue, clock=clock)
    return CloudProvider(client, fleet, run_dir)


KIND: Final = ProviderKind(NAME, SlurmFleet, make, volumes=GIVEN)
