"""Requests to SkyPilot's API server: asked for, then looked up until they ended: one that hangs stops nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from uvcc_console.core.log import logger
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import text
from uvcc_console.fleet.vendors import sky_api
from uvcc_console.fleet.vendors.sky_api import Sky
from uvcc_engine.contract.errors import UnreachableError, UvccError

log = logger(__name__)
T = TypeVar("T")

READ_S: Final = 120.0  # so long a request that only looks may take
TRIES: Final = 3
_OVER: Final = frozenset(("SUCCEEDED", "FAILED", "CANCELLED"))


class SkyRequests:
    """One user of one API server. ``sky`` loads SkyPilot's package, ``call`` runs what blocks."""

    def __init__(
        self,
        clock: Clock,
        sky: Callable[[], Sky] = sky_api.load,
        call: Callable[[Callable[[], Any]], Awaitable[Any]] = sky_api.in_thread,
    ) -> None:
        self.clock = clock
        self._load, self._call = sky, call
        self._sky: Sky | None = None

    async def _at(self) -> Sky:
        if self._sky is None:
            self._sky = await self._call(self._load)
        return self._sky

    async def _do(self, what: str, work: Callable[[Sky], T]) -> T:
        """One call of the client. Raises CloudRefused, or UnreachableError: whether it was obeyed is unknown."""
        sky = await self._at()
        try:
            found: T = await self._call(lambda: work(sky))
            return found
        except UvccError:
            raise
        except Exception as e:
            raise sky_api.meant(what, e) from e

    async def _ended(self, request: Any, most: float) -> bool:
        """Whether a request has ended before ``most`` seconds were over. Trouble with looking is no end of it."""
        end, pause = self.clock.now() + most, 0.2
        while True:
            try:
                rows = await self._do("api_status", lambda sky: sky.sdk.api_status([request]))
                if any(str(getattr(row, "status", "")) in _OVER for row in listed(rows, "requests")):
                    return True
            except UnreachableError as e:
                log.warning("a request of SkyPilot's is not looked up: %s", e)
            if self.clock.now() >= end:
                return False
            await self.clock.sleep(pause)
            pause = min(5.0, pause * 2)

    async def _read(self, what: str, work: Callable[[Sky], Any]) -> Any:
        """The result of a request that changes nothing; asked again where no answer comes."""
        for attempt in range(TRIES):
            try:
                request = await self._do(what, work)
                if not await self._ended(request, READ_S):
                    raise UnreachableError(f"{what} got no usable answer in {READ_S:.0f} s", "sky api status")
                return await self._do(what, lambda sky, r=request: sky.sdk.get(r))  # type: ignore[misc]
            except UnreachableError as e:
                if attempt == TRIES - 1:
                    raise
                log.warning("%s", e)
                await self.clock.sleep(2.0 * 2**attempt)
        raise AssertionError

    async def _under_way(self, name: str) -> list[tuple[str, str]]:
        """(id, kind) of requests about a cluster, or about any, that have not ended: "launch" and "down" count."""
        rows = await self._do("api_status", lambda sky: sky.sdk.api_status(cluster_name=name or None))
        said = [(text(row.request_id), text(row.name), text(row.cluster_name), text(row.status)) for row in rows]
        kinds = [(i, kind.rpartition(".")[2], of) for i, kind, of, status in said if status not in _OVER]
        return [(i if name else of, kind) for i, kind, of in kinds if not name or of == name]


def listed(value: Any, what: str) -> list[Any]:
    """A list of what was asked for. Raises UnreachableError for an answer of another form."""
    if not isinstance(value, list):
        raise UnreachableError(f"SkyPilot's list of {what} came in another form", "another version of SkyPilot?")
    return value
