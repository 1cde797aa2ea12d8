"""The benchmark of packing makes a run that both verifiers accept. Its figures are quoted, never tested."""

from __future__ import annotations

import pytest

from uvcc_console.bench import packing


@pytest.mark.ci("tests/console/report/test_archive.py")
def test_a_run_is_made_packed_and_verified_by_both() -> None:
    rows = {r.name: r for r in packing.bench(1, workers=6)}
    assert rows["package_workers"].value == 6
    assert rows["package_build"].value > 0 < rows["package_standalone"].value
    assert 0 < rows["package_size"].value < 50


def test_the_grid_has_as_many_workers_as_were_asked_for() -> None:
    assert [packing.topology_of(n).workers for n in (1, 3, 6, 12, 24, 192)] == [3, 3, 6, 12, 24, 192]
