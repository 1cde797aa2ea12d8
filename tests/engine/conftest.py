"""Real workers on this machine, forked from one process that has everything imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from uvcc_engine.bench.launch.fleet import Forker


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    from uvcc_engine.bench.launch.fleet import Forker  # only where workers are wanted: it imports torch

    made = Forker(tmp_path_factory.mktemp("forker"))
    yield made
    made.close()
