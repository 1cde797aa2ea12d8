"""A worker's ``train`` called in this process must leave signals and the allocator as they were."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator

import pytest

from uvcc_engine.train import worker


@pytest.fixture(autouse=True)
def _as_a_guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worker, "keep_memory", lambda: False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    faulthandler.unregister(signal.SIGUSR1)
