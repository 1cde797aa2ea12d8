"""When a rented pod is really there: the provider says so, a login works, and its GPUs answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from uvcc_console.fleet import keys
from uvcc_console.fleet.prime.access import Target, targets
from uvcc_console.fleet.prime.client import PrimeClient, PrimeRefused
from uvcc_console.fleet.prime.models import ApiPod, Offer
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_engine.contract.errors import UnreachableError, UvccError

POLL_S = 10.0
LEAST_S = 900.0
UNKNOWN_S = 300.0
REFUSED_S = 180.0
_PROBE = Timeouts(connect=8.0, login=8.0, operation=20.0, keepalive_s=0.0)


class NotReady(UvccError):
    """This pod will not come up; another one may."""


@dataclass
class _Watch:
    """What was seen of one pod while waiting."""

    since: float
    unknown_since: float | None = None
    missing: int = 0
    said: str = "nothing yet"


class Readiness:
    """Waits for one pod at a time; ``login`` can be replaced by what a test has behind its pods."""

    def __init__(
        self,
        client: PrimeClient,
        run_dir: Path,
        key_file: str = "",
        login: Callable[[Target, bool], Awaitable[str]] | None = None,
    ) -> None:
        self._client = client
        self._run_dir = run_dir
        self._key_file = key_file
        self._login = login or self._real_login

    async def wait(self, pod: Pod, offer: Offer | None) -> Target:
        """The login that works. Raises NotReady with the reason once the pod has failed or its time is over."""
        clock = self._client.clock
        minutes = (offer.provisioning_time if offer else None) or 0.0
        limit = max(LEAST_S, 2 * 60.0 * minutes)
        watch = _Watch(clock.now())
        while True:
            found = await self._ask(pod, watch)
            if found is not None:
                self._judge(found, watch, clock.now())
                if found.installed and (at := await self._try_all(found, watch)) is not None:
                    return at
            if clock.now() - watch.since > limit:
                raise NotReady(f"not ready in {limit / 60:.0f} min: {watch.said}")
            await clock.sleep(POLL_S)

    async def _ask(self, pod: Pod, watch: _Watch) -> ApiPod | None:
        """The pod's present state; None while the API does not tell. Two answers that it is unknown mean it is gone."""
        try:
            found = await self._client.pod(pod.provider_id)
        except UnreachableError as e:
            watch.said = e.what
            return None
        except PrimeRefused as e:
            if e.kind == "auth":
                raise
            watch.said = e.what
            return None
        if found is None:
            if self._client.clock.now() - watch.since > 60.0:  # before, it may not be visible yet
                watch.missing += 1
            watch.said = "the provider does not list it"
            if watch.missing >= 2:
                raise NotReady("it vanished")
            return None
        watch.missing = 0
        return found

    def _judge(self, found: ApiPod, watch: _Watch, now: float) -> None:
        progress = f" {found.installation_progress:.0f} %" if found.installation_progress is not None else ""
        watch.said = f"{found.status} {found.installation_status}{progress} {found.installation_failure}".strip()
        if found.dying or found.installation_status in ("ERROR", "TERMINATED"):
            raise NotReady(watch.said)
        if found.status != "UNKNOWN":
            watch.unknown_since = None
        elif watch.unknown_since is None:
            watch.unknown_since = now
        elif now - watch.unknown_since > UNKNOWN_S:
            raise NotReady(f"UNKNOWN for {UNKNOWN_S / 60:.0f} min")

    async def _try_all(self, found: ApiPod, watch: _Watch) -> Target | None:
        choices = targets(found)
        if not choices:
            watch.said = "ACTIVE, but it names no SSH address"
        gpu = not found.gpu_name.startswith("CPU") and bool(found.gpu_count)
        for at in choices:
            trouble = await self._login(at, gpu)
            if not trouble:
                return at
            watch.said = f"{at.user}@{at.host}:{at.port}: {trouble}"
        return None

    async def _real_login(self, at: Target, gpu: bool) -> str:
        """Log in with the run's key; what is wrong, or empty."""
        key: asyncssh.SSHKey = keys.operator_key(self._run_dir, self._key_file)
        link = PodLink(f"{at.host}:{at.port}", f"{at.user}@{at.host}:{at.port}", key, timeouts=_PROBE)
        try:
            done = await link.run("nvidia-smi -L" if gpu else "true")
        except UvccError as e:
            return e.what
        finally:
            await link.close()
        if done.exit == 0:
            return ""
        return f"nvidia-smi failed: {done.trouble}" if gpu else done.trouble
