"""What the verbs print stays within 80 columns, broken between words; only paths, hashes and keys may be longer."""

from __future__ import annotations

import re

import pytest
from package_run import Package

from uvcc_console.cli import common
from uvcc_console.cli.main import main

EDGE = 80
_LONG_WORD = re.compile(r"\S{40,}")  # a path, a hash, a key


def _too_wide(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > EDGE and not _LONG_WORD.search(line)]


def _words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("wide", [EDGE, 50])
@pytest.mark.parametrize(
    "argv",
    [
        *("status", "verify", "handoff", "teardown", "halt", "compare LAST"),
        *(
            "runs -",
            "doctor -",
            "profiles -",
            "config -",
            "paths -",
            "costs -",
            "docs - --list",
            "plan - demo --no-rehearsal",
        ),
        *("docs - --search halt", "proposals -", "status - nothing-like-it", "docs - --plain runbooks/index"),
    ],
)
def test_a_verb_prints_the_same_words_within_the_width(
    argv: str, wide: int, package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *more = argv.split()
    run = package.run_dir.name
    args = more[1:] if more[:1] == ["-"] else [run, *(run if word == "LAST" else word for word in more)]
    monkeypatch.delenv("COLUMNS", raising=False)
    code = main([verb, *args])
    whole = capsys.readouterr()
    monkeypatch.setenv("COLUMNS", str(wide))
    assert main([verb, *args]) == code
    found = capsys.readouterr()
    assert found.out + found.err != ""
    if wide == EDGE:
        assert _too_wide(found.out + found.err) == []
    if verb not in ("doctor", "handoff"):  # the one measures the machine, the other says when it looked
        assert _words(found.out + found.err) == _words(whole.out + whole.err)


def test_what_a_program_takes_is_not_broken(
    package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for argv in (["profiles", "show", "demo"], ["completion", "bash"]):
        assert main(argv) == 0
        assert any(len(line) > 20 for line in capsys.readouterr().out.splitlines())
    common.show("one two three four five six seven eight nine ten")
    assert len(capsys.readouterr().out.splitlines()) == 3
