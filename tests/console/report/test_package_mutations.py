"""Thousands of falsifications of all that a finished run hands over: none is accepted, none ends in a traceback."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from package_mutations import Mutations
from package_run import Package, copy_of

SAMPLE = int(os.environ.get("UVCC_PACKAGE_MUTATIONS", "120"))
MANY = 10_000
SLOWEST_S = 40.0  # of the processor, for one: ends what grows without bound, and judges no machine


def against(package: Package, seed: int) -> Mutations:
    words = [str(package.run_dir), "--allowed-signers", str(package.signers)]
    return Mutations(package.artifacts, words, random.Random(seed))


def test_a_sample_of_falsified_packages(package: Package) -> None:
    tried = against(package, 1)
    tried.run(SAMPLE)
    assert len(tried.tried) >= 10, tried.tried
    assert tried.slowest < SLOWEST_S


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_falsified_packages(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    """``UVCC_PACKAGE``: the folder (in a data folder) of a finished run to use in place of the rehearsed one."""
    given = os.environ.get("UVCC_PACKAGE")
    if given:
        shutil.rmtree(package.run_dir.parent.parent)
        package = copy_of(Path(given), package.run_dir.parent.parent)
    tried = against(package, 2)
    began = time.monotonic()
    tried.run(MANY)
    assert tried.slowest < SLOWEST_S
    with capsys.disabled():
        print(f"\n{sum(tried.tried.values())} refused in {time.monotonic() - began:.0f} s: {dict(tried.tried)}")
