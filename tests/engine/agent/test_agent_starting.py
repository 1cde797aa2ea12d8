"""What happens to workers that were asked for while the imports that they share still run.

The zygote imports a module that waits at a pipe: it is done when the test has opened the other end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import Pod

from uvcc_engine.contract.agent_protocol import wire

HELD = "held_import"


@pytest.fixture
def imports(tmp_path: Path) -> Path:
    """The folder of the module, with the pipe that ends its import."""
    folder = tmp_path / "modules"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / f"{HELD}.py").write_text(f"open({str(folder / 'pipe')!r}).close()\n")
    return folder


@pytest.fixture
def release(imports: Path) -> Callable[[], None]:
    """Let the import end; returns once the zygote is at it."""
    return lambda: (imports / "pipe").open("w").close()


@pytest.fixture
def starting(pod: Pod, imports: Path) -> Pod:
    """A pod whose imports are held up."""
    pod.start(preload=HELD, env={"PYTHONPATH": os.pathsep.join([str(imports), os.environ.get("PYTHONPATH", "")])})
    return pod


def test_a_launch_by_another_console_waits_for_the_same_processes(starting: Pod, release: Callable[[], None]) -> None:
    """The console of the first one is gone: it was ended while it waited, and its run is resumed by another."""
    with starting.console() as lost:
        lost.post(wire.LAUNCH, "L1", run="r", workers=[starting.spec()])
        assert lost.ask(wire.HELLO, version=wire.VERSION)["ok"]  # the agent has taken the launch before
    with starting.console() as console:
        again = console.post(wire.LAUNCH, "L2", run="r", workers=[starting.spec()])
        other = console.ask(wire.LAUNCH, "L3", run="r", workers=[starting.spec(attempt=1)])
        assert "is being started" in other["error"]
        release()
        ack = console.until(lambda m: m["op"] == wire.ACK and m["nonce"] == again)
        assert [w["pid"] for w in ack["workers"]] == [starting.worker_id().pid]
        later = console.ask(wire.LAUNCH, "L4", run="r", workers=[starting.spec()])  # behind all that was to be forked
        assert later["workers"] == ack["workers"]
        assert sum(m["op"] == wire.PROC and m["state"] == "started" for m in console.seen) == 1


def test_a_halt_between_two_launches_reaches_the_first(starting: Pod, release: Callable[[], None]) -> None:
    with starting.console() as console:
        console.post(wire.LAUNCH, "L1", run="r", workers=[starting.spec()])
        assert console.ask(wire.HALT, "h1", run="r", mode="halt")["ok"]
        console.post(wire.LAUNCH, "L2", run="r", workers=[starting.spec("p0r1s0t0", argv=["true"])])
        release()
        assert console.halted("gone")["detail"] == ""
