"""Kept pods end at their run's time to live, by a process that outlives the run; nothing else keeps it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal import Journal
from uvcc_console.fleet.provider import Pod
from uvcc_console.haltd import keeper
from uvcc_engine.contract.errors import UnreachableError

CREATED = 1_795_000_000.0
TTL = 3600.0


class Shop:
    """A provider with three pods of the run; the first list and the first delete fail."""

    def __init__(self) -> None:
        self.pods = {f"uvcc-kept-1-p{p}r0": Pod(f"uvcc-kept-1-p{p}r0", p, 0, "prime", f"id{p}") for p in range(3)}
        self.trouble = 2
        self.asked = 0

    def _maybe_fail(self) -> None:
        self.trouble -= 1
        if self.trouble in (0, 1):
            raise UnreachableError("no answer")

    async def list(self, prefix: str) -> list[Pod]:
        self.asked += 1
        if self.asked == 1:
            self._maybe_fail()
        return [p for name, p in self.pods.items() if name.startswith(prefix)]

    async def delete(self, pod: Pod) -> None:
        self._maybe_fail()
        del self.pods[pod.name]

    async def close(self) -> None:
        pass


class Clock:
    """Time that passes only when somebody sleeps; ``at`` does something at a moment."""

    def __init__(self) -> None:
        self.now = CREATED + 60.0
        self.at: dict[float, Callable[[], object]] = {}

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < CREATED + 2 * TTL, "it stays for ever"
        for moment in [m for m in self.at if m <= self.now]:
            self.at.pop(moment)()


@pytest.fixture
def run_dir() -> Path:
    return kept_run({"provider": "prime", "keep_pods": True})


def kept_run(fleet: dict[str, object], status: str = "ok") -> Path:
    folder = paths.run_dir("kept-1")
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.sqlite", clock=lambda: CREATED)
    profile = {"fleet": fleet, "limits": {"ttl": TTL}}
    made = ev.RunCreated(
        run="kept-1",
        profile_name="p",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=["full", "teardown"],
        profile=profile,
    )
    journal.append(made, ev.RunEnded(status=status))
    journal.close()
    (folder / "conductor.json").write_text('{"pid": 1, "starttime": 1}')  # whoever that was, it is gone
    return folder


async def test_kept_pods_are_ended_when_their_time_is_over_and_not_before(run_dir: Path) -> None:
    shop, clock, then = Shop(), Clock(), []
    clock.at[CREATED + TTL - 1.0] = lambda: then.append(len(shop.pods))
    ended = await keeper.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    assert then == [3]
    assert sorted(ended) == [f"uvcc-kept-1-p{p}r0" for p in range(3)]
    assert shop.pods == {}
    assert TTL <= clock.now - CREATED < TTL + 5 * keeper.LOOK_S


async def test_it_goes_when_somebody_else_has_ended_the_pods(run_dir: Path) -> None:
    shop, clock = Shop(), Clock()
    clock.at[CREATED + 300.0] = shop.pods.clear
    assert await keeper.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep) == []  # type: ignore[arg-type]
    assert clock.now < CREATED + 300.0 + 2 * keeper.LOOK_S


async def test_it_goes_with_the_runs_folder(run_dir: Path) -> None:
    shop, clock = Shop(), Clock()
    clock.at[CREATED + 300.0] = lambda: shutil.rmtree(run_dir)
    assert await keeper.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep) == []  # type: ignore[arg-type]
    assert len(shop.pods) == 3


@pytest.mark.parametrize(
    ("fleet", "status"),
    [
        ({"provider": "prime"}, "ok"),
        ({"provider": "prime", "keep_pods": True}, "failed"),
        ({"keep_pods": True}, "ok"),  # local pods end by themselves
    ],
)
async def test_nobody_stays_for_other_runs(fleet: dict[str, object], status: str) -> None:
    folder = kept_run(fleet, status)
    assert not keeper.needed(keeper.snapshot(folder), folder)
    assert await keeper.keep(folder, make=lambda s: pytest.fail("asked the provider")) == []
