"""Shared fixtures: every test gets its own data folder, so that no test sees the user's runs."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same cases in every run, with no clock over them; UVCC_EXPLORE=1 looks for new ones.
settings.register_profile("uvcc", derandomize=not os.environ.get("UVCC_EXPLORE"), database=None, deadline=None)
settings.load_profile("uvcc")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UVCC_STRICT", "1")  # errors that may be the program's own are raised, not counted

# Hundreds of processes are started from this checkout: they compile it once, not each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ("skiplist", "rewritten", "stories_first", "preloaded")


# Thousands of collected tests live until the end: the garbage collector need not look at them each time.
gc.disable()
GARBAGE = 50_000  # new objects until the collector looks for cycles


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # it has workers, and collects nothing itself


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
    # what is frozen does not count as old, so that full collections were due again and again
    gc.set_threshold(GARBAGE, 10, 10)


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "uvcc-home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    return


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own for local pods, with a short path: their sockets lie below it.

    Pods of a name are looked for wherever local pods lie, so tests beside each other must not share that place.
    """
    folder = Path(tempfile.mkdtemp(prefix="uk", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
