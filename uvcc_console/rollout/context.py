"""What the stages of one rollout share: the plan, the journal, the provider and the pods at hand."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import asyncssh

from uvcc_console.core import events as ev
from uvcc_console.core.failures import describe
from uvcc_console.core.log import logger
from uvcc_console.core.supervision import SideTasks
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.bootstrap import Bootstrapped
from uvcc_console.fleet.provider import Pod, PodRequest, Provider
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.fleet.wheel import Wheel
from uvcc_console.plan.plan import FULL, LATER, SMOKE, Phase, Plan
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.decoder import Decoder
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.transcript.terms.policy import Policy

log = logger(__name__)
T = TypeVar("T")


class PassingError(UvccError):
    """The workers are gone, but nothing that they said speaks against going on as before: see ``going_on``."""


class Halted(UvccError):
    """The run was halted on purpose; every worker stopped at ``step``. Not a failure: it can be resumed."""

    def __init__(self, step: int, hint: str = "uvcc resume goes on, uvcc teardown ends it") -> None:
        super().__init__(f"halted at step {step}", hint)
        self.step = step


class HaltedEarly(Halted):
    """The run was halted while no worker ran; ``stage`` was not entered, or has not started its workers."""

    def __init__(self, stage: str, *, began: bool = False) -> None:
        super().__init__(-1)
        self.what = f"halted {'while no worker ran' if began else 'before any worker began'}, and before {stage}"


@dataclass
class Member:
    """One pod of the fleet as the conductor holds it. ``name`` is its name inside the run."""

    name: str
    request: PodRequest
    pod: Pod | None = None
    link: PodLink | None = None
    agent: AgentClient | None = None
    boot: Bootstrapped | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    ingesting: asyncio.Task[None] | None = None
    decoders: dict[str, Decoder] = field(default_factory=dict)
    replaced: int = 0  # so often another pod came in the place of one that was lost
    in_hand: bool = False  # it is just being replaced: nobody else connects to it
    replacing: bool = False  # somebody has asked for that, and was not answered yet
    homing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one fetch of its checkpoints at a time

    @property
    def channel(self) -> AgentClient:
        """The agent's channel; an error where the pod has none yet."""
        if self.agent is None:
            raise UnreachableError(f"pod {self.name} has no agent yet", "bootstrap it first")
        return self.agent

    @property
    def ssh(self) -> PodLink:
        """The SSH link; an error where the pod has no address yet."""
        if self.link is None:
            raise UnreachableError(f"pod {self.name} has no address yet", "provision it first")
        return self.link


class Federated(Protocol):
    """What a rollout of one domain among three does in another way than one operator's; see ``federated.own_party``."""

    @property
    def domain(self) -> str: ...
    @property
    def public_data(self) -> bool: ...
    def pins(self) -> dict[str, str]: ...
    def sign(self, what: str) -> None: ...
    def links(self, phase: Phase) -> dict[str, LinkSpec]: ...
    async def agree(self, ctx: Rollout, phase: Phase) -> tuple[Policy, Path]: ...
    async def evidence(self, ctx: Rollout, phase: Phase) -> None: ...
    async def part(self, ctx: Rollout, status: str, detail: str) -> None: ...


@dataclass
class Rollout:
    """One rollout under way. Only the conductor holds one."""

    plan: Plan
    run_dir: Path
    bus: Bus
    provider: Provider
    key: asyncssh.SSHKey
    members: dict[str, Member]
    wheel: Wheel | None = None
    tolerant: bool = False
    sidecar: subprocess.Popen[bytes] | None = None
    cursors: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)  # host keys of pods that an earlier run kept, by pod
    start_from: int | None = None  # the step that the operator chose to go on from, until workers are started with it
    quoted: dict[str, float] = field(default_factory=dict)  # US dollars an hour by the request's name
    federated: Federated | None = None  # where this is one domain's conductor among three
    beside: SideTasks = field(init=False)  # what runs beside the stages; the conductor puts its own in this place

    def __post_init__(self) -> None:
        self.beside = SideTasks(None, lambda event: self.bus.record([event]), lambda why: None)

    @property
    def artifacts(self) -> Path:
        return self.run_dir / "artifacts"

    def say(self, *events: ev.Event) -> None:
        """Write events down now, durably. Raises UvccError if the disk refuses; once ``tolerant``, they wait for it.

        Nothing is created that was not written down before; but what exists is deleted, written down or not.
        """
        for event in events:
            if isinstance(event, ev.PodChanged):
                log.info("%s %s", event.state, event.detail, pod=event.pod)
        try:
            self.bus.commit(*events)
        except UvccError as e:
            if not self.tolerant:
                raise
            log.warning("not journalled yet: %s: %s", e, [type(x).__name__ for x in events])
            self.bus.record([x if x.ts else replace(x, ts=time.time()) for x in events])

    def pod_event(self, member: Member, state: str, detail: str = "", **known: Any) -> ev.PodChanged:
        """The event of a pod's change; what is known of the pod is filled in."""
        pod = member.pod
        return ev.PodChanged(
            pod=member.name,
            party=member.request.party,
            replica=member.request.replica,
            provider=pod.provider if pod else self.provider.name,
            state=state,
            address=pod.address if pod else "",
            price_hr=known.pop("price_hr", pod.price_hr if pod else self.quoted.get(member.request.name, 0.0)),
            detail=detail,
            host_key=(member.link.host_key if member.link else "") or (pod.host_key if pod else ""),
            **known,
        )

    def of_phase(self, phase: Phase) -> list[Member]:
        """The pods of a phase, interleaved over parties."""
        return [self.members[name] for name in phase.pods()]

    def due(self) -> list[Member]:
        """The pods that were asked for by now: all of them, or those of the smoke while it has not passed its gates."""
        later = self.plan.later if self.status(LATER[0]) == "pending" else ()
        return [m for m in self.members.values() if m.name not in later]

    def status(self, stage: str) -> str:
        """What the journal says of a stage; "pending" before it was entered."""
        return next((v.status for v in self.bus.snapshot.stages if v.name == stage), "pending")

    def done(self, stage: str) -> bool:
        """Whether a stage is behind us."""
        return self.status(stage) in ("ok", "skipped")

    def layout(self) -> Phase:
        """The phase that the pods at hand are for: the full run, or the smoke while only its pods were asked for."""
        return self.plan.phases[FULL if len(self.due()) == len(self.members) else SMOKE]

    def live(self) -> list[Member]:
        """Pods that have an agent's channel."""
        return [m for m in self.members.values() if m.agent is not None]


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently; the first failure cancels the others and is raised as one UvccError."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except BaseExceptionGroup as group_error:
        raise describe(group_error) from group_error
    return [t.result() for t in tasks]


async def each(members: Iterable[Member], act: Callable[[Member], Coroutine[Any, Any, T]]) -> dict[str, T]:
    """``act`` on every pod at once; results by pod name."""
    pods = list(members)
    return dict(zip([m.name for m in pods], await all_of(act(m) for m in pods), strict=True))


def readdress(member: Member, pod: Pod) -> None:
    """Take note of what the provider says about a pod, keeping the address already known."""
    old = member.pod
    if old is not None and not pod.host and old.host:
        pod = replace(pod, user=old.user, host=old.host, port=old.port)
    if old is not None and not pod.host_key and pod.provider_id == old.provider_id:
        pod = replace(pod, host_key=old.host_key)
    member.pod = pod
