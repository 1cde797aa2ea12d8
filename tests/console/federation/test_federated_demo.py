"""``uvcc demo --federated``: what it needs and refuses, what keeps its people apart, and that nothing outlives it."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from demorun import Uvcc, user_at

from uvcc_console.cli import main as cli
from uvcc_console.federation import data_owner
from uvcc_console.federation.demo import demo_keeper, panes, people, story
from uvcc_console.federation.demo.people import DOMAINS, EVERYBODY, OWNERS, WHO
from uvcc_engine.contract.errors import ConfigError, UvccError

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorials" / "three-organisations.md"


def _refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    try:
        code = cli.main(["demo", *args])
    except SystemExit as e:
        code = int(str(e.code))
    assert code == 2
    return capsys.readouterr().err


def test_what_the_demo_cannot_do_is_said_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    assert "--federated takes no --steps" in _refused(capsys, "--federated", "--steps", "3")
    assert "--federated takes no --lm" in _refused(capsys, "--federated", "--lm")
    assert "are of --federated" in _refused(capsys, "--users")
    assert "--port '70000' is no port" in _refused(capsys, "--federated", "--headless", "--port", "70000")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = _refused(capsys, "--federated", "--headless", "--users")
    assert "this program is not root" in said
    assert "without --users: separate homes" in said
    monkeypatch.setattr(panes.shutil, "which", lambda name: None)
    assert "apt install tmux" in _refused(capsys, "--federated", "--tmux")
    assert not (tmp_path / "home").exists()


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(people, "temp_root", lambda: tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UvccError, match=r"UVCC_HOME names .*file: it is no folder"):
        people.set_up(users=False)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_everybody_has_a_home_that_is_private_and_an_environment_without_the_operators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(people, "temp_root", lambda: tmp_path)
    monkeypatch.setenv("SSH_AUTH_SOCK", "/an/agent")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    stage, other = people.set_up(users=False), people.set_up(users=False)
    assert "separate homes of one OS user (this program is not root)" in stage.how
    assert stage.folder != other.folder  # one beside another
    assert set(stage.people) == set(EVERYBODY) == set(WHO)
    for name, person in stage.people.items():
        env = person.environment()
        assert env["UVCC_HOME"] == env["HOME"] == str(stage.folder / name)
        assert "SSH_AUTH_SOCK" not in env
        assert person.home.stat().st_mode & 0o777 == 0o700
    for made in (stage, other):
        assert demo_keeper.sweep(made.folder, made.temp) == set()
        assert not made.temp.exists()
        assert made.folder.exists()


def test_user_numbers_are_lent_once_and_never_those_of_somebody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(people, "temp_root", lambda: tmp_path)
    taken = people.FIRST_UID + 12
    known = people.pwd.struct_passwd(("somebody", "x", taken, taken, "", "/", "/bin/sh"))
    monkeypatch.setattr(people.pwd, "getpwall", lambda: [known])
    first, second = people.lease(), people.lease()
    assert first[1] == people.FIRST_UID
    assert second[1] == people.FIRST_UID + 20  # ten further on somebody has one of them
    assert first[0].is_dir()


def test_a_keeper_ends_what_its_demo_left_and_nothing_of_another(tmp_path: Path) -> None:
    folder, temp, other = tmp_path / "folder", tmp_path / "temp", tmp_path / "folder-2"
    for made in (folder, temp, other):
        made.mkdir()

    def left(name: str, value: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], env={name: str(value)}, start_new_session=True
        )

    ours = [left("UVCC_HOME", folder / "alpha"), left("UVCC_POD", temp / "alpha" / "uvcc-1" / "p0r0")]
    theirs = left("UVCC_HOME", other / "alpha")
    try:
        # a process that starts a keeper and is killed, as the demo may be
        code = (
            "import sys, time; from pathlib import Path; from uvcc_console.federation.demo import demo_keeper\n"
            "made = demo_keeper.start(*map(Path, sys.argv[1:])); print(made.pid, flush=True); time.sleep(600)"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(folder), str(temp)], stdout=subprocess.PIPE) as demo:
            assert demo.stdout is not None
            kept = psutil.Process(int(demo.stdout.readline()))
            demo.send_signal(signal.SIGKILL)
        for process in ours:
            assert process.wait(120) == -signal.SIGTERM
        psutil.wait_procs([kept], timeout=120)
        assert theirs.poll() is None
        assert not temp.exists()
    finally:
        for process in (*ours, theirs):
            process.kill()
            process.wait()


def test_an_owner_waits_for_what_is_not_there_yet_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception] = [data_owner.NotYetError("no roster"), data_owner.NotYetError("no key")]
    slept: list[float] = []

    def ready(*_: object) -> str:
        if answers:
            raise answers.pop(0)
        return "request"

    monkeypatch.setattr(data_owner, "ready", ready)
    wait = lambda s: data_owner.waited(None, "id", None, (), -1, s, str, slept.append)  # type: ignore[arg-type] # noqa: E731
    assert wait(5.0) == "request"
    assert slept == [data_owner.LOOK_S] * 2
    answers += [data_owner.NotYetError("no roster")] * 9
    with pytest.raises(data_owner.NotYetError, match="no roster"):
        wait(3.0)
    answers[:] = [ConfigError("P1's domain refused")]
    with pytest.raises(ConfigError, match="refused"):
        wait(600.0)


def test_the_demo_runs_what_the_tutorial_shows() -> None:
    shown = re.search(r"<!-- file: ward.yaml -->\n```yaml\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == story.PROFILE_TEXT
    assert {line.count(",") for line in story.rows_of("north").splitlines()} == {4}
    assert story.rows_of("north") != story.rows_of("south")


def test_a_story_that_fails_tells_of_each_domain_what_its_conductor_said(tmp_path: Path) -> None:
    stage = people.Scene(tmp_path, tmp_path, {}, "here")
    made = story.Story(stage, print)
    said = {
        "alpha": "ward-1: failed, not verified (P1's domain vanished at full)\n  time 1 s\n  artifacts    /somewhere\n",
        "beta": "ward-2: running, not verified\nthe conductor of ward-2 died (see: uvcc logs ward-2)\n  end it here\n",
        "gamma": "",
    }
    for name, text in said.items():
        made.log_of(name).write_text(text)
        made.conducting[name] = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], text=True)
    with pytest.raises(UvccError) as failed:
        made.wait()
    assert failed.value.what == (
        "alpha: ward-1: failed, not verified (P1's domain vanished at full); beta: the conductor of ward-2 died;"
        " gamma: ended with 1"
    )


def test_a_conductor_that_fails_ends_the_wait_of_an_owner_and_is_named_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner waits for pods; it was told to wait longer, minutes after the conductors had said why there are none."""
    monkeypatch.setattr(story, "MAIN", (sys.executable, "-c", "import signal; signal.pause()"))
    monkeypatch.setattr(story, "LOOK_S", 0.01)

    class Waits:
        started: list[subprocess.Popen[str]] = []  # noqa: RUF012

        def start(self, command: tuple[str, ...]) -> subprocess.Popen[str]:
            made = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.started.append(made)
            return made

    stage = people.Scene(tmp_path, tmp_path, {"north": Waits()}, "here")  # type: ignore[dict-item]
    made = story.Story(stage, print)
    made.log_of("beta").write_text("ward-1: failed, not verified (this installation's code is another)\n")
    made.conducting["beta"] = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"], text=True)
    with pytest.raises(UvccError) as failed:
        made.tried("north", "owner", "share", "--wait", "240")
    assert failed.value.what == "beta: ward-1: failed, not verified (this installation's code is another)"
    assert Waits.started[0].poll() is not None  # whoever waited waits no more


