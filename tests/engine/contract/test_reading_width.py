"""Lines are broken between words, where a reader has so many columns and nowhere else."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator

import pytest

from uvcc_engine.contract.machine.reading_width import columns_of, folded, for_reader


def test_what_goes_on_begins_under_the_words_of_its_entry() -> None:
    text = """\
operated     one operator runs all three domains, and could look
short  stays as it is
- [x] `full/run.info` SHA-256 abcdefabcdefabcdefabcdef
a sentence of no entry, which is broken as well"""
    assert folded(text, 30).splitlines() == [
        "operated     one operator runs",
        "             all three",
        "             domains, and",
        "             could look",
        "short  stays as it is",
        "- [x] `full/run.info` SHA-256",
        "      abcdefabcdefabcdefabcdef",
        "a sentence of no entry, which",
        "is broken as well",
    ]


def test_a_label_that_ends_with_one_space_is_known_by_the_line_above() -> None:
    assert folded("cost     0.00 spent\noperated one operator runs all domains", 24).splitlines() == [
        "cost     0.00 spent",
        "operated one operator",
        "         runs all",
        "         domains",
    ]


def test_what_is_longer_than_a_line_stays_whole_beside_its_name() -> None:
    path, key = "/a" * 30, "ssh-ed25519 " + "A" * 40
    assert folded(f"data  {path}", 40) == f"data  {path}"
    assert folded(f"P0  local/local  {key}", 40).splitlines() == ["P0  local/local", f"    {key}"]
    assert folded("", 40) == ""
    assert folded("a   b", 20) == "a   b"


@pytest.fixture
def terminal() -> Iterator[io.TextIOWrapper]:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        os.set_blocking(ours, False)
        yield stream
    os.close(ours)


def test_the_reader_is_asked_then_the_terminal_and_a_pipe_has_none(
    monkeypatch: pytest.MonkeyPatch, terminal: io.TextIOWrapper
) -> None:
    import fcntl
    import struct
    import termios

    monkeypatch.delenv("COLUMNS", raising=False)
    fcntl.ioctl(terminal.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 62, 0, 0))
    assert columns_of(terminal) == 62
    assert columns_of(io.StringIO()) is None
    assert for_reader("a " * 100, io.StringIO()) == "a " * 100
    for asked, found in {"80": 80, "3": 20, "0": None, "-1": None, "wide": None, "": None}.items():
        monkeypatch.setenv("COLUMNS", asked)
        assert columns_of(io.StringIO()) == found
