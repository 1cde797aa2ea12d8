"""Jobs of a Slurm cluster as pods: against a queue in this process that fails on order, and against a real one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from slurmd import Cluster, why_not
from virtualtime import VirtualClock

from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.choice import OfferFilter
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.provider import NoOffer, Pod, PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.vendors import slurm, slurm_job
from uvcc_console.fleet.vendors.slurm import SAYS_S, Answer, SlurmClient, SlurmFleet, here
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

RUN = "uvcc-demo-20261121-0115-ab12"

LIVE = ("PENDING", "RUNNING", "COMPLETING")


class Queue:
    """What sinfo, sbatch, squeue and scancel say; a complaint in ``trouble`` is the answer of that command, once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.jobs: dict[str, dict[str, object]] = {}
        self.asked: list[Sequence[str]] = []
        self.trouble: dict[str, list[str]] = {}
        self.deaf: list[str] = []  # it obeys, and its answer is lost
        self.wait_s, self.late_s, self.end_s = 30.0, 0.0, 5.0
        self.partitions = "main|up|gpu:h100:8(S:0-1)|1-00:00:00\nold|down|(null)|infinite\n"
        self.says, self.why, self.reason = True, "", "None"

    async def __call__(self, argv: Sequence[str], stdin: bytes) -> Answer:
        self.asked.append(argv)
        tool = argv[0]
        if self.trouble.get(tool):
            return 1, "", f"{tool}: error: {self.trouble[tool].pop(0)}"
        answer = getattr(self, tool)(argv, stdin)
        if tool in self.deaf:
            self.deaf.remove(tool)
            return 1, "", f"{tool}: error: Batch job submission failed: Socket timed out on send/recv operation"
        return answer

    def sinfo(self, argv: Sequence[str], stdin: bytes) -> Answer:
        return 0, self.partitions, ""

    def sbatch(self, argv: Sequence[str], stdin: bytes) -> Answer:
        if "--version" in argv:
            return 0, "slurm-wlm 22.05.8\n", ""
        named = dict(arg.partition("=")[::2] for arg in argv)
        job = str(len(self.jobs) + 1)
        self.jobs[job] = {"name": named["--job-name"], "at": self.now(), "end": None, "script": stdin.decode()}
        return 0, f"{job};uvcc\n", ""

    def _state(self, job: str) -> str:
        j = self.jobs[job]
        if j["end"] is not None:
            return "CANCELLED" if self.now() >= float(str(j["end"])) else "COMPLETING"
        return str(j.get("state") or ("RUNNING" if self.now() - float(str(j["at"])) >= self.wait_s else "PENDING"))

    def squeue(self, argv: Sequence[str], stdin: bytes) -> Answer:
        only = next((a.partition("=")[2] for a in argv if a.startswith("--jobs=")), "")
        shown = [j for j, v in self.jobs.items() if self.now() - float(str(v["at"])) >= self.late_s]
        if only and only not in shown:
            return 1, "", "slurm_load_jobs error: Invalid job id specified"
        rows = [f"{j}|{self._state(j)}|{self.reason}|{self.jobs[j]['name']}" for j in shown if only in ("", j)]
        return 0, "\n".join(rows) + "\n", ""

    def scancel(self, argv: Sequence[str], stdin: bytes) -> Answer:
        if argv[1] in self.jobs and self._state(argv[1]) in LIVE:  # of others the real one says nothing either
            self.jobs[argv[1]]["end"] = self.now() + self.end_s
        return 0, "", ""

    def sh(self, argv: Sequence[str], stdin: bytes) -> Answer:
        if "/address" in argv[-1]:
            return 0, "me node-7 20123\n" if self.says else "", ""
        return 0, self.why if "/why" in argv[-1] else "", ""

    @property
    def living(self) -> list[str]:
        return [j for j in self.jobs if self._state(j) in LIVE]


