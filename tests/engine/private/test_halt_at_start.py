"""A halt before the first step, which each worker finds when it next looks: who finds it late halts all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_kit import PARTIES, Fleet, Zygote, direct_links

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.contract.run_files.control import HALT, HaltRequest, write_halt
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.transcript.leaves.roots import sid_of
from uvcc_engine.worker.consensus import StepConsensus

JOB = PrivateJob(steps=1, batch=8, test_rows=20, model="logistic-digits")


@contextlib.contextmanager
def one_that_is_halted(fleet: Fleet, folder: Path) -> Iterator[None]:
    """P1, there before the others: it hears of P0, tells that a halt ended it before the first step, and P0 has that
    when this is left; or P0 was quicker and has left by itself."""
    coord = Coord(0, 1, 0, 0)
    plane = open_plane(
        party=1,
        coord=str(coord),
        sid_sub=sid_of(fleet.policy.sid_job, coord),
        identity=PARTIES[1],
        peers=fleet.policy.peers(1, 0),
        link=LinkSpec.from_json(fleet.links[1] | {"close_s": 500.0, "first_contact_s": 500.0}),
        recorder=None,
        state_dir=folder,
        on_event=lambda name, fields: None,
    )
    try:
        yield
        while not (fleet.dir(0) / "exit.json").exists():
            try:
                plane.recv_control(0, 1.0)  # its first word
            except TimeoutError:
                continue
            StepConsensus(plane, fleet.run).tell_stopped(UvccError("halted before the first step"), halted=True)
            plane.close()
            break
    finally:
        plane.close(graceful=False)


@pytest.mark.parametrize("early", [True, False], ids=["its own request is there", "its own request comes later"])
def test_a_peer_that_was_halted_first_is_not_why_this_one_ends(zygote: Zygote, tmp_path: Path, early: bool) -> None:
    fleet = Fleet(tmp_path, zygote, JOB, direct_links())
    with one_that_is_halted(fleet, tmp_path):  # who is asked already leaves after a second
        fleet.launch(only=(0,), halt=HALT if early else "")
    if not early:
        write_halt(fleet.dir(0), HaltRequest(HALT, "n1", fleet.run))
    assert fleet.wait() == [0], fleet.exit(0)
    assert (fleet.exit(0)["status"], fleet.exit(0)["step"]) == ("halted", 0)
