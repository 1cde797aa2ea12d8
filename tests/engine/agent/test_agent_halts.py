"""Halts through the real agent: hold, release, halt, the lease, evidence, and a disk that takes nothing."""

from __future__ import annotations

import os
import signal
import sys
import time

from agent_harness import Console, Pod, launched

from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import read_halt


def test_hold_release_halt_with_evidence_and_resume(pod: Pod) -> None:
    pod.start()
    two = [pod.spec("p0r0s0t0"), pod.spec("p0r1s0t0", run="r2")]
    with pod.console() as console, Console(pod.root) as other:
        launched(pod, console, two[0])
        launched(pod, console, two[1], run="r2")
        before = time.time()
        assert console.ask(wire.HALT, run="r", mode="hold", nonce="h1", deadline_s=600)["ok"]
        assert console.halted("seen", "")["nonce"] == "h1"
        held = console.halted("held")
        assert held["step"] >= 0
        asked = read_halt(pod.run_dir(), "r")
        assert asked is not None
        assert before + 600 <= asked.deadline <= time.time() + 600
        assert other.halted("held")["step"] == held["step"]
        console.ask(wire.HALT, run="r", mode="release", nonce="h1")
        assert console.halted("released")["step"] >= held["step"]
        console.ask(wire.HALT, run="r", mode="halt", nonce="h2")
        gone = console.halted("gone")
        halted = console.halted("halted")
        exited = console.proc("p0r0s0t0", "exited")
        record = files.read_json(pod.run_dir() / "exit.json")
        assert (exited["rc"], record["status"]) == (0, "halted")
        assert gone["step"] == halted["step"] == record["step"]
        assert gone["checkpoint"] == record["checkpoint"]
        assert checkpoint.verify(pod.run_dir() / "checkpoints" / f"step-{gone['step']}").sha256 == gone["checkpoint"]
        assert pod.worker_id("p0r1s0t0", "r2").alive()  # the other run was not meant
        launched(pod, console, {**two[0], "resume": True, "attempt": 1})
        assert not (pod.run_dir() / ".HALT").exists()
        assert not (pod.run_dir() / "exit.json").exists()
        console.ask(wire.WATCH, run="r")

        def starts() -> list[int]:
            found = console.records("events.jsonl")
            return [e["fields"]["step"] for e in found if e["event"] == "party_start"]

        console.until(lambda m: m["op"] == wire.LINES and len(starts()) == 2)
        assert starts() == [0, gone["step"]]


