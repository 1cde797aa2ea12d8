"""What ``uvcc watch`` and ``uvcc adopt`` are pointed at, as ssh and scp write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from uvcc_console.cli import common
from uvcc_console.cli.main import module_of
from uvcc_console.follow.target import FollowTarget, is_target, read_target
from uvcc_engine.contract.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("me@host:runs/a", FollowTarget("runs/a", "host", "me")),
        ("host:/abs/dir with space", FollowTarget("/abs/dir with space", "host")),
        ("me@host:~/runs", FollowTarget("runs", "host", "me")),
        ("me@[2001:db8::1]:runs", FollowTarget("runs", "2001:db8::1", "me")),
        ("ssh://me@host:2222/data/run", FollowTarget("/data/run", "host", "me", 2222)),
        ("ssh://host/~/runs/a%20b", FollowTarget("runs/a b", "host")),
    ],
)
def test_targets_are_read_as_ssh_writes_them(text: str, wanted: FollowTarget) -> None:
    assert read_target(text) == wanted
    assert is_target(text)


@pytest.mark.parametrize("verb", ["watch", "adopt"])
def test_a_key_is_found_by_who_follows_from_another_folder(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    parser = common.parser_of(module_of(verb).run)
    asked = {word: parser.parse_args(["ada@host:runs", "-i", word]).identity for word in ("keys/id", "~/id", "/k/id")}
    assert asked == {"keys/id": str(tmp_path / "keys/id"), "~/id": "/home/ada/id", "/k/id": "/k/id"}
    assert parser.parse_args(["ada@host:runs"]).identity == ""


def test_a_port_may_be_given_beside_it() -> None:
    assert read_target("me@host:runs", 2222).port == 2222
    with pytest.raises(ConfigError, match="two ports"):
        read_target("ssh://host:22/a", 2222)
    with pytest.raises(ConfigError, match="goes with a host"):
        read_target("/tmp", 2222)


def test_folders_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_target("./runs") == FollowTarget(str(tmp_path / "runs"))
    odd = tmp_path / "host:runs"
    odd.mkdir()
    assert read_target("host:runs") == FollowTarget(str(odd))  # what lies here is meant


@pytest.mark.parametrize(
    "text", ["host:", "me@host:~", "ssh://host", "ssh://-oProxyCommand=x/a", "-o:x", "a b:c", "h:a\nb"]
)
def test_what_names_no_folder_or_host_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_target(text)


@pytest.mark.parametrize("name", ["demo-20261124-1200-ab12", "last", "current", "demo"])
def test_runs_are_no_targets(name: str) -> None:
    assert not is_target(name)
