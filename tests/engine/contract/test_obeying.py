"""One call a step: a trainer of one's own is held, released and halted, alone and with other ranks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.contract.run_files.obeying import Obeying, TrainingHalted, sha256_of

RUN = "mine"


def ask(directory: Path, mode: str, nonce: str = "n1") -> None:
    write_halt(directory, HaltRequest(mode, nonce, RUN))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(directory: Path) -> list[tuple[str, str]]:
    return [(e["event"], str(e["fields"].get("nonce", ""))) for e in lines(directory / "events.jsonl")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunWriter]:
    kept = signal.getsignal(signal.SIGTERM)
    writer = RunWriter.open(tmp_path / "run", run=RUN)
    yield writer
    writer.close()
    signal.signal(signal.SIGTERM, kept)


def paused(writer: RunWriter, acts: list[Callable[[], None]]) -> Obeying:
    """Obeys; each wait of a hold does the next of these acts."""
    left = iter(acts)
    return Obeying(writer, pause=lambda seconds: next(left)())


def test_a_step_writes_row_and_heartbeat(run: RunWriter) -> None:
    run.step(1, loss=2.0, lr=0.1, toks_per_s=10.0)
    run.step(2, loss=1.0, lr=0.1, toks_per_s=10.0)
    run.close()
    assert (run.directory / "training.csv").read_text().splitlines()[-1].startswith("2,1")
    assert [b["step"] for b in lines(run.directory / "heartbeat_rank0.jsonl")] == [1, 2]


def test_a_hold_waits_and_a_release_goes_on(run: RunWriter) -> None:
    ask(run.directory, "hold")
    obeying = paused(run, [lambda: None, lambda: ask(run.directory, "release")])
    assert obeying.obey(7) is None
    beats = [(b["step"], b["phase"], b.get("halt_nonce")) for b in lines(run.directory / "heartbeat_rank0.jsonl")]
    assert beats[0] == (7, "hold", "n1")
    assert beats[-1] == (7, "train", None)
    assert events(run.directory) == [("held", "n1"), ("released", "n1")]


def test_a_hold_that_becomes_a_halt_ends_it(run: RunWriter) -> None:
    ask(run.directory, "hold")
    asked = paused(run, [lambda: ask(run.directory, "halt", "n2")]).obey(7)
    assert asked == HaltRequest("halt", "n2")


def test_a_halt_saves_and_ends_with_0(run: RunWriter, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"

    def save() -> Path:
        saved.write_bytes(b"weights")
        return saved

    run.step(1, loss=1.0, save=save)
    assert not saved.exists()
    ask(run.directory, "halt")
    with pytest.raises(TrainingHalted) as halted:
        run.step(2, loss=1.0, save=save)
    run.close()
    want = hashlib.sha256(b"weights").hexdigest()
    assert (halted.value.code, halted.value.step, halted.value.checkpoint) == (0, 2, want)
    left = json.loads((run.directory / "exit.json").read_text())
    assert (left["status"], left["step"], left["checkpoint"]) == ("halted", 2, want)
    assert lines(run.directory / "heartbeat_rank0.jsonl")[-1]["halt_nonce"] == "n1"
    assert events(run.directory) == [("checkpoint_written", ""), ("halted", "n1")]


def test_without_a_checkpoint_it_says_so(run: RunWriter) -> None:
    ask(run.directory, "halt")
    with pytest.raises(TrainingHalted):
        run.step(3, loss=1.0)
    run.close()
    assert json.loads((run.directory / "exit.json").read_text())["checkpoint"] == ""
    assert ("checkpoint_written", "") not in events(run.directory)


def test_a_save_that_left_nothing_is_named(run: RunWriter, tmp_path: Path) -> None:
    ask(run.directory, "halt")
    with pytest.raises(UvccError, match="cannot be read") as failed:
        run.step(3, loss=1.0, save=lambda: tmp_path / "not-there.pt")
    assert "let save return" in failed.value.hint
    assert not (run.directory / "exit.json").exists(), "a halt without its checkpoint must not look like one with it"


def test_another_runs_request_is_not_obeyed(run: RunWriter) -> None:
    write_halt(run.directory, HaltRequest("halt", "n1", "another"))
    run.step(1, loss=1.0)


def test_sigterm_halts_at_the_next_step(run: RunWriter) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run.step(1, loss=1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(TrainingHalted):
        run.step(2, loss=1.0)


def test_a_handler_of_the_programs_own_stays(run: RunWriter) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    run.step(1, loss=1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    run.step(2, loss=1.0)
    assert heard == [signal.SIGTERM]


def test_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """One rank has seen the request a step earlier than the other; both stop after the same step."""
    ranks, votes, barrier = 2, [0, 0], threading.Barrier(2, timeout=120)
    stopped: dict[int, int] = {}
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        def largest(vote: int) -> int:
            votes[rank] = vote
            barrier.wait()
            found = max(votes)
            barrier.wait()
            return found

        try:
            there = tmp_path / f"rank{rank}"  # two machines: each has a control file of its own
            with RunWriter.open(there, run=RUN, rank=rank, lead=rank == 0) as writer:
                obeying = Obeying(writer, largest=largest)
                for step in range(1, 20):
                    if step == 5 + rank:
                        ask(there, "halt")
                    asked = obeying.obey(step)
                    if asked is not None:
                        obeying.halted(asked, step)
                        stopped[rank] = step
                        return
        except (UvccError, OSError, threading.BrokenBarrierError) as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=train, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert stopped == {0: 5, 1: 5}
    assert (tmp_path / "rank0" / "exit.json").exists()
    assert not (tmp_path / "rank1" / "exit.json").exists()


TORCHRUN = """
import os, sys, torch, torch.distributed as dist
from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
dist.init_process_group("gloo")
with RunWriter.from_env() as run:
    for step in range(1, 50):
        if step == 6 and dist.get_rank() == 1:
            write_halt(run.directory, HaltRequest("halt", "n1", run.run))
        run.step(step, loss=1.0 / step, save=lambda: None)
print("never")
"""


@pytest.mark.ci(__file__)
def test_under_torchrun_all_ranks_halt_together(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    env = os.environ | {
        "UVCC_RUN_DIR": str(tmp_path / "run"),
        "UVCC_RUN": RUN,
        "UVCC_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, "never" in done.stdout) == (0, False), done.stderr[-2000:]
    exits = {p.name: json.loads(p.read_text()) for p in (tmp_path / "run").glob("exit*.json")}
    assert set(exits) == {"exit.json", "exit_rank1.json"}
    assert {(e["status"], e["step"]) for e in exits.values()} in ({("halted", 6)}, {("halted", 7)})
    rows = (tmp_path / "run" / "training.csv").read_text().splitlines()
    assert len(rows) == 1 + exits["exit.json"]["step"], "one row a step, by the first rank alone"


def test_a_folders_hash_is_that_of_sha256sum(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "x").write_bytes(b"1")
    (folder / "a").write_bytes(b"2")
    listed = subprocess.run(
        "find . -type f | sed 's#^./##' | LC_ALL=C sort | xargs sha256sum",
        shell=True,
        cwd=folder,
        capture_output=True,
        check=True,
    )
    assert sha256_of(folder) == hashlib.sha256(listed.stdout).hexdigest()
