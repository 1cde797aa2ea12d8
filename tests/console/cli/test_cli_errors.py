"""Every verb tells an error that ends it in the same form, made in one place; with ``--json`` as an object, too."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ui"))
from ui_journals import Story

import uvcc_console.cli as cli
from uvcc_console.cli import common
from uvcc_console.cli.main import VERBS, main, module_of
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.runs import keeping
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError, UvccError

FILES = sorted(Path(cli.__path__[0]).rglob("*.py"))
ALL = sorted(VERBS)
OF_A_RUN = [
    *("attach", "bundle", "figures", "halt", "handoff", "logs", "package", "pod", "replay", "resume", "serve"),
    *("status", "teardown", "tensorboard", "top", "watch"),
]


def takes(verb: str) -> list[argparse.Action]:
    return common.parser_of(module_of(verb).run)._actions


def has_json(verb: str) -> bool:
    return any("--json" in action.option_strings for action in takes(verb))


@pytest.mark.parametrize("verb", ALL)
def test_wrong_usage_is_told_in_the_one_form(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--no-such-option"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.endswith(f"(see: uvcc {verb} --help)\n")
    assert said.err.count("\n") == 1
    if has_json(verb):
        assert main([verb, "--json", "--no-such-option"]) == 2
        again = capsys.readouterr()
        assert again.err == said.err
        told = json.loads(again.out)
        assert told == {"error": told["error"], "hint": f"see: uvcc {verb} --help", "exit_code": 2}
        assert again.err == f"error: {told['error']} ({told['hint']})\n"


def test_the_verbs_of_a_run_are_those_that_take_one() -> None:
    of_a_run = {verb for verb in ALL for action in takes(verb) if action.dest == "run" and not action.option_strings}
    assert of_a_run - set(OF_A_RUN) == set()


def sub_verbs() -> list[tuple[str, str]]:
    choices = [(verb, action.choices) for verb in ALL for action in takes(verb) if action.nargs == argparse.PARSER]
    return [(verb, name) for verb, names in choices for name in names or ()]


def test_wrong_usage_of_a_sub_verb_is_told_in_the_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert {verb for verb, _ in sub_verbs()} == {"data", "domain", "infer", "owner"}
    for verb, name in sub_verbs():
        assert main([verb, name, "--no-such-option"]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err[:7], said.err.count("\n")) == ("", "error: ", 1), (verb, name)


@pytest.mark.parametrize("verb", OF_A_RUN)
def test_a_run_that_is_not_there_is_told_in_the_one_form(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["stackdump"] if verb == "pod" else []
    json_too = ["--json"] if has_json(verb) else []
    assert main([verb, "nothing-like-it", *more, *json_too]) == 2
    said = capsys.readouterr()
    assert said.err == "error: there are no runs yet (start one with: uvcc demo)\n"
    if json_too:
        assert json.loads(said.out) == {
            "error": "there are no runs yet",
            "hint": "start one with: uvcc demo",
            "exit_code": 2,
        }


@pytest.mark.parametrize("verb", OF_A_RUN)
def test_runs_that_were_packed_away_are_told_of(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With no other run here, by a run's name, its beginning, and another's."""
    more = ["stackdump"] if verb == "pod" else []
    for run in ("demo-20261121-0115-ab12", "demo-20261121-0116-cd34"):
        Story(steps=5).finished().write(paths.run_dir(run))
        keeping.archive(paths.run_dir(run))
    said = {}
    for name in ("last", "demo-20261121-0115-ab12", "demo-20261121-0116", "demo"):
        assert main([verb, name, *more]) == 2
        said[name] = capsys.readouterr().err
    none = "error: there are no runs here: 2 runs were packed away ("
    assert said["last"] == f"{none}see: uvcc runs --archived; uvcc runs --unpack RUN brings one back)\n"
    for name, run in (("demo-20261121-0115-ab12", ""), ("demo-20261121-0116", "-cd34")):
        assert said[name] == f"{none}{name}{run} was packed away: uvcc runs --unpack {name}{run} brings it back)\n"
    assert said["demo"] == f"{none}2 that begin so were packed away: uvcc runs --archived)\n"


