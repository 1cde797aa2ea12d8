"""What is said to the operator, evidence that refuses secrets, and the way to a pod's shell."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import queue
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ui_desk import FakeProcesses, desk
from ui_journals import RUN, Story

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.answers.holding import HOLD_S
from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import Journal
from uvcc_console.core.snapshot import PodView, Snapshot
from uvcc_console.fleet.procs import identify
from uvcc_console.fleet.pulse import DEAD
from uvcc_console.haltd.stand_in import StandIn
from uvcc_console.runs import notices, notify
from uvcc_console.runs.notices import Note, SoleSender
from uvcc_console.runs.notify import Notifier
from uvcc_console.ui.actions.shell import ssh_command
from uvcc_console.ui.judging.lamps import MOVING, Lamp
from uvcc_console.ui.panels.fleet import FleetPanel
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / RUN


def alert(text: str, level: str = "warn") -> ev.Alert:
    return ev.Alert(level=level, name="straggler", text=text, subject="p1r0")


def test_the_first_look_says_nothing_and_each_thing_is_said_once() -> None:
    story = Story().full(3)
    story.add(alert("old"))
    said: list[Note] = []
    sent: list[Note] = []
    notifier = Notifier(said.append, sent.append)
    notifier.look(fold(story.events), story.now)
    assert not said
    story.add(alert("slow"), 1.0)
    for _ in range(3):
        notifier.look(fold(story.events), story.now)
    assert said == [Note("warn", "p1r0: slow")]
    assert sent == said


def test_who_takes_a_place_tells_what_came_while_it_changed_hands() -> None:
    story = Story().full(3)
    story.add(alert("old"))
    story.add(alert("between"), 20.0)
    said: list[Note] = []
    notifier = Notifier(said.append, recent_s=10.0)
    for _ in range(2):
        notifier.look(fold(story.events), story.now)
    assert said == [Note("warn", "p1r0: between")]


def test_what_comes_during_a_hold_is_told_behind_it() -> None:
    story = Story().full(3)
    said: list[Note] = []
    notifier = Notifier(said.append)
    notifier.look(fold(story.events), story.now)
    story.halt("hold", acks=False)
    story.add(alert("slow"))
    notifier.look(fold(story.events), story.now)
    assert said == []
    for _ in range(2):
        notifier.look(fold(story.events), story.now + HOLD_S)
    assert said == [Note("warn", "p1r0: slow")]


def test_the_same_alert_is_not_repeated_within_a_minute() -> None:
    story = Story().full(3)
    said: list[Note] = []
    notifier = Notifier(said.append)
    notifier.look(fold(story.events), story.now)
    for gap in (1.0, 5.0, 70.0):
        story.add(alert("slow"), gap)
        notifier.look(fold(story.events), story.now)
    assert len(said) == 2


def test_what_is_true_of_several_workers_is_one_word_and_a_recording_wound_on_says_nothing() -> None:
    story = Story(replicas=2).full(3)
    said: list[Note] = []
    notifier = Notifier(said.append)
    notifier.look(fold(story.events), story.now)
    for n, coord in enumerate(story.coords):
        story.add(ev.Alert(level="warn", name="memory_creep", text=f"{300 + n} MiB", subject=coord))
    story.add(ev.Alert(level="error", name="disk_filling", text="full", subject="p0r0"))
    notifier.look(fold(story.events), story.now)
    first, *others = story.coords
    told = f"{first}: 300 MiB (and {', '.join(others[:3])}, {len(others) - 3} more)"
    assert said == [Note("warn", told), Note("error", "p0r0: full")]
    notifier.forget()
    story.add(alert("slow"), 1.0)
    notifier.look(fold(story.events), story.now)
    assert len(said) == 2


@pytest.mark.parametrize(
    ("build", "level", "text"),
    [
        (lambda s: s.fork(), "error", "FORK at epoch 41"),
        (lambda s: s.failed(), "error", "FAILED"),
        (lambda s: s.halted(), "warn", "HALTED 3/3 verified at step 40"),
        (lambda s: s.halted(unknown=1), "error", "HALTED 2/3"),
        (lambda s: s.finished(), "info", "done, VERIFIED"),
    ],
)
def test_the_states_worth_a_word(build, level: str, text: str) -> None:  # type: ignore[no-untyped-def]
    said: list[Note] = []
    notifier = Notifier(said.append)
    notifier.look(fold(Story().launched().events), 0.0)
    notifier.look(fold(build(Story(steps=45)).events), 0.0)
    assert [n.level for n in said] == [level]
    assert text in said[0].text


def test_the_operators_program_gets_the_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", "notify-me --urgent")
    monkeypatch.setattr(notify.subprocess, "Popen", lambda command, **_: calls.append(command))
    send = notify.operators_program()
    assert send is not None
    send("a fork")
    assert calls == [["notify-me", "--urgent", "a fork"]]
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", "")
    assert notify.operators_program() is None


async def test_a_new_alert_becomes_a_toast(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        d.append(alert("p1r0s0t0 is 3 times slower", "error"))
        await d.settle()
        assert "3 times slower" in d.toasts


# ---- evidence


async def test_a_screen_that_shows_a_key_is_not_kept(folder: Path) -> None:
    async with desk(Story().full(5), folder) as d:
        d.append(ev.LogLines(pod="p0r0", src="worker.log", lines=["-----BEGIN OPENSSH PRIVATE KEY-----"]))
        await d.settle()
        await d.press("s")
        assert "not kept" in d.toasts
        assert not list((folder / "artifacts" / "evidence").glob("*.svg"))


# ---- shell


def pod(story: Story) -> PodView:
    found = fold(story.events).pods["p1r0"]
    return dataclasses.replace(found, address="root@203.0.113.7:2222", host_key="ssh-ed25519 AAAAC3Nz")


def test_the_shell_uses_the_runs_key_and_the_pinned_host_key(tmp_path: Path) -> None:
    (tmp_path / "ssh_ed25519").write_text("key")
    with ssh_command(pod(Story().full(2)), tmp_path, {}) as command:
        text = " ".join(command)
        known = Path(next(c for c in command if c.startswith("UserKnownHostsFile=")).split("=")[1])
        assert known.read_text().startswith("[203.0.113.7]:2222 ssh-ed25519 AAAAC3Nz\n")
        assert "StrictHostKeyChecking=yes" in text
        assert text.endswith("root@203.0.113.7")
        assert f"-i {tmp_path / 'ssh_ed25519'}" in text
    assert not known.exists()


def test_the_shell_goes_through_the_jump_host_of_its_pod(tmp_path: Path) -> None:
    (tmp_path / "ssh_ed25519").write_text("key")
    hosts = tmp_path / "hosts.yaml"
    there = {"host": "203.0.113.7", "user": "root", "port": 2222, "jump": "ada@198.51.100.2:2200"}
    hosts.write_text(json.dumps({"hosts": [there, {"host": "203.0.113.8", "user": "root"}]}))
    profile = {"fleet": {"provider": "inventory", "hosts": str(hosts)}}
    with ssh_command(pod(Story().full(2)), tmp_path, profile) as command:
        assert command[command.index("-J") + 1] == "ada@198.51.100.2:2200"
        assert command[-1] == "root@203.0.113.7"
    hosts.write_text(json.dumps({"hosts": [{**there, "jump": "-oProxyCommand=x"}]}))
    with pytest.raises(UvccError), ssh_command(pod(Story().full(2)), tmp_path, profile):
        pass


def test_no_shell_without_a_pinned_host_key(tmp_path: Path) -> None:
    (tmp_path / "ssh_ed25519").write_text("key")
    unpinned = dataclasses.replace(pod(Story().full(2)), host_key="")
    with pytest.raises(UnreadableError), ssh_command(unpinned, tmp_path, {}):
        pass


async def test_a_shell_where_there_is_no_terminal_to_give_away_says_so(folder: Path) -> None:
    story = Story().full(5)
    found = fold(story.events).pods["p1r0"]
    story.add(
        ev.PodChanged(pod=found.pod, party=1, replica=0, provider="local", state="agent", address="u@127.0.0.1:1")
    )
    async with desk(story, folder) as d:
        fleet = d.app.main.query_one(FleetPanel)
        fleet.state = dataclasses.replace(fleet.state, cursor="p1r0s0t0")
        await d.press("exclamation_mark")
        assert "no shell" in d.toasts


async def test_a_silent_sidecar_is_said_with_the_way_around(folder: Path) -> None:
    async with desk(Story().full(5).halt("hold", acks=False), folder, after=2.0) as d:
        assert "no sign of the halt sidecar" in d.text
        assert f"uvcc halt {RUN}" in d.text


async def test_on_a_full_disk_it_is_the_evidence_that_cannot_be_seen(folder: Path) -> None:
    """The sidecar had held and halted everybody; it was "not sent yet", and of the sidecar there was no sign."""
    processes = FakeProcesses()
    processes.lamps["conductor"] = Lamp(MOVING, "the disk of /x is full (0.0 MiB free)")
    async with desk(Story().full(5).halt("hold", acks=False), folder, after=2.0, processes=processes) as d:
        d.app.check_processes()
        d.app.redraw()
        await d.settle()
        assert f"its evidence cannot be written down. In another terminal: uvcc halt {RUN}" in d.text
        assert "not known here" in d.text
        assert "not sent yet" not in d.text


# ---- ways out of the screen


async def test_a_console_keeps_silent_while_another_process_notifies_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr("uvcc_console.ui.app.operators_program", lambda: sent.append)
    async with desk(Story().full(5), folder) as d:
        conductor = SoleSender(folder, notices.void)
        assert conductor.claim()
        d.append(alert("slow"))
        await d.settle()
        assert "slow" in d.toasts
        assert sent == []
        conductor.close()
        d.append(alert("slower"))
        await d.settle()
        assert sent == ["p1r0: slower"]
        assert not conductor.claim()


def test_a_notice_is_posted_as_ntfy_takes_it_and_a_failure_is_told() -> None:
    got: list[tuple[str, str, bytes]] = []
    taken = threading.Semaphore(0)  # each notice goes by a thread of its own, in any order

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(
                (self.headers["Title"], self.headers["Tags"], self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_response(200 if self.path == "/topic" else 500)
            self.end_headers()
            taken.release()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told: list[str] = []
    failed = threading.Event()
    try:
        where = f"http://127.0.0.1:{server.server_port}"
        notices.post(f"{where}/topic", told.append)(Note("warn", "HALTED 3/3"))
        notices.post(f"{where}/wrong", lambda text: (told.append(text), failed.set())[0])(Note("error", "again"))  # type: ignore[func-returns-value]
        assert failed.wait(120)
        assert all(taken.acquire(timeout=120) for _ in range(2))
    finally:
        server.shutdown()
        server.server_close()
    assert sorted(got) == [("uvcc", "rotating_light", b"again"), ("uvcc", "uvcc", b"HALTED 3/3")]  # the level decides
    assert told == ["a notice did not reach 127.0.0.1: it answered 500"]


def test_an_address_that_says_nothing_is_given_up_after_a_while_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "WAIT_S", 0.2)
    told: queue.Queue[str] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        notices.post(f"http://127.0.0.1:{silent.getsockname()[1]}/x", told.put)(Note("warn", "HALTED"))
        assert told.get(timeout=120) == "a notice did not reach 127.0.0.1: no answer within 0.2 s"
    notices.post("http://a b/", told.put)(Note("warn", "HALTED"))  # whatever the library thinks of it
    assert "a notice did not reach" in told.get(timeout=120)


def test_an_answer_that_never_ends_keeps_no_later_notice_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on each read is none on their sum, and notices wait for each other."""
    monkeypatch.setattr(notices, "WAIT_S", 600.0)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as kept:
        server.settimeout(120)
        send = notices.post(f"http://127.0.0.1:{server.getsockname()[1]}/x", told.append)
        for text in ("first", "second"):
            send(Note("warn", text))
        for text in (b"first", b"second"):
            asked = kept.enter_context(server.accept()[0])
            asked.settimeout(120)
            got = b""
            while not got.endswith(text):
                got += asked.recv(4096)
            asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n1")  # and there it stays
    assert told == []


