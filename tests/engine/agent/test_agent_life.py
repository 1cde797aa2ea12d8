"""Starting, being found, ending, dying and being followed by another agent."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from agent_harness import Console, Pod, pod_at, wait_until

import uvcc_engine
from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.run_files import files


def test_hello_names_the_agent_and_its_identity(pod: Pod) -> None:
    ready = pod.start()
    assert ready["op"] == "ready"
    with pod.console() as console:
        hello = console.hello
    assert hello["ok"]
    assert (hello["pid"], hello["starttime"]) == (ready["pid"], ready["starttime"])
    assert hello["identity"] == files.read_json(pod.root / "identity" / "public.json")
    assert hello["identity"]["seeded"] is False
    assert (pod.root / "identity" / "ed25519").stat().st_mode & 0o077 == 0
    assert (pod.root / "agent.sock").stat().st_mode & 0o077 == 0


def test_seed_of_the_demo_makes_the_identity_reproducible(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        with pod_at(tmp_path / name / "pod") as pod:
            pod.root.parent.mkdir()
            pod.start(env={"UVCC_IDENTITY_SEED": "07" * 32})
            with pod.console() as console:
                found.append(console.hello["identity"])
                console.ask(wire.LAUNCH, run="r", workers=[pod.spec(argv=["sh", "-c", "env"])])
                console.ask(wire.WATCH, run="r")
                console.proc("p0r0s0t0", "exited")
                console.until(lambda m: m["op"] == wire.LINES and m["src"].startswith("worker_"))
                assert not [
                    line
                    for line in console.lines("worker_p0r0s0t0.log")
                    if "IDENTITY_SEED" in line or "07" * 32 in line
                ]
    assert found[0] == found[1]
    assert found[0]["seeded"] is True


def test_second_start_finds_the_first(pod: Pod) -> None:
    first = pod.start()
    second = pod.start()
    assert second["op"] == "already"
    assert second["pid"] == first["pid"]
    assert pod.agents[-1].wait() == 0
    assert ProcessId.from_json(first).alive()


def test_a_start_while_another_agent_ends_takes_its_place(pod: Pod) -> None:
    """The other one is a lock and a file that says when it is looked at: behind that look it has ended."""
    pod.root.mkdir()
    facts = pod.root / "agent.json"
    os.mkfifo(facts)
    with (pod.root / "agent.lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        starting = pool.submit(pod.start)
        looked_at = facts.open("w")
        facts.unlink()
        fcntl.flock(lock, fcntl.LOCK_UN)
        looked_at.close()
        assert starting.result()["op"] == "ready"
    with pod.console() as console:
        assert console.hello["ok"]


def test_detached_start_returns_when_the_agent_answers(pod: Pod) -> None:
    ready = pod.start("--detach")
    assert pod.agents[-1].wait() == 0
    who = ProcessId.from_json(ready)
    with pod.console() as console:
        assert console.ask(wire.STOP)["ok"]
    wait_until(lambda: not who.alive(), "the detached agent ends")
    assert not (pod.root / "agent.sock").exists()


def test_stop_ends_every_process_and_leaves_no_socket(pod: Pod) -> None:
    pod.start()
    stubborn = ["sh", "-c", "trap '' TERM; sleep 1000 & echo deaf; while :; do wait; done"]
    with pod.console() as console:
        coords = ["p0r0s0t0", "p0r1s0t0"]
        ack = console.ask(
            wire.LAUNCH, run="r", workers=[pod.spec(coords[0]), pod.spec(coords[1], argv=stubborn)], nonce="L"
        )
        assert [w["coord"] for w in ack["workers"]] == coords
        ids = [pod.worker_id(c) for c in coords]
        console.ask(wire.WATCH, run="r")
        console.until(lambda m: m["op"] == wire.LINES and m["lines"] == ["deaf"])
        stopped = console.ask(wire.STOP, grace_s=3.0)
        console.until_closed()
    assert (stopped["ok"], stopped["ended"], stopped["killed"]) == (True, 2, 1)
    assert pod.agents[-1].wait() == 0
    assert not any(i.alive() for i in ids)
    assert not (pod.root / "agent.sock").exists()
    assert not (pod.root / "agent.json").exists()


def test_sigterm_is_a_stop(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        console.ask(wire.LAUNCH, run="r", workers=[pod.spec()])
        who = pod.worker_id()
        pod.agents[-1].terminate()
        assert console.proc("p0r0s0t0", "exited")["signal"] == "SIGTERM"
    assert pod.agents[-1].wait() == 0
    assert not who.alive()


def test_workers_outlive_a_killed_agent_and_the_next_one_takes_them_over(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        workers = [pod.spec(), pod.spec("p0r1s0t0", argv=["sh", "-c", "exec sleep 1000"])]
        console.ask(wire.LAUNCH, run="r", workers=workers)
        console.ask(wire.WATCH, run="r")
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == "events.jsonl")
        before, sleeper = pod.worker_id(), pod.worker_id("p0r1s0t0")
        pod.kill_agent()
        console.until_closed()
        cursors = console.cursors()
        first_part = console.records("events.jsonl")
    assert before.alive()
    assert pod.start()["op"] == "ready"
    with pod.console(cursors=cursors) as console:
        assert {w["coord"]: w["pid"] for w in console.hello["runs"]["r"]} == {
            "p0r0s0t0": before.pid,
            "p0r1s0t0": sleeper.pid,
        }
        console.ask(wire.WATCH, run="r")
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == "events.jsonl")
        console.ask(wire.HALT, run="r", mode="halt", nonce="h1")
        gone = console.halted("gone")
        assert (gone["detail"], len(gone["checkpoint"])) == ("", 64)
        assert console.proc("p0r0s0t0", "exited")["rc"] == 0
        assert console.ask(wire.SIGNAL, run="r", coord="p0r1s0t0", signal="KILL")["sent"] == ["p0r1s0t0"]
        ended = console.proc("p0r1s0t0", "exited")
        assert (ended["rc"], ended["signal"]) == (None, "unknown")
        console.until(lambda m: m["op"] == wire.LINES and "halted" in m["lines"][-1] and m["src"] == "events.jsonl")
        seqs = [e["seq"] for e in first_part + console.records("events.jsonl") if e["coord"] == "p0r0s0t0"]
    assert seqs == list(range(len(seqs)))


def test_a_killed_zygote_costs_no_worker(pod: Pod) -> None:
    ready = pod.start()
    with pod.console() as console:
        console.ask(wire.LAUNCH, run="r", workers=[pod.spec()])
        who = pod.worker_id()
        zygote = _child_of(ready["pid"])
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda: _child_of(ready["pid"]) == 0, "the zygote is reaped")
        assert who.alive()
        assert console.ask(wire.LAUNCH, run="other", workers=[pod.spec(run="other")])["ok"]
        console.ask(wire.SIGNAL, run="r", coord=None, signal="KILL")
        assert console.proc("p0r0s0t0", "exited")["run"] == "r"


def _child_of(pid: int) -> int:
    found = psutil.Process(pid).children()
    return found[0].pid if found else 0


def test_root_deeper_than_a_socket_path_may_be(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    with pod_at(deep / "pod") as pod:
        pod.start()
        with pod.console() as console:
            assert console.hello["root"] == str(deep / "pod")


def test_root_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "uvcc_engine.cli", "agent", "--root", str(tmp_path / "file" / "root")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write")
    assert done.stderr.count("\n") == 1


def test_another_version_takes_over_an_idle_agent_but_not_a_busy_one(pod: Pod, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(Path(uvcc_engine.__file__).parent, site / "uvcc_engine", ignore=_only_what_an_agent_needs)
    (site / "CODE_HASH").write_text("cd" * 32 + "\n")
    newer = {"PYTHONPATH": str(site)}
    first = pod.start()
    with pod.console() as console:
        console.ask(wire.LAUNCH, run="r", workers=[pod.spec(argv=["sleep", "1000"])])
        command = [sys.executable, "-m", "uvcc_engine.agent", "--root", str(pod.root)]
        busy = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **newer}, cwd=tmp_path, check=False
        )
        assert busy.returncode == 1
        assert "runs 1 workers" in busy.stderr
        console.ask(wire.SIGNAL, run="r", coord=None, signal="KILL")
        console.proc("p0r0s0t0", "exited")
    second = pod.start(env=newer)
    assert second["op"] == "ready"
    assert second["code_hash"] == "cd" * 32
    wait_until(lambda: not ProcessId.from_json(first).alive(), "the first agent ends")
    with pod.console() as console:
        assert console.hello["code_hash"] == "cd" * 32
        assert console.hello["runs"]["r"][0]["signal"] == "SIGKILL"


def _only_what_an_agent_needs(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name != "uvcc_engine":
        return ["__pycache__"]
    return [n for n in names if n not in ("__init__.py", "agent", "contract", "transcript", "parallel")]


def test_bridge_carries_both_ways_and_says_when_nobody_is_there(pod: Pod) -> None:
    command = [sys.executable, "-m", "uvcc_engine.agent.attach", "--root", str(pod.root)]
    nobody = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert nobody.returncode == 5
    told = json.loads(nobody.stderr)
    assert "no agent answers" in told["error"]
    assert told["hint"]
    pod.start()
    asked = wire.encode({"op": wire.HELLO, "nonce": "a"}) + wire.encode({"op": wire.PROBE, "nonce": "b"})
    done = subprocess.run(command, input=asked, capture_output=True, check=True)
    acks = [m for m in map(wire.decode, done.stdout.splitlines()) if m["op"] == wire.ACK]
    assert [m["nonce"] for m in acks] == ["a", "b"]
    probe = acks[1]
    assert probe["versions"]["python"] == sys.version.split()[0]
    assert probe["disk"]["free_mib"] > 0
    assert probe["memory"]["total_mib"] > probe["memory"]["available_mib"] > 0
    assert probe["cpu_limit"] > 0
    assert isinstance(probe["gpus"], list)


def test_bridge_loads_no_third_party_code(pod: Pod) -> None:
    script = (
        "import sys, uvcc_engine.agent.attach\n"
        "print([m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names"
        " and not m.startswith(('uvcc_engine', '__'))])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(uvcc_engine.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == "[]"


def test_several_consoles_hear_the_same(pod: Pod) -> None:
    pod.start()
    with pod.console() as one, Console(pod.root) as two, Console(pod.root, hello=False) as silent:
        one.ask(wire.LAUNCH, run="r", workers=[pod.spec(argv=["true"])])
        assert one.proc("p0r0s0t0", "exited")["pid"] == two.proc("p0r0s0t0", "exited")["pid"]
        silent.ask(wire.WATCH, run="r")
        assert {m["op"] for m in silent.seen} <= {wire.ACK, wire.PROC, wire.LINES}
