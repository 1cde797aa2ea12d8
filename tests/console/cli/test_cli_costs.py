"""``uvcc costs``: every create of every run, by our clock and by the provider's bill."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from uvcc_console.cli.view import costs
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.cloud.intents import Intents

T0 = 1_800_000_000.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    Journal(folder / "journal.sqlite", source="test").close()
    book = Intents.of(folder)
    names = {n: f"uvcc-r1-p{n}r0xaaaaa{n}" for n in range(5)}
    for n, name in names.items():
        book.note(T0 + n, name=name, offer="o", provider='=evil("a,b")' if n == 4 else "vendor", price_hr=3.0)
    book.note(T0 + 10, name=names[0], refused="capacity")
    for n, bill in ((1, 3.1), (2, 9.0), (3, None)):
        book.note(T0 + 10, name=names[n], id=f"id{n}")
        book.note(T0 + n + 3600.0, name=names[n], id=f"id{n}", gone=True, **({"billed": bill} if bill else {}))
    with book.path.open("a") as file:
        file.write('{"ts": 1, "name": "uvcc-r1-p0')  # cut short by a crash
    monkeypatch.setattr("uvcc_console.fleet.runclock.run_now", lambda folder: T0 + 4 + 7200.0)
    return tmp_path


def test_every_create_is_held_against_its_bill(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert costs.run(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    shown = [(r["pod"], r["outcome"], r["ours"], r["billed"], r["verdict"]) for r in rows]
    assert shown == [
        ("p0r0", "refused", 0.0, None, "none"),
        ("p1r0", "gone", 3.0, 3.1, "agrees"),
        ("p2r0", "gone", 3.0, 9.0, "over"),
        ("p3r0", "gone", 3.0, None, "untold"),
        ("p4r0", "open", 6.0, None, "open"),
    ]
    assert (rows[1]["asked"], rows[1]["ended"]) == ("2027-01-15T08:00:01Z", "2027-01-15T09:00:01Z")
    assert rows[4]["ended"] == ""


def test_the_table_s_last_line_adds_up(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert costs.run([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "5 creates, 15.00 $ by our clock; of these 2 were billed 12.10 $"
    )


def test_the_csv_is_rfc_4180_with_the_columns_of_the_help(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert costs.run(["--csv"]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\r\n")
    assert text.count("\n") == text.count("\r\n") == 6
    rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    assert tuple(rows[0]) == costs.COLUMNS
    assert rows[4]["provider"] == '\'=evil("a,b")'  # no spreadsheet runs it
    assert [r["billed"] for r in rows] == ["", "3.1", "9.0", "", ""]
    with pytest.raises(SystemExit):
        costs.run(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"--csv has the columns {', '.join(costs.COLUMNS)};" in said


def test_without_a_rented_pod_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    assert costs.run([]) == 0
    assert "has rented anything" in capsys.readouterr().err