def test_what_a_pod_says_reaches_the_operators_program_as_plain_text() -> None:
    got: list[str] = []
    send = notices.outside(got.append, got.append)
    assert send is not None
    send(Note("error", "p0r0: \ud800\x1b[31mred\nline\0"))
    assert got == ["p0r0: red line"]
    assert got[0].encode()


@pytest.mark.parametrize(
    ("form", "tmux", "wanted"),
    [
        ("osc9", "", b"\x1b]9;p1r0: slow"),
        pytest.param("osc777", "", b"\x1b]777;notify;uvcc;p1r0: slow", marks=pytest.mark.ci(__file__)),
        ("osc9", "/tmp/tmux-0/default,1,0", b"\x1bPtmux;\x1b\x1b]9;p1r0: slow"),
    ],
)
def test_a_notice_reaches_the_terminal_of_the_real_console(form: str, tmux: str, wanted: bytes) -> None:
    run_dir = paths.run_dir(RUN)
    Story().full(5).write(run_dir)
    me = identify(os.getpid())
    assert me is not None
    for name in ("conductor", "haltd"):  # this very process passes for both
        (run_dir / f"{name}.json").write_text(json.dumps({"pid": me.pid, "starttime": me.starttime}))
    env = {k: v for k, v in os.environ.items() if k != "TMUX"} | {
        "UVCC_NOTIFY_TERMINAL": form,
        "TERM": "xterm-256color",
    }
    pid, fd = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "uvcc_console.cli.main", "attach", RUN]
        os.execve(sys.executable, command, env | ({"TMUX": tmux} if tmux else {}))
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        _until(fd, b"Fleet")
        journal = Journal(run_dir / paths.JOURNAL, source="other")
        _until(fd, wanted, lambda: journal.append(alert("slow")))  # again: the first look only takes note
        journal.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)


