"""The sweep at the start and every minute: what it may end, what it leaves alone, and that it never gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Pod
from uvcc_console.fleet.ssh_keys import KEY_FILE, operator_key, public_line
from uvcc_console.plan.profile import load
from uvcc_console.runs import kept_pods, processes, sweep
from uvcc_engine.contract.errors import UnreachableError

BORN = 1_795_000_000.0
OWN = "uvcc-now-1-"


class Shop:
    """Pods by name; ``silent`` does not answer."""

    def __init__(self, *names: str) -> None:
        self.pods = {n: Pod(n, 0, 0, "x", n) for n in names}
        self.silent = False
        self.lists = 0

    async def list(self, prefix: str) -> list[Pod]:
        self.lists += 1
        if self.silent:
            raise UnreachableError("the provider does not answer")
        return [p for n, p in self.pods.items() if n.startswith(prefix)]

    async def delete(self, pod: Pod) -> None:
        del self.pods[pod.name]


class Clock:
    """Time that passes only when somebody sleeps; ends the loop after so many minutes."""

    def __init__(self, minutes: int, each: Callable[[int], None] = lambda n: None) -> None:
        self.now, self._minutes, self._each = BORN, minutes, each
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self._each(len(self.slept))
        if len(self.slept) >= self._minutes:
            raise asyncio.CancelledError


def run_here(run: str, *more: ev.Event, fleet: dict[str, Any] | None = None, **limits: float) -> Path:
    folder = paths.run_dir(run)
    folder.mkdir(parents=True)
    created = ev.RunCreated(
        ts=BORN,
        run=run,
        profile_name="d",
        job_kind="private",
        replicas=1,
        pipeline_stages=1,
        tensor=1,
        stages=[],
        profile={"fleet": fleet or {}, "limits": limits},
    )
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(created, *more)
    journal.close()
    (folder / f"{processes.CONDUCTOR}.json").write_text('{"pid": 1, "starttime": 1}')  # one that died
    return folder


def alive(folder: Path, name: str) -> None:
    processes.write_record(folder, name)


ENDED = ev.RunEnded(ts=BORN + 5.0, status="failed")
WELL = ev.RunEnded(ts=BORN + 5.0, status="ok")


async def swept(shop: Shop, clock: Clock) -> list[ev.Alert]:
    said: list[Any] = []
    with pytest.raises(asyncio.CancelledError):
        await sweep.keep_sweeping(shop, OWN, said.append, clock=lambda: clock.now, sleep=clock.sleep)  # type: ignore[arg-type]
    return said


async def test_at_the_start_and_every_minute() -> None:
    run_here("dead-1", ENDED)
    shop = Shop("uvcc-dead-1-p0r0", f"{OWN}p0r0")
    late = Pod("uvcc-dead-1-p2r0", 2, 0, "x", "late")
    clock = Clock(3, lambda n: shop.pods.setdefault(late.name, late) and None if n == 2 else None)
    said = await swept(shop, clock)
    assert clock.slept == [60.0, 60.0, 60.0]
    assert shop.lists == 3
    assert [a.subject for a in said] == ["uvcc-dead-1-p0r0", "uvcc-dead-1-p2r0"]
    assert list(shop.pods) == [f"{OWN}p0r0"]


async def test_a_second_try_of_our_own_that_came_late_is_ended() -> None:
    run_here("now-1")
    shop = Shop(f"{OWN}p0r0", f"{OWN}p0r0xabc123", f"{OWN}p0r0xabc124", "uvcc-now-11-p0r0")
    shop.pods[f"{OWN}p0r0xabc123"] = replace(shop.pods[f"{OWN}p0r0xabc123"], stray=True)
    await swept(shop, Clock(1))
    # the provider decides by ids which one is too many; a name alone ends nothing
    assert set(shop.pods) == {f"{OWN}p0r0", f"{OWN}p0r0xabc124", "uvcc-now-11-p0r0"}


async def test_an_answer_that_does_not_come_is_told_and_asked_for_again() -> None:
    run_here("dead-1", ENDED)
    shop = Shop("uvcc-dead-1-p0r0")
    shop.silent = True

    def wake(n: int) -> None:
        shop.silent = False

    said = await swept(shop, Clock(2, wake))
    assert ["does not answer" in a.text for a in said] == [True, False]
    assert shop.pods == {}


async def test_foreign_pods_are_never_touched() -> None:
    shop = Shop("uvcc-elsewhere-1-p0r0", "uvcc", "uvcc-p0r0", "somebody-else", "uvcc-x")
    await swept(shop, Clock(2))
    assert len(shop.pods) == 5


@pytest.mark.parametrize(
    ("age", "sidecar", "gone"),
    [
        (60.0, False, False),  # it may still be resumed
        (60.0, True, False),
        (1000.0, True, False),  # its sidecar sees to it
        (1000.0, False, True),  # nobody is left
    ],
)
async def test_a_run_whose_conductor_died_is_given_time(age: float, sidecar: bool, gone: bool) -> None:
    folder = run_here("dead-1", wait=900.0, ttl=3600.0)
    if sidecar:
        alive(folder, processes.HALTD)
    shop = Shop("uvcc-dead-1-p0r0")
    clock = Clock(1)
    clock.now = BORN + age
    await swept(shop, clock)
    assert (shop.pods == {}) == gone


@pytest.mark.parametrize(("age", "fate"), [(60.0, "kept"), (7201.0, "ORPHAN")])
async def test_pods_that_are_kept_live_until_their_runs_time_is_over(age: float, fate: str) -> None:
    run_here("kept-1", WELL, fleet={"keep_pods": True}, ttl=7200.0)
    shop = Shop("uvcc-kept-1-p0r0")
    clock = Clock(1)
    clock.now = BORN + age
    assert sweep.fate_of("uvcc-kept-1-p0r0", now=clock.now) == fate
    await swept(shop, clock)
    assert (shop.pods == {}) == (fate == "ORPHAN")


async def test_pods_that_another_run_took_over_are_that_runs() -> None:
    run_here("kept-1", WELL)
    alive(run_here("second-1", fleet={"attach_prefix": "uvcc-kept-1-"}), processes.CONDUCTOR)
    shop = Shop("uvcc-kept-1-p0r0")
    assert sweep.fate_of("uvcc-kept-1-p0r0") == "live"
    await swept(shop, Clock(1))
    assert list(shop.pods) == ["uvcc-kept-1-p0r0"]


def test_whoever_takes_pods_over_gets_in_and_knows_them() -> None:
    ready = ev.PodChanged(
        ts=BORN, pod="p0r0", party=0, replica=0, provider="x", state="ready", host_key="ssh-ed25519 AAAA"
    )
    folder = run_here("kept-1", ready, WELL)
    line = public_line(operator_key(folder))
    kept = kept_pods.kept_by("uvcc-kept-1-")
    assert kept.host_keys == {"p0r0": "ssh-ed25519 AAAA"}
    assert public_line(operator_key(folder.parent, kept.ssh_key)) == line
    _, profile = load("demo", ["fleet.attach_prefix=uvcc-kept-1-"])
    for taken in (profile, kept_pods.with_kept_key(profile)):  # the second: who takes it over from this one
        assert kept_pods.with_kept_key(taken).fleet.ssh_key == str(folder / KEY_FILE)  # for its halt sidecar as well
    assert kept_pods.with_kept_key(load("demo")[1]).fleet.ssh_key == ""
    assert kept_pods.kept_by("uvcc-unknown-1-") == kept_pods.KeptAccess()
    assert kept_pods.kept_by("") == kept_pods.KeptAccess()