# the whole story


def _secrets(folder: Path) -> dict[str, list[bytes]]:
    """What each of the people alone may have: its token, its keys, and an owner's rows, in clear and encoded."""
    found = {}
    for name in (*DOMAINS, *OWNERS):
        home = folder / name
        found[name] = [(home / "token").read_bytes()]
        if name in DOMAINS:
            found[name].append((home / "config" / "domain" / "ed25519").read_bytes().splitlines()[2])
        else:
            kept = (p for p in (home / "config" / "owner").iterdir() if p.suffix != ".pub")
            found[name] += [p.read_bytes().strip() for p in kept if p.is_file() and 32 <= p.stat().st_size < 4096]
            rows = story.rows_of(name).splitlines()[:2]
            found[name] += [row.encode() for row in rows]
            numbers = [np.array([float(v) for v in row.split(",")[:4]]) for row in rows]
            found[name] += [np.rint(row * 65536).astype("<i8").tobytes() for row in numbers]
            found[name] += [row.astype("<f8").tobytes() for row in numbers]
    return found


def _finds(name: str, secrets: dict[str, list[bytes]], data: bytes) -> list[str]:
    """Whose secrets somebody else's bytes hold. The relay knows its tokens: it gave them out."""
    return [
        other
        for other, theirs in secrets.items()
        for n, secret in enumerate(theirs)
        if other != name and not (name == people.RELAY and n == 0) and secret in data
    ]


