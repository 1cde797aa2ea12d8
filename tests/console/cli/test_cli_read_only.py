"""A disk that takes no writes refuses to remove, too, even what is not there: that ends nothing that can go on."""

from __future__ import annotations

import errno
import json
import sys
import tarfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import RUN, Story

from uvcc_console.cli.main import main
from uvcc_console.core import paths
from uvcc_console.fleet.runclock import FILE, RunClock
from uvcc_console.report.archive import pack_folder
from uvcc_console.runs import keeping
from uvcc_console.runs.processes import CONDUCTOR, write_record
from uvcc_console.runs.sweep import ORPHAN, fate_of
from uvcc_engine.contract.errors import UvccError

BORN = 1_795_000_000.0


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, with a clock of before this machine was started, on a disk that has become read-only."""
    folder = Story(steps=5).finished().write(paths.runs_dir() / RUN)
    (folder / FILE).write_text(json.dumps({"boot": "earlier", "up": 5.0, "at": BORN, "last": BORN}))
    (folder / f"{CONDUCTOR}.json").write_text('{"pid": 1, "starttime": 1}')  # whoever that was, it is dead
    (paths.data_dir() / keeping.ARCHIVES).mkdir()

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("write_text", "write_bytes", "unlink", "replace", "mkdir", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(tarfile, "open", refuse)
    return folder


def test_a_sweep_judges_pods_all_the_same(run_dir: Path) -> None:
    """It ended in a traceback of the run's clock, and nothing was swept."""
    assert fate_of(f"uvcc-{RUN}-p0r0") == ORPHAN
    assert main(["pods", "--sweep"]) == 0


def test_a_runs_clock_goes_on(run_dir: Path) -> None:
    assert RunClock(run_dir).now() >= BORN


def test_a_conductor_is_what_it_is(run_dir: Path) -> None:
    write_record(run_dir, CONDUCTOR)


def test_what_cannot_be_packed_is_one_error_in_words(run_dir: Path) -> None:
    with pytest.raises(UvccError, match="Read-only file system"):
        keeping.archive(run_dir)
    with pytest.raises(UvccError, match="cannot write"):
        pack_folder(run_dir, RUN, run_dir.parent / "no-such-folder" / "p.zip", "zip")
