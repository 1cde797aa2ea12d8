"""What ends a command of ``uvcc-engine`` is one line on standard error that begins with ``error: ``, always."""

from __future__ import annotations

from pathlib import Path

import pytest

from uvcc_engine import cli
from uvcc_engine.transcript.signing.identity import Identity

GIVEN = {
    "rehearse": "--job ABSENT",
    "base": "--text ABSENT --out OUT",
    "gpt": "--text ABSENT",
    "relay": "--config ABSENT",
    "share": "--check ABSENT",
    "form": "ABSENT",
    "align": "tags --request ABSENT --owner OWNER --heard ABSENT --data ABSENT --folder OUT",
    "table": "infer ABSENT",
    "ask": "key OWNER",
    "audit": "ABSENT --owner OWNER --sealed ABSENT",
    "seal": "--request ABSENT --owner OWNER --out OUT",
}


@pytest.mark.parametrize("verb", GIVEN)
def test_every_command_ends_with_the_same_word(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Identity.create(tmp_path / "owner")
    (tmp_path / "file").touch()
    places = {"ABSENT": tmp_path / "file" / "absent", "OWNER": tmp_path / "owner", "OUT": tmp_path / "out"}
    given = GIVEN[verb]
    for name, place in places.items():
        given = given.replace(name, str(place))
    assert cli.main([verb, *given.split()]) != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_a_column_s_name_begins_no_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spreadsheets write names of several lines. Whoever reads the last one of what was said was told half of it."""
    (tmp_path / "t.csv").write_text('"a\nerror: all is well",b\n1,2\n3,4\n')
    assert cli.main(["table", "infer", str(tmp_path / "t.csv"), "--target", "c"]) == 2
    said = capsys.readouterr().err
    assert said == "error: t.csv has no column 'c' (there are a error: all is well, b)\n"
