"""One domain's conductor is killed at any moment: the two others end safe, nothing leaks, and nothing bills on.

Moments are by stage and by the part of it that has passed, not by the clock, so that a busy machine tries the same
ones. Several groups of three domains take them side by side: most of a story is waiting for what a killed conductor's
sidecar does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from demorun import Uvcc, user_at
from relaykit import TOKENS, relay_of
from test_federated_run import Domains, everything

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal, iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.runs import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]
GROUPS = int(os.environ.get("UVCC_KILL_GROUPS", "3"))
SHORT = ("job.steps=3", "smoke.steps=0", "link=direct", "job.test_rows=200")
SILENCE_S = "20"  # so long nothing may be heard of a domain that lives, on a machine that is busy with all of this
FIRST = "launch"  # before its conductor has begun a stage
LOOK_S = 0.05


class Moment(NamedTuple):
    """A part (0 to 1) of how long a stage took where nobody was killed, after which this party's conductor dies."""

    number: int
    victim: int
    stage: str
    part: float


def runs_of(user: Uvcc) -> set[Path]:
    folder = user.home / "runs"
    return set(folder.iterdir()) if folder.is_dir() else set()


def _conductor(user: Uvcc, before: set[Path]) -> tuple[Path, Any] | None:
    for run in runs_of(user) - before:
        if (found := processes.recorded(run, processes.CONDUCTOR)) is not None:
            return run, found
    return None


def _begins(run: Path, stage: str, process: subprocess.Popen[str]) -> None:
    """Wait until a run's journal tells of a stage, or until the run is over."""
    journal, seq = Journal(run / processes.JOURNAL, readonly=True), 0
    try:
        while process.poll() is None:
            found = list(journal.since(seq, kinds=(ev.StageChanged.kind,)))
            if any(isinstance(event, ev.StageChanged) and event.name == stage for _, event in found):
                return
            seq = found[-1][0] if found else seq
            time.sleep(LOOK_S)
    finally:
        journal.close()


def _kill(user: Uvcc, before: set[Path], at: Moment, took: float, process: subprocess.Popen[str]) -> str:
    """SIGKILL to a domain's conductor at that moment; the stage in which it was struck."""
    end = time.monotonic() + 120.0
    while (found := _conductor(user, before)) is None:
        assert time.monotonic() < end, f"P{at.victim} never had a conductor"
        time.sleep(LOOK_S)
    run, who = found
    if at.stage != FIRST:
        _begins(run, at.stage, process)
        time.sleep(at.part * took)  # the moment itself is what is tried
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(who.pid, signal.SIGKILL)
    with suppress(Exception):  # not even its journal is whole
        s = fold(event for _, event in iter_events(run / processes.JOURNAL))
        return "after its end" if s.ended else s.stage.name if s.stage is not None else FIRST
    return FIRST


def ended(run: Path) -> Snapshot:
    """What became of a run, once somebody ended it: its conductor, or the sidecar of one that was killed."""
    end = time.monotonic() + 300.0
    while not (s := fold(event for _, event in iter_events(run / processes.JOURNAL))).ended:
        if not s.pods and not processes.conducted(run) and not processes.running(run, processes.HALTD):
            break  # killed before it had rented anything, and before its sidecar was there
        assert time.monotonic() < end, (run, s.detail, s.pods)
        time.sleep(0.5)
    return s


