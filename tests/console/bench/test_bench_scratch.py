"""A benchmark leaves nothing behind, not even when it is killed; and what others left is named, never guessed at."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from uvcc_console.cli.machine import doctor
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import procs, strays

BENCH = """
import subprocess, sys
from uvcc_console.bench.scratch import scratch
with scratch() as home:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    print(home, child.pid, flush=True)
    sys.stdin.read()
    assert sys.argv[1] != "raises", "on purpose"
"""


def _until(condition: Callable[[], bool], what: str) -> None:
    pause, end = threading.Event(), time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        pause.wait(0.02)


@pytest.mark.parametrize("how", ["killed", "ends", "raises"])
def test_everything_a_benchmark_started_ends_with_it(how: str) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert bench.stdout is not None
    home, pid = bench.stdout.readline().split()
    child = procs.identify(int(pid))
    assert child is not None
    assert Path(home).is_dir()
    if how == "killed":
        bench.kill()
    bench.communicate()
    _until(lambda: not procs.alive(child) and not Path(home).exists(), "the child's end")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A real sidecar of a run that goes on."""
    folder = tmp_path / "home" / "runs" / "left"
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.sqlite", source="test")
    journal.append(
        ev.RunCreated(
            run="left", profile_name="x", job_kind="command", replicas=1, pipeline_stages=1, tensor=1, stages=[]
        )
    )
    journal.close()
    process = subprocess.Popen(
        [sys.executable, "-m", "uvcc_console.haltd", "left"],
        env={**os.environ, "UVCC_HOME": str(tmp_path / "home")},
        stderr=subprocess.DEVNULL,
    )
    _until(lambda: (folder / "haltd.json").exists(), "the sidecar's start")
    yield process, folder
    process.kill()
    process.wait()


def removed(folder: Path) -> None:
    """Out of the way at once, as ``uvcc runs --delete`` does it: its sidecar still writes there."""
    folder.rename(folder.with_name("gone"))
    shutil.rmtree(folder.with_name("gone"), ignore_errors=True)


def test_a_sidecar_ends_with_its_runs_folder(sidecar: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, folder = sidecar
    removed(folder)
    _until(lambda: process.poll() is not None, "the sidecar's end")


def test_a_stray_is_named_with_its_reason_and_ended_by_identity(
    sidecar: tuple[subprocess.Popen[bytes], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process, folder = sidecar

    def mine() -> list[strays.Stray]:
        return [s for s in strays.find(young_s=0.0) if s.process.pid == process.pid]

    assert mine() == []  # its run goes on
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot end by itself
    removed(folder)
    (found,) = mine()
    assert (found.what, found.why) == ("halt sidecar of left", "its run's folder is gone")
    assert [s for s in strays.find() if s.process.pid == process.pid] == []  # too young to judge
    monkeypatch.setattr(doctor, "find_strays", mine)
    finding = doctor.left_behind()
    assert finding.level == "warn"
    assert str(process.pid) in finding.found
    assert "--end-strays" in finding.hint
    doctor.run(["--end-strays"])
    assert f"ended: halt sidecar of left, pid {process.pid}" in capsys.readouterr().err
    assert process.wait(120) == -signal.SIGTERM or process.returncode is not None
    assert mine() == []


@pytest.mark.parametrize("theirs", ["", "data"])
def test_whose_home_is_another_than_ours_is_no_stray_for_that(
    theirs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A conductor that was started without UVCC_HOME has its run in the usual folder; a doctor with one looked into its
    own, and would have ended it. A relative one is relative to a folder that nobody else knows."""
    usual = tmp_path / "usual"
    monkeypatch.setattr(strays.paths, "usual_dir", lambda: usual)
    kept = {name: value for name, value in os.environ.items() if name != "UVCC_HOME"}
    process = subprocess.Popen(
        [sys.executable, "-m", "uvcc_console.haltd", "left"],
        env=kept | ({"UVCC_HOME": theirs} if theirs else {}),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    os.kill(process.pid, signal.SIGSTOP)

    def mine() -> list[strays.Stray]:
        return [s for s in strays.find(young_s=0.0) if s.process.pid == process.pid]

    try:
        (usual / "runs" / "left").mkdir(parents=True)
        assert mine() == []
        shutil.rmtree(usual)
        assert [s.why for s in mine()] == ([] if theirs else ["its run's folder is gone"])
    finally:
        process.kill()
        process.wait()
