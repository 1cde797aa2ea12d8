"""A public base with secret adapters: beside its twin, its bytes beside full training's, files and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from private_kit import OWNER, PARTIES, Fleet, Zygote, direct_links
from safetensors.numpy import load_file, save

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError, UvccError, VerificationError
from uvcc_engine.contract.job import owner_files
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sample_text import load_text
from uvcc_engine.data.sets import Dataset, Floats, one_hot
from uvcc_engine.model.definition.base_model import (
    Adapters,
    BaseModel,
    adapted,
    attached,
    made_up,
    merged,
    read_base,
    write_base,
)
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import ModelSpec, find_model, gpt, initial_weights, mlp
from uvcc_engine.model.layer_types.adapted import Adapted
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.layer_types.public import Public, Started
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.state_digests import loaded
from uvcc_engine.model.learning.training import PrivateTrainer
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.kernels import cpu
from uvcc_engine.mpc.kernels.gemm import gemm
from uvcc_engine.owner import client
from uvcc_engine.sealing.inputs import encode_fixed, share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate.fitting import party_inputs
from uvcc_engine.simulate.generation import generate
from uvcc_engine.simulate.public_base import loss_of, main, train_base
from uvcc_engine.simulate.step_rehearsal import rehearse
from uvcc_engine.worker.inference import Predictor

torch.set_num_threads(1)
CNN = [{"image": [1, 6, 6]}, {"conv": {"channels": 2, "padding": 1}}, "relu", {"avg-pool": 2}, "flatten"]
BLOCK = {"residual": [{"linear": 4}, "relu"]}
LINES = [{"lines": 3}, {"linear": 4}, "places", "layer-norm", BLOCK, "flatten", "linear"]


def job_of(model: ModelSpec, **keys: Any) -> PrivateJob:
    values = {"model": model_to_json(model), "base": model.base, "steps": 3, "batch": 8, "lr": 0.25, "test_rows": 8}
    return PrivateJob.from_json(json.loads(json.dumps(values | keys)))


def base_of(folder: Path, model: ModelSpec, seed: int = 3) -> BaseModel:
    """A base of weights that are not the job's initial ones."""
    rng = np.random.default_rng(5)
    weights = [w + rng.normal(0, 0.02, w.shape) for w in initial_weights(model, seed, 16)]
    path = folder / owner_files.BASE
    return read_base(path, write_base(path, model, weights))


def rows(features: int, classes: int, count: int = 32) -> Dataset:
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(count, features)), rng.integers(0, classes, count)
    return Dataset(x[8:], y[8:], x[:8], y[:8], classes)


def same(a: ModelSpec, weights: Any, b: ModelSpec, others: Any, x: Floats) -> None:
    """Two models give the same outputs."""
    ours, theirs = (
        forward(m, [torch.from_numpy(w) for w in ws], torch.from_numpy(x)) for m, ws in ((a, weights), (b, others))
    )
    assert (ours - theirs).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("layers", "features", "asked"),
    [
        ([{"linear": 6}, "relu", {"linear": 5}, "relu", "linear"], 5, Adapters(2, 2.0)),
        ([{"linear": 6}, "relu", {"linear": 5}, "relu", "linear"], 5, Adapters(3, 0.5, ("weight.1",), "adapter")),
        ([{"linear": 6}, "relu", "linear"], 5, Adapters(2, 1.0, (), "public")),
        ([{"linear": 6}, "relu", "linear"], 5, Adapters(0, head="new")),
        ([*CNN, {"linear": 6}, "relu", "linear"], 36, Adapters(2)),
        (LINES, 12, Adapters(2)),
        ([{"linear": 6}, "rms-norm", "linear"], 5, Adapters(2)),
    ],
)
def test_it_ends_where_the_twin_does_and_merges_into_an_ordinary_model(
    layers: list[Any], features: int, asked: Adapters, tmp_path: Path
) -> None:
    base = base_of(tmp_path, model_of_list(layers, features, 3))
    model = adapted(base, asked, 3)
    data = rows(features, 3)
    found = simulate.train(job_of(model), data, model=model)
    clear = found.twin()
    assert np.allclose(found.losses, clear.losses, atol=4e-3)
    starts = initial_weights(model, found.job.seed, 16)
    for ours, theirs, first in zip(found.weights, clear.weights, starts, strict=True):
        assert np.abs(ours - theirs).max() < 256 * 2.0**-16
        assert np.abs(theirs - first).max() > 64 * 2.0**-16  # so a weight that stands still is found
    plain, whole = merged(found.model, found.weights)
    assert not plain.public_layers
    assert asked.head == "new" or plain == base.model
    same(found.model, found.weights, plain, whole, data.test_x)
    assert model_to_json(find_model(found.job.model)) == model_to_json(model)  # what the policy says is all there is


