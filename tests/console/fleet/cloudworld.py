"""One account at one vendor, one run, in virtual time: what every scenario of the conformance suite plays in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx
from cloudfake import KEY, CloudFake, LambdaFake, RunPodFake, VastFake
from kubefake import NAMESPACE, KubernetesFake
from primefake import PrimeFake
from primerecords import FakePod
from skyfake import SkyFake
from slurmfake import SlurmFake
from virtualtime import VirtualClock

from uvcc_console.fleet.cloud.ready import Readiness
from uvcc_console.fleet.cloud.saga import CloudProvider
from uvcc_console.fleet.cloud.vendor import Cloud, SshTarget
from uvcc_console.fleet.prime.client import PrimeClient
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.vendors.kubeconfig import Cluster, Who
from uvcc_console.fleet.vendors.kubernetes import KubernetesClient, KubernetesFleet
from uvcc_console.fleet.vendors.lambda_cloud import LambdaClient
from uvcc_console.fleet.vendors.runpod import RunPodClient
from uvcc_console.fleet.vendors.skypilot import SkyClient
from uvcc_console.fleet.vendors.slurm import SlurmClient, SlurmFleet
from uvcc_console.fleet.vendors.vast import VastClient

RUN = "uvcc-demo-20261121-0115-ab12"


class PrimeSide(PrimeFake):
    """The market's fake, told what to do in the words of the others."""

    OPS: ClassVar = {
        "market": ("GET", "/availability/gpus"),
        "create": ("POST", "/pods/"),
        "list": ("GET", "/pods/"),
        "delete": ("DELETE", "/pods/"),
        "new disk": ("POST", "/disks/"),
        "disks": ("GET", "/disks/"),
        "end disk": ("DELETE", "/disks/"),
    }

    def fail(self, op: str, action: str, *nth: int, **more: Any) -> None:  # type: ignore[override]
        self.drifts = True
        super().fail(*self.OPS[op], action, *nth, **more)

    def foreign(self, name: str) -> FakePod:  # type: ignore[override]
        return self.pods[super().foreign(name)]

    def asked(self, op: str, path: str = "") -> list[Any]:
        return super().asked(*self.OPS[op]) if op in self.OPS else super().asked(op, path)

    @property
    def billing(self) -> list[str]:
        for pod in self.pods.values():
            self._age(pod)
        pods = [p.name for p in self.pods.values() if p.dead is None and not p.foreign]
        return sorted([*pods, *(d.name for d in self.disks.values())])

    def each(self, **how: Any) -> None:
        for row in self.offers:
            row["sim"] |= how

    def __setattr__(self, name: str, value: Any) -> None:
        simulated = {"price_factor": "price_factor", "vanish_s": "vanish_s", "refuse_deletes": "refuse_deletes"}
        if name in simulated:
            self.each(**{simulated[name]: value})
            self.disk_refusals = value if name == "refuse_deletes" else self.disk_refusals
        elif name == "delete_s":
            self.each(delete_s=value)
        elif name == "born_state":
            self.each(timeline=[(0.0, {"status": "UNKNOWN" if value == "unclear" else "ERROR"})])
        elif name == "stock":
            self.each(capacity=value)
        elif name == "quota":
            self.max_instances = value
        elif name == "broke":
            self.balance = 0.5 if value else 100.0
        else:
            super().__setattr__(name, value)


def _kubernetes(**at: Any) -> KubernetesClient:
    fleet = KubernetesFleet(provider="kubernetes", price=2.0)
    return KubernetesClient(Cluster("http://127.0.0.1:1", NAMESPACE, Who(KEY), None, "lab"), fleet, **at)


async def _at_once(work: Callable[[], Any]) -> Any:
    return work()


def _skypilot(transport: Any, clock: VirtualClock, infra: Sequence[str] = ()) -> SkyClient:
    return SkyClient(infra, clock=clock, sky=transport, call=_at_once)


def _slurm(transport: Any, clock: VirtualClock) -> SlurmClient:
    return SlurmClient(minutes=70, own=SlurmFleet(price=2.0), clock=clock, command=transport)


