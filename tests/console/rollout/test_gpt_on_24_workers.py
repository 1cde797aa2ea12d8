"""A GPT of 4 blocks, width 128 and 128 places learns on 2 replicas, 2 stages and 2 tensor ranks of each party.

The profile is the manual's, the text ships, and the times of its halts follow from the step that is foretold.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from demorun import PATIENCE_S, user_at

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.owner import own_data
from uvcc_engine.simulate.private_gpt import SHIPPED

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "notebook.md"


def profile() -> str:
    return PAGE.read_text().partition("<!-- gpt profile -->\n```yaml\n")[2].partition("```")[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_gpt_of_four_blocks_learns_on_twenty_four_workers_as_its_twin_does(tmp_path: Path) -> None:
    text, schema = tmp_path / "play.txt", tmp_path / "play.schema.yaml"
    text.write_bytes(SHIPPED.read_bytes()[60_000:200_000])
    (tmp_path / "gpt.yaml").write_text(profile())
    with user_at(tmp_path / "home") as uvcc:
        made = uvcc.run("data", "infer", str(text))
        assert made.returncode == 0, made.stderr
        windows = schema.read_text().replace("{positions: 32, stride: 16,", "{positions: 128, stride: 128,")
        assert windows != schema.read_text()
        schema.write_text(windows)
        process = uvcc.start("rollout", str(tmp_path / "gpt.yaml"), "--headless", "--json")
        out, err = process.communicate(timeout=8 * PATIENCE_S)
        assert process.returncode == 0, err
        assert json.loads(out)["verified"] is True
        (run_dir,) = (uvcc.home / "runs").iterdir()
        full = run_dir / "artifacts" / "full"
        workers = json.loads((full / "proof_bundle.json").read_text())["workers"]
        job = PrivateJob.from_json(json.loads((full / "policy.json").read_text())["job"])
    assert len(workers) == 24
    told = [one["statement"]["values"] for one in workers[0]["roots"]]
    losses = [values["loss"] for values in told if "loss" in values]
    assert losses[-1] < losses[0] - 0.3
    whole = replace(job, batch=2 * job.batch)  # a job's batch is that of each replica
    twin = train_plaintext(whole, own_data.prepared(text, schema).data)
    assert losses == pytest.approx(twin.losses, abs=0.03)
