"""The sidecar's agent channels: one per pod, opened as pods appear and closed as they go, each renewing its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from uvcc_console.core import pod_states
from uvcc_console.core.log import logger
from uvcc_console.core.snapshot import PodView, Snapshot
from uvcc_console.core.supervision import SideTasks
from uvcc_console.fleet import pins
from uvcc_console.fleet.agent_client import AgentClient
from uvcc_console.fleet.inventory import jump_to
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.ssh_keys import operator_key
from uvcc_engine.contract.agent_protocol.agent_commands import LeaseCommand
from uvcc_engine.contract.agent_protocol.agent_messages import AgentMessage
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.run_files.records import Malformed

log = logger(__name__)
_TIMEOUTS = Timeouts(connect=5.0, login=5.0, operation=10.0, keepalive_s=2.0, keepalive_count=2, backoff_last=2.0)


class Channels:
    """One agent channel per pod, opened as pods appear in the journal and closed as they go.

    A channel whose task fails is told of by ``beside`` and opened again.
    """

    def __init__(self, run_dir: Path, holder: str, beside: SideTasks) -> None:
        self.clients: dict[str, AgentClient] = {}
        self.on_link: Callable[[str, bool], None] = lambda pod, up: None
        self.on_message: Callable[[str, AgentMessage | Malformed], None] = lambda pod, message: None
        self._run_dir = run_dir
        self._holder = holder
        self._beside = beside
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def sync(self, snapshot: Snapshot, lease_s: float) -> None:
        """Open and close channels so that they match the pods."""
        for name, pod in snapshot.pods.items():
            client = self.clients.get(name)
            if client is not None and (pod.state in pod_states.OVER or _elsewhere(client, pod)):
                self._drop(name)
            if pod.state in pod_states.ATTACHABLE and pod.address and name not in self.clients:
                try:
                    self._open(pod, lease_s, snapshot.profile.get("fleet", {}))
                except UvccError as e:
                    log.error("no channel to it: %s", e, pod=name)

    def _drop(self, name: str) -> None:
        """Let go of a pod at once: the next one of its name is another machine, and has a channel of its own."""
        del self.clients[name]
        task = self._tasks.pop(name)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()
        self.on_link(name, False)

    def _open(self, pod: PodView, lease_s: float, fleet: Mapping[str, Any]) -> None:
        key = operator_key(self._run_dir, str(fleet.get("ssh_key", "")))
        jump = jump_to(fleet, pod.address)
        if (
            not pod.host_key
        ):  # whoever opened its agent's channel knows it; a first contact from here would be a second pin
            raise UnreachableError(f"no host key is pinned for pod {pod.pod}", "the conductor pins it")

        def made() -> AgentClient:
            link = PodLink(pod.pod, pod.address, key, host_key=pod.host_key, jump=jump, timeouts=_TIMEOUTS)

            def changed(up: bool, detail: str) -> None:
                if self.clients.get(pod.pod) is client:  # what is said of an earlier pod is not said of this one
                    self.on_link(pod.pod, up)

            client = AgentClient(link, holder=self._holder, lease_s=lease_s, on_link=changed)
            self.clients[pod.pod] = client
            return client

        first: AgentClient | None = made()

        async def serve() -> None:
            nonlocal first
            client, first = first or made(), None  # after a failure: another channel
            try:
                await self._serve(pod.pod, client, lease_s)
            except Exception:
                self.on_link(pod.pod, False)  # until there is another one
                raise
            if self.clients.get(pod.pod) is client:
                del self.clients[pod.pod]

        self._tasks[pod.pod] = self._beside.start(f"the halt channel to {pod.pod}", serve)

    async def _serve(self, name: str, client: AgentClient, lease_s: float) -> None:
        """Read what the agent says, and renew the lease, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(client, lease_s))
                client.begin()
                async for message in client.messages():
                    try:
                        self.on_message(name, message)
                    except Exception:  # no message of a pod may end the channel that would halt it
                        log.exception("a message of it could not be used", pod=name)
                renewing.cancel()
        finally:
            await client.close()
            await client.link.close()

    async def _renew(self, client: AgentClient, lease_s: float) -> None:
        while lease_s > 0:
            await asyncio.sleep(lease_s / 4)
            try:
                await client.request(LeaseCommand(ttl_s=lease_s), timeout=lease_s / 4)
            except UvccError as e:
                log.warning("its lease was not renewed: %s", e, pod=client.link.name)

    async def warm(self, limit_s: float) -> None:
        """Wait until every channel is up, at most ``limit_s``; those that are not come later."""
        starting = [asyncio.ensure_future(c.start(patience_s=limit_s)) for c in self.clients.values()]
        await asyncio.gather(*starting, return_exceptions=True)

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _elsewhere(client: AgentClient, pod: PodView) -> bool:
    """Whether the journal knows another machine under this pod's name by now, however fast the change went."""
    link, key = client.link, pins.plain(pod.host_key)
    return bool(pod.address and pod.address != link.address) or bool(key and key != link.host_key)
