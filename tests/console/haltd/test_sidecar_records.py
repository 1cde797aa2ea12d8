"""Which process is a run's conductor or sidecar: its record comes back when somebody has removed it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.haltd import service
from uvcc_console.haltd.__main__ import sidecar_lock
from uvcc_console.rollout import side_tasks
from uvcc_console.runs import conducting, processes
from uvcc_engine.contract.errors import UvccError

LIVES = {processes.CONDUCTOR: side_tasks.beat, processes.HALTD: lambda run_dir: service.Service(run_dir).run()}


@pytest.mark.parametrize("name", LIVES)
async def test_a_record_that_was_taken_for_a_dead_ones_is_left_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start a conductor at once: the second sees none, and removes the record that the first has just left."""
    monkeypatch.setattr(service, "REAP_EVERY_S", 0.05)
    run_dir = paths.run_dir("twice")
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(ev.PodChanged(pod="p0r0", party=0, replica=0, provider="x", state="agent"))
    work: Coroutine[Any, Any, None] = LIVES[name](run_dir)
    living = asyncio.create_task(work)
    processes.write_record(run_dir, name)
    (run_dir / f"{name}.json").unlink()
    async with asyncio.timeout(240):
        while processes.running(run_dir, name) != os.getpid():
            await asyncio.sleep(0.02)
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    journal.close()


@pytest.mark.parametrize("name", LIVES)
def test_a_dead_ones_lock_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as ended before the last of its threads is gone, and with that its lock."""
    monkeypatch.setattr(conducting, "LOCK_S", 0.0)
    monkeypatch.setattr(conducting, "DYING_S", 240.0)
    run_dir = paths.run_dir("dying")
    run_dir.mkdir(parents=True)
    fd = os.open(run_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    threading.Timer(0.1, os.close, [fd]).start()
    if name == processes.HALTD:
        with sidecar_lock(run_dir) as alone:
            assert alone
    else:
        with conducting.run_lock(run_dir):
            pass


def test_a_living_ones_lock_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conducting, "LOCK_S", 0.0)
    monkeypatch.setattr(conducting, "DYING_S", 3600.0)
    run_dir = paths.run_dir("living")
    run_dir.mkdir(parents=True)
    with conducting.run_lock(run_dir), sidecar_lock(run_dir) as first:
        assert first
        for name in LIVES:
            processes.write_record(run_dir, name)
        with sidecar_lock(run_dir) as second:
            assert not second
        with pytest.raises(UvccError, match="conductor already"), conducting.run_lock(run_dir):
            pass


def test_who_left_no_record_leaves_none() -> None:
    run_dir = paths.run_dir("none")
    run_dir.mkdir(parents=True)
    processes.renew_record(run_dir, processes.CONDUCTOR)
    assert not list(run_dir.iterdir())