def test_one_that_was_packed_away_beside_others_too(capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("demo-20261121-0115-ab12", "other-20261121-0116-cd34"):
        Story(steps=5).finished().write(paths.run_dir(run))
    keeping.archive(paths.run_dir("demo-20261121-0115-ab12"))
    assert main(["status", "demo"]) == 2
    packed = "demo-20261121-0115-ab12 was packed away: uvcc runs --unpack demo-20261121-0115-ab12 brings it back"
    assert capsys.readouterr().err == f"error: no run 'demo' here ({packed})\n"
    keeping.archive(paths.run_dir("other-20261121-0116-cd34"))
    assert main(["runs"]) == 0
    assert capsys.readouterr().err.startswith("there are no runs here: 2 runs were packed away; see: uvcc runs --arch")


def test_a_damaged_byte_of_a_run_that_was_packed_away_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    run = "demo-20261121-0115-ab12"
    Story(steps=5).finished().write(paths.run_dir(run))
    keeping.archive(paths.run_dir(run))
    packed = paths.data_dir() / keeping.ARCHIVES / f"{run}.tar.gz"
    whole = packed.read_bytes()
    for at in range(200, len(whole) - 20, len(whole) // 40):
        packed.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        assert main(["runs", "--unpack", run]) == 2
        assert capsys.readouterr().err.startswith("error: cannot unpack ")
    begins = whole.index(b"\0", 10) + 1 if whole[3] & 8 else 10  # behind the name of the file, if there is one
    packed.write_bytes(whole[:begins] + b"\x07" + whole[begins + 1 :])  # a kind of block that there is not
    assert main(["runs", "--unpack", run]) == 2
    assert "decompressing data" in capsys.readouterr().err
    packed.write_bytes(whole)
    assert main(["runs", "--unpack", run]) == 0


def test_an_unknown_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stauts", "--json"]) == 2
    said = capsys.readouterr()
    assert said.err == "error: unknown verb 'stauts' (did you mean status?)\n"
    assert json.loads(said.out)["hint"] == "did you mean status?"


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("a \x1b[2Jkey"), 2), (UvccError("b", "c"), 1), (ProtocolError("d"), 1)]
)
def test_whatever_a_verb_raises_ends_there(
    error: UvccError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(_: list[str]) -> int:
        raise error

    monkeypatch.setattr("uvcc_console.cli.view.runs.run", raises)
    assert main(["runs", "--json"]) == code
    said = capsys.readouterr()
    assert said.err == f"error: {error}\n"
    assert "\x1b" not in said.err + said.out
    assert json.loads(said.out) == {"error": error.what, "hint": error.hint, "exit_code": code}


def test_a_file_that_may_not_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run has many files, of other users, too, if somebody copied it as root."""

    def barred(_: list[str]) -> int:
        raise PermissionError(13, "Permission denied", "/runs/a\x1b[2J/artifacts/full")

    monkeypatch.setattr("uvcc_console.cli.view.runs.run", barred)
    assert main(["runs", "--json"]) == 2
    said = capsys.readouterr()
    hint = "look whose it is, and who may read and write it"
    assert said.err.startswith("error: cannot use /runs/a")
    assert said.err.endswith(f"/artifacts/full: Permission denied ({hint})\n")
    assert "\x1b" not in said.err
    assert json.loads(said.out)["hint"] == hint


def test_a_run_s_folder_that_may_not_be_entered_is_told_as_its_journal_s_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def barred(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", barred)
    with pytest.raises(UnreadableError, match=r"journal\.sqlite: Permission denied"):
        Journal(tmp_path / "journal.sqlite", readonly=True)


def test_no_verb_tells_an_error_by_itself() -> None:
    """A verb raises; what it says on standard error without ending is a note. Wrong usage is never only returned."""
    for path in FILES:
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        telling = [text for text in texts if isinstance(text, str) and text.startswith("error: ")]
        assert bool(telling) == (path.name == "common.py"), path
        returned = [
            node.value.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
        ]
        assert "USAGE" not in returned or path.name == "console.py", path  # there the usage itself is shown


@pytest.mark.parametrize("verb", [verb for verb in OF_A_RUN if verb != "pod"])  # its first word is what to do there
def test_a_run_without_a_name_is_none_though_every_name_begins_so(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``uvcc teardown "$RUN"`` of a script that had not set it ended the only run that was there."""
    Story().full(1).write(paths.run_dir("only"))
    assert main([verb, ""]) == 2
    assert "the name of the run is empty" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["replay", "plan", "rollout", "status"])
def test_a_name_that_no_file_can_have_is_an_unknown_one(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "x" * 5000]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
