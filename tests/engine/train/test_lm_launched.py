"""Several ranks on one host under torchrun: a halt by ctrl-c ends the command as it ends a single rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lm_kit import PATIENCE_S, SMALL, wait_for_step
from torch.distributed.elastic.multiprocessing.api import SignalException

from uvcc_engine.contract.run_files import files
from uvcc_engine.train import launched


def _end(directory: Path, rank: int, status: str) -> Path:
    path = directory / files.exit_name(rank, lead=rank == 0)
    path.write_text(json.dumps({"status": status}))
    return path


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("halted", "halted", 0), ("halted", "failed", 130), ("halted", "", 130), ("halted", "earlier", 130)],
)
def test_a_signal_is_a_halt_where_every_rank_of_this_start_halted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: str,
    second: str,
    code: int,
) -> None:
    def torchrun(asked: list[str]) -> None:
        assert asked == ["--standalone", "x"]
        assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "900"
        _end(tmp_path, 0, first)
        if second == "earlier":
            os.utime(_end(tmp_path, 1, "halted"), (1.0, 1.0))
        elif second:
            _end(tmp_path, 1, second)
        raise SignalException("Process 7 got signal: 2", sigval=signal.SIGINT)

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "900")
    monkeypatch.setattr(launched.run, "main", torchrun)
    assert launched.main([str(tmp_path), "2", "--standalone", "x"]) == code
    said = capsys.readouterr().err
    assert ("--resume" in said) == (code != 0)
    monkeypatch.setattr(launched.run, "main", lambda asked: None)
    assert launched.main([str(tmp_path), "2", "--standalone", "x"]) == 0


@pytest.mark.ci(__file__)
def test_one_ctrl_c_ends_two_ranks_and_their_torchrun_with_nothing_but_a_checkpoint(tmp_path: Path) -> None:
    config, out = tmp_path / "small.json", tmp_path / "run"
    config.write_text(json.dumps({**SMALL, "train": {**SMALL["train"], "steps": 100_000}}))
    command = [sys.executable, "-m", "uvcc_engine.cli", "train", str(config), "--out", str(out), "--ranks", "2"]
    interrupted = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"  # not a job's
    code = f"{interrupted}; os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for_step(tmp_path, 3, [process, process])
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert (process.returncode, "Traceback" in said) == (0, False), said[-2000:]
    ends = [json.loads((out / files.exit_name(rank, lead=rank == 0)).read_text()) for rank in (0, 1)]
    assert [one["status"] for one in ends] == ["halted", "halted"]
