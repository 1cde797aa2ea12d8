from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import Pod, pod_at


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with pod_at(tmp_path / "pod") as made:
        yield made