def test_what_was_trained_answers_queries_around_its_public_base(tmp_path: Path) -> None:
    model = adapted(base_of(tmp_path, mlp("m", 5, 6, 3)), Adapters(2))
    weights = [w + np.random.default_rng(1).normal(0, 0.3, w.shape) for w in initial_weights(model, 7, 16)]
    queries = np.random.default_rng(2).normal(size=(8, 5))
    job = job_of(model, task="infer", reveal=["predictions"], steps=1)
    named = {f"weight.{i}": w for i, w in enumerate(weights)} | {"query_x": queries}
    inputs = party_inputs({name: encode_fixed(name, one, 16) for name, one in named.items()}, 16)

    def body(rt: Runtime) -> Share:
        predictor = Predictor(rt, job, model, inputs[rt.party])
        rt.begin_epoch(0)
        predictor.step(0)
        state = predictor.state()
        return loaded(state, "prediction", 16)

    found = reconstruct(LocalPlanes(4).run_three(body))
    clear = forward(model, [torch.from_numpy(w) for w in weights], torch.from_numpy(queries))
    assert torch.equal(found.argmax(1), clear.argmax(1))


def test_training_starts_from_the_base_itself_and_never_moves_it(tmp_path: Path) -> None:
    base = base_of(tmp_path, mlp("m", 5, 6, 3))
    model = adapted(base, Adapters(2, 2.0))
    kinds = [type(layer) for layer in model.layers]
    assert (kinds[0], kinds[-1]) == (Adapted, Started)
    assert base.model is not None
    x = np.random.default_rng(8).normal(size=(4, 5))
    ours = forward(model, [torch.from_numpy(w) for w in initial_weights(model, 7, 16)], torch.from_numpy(x))
    theirs = forward(base.model, [torch.from_numpy(w) for w in base.weights], torch.from_numpy(x))
    assert (ours - theirs).abs().max() < 1e-4  # the head starts on the grid of the fixed point
    found = simulate.train(job_of(model), rows(5, 3), model=model)
    assert all(np.array_equal(found.model.public[name], base.tensors[name]) for name in found.model.public)


def test_a_kept_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = adapted(base_of(tmp_path, mlp("m", 5, 6, 3)), Adapters(2))
    job = job_of(model, steps=2)
    inputs = party_inputs(simulate.fitting.dataset_tensors(rows(5, 3), 16), 16)

    def through(rt: Runtime, first: int, state: Any) -> list[dict[str, torch.Tensor]]:
        trainer, kept = PrivateTrainer(rt, job, model, inputs[rt.party]), []
        if state:
            trainer.load_state(state[rt.party][0])
        for step in range(first, 2):
            rt.begin_epoch(step)
            trainer.step(step)
            kept.append({name: t.clone() for name, t in trainer.state().items()})
        return kept

    whole = LocalPlanes(3).run_three(lambda rt: through(rt, 0, None))
    resumed = LocalPlanes(3).run_three(lambda rt: through(rt, 1, whole))
    for party in range(3):
        assert all(torch.equal(whole[party][-1][name], t) for name, t in resumed[party][-1].items())


def test_public_weights_cost_no_message_for_their_gradient(tmp_path: Path) -> None:
    """Of a wide network most bytes are those of its weights' gradients and momentum: they are gone."""
    wide = mlp("wide", 64, 256, 256, 10)
    base = base_of(tmp_path, wide)
    model, data = adapted(base, Adapters(4)), rows(64, 10)
    around = simulate.train(job_of(model, steps=2), data, model=model)
    whole = simulate.train(job_of(wide, base="", steps=2), data)
    assert around.bytes_sent < 0.35 * whole.bytes_sent
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "public-base.md").read_text()
    said = f"{around.bytes_sent / 1e6:.1f} MB in place of {whole.bytes_sent / 1e6:.1f} MB in two steps"
    assert said in " ".join(page.split())
    secret = [w.size for w in around.weights]
    assert secret == [(64 + 256) * 4, 512 * 4, 257 * 10]


