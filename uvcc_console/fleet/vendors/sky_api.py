"""SkyPilot's package as the provider uses it: how it is loaded and called, and what its exceptions mean."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from uvcc_console.fleet.cloud.calls import CloudRefused, kind_of
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError
from uvcc_engine.contract.text import clean

T = TypeVar("T")

CALL_S: Final = 60.0
_AUTH: Final = frozenset(
    (
        "ApiServerAuthenticationError",
        "PermissionDeniedError",
        "NoCloudAccessError",
        "InvalidCloudCredentials",
        "CloudUserIdentityError",
        "ClusterOwnerIdentityMismatchError",
        "UserRequestRejectedByPolicy",
    )
)
_NO_VOLUME: Final = re.compile(r"Volume \S+ not found\.?")
_OF_RUNPOD: Final = re.compile(r"RunPod REST error (4\d\d): (.*)")
_INVALID: Final = frozenset(
    ("ResourcesMismatchError", "NotSupportedError", "InvalidClusterNameError", "InvalidCloudConfigs", "ValueError")
)


@dataclass(frozen=True, slots=True)
class Sky:
    """What is used of SkyPilot's package: its client modules, three classes, and values of two enumerations."""

    sdk: Any
    task: Callable[..., Any]
    resources: Callable[..., Any]
    refresh: Any  # look at each cloud for clusters that may have ended by themselves
    wait_for: Any  # what autostop counts as use
    volumes: Any  # the client's module of volumes
    volume: Callable[..., Any]


def load() -> Sky:
    """Import SkyPilot. Raises ConfigError where it is not there or cannot be imported."""
    needed()
    try:
        sky = importlib.import_module("sky")
        waits = importlib.import_module("sky.skylet.autostop_lib").AutostopWaitFor
        sdk = importlib.import_module("sky.client.sdk")
        volumes = importlib.import_module("sky.volumes")
        rest = sky.StatusRefreshMode.AUTO, waits.JOBS_AND_SSH, volumes, volumes.Volume
        return Sky(sdk, sky.Task, sky.Resources, *rest)
    except (Exception, SystemExit) as e:
        why = f"{type(e).__name__}: {clean(str(e))[:200]}"
        raise ConfigError(f"SkyPilot cannot be imported: {why}", "pip install 'uvcc[skypilot]'") from e


def needed() -> None:
    """Raises ConfigError where the extra is not installed."""
    if importlib.util.find_spec("sky") is None:
        raise ConfigError("provider skypilot needs SkyPilot's Python API", "pip install 'uvcc[skypilot]'")


async def in_thread(work: Callable[[], T]) -> T:
    """Run what blocks. A server that hangs keeps neither the console nor its end waiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        done.set_exception(error) if error is not None else done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except (Exception, SystemExit) as e:  # noqa: BLE001  (it is raised where it was asked for)
            error = RuntimeError(str(e)) if isinstance(e, StopIteration | SystemExit) else e
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="skypilot", daemon=True).start()
    async with asyncio.timeout(CALL_S):
        return await done


def meant(what: str, error: Exception) -> UvccError:
    """What an exception of SkyPilot's means for the next step: its classes are told by name, its prose by words."""
    names = {c.__name__ for c in type(error).__mro__}
    told = [str(error), *(str(e) for e in getattr(error, "failover_history", ()))]
    words = clean(" ".join(" ".join(told).split()))[:400]
    status = getattr(getattr(error, "response", None), "status_code", None)
    if names & _AUTH or status in (401, 403):
        return CloudRefused("auth", 403, words)
    if names & {"ClusterDoesNotExist"} or _NO_VOLUME.fullmatch(words):
        return CloudRefused("missing", 404, words)
    if names & {"ResourcesUnavailableError"}:
        kind = kind_of(400, words)  # a quota is one region's: the next may have room
        return CloudRefused("payment" if kind == "payment" else "capacity", 400, words)
    if said := _OF_RUNPOD.search(words):
        return CloudRefused(kind_of(int(said[1]), said[2]), int(said[1]), said[2])
    if names & _INVALID or (isinstance(status, int) and 400 <= status < 500):
        return CloudRefused("invalid", 400, words)
    told_of = f"{what} got no usable answer: {type(error).__name__} {words}".strip()
    return UnreachableError(told_of, "does `sky api info` find the API server?")
