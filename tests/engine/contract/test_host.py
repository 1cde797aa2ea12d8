"""What the machine tells is the same whether /proc or psutil is asked, and paths of sockets may be of any length."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import psutil
import pytest

from uvcc_engine.agent.processes.process import ProcessId, group_members, has_ended, wake_pipe
from uvcc_engine.contract.machine import host, shortpath
from uvcc_engine.transcript.leaves import write_ahead_log


@pytest.fixture(params=[True, False], ids=["proc", "psutil"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not host.HAS_PROC:
        pytest.skip("this system has no /proc")
    monkeypatch.setattr(host, "HAS_PROC", request.param)
    return bool(request.param)


def test_this_process_is_seen(way: bool) -> None:
    found = host.process(os.getpid())
    assert found is not None
    assert (found.ended, found.parent, found.group) == (False, os.getppid(), os.getpgrp())
    assert found.starttime == host.starttime(psutil.Process())
    assert os.getpid() in host.pids()
    assert host.process(2**22 + 1) is None


def test_both_ways_name_a_process_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that one part of the program wrote must be the same process to the other."""
    if not host.HAS_PROC:
        pytest.skip("this system has no /proc")
    assert host.process(os.getppid()) == host.process_by_psutil(os.getppid())


def test_an_ended_child_is_told_and_its_group_can_still_be_ended(way: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "waitid", raising=False)
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, start_new_session=True)
    who = ProcessId.of(child.pid)
    assert who is not None
    assert who.alive()
    while len(group_members(child.pid)) < 2:
        assert not has_ended(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    while not has_ended(child.pid):
        assert host.process(child.pid) is not None
    assert not who.alive()
    assert len(group_members(child.pid)) == 1
    assert who.send_group(signal.SIGKILL)
    child.wait(120)
    while group_members(child.pid):
        pass
    assert host.process(child.pid) is None


_FIRST_THREAD_ENDS: Final = """
import ctypes, sys, threading
threading.Thread(target=lambda: (print("on", flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_has_not_ended_while_one_of_its_threads_lives() -> None:
    """Its state is its first thread's: of one that was killed, the others may be over a moment later."""
    if not host.HAS_PROC:
        pytest.skip("this system has no /proc")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _FIRST_THREAD_ENDS], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        who = ProcessId.of(child.pid)
        assert who is not None
        assert who.alive()
        assert group_members(os.getpgrp()).count(child.pid) == 1
        os.kill(child.pid, signal.SIGKILL)
        while not has_ended(child.pid):
            pass
        assert not who.alive()
    assert host.process(child.pid) is None


@pytest.mark.parametrize("pid", [-1, 2**31, 2**63])
def test_what_is_no_pid_is_no_process(pid: int) -> None:
    assert host.process_by_psutil(pid) is None


def test_the_machine_is_measured(way: bool) -> None:
    memory = host.memory_mib()
    assert 0 < memory["available_mib"] <= memory["total_mib"]
    busy, total = host.cpu_ticks()
    assert 0 < busy <= total
    assert host.resident_mib() > 5
    assert host.threads() >= 1
    assert 1 <= host.usable_cpus() <= (os.cpu_count() or 1)


def test_the_most_memory_is_told_after_it_was_given_back() -> None:
    code = (
        "from uvcc_engine.contract.machine import host\nbefore = host.resident_mib()\nheld = b'x' * (64 << 20)\n"
        "del held\nprint(host.peak_mib() - before, host.resident_mib() - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    peak, left = map(float, said.split())
    assert peak > 60.0 or not host.HAS_PROC  # elsewhere what is held now counts
    assert left < 30.0


def test_both_ends_of_a_wake_pipe_never_wait_and_are_not_inherited() -> None:
    ends = wake_pipe()
    try:
        assert not any(os.get_blocking(end) or os.get_inheritable(end) for end in ends)
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 1)
    finally:
        for end in ends:
            os.close(end)


@pytest.mark.parametrize("proc", [True, False], ids=["through /proc", "through a link"])
def test_a_socket_may_lie_as_deep_as_it_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc: bool) -> None:
    if not proc:
        monkeypatch.setattr(shortpath.os.path, "isdir", lambda path: False)
    path = tmp_path / ("d" * 80) / ("e" * 80) / "a.sock"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        with shortpath.short(path) as address:
            assert len(address) <= shortpath.LONGEST
            listener.bind(address)
        listener.listen(1)
        assert path.is_socket()
        with shortpath.short(path) as address:
            caller.connect(address)
        assert not Path(address).exists()


def test_room_for_records_is_real_without_posix_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    path = tmp_path / "log"
    path.write_bytes(b"kept")
    with path.open("r+b") as f:
        write_ahead_log.allocate(f.fileno(), 1 << 20)
    found = path.read_bytes()
    assert (found[:4], len(found), found.count(0)) == (b"kept", 1 << 20, (1 << 20) - 4)
    assert path.stat().st_blocks * 512 >= 1 << 20


def test_freed_memory_below_something_that_is_kept_is_given_back_when_asked() -> None:
    """A C library keeps it otherwise, and a machine that has it seems to have it no more."""
    script = (
        "from uvcc_engine.contract.machine import host\n"
        "held = [bytearray(65_536) for _ in range(3_000)]\nkept = bytearray(65_536)\n"
        "del held\nbefore = host.resident_mib()\nhost.give_back()\nprint(before - host.resident_mib())"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(told.stdout) > 150
