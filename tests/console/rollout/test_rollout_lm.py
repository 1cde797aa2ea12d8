"""The language model from the console: real pod, real ranks. Halt, resume, a killed rank, resume: the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demorun import PATIENT

from uvcc_console.core.journal.journal import Journal, read_all
from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.machine.free_ports import ports

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "engine" / "train"))
from forked import ForkedRank, train_command

STEPS = 160
SETTINGS = (
    f"job.steps={STEPS}",
    "job.overrides.train.eval_every=80",
    "smoke.steps=12",
    "job.overrides.train.warmup=3",
    "gates.at=[50, 100]",
    *PATIENT,
)
UVCC = [sys.executable, "-c", "import sys; from uvcc_console.cli.main import main; sys.exit(main())"]


class Operator:
    """A shell of the operator's with its own data folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "UVCC_HOME": str(home / "data"), "TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
        self.started: list[subprocess.Popen[str]] = []
        self._seen = Snapshot()

    def start(self, *args: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*UVCC, *args], env=self.env, text=True, **pipes)
        self.started.append(process)
        return process

    def run(self, *args: str) -> str:
        process = self.start(*args)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{args}: {out}\n{err}"
        return out

    @property
    def run_dir(self) -> Path:
        return next((self.home / "data" / "runs").iterdir())

    def snapshot(self) -> Snapshot:
        try:
            journal = Journal(self.run_dir / "journal.sqlite", readonly=True)
        except (StopIteration, UnreadableError):  # not made yet
            return Snapshot()
        try:
            self._seen = read_all(journal, self._seen)  # twenty looks a second would each fold all of it
            return self._seen
        except UnreadableError:  # it is just being created
            return Snapshot()
        finally:
            journal.close()

    def wait(self, what: str, condition: Callable[[Snapshot], Any], limit: float = 500.0) -> Snapshot:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            s = self.snapshot() if (self.home / "data" / "runs").exists() else Snapshot()
            if condition(s):
                return s
            assert not s.ended, f"ended while waiting for {what}: {s.detail}"
            time.sleep(0.05)
        raise AssertionError(f"no {what} in {limit:.0f} s: {s.stage} {s.status} {s.detail}")


pytestmark = pytest.mark.timeout(2400)


@pytest.fixture
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    home = Path(f"/tmp/uvcc-lm-{os.getpid()}")
    home.mkdir(mode=0o700)
    me = Operator(home)
    try:
        yield me
    finally:
        if (home / "data" / "runs").exists() and not me.snapshot().ended:
            me.start("teardown", me.run_dir.name).wait(120)
        for process in me.started:
            if process.poll() is None:
                process.kill()
        subprocess.run(["rm", "-rf", str(home)], check=True)


