"""Kept pods end at their run's time to live, by a process that outlives the run; nothing else keeps it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.cloud.intents import Intents, attempt_name, books_of
from uvcc_console.fleet.provider import Books, Pod
from uvcc_console.haltd import leftovers
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
    ended = await leftovers.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    assert then == [3]
    assert sorted(ended) == [f"uvcc-kept-1-p{p}r0" for p in range(3)]
    assert shop.pods == {}
    assert TTL <= clock.now - CREATED < TTL + 5 * leftovers.LOOK_S


async def test_it_goes_when_somebody_else_has_ended_the_pods(run_dir: Path) -> None:
    shop, clock = Shop(), Clock()
    clock.at[CREATED + 300.0] = shop.pods.clear
    assert await leftovers.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep) == []  # type: ignore[arg-type]
    assert clock.now < CREATED + 300.0 + 2 * leftovers.LOOK_S


async def test_it_goes_with_the_runs_folder(run_dir: Path) -> None:
    shop, clock = Shop(), Clock()
    clock.at[CREATED + 300.0] = lambda: shutil.rmtree(run_dir)
    assert await leftovers.keep(run_dir, make=lambda s: shop, clock=clock, sleep=clock.sleep) == []  # type: ignore[arg-type]
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
    assert not leftovers.needed(leftovers.snapshot(folder), folder)
    assert await leftovers.keep(folder, make=lambda s: pytest.fail("asked the provider")) == []


class Market(Shop):
    """A market that has a create of ours still to show: after a while there is a pod of it, or none ever."""

    caps = None

    def __init__(self, run_dir: Path, clock: Clock, shown_at: float, silent_until: float) -> None:
        super().__init__()
        self.pods, self.trouble = {}, 0
        self.intents, self.clock = Intents.of(run_dir), clock
        self.name = attempt_name("uvcc-kept-1-p1r0")
        self.shown_at, self.silent_until, self.deleted = shown_at, silent_until, 0
        self.intents.note(CREATED, name=self.name, price_hr=2.0)

    def books(self) -> Books:
        return books_of(self.intents.tries().values(), self.clock.now)

    async def prove(self, *, ended: bool, keep: Collection[str] = ()) -> list[str]:
        assert ended
        if self.clock.now < self.silent_until:
            raise UnreachableError("no answer")
        if self.shown_at <= self.clock.now:
            self.intents.note(self.clock.now, name=self.name, id="late", gone=True)
            self.deleted += 1
        elif self.clock.now > CREATED + 1000.0:
            self.intents.note(self.clock.now, name=self.name, absent=True)
        return [t.name for t in self.intents.tries().values() if t.open]


@pytest.mark.parametrize(
    ("shown_at", "silent_until", "deleted"),
    [(300.0, 0.0, 1), (1e9, 0.0, 0), (400.0, 2000.0, 1)],
    ids=["shown late", "never", "the market is down for a while"],
)
async def test_it_stays_until_every_create_is_proven(shown_at: float, silent_until: float, deleted: int) -> None:
    folder, clock = kept_run({"provider": "prime"}, "failed"), Clock()
    market = Market(folder, clock, CREATED + shown_at, CREATED + silent_until)
    assert leftovers.needed(leftovers.snapshot(folder), folder)
    await leftovers.keep(folder, make=lambda s: market, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    assert market.deleted == deleted
    assert not leftovers.needed(leftovers.snapshot(folder), folder)
    assert clock.now >= CREATED + min(max(shown_at, silent_until), 1000.0)


async def test_a_market_that_is_gone_for_good_is_left_in_the_end_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leftovers, "LONGEST_S", 900.0)
    folder, clock = kept_run({"provider": "prime"}, "failed"), Clock()
    market = Market(folder, clock, 0.0, 1e12)
    await leftovers.keep(folder, make=lambda s: market, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    (told,) = leftovers.snapshot(folder).alerts
    assert "nobody watches" in told.text
    assert "uvcc pods --sweep" in told.text
