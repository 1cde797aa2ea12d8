"""What cannot be written is told with its place and a cure, and leaves no half of a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from uvcc_console.report.figures import write_figures
from uvcc_console.report.handoff import write_handoff
from uvcc_console.report.logbundle import write_bundle
from uvcc_engine.contract.errors import UvccError

WRITERS: list[Callable[[Path, Path | None], object]] = [write_figures, write_handoff, write_bundle]


@pytest.mark.parametrize("write", WRITERS)
def test_artifacts_that_are_no_folder_are_told(write: Callable[[Path, Path | None], object], run_dir: Path) -> None:
    shutil.rmtree(run_dir / "artifacts")
    (run_dir / "artifacts").write_text("mine")
    with pytest.raises(UvccError, match=r"cannot write .*artifacts"):
        write(run_dir, None)
    assert (run_dir / "artifacts").read_text() == "mine"


@pytest.mark.parametrize("write", WRITERS)
def test_a_place_that_cannot_be_written_is_told(
    write: Callable[[Path, Path | None], object], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(UvccError, match=r"cannot write .*notes"):
        write(run_dir, tmp_path / "notes" / "out")
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("write", [write_handoff, write_bundle])
def test_a_folder_in_place_of_a_file_is_told(
    write: Callable[[Path, Path | None], object], run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UvccError, match=r"cannot write .*out: Is a directory"):
        write(run_dir, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out"]
