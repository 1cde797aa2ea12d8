"""``uvcc plan``: what a rollout would do and cost, without a run folder, a provider or a row of data."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from uvcc_console.cli.main import main
from uvcc_console.cli.start.plan import lines
from uvcc_console.plan.plan_rehearsal import foretold
from uvcc_console.plan.step_forecast import apart
from uvcc_engine.simulate.deployment import needs

sys.path.insert(0, str(Path(__file__).parents[3]))
from docs.make import growth


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.ci("tests/engine/private/test_step_rehearsal.py")
def test_a_private_job_is_rehearsed_and_its_network_foretold(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["job.epochs=2", "job.batch=100", "limits.hourly=6", "limits.total=9"]
    flags = [part for one in sets for part in ("--set", one)]
    assert main(["plan", "demo", "--json", "--mbit", "100", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    step, over = said["step"], said["foretold"]
    assert step["rounds"] > 4
    assert over["rtt_s"] == 0  # local pods
    assert over["network_s"] == pytest.approx(step["busiest"] * step["bytes"] * 8 / 100e6)
    assert 1.0 < step["busiest"] < 3.0  # the party that deals sends most
    assert over["full_s"] == pytest.approx(29 * (over["network_s"] + step["processes"]["party_cpu"]))
    assert over["low_s"] < over["step_s"] <= over["high_s"]
    assert said["pods"] == 3
    assert "loss" in said["reveal"]
    assert not (home / "runs").exists()
    text = "\n".join(lines(said))
    assert "an epoch   14 steps, " in text
    assert "at the hourly cap $0.0" in text
    assert "the smoke measures the pods themselves" in text
    assert "on links of 0 ms" in text
    assert f"a number   16 bits behind the point; what the layers give leaves room for {step['most_frac_bits']}" in text
    assert step["most_frac_bits"] >= 16


def test_the_text_says_pods_steps_caps_and_what_is_revealed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "prime-smoke-r2", "--no-rehearsal"]) == 0
    said = capsys.readouterr().out
    assert "pods       6 at hyperstack" in said
    assert "replicas 2" in said
    assert "reveals    loss" in said
    assert "a failure  pods are kept 5 minutes for a decision" in said
    assert "$" in said
    assert main(["plan", "m7c-1gpu"]) == 0
    night = (
        "a failure  3 times it goes on by itself where a worker was killed or a pod is silent; else pods are kept 30"
    )
    assert night in capsys.readouterr().out
    assert "in the smoke phase" in said
    assert main(["plan", "local-lm-smoke"]) == 0
    said = capsys.readouterr().out
    assert "lm" in said
    assert "reveals" not in said


def test_what_does_not_fit_is_said_before_anything_is_rehearsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "demo", "--set", "job.modle=x"]) == 2
    assert "did you mean job.model?" in capsys.readouterr().err
    assert main(["plan", "demo", "--set", "job.model=[{linear: 3}, cat]"]) == 2
    assert "unknown layer 'cat'" in capsys.readouterr().err
    for odd in (["--mbit", "0"], ["--mbit", "inf"], ["--rtt", "-1"], ["--rtt", "inf"], ["--rtt", "nan"]):
        assert main(["plan", "demo", *odd]) == 2
        assert "--mbit a rate above 0" in capsys.readouterr().err


SIZED = {"features": 4, "classes": 2, "layers": [{"type": "dense", "inputs": 4, "outputs": 2}]}


def test_a_model_of_other_rows_than_the_packaged_ones_is_refused_where_no_data_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The plan rehearsed it without a word, and the run refused it in its first second."""
    sized = ("--set", f"job.model={json.dumps(SIZED)}")
    said = (
        "job.data names no rows, and the packaged ones do not fit: the data has 64 features and 10 classes, job.model"
    )
    for argv in (["plan", "demo", *sized], ["rollout", "demo", "--headless", *sized], ["demo", "--headless", *sized]):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", "demo", "--set", "job.model=lenet"]) == 2
    assert "lenet takes 784 and 10" in capsys.readouterr().err
    assert main(["plan", "demo", "--no-rehearsal", "--elsewhere", *sized]) == 0
    assert main(["plan", "demo", "--no-rehearsal", "--set", "job.model=gpt-tiny"]) == 0  # of the packaged text
    assert capsys.readouterr().err == ""


def worker(rounds: float, sent: float, seconds: float) -> dict[str, object]:
    """A rehearsed step of which only the busiest party's computing counts."""
    return {"rounds": rounds, "bytes": sent, "busiest": 1.0, "processes": {"party_cpu": seconds, "high": 0.0}}


def test_seconds_are_rounds_bytes_and_computing_one_after_the_other() -> None:
    links = (0.02, 1e7)
    found = foretold(apart(worker(10, 1e6, 0.5), *links), 100, links)
    assert found["network_s"] == pytest.approx(0.2)  # a round takes one way: both messages travel at once
    assert found["step_s"] == pytest.approx(0.7)
    assert found["full_s"] == pytest.approx(70.0)