Vendors: dict[str, tuple[type[Any], str, Callable[..., Cloud]]] = {
    "prime": (PrimeSide, "H100_80GB", lambda **at: PrimeClient(Account(KEY, "http://prime.test"), **at)),
    "runpod": (RunPodFake, "H100", lambda **at: RunPodClient("http://runpod.test/api/v2", KEY, **at)),
    "lambda": (LambdaFake, "H100", lambda **at: LambdaClient("http://lambda.test/api/v1", KEY, **at)),
    "vast": (VastFake, "H100", lambda **at: VastClient("http://vast.test/api/v0", KEY, **at)),
    "kubernetes": (KubernetesFake, "H100", _kubernetes),
    "skypilot": (SkyFake, "H100", _skypilot),
    "slurm": (SlurmFake, "H100", _slurm),
}
# how each says what the scenarios need it to say
FAILED = {"prime": "failed", "runpod": "ERROR", "lambda": "terminating", "vast": "exited"}
FAILED |= {"kubernetes": "Failed", "skypilot": "STOPPED", "slurm": "NODE_FAIL"}
UNCLEAR = {"prime": "unclear", "lambda": "unhealthy", "vast": "offline", "kubernetes": "Unknown"}
UNCLEAR["skypilot"] = "unhealthy"
WITH_VOLUMES = ("prime", "runpod", "lambda", "vast", "kubernetes", "skypilot")
# what cannot happen at a vendor, and why
NEVER = {
    ("a_pod_in_an_unknown_state_for_long_is_given_up", "runpod"): "it has no such state",
    ("a_pod_in_an_unknown_state_for_long_is_given_up", "slurm"): "a job of a node that is lost fails, or is ended",
    ("a_market_behind_a_gateway_s_page", "slurm"): "its commands speak to its own controller, without a gateway",
    ("a_market_that_asks_to_wait", "slurm"): "its commands wait by themselves",
    ("a_create_that_shall_wait", "slurm"): "its commands wait by themselves",
    ("an_answer_that_leads_to_another_host", "slurm"): "its commands follow their own configuration",
    ("an_account_without_money", "slurm"): "a cluster takes no money; a used-up allowance is a limit",
    ("a_pod_that_is_dearer_than_quoted_is_not_kept", "slurm"): "a cluster names no prices",
    ("stock_that_is_gone_after_the_quote", "kubernetes"): "a pod without a node is made, and waits for one",
    ("a_pod_that_is_dearer_than_quoted_is_not_kept", "kubernetes"): "a cluster names no prices",
    ("a_vendor_that_obeys_twice", "kubernetes"): "a name is taken once in a namespace",
    ("no_stock_is_said_by_the_quote", "skypilot"): "its catalogue knows prices; stock is known by a launch",
    ("a_market_that_asks_to_wait", "skypilot"): "its API server is the user's own and has no such answer",
    ("an_answer_that_leads_to_another_host", "skypilot"): "SkyPilot's own client follows its own server",
    ("a_quota_that_is_used_up", "skypilot"): "a quota is one region's, and the next offer is tried",
    ("a_pod_that_is_gone_before_it_was_ever_shown_is_replaced", "skypilot"): "its launch ends when the machine is up",
    ("a_pod_that_vanishes_at_boot_is_replaced", "skypilot"): "its launch ends when the machine is up",
    ("a_pod_that_is_dearer_than_quoted_is_not_kept", "skypilot"): "it names no price of what runs; it takes the cap",
    ("without_stock_where_it_lies_no_pod_comes_elsewhere", "kubernetes"): "its scheduler sees to it",
    ("a_vendor_that_obeys_twice", "skypilot"): "a name is taken once at an API server",
    ("it_is_mounted_where_the_profile_says", "prime"): "the market says itself where",
    ("it_is_mounted_where_the_profile_says", "lambda"): "it is mounted under its own name",
    ("a_volume_that_shows_late_is_ended_with_the_run", "skypilot"): "its list is the API server's own, and never late",
}


@dataclass
class CloudWorld:
    """``logins``: what is wrong with a login to this host, "" for nothing."""

    vendor: str
    clock: VirtualClock
    fake: Any
    run_dir: Path
    fleet: dict[str, Any]
    logins: dict[str, str] = field(default_factory=dict)
    provider: CloudProvider = None  # type: ignore[assignment]

    def request(self, party: int = 0, replica: int = 0, **more: Any) -> PodRequest:
        return PodRequest(f"{RUN}-p{party}r{replica}", party, replica, **{"max_price_hr": 3.0, **more})

    async def login(self, at: SshTarget, gpu: bool) -> str:
        return self.logins.get(at.host, self.logins.get("*", ""))

    def client(self, **own: Any) -> Cloud:
        over = self.fake.transport if isinstance(self.fake, CloudFake) else httpx.ASGITransport(self.fake.app)
        return Vendors[self.vendor][2](transport=over, clock=self.clock, **own)

    def console(self, **fleet: Any) -> CloudProvider:
        """A console process: all it knows beyond the account is in the run's folder."""
        client = self.client(**{k: v for k, v in fleet.items() if k == "infra"})
        ready = Readiness(client, self.run_dir, "", self.login)
        return CloudProvider(client, self.fleet | fleet, self.run_dir, readiness=ready)

    async def up(self, parties: int = 1) -> list[Pod]:
        requests = [self.request(p) for p in range(parties)]
        await self.provider.quote(requests)
        pods = await asyncio.gather(*(self.provider.create(r) for r in requests))
        return list(await asyncio.gather(*(self.provider.wait_ready(p) for p in pods)))

    async def down(self) -> None:
        """The end of a run: everything listed is deleted, and every create is proven."""
        self.fake.faults.clear()
        for pod in await self.provider.list(f"{RUN}-"):
            await self.provider.delete(pod)
        for _ in range(60):
            if not await self.provider.prove(ended=True):
                return
            await self.clock.sleep(60.0)
        raise AssertionError("creates stay unproven")


@asynccontextmanager
async def cloud_world(vendor: str, run_dir: Path) -> AsyncIterator[CloudWorld]:
    fake_type, gpu, _ = Vendors[vendor]
    async with VirtualClock() as clock:
        fake: CloudFake | PrimeFake = fake_type(clock.now)
        image = {"image": "cuda_12_6_pytorch_2_7"} if vendor == "prime" else {}
        made = CloudWorld(vendor, clock, fake, run_dir, {"provider": vendor, "gpu": gpu, "gpus": 1, **image})
        made.provider = made.console()
        yield made
        await made.provider.close()
