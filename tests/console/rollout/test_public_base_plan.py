"""A profile with a public base: what the plan makes of it, what the policy names, and what lies in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from uvcc_console.plan.owndata import keep_base, settle
from uvcc_console.plan.plan import make_plan, new_run_id
from uvcc_console.plan.profile import load
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.base_model import write_base
from uvcc_engine.model.definition.specs import find_model, initial_weights, mlp
from uvcc_engine.sharding.validation import fit_model

BASE = mlp("m", 5, 6, 3)


def written(folder: Path, *, smoke: int = 1, **job: Any) -> Path:
    """A profile beside its base and data; both are named by paths that are relative to it."""
    rng = np.random.default_rng(1)
    write_base(folder / "weights.safetensors", BASE, initial_weights(BASE, 3, 16))
    np.savez(folder / "rows.npz", x=rng.normal(size=(60, 5)), y=rng.integers(0, 3, 60))
    asked = {"kind": "private", "base": "weights.safetensors", "data": "rows.npz", "steps": 2, "test_rows": 12}
    profile = {"job": asked | job, "fleet": {"provider": "local"}, "smoke": {"steps": smoke}}
    path = folder / "tune.yaml"
    path.write_text("# tune: one\n" + yaml.safe_dump(profile))
    return path


def test_the_policy_names_the_base_by_its_hash_and_the_run_keeps_a_copy(tmp_path: Path) -> None:
    told: list[str] = []
    name, profile = load(str(written(tmp_path, adapters={"rank": 2})))
    profile, _ = settle(profile, told.append)
    job = PrivateJob.from_json(dict(make_plan(new_run_id(name), name, profile).phases["full"].job))
    assert len(job.base) == 64
    model = fit_model(job)
    assert [spec.public_tensor for spec in model.public_layers] == [("weight.0", (6, 6)), ("weight.1", (7, 3))]
    assert [w.weight_shape for w in model.weights] == [(11, 2), (7, 3)]
    assert any("2 of its layers compute with public weights" in line for line in told)
    keep_base(tmp_path, profile)
    kept = tmp_path / owner_files.BASE
    assert kept.read_bytes() == (tmp_path / "weights.safetensors").read_bytes()
    again, _ = settle(profile, told.append)  # a plan that was written down is read once more
    assert again.job == profile.job
    (tmp_path / "weights.safetensors").write_bytes(kept.read_bytes() + b" ")
    with pytest.raises(UvccError, match="changed while the run was planned"):
        keep_base(tmp_path, profile)


def test_a_trained_model_may_keep_its_base_public_when_it_answers(tmp_path: Path) -> None:
    name, profile = load(str(written(tmp_path, adapters={"rank": 2})))
    model = settle(profile, lambda _: None)[0].job.model  # type: ignore[union-attr]
    asked = {"model": model, "task": "infer", "reveal": ["predictions"], "weights": "trained.npz", "data": "q.npy"}
    _, profile = load(str(written(tmp_path, smoke=0, **asked)))
    profile, _ = settle(profile, lambda _: None)
    job = PrivateJob.from_json(dict(make_plan(new_run_id(name), name, profile).phases["full"].job))
    assert len(job.base) == 64
    assert len(find_model(job.model).public_layers) == 2


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"base_sha256": "0" * 64}, "has the hash"),
        ({"base_sha256": "abc"}, "base_sha256"),
        ({"base": "nothing.safetensors"}, "cannot read the public base"),
        ({"adapters": {"rank": 9}}, "rank 9"),
        ({"adapters": {"ranks": 2}}, "ranks"),
        ({"adapters": {"head": "tail"}}, "head"),
        ({"adapters": {"layers": ["weight.9"]}}, "gets no adapter"),
        ({"base": "", "adapters": {"rank": 2}}, "belong to a public base"),
        ({"base": "rows.npz"}, "would not load"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_plan(tmp_path: Path, job: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, UvccError), match=why):
        settle(load(str(written(tmp_path, **job)))[1], lambda _: None)


def test_the_head_may_be_new_for_the_datas_own_classes(tmp_path: Path) -> None:
    path = written(tmp_path, adapters={"rank": 0, "head": "new"})
    rng = np.random.default_rng(2)
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(60, 5)), y=np.arange(60) % 7)
    model = find_model(PrivateJob.from_json(_job(path)).model)
    assert model.classes == 7
    path = written(tmp_path, adapters={"rank": 2})
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(60, 5)), y=np.arange(60) % 7)
    with pytest.raises(UvccError, match="head: new"):
        _job(path)


def _job(path: Path) -> dict[str, Any]:
    name, profile = load(str(path))
    return dict(make_plan(new_run_id(name), name, settle(profile, lambda _: None)[0]).phases["full"].job)