@pytest.fixture
async def world(run_dir: Path) -> AsyncIterator[tuple[VirtualClock, Queue, CloudProvider]]:
    async with VirtualClock() as clock:
        queue = Queue(clock.now)
        client = SlurmClient(minutes=70, clock=clock, command=queue)

        async def login(at: object, gpu: bool) -> str:
            return ""

        yield clock, queue, CloudProvider(client, {}, run_dir, readiness=Readiness(client, run_dir, "", login))


World = tuple[VirtualClock, Queue, CloudProvider]


async def up(provider: CloudProvider) -> str:
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    pod = await provider.wait_ready(await provider.create(request))
    assert (pod.address, pod.price_hr) == ("me@node-7:20123", 0.0)
    return pod.provider_id


async def down(provider: CloudProvider) -> None:
    for pod in await provider.list(f"{RUN}-"):
        await provider.delete(pod)
    while await provider.prove(ended=True):
        await asyncio.sleep(0)


async def test_a_job_is_queued_with_an_end_of_its_own_and_no_secret(world: World) -> None:
    _, queue, provider = world
    job = await up(provider)
    (asked,) = [a for a in queue.asked if a[0] == "sbatch" and "--parsable" in a]
    assert {"--time=70", "--partition=main", "--export=HOME,PATH", "--no-requeue"} <= set(asked)
    assert "ssh-ed25519" in str(queue.jobs[job]["script"])
    await down(provider)
    assert queue.living == []


async def test_hours_in_the_queue_are_waited_for(world: World) -> None:
    _, queue, provider = world
    queue.wait_s = 3 * 1800.0
    await up(provider)
    assert len(queue.jobs) == 1
    await down(provider)


@pytest.mark.parametrize("late", [0.0, 40.0])
async def test_an_answer_that_is_lost_makes_no_second_job(world: World, late: float) -> None:
    _, queue, provider = world
    queue.late_s = late
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    queue.deaf = ["sbatch"]
    pod = await provider.create(request)
    assert (list(queue.jobs), pod.provider_id) == (["1"], "1")
    await down(provider)
    assert queue.living == []


async def test_a_job_that_fails_is_replaced_and_one_that_will_not_go_is_told(world: World) -> None:
    _, queue, provider = world
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    pod = await provider.create(request)
    queue.jobs[pod.provider_id]["state"] = "NODE_FAIL"
    ready = await provider.wait_ready(pod)
    assert ready.provider_id == "2"
    queue.trouble["scancel"] = ["Socket timed out"] * 2000
    with pytest.raises(UnreachableError, match="not proven gone"):
        await provider.delete(ready)
    queue.trouble.clear()
    await down(provider)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Batch job submission failed: Job violates accounting/QOS policy", "limit"),
        ("Batch job submission failed: Invalid account or account/partition combination", "auth"),
        ("Batch job submission failed: Requested node configuration is not available", "capacity"),
    ],
)
async def test_a_refusal_is_named_and_leaves_nothing(world: World, text: str, kind: str, run_dir: Path) -> None:
    _, queue, provider = world
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    queue.trouble["sbatch"] = [text] * 9
    with pytest.raises(UvccError) as error:
        await provider.create(request)
    assert isinstance(error.value, CloudRefused) == (kind != "capacity")
    assert all(t.outcome == "refused" for t in Intents.of(run_dir).tries().values())
    assert queue.jobs == {}


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("fetch_config: DNS SRV lookup failed", "SLURM_CONF"),
        ("s_p_parse_file: unable to status file /etc/slurm/slurm.conf: No such file or directory", "SLURM_CONF"),
        ('Munge encode failed: Failed to access "/run/munge/munge.socket.2"', "munged"),
        ("Unable to contact slurm controller (connect failure)", "slurmctld"),
    ],
)
async def test_a_machine_that_knows_no_cluster_is_told_what_it_lacks(world: World, text: str, cure: str) -> None:
    _, queue, provider = world
    for tool in ("sbatch", "squeue", "sinfo"):
        queue.trouble[tool] = [text]
    for asked in (provider.quote([PodRequest(f"{RUN}-p0r0", 0, 0)]), provider.list(RUN)):
        with pytest.raises(UnreachableError) as error:  # it may pass, as a mount that is away: no pod is given up
            await asked
        assert cure in error.value.hint


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("Batch job submission failed: Job violates accounting/QOS policy", "sacctmgr"),
        ("Batch job submission failed: Invalid account or account/partition combination", "SBATCH_ACCOUNT"),
        ("Unspecified error", "by hand"),
    ],
)
async def test_a_refusal_of_slurm_names_a_cure_of_slurm_s(world: World, text: str, cure: str) -> None:
    _, queue, provider = world
    queue.trouble["sinfo"] = [text]
    with pytest.raises(CloudRefused) as error:
        await provider.quote([PodRequest(f"{RUN}-p0r0", 0, 0)])
    assert cure in error.value.hint


