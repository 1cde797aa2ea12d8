"""Real workers on this machine, forked from one process that has everything imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from uvcc_engine.bench.launch.fleet import Forker


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    from warm_kit import WarmForker  # only where workers are wanted: it imports torch

    made = WarmForker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def quick_triton() -> Iterator[None]:
    """Kernels in Triton's interpreter cost less, and give the same."""
    from quick_triton import hastened  # only where it is installed, and asked to interpret

    with hastened():
        yield