def test_public_weights_take_two_fifths_of_the_local_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = [0]

    def counting(ys: Any, rows: int) -> Any:
        product = gemm.right_factor(ys, rows)

        def multiply(xs: Any) -> Any:
            counted[0] += sum(x.numel() * y.shape[-1] for x, y in zip(xs, ys, strict=True))
            return product(xs)

        return multiply

    monkeypatch.setattr(cpu, "gemm", SimpleNamespace(right_factor=counting))
    wide, data = mlp("wide", 48, 64, 64, 4), rows(48, 4)

    def of(model: ModelSpec) -> int:
        counted[0] = 0
        simulate.train(job_of(model, steps=1, reveal=[]), data, model=model)
        return counted[0]

    middle = 8 * 64 * 64  # of 8 rows: forward, input gradient, weight gradient, each by five of three parties' products
    base = base_of(tmp_path, wide)
    around = adapted(base, Adapters(1, layers=("weight.0",)))  # the layer in the middle is public
    assert of(wide) - of(around) >= (15 - 6) * middle


def test_the_plan_foretells_its_rounds_and_bytes_without_the_base(tmp_path: Path) -> None:
    model = adapted(base_of(tmp_path, mlp("m", 16, 32, 4)), Adapters(2))
    job = job_of(model, steps=3)
    told = rehearse(job)
    found = simulate.train(job, rows(16, 4), model=model)
    assert told.rounds == found.rounds / 3
    assert told.bytes_sent == found.step_costs[1][1] / 3  # as of any step but the first


def secret_text(letters: str) -> str:
    """Notes of a ward, of letters that a base of Shakespeare knows."""
    rng = np.random.default_rng(2)
    who, what = ["the patient", "she", "he", "mother"], ["had a fever", "slept well", "ate little", "was seen again"]
    when = ["at noon", "on monday", "in the night", "after the operation"]
    text = " ".join(f"{rng.choice(who)} {rng.choice(what)} {rng.choice(when)}." for _ in range(400))
    assert set(text) <= set(letters)
    return text


