"""What a run's files and processes do wrong, by the names of the failure table; each says what the console did."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from injections_pod import Act, Site

from uvcc_console.core import events as ev
from uvcc_console.core.folding.state import fold
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.halt.machine import HALT, Ladder, LadderAction, Send
from uvcc_console.plan.plan import Phase, make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.decoder import Decoder
from uvcc_console.rollout.stages.training.phases import trouble
from uvcc_console.rollout.stages.training.silence import hang
from uvcc_engine.agent.consoles.tail import BACKLOG, LineBatch, RunTail, Skipped
from uvcc_engine.agent.processes.process import ProcessId
from uvcc_engine.contract.agent_protocol.agent_messages import Lines

# -- files of a run --------------------------------------------------------------------------------------------------


def file_goes(injure: Callable[[Path], None], name: str = "training.csv") -> Act:
    """Lines are read, then this happens to their file: what the console is told, in order."""

    async def act(s: Site) -> str:
        folder = s.folder / "watched"
        folder.mkdir()
        path = folder / name
        path.write_text("step,loss\n1,2.0\n")
        tail = RunTail(folder, {})
        first = [f for f in tail.poll(1 << 20, finished=False) if isinstance(f, LineBatch)]
        assert [line for f in first for line in f.lines] == ["step,loss", "1,2.0"]
        injure(path)
        said = []
        for _ in range(3):
            for found in tail.poll(1 << 20, finished=True):
                if isinstance(found, LineBatch):
                    said.append(f"{len(found.lines)} lines")
                elif isinstance(found, Skipped):
                    said.append("skipped, counted")
                else:
                    said.append(found.reason)
        tail.close()
        return ", ".join(said)

    return act


def truncated_same_size(path: Path) -> None:
    with path.open("r+b") as f:
        f.truncate(0)
        f.write(b"step,loss\n9,8.0\n")


def rotated(path: Path) -> None:
    path.rename(path.with_name("training.csv.1"))
    path.write_text("step,loss\n2,1.9\n")


def deleted(path: Path) -> None:
    path.unlink()


def partial(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"2,1.9\n3,1.")


def nul_bytes(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"\0\0\0\n2,1.9\n")


def invalid_utf8(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"\xff\xfe\n2,1.9\n")


def long_line(path: Path) -> None:
    with path.open("ab") as f:
        f.write(b"x" * (10 * BACKLOG) + b"\n2,1.9\n")


# -- processes of a run ----------------------------------------------------------------------------------------------


def _full() -> Phase:
    _, profile = load("demo")
    return make_plan("demo-1", "demo", profile).phases["full"]


COORDS = ("p0r0s0t0", "p1r0s0t0", "p2r0s0t0")


def _started(*more: ev.Event) -> Snapshot:
    first: list[ev.Event] = [ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=60, sid_job="ab")]
    first += [ev.WorkerProcess(pod=c[:4], coord=c, state="started", pid=n + 1) for n, c in enumerate(COORDS)]
    return fold([*first, *more])


async def heartbeat_stalls(s: Site) -> str:
    snapshot = _started(ev.HeartbeatRead(ts=100.0, pod="p0r0", coord=COORDS[0], record={"step": 3}))
    assert trouble(snapshot, _full()) is None  # the processes live
    return "named the hang" if hang(snapshot, _full(), 50.0, 120.0, 300.0) else "waited on"


async def pid_reuse(s: Site) -> str:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        now = ProcessId.of(child.pid)
        assert now is not None
        before = ProcessId(now.pid, now.starttime - 1, now.boot_id)  # who had the number before
        assert not before.send(15)
        return "signalled nobody" if now.alive() and child.poll() is None else "killed a stranger"
    finally:
        child.communicate(b"\n")


async def exits_at_once(s: Site) -> str:
    """The agent hears of the end from the kernel, not from a file."""
    snapshot = _started(ev.WorkerProcess(pod="p1r0", coord=COORDS[1], state="exited", pid=2, rc=1))
    found = trouble(snapshot, _full())
    assert found is not None
    return f"named {found.coord}"


async def stale_result(s: Site) -> str:
    decoder = Decoder("p0r0", "demo-2.full", "full", COORDS[0])
    line = '{"run": "demo-1.full", "result_hash": "ab", "values": {}}'
    lines = Lines(run="demo-2.full", src="result.json", ino=1, off=60, lines=[line])
    return "believed nothing" if decoder.events(lines) == [] else "believed it"


def _pods(actions: list[LadderAction]) -> list[str]:
    return [a.pod for a in actions if isinstance(a, Send) and a.rung == HALT]


async def one_pod_dead(s: Site) -> str:
    ladder = Ladder("n", dict.fromkeys(("p0r0", "p1r0", "p2r0"), 1))
    ladder.start(HALT, 0.0)
    ladder.link("p2r0", False, 0.1)
    for pod in ("p0r0", "p1r0"):
        for stage in ("halted", "gone"):
            ladder.report(pod, stage, 1.0, coord=f"{pod}s0t0", step=7, checkpoint="ab")
    verified = sorted(name for name, e in ladder.evidence().items() if e.gone and e.checkpoints)
    return f"verified {', '.join(verified)}" + ("" if ladder.done else ", not done")


async def halt_ack_lost(s: Site) -> str:
    ladder = Ladder("n", dict.fromkeys(("p0r0", "p1r0", "p2r0"), 1))
    assert _pods(ladder.start(HALT, 0.0)) == ["p0r0", "p1r0", "p2r0"]
    ladder.acked("p0r0", HALT, 0.1)
    ladder.acked("p1r0", HALT, 0.1)
    again = [pod for at in (1.0, 2.0, 3.0) for pod in _pods(ladder.tick(at))]
    return "sent it again" if again and set(again) == {"p2r0"} else f"sent to {again}"


FILES: list[tuple[str, Act, str]] = [
    ("file truncate same size", file_goes(truncated_same_size), "truncated, 2 lines"),
    ("file rotate", file_goes(rotated), "rotated, 2 lines"),
    ("file delete", file_goes(deleted), ""),
    ("partial line", file_goes(partial), "1 lines"),
    ("NUL", file_goes(nul_bytes), "2 lines"),
    ("invalid utf-8", file_goes(invalid_utf8), "2 lines"),
    ("10 MB line", file_goes(long_line, "worker_p0r0s0t0.log"), "skipped, counted, 1 lines"),
    ("heartbeat stall while process alive", heartbeat_stalls, "named the hang"),
    ("pid reuse", pid_reuse, "signalled nobody"),
    ("job exits before pid file", exits_at_once, "named p1r0s0t0"),
    ("stale result.json", stale_result, "believed nothing"),
    ("one of N pods dead (HALT quorum)", one_pod_dead, "verified p0r0, p1r0, not done"),
    ("HALT ack lost", halt_ack_lost, "sent it again"),
]