def test_the_plan_counts_a_step_as_the_page_about_a_billion_weights_does() -> None:
    step, place, _ = growth.forecast()
    page = growth.page()
    told = next(line for line in page.splitlines() if line.startswith("| **a step, at least**"))
    for cell, (_, one_way_s, bits) in zip(told.split("|")[2:-1], growth.PLACES, strict=True):
        found = needs(step, replace(place, one_way_s=one_way_s, link_bits=bits))
        links = (2 * one_way_s, bits / 8)
        over = foretold(apart(worker(step.rounds, found.worker_bytes, found.compute_s), *links), 1, links)
        assert over["step_s"] == pytest.approx(found.step_s)
        assert cell.strip() == f"**{over['step_s']:,.0f} s**"
    assert page == (growth.DOCS / "growth.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("profile", "change", "said"),
    [
        ("m7c-1gpu", "smoke.steps=5", "gates.loss_falls needs 2 rows, a smoke of 5 steps"),
        ("m7c-1gpu", "gates.at=[100, 90000]", "gates.at names step 90000"),
        ("m7c-2xa100", "fleet.image=cuda_12_4_pytorch_2_4", "torch 2.4 is too old"),
        ("local-lm-smoke", "gates.resume_at=30", "the first checkpoint is that of step 40"),
        ("demo", "gates.resume_at=3", "gates.resume_at is of language models"),
        ("local-smoke-r2", "smoke.steps=1", "gates.loss_falls needs the losses of 2 steps, the smoke has 1"),
        ("local-smoke-r2", "job.reveal=[accuracy]", "gates.loss_falls, and job.reveal opens no loss"),
        ("m7c-1gpu", "job.overrides.train.grad_clip=0", "train.grad_clip=0.0"),
        ("m7c-1gpu", "job.overrides.train.keep=0", "train.keep=0"),
        ("m7c-1gpu", "job.overrides.train.eval_batches=0", "train.eval_batches=0"),
        ("m7c-1gpu", "job.overrides.train.log_every=0", "train.log_every=0"),
        ("m7c-1gpu", "job.overrides.train.warmup=-1", "train.warmup=-1"),
        ("demo", "job.warmup=91", "job.warmup is 91, and the full run has 60 steps: it would never reach"),
        ("local-lm-smoke", "job.overrides.train.warmup=121", "train.warmup is 121, and the full run has 120 steps"),
        ("m7c-1gpu", "job.overrides.model.n_layers=0", "model.n_layers=0"),
        ("m7c-1gpu", "job.overrides.train.lrr=1", "did you mean lr?"),
        ("m7c-1gpu", "job.config=m7c_125m_80", "did you mean m7c_125m_80g?"),
        ("m7c-1gpu", "job.ranks=3", "train.batch_size=8 cannot be shared by 3 ranks"),
        ("m7c-1gpu", "job.plan.seq_len=128", "seq_len is 4096, the plan says 128"),
        ("m7c-1gpu", 'env.NSA_FOO="1"', "NSA_FOO is set but has no effect here"),
        ("m7c-2xa100", 'env.NSA_DDP_COMPRESS="fp8"', "ddp.compress='fp8' is unknown"),
        ("m7c-1gpu", "job.overrides.model.attention=dense", "gates.gate_entropy cannot be measured"),
        ("m7c-2xa100", "job.overrides.runtime.device=cpu", "gates.gpu_mem_mib cannot be measured"),
    ],
)
def test_what_a_rollout_would_refuse_before_it_rents_the_plan_refuses_as_well(
    profile: str, change: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", profile, "--no-rehearsal", "--set", change]) == 2
    assert said in capsys.readouterr().err


def test_what_only_the_pod_can_tell_of_settings_is_left_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "m7c-1gpu", "--set", "job.config=/on/the/pod.yaml"]) == 0
    fits_the_largest = ("--set", "job.config=auto", "--set", "job.ranks=8")
    assert main(["plan", "m7c-1gpu", *fits_the_largest]) == 0
    assert main(["plan", "m7c-1gpu", *fits_the_largest, "--set", "job.overrides.train.keep=0"]) == 2
    assert "train.keep=0" in capsys.readouterr().err


@pytest.mark.parametrize(("task", "does"), [("infer", "private answers by"), ("serve", "private service of")])
def test_a_plan_says_what_is_done_with_a_model_and_that_only_trainings_are_foretold(
    task: str, does: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "w.npz", **{"weight.0": np.zeros((65, 10))})
    own = {
        "infer": {"data": str(tmp_path / "q.npy"), "reveal": ["predictions"]},
        "serve": {"clients": ["ab" * 32], "reveal": ["answers"], "idle": "10m"},
    }[task]
    np.save(tmp_path / "q.npy", np.zeros((8, 64), dtype=np.float32))
    job = {"kind": "private", "task": task, "model": "logistic-digits", "steps": 4, "batch": 16, **own}
    job["weights"] = str(tmp_path / "w.npz")
    (tmp_path / "ask.yaml").write_text(json.dumps({"job": job, "fleet": {"provider": "local"}, "smoke": {"steps": 0}}))
    assert main(["plan", str(tmp_path / "ask.yaml")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"ask   {does} logistic-digits"
    assert "a step     not foretold: only trainings are rehearsed" in said