@pytest.mark.slow
def test_a_public_transformer_is_tuned_on_a_secret_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--blocks", "2", "--width", "16", "--heads", "2", "--positions", "16"]
    assert main(["--out", str(tmp_path / "base.safetensors"), *size, "--steps", "150", "--batch", "16"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["held_out_loss"] < 3.2
    base = read_base(tmp_path / "base.safetensors", said["sha256"])
    numbers = np.array([base.letters.index(one) for one in secret_text("".join(base.letters))])
    starts = np.arange(0, len(numbers) - 17, 16)
    windows = numbers[starts[:, None] + np.arange(17)]
    x, y = one_hot(windows[:, :-1], 65), windows[:, 1:]
    data = Dataset(x[16:], y[16:], x[:16], y[:16], 65)
    last = [f"weight.{n}" for n in (8, 9, 11, 12)]  # the second block's dense layers: below it nothing is learned
    model = adapted(base, Adapters(4, 2.0, tuple(last)))
    tune = {"steps": 12, "batch": 8, "lr": 0.5, "test_rows": 16, "schedule": "constant", "reveal": ["loss"]}
    found = simulate.train(job_of(model, **tune), data, model=model)
    clear = found.twin()
    assert np.abs(np.array(found.losses) - np.array(clear.losses)).max() < 0.05
    assert found.losses[-1] < found.losses[0] - 0.25
    assert base.model is not None
    held = numbers[:272]
    plain, whole = merged(model, found.weights)
    assert loss_of(plain, whole, held) < loss_of(base.model, base.weights, held) - 0.25
    full = simulate.train(job_of(base.model, **(tune | {"steps": 1, "base": ""})), data)
    assert found.rounds / 12 < 0.95 * full.rounds  # of a network this narrow most is attention and normalisation
    assert found.bytes_sent / 12 < 0.95 * full.bytes_sent
    written = generate(found.job, found.weights, [int(n) for n in held[:8]], 4, model=model)
    logits = forward(plain, [torch.from_numpy(w) for w in whole], torch.from_numpy(one_hot(held[None, :16], 65)))
    assert written.tokens[0] == int(logits[7].argmax())


def fleet_of(folder: Path, zygote: Zygote, model: ModelSpec, data: Dataset) -> Fleet:
    job = job_of(model, reveal=["loss", "weights"], checkpoint_every=2)
    purpose = Purpose.of(job, [OWNER.public.x25519])
    made = share_dataset(data, 16, tuple(p.public for p in PARTIES), OWNER, seed=1, purpose=purpose)
    return Fleet(folder, zygote, job, direct_links(), made)


@pytest.mark.ci(__file__)
def test_workers_train_around_a_base_and_the_owner_gets_adapters_and_model(tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "at").mkdir()
    base = base_of(tmp_path / "at", mlp("m", 5, 6, 3))
    model, data = adapted(base, Adapters(2)), rows(5, 3)
    fleet = fleet_of(tmp_path / "fleet", zygote, model, data)
    for party in range(3):
        (fleet.home(party) / owner_files.BASE).write_bytes((tmp_path / "at" / owner_files.BASE).read_bytes())
    fleet.launch()
    assert fleet.wait() == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    clear = train_plaintext(fleet.job, data, model=model)
    losses = [float(line.split(",")[1]) for line in fleet.csv(0)[1:]]
    assert np.allclose(losses, clear.losses, atol=4e-3)
    OWNER.store(tmp_path / "owner")
    (tmp_path / "parties.json").write_text(json.dumps([p.public.to_json() for p in PARTIES]))
    command = ["--open", str(fleet.folder), "--owner", str(tmp_path / "owner"), "--out", str(tmp_path / "out")]
    command += ["--parties", str(tmp_path / "parties.json"), "--model", fleet.job.model]
    assert client.main([*command, "--base", str(tmp_path / "at" / owner_files.BASE), "--base-sha256", base.sha256]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"weights.npz", "model.safetensors", "adapters.safetensors", "model.json"}
    whole = load_file(tmp_path / "out" / "model.safetensors")
    parts = load_file(tmp_path / "out" / "adapters.safetensors")
    assert [parts[f"weight.{i}"].shape for i in range(2)] == [(11, 2), (7, 3)]
    plain = find_model((tmp_path / "out" / "model.json").read_text())
    assert plain == base.model
    same(
        plain,
        [whole[f"weight.{i}"] for i in range(2)],
        model,
        [parts[f"weight.{i}"] for i in range(2)],
        data.test_x,
    )
    assert max(np.abs(parts[f"weight.{i}"] - w).max() for i, w in enumerate(clear.weights)) < 256 * 2.0**-16


@pytest.mark.parametrize("damage", ["none", "other"])
def test_a_worker_without_the_policys_base_does_not_start(tmp_path: Path, zygote: Zygote, damage: str) -> None:
    (tmp_path / "at").mkdir()
    base = base_of(tmp_path / "at", mlp("m", 5, 6, 3))
    fleet = fleet_of(tmp_path / "fleet", zygote, adapted(base, Adapters(2)), rows(5, 3))
    if damage == "other":  # one bit of one weight
        raw = bytearray((tmp_path / "at" / owner_files.BASE).read_bytes())
        raw[-3] ^= 1
        (fleet.home(0) / owner_files.BASE).write_bytes(raw)
    fleet.launch(only=(0,))
    assert fleet.wait()[0] != 0
    said = json.dumps(fleet.exit(0))
    assert base.sha256[:12] in said if damage == "other" else "cannot read the public base" in said


def test_a_base_is_hostile_until_it_was_read(tmp_path: Path) -> None:
    path, model = tmp_path / "b.safetensors", mlp("m", 5, 6, 3)
    good = base_of(tmp_path, model)
    assert good.model == model_of_list([{"linear": 6}, "relu", "linear"], 5, 3)
    with pytest.raises(VerificationError, match="has the hash"):
        read_base(tmp_path / owner_files.BASE, "0" * 64)
    with pytest.raises(UvccError, match="cannot read the public base"):
        read_base(tmp_path / "nothing")
    weights = {f"weight.{i}": w.astype(np.float32) for i, w in enumerate(good.weights)}
    about = {"uvcc": json.dumps({"model": model_to_json(model)})}
    cases: list[tuple[bytes, str]] = [
        ((tmp_path / owner_files.BASE).read_bytes()[:-1], "would not load"),
        (b"not one", "would not load"),
        (save(weights | {"weight.0": np.full((6, 6), np.nan, np.float32)}), "beyond 1024, or none"),
        (save(weights | {"weight.0": np.full((6, 6), 2000.0)}), "beyond 1024, or none"),
        (save({"weight.0": np.zeros((6, 6), np.int64)}), "floating-point"),
        (save(weights | {"more": np.zeros(2)}, about), "other tensors than its model"),
        (save(weights, {"uvcc": "{"}), "is no base"),
        (save(weights, {"uvcc": "[]"}), "is no base"),
        (save(weights, {"uvcc": '{"model": {}}'}), "job.model is no model"),
        (save(weights, {"uvcc": '{"letters": 7}'}), "is no base"),
    ]
    for raw, why in cases:
        path.write_bytes(raw)
        with pytest.raises(UvccError, match=why):
            read_base(path)
    path.write_bytes(save(weights))  # names and shapes alone do: a model around it may come from elsewhere
    silent = read_base(path)
    assert silent.model is None
    with pytest.raises(ConfigError, match="does not say what its model is"):
        adapted(silent, Adapters())
    around = attached(replace(adapted(good, Adapters(2)), public={}), silent)
    assert around.base == silent.sha256


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    base = base_of(tmp_path, mlp("m", 5, 6, 3))
    for asked, why in [
        (Adapters(2, layers=("weight.7",)), "'weight.7' gets no adapter"),
        (Adapters(2, layers=("weight.1",)), "'weight.1' gets no adapter"),
        (Adapters(8), "rank 8"),
        (Adapters(2, scale=100.0), "scale of 100"),
    ]:
        with pytest.raises(ConfigError, match=why):
            adapted(base, asked)
    with pytest.raises(ConfigError, match="head is 'tail'"):
        Adapters.from_json({"head": "tail"})
    with pytest.raises(ConfigError, match="unknown key"):
        Adapters.from_json({"ranks": 3})
    with pytest.raises(ConfigError, match="rank is 0"):
        Adapters(0, head="public")
    model = adapted(base, Adapters(2))
    with pytest.raises(ConfigError, match="has public layers, and no base"):
        fit_model(job_of(model, base=""))
    with pytest.raises(ConfigError, match="names a base, and its model has no layer"):
        fit_model(job_of(mlp("m", 5, 6, 3), base="0" * 64))
    with pytest.raises(ConfigError, match="SHA-256"):
        job_of(model, base="abc")
    with pytest.raises(ConfigError, match=r"weight\.\d of the public base is missing"):
        simulate.train(job_of(model), rows(5, 3))
    for workers in ({"workers": 2, "replicas": 2}, {"workers": 2, "tensor": 2}):
        with pytest.raises(ConfigError, match="Adapted"):
            fit_model(job_of(model), **workers)
    fit_model(job_of(model, verify="products"))
    wrong = Public(Dense(5, 6), "weight.1")
    with pytest.raises(ConfigError, match=r"the base has weight\.1 of shape"):
        attached(replace(model, layers=(wrong, *model.layers[1:])), base)
    assert made_up(replace(model, public={})).public.keys() == {"weight.0", "weight.1"}


@pytest.mark.ci(__file__)
def test_a_base_of_a_text_learns(tmp_path: Path) -> None:
    model = gpt("g", 27, 8, 8, heads=2, blocks=1)
    text = load_text(7, 40, 8).train_y.reshape(-1)
    weights, losses = train_base(model, text, steps=30, batch=16, lr=0.01)
    assert losses[-1] < losses[0] - 0.3
    with pytest.raises(ConfigError, match="a text of 9 letters"):
        train_base(model, text[:9], steps=1, batch=1, lr=0.01)
    written = write_base(tmp_path / "b", model, weights, "ab")
    assert written == read_base(tmp_path / "b").sha256 == write_base(tmp_path / "c", model, weights, "ab")