async def test_what_slurm_says_in_another_form_is_no_empty_queue(world: World) -> None:
    _, queue, provider = world
    await up(provider)
    queue.squeue = lambda argv, stdin: (0, "Welcome to the cluster!\n", "")  # type: ignore[method-assign]
    with pytest.raises(UnreachableError, match="another form"):
        await provider.list(RUN)
    queue.trouble["squeue"] = ["Unable to contact slurm controller (connect failure)"]
    with pytest.raises(UnreachableError, match="Unable to contact"):
        await provider.list(RUN)


async def test_nothing_that_fits_and_no_slurm_at_all_are_said_before(world: World, tmp_path: Path) -> None:
    _, queue, provider = world
    queue.partitions = "old|down|(null)|infinite\n"
    with pytest.raises(ConfigError, match="in stock removed the last 1"):
        await provider.quote([PodRequest(f"{RUN}-p0r0", 0, 0)])
    with pytest.raises(ConfigError, match="no-such-sbatch on this machine"):
        await here(["no-such-sbatch"], b"")
    with pytest.raises(ConfigError, match=r"fleet\.parties"):
        job = {"kind": "private", "model": "mlp-digits", "steps": 2}
        parse({"job": job, "fleet": {"provider": "slurm", "per_party": ["a", "b", "c"]}})


async def test_a_partition_that_is_not_there_or_too_short_is_named_before_anything_is_queued(world: World) -> None:
    clock, queue, _ = world
    queue.partitions = "main|up|(null)|infinite\nshort|up|(null)|1:00:00\nday|up|(null)|1-00:00:00\n"
    client = SlurmClient(minutes=70, clock=clock, command=queue)
    assert [o.region for o in await client.offers_for(OfferFilter())] == ["main", "day"]
    with pytest.raises(NoOffer, match="no partition nosuch") as unknown:
        await client.offers_for(OfferFilter(regions=("nosuch",)))
    assert (unknown.value.hint, unknown.value.passing) == ("fleet.regions may name day, main, short", False)
    with pytest.raises(NoOffer, match="short lets a job run for 60 min: a pod of this run asks for 70 min"):
        await client.offers_for(OfferFilter(regions=("short",)))
    assert not [a for a in queue.asked if "--parsable" in a]


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *[("5:00", 5), ("1:30:00", 90), ("2-00:00:00", 2880), ("1-12", 2160), ("0:30", 0.5)],
        *[(odd, math.inf) for odd in ("infinite", "n/a", "", "7-", "x-1:00", "1:2:3:4")],
    ],
)
def test_slurm_s_spans_of_time(text: str, minutes: float) -> None:
    assert slurm.minutes_of(text) == minutes


async def test_a_job_that_no_wait_starts_is_given_up_and_one_that_waits_says_why(world: World) -> None:
    clock, queue, provider = world
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    queue.wait_s, queue.reason = 900.0, "Priority"
    waiting = asyncio.ensure_future(provider.wait_ready(await provider.create(request)))
    await clock.sleep(30.0)
    assert provider.waits(request.name) == "PENDING Priority"
    queue.reason = "None"  # as before the scheduler's first look
    await clock.sleep(30.0)
    assert provider.waits(request.name) == "PENDING"
    await waiting
    queue.wait_s, queue.reason = 1e9, "AssocMaxWallDurationPerJobLimit"
    other = PodRequest(f"{RUN}-p0r1", 0, 1)
    pod = await provider.create(other)
    with pytest.raises(UvccError, match="AssocMaxWallDurationPerJobLimit"):
        await provider.wait_ready(pod)
    await down(provider)


