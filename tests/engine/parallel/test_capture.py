"""What crosses between one party's machines, recorded from the cable: no word of a share; in clear, every one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns_kit
import numpy as np
import pytest
import torch
from netns_kit import ADDRESSES, CABLE, Machines, found_in, streams
from parallel_kit import run_ranks

from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.contract.errors import PeerLostError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.parallel.groups import PartyGroups

PAIR = Topology(2)
COUNT = 5000
NOTE = b"a note of sixteen and more bytes"
_SPY = """
import os
import torch
from uvcc_engine.parallel.group import Communicator


def spy(name):
    real = getattr(Communicator, name)

    def call(self, x, *rest):
        if self.name == "dp" and self.size > 1 and x.dtype == torch.int64:
            flat = x.detach().reshape(-1)
            with open(os.path.join(os.environ["UVCC_TEST_WORDS"], str(os.getpid())), "ab") as out:
                out.write(flat[:: max(1, len(flat) // 32)].numpy().tobytes())
        return real(self, x, *rest)

    setattr(Communicator, name, call)


for name in ("sum_", "sum_slices", "gather"):
    spy(name)
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with netns_kit.two_machines() as found:
        yield found


def planted(rank: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).integers(-(2**63), 2**63, COUNT, dtype=np.int64))


def words_of(x: torch.Tensor) -> list[bytes]:
    return [word.tobytes() for word in x.numpy()[::50]]


def shared(groups: PartyGroups, events: Any) -> list[int]:
    """Every way in which ranks of two replicas tell each other something."""
    rank = groups.place.rank
    groups.start_dp()
    total = groups.dp.sum_(planted(rank))
    part = groups.dp.sum_slices(planted(rank))()
    every = torch.stack(groups.dp.gather(planted(rank)))
    first = groups.dp.broadcast_(planted(rank), 0)
    groups.gather(NOTE)
    return [int(x.sum()) for x in (total, part, every, first)]


PLANTED = words_of(planted(0)) + words_of(planted(1))


def test_a_capture_of_the_cable_between_two_machines_shows_no_word_of_a_share(machines: Machines) -> None:
    with machines.recorded(0, CABLE[0]) as packets:
        sealed = run_ranks(PAIR, shared, sealed=True, address=ADDRESSES[0], enter=machines.enter)
    carried = streams(packets)
    assert sum(map(len, carried)) > 5 * 8 * COUNT  # all of it crossed here
    assert found_in([*PLANTED, NOTE], carried) == 0
    with machines.recorded(0, "lo") as packets:  # one machine, gloo, no keys: the same in clear
        os.environ["UVCC_GROUP_BACKEND"] = "gloo"
        try:
            clear = run_ranks(PAIR, shared, enter=lambda rank: machines.enter(0))
        finally:
            del os.environ["UVCC_GROUP_BACKEND"]
    assert clear == sealed
    assert found_in([*PLANTED, NOTE], streams(packets)) == len(PLANTED) + 1


def test_a_cable_that_is_cut_is_told_by_both_sides_within_their_patience(machines: Machines) -> None:
    def cut(groups: PartyGroups, events: Any) -> str:
        groups._timeout_s = 8.0  # of what comes after the meeting
        groups.start_dp()
        groups.dp.sum_(planted(0))
        if groups.place.rank == 0:
            subprocess.run(["ip", "link", "set", CABLE[0], "down"], check=True)
        for _ in range(2):  # what was under way before the cut may still come
            groups.dp.sum_(planted(0))
        return "went on without a cable"

    try:
        found = run_ranks(PAIR, cut, end_gracefully=False, sealed=True, address=ADDRESSES[0], enter=machines.enter)
    finally:
        subprocess.run([*machines.within(0), "ip", "link", "set", CABLE[0], "up"], check=True)
    for error in found:
        assert isinstance(error, PeerLostError), error
        assert "dp" in error.what
        assert "timed out waiting for a member" in error.what


# -- a training on two machines ----------------------------------------------------------------------------------------

JOB = PrivateJob(steps=3, batch=8, checkpoint_every=2, test_rows=40)


def trained(folder: Path, machines: Machines, *, apart: bool) -> tuple[Fleet, list[bytes], list[bytes]]:
    """A private training of two replicas, on two machines or in clear on one: the fleet, the words of shares that its
    ranks gave to their sisters, and what the cable, or the one machine's loopback, carried."""
    hooks, words = folder / "hooks", folder / "words"
    for made in (hooks, words):
        made.mkdir(parents=True)
    (hooks / "sitecustomize.py").write_text(_SPY)
    forkers = []
    for k in range(2):
        path = os.pathsep.join(map(str, (folder / f"forker{k}" / "site", hooks)))
        env = {"PYTHONPATH": path, "UVCC_TEST_WORDS": str(words), "UVCC_GROUP_BACKEND": "" if apart else "gloo"}
        forkers.append(Forker(folder / f"forker{k}", env, within=machines.within(k if apart else 0)))
    try:
        with machines.recorded(0, CABLE[0] if apart else "lo") as packets:
            fleet = Fleet(
                folder / "fleet",
                forkers[0],
                JOB,
                PAIR,
                elsewhere={1: forkers[1]},
                meets=ADDRESSES[0] if apart else "127.0.0.1",
            )
            fleet.launch()
            assert set(fleet.wait().values()) == {0}, fleet.logs()
    finally:
        for forker in forkers:
            forker.close()
    given = np.concatenate([np.frombuffer(file.read_bytes(), np.int64) for file in words.iterdir()])
    shares = [
        word for word in {word.tobytes() for word in given} if word.count(0) < 3
    ]  # the others are no secrets: counts, and a group's test
    return fleet, shares, streams(packets)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_on_two_machines_ends_the_same_and_its_cable_shows_no_word_of_a_share(
    machines: Machines, tmp_path: Path
) -> None:
    fleet, given, carried = trained(tmp_path / "apart", machines, apart=True)
    assert len(given) > 200
    assert sum(map(len, carried)) > 8 * len(given)
    assert found_in(given, carried) == 0
    clear, given, carried = trained(tmp_path / "clear", machines, apart=False)
    assert found_in(given, carried) > 0.3 * len(given)  # of what is added up a rank sends a slice
    assert fleet.hashes() == clear.hashes()
    assert len(fleet.hashes()) == 1
