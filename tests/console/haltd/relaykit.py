"""A relay in a thread of the test, and a run folder as the conductor leaves it, with a pod that no SSH reaches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.halt.machine import Times
from uvcc_console.runs import processes
from uvcc_engine.relay.config import from_json
from uvcc_engine.relay.server import serving

TOKENS = [f"token-of-party-{p}-0123456789" for p in range(3)]
COORDINATOR = "token-of-coordinator-0123456789"
QUICK = Times(commit=60.0, hold=60.0, halt=60.0)
RUN = "relay-path.full"
COORD = "p0r0s0t0"


@contextlib.contextmanager
def relay_of(folder: Path, credentials: Sequence[Mapping[str, Any]], **more: Any) -> Iterator[str]:
    """A relay in a thread of this process; its URL. ``more``: further keys of its configuration."""
    up, url, ending = threading.Event(), [""], []

    async def serve() -> None:
        async with serving(from_json({"db": "relay.db", "credentials": credentials} | more, folder)) as running:
            url[0] = running.url
            ending.append((asyncio.get_running_loop(), running.stop))
            up.set()
            await running.finished()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(120)
    try:
        yield url[0]
    finally:  # a thread that goes on would keep the whole test run from ending
        loop, stop = ending[0]
        loop.call_soon_threadsafe(stop)
        thread.join(120)


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[str]:
    """A relay with a credential for each party and for a coordinator; its URL."""
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people.append({"coordinator": 0, "group": "g", "token": COORDINATOR})
    with relay_of(tmp_path, people) as url:
        yield url


def make_run(url: str, identity: str) -> tuple[Path, Journal]:
    """A run folder as the conductor leaves it, with one pod that no SSH reaches."""
    run_dir = paths.run_dir("relay-path")
    (run_dir / "relay").mkdir(parents=True)
    (run_dir / "relay" / "full.json").write_text(json.dumps(TOKENS))
    at = {"url": url, "group": "g", "engine_run": RUN, "tokens": "full.json", "ca": ""}
    (run_dir / "relay" / "full.at.json").write_text(json.dumps(at))
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(
        ev.RunCreated(
            run="relay-path",
            profile_name="t",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=[],
            profile={"job": {"kind": "private", "steps": 9}, "halt": {"lease": 0.0, "auto": ["hold", "halt"]}},
        ),
        ev.PodChanged(
            pod="p0r0",
            party=0,
            replica=0,
            provider="local",
            state="agent",
            address="u@127.0.0.1:1",
            identity=identity,
        ),
        ev.PhaseStarted(phase="full", engine_run=RUN, steps=60, sid_job=""),
    )
    return run_dir, journal
