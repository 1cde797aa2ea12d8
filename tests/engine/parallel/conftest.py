"""Fleets of real workers on this machine, forked from one process that has everything imported."""

from __future__ import annotations

import pytest

from uvcc_engine.bench.launch.fleet import Fleet, Forker


@pytest.fixture(scope="module")
def whole(forker: Forker, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A run of the module's ``JOB`` on its ``SIZE`` that nothing disturbed: what the others are held against."""
    fleet = Fleet(tmp_path_factory.mktemp("whole") / "fleet", forker, request.module.JOB, request.module.SIZE)
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    return fleet
