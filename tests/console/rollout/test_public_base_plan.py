"""A profile with a public base: what the plan makes of it, what the policy names, and what lies in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from uvcc_console.plan.owndata import keep_base, settle
from uvcc_console.plan.plan import make_plan, new_run_id
from uvcc_console.plan.profile import load, parse
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.definition.base_model import write_base
from uvcc_engine.model.definition.layer_list import model_to_json
from uvcc_engine.model.definition.specs import ModelSpec, find_model, initial_weights, mlp
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


@pytest.mark.ci(__file__)
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


@pytest.mark.ci(__file__)
def test_without_data_a_base_says_the_shapes_only_where_owners_share_from_elsewhere(tmp_path: Path) -> None:
    _, profile = load(str(written(tmp_path, adapters={"rank": 2}, data="")))
    with pytest.raises(UvccError, match="the data has 64 features, 10 classes"):
        settle(profile, lambda _: None)
    found = settle(profile, lambda _: None, elsewhere=True)[0].job
    _, named = load(str(written(tmp_path, adapters={"rank": 2})))
    assert found.model == settle(named, lambda _: None)[0].job.model  # type: ignore[union-attr]
    _, fresh = load(str(written(tmp_path, adapters={"rank": 2, "head": "new"}, data="")))
    with pytest.raises(UvccError, match="a new head, and no data that say its classes"):
        settle(fresh, lambda _: None, elsewhere=True)
    _, epochs = load(str(written(tmp_path, adapters={"rank": 2}, data="", epochs=2)))
    with pytest.raises(ConfigError, match="no data whose rows could be counted"):
        settle(epochs, lambda _: None, elsewhere=True)


def _job(path: Path) -> dict[str, Any]:
    name, profile = load(str(path))
    return dict(make_plan(new_run_id(name), name, settle(profile, lambda _: None)[0]).phases["full"].job)


@pytest.mark.parametrize("task", ["infer", pytest.param("serve", marks=pytest.mark.ci(__file__))])
@pytest.mark.parametrize(
    ("adapters", "classes"),
    [({"rank": 2}, 3), pytest.param({"rank": 2, "head": "new"}, 4, marks=pytest.mark.ci(__file__))],
)
def test_a_tuned_model_is_asked_with_the_base_and_adapters_of_its_training(
    tmp_path: Path, task: str, adapters: dict[str, Any], classes: int
) -> None:
    path = written(tmp_path, adapters=adapters)
    rng = np.random.default_rng(2)
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(60, 5)), y=np.arange(60) % classes)
    trained = _job(path)
    model = find_model(PrivateJob.from_json(trained).model)
    asked = _asking(tmp_path, model, task) | {"adapters": adapters, "weights": "trained.safetensors"}
    job = _job(written(tmp_path, smoke=0, **asked))
    assert (job["model"], job["base"]) == (trained["model"], trained["base"])
    merged = {f"weight.{i}": w for i, w in enumerate(initial_weights(BASE, 3, 16))}
    save_file(merged, tmp_path / "trained.safetensors")
    with pytest.raises(ConfigError, match="holds other weights than the base with these adapters has"):
        _job(written(tmp_path, smoke=0, **asked))
    if classes == 4:
        asked = {key: value for key, value in asked.items() if key != "weights"} | {"task": "infer", "data": "q.npy"}
        with pytest.raises(ConfigError, match="a new head, and no trained weights"):
            _job(written(tmp_path, smoke=0, **(asked | {"reveal": ["predictions"], "clients": []})))


def _asking(folder: Path, model: ModelSpec, task: str) -> dict[str, Any]:
    """A job that answers, with files of what was trained."""
    rng = np.random.default_rng(3)
    save_file({f"weight.{i}": rng.normal(size=w.weight_shape) for i, w in enumerate(model.weights)},
              folder / "trained.safetensors")  # fmt: skip
    np.save(folder / "q.npy", rng.normal(size=(6, 5)))
    if task == "serve":
        return {"task": task, "reveal": ["answers"], "clients": ["ab" * 32], "data": ""}
    return {"task": task, "reveal": ["predictions"], "data": "q.npy"}


def test_a_profile_names_the_graph_that_an_owner_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.json").write_text(json.dumps(model_to_json(BASE)))
    asked = {"task": "infer", "reveal": ["predictions"], "data": "q.npy", "weights": "w.npz", "base": ""}
    path = written(tmp_path, smoke=0, model="model.json", **asked)
    monkeypatch.chdir("/")  # a relative path is relative to the profile
    assert _job(path)["model"] == model_to_json(BASE)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no model"):
        _job(path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(UvccError, match="cannot read"):
        _job(path)


@pytest.mark.ci(__file__)
def test_a_module_beside_the_profile_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self) -> None:\n        super().__init__(5, 3)\n"
    )
    path = written(tmp_path, model="net.py:Net", base="")
    monkeypatch.chdir("/")
    assert find_model(PrivateJob.from_json(_job(path)).model).classes == 3


@pytest.mark.parametrize("given", [{"steps": 4}, {"epochs": 2}])
def test_a_model_of_rows_that_others_have_names_its_sizes(given: dict[str, int]) -> None:
    """Nothing is taken from the packaged rows: neither their shapes nor how many they are."""

    def settled(model: object) -> object:
        job = {"kind": "private", "model": model, **given}
        return settle(parse({"job": job}), lambda _: None, elsewhere=True)[0].job.model

    with pytest.raises(ConfigError, match=r"its owners have that elsewhere.*name every size"):
        settled([{"linear": 16}, "relu", "linear"])
    sized = {"features": 4, "classes": 2, "layers": [{"type": "dense", "inputs": 4, "outputs": 2}]}
    for model in (sized, "mlp-digits"):
        if "epochs" in given:
            with pytest.raises(ConfigError, match="no data whose rows could be counted"):
                settled(model)
        else:
            assert settled(model) == model
