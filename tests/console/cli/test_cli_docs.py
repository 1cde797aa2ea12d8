"""``uvcc docs`` without a terminal: plain text, lists, and what is not there."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from uvcc_console.cli.main import main
from uvcc_console.report import manual


def test_a_topic_is_printed_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "root_fork"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("## `root_fork`")
    assert "**It costs**" in said
    assert "## `side_task`" not in said


def test_the_start_page_and_the_list_name_every_part_of_the_manual(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert capsys.readouterr().out.startswith("# UVCC")
    assert main(["docs", "--list", "--json"]) == 0
    named = {p["name"] for p in json.loads(capsys.readouterr().out)}
    assert {"index", "runbooks/alerts", "reference/cli", "glossary"} <= named


def test_a_search_names_topics_that_open(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "--search", "proven gone", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    known = manual.pages()
    assert found
    for hit in found:
        manual.look_up(hit["topic"], known)
    assert main(["docs", "--search", "zyzzyva"]) == 1


def test_an_unknown_topic_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "los_nan"]) == 2
    assert "loss_nan" in capsys.readouterr().err


def test_every_section_of_the_manual_can_be_named() -> None:
    known = manual.pages()
    for page in known:
        for part in manual.sections(page):
            assert manual.look_up(part.address, known) == (page, part.anchor)


def test_the_man_page_is_printed_and_found_and_no_formatter_stumbles_over_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["man"]) == 0
    source = capsys.readouterr().out
    assert source.startswith('.\\" made by')
    assert ".TH UVCC 1" in source
    assert main(["man", "uvcc-engine", "--path"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "uvcc-engine.1"
    assert main(["man", "nothing"]) == 2
    if groff := shutil.which("groff"):
        done = subprocess.run([groff, "-man", "-ww", "-z", str(path)], capture_output=True, text=True, check=True)
        assert done.stderr == ""


def test_a_paragraph_is_broken_for_its_reader_and_not_where_the_source_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its lines but the last is as full as its words allow; as it is where nobody says a width."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["docs", "disasters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    entry = [line for line in lines if line.startswith("  ")]
    assert all(len(line) <= 60 for line in lines if "http" not in line)
    assert not any(
        len(above) + 1 + len(below.split()[0]) <= 60
        for above, below in pairwise(lines)
        if below in entry and above.strip()
    )
    monkeypatch.delenv("COLUMNS")
    assert main(["docs", "disasters"]) == 0
    assert capsys.readouterr().out.strip() == manual.look_up("disasters", manual.pages())[0].text.strip()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("one\ntwo\n\nthree\nfour", "one two\n\nthree four"),
        ("# head\nword\n- a\n  b\n- c\n1. d\n   e", "# head\nword\n- a b\n- c\n1. d e"),
        ("```sh\na\nb\n```\nc\nd", "```sh\na\nb\n```\nc d"),
        ("| a | b |\n|---|---|\nx\ny\n| c |", "| a | b |\n|---|---|\nx y\n| c |"),
        ("text\n\n    code\n    more", "text\n\n    code\n    more"),
    ],
)
def test_what_is_no_paragraph_keeps_its_lines(text: str, told: str) -> None:
    assert manual.joined(text) == told