def nothing_is_left(user: Uvcc, fresh: set[Path]) -> None:
    """Every pod of these runs was given back, nothing is billed, and no process of them lives."""
    for run in fresh:
        if (run / processes.JOURNAL).exists():
            s = ended(run)
            assert s.leaks == (), (run, s.leaks)
            assert s.hourly == 0.0
            assert all(pod.state == "gone" for pod in s.pods.values()), (run, s.pods)
    end = time.monotonic() + 300.0
    while left := user.on_pods():
        assert time.monotonic() < end, left
        time.sleep(0.5)


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[list[Domains]]:
    """Groups of three domains who have approved a proposal on public data, each with a relay of its own."""
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    made = []
    with ExitStack() as stack:
        for k in range(GROUPS):
            folder = tmp_path / f"g{k}"
            folder.mkdir()
            homes = [folder / f"p{n}" for n in range(3)]
            for home in homes:
                home.mkdir()
            url = stack.enter_context(relay_of(folder, people))
            domains = Domains([stack.enter_context(user_at(home)) for home in homes], url, wait_s="60")
            domains.job = tuple(part for key in SHORT for part in ("--set", key))
            domains.prepare()
            made.append(domains)
        yield made


def _undisturbed(domains: Domains) -> dict[str, float]:
    """How long each stage takes where nobody is killed."""
    running = [domains.start(n, "--silence", SILENCE_S) for n in range(3)]
    codes = [(process.communicate(timeout=600)[1][-2000:], process.returncode) for process in running]
    assert [code for _, code in codes] == [0, 0, 0], codes
    return {view.name: max(0.0, view.ended - view.started) for view in domains.seen(0).stages if view.started}


def _struck(domains: Domains, at: Moment, took: float) -> tuple[str, list[int]]:
    """One attempt with one kill; where it struck, and how the three ended."""
    before = [runs_of(user) for user in domains.users]
    running = [domains.start(n, "--silence", SILENCE_S) for n in range(3)]
    struck = _kill(domains.users[at.victim], before[at.victim], at, took, running[at.victim])
    codes = []
    for n, process in enumerate(running):
        _, err = process.communicate(timeout=600)
        codes.append(process.returncode)
        for run in runs_of(domains.users[n]) - before[n] if n != at.victim and process.returncode else ():
            assert f"P{at.victim}" in ended(run).detail, (at, struck, ended(run).detail, err[-2000:])
    assert {code for n, code in enumerate(codes) if n != at.victim} <= {0, 1}, (at, struck, codes)
    for user, known in zip(domains.users, before, strict=True):
        nothing_is_left(user, runs_of(user) - known)
    return struck, codes


def test_a_conductor_that_is_killed_at_any_moment_costs_the_run_and_nothing_else(groups: list[Domains]) -> None:
    """Fifty seeded moments over all stages; after each, the killed domain returns to the proposal, for another attempt.

    ``UVCC_KILLS`` makes it fewer, ``UVCC_FUZZ_SEED`` others, ``UVCC_KILL_GROUPS`` more groups at once.
    """
    random_ = random.Random(seed := int(os.environ.get("UVCC_FUZZ_SEED", "19")))
    took = {FIRST: 0.0, **_undisturbed(groups[0])}
    print({name: round(s, 1) for name, s in took.items()}, flush=True)
    names = list(took)
    count = int(os.environ.get("UVCC_KILLS", "50"))
    moments = [Moment(n, random_.randrange(3), names[n % len(names)], random_.random()) for n in range(count)]
    struck: Counter[str] = Counter()
    wrong = []

    def take(k: int) -> None:
        for at in moments[k::GROUPS]:
            try:
                where, codes = _struck(groups[k], at, took[at.stage])
            except Exception as e:  # noqa: BLE001 - the other moments are tried all the same
                wrong.append((seed, at, e))
                print(f"{at}: {e}", flush=True)
                continue
            struck[where] += 1
            print(f"{at.number}: P{at.victim} in {where} (meant {at.stage} at {at.part:.2f}), {codes}", flush=True)
        _undisturbed(groups[k])  # at the end all three can still train together

    with ThreadPoolExecutor(GROUPS) as pool:
        list(pool.map(take, range(GROUPS)))
    print(dict(struck), flush=True)
    assert wrong == []
    for domains in groups:
        for n, user in enumerate(domains.users):
            theirs = [TOKENS[m].encode() for m in range(3) if m != n]
            assert not [path for path, data in everything(user.home) if any(secret in data for secret in theirs)]
