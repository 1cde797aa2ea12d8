"""Blows at random moments of whole rollouts: whatever falls, nothing is left, nothing foreign is touched, and each run
ends well or with a reason.

``UVCC_CHAOS`` sets how many blows the slow test deals; ``chaoslife.py`` is the same as a command, with a table.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from chaoslife import KINDS, blows, run, table

BLOWS = int(os.environ.get("UVCC_CHAOS", "24"))
SEED = int(os.environ.get("UVCC_CHAOS_SEED", "20261122"))


def test_blows_are_of_every_kind_and_the_same_for_a_seed() -> None:
    dealt = [b for n in range(200) for b in blows(random.Random(n), 4)]
    assert set(Counter(b.kind for b in dealt)) == set(KINDS)
    assert blows(random.Random(7), 6) == blows(random.Random(7), 6)
    assert all(b.for_s > 0 for b in dealt if b.kind.startswith("freeze"))


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_rollouts_under_blows_end_with_nothing_left(short: Path) -> None:
    lives = await run(BLOWS, SEED, 2, short, lambda line: sys.stderr.write(line + "\n"))
    sys.stderr.write(table(lives) + "\n")
    assert [w for life in lives for w in life.wrong] == []
    assert sum(len(life.fallen) for life in lives) >= BLOWS // 3  # most of them before a run is over
