"""Shared fixtures: every test gets its own data folder, so that no test sees the user's runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UVCC_STRICT", "1")  # errors that may be the program's own are raised, not counted

pytest_plugins = ("skiplist",)


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "uvcc-home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return
