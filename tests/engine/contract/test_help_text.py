"""Help texts stay within the terminal: those of both programs, and what becomes of a long one."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Final

import pytest

from uvcc_console.cli import main as console
from uvcc_engine import cli as engine
from uvcc_engine.contract.machine.help_text import HelpFormatter, filled
from uvcc_engine.transcript.proof import standalone_verify

EDGE: Final = 80


def _too_long(said: dict[str, str]) -> list[str]:
    return [f"{name}: {line}" for name, text in said.items() for line in text.splitlines() if len(line) > EDGE]


def test_the_help_of_both_programs_and_of_a_packages_verifier_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(EDGE))
    said = {"uvcc": console.usage()}
    for name, argv in {"uvcc-engine": ["--help"], "uvcc-engine bench": ["bench", "--help"]}.items():
        with pytest.raises(SystemExit) if argv == ["--help"] else pytest.MonkeyPatch.context():
            engine.main(argv)
        said[name] = capsys.readouterr().out
    alone = [sys.executable, "-I", standalone_verify.__file__, "--help"]
    said["verify.py"] = subprocess.run(alone, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert all(len(text.splitlines()) > 2 for text in said.values())
    assert _too_long(said) == []


def test_a_wide_terminal_keeps_every_verb_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = console.usage().splitlines()
    assert all(
        any(line.split() == [verb, *about.does.split()] for line in lines) for verb, about in console.VERBS.items()
    )


def test_paragraphs_and_entries_stay_apart() -> None:
    text = "One two three\nfour five.\n\ncodes:\n  0  all of it holds\n  1  no\n"
    assert filled(text, 14).splitlines() == [
        *("One two three", "four five.", "", "codes:"),
        *("  0  all of it", "     holds", "  1  no"),
    ]


def test_a_usage_is_broken_between_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    parser = argparse.ArgumentParser(prog="tool", formatter_class=HelpFormatter)
    group = parser.add_mutually_exclusive_group()
    for name in ("--archive", "--unpack", "--delete", "--list"):
        group.add_argument(name, metavar="RUN")
    usage = parser.format_help().partition("\n\n")[0]
    assert len(usage.splitlines()) > 1
    assert max(map(len, usage.splitlines())) <= 40
    assert " ".join(usage.split()) == ("usage: tool [-h] [--archive RUN | --unpack RUN | --delete RUN | --list RUN]")


def test_a_packages_verifier_breaks_no_word_at_a_terminals_edge(tmp_path: Path) -> None:
    long = tmp_path / "a folder of many words" / "and of words that stand at the very edge of a narrow terminal"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 48, 0, 0))
    command = [sys.executable, "-I", standalone_verify.__file__, str(long)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(ours, 4096):
                said += part
    os.close(ours)
    assert process.returncode == 2
    lines = said.decode().splitlines()
    assert all(len(line) <= 48 or " " not in line.strip() for line in lines)
    plain = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr
    assert (len(lines) > 2, plain.count("\n")) == (True, 1)
    assert [word for line in lines for word in line.split()] == plain.split()
