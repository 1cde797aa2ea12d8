"""Launching, streaming and losing workers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_harness import Console, Pod, launched, wait_until

from uvcc_engine.agent.processes.process import group_members
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.machine.preloaded import PRELOADED_ENV
from uvcc_engine.contract.run_files import files


def test_a_run_is_streamed_from_start_to_exit(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        assert console.ask(wire.WATCH, run="r")["exists"] is False
        ack = launched(pod, console, pod.spec(argv=[*pod.spec()["argv"], "5", "0"]))
        assert ack["ok"]
        ended = console.proc("p0r0s0t0", "exited")
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == "worker_p0r0s0t0.log" and len(m["lines"][-1]) > 9)
        assert (ended["rc"], ended["signal"]) == (0, "")
        rows = console.lines("training.csv")
        assert rows[0] == "step,loss,lr,toks_per_s"
        assert [r.split(",")[0] for r in rows[1:]] == ["0", "1", "2", "3", "4"]
        assert [e["event"] for e in console.records("events.jsonl")] == ["party_start"] + ["epoch_root"] * 5
        assert [b["step"] for b in console.records("heartbeat_rank0.jsonl")] == [0, 1, 2, 3, 4]
        assert console.records("exit.json")[0]["status"] == "done"
        assert console.records("result.json")[0]["result_hash"] == "ab" * 32
        assert console.lines("worker_p0r0s0t0.log") == ["started", "no newline at the end"]
        numbers = [m["seq"] for m in console.seen if m["op"] == wire.LINES]
        assert numbers == list(range(1, len(numbers) + 1))


def test_lines_reach_the_console_within_two_batches(pod: Pod) -> None:
    """On a busy machine one batch or another is late; that all are, only an agent does that looks too seldom."""

    def oldest_age(m: dict[str, Any]) -> float:
        if m["op"] != wire.LINES or m["src"] != "events.jsonl" or "epoch_root" not in m["lines"][0]:
            return float("inf")
        return float(m["ts"] - json.loads(m["lines"][0])["fields"]["at"])

    pod.start()
    with pod.console() as console:
        console.ask(wire.WATCH, run="r")
        launched(pod, console)
        console.until(lambda m: oldest_age(m) < 0.5)  # 0.1 s on an idle machine


def test_a_lost_link_costs_no_line_and_repeats_none(pod: Pod) -> None:
    pod.start()
    seqs: list[int] = []
    cursors: dict[str, list[int]] = {}
    with pod.console() as console:
        launched(pod, console)
    for _ in range(6):
        with pod.console(cursors=cursors) as console:
            console.ask(wire.WATCH, run="r")
            for _ in range(2):
                console.until(lambda m: m["op"] == wire.LINES and m["src"] == "events.jsonl", start=len(console.seen))
            seqs += [e["seq"] for e in console.records("events.jsonl")]
            cursors |= console.cursors()
    assert len(seqs) >= 12  # one at least of each batch, however slow the worker is
    assert seqs == list(range(len(seqs)))


def test_rotation_and_truncation_are_reported_without_losing_a_line(pod: Pod) -> None:
    pod.start()
    folder = pod.run_dir()
    folder.mkdir(parents=True)
    log, table = folder / "worker_p0r0s0t0.log", folder / "training.csv"
    log.write_text("1\n2\n")
    table.write_text("step\n1\n2\n")
    with pod.console() as console:
        console.ask(wire.WATCH, run="r")
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == log.name)
        with log.open("a") as f:
            f.write("3\n")
        log.rename(folder / "worker_p0r0s0t0.log.1")
        log.write_text("4\n")
        table.write_text("step\n7\n8\n")  # as long as before
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == log.name and m["lines"] == ["4"])
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == table.name and m["lines"][-1] == "8")
        assert console.lines(log.name) == ["1", "2", "3", "4"]
        assert console.lines(table.name) == ["step", "1", "2", "step", "7", "8"]
        rewinds = {m["src"]: m["reason"] for m in console.seen if m["op"] == wire.REWIND}
        assert rewinds == {log.name: "rotated", table.name: "truncated"}


def test_a_killed_worker_is_reported_at_once_and_its_group_with_it(pod: Pod) -> None:
    pod.start()
    family = ["sh", "-c", "sleep 1000 & sleep 1000"]
    with pod.console() as console:
        launched(pod, console, pod.spec(argv=family))
        who = pod.worker_id()
        wait_until(lambda: len(group_members(who.pid)) == 3, "the family is complete")
        os.kill(who.pid, signal.SIGKILL)
        ended = console.proc("p0r0s0t0", "exited")
        assert (ended["rc"], ended["signal"]) == (-9, "SIGKILL")
        wait_until(lambda: not group_members(who.pid), "its children are gone")
        console.ask(wire.WATCH, run="r")
        console.until(lambda m: m["op"] == wire.LINES and m["src"] == "events.jsonl")
        died = console.records("events.jsonl")[0]
        assert (died["event"], died["level"], died["fields"]["how"]) == ("worker_died", "error", "SIGKILL")


def test_what_stopped_a_worker_is_in_its_exit_record(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        launched(pod, console, pod.spec(argv=["no-such-command-here"]))
        assert console.proc("p0r0s0t0", "exited")["rc"] == 2
    record = files.read_json(pod.run_dir() / "exit.json")
    assert record["status"] == "failed"
    assert "no-such-command-here" in record["error"]
    assert record["hint"]
    assert "error: no such command" in (pod.run_dir() / "worker_p0r0s0t0.log").read_text()


def test_worker_starts_clean(pod: Pod) -> None:
    """Own session, no inherited files, default signals, its own environment."""
    pod.start()
    script = (
        # not through a pipe, of which the shell itself has an end for a moment
        "for f in /proc/$$/fd/*; do readlink $f; done > fds; grep -c -v -e /dev/null -e worker_ -e /fds fds; "
        "ps -o sid= -p $$; echo $$; echo $UVCC_RUN $UVCC_COORD $UVCC_RANK $UVCC_LEAD $EXTRA; pwd; "
        "grep SigIgn /proc/self/status; grep SigBlk /proc/self/status; echo ${OMP_NUM_THREADS-unset}"
    )
    with pod.console() as console:
        console.ask(wire.WATCH, run="r")
        spec = pod.spec("p0r1s0t0", argv=["bash", "-c", script], env={"EXTRA": "yes"})
        launched(pod, console, pod.spec(argv=["true"]), spec)
        console.until(lambda m: m["op"] == wire.LINES and len(console.lines("worker_p0r1s0t0.log")) >= 8)
        lines = [line.strip() for line in console.lines("worker_p0r1s0t0.log")]
    assert lines[0] == "0"
    assert lines[1] == lines[2]
    assert lines[3] == "r p0r1s0t0 1 0 yes"
    assert lines[4] == str(pod.run_dir())
    assert int(lines[5].split()[1], 16) == 0
    assert int(lines[6].split()[1], 16) == 0
    assert lines[7] == os.environ.get("OMP_NUM_THREADS", "unset")


def test_launch_is_obeyed_once_per_nonce_and_checked_first(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        first = console.ask(wire.LAUNCH, "L1", run="r", workers=[pod.spec()])
        again = console.ask(wire.LAUNCH, "L1", run="r", workers=[pod.spec()])
        assert first["workers"] == again["workers"]
        same = console.ask(wire.LAUNCH, "L2", run="r", workers=[pod.spec()])
        assert same["already"] is True
        other = console.ask(wire.LAUNCH, "L3", run="r", workers=[pod.spec(attempt=1)])
        assert "still runs" in other["error"]
        wrong = console.ask(wire.LAUNCH, run="r3", workers=[{**pod.spec(run="r3"), "polcy": ""}])
        assert "did you mean 'policy'" in wrong["hint"]
        assert not console.ask(wire.LAUNCH, run="r3", workers=[pod.spec(run="r4")])["ok"]
        assert not console.ask(wire.LAUNCH, run="../r", workers=[])["ok"]
        assert "malformed" in console.ask(wire.LAUNCH, run="r5")["error"]
        assert "unknown command" in console.ask("dance")["error"]
        assert sum(m["op"] == wire.PROC and m["state"] == "started" for m in console.seen) == 1


def test_rubbish_from_a_console_ends_that_console_only(pod: Pod) -> None:
    pod.start()
    with pod.console() as good, Console(pod.root, hello=False) as bad:
        bad.send_raw(b'{"op": "hello", "nonce": "x"}\nGET / HTTP/1.1\n\n')
        refused = bad.until(lambda m: m["op"] == wire.ACK and not m["ok"])
        assert "not a command" in refused["error"]
        bad.until_closed()
        assert good.ask(wire.PROBE)["ok"]


def test_a_slow_console_gets_every_acknowledgement_and_hears_what_was_dropped(pod: Pod) -> None:
    pod.start()
    folder = pod.run_dir()
    folder.mkdir(parents=True)
    (folder / "worker_p0r0s0t0.log").write_text("".join(f"line {n:07d} {'x' * 90}\n" for n in range(40_000)))
    (folder / "events.jsonl").write_text("".join(f'{{"seq":{n},"pad":"{"y" * 190}"}}\n' for n in range(60_000)))
    with pod.console() as console:
        console.ask(wire.WATCH, run="r")
        nonces = [console.post(wire.LEASE, ttl_s=0) for _ in range(50)]
        for nonce in nonces:
            assert console.until(lambda m, n=nonce: m["op"] == wire.ACK and m["nonce"] == n)["ok"]
        console.until(lambda m: m["op"] == wire.LINES and "line 0039999" in m["lines"][-1])
        assert [e["seq"] for e in console.records("events.jsonl")] == list(range(60_000))
        dropped = sum(m["n"] for m in console.seen if m["op"] == wire.DROPPED)
        assert dropped > 0
        assert dropped + len(console.lines("worker_p0r0s0t0.log")) == 40_000


@pytest.mark.ci(__file__)
def test_shared_modules_are_imported_once(pod: Pod) -> None:
    """A private worker without a policy is refused by its own main function, in a process that shares the imports."""
    pod.start(preload="colorsys,no_such_module")
    with pod.console() as console:
        launched(pod, console, {**pod.spec(argv=[]), "kind": "private"})
        assert console.proc("p0r0s0t0", "exited")["rc"] not in (0, 70)
        imports = console.ask(wire.HELLO)["imports"]
    assert imports["threads"] == 1
    assert list(imports["missing"]) == ["no_such_module"]
    record = files.read_json(pod.run_dir() / "exit.json")
    assert record["status"] == "failed"
    assert record["error"]


@pytest.mark.parametrize(
    ("cuda", "env", "shared"),
    [(None, {}, True), ("12.4", {}, False), (None, {"TORCHDYNAMO_VERBOSE": "1"}, False)],
    ids=["shared", "not before a GPU's fork", "not where a variable says how"],
)
def test_what_optimizers_import_is_imported_once_for_all_ranks_of_a_language_model(
    pod: Pod, tmp_path: Path, cuda: str | None, env: dict[str, str], shared: bool
) -> None:
    """By a torch that tells which process imports it; the ranks themselves cannot do anything with that."""
    package, told = tmp_path / "fake" / "torch", tmp_path / "told"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"class version:\n    cuda, hip = {cuda!r}, None\n")
    (package / "_dynamo.py").write_text(f"import os\nopen({str(told)!r}, 'a').write(f'{{os.getpid()}}\\n')\n")
    paths = os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])
    ready = pod.start(preload="torch", env={"PYTHONPATH": paths, PRELOADED_ENV: ""})
    coords = ["p0r0s0t0", "p0r1s0t0"]
    with pod.console() as console:
        workers = [{**pod.spec(c, argv=[], env=env, topology={"replicas": 2}), "kind": "lm"} for c in coords]
        launched(pod, console, *workers)
        for coord in coords:
            assert console.proc(coord, "exited")["rc"] != 0
        (zygote,) = psutil.Process(ready["pid"]).children()
    assert (told.read_text().split() if told.exists() else []) == ([str(zygote.pid)] if shared else [])


def test_all_ranks_of_a_world_are_told_where_to_meet(pod: Pod) -> None:
    pod.start()
    show = ["sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT"]
    coords = ["p0r0s0t0", "p0r0s0t1"]
    with pod.console() as console:
        console.ask(wire.WATCH, run="r")
        launched(pod, console, *(pod.spec(c, argv=show, topology={"tensor": 2}) for c in coords))
        for coord in coords:
            console.until(lambda m, c=coord: m["op"] == wire.LINES and m["src"] == f"worker_{c}.log")
        told = [console.lines(f"worker_{c}.log")[0].split() for c in coords]
        assert [t[:4] for t in told] == [["0", "0", "2", "127.0.0.1"], ["1", "1", "2", "127.0.0.1"]]
        assert told[0][4] == told[1][4]
        assert 20_000 <= int(told[0][4]) < 32_000  # no outgoing connection of this machine takes it before they meet
        launched(pod, console, pod.spec(run="alone", argv=show), run="alone")
        console.ask(wire.WATCH, run="alone")
        console.until(lambda m: m["op"] == wire.LINES and m["run"] == "alone" and m["src"].endswith(".log"))
        assert console.lines("worker_p0r0s0t0.log", "alone") == [""]


def test_a_worker_gives_way_as_its_spec_asks(pod: Pod) -> None:
    pod.start()
    with pod.console() as console:
        ack = launched(pod, console, pod.spec(env={**pod.spec().get("env", {}), "UVCC_WORKER_NICE": "7"}))
        pid = ack["workers"][0]["pid"]
        level = max(7, os.getpriority(os.PRIO_PROCESS, 0))  # nobody can go back before where it was started
        wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == level, "niceness")
        if hasattr(os, "SCHED_BATCH"):
            wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_BATCH, "SCHED_BATCH")
