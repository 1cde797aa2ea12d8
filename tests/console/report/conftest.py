"""A finished run, made once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from package_run import Package, copy_of, make_home
from real_runs import shared
from report_run import RUN, make_run

from uvcc_console.core import paths


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / RUN
    make_run(folder)
    return folder


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / RUN)
    return tmp_path / RUN


@pytest.fixture(scope="session")
def made_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("package") / "home")


@pytest.fixture
def package(made_package: Path, tmp_path: Path) -> Package:
    """A sealed run in this test's own data folder."""
    return copy_of(made_package, tmp_path / "uvcc-home")


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return shared(tmp_path_factory)


@pytest.fixture
def clean(real_runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run without faults, over direct links, with two ranks a party."""
    return _copy(real_runs["clean"], tmp_path)


@pytest.fixture
def faulty(real_runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the run over a relay under injected faults."""
    return _copy(real_runs["faulty"], tmp_path)


def _copy(run_dir: Path, to: Path) -> Path:
    """The run, and the key of the installation that signed its manifest, in this test's own data folder."""
    shutil.copytree(run_dir.parent.parent / "config", paths.config_dir(), dirs_exist_ok=True)
    shutil.copytree(run_dir, to / run_dir.name, copy_function=shutil.copy2)
    return to / run_dir.name
