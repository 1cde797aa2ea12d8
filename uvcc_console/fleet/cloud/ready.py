"""When a rented pod is really there: the provider says so, a login works, and its GPUs answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.ends import LAG_S
from uvcc_console.fleet.cloud.vendor import Cloud, CloudOffer, CloudPod, SshTarget
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_engine.contract.errors import UnreachableError, UvccError

POLL_S = 5.0
LOOK_S = 30.0  # so often a pod is also looked up by itself: the list may be late
LEAST_S = 900.0
UNTOLD_S = 1800.0  # for an offer that does not say how long its pods take
MOST_S = 7200.0
UNKNOWN_S = 300.0
VANISHED_S = 60.0
_PROBE = Timeouts(connect=8.0, login=8.0, operation=20.0, keepalive_s=0.0)


class NotReady(UvccError):
    """This pod will not come up; another one may."""


@dataclass
class _Watch:
    """What was seen of one pod while waiting."""

    since: float
    moved: float  # when it last showed something new
    unknown_since: float | None = None
    missing_since: float | None = None
    looked: float = float("-inf")
    seen: bool = False
    marks: set[tuple[object, ...]] = field(default_factory=set)
    said: str = "nothing yet"


class Readiness:
    """Waits for one pod at a time; ``login`` can be replaced by what a test has behind its pods."""

    def __init__(
        self,
        client: Cloud,
        run_dir: Path,
        key_file: str = "",
        login: Callable[[SshTarget, bool], Awaitable[str]] | None = None,
    ) -> None:
        self._client = client
        self._run_dir = run_dir
        self._key_file = key_file
        self._login = login or self._real_login
        self._host_keys: dict[SshTarget, str] = {}
        self._listing = asyncio.Lock()
        self._listed = float("-inf")
        self._rows: dict[str, CloudPod] = {}
        self.said: dict[str, str] = {}  # what was last heard of each pod that is waited for

    async def wait(self, pod: Pod, offer: CloudOffer | None) -> SshTarget:
        """The login that works. Raises NotReady with the reason once the pod has failed or its time is over.

        A pod that gets on is left in peace: its time is over when it has shown nothing new for as long as its offer
        lets expect (``UNTOLD_S`` where it does not say), or after ``MOST_S`` in all.
        """
        clock = self._client.clock
        minutes = (offer.provisioning_time if offer else None) or 0.0
        limit = max(LEAST_S, 2 * 60.0 * minutes) if minutes else UNTOLD_S
        watch = _Watch(clock.now(), clock.now())
        while True:
            found = await self._ask(pod, watch)
            if found is not None:
                self._judge(found, watch, clock.now())
                if found.installed and (at := await self._try_all(found, watch)) is not None:
                    return at
            self.said[pod.name] = watch.said
            quiet = LEAST_S if found is not None and found.installed else limit
            if clock.now() - watch.moved > quiet:
                raise NotReady(f"nothing new in {quiet / 60:.0f} min: {watch.said}")
            if clock.now() - watch.since > max(MOST_S, limit):
                raise NotReady(f"not ready in {max(MOST_S, limit) / 60:.0f} min: {watch.said}")
            await clock.sleep(POLL_S)

    def host_key(self, at: SshTarget) -> str:
        """The key of the machine that let us in there: the one that every later connection must find again."""
        return self._host_keys.get(at, "")

    async def _ask(self, pod: Pod, watch: _Watch) -> CloudPod | None:
        """The pod's present state; None while the API does not tell.

        A pod that was never shown is waited for as long as the market may be late. One that was shown has vanished
        once neither list nor look-up has known it for ``VANISHED_S``.
        """
        now = self._client.clock.now()
        try:
            found = (await self._board()).get(pod.provider_id)
            if found is None or (not found.installed and now - watch.looked >= LOOK_S):
                if found is None and now - watch.looked < POLL_S * 2:
                    return None
                watch.looked = now
                found = await self._client.pod(pod.provider_id) or found
        except UnreachableError as e:
            watch.said = e.what
            return None
        except CloudRefused as e:
            if e.kind == "auth":
                raise
            watch.said = e.what
            return None
        if found is not None:
            watch.seen, watch.missing_since = True, None
            return found
        watch.said = "the provider does not list it"
        watch.missing_since = now if watch.missing_since is None else watch.missing_since
        if watch.seen and now - watch.missing_since >= VANISHED_S:
            raise NotReady("it vanished")
        if not watch.seen and now - watch.since > LAG_S:
            raise NotReady(f"it was not shown in {LAG_S / 60:.0f} min")
        return None

    async def _board(self) -> dict[str, CloudPod]:
        """All pods of the account, at most ``POLL_S`` old: one list serves everybody who waits."""
        async with self._listing:
            if self._client.clock.now() - self._listed >= POLL_S:
                try:
                    self._rows = {p.id: p for p in await self._client.pods()}
                except (UnreachableError, CloudRefused):
                    self._rows = {}  # each is looked up by itself
                self._listed = self._client.clock.now()
            return self._rows

    def _judge(self, found: CloudPod, watch: _Watch, now: float) -> None:
        watch.said = found.stage
        mark = (found.stage, bool(self._client.logins(found)))
        if mark not in watch.marks:
            watch.marks.add(mark)
            watch.moved = now
        if found.failed or found.dying:
            raise NotReady(watch.said)
        if not found.unclear:
            watch.unknown_since = None
        elif watch.unknown_since is None:
            watch.unknown_since = now
        elif now - watch.unknown_since > UNKNOWN_S:
            raise NotReady(f"UNKNOWN for {UNKNOWN_S / 60:.0f} min")

    async def _try_all(self, found: CloudPod, watch: _Watch) -> SshTarget | None:
        choices = self._client.logins(found)
        if not choices:
            watch.said = f"{found.stage}, but it names no SSH address"
        gpu = found.has_gpu
        for at in choices:
            trouble = await self._login(at, gpu)
            if not trouble:
                return at
            watch.said = f"{at.user}@{at.host}:{at.port}: {trouble}"
        return None

    async def _real_login(self, at: SshTarget, gpu: bool) -> str:
        """Log in with the run's key; what is wrong, or empty."""
        key: asyncssh.SSHKey = ssh_keys.operator_key(self._run_dir, self._key_file)
        link = PodLink(f"{at.host}:{at.port}", f"{at.user}@{at.host}:{at.port}", key, jump=at.jump, timeouts=_PROBE)
        try:
            done = await link.run("nvidia-smi -L" if gpu else "true")
        except UvccError as e:
            return e.what
        finally:
            await link.close()
        if done.exit == 0:
            self._host_keys[at] = link.host_key
            return ""
        return f"nvidia-smi failed: {done.trouble}" if gpu else done.trouble
