"""Workers as real processes, forked from one that has everything imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from private_kit import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    from private_kit import Zygote  # only where workers are wanted: it imports torch

    made = Zygote()
    yield made
    made.close()
