"""The operator's settings: where each comes from, and what is said of a file that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from uvcc_console.core import settings
from uvcc_engine.contract.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path))
    for known in settings.KNOWN:
        monkeypatch.delenv(known.variable, raising=False)
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "config.yaml"


def test_environment_goes_before_the_file_and_the_file_before_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("theme: nord\nascii: true\n")
    monkeypatch.setenv("UVCC_THEME", "dracula")
    found = settings.effective()
    assert {k: (s.value, s.source) for k, s in found.items() if s.source != "default"} == {
        "theme": ("dracula", "$UVCC_THEME"),
        "ascii": (True, str(file)),
    }
    assert not settings.truth("utc")
    for off in ("0", "False", "no", "off"):
        monkeypatch.setenv("UVCC_ASCII", off)
        assert not settings.truth("ascii"), off
    for on in ("1", "TRUE", "yes", "on"):
        monkeypatch.setenv("UVCC_UTC", on)
        assert settings.truth("utc"), on
    monkeypatch.setenv("UVCC_UTC", "maybe")
    with pytest.raises(ConfigError, match=r"\$UVCC_UTC is 'maybe'"):
        settings.effective()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("theem: nord", "no setting 'theem'"),
        ("ascii: maybe", "ascii is to be true or false"),
        ("notify_terminal: osc8", "may be osc9 or osc777"),
        ('notify_command: "say it\'s"', 'notify_command "say it\'s" is no command line: no closing quotation'),
        ('notify_command: "say \\0"', "is no command line: it has signs that cannot be printed"),
        ("notify_url: ntfy.sh/mine", "notify_url 'ntfy.sh/mine' is no web address"),
        ("notify_url: 'http://[::1'", "is no web address"),
        ("notify_url: 'http://h:99999'", "is no web address"),
        ("- a", "not a mapping"),
        ("a: [", "is not YAML"),
        ("theme: " + "x" * 70_000, "larger than"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(Exception, match=words) as e:
        settings.effective()
    assert "theme" in str(getattr(e.value, "hint", "")) or "theem" not in text


def test_an_empty_file_and_none_say_nothing(file: Path) -> None:
    assert all(s.source == "default" for s in settings.effective().values())
    file.write_text("# nothing\n")
    assert all(s.source == "default" for s in settings.effective().values())
    file.write_text("notify_url: 7\n")
    with pytest.raises(ConfigError, match="notify_url is to be text"):
        settings.text("theme")
