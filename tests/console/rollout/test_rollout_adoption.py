"""A run that is taken up again over real pods: damaged evidence is refused and kept, a frozen pod is waited for."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from demorun import Demo, Uvcc, user_at

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def uvcc(tmp_path: Path) -> Iterator[Uvcc]:
    with user_at(tmp_path / "home") as user:
        yield user


def pod_file(uvcc: Uvcc, pod: str, name: str) -> Path:
    (found,) = uvcc.temp.glob(f"uvcc-*/{pod}/.uvcc/runs/*.full/{name}")
    return found


def server_of(uvcc: Uvcc, pod: str) -> int:
    (pid,) = (pid for pid, command in uvcc.processes().items() if "localpod" in command and f"/{pod}" in command)
    return pid


@pytest.mark.slow
def test_damage_is_refused_by_name_and_a_frozen_pod_is_waited_for(uvcc: Uvcc) -> None:
    demo = Demo.start(uvcc, "--seed", "8", "--steps", "60", "--set", "job.test_rows=200")
    demo.reach(2)
    halted = uvcc.run("halt", demo.run, "--json")
    assert halted.returncode == 0, halted.stderr

    # a leaf of the first epoch: the checkpoints are whole, only the evidence is not
    leaves = pod_file(uvcc, "p1r0", "transcript_p1r0s0t0/leaves.bin")
    whole = leaves.read_bytes()
    leaves.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    refused = uvcc.run("resume", demo.run)
    assert refused.returncode == 1
    code, summary, said = demo.outcome()
    assert (code, summary["status"]) == (1, "failed")
    assert "leaves.bin, epoch 0: " in said
    assert "its pods wait until" in said
    shown = uvcc.json("status", demo.run)
    full = next(s for s in shown["stages"] if s["name"] == "full")
    assert full["until"] > full["ended"]
    assert "worker p1r0s0t0" in full["detail"]
    assert "uvcc resume RUN --from" in full["detail"]
    assert {p["state"] for p in shown["pods"]} == {"agent"}  # nothing was deleted
    codes = {w["coord"]: w["rc"] for w in shown["workers"]}
    assert codes.pop("p1r0s0t0") == 1
    assert set(codes.values()) <= {0, 4}  # ended with it, or missed it first

    # put back; but now the conductor is dead, and one pod's SSH server frozen
    leaves.write_bytes(whole)
    os.kill(shown["conductor"], signal.SIGKILL)
    frozen = server_of(uvcc, "p1r0")
    os.kill(frozen, signal.SIGSTOP)
    thaw = threading.Timer(60.0, os.kill, (frozen, signal.SIGCONT))  # whatever happens below
    thaw.start()
    waiting = uvcc.start("resume", demo.run, "--wait")
    assert waiting.stderr is not None
    assert any(line.startswith("adopt waiting") for line in waiting.stderr)  # it is said, not only journalled
    seen = [e for _, e in iter_events(uvcc.home / "runs" / demo.run / "journal.sqlite")]
    told = next(e for e in seen if isinstance(e, ev.StageChanged) and (e.name, e.status) == ("adopt", "waiting"))
    assert "p1r0: pod p1r0" in told.detail
    assert "p0r0:" not in told.detail
    assert "pods kept until" in told.detail
    assert told.until > told.ts + 60
    assert uvcc.json("status", demo.run)["stage"] == "adopt"
    assert not [e for e in seen if isinstance(e, ev.PodChanged) and e.state in ("deleting", "gone")]
    os.kill(frozen, signal.SIGCONT)
    thaw.cancel()
    out, err = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, err
    assert ": ok, verified" in out
    seen = [e for _, e in iter_events(uvcc.home / "runs" / demo.run / "journal.sqlite")]
    replayed = [e for e in seen if isinstance(e, ev.EngineEvent) and e.event == "evidence_replayed"]
    assert {e.fields["epochs"] for e in replayed} == {json.loads(halted.stdout)["step"]}
    assert uvcc.processes() == {}
    assert list(uvcc.temp.iterdir()) == []


@pytest.mark.slow
def test_damaged_evidence_is_left_behind_by_decision_and_the_run_starts_over(uvcc: Uvcc) -> None:
    demo = Demo.start(uvcc, "--seed", "9", "--steps", "30", "--set", "job.test_rows=200")
    demo.reach(2)
    assert uvcc.run("halt", demo.run, "--json").returncode == 0
    leaves = pod_file(uvcc, "p1r0", "transcript_p1r0s0t0/leaves.bin")
    whole = leaves.read_bytes()
    leaves.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    assert uvcc.run("resume", demo.run).returncode == 1
    code, summary, said = demo.outcome()
    assert (code, summary["status"]) == (1, "failed")
    assert "uvcc resume RUN --from" in said

    again = uvcc.start("resume", demo.run, "--from", "0", "--wait")
    out, err = again.communicate(timeout=400)
    assert again.returncode == 0, err
    assert ": ok, verified" in out
    (last,) = [
        e
        for _, e in iter_events(uvcc.home / "runs" / demo.run / "journal.sqlite")
        if isinstance(e, ev.PhaseStarted) and e.phase == "full" and e.start == 0
    ]
    assert last.masks > 0  # the messages of the same steps go under masks of their own
    assert uvcc.run("verify", demo.run).returncode == 0
    assert uvcc.processes() == {}