def _uninterrupted(folder: Path) -> list[ForkedRank]:
    """The same job as two bare ranks, without a console and without a stop."""
    folder.mkdir()
    (port,) = ports(1)
    keys = ["data.source=python_docs", "data.val_percent=5", "runtime.device=cpu"]
    keys += [f"train.{k}" for k in ("lr=3.0e-3", "warmup=3", "log_every=1", "save_every=40", f"steps={STEPS}")]
    command = ["train_showcase", "--out", str(folder / "run"), "--run", "whole"]
    command += [x for key in keys for x in ("--set", key)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [{"RANK": str(r), "LOCAL_RANK": str(r), "MASTER_PORT": str(port)} for r in (0, 1)]
    return [ForkedRank({**env, **rank}, folder / f"said{rank['RANK']}", train_command(command)) for rank in ranks]


def test_halted_killed_and_resumed_it_ends_in_the_bits_of_the_uninterrupted_run(
    operator: Operator, tmp_path: Path
) -> None:
    whole = _uninterrupted(tmp_path / "whole")
    sets = [x for setting in SETTINGS for x in ("--set", setting)]
    operator.start("rollout", "local-lm-smoke", "--headless", "--yes", "--quiet", *sets)
    stop_at = random.Random(time.time_ns()).randrange(5, 30)  # any step must do
    operator.wait("step", lambda s: s.phase == "full" and s.step >= stop_at)
    run = operator.run_dir.name
    operator.run("halt", run, "--now")
    s = operator.wait("halt", lambda s: s.stage and s.stage.status == "waiting")
    halted_at = s.halt.step
    assert stop_at <= halted_at < STEPS
    assert s.halt.verified == s.halt.total == 1

    operator.run("resume", run)
    # at once: what a busy machine shows of its workers is seconds behind them, and they may not be through by then
    s = operator.wait("a step after the resume", lambda s: s.attempt == 1 and s.phase == "full" and s.step > halted_at)
    victim = s.workers["p0r1s0t0"]
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    s = operator.wait("named failure", lambda s: s.status == "failed", 150.0)  # not after one of the waits of minutes
    print(f"halted at step {halted_at}; the killed rank had its name after {time.monotonic() - killed:.1f} s")
    assert "p0r1s0t0" in s.detail
    assert "SIGKILL" in s.detail

    done = json.loads(operator.run("resume", run, "--wait", "--json"))
    assert done["status"] == "ok"
    names = ("loss_falls", "toks_per_s", "gate_entropy", "gate_collapse", "watchdog_dumps", "config", "halt_drill_s")
    of_windows = [f"{gate}@{step}" for step in (50, 100) for gate in ("loss_falls", *names[1:4])]
    assert done["gates"] == dict.fromkeys([*names, *of_windows], True)
    said = [p.communicate(300)[1] for p in whole]
    assert [p.returncode for p in whole] == [0, 0], said
    expected = json.loads((tmp_path / "whole" / "run" / "result.json").read_text())["result_hash"]
    assert done["result_hash"] == expected
    _what_came_home(operator, expected)


def _what_came_home(operator: Operator, expected: str) -> None:
    home = operator.run_dir / "artifacts" / "full" / "p0r0"
    manifest = checkpoint.verify(home / "checkpoints" / f"step-{STEPS}")
    assert manifest.rank(0).files["rank0.safetensors"]["sha256"] == expected
    rows = (home / "training.csv").read_text().splitlines()
    assert rows[0] == "step,loss,lr,toks_per_s,toks_per_s_rank,tflops_rank"
    assert [int(r.split(",")[0]) for r in rows[1:]] == list(range(1, STEPS + 1))
    losses = [float(r.split(",")[1]) for r in rows[1:]]
    assert sum(losses[-30:]) < sum(losses[:30]) - 15.0  # 20 on one kind of processor, 19.8 on another
    assert [row.split(",")[0] for row in (home / "val.csv").read_text().splitlines()] == ["step", "80", "160"]
    assert json.loads((home / "metrics.json").read_text())["steps"] == STEPS
    assert {"python", "torch", "env"} <= json.loads((home / "env.json").read_text()).keys()
    assert list((home / "tb").glob("events.out.tfevents.*"))
    assert "worker_start coord=p0r0s0t0" in (home / "worker_p0r0s0t0.log").read_text()
    info = dict(line.split(": ", 1) for line in (home / "run.info").read_text().splitlines())
    assert re.fullmatch("[0-9a-f]{16,64}", info["code_hash"])
    for rank in (0, 1):
        beats = [json.loads(x) for x in (home / f"heartbeat_rank{rank}.jsonl").read_text().splitlines()]
        assert {b["coord"] for b in beats} == {f"p0r{rank}s0t0"}
        training = next(b for b in reversed(beats) if b["phase"] == "train")
        wanted = {"loss", "toks_per_s", "dt_fetch_s", "gate_entropy_mean", "gate_collapse_frac", "mem_mib"}
        assert wanted | {"attn_cmp", "attn_sel", "attn_win"} <= set(training)
