"""Jobs of a Slurm cluster as pods: against a queue in this process that fails on order, and against a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from slurmd import Cluster, why_not
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.intents import Intents
from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.provider import PodRequest
from uvcc_console.fleet.provider_kinds import provider_for
from uvcc_console.fleet.vendors.slurm import Answer, SlurmClient, here
from uvcc_console.plan.profile import parse
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError

RUN = "uvcc-demo-20261121-0115-ab12"


class Queue:
    """What sinfo, sbatch, squeue and scancel say; a complaint in ``trouble`` is the answer of that command, once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.jobs: dict[str, dict[str, object]] = {}
        self.asked: list[Sequence[str]] = []
        self.trouble: dict[str, list[str]] = {}
        self.deaf: list[str] = []  # it obeys, and its answer is lost
        self.wait_s, self.late_s, self.end_s = 30.0, 0.0, 5.0
        self.partitions = "main|up|gpu:h100:8(S:0-1)\nold|down|(null)\n"

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
        rows = [f"{j}|{self._state(j)}|None|{self.jobs[j]['name']}" for j in shown if only in ("", j)]
        return 0, "\n".join(rows) + "\n", ""

    def scancel(self, argv: Sequence[str], stdin: bytes) -> Answer:
        if argv[1] not in self.jobs:
            return 1, "", "scancel: error: Kill job error on job id: Invalid job id specified"
        self.jobs[argv[1]]["end"] = self.now() + self.end_s
        return 0, "", ""

    def sh(self, argv: Sequence[str], stdin: bytes) -> Answer:
        return 0, "me node-7 20123\n", ""

    @property
    def living(self) -> list[str]:
        return [j for j in self.jobs if self._state(j) in ("PENDING", "RUNNING", "COMPLETING")]


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
    queue.partitions = "old|down|(null)\n"
    with pytest.raises(ConfigError, match="in stock removed the last 1"):
        await provider.quote([PodRequest(f"{RUN}-p0r0", 0, 0)])
    with pytest.raises(ConfigError, match="no-such-sbatch on this machine"):
        await here(["no-such-sbatch"], b"")
    with pytest.raises(ConfigError, match=r"fleet\.parties"):
        job = {"kind": "private", "model": "mlp-digits", "steps": 2}
        parse({"job": job, "fleet": {"provider": "slurm", "per_party": ["a", "b", "c"]}})


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
async def test_a_real_cluster(short: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued by sbatch, waiting in the queue behind a full node, logged into, cancelled, proven gone."""
    (short / "home").mkdir()
    (short / "cluster").mkdir()
    monkeypatch.setenv("HOME", str(short / "home"))
    with Cluster(short / "cluster") as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        provider = provider_for({"provider": "slurm"}, run_dir, ttl_s=600.0)
        requests = [PodRequest(f"{RUN}-p{p}r0", p, 0) for p in range(3)]
        await provider.quote(requests)
        pods = [await provider.create(r) for r in requests]
        ready = [await provider.wait_ready(pod) for pod in pods[:2]]
        assert [p.host for p in ready] == ["localhost"] * 2
        states = cluster.do("squeue", "-h", "-o", "%T").split()
        assert sorted(states) == ["PENDING", "RUNNING", "RUNNING"]  # the node takes two at a time
        await provider.delete(ready[0])
        third = await provider.wait_ready(pods[2])
        assert third.host_key.startswith("ssh-ed25519 ")
        assert {p.name for p in await provider.list(RUN)} == {requests[1].name, requests[2].name}
        for pod in (ready[1], third):
            await provider.delete(pod)
        assert cluster.do("squeue", "-h", "-o", "%T").split() == []
        assert list((short / "home" / ".uvcc-slurm").glob("*/address")) == []
        await provider.close()
