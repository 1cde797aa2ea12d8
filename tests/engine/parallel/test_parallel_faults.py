"""Fleets over a relay that suffer: whatever is killed, stopped, moved or delayed, end and roots are the same."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.bench.launch.fleet import Fleet, Forker, until
from uvcc_engine.bench.launch.plane_links import RelayProcess
from uvcc_engine.contract.job.link_spec import RelayPlace
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import HOLD, RELEASE

SMALL = Topology(2, 1, 1, 1)
JOB = PrivateJob(steps=6, batch=8, checkpoint_every=2, test_rows=40)
LARGE = Topology(2, 2, 2, 4)
LONG = PrivateJob(steps=40, batch=16, checkpoint_every=5, test_rows=40)
FIRST = Coord(0, 0, 0, 0)
JITTER = {"drop": 0.002, "duplicate": 0.01, "reorder": 0.02, "delay": 0.05, "delay_s": 0.03}
PATIENCE_S = 600.0
PLACE = [f.name for f in fields(RelayPlace)]


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[Callable[[], RelayProcess]]:
    started: list[RelayProcess] = []

    def start() -> RelayProcess:
        folder = tmp_path / f"relay{len(started)}"
        folder.mkdir()
        listen, stream = (f"127.0.0.1:{port}" for port in ports(2))  # where it can be started again
        started.append(RelayProcess(folder, listen=listen, stream_listen=stream))
        return started[-1]

    yield start
    for relay in started:
        kill(relay)


def through(relay: RelayProcess, **more: Any) -> Callable[[Coord], dict[str, Any]]:
    links = relay.links("stream")
    return lambda c: links[c.party] | more


def kill(relay: RelayProcess) -> None:
    relay.process.kill()
    relay.process.wait()


def move(fleet: Fleet, relay: RelayProcess) -> None:
    """Tell every pod where the relay is now, as its agent would."""
    for c in filter(fleet.lead, fleet.coords):
        place = {k: v for k, v in relay.links("stream")[c.party].items() if k in PLACE}
        files.write_json(fleet.dir(c) / files.LINK, place, mode=0o600)


def finished(fleet: Fleet) -> Fleet:
    assert set(fleet.wait(PATIENCE_S).values()) == {0}, fleet.logs()
    return fleet


def roots(fleet: Fleet) -> dict[str, dict[int, str]]:
    return {str(c): {e["epoch"]: e["root"] for e in fleet.events(c, "epoch_root")} for c in fleet.coords}


def same_end(fleet: Fleet, calm: Fleet) -> None:
    assert len(calm.hashes()) == 1
    assert fleet.hashes() == calm.hashes()
    assert roots(fleet) == roots(calm)


@pytest.mark.ci("tests/engine/plane/test_relay_locator.py")
def test_an_empty_relay_elsewhere_takes_over_in_mid_run(
    forker: Forker, relays: Callable[[], RelayProcess], tmp_path: Path
) -> None:
    calm = Fleet(tmp_path / "calm", forker, JOB, SMALL)
    calm.launch()
    finished(calm)
    fleet, first = Fleet(tmp_path / "fleet", forker, JOB, SMALL), relays()
    fleet.launch(through(first), halt=(HOLD, FIRST))
    until(lambda: all(fleet.events(c, "held") for c in fleet.coords), PATIENCE_S, "the hold")  # nobody is done before
    kill(first)
    move(fleet, relays())
    fleet.halt(RELEASE, FIRST)
    same_end(finished(fleet), calm)
    assert all(fleet.events(c, "relay_moved") for c in fleet.coords)


# -- 24 workers, minutes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The large run, undisturbed."""
    fleet = Fleet(tmp_path_factory.mktemp("calm") / "fleet", forker, LONG, LARGE)
    fleet.launch()
    return finished(fleet)


def at_step(fleet: Fleet, step: int) -> None:
    until(lambda: fleet.steps(FIRST) >= step, PATIENCE_S, f"step {step}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_random_worker_is_killed_and_the_resumed_run_ends_the_same(
    forker: Forker, calm: Fleet, tmp_path: Path
) -> None:
    fleet, victim = Fleet(tmp_path / "fleet", forker, LONG, LARGE), random.SystemRandom().choice(calm.coords)
    fleet.launch()
    at_step(fleet, 12)
    os.kill(fleet.pids[victim], signal.SIGKILL)
    codes = fleet.wait(PATIENCE_S)
    assert codes.pop(victim) == -signal.SIGKILL, victim
    assert set(codes.values()) == {4}, fleet.logs()
    fleet.launch(resume=True)
    same_end(finished(fleet), calm)
    assert fleet.events(FIRST, "resumed")[0]["step"] >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_that_stands_still_for_a_minute_changes_nothing(forker: Forker, calm: Fleet, tmp_path: Path) -> None:
    fleet, victim = Fleet(tmp_path / "fleet", forker, LONG, LARGE), random.SystemRandom().choice(calm.coords)
    fleet.launch()
    at_step(fleet, 12)
    os.kill(fleet.pids[victim], signal.SIGSTOP)
    try:
        threading.Event().wait(60.0)
        ends = [files.read_json(path) for path in fleet.folder.glob("p*/run/exit*.json")]
        first = min(ends, key=lambda end: float(end["ts"]), default=None)
        assert first is None, (victim, first["coord"], first["error"])  # nobody ends meanwhile, well or badly
    finally:
        os.kill(fleet.pids[victim], signal.SIGCONT)
        if sys.exc_info()[0] is not None:
            fleet.end()
    same_end(finished(fleet), calm)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_relay_that_is_killed_started_again_and_moved_changes_nothing(
    forker: Forker, calm: Fleet, relays: Callable[[], RelayProcess], tmp_path: Path
) -> None:
    fleet, relay = Fleet(tmp_path / "fleet", forker, LONG, LARGE), relays()
    fleet.launch(through(relay))
    at_step(fleet, 8)
    kill(relay)
    relay.start()
    at_step(fleet, 16)
    kill(relay)
    move(fleet, relays())
    same_end(finished(fleet), calm)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_complete_runs_have_equal_global_roots_whatever_one_of_them_suffers(
    forker: Forker, calm: Fleet, relays: Callable[[], RelayProcess], tmp_path: Path
) -> None:
    fleet, relay = Fleet(tmp_path / "fleet", forker, LONG, LARGE), relays()
    rough = through(relay, faults=JITTER, rto_s=0.5)
    fleet.launch(lambda c: rough(c) | {"faults": {**JITTER, "seed": hash(c)}})
    at_step(fleet, 6)
    late = [fleet.pids[c] for c in fleet.coords if c.stage == 1]
    for pid in late:  # skew: one stage of everybody falls behind
        os.kill(pid, signal.SIGSTOP)
    kill(relay)
    relay.start()
    for pid in late:
        os.kill(pid, signal.SIGCONT)
    at_step(fleet, 12)
    os.kill(fleet.pids[Coord(1, 1, 1, 1)], signal.SIGKILL)
    fleet.wait(PATIENCE_S)
    fleet.launch(rough, resume=True)
    same_end(finished(fleet), calm)
    one, two = fleet.verified(tmp_path / "one"), calm.verified(tmp_path / "two")
    assert (one.global_root, one.run_root) == (two.global_root, two.run_root)
    assert one.level == two.level == "transcripts"