def test_a_hold_that_nobody_releases_is_a_halt(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        launched(pod, console)
        console.ask(wire.HALT, run="r", mode="hold", nonce="h1", deadline_s=0.2)
        assert console.halted("gone")["checkpoint"]


def test_a_halt_is_final_and_repeated_requests_are_answered_again(pod: Pod) -> None:
    pod.start()
    deaf = pod.spec(argv=["sh", "-c", "exec sleep 1000"])
    with pod.console() as console:
        launched(pod, console, deaf)
        for _ in range(3):
            assert console.ask(wire.HALT, run="r", mode="halt", nonce="h1")["ok"]
        assert len([m for m in console.seen if m["op"] == wire.HALTED and m["stage"] == "seen"]) == 3
        late = console.ask(wire.HALT, run="r", mode="release", nonce="h1")
        assert (late["ok"], late["error"]) == (False, "run r is already halting")
        assert console.ask(wire.SIGNAL, run="r", coord=None, signal="TERM")["sent"] == ["p0r0s0t0"]
        gone = console.halted("gone")
        assert gone["checkpoint"] == ""
        assert "SIGTERM" in gone["detail"]
        nobody = console.ask(wire.HALT, run="unheard-of", mode="halt", nonce="h2")
        assert not nobody["ok"]


def test_a_broken_checkpoint_is_not_evidence(pod: Pod) -> None:
    pod.start()
    script = (
        "from uvcc_engine.contract import RunWriter\nfrom uvcc_engine.contract.checkpoints import checkpoint\n"
        "with RunWriter.from_env() as w:\n"
        " made = checkpoint.save(w.directory / 'checkpoints', run=w.run, step=4, topology={}, contents={'a': b'xyz'})\n"
        " (made.path / 'a').write_bytes(b'xyZ')\n"
        " w.exit('halted', step=4, checkpoint=made.sha256)\n"
    )
    with pod.console() as console:
        launched(pod, console, pod.spec(argv=[sys.executable, "-c", script]))
        console.proc("p0r0s0t0", "exited")
        console.ask(wire.HALT, run="r", mode="halt", nonce="h1")
        gone = console.halted("gone")
        assert gone["checkpoint"] == ""
        assert "was altered" in gone["detail"]


def test_a_commands_own_checkpoint_is_told_as_what_it_is(pod: Pod) -> None:
    """It was told to put back a manifest that the program never wrote, or to go on from an earlier step."""
    pod.start()
    script = (
        "from uvcc_engine.contract import RunWriter\n"
        "with RunWriter.from_env() as w: w.exit('halted', step=4, checkpoint='ab' * 32)\n"
    )
    with pod.console() as console:
        launched(pod, console, pod.spec(argv=[sys.executable, "-c", script]))
        console.proc("p0r0s0t0", "exited")
        console.ask(wire.HALT, run="r", mode="halt", nonce="h1")
        gone = console.halted("gone")
        assert (gone["checkpoint"], gone["detail"]) == ("", "its checkpoint is the program's own: not checked here")


def test_without_renewal_the_agent_halts_by_itself(pod: Pod) -> None:
    pod.start()
    with pod.console(holder="laptop", lease_s=30.0) as console:
        launched(pod, console)
        console.ask(wire.LEASE, ttl_s=0.3)
    with pod.console(holder="onlooker") as watcher:
        watcher.ask(wire.WATCH, run="r")
        assert watcher.proc("p0r0s0t0", "exited")["rc"] == 0
        watcher.until(lambda m: m["op"] == wire.LINES and any("lease_expired" in line for line in m["lines"]))
        expired = [e for e in watcher.records("events.jsonl") if e["event"] == "lease_expired"]
    assert expired[0]["fields"] == {"holder": "laptop", "ttl_s": 0.3}
    assert files.read_json(pod.run_dir() / "exit.json")["status"] == "halted"


def test_a_renewed_lease_lets_the_run_go_on(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        launched(pod, console, pod.spec(argv=[*pod.spec()["argv"], "100", "0.01"]))
        for _ in range(1000):
            assert console.ask(wire.LEASE, ttl_s=120.0)["ok"]
            if any(m["op"] == wire.PROC and m["state"] == "exited" for m in console.seen):
                break
        console.proc("p0r0s0t0", "exited")
    assert files.read_json(pod.run_dir() / "exit.json")["status"] == "done"


def test_a_disk_that_takes_nothing_keeps_neither_console_nor_halt_out(pod: Pod) -> None:
    """Directories in the place of files refuse every write to them, as a full disk does."""
    pod.start()
    with pod.console() as console:
        launched(pod, console)
        who = pod.worker_id()
        for name in ("state/r/p0r0s0t0.json", "lease.json"):
            (pod.root / name).unlink(missing_ok=True)
            (pod.root / name).mkdir()
            (pod.root / name / "full").write_text("")
        with pod.console(lease_s=60.0) as late:
            assert late.hello["ok"]
            os.kill(who.pid, signal.SIGKILL)
            assert late.proc("p0r0s0t0", "exited")["signal"] == "SIGKILL"
            assert late.ask(wire.PROBE)["ok"]
        for name in ("state/r/p0r0s0t0.json", "lease.json"):
            (pod.root / name / "full").unlink()
            (pod.root / name).rmdir()
