"""Trees of two replicas, from a table to a verified rollout of real pods: a step as foretold, and one model."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from demorun import PATIENCE_S, user_at

from uvcc_engine.contract.job.topology import PARTIES

pytestmark = [pytest.mark.ci("tests/engine/parallel/test_summed_replicas.py"), pytest.mark.timeout(900)]

PROFILE = """
job:
  kind: private
  model: [{trees: {count: 4, depth: 2}}]
  data: patients.csv
  schema: patients.schema.yaml
  steps: 4
  lr: 0.5
  seed: 7
  reveal: [loss, accuracy, weights]
topology: {replicas: 2}
fleet:    {provider: local}
smoke:    {replicas: 2, steps: 2}
gates:    {loss_falls: false, result_hashes: 1, verifier: ok, halt_drill_s: 120}
limits:   {hourly: 0, total: 0, ttl: 1h}
"""


def write_table(path: Path) -> None:
    """90 rows whose target follows from two of three columns."""
    x = np.random.default_rng(4).normal(size=(90, 3))
    with path.open("w", newline="") as file:
        sick = (x[:, 0] > 0.2) ^ (x[:, 1] > 0.5)
        rows = ([*(f"{a:.5f}" for a in row), "sick" if ill else "well"] for row, ill in zip(x, sick, strict=True))
        csv.writer(file).writerows([["a", "b", "c", "diagnosis"], *rows])


def test_trees_of_two_replicas_are_verified_and_took_what_was_foretold(tmp_path: Path) -> None:
    table, profile = tmp_path / "patients.csv", tmp_path / "trees.yaml"
    write_table(table)
    profile.write_text(PROFILE.replace("patients", str(tmp_path / "patients")))
    with user_at(tmp_path / "home") as uvcc:
        made = uvcc.run("data", "infer", str(table), "--bins", "8")
        assert made.returncode == 0, made.stderr
        process = uvcc.start("rollout", str(profile), "--headless", "--json")
        out, err = process.communicate(timeout=4 * PATIENCE_S)
        assert process.returncode == 0, err
        assert json.loads(out)["verified"] is True
        (run_dir,) = (uvcc.home / "runs").iterdir()
        shown = json.loads(uvcc.run("status", run_dir.name, "--json").stdout)
        full = run_dir / "artifacts" / "full"
        workers = json.loads((full / "proof_bundle.json").read_text())["workers"]
        assert uvcc.run("owner", "open", run_dir.name, "--out", str(tmp_path / "results")).returncode == 0
        predicted = tmp_path / "predictions.csv"
        asked = ["--model", str(tmp_path / "results"), "--data", str(table), "--out", str(predicted)]
        assert uvcc.run("owner", "predict", *asked).returncode == 0
    assert len(workers) == 2 * PARTIES
    scored = {one["name"]: one for one in shown["plan_score"]}
    assert scored["rounds"]["foretold"] == scored["rounds"]["measured"]
    assert scored["bytes"]["off"] == pytest.approx(0.0, abs=0.01)
    assert scored["seconds"]["high"] > 0  # whether they held is a matter of what else the machine does
    told = [one["statement"]["values"] for one in workers[0]["roots"]]
    losses = [values["loss"] for values in told if "loss" in values]
    assert losses[-1] < losses[0]
    with predicted.open(newline="") as theirs, table.open(newline="") as ours:
        pairs = list(zip(csv.DictReader(theirs), csv.DictReader(ours), strict=True))
    assert sum(a["diagnosis"] == b["diagnosis"] for a, b in pairs) > 0.8 * len(pairs)
