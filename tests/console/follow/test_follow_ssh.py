"""Folders behind real OpenSSH servers and one of this process: the right machine, lost links, plain refusals."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import asyncssh
import pytest

from uvcc_console.cli.main import main
from uvcc_console.core import events as ev
from uvcc_console.fleet.pins import HostKeyPins
from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.fleet.ssherrors import HostKeyChanged
from uvcc_console.fleet.user_ssh import UserKeys
from uvcc_console.follow.follower import FolderFollower
from uvcc_console.follow.reader import FolderReader
from uvcc_console.follow.shells import SshShell

sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))
from opensshd import Sshd, why_not

QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0, backoff_first=0.02)
needs_sshd = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id"
    path.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
    path.chmod(0o600)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def keys_of(path: Path) -> UserKeys:
    return UserKeys((str(path),), named=True)


def follower_of(
    shell: SshShell, folder: Path, told: list[ev.Event], clock: list[float], silence: list[str] | None = None
) -> FolderFollower:
    async def no_time(seconds: float) -> None:
        await asyncio.sleep(0)

    reader = FolderReader(shell, str(folder), monotonic=lambda: clock[0])
    news = (silence if silence is not None else []).append
    return FolderFollower(reader, told.extend, news, poll_s=0.0, sleep=no_time, clock=lambda: clock[0])


@needs_sshd
async def test_a_lost_link_comes_back_and_reading_goes_on_from_its_cursor(
    tmp_path: Path, key: Path, home: Path
) -> None:
    server = Sshd(tmp_path / "sshd", asyncssh.read_private_key(str(key)))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "log.csv").write_text("step,loss\n1,2\n2,1.5\n")
    await server.start()
    told: list[ev.Event] = []
    clock = [0.0]
    shell = SshShell(PodLink("there", server.address, keys_of(key), known=HostKeyPins.here(), timeouts=QUICK))
    silence: list[str] = []
    follower = follower_of(shell, folder, told, clock, silence)
    try:
        assert await follower.once()
        await server.stop()
        with (folder / "log.csv").open("a") as f:
            f.write("3,1\n")
        clock[0] += 20.0
        while await follower.once():  # until the cut is noticed
            clock[0] += 20.0
        assert not follower.up
        assert not await follower.once()
        assert "no news for" in silence[-1]
        assert "the link is down" in silence[-1]
        await server.start()
        clock[0] += 20.0
        while not await follower.once():
            await asyncio.sleep(0.02)
    finally:
        await shell.close()
        await server.stop()
    assert [e.step for e in told if isinstance(e, ev.Metric)] == [1, 2, 3]
    assert [e.up for e in told if isinstance(e, ev.LinkChanged)] == [False, True]
    # each thing once, however often it was tried; and the word that stays on the screen is the last
    said = [e.text.rpartition(": ")[2] for e in told if isinstance(e, ev.Alert)]
    assert said == ["what is shown is old", "what is shown is of now"]


@needs_sshd
def test_watch_prints_a_folder_of_another_machine_and_names_what_stands_in_the_way(
    tmp_path: Path, key: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Sshd(tmp_path / "sshd", asyncssh.read_private_key(str(key))).up()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    at = f"ssh://{server.user}@127.0.0.1:{server.port}"
    other = tmp_path / "other"
    other.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key("openssh"))
    other.chmod(0o600)
    try:
        assert main(["watch", f"{at}{folder}", "-i", str(key), "--no-follow", "--kind", "metric"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["kind"], row["step"], row["values"]) == ("metric", 1, {"loss": 2.5})
        assert main(["watch", f"{at}{folder}/none", "-i", str(key), "--no-follow"]) == 2
        assert "there is no folder" in capsys.readouterr().err
        assert main(["adopt", f"{at}{folder}", "-i", str(other), "--headless"]) == 1
        assert "refuses" in capsys.readouterr().err
        assert not (home / "runs").exists()  # what cannot be reached is no run
        server.down()
        server.new_host_key()
        server.up()
        assert main(["watch", f"{at}{folder}", "-i", str(key), "--no-follow"]) != 0
        said = capsys.readouterr().err
        assert "another host key" in said
        assert "ssh-keygen -R" in said
    finally:
        server.down()
    assert not list(folder.glob(".*"))  # nothing is left there


async def test_a_server_that_answers_with_something_else_is_named(tmp_path: Path, key: Path) -> None:
    """In this process: a forced command that prints a greeting, then one that gives shells and hangs up."""
    answers = [b"welcome\n"]

    async def serve(process: asyncssh.SSHServerProcess[bytes]) -> None:
        if answers:
            process.stdout.write(answers[0])
            process.exit(0)
            return
        command = process.command or ""
        script = await process.stdin.read() if command.endswith("-s") else b""
        done = subprocess.run(["/bin/sh", "-c", command], input=script, capture_output=True, check=False)
        process.stdout.write(done.stdout)
        process.exit(done.returncode)

    public = asyncssh.read_private_key(str(key)).export_public_key("openssh").decode()
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=asyncssh.import_authorized_keys(public),
        process_factory=serve,
        encoding=None,
    )
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n")
    told: list[ev.Event] = []
    shell = SshShell(PodLink("there", f"me@127.0.0.1:{server.get_port()}", keys_of(key), timeouts=QUICK))
    follower = follower_of(shell, tmp_path, told, [0.0])
    try:
        assert not await follower.once()
        (alert,) = [e for e in told if isinstance(e, ev.Alert)]
        assert "forced command" in alert.text
        answers.clear()
        assert await follower.once(), told
        assert [e.step for e in told if isinstance(e, ev.Metric)] == [1]
    finally:
        await shell.close()
        server.close()
        await server.wait_closed()


async def test_another_machine_in_its_place_ends_the_following(tmp_path: Path, key: Path) -> None:
    public = asyncssh.read_private_key(str(key)).export_public_key("openssh").decode()
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
        authorized_client_keys=asyncssh.import_authorized_keys(public),
    )
    pinned = asyncssh.generate_private_key("ssh-ed25519").export_public_key("openssh").decode()
    link = PodLink("there", f"me@127.0.0.1:{server.get_port()}", keys_of(key), host_key=pinned, timeouts=QUICK)
    try:
        with pytest.raises(HostKeyChanged):
            await follower_of(SshShell(link), tmp_path, [], [0.0]).run()
    finally:
        await link.close()
        server.close()
        await server.wait_closed()
