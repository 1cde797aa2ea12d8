"""A finished run, made once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from package_run import Package, copy_of, make_home
from report_run import RUN, make_run


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