async def test_a_job_that_does_not_say_where_it_is_or_failed_with_a_reason(world: World) -> None:
    clock, queue, provider = world
    request = PodRequest(f"{RUN}-p0r0", 0, 0)
    await provider.quote([request])
    queue.says, began = False, clock.now()
    with pytest.raises(UvccError, match=r"\.uvcc-slurm/1 does not say where: do the nodes share this home"):
        await provider.wait_ready(await provider.create(request))
    assert clock.now() - began < 6 * (SAYS_S + 120.0)  # six tries, each minutes and not the hours of a queue
    queue.why = "first\nthere is no sshd on node-7\n"
    pod = await provider.create(request)
    queue.jobs[pod.provider_id]["state"] = "FAILED"
    client = SlurmClient(minutes=70, clock=clock, command=queue)
    found = await client.pod(pod.provider_id)
    assert found is not None
    assert found.stage == "FAILED: there is no sshd on node-7"
    await down(provider)


async def test_a_state_that_is_not_known_is_no_end(world: World) -> None:
    clock, queue, provider = world
    job = await up(provider)
    queue.jobs[job]["state"] = "POWERING_SIDEWAYS"
    client = SlurmClient(minutes=70, clock=clock, command=queue)
    assert [pod.id for pod in await client.pods()] == [job]
    queue.jobs[job]["state"] = "OUT_OF_MEMORY"
    assert (await client.pods(), await client.delete(job), await client.delete("77")) == ([], False, False)


async def test_a_job_asks_for_the_processors_and_memory_that_are_named(run_dir: Path) -> None:
    fleet = {"provider": "slurm", "cpus": 8, "memory": 32, "scratch": "/local/scratch"}
    async with VirtualClock() as clock:
        queue = Queue(clock.now)
        client = SlurmClient(own=SlurmFleet.model_validate(fleet), clock=clock, command=queue)
        (offer,) = [o for o in await client.offers_for(OfferFilter()) if o.stock]
        await client.rent(offer, OfferFilter(), name=f"{RUN}-p0r0", image="", key_id="ssh-ed25519 AAAA it's", cap=0.0)
        (asked,) = [a for a in queue.asked if "--parsable" in a]
        assert {"--cpus-per-task=8", "--mem=32G"} <= set(asked)
        script = str(queue.jobs["1"]["script"])
        assert "scratch=/local/scratch\n" in script
        assert shlex.quote("ssh-ed25519 AAAA it's") in script