def _memory(pid: int) -> Iterator[bytes]:
    """What a process has in memory that it may write to, piece by piece; of very much the first part."""
    left = 64 << 20
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "rb", 0) as mem:
            for line in maps:
                span, rights = line.split()[:2]
                begin, end = (int(part, 16) for part in span.split("-"))
                if rights.startswith("rw") and end - begin <= left:
                    left -= end - begin
                    try:
                        mem.seek(begin)
                        yield mem.read(end - begin)
                    except (OSError, ValueError, OverflowError):
                        continue
    except OSError:
        return


def _whose(pid: int) -> str:
    env = psutil.Process(pid).environ()
    home = env.get("UVCC_HOME", "") if "UVCC_POD" not in env else env["UVCC_POD"]
    parts = Path(home).parts
    return next((name for name in EVERYBODY if name in parts), "")


@pytest.fixture
def someone(tmp_path: Path) -> Iterator[Uvcc]:
    with user_at(tmp_path / "home") as user:
        yield user
        for pid in demo_keeper.processes(user.home, user.temp):
            os.kill(pid, signal.SIGKILL)


def _kept_in(demo: subprocess.Popen[str]) -> Path:
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("kept in"):
            return Path(line.split()[2])
    raise AssertionError(demo.communicate()[1])


def _temporary(someone: Uvcc) -> list[Path]:
    return [path for path in someone.temp.iterdir() if path.name.startswith("uvd-")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_story_ends_verified_and_nobody_ever_holds_what_is_anothers(someone: Uvcc) -> None:
    demo = someone.start("demo", "--federated", "--headless")
    folder = _kept_in(demo)
    looked: dict[str, int] = {}
    assert demo.stdout is not None
    said = ""
    for line in demo.stdout:
        said += line
        if line.startswith("south        split"):  # both have shared: the pods are about to open the boxes
            secrets = _secrets(folder)
            for pid in sorted(demo_keeper.processes(folder, someone.temp)):
                try:
                    name = _whose(pid)
                except psutil.Error:
                    continue  # ended meanwhile
                for piece in _memory(pid):
                    assert _finds(name, secrets, piece) == [], (name, pid)
                    looked[name] = looked.get(name, 0) + len(piece)
    assert demo.wait(120) == 0, said
    assert "  VERIFIED     phase full" in said
    assert "the three domains that were named" in said
    assert said.strip().endswith(str(folder))
    assert all(looked.get(name, 0) > 1 << 20 for name in (*DOMAINS, people.RELAY)), looked
    secrets = _secrets(folder)
    for name in EVERYBODY:
        for path in (folder / name).rglob("*"):
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                assert _finds(name, secrets, data) == [], path
                for text in re.findall(rb"[A-Za-z0-9+/=]{64,}", data):
                    try:
                        assert _finds(name, secrets, base64.b64decode(text)) == [], path
                    except ValueError:
                        continue  # not base64
    assert demo_keeper.processes(folder, someone.temp) == set()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_demo_that_is_ended_in_the_middle_leaves_no_process(someone: Uvcc, number: int) -> None:
    demo = someone.start("demo", "--federated", "--headless")
    folder = _kept_in(demo)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("north        pinned"):  # next the conductors are started
            break
    end = time.monotonic() + 300
    while not story.run_in(people.Person("alpha", folder / "alpha", folder)) and time.monotonic() < end:
        time.sleep(0.2)
    demo.send_signal(number)
    assert demo.wait(300) == (130 if number == signal.SIGINT else -number)
    end = time.monotonic() + 300
    # the files go after the last process: nothing waits for the keeper of a demo that was killed
    while (demo_keeper.processes(folder, someone.temp) or _temporary(someone)) and time.monotonic() < end:
        time.sleep(0.2)
    assert demo_keeper.processes(folder, someone.temp) == set()
    assert _temporary(someone) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_port_that_is_taken_is_named(someone: Uvcc) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = someone.run("demo", "--federated", "--headless", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "the relay did not start" in done.stderr
    assert "another --port" in done.stderr
