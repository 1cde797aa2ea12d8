"""What a training takes: one small case by real workers, and what the benchmark refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from uvcc_engine.bench import epochs
from uvcc_engine.bench.launch.fleet import until
from uvcc_engine.bench.peers import mpspdz_training
from uvcc_engine.bench.peers.mpspdz import MPSPDZ
from uvcc_engine.bench.scenarios.epoch_cost import Trained
from uvcc_engine.bench.work.handwriting import PIXELS, digits
from uvcc_engine.contract.errors import ConfigError


@pytest.mark.ci(__file__)
def test_a_case_is_trained_without_proofs_and_with_them() -> None:
    case = replace(epochs.CASES["logistic"], steps=7, val_every=3, proved_steps=4, batch=32)
    found = {(r.name, r.metric): r for r in epochs.case_rows("logistic", case, None)}
    step, proved = found["logistic_step", "seconds"], found["logistic_step_proved", "seconds"]
    assert step.runs == 2  # of seven, the first two and those that validate (3, 6 and the last) are not counted
    assert proved.runs == 2
    assert proved.value > step.value == proved.reference
    assert found["logistic_epoch", "seconds"].value == pytest.approx(1875 * step.value)
    good = found["logistic_good", "accuracy"]
    assert 0.1 < good.value < 0.85
    assert good.met is False
    assert found["logistic_until_good", "seconds"].value > 3 * step.min
    assert found["logistic_memory", "bytes"].value > 1e8


def test_a_training_is_good_at_its_first_validation_that_is_as_good() -> None:
    made = Trained([1.0, 2.5, 4.0, 6.0], [1.5], {2: 0.5, 3: 0.9, 4: 0.8}, 0.0)
    assert made.reached(0.5) == (2.5, 0.5)
    assert made.reached(0.85) == (4.0, 0.9)
    assert made.reached(0.95) == (4.0, 0.9)  # never: the best one is told, which misses its bar


def test_the_real_digits_are_read_and_others_refused(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "digits"
    folder.mkdir(parents=True)
    for number in range(10):
        (folder / f"{number}.json").write_text(json.dumps({"data": [number / 10] * PIXELS * 3}))
    data = digits(tmp_path, 1, 5, 4)
    assert (data.train_x.shape, data.test_x.shape, data.classes) == ((21, PIXELS), (5, PIXELS), 10)
    assert data.val_x is not None
    assert len(data.val_x) == 4
    assert np.allclose(data.train_x[:, 0] * 10, data.train_y)
    (folder / "7.json").write_text(json.dumps({"data": [0.5] * (PIXELS - 1)}))
    with pytest.raises(ConfigError, match=r"7\.json holds 783 numbers"):
        digits(tmp_path, 1, 5, 4)
    (folder / "7.json").unlink()
    with pytest.raises(ConfigError, match=r"7\.json holds no digits"):
        digits(tmp_path, 1, 5, 4)


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(MPSPDZ, raising=False)
    assert epochs.compared("lenet", epochs.CASES["lenet"], []) == []
    assert "mpspdz, lenet: absent: UVCC_MPSPDZ names no folder" in capsys.readouterr().err


def test_a_peer_s_step_is_its_own_clock_s_over_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    party = tmp_path / "replicated-ring-party.x"
    party.write_text("#!/bin/sh\necho 'Time1 = 2.5 seconds (1 MB, 2 rounds)'\n")
    party.chmod(0o755)
    seen = "import pathlib, sys; pathlib.Path('seen').write_text(' '.join(sys.argv[4:]))\n"
    (tmp_path / "compile.py").write_text(seen)
    monkeypatch.setenv(MPSPDZ, os.fspath(tmp_path))
    assert mpspdz_training.step_seconds("secureml", 128) == (0.25, "")
    assert (tmp_path / "seen").read_text() == "secureml 10 128 trunc_pr split3"
    (tmp_path / "compile.py").write_text("raise SystemExit('no such layer')\n")
    assert mpspdz_training.step_seconds("secureml", 128) == (0.0, "could not be compiled: no such layer")
    assert mpspdz_training.step_seconds("gpt", 4) == (0.0, "no program for it")


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown case 'resnet'"):
        epochs.main(["--case", "resnet"])


@pytest.mark.ci(__file__)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_workers(tmp_path: Path, end: signal.Signals) -> None:
    """They would hold the processor, or the GPU, of whatever is measured next."""
    inside = {**os.environ, "TMPDIR": os.fspath(tmp_path)}
    command = [sys.executable, "-m", "uvcc_engine.cli", "bench", "epochs", "--case", "logistic"]
    bench = subprocess.Popen(command, env=inside, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(_working_in(tmp_path)) == 3, 500, "the workers' beginning")
        bench.send_signal(end)
        bench.wait(120)
        until(lambda: not _working_in(tmp_path), 500, "the workers' end")
    finally:
        bench.kill()
        for pid in _working_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def _working_in(folder: Path) -> list[int]:
    """The processes whose standard output is a file of this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1").startswith(f"{folder}/"):
                found.append(int(entry.name))
    return found