class Script:
    """A job's script with nothing of Slurm around it, in a session of its own; its server is one that only waits."""

    def __init__(self, among: Path, job: int, node: str = "node-7") -> None:
        programs, self.home, self.among, self.job = among / "bin", among / "user", among, job
        for folder in (programs, self.home):
            folder.mkdir(exist_ok=True)
        server = programs / "sshd"
        if not server.exists():
            server.write_text("#!/bin/sh\nexec sleep 3600\n")
            server.chmod(0o755)
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(self.home), "SLURMD_NODENAME": node}
        self.process = subprocess.Popen(
            ["sh", "-s"],
            env=env | {"SLURM_JOB_ID": str(job)},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(slurm_job.script("ssh-ed25519 AAAA", str(among)))
        self.process.stdin.close()

    async def up(self) -> Path:
        """Its folder, once it has said where it listens."""
        while not (self.home / ".uvcc-slurm" / str(self.job) / "address").exists():
            assert self.process.poll() is None
            await asyncio.sleep(0.02)
        (found,) = self.among.glob(f"uvcc-{self.job}.*")
        return found

    def kill(self) -> None:
        """As Slurm does with a job that does not end in time, and the system with one that takes too much memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


async def test_what_a_job_left_that_was_killed_is_taken_away_by_the_next_and_nothing_of_living_ones(
    tmp_path: Path,
) -> None:
    scripts = [Script(tmp_path, 11), Script(tmp_path, 12), Script(tmp_path, 13, "node-8"), Script(tmp_path, 14)]
    try:
        killed, lives, elsewhere, old = [await script.up() for script in scripts]
        (killed / "home" / "share").write_bytes(b"a party's own")
        for number in (0, 2, 3):
            scripts[number].kill()
        (old / "alive").unlink()  # of a version that had no lock, or where there is none to be had
        (tmp_path / "uvcc-99.abcdef").symlink_to(lives)
        scripts.append(Script(tmp_path, 15))
        newest = await scripts[-1].up()
        while killed.exists():
            await asyncio.sleep(0.02)
        scripts.append(Script(tmp_path, 16))  # and one more that looks while others live
        another = await scripts[-1].up()
        assert all((folder / "sshd_config").exists() for folder in (lives, elsewhere, old, newest, another))
        scripts[1].process.terminate()
        assert scripts[1].process.wait(120) == 143
        assert not lives.exists()
    finally:
        for script in scripts:
            with contextlib.suppress(ProcessLookupError):
                script.kill()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
async def test_a_real_cluster(short: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued by sbatch, waiting in the queue behind a full node, logged into, cancelled, proven gone.

    The jobs share their user's home, and nothing that a login does there: each has a home and a GPU of its own.
    """
    (short / "home").mkdir()
    (short / "cluster").mkdir()
    monkeypatch.setenv("HOME", str(short / "home"))
    with Cluster(short / "cluster") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        with pytest.raises(NoOffer, match="short lets a job run for 5 min"):
            await provider_for({"provider": "slurm", "regions": ["short"]}, run_dir, ttl_s=600.0).quote(
                [PodRequest(f"{RUN}-p0r0", 0, 0)]
            )
        provider = provider_for({"provider": "slurm", "gpu": "fake"}, run_dir, ttl_s=600.0)
        requests = [PodRequest(f"{RUN}-p{p}r0", p, 0) for p in range(3)]
        await provider.quote(requests)
        pods = [await provider.create(r) for r in requests]
        ready = [await provider.wait_ready(pod) for pod in pods[:2]]
        assert [p.host for p in ready] == ["localhost"] * 2
        states = cluster.do("squeue", "-h", "-o", "%T").split()
        assert sorted(states) == ["PENDING", "RUNNING", "RUNNING"]  # the node takes two at a time
        left = await own_homes(ready, run_dir, short / "home")
        await provider.delete(ready[0])
        assert [path for path in left if path.exists()] == []
        third = await provider.wait_ready(pods[2])
        assert third.host_key.startswith("ssh-ed25519 ")
        assert {p.name for p in await provider.list(RUN)} == {requests[1].name, requests[2].name}
        for pod in (ready[1], third):
            await provider.delete(pod)
        assert cluster.do("squeue", "-h", "-o", "%T").split() == []
        assert list((short / "home" / ".uvcc-slurm").iterdir()) == []
        assert list((short / "home").glob(".uvcc")) == []
        await provider.close()


async def own_homes(pods: Sequence[Pod], run_dir: Path, shared: Path) -> list[Path]:
    """What each pod's logins find and leave behind; a process of theirs that left its session ends with the job."""
    homes, gpus, processes = [], [], []
    for pod in pods:
        link = PodLink(pod.name, pod.address, ssh_keys.operator_key(run_dir, ""))
        await link.sh("mkdir .uvcc")
        await link.put(pod.name.encode(), ".uvcc/whose")
        assert await link.sh("cat .uvcc/whose") == pod.name
        assert await link.sh("env | grep ^SLURM || :") == ""
        homes.append(Path(await link.sh('echo "$HOME"')))
        assert await link.sh("pwd") == str(homes[-1])
        gpus.append(await link.sh('echo "$CUDA_VISIBLE_DEVICES"'))
        processes.append(int(await link.sh("setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!")))
        await link.close()
    assert len(set(homes)) == len(pods)
    assert sorted(gpus) == ["0", "1"]
    assert list(shared.glob(".uvcc")) == []
    return [*homes[:1], Path(f"/proc/{processes[0]}/root")]
