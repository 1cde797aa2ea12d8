"""Inference as a rollout whose steps are audited by chance: the answers, what was drawn, what verifiers say of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from asked_kit import write_asked
from demorun import PATIENCE_S, Uvcc, user_at

from uvcc_engine.contract.job.proof_mode import is_audited

ONE_IN, STEPS = 2, 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_are_answered_under_audits_and_both_verifiers_count_them(tmp_path: Path) -> None:
    model, clear = write_asked(tmp_path)
    job = {"kind": "private", "task": "infer", "model": model}
    job |= {"steps": STEPS, "batch": 8, "data": "q.npy", "weights": "w.npz", "reveal": ["predictions"]}
    job |= {"verify": "covert", "audit_one_in": ONE_IN}
    profile = {"job": job, "fleet": {"provider": "local"}, "smoke": {"steps": 0}}
    (tmp_path / "ask.yaml").write_text(json.dumps(profile))
    with user_at(tmp_path / "home") as uvcc:
        _asked(uvcc, tmp_path, clear)


def _asked(uvcc: Uvcc, tmp_path: Path, clear: list[int]) -> None:
    process = uvcc.start("rollout", str(tmp_path / "ask.yaml"), "--headless", "--json")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    assert json.loads(out)["verified"] is True
    (run,) = (uvcc.home / "runs").iterdir()
    answers = tmp_path / "answers"
    assert uvcc.run("owner", "open", run.name, "--out", str(answers)).returncode == 0
    assert np.load(answers / "predictions.npz")["labels"].tolist() == clear
    workers = json.loads((run / "artifacts" / "full" / "proof_bundle.json").read_text())["workers"]
    stated = [[root["statement"]["proved"] for root in one["roots"]] for one in workers]
    assert stated[0] == stated[1] == stated[2]
    draws = [int(one["drawn"][k : k + 16], 16) for one in stated[0] if "drawn" in one for k in (0, 16, 32)]
    assert len(draws) == 3 * STEPS
    audited = sum(is_audited(number, ONE_IN) for number in draws)
    said = uvcc.run("verify", run.name)
    assert f"VERIFIED     phase full: {STEPS + 1} epochs" in said.stdout
    assert f"{audited} of {len(draws)} domains' steps were drawn for an audit" in said.stdout
    assert "every message between them was proved" not in said.stdout