def _until(fd: int, wanted: bytes, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Read what a terminal shows until this was in it."""
    got, end = b"", time.monotonic() + 300
    while wanted not in got:
        assert time.monotonic() < end, got[-500:]
        meanwhile()
        if select.select([fd], [], [], 1.0)[0]:
            got += os.read(fd, 1 << 16)


@pytest.mark.parametrize("variable", ["UVCC_NOTIFY_COMMAND", "UVCC_NOTIFY_URL"])
async def test_a_setting_that_cannot_be_read_leaves_console_sidecar_and_conductor_alone(
    variable: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://[it's")
    async with desk(Story().full(5), folder) as d:
        assert "RUNNING" in d.text
        assert "notify" in d.toasts
    StandIn(folder).look(Snapshot(), DEAD, 1.0)  # in the halt sidecar: nothing may keep it from its orders
    with pytest.raises(ConfigError):  # what the conductor tells as an alert
        notices.outside(notify.operators_program(), notices.void)


def test_the_ways_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    assert notices.ways(None, written.append, written.append) is None
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("UVCC_NOTIFY_TERMINAL", "osc9")
    send = notices.ways(None, written.append, written.append)
    assert send is not None
    send(Note("error", "P1 lost\x1b]0;evil\x07; halted"))
    assert written[0].startswith("\x1b]9;P1 lost")
    assert written[0].count("\x1b") == 1
    assert written[0].count("\x07") == 1
    monkeypatch.setenv("UVCC_NOTIFY_TERMINAL", "osc777")
    monkeypatch.setenv("TMUX", "/tmp/tmux-0/default,1,0")
    send = notices.ways(None, written.append, written.append)
    assert send is not None
    send(Note("warn", "a; b"))
    assert written[1] == "\x1bPtmux;\x1b\x1b]777;notify;uvcc;a, b\x07\x1b\\"
    monkeypatch.setenv("UVCC_NOTIFY_TERMINAL", "growl")
    with pytest.raises(ConfigError, match="may be osc9 or osc777"):
        notices.ways(None, written.append, written.append)
    monkeypatch.setenv("UVCC_NOTIFY_TERMINAL", "")
    monkeypatch.setenv("UVCC_NOTIFY_URL", "file:///etc/passwd")
    with pytest.raises(ConfigError, match="is no web address"):
        notices.ways(None, written.append, written.append)
