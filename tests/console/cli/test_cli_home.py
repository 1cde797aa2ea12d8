"""A data folder that is none, or that cannot be listed, is told with its path and the cure: it has no "no runs yet"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_errors import OF_A_RUN

from uvcc_console.cli.main import main
from uvcc_console.core import paths
from uvcc_console.ui.feed import home_model
from uvcc_engine.contract.errors import UnreadableError

OF_ALL_RUNS = [
    ["runs"],
    ["runs", "--archived"],
    ["costs"],
    ["pods"],
    ["paths"],
    ["domain", "open", "--party", "0"],
    ["profiles"],
    ["config"],
]


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What ``UVCC_HOME`` names, and is a file."""
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    monkeypatch.setenv("UVCC_HOME", str(path))
    return path


@pytest.mark.parametrize("words", [*OF_ALL_RUNS, *([verb] for verb in OF_A_RUN)], ids=" ".join)
def test_a_home_that_is_a_file_is_told_by_every_verb(
    words: list[str], no_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["last", "stackdump"] if words == ["pod"] else []
    assert main([*words, *more]) == 2
    said = capsys.readouterr()
    what, hint = f"UVCC_HOME names {no_folder}: it is no folder", "set UVCC_HOME to a folder, or to what may become one"
    assert (said.out, said.err) == ("", f"error: {what} ({hint})\n")
    assert no_folder.read_text() == "mine"


def test_with_json_as_an_object_too(no_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--json"]) == 2
    assert str(no_folder) in json.loads(capsys.readouterr().out)["error"]


def test_the_doctor_names_it_and_goes_on(no_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert f"x data folder  UVCC_HOME names {no_folder}: it is no folder" in said
    assert "+ memory" in said or "! memory" in said
    assert "! disk         not looked at: there is no data folder" in said


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda home: home.symlink_to("nothing"), "it is a link to nothing"),
        (lambda home: home.symlink_to(home), "Too many levels of symbolic links"),
    ],
)
def test_a_link_that_leads_nowhere_is_no_home(
    made: object, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert callable(made)
    made(tmp_path / "home")
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    with pytest.raises(UnreadableError, match=why):
        paths.run_folders()


def test_what_lies_in_a_home_and_is_no_folder_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    paths.ensure(paths.data_dir())
    (paths.data_dir() / "runs").write_text("")
    assert main(["runs"]) == 2
    assert f"cannot use {paths.data_dir()}/runs: it is no folder" in capsys.readouterr().err


def test_runs_that_may_not_be_listed_are_not_no_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths.ensure(paths.runs_dir())

    def barred(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", barred)
    assert main(["runs"]) == 2
    assert f"cannot list {paths.runs_dir()}: Permission denied" in capsys.readouterr().err


def test_a_console_whose_home_went_away_shows_no_runs(no_folder: Path) -> None:
    assert home_model.find_runs({}) == []


def test_a_home_that_is_not_there_yet_has_no_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "a" / "b"))
    assert paths.run_folders() == []


@pytest.mark.parametrize(("home", "found"), [("data", "{here}/data"), ("~/data", "{here}/user/data")])
def test_a_home_means_the_same_to_processes_that_work_elsewhere(home: str, found: str, tmp_path: Path) -> None:
    """A run's conductor and sidecar work in its folder: a relative home was another one there, and they died."""
    code = "from uvcc_console.core import paths; import os; os.chdir('/'); print(paths.data_dir())"
    env = {**os.environ, "UVCC_HOME": home, "HOME": str(tmp_path / "user")}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, text=True, capture_output=True, check=True
    )
    assert said.stdout == f"{found.format(here=tmp_path)}\n"


def test_a_process_whose_folder_is_gone_finds_its_home_all_the_same(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from uvcc_console.cli.main import main; sys.exit(main(['runs']))"
    folder = tmp_path / "gone"
    folder.mkdir()
    env = {**os.environ, "UVCC_HOME": "data"}
    said = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, text=True, capture_output=True)
    assert (said.returncode, said.stderr) == (0, "there are no runs yet; start one with: uvcc demo\n")
