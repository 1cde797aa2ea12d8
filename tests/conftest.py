"""Shared fixtures: every test gets its own data folder, so that no test sees the user's runs."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# The same cases in every run, with no clock over them or over how they are made; UVCC_EXPLORE=1 looks for new ones.
settings.register_profile(
    "uvcc",
    derandomize=not os.environ.get("UVCC_EXPLORE"),
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("uvcc")
# Among the cases would be numbers and texts from our sources, of whichever of them happen to be imported.
providers._get_local_constants = lambda: providers._local_constants

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("UVCC_STRICT", "1")  # errors that may be the program's own are raised, not counted

# Hundreds of processes are started from this checkout: they compile it once, not each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# what shifts leaves out, stories_first does not deal to anybody: both come last, in this order
pytest_plugins = ("skiplist", "rewritten", "compiled", "shifts", "units", "stories_first", "preloaded")


# Thousands of collected tests live until the end: the garbage collector need not look at them each time.
gc.disable()
GARBAGE = 50_000  # new objects until the collector looks for cycles


LONG_ID = 100  # characters of a text that a test is named after


def pytest_make_parametrize_id(val: object) -> str | None:
    """A long text is named by its beginning and its length: pytest's workers tell each other the names of all tests."""
    if isinstance(val, str | bytes) and len(val) > LONG_ID:
        return f"{ascii(val[:LONG_ID])[:LONG_ID]}... of {len(val)}"
    return None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()  # it has workers, and collects nothing itself


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    # what is frozen does not count as old, so that full collections were due again and again
    gc.set_threshold(GARBAGE, 10, 10)


_folders = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which to find a free name looks through the folders of all tests before it."""
    name = re.sub(r"\W", "_", request.node.name)[:25]
    return tmp_path_factory.mktemp(f"{name}-{next(_folders)}", numbered=False)


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "uvcc-home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
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
