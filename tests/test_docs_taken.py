"""A benchmark's rows are kept whole, or nothing is: what goes wrong is one line with its cure."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.make import taken  # noqa: E402


def _printing(tmp_path: Path, text: str, code: int = 0) -> str:
    program = tmp_path / "bench"
    program.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\nexit {code}\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(taken, "FOLDER", tmp_path / "kept")
    return tmp_path / "kept"


def test_the_rows_of_a_command_are_kept_with_where_they_were_taken(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken.main(["mine", _printing(tmp_path, '[{"name": "a"}]'), "--runs", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "mine.json")
    kept = json.loads((folder / "mine.json").read_text())
    assert (kept["command"], kept["rows"]) == ("bench --runs 3", [{"name": "a"}])
    assert {"processor", "commit", "load"} <= kept.keys()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [("", 3, "ended with 3"), ("no rows", 0, "printed no JSON"), (None, 0, "cannot run nosuch: No such file")],
)
def test_a_command_that_gives_no_rows_is_told_in_one_line(
    text: str | None, code: int, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken.main(["mine", "nosuch" if text is None else _printing(tmp_path, text, code)]) > 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert not folder.exists()


@pytest.mark.parametrize("argv", [[], ["mine"], ["--help"]])
def test_without_a_name_and_a_command_it_says_what_it_takes(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken.main(argv) == 2
    assert capsys.readouterr().err.startswith("usage: ")
