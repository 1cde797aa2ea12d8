"""A finished run, made once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
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
