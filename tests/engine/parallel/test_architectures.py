"""A user's module per architecture: what its layers compute, and two steps of it under every topology that it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, ResNet, Rotary, TiedHead, weights_of
from fixed_twin import ZeroStream
from plain_training import in_plain_integers_by_parts, weights_in_clear
from training_kit import check_replicas, train, weights

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.data.sets import Dataset, batch_rows, one_hot
from uvcc_engine.model.definition.layer_list import model_of_json, model_of_list, model_to_json
from uvcc_engine.model.definition.spec_json import layer_from_json
from uvcc_engine.model.definition.specs import find_model, initial_weights
from uvcc_engine.model.definition.torch_module import ExportedModule, model_of_module
from uvcc_engine.model.layer_types.batch_norm import BatchNorm
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.mpc.foundation import prg
from uvcc_engine.sharding.partition import place_layers, stage_layers
from uvcc_engine.sharding.partition import weights_of as weighted_places
from uvcc_engine.sharding.validation import fit_model

torch.set_num_threads(1)
UNIT = 2.0**-16
TOPOLOGIES = [Topology(2, 1, 1, 2), Topology(1, 2, 1, 1), Topology(1, 1, 2, 1)]
REFUSED = {("vit", 2), ("rotary", 2), ("written", 2), ("sequence", 2), ("tied", 2)}
"""Architectures and numbers of tensor ranks that a plan refuses."""
BY_DEFAULT = {*zip(("mlp", "vit", "resnet"), TOPOLOGIES, strict=True), ("vit", TOPOLOGIES[2])}
"""Each topology once, and a refusal; the other architectures are trained by one worker each, and divided in CI."""


def exported(name: str) -> tuple[torch.nn.Module, ExportedModule]:
    torch.manual_seed(5)
    case = ARCHITECTURES[name]
    module = case.make()
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    shape = getattr(module, "input_shape", (6,))
    return module, model_of_module(module, shape, case.classes, positions=case.positions)


@cache
def data_of(name: str, rows: int = 48) -> tuple[Dataset, torch.Tensor]:
    """Rows as a job shares them, and as the module takes them."""
    case, rng = ARCHITECTURES[name], np.random.default_rng(4)
    module = case.make()
    shape, letters = getattr(module, "input_shape", (6,)), getattr(module, "vocabulary", 0)
    own = rng.integers(0, letters, (rows, *shape)) if letters else rng.normal(size=(rows, *shape))
    flat = one_hot(own, letters) if letters else own.reshape(rows, -1)
    y = rng.integers(0, case.classes, (rows, case.positions) if case.positions > 1 else rows)
    return Dataset(flat[8:], y[8:], flat[:8], y[:8], case.classes), torch.from_numpy(own)


@cache
def job_of(name: str) -> PrivateJob:
    _, made = exported(name)
    values = {"model": model_to_json(made.model), "steps": 2, "batch": 8, "lr": 0.25, "test_rows": 8}
    return PrivateJob.from_json(json.loads(json.dumps(values)))


@cache
def integers_of(name: str, replicas: int) -> Any:
    """Losses and weights in plain integers, of as many rows at once as that many replicas take."""
    job = replace(job_of(name), batch=job_of(name).batch * replicas)
    ended = in_plain_integers_by_parts(job, data_of(name)[0])
    return [loss for loss, _ in ended[0]], weights_in_clear(job, ended)


@cache
def twin_of(name: str, replicas: int = 1) -> Any:
    """Trained in clear, on as many rows at once as that many replicas take."""
    job = job_of(name)
    return train_plaintext(replace(job, batch=job.batch * replicas), data_of(name)[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layers_compute_what_the_module_does(name: str) -> None:
    case = ARCHITECTURES[name]
    module, made = exported(name)
    assert model_of_json(json.loads(json.dumps(model_to_json(made.model)))) == made.model
    data, own = data_of(name)
    theirs = module.eval().double()(own)
    own_weights = weights_of(module, case.order, case.positions)
    assert [tuple(w.shape) for w in own_weights] == [spec.weight_shape for spec in made.model.weights]
    ours = forward(made.model, own_weights, torch.from_numpy(np.concatenate([data.test_x, data.train_x])))
    assert (ours - theirs.reshape(ours.shape)).abs().max() < 1e-6


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_three_parties_train_it_as_its_plaintext_twin(name: str) -> None:
    data, _ = data_of(name)
    job = job_of(name)
    found, clear = simulate.train(job, data), twin_of(name)
    assert np.allclose(found.losses, clear.losses, atol=4e-3)
    starts = initial_weights(find_model(job.model), job.seed, job.frac_bits)
    for ours, theirs, start in zip(found.weights, clear.weights, starts, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT
        assert np.abs(theirs - start).max() > 256 * UNIT  # so a weight that stands still is found


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name, size, id=f"{name}-{size}", marks=() if (name, size) in BY_DEFAULT else pytest.mark.ci(__file__)
        )
        for name in ARCHITECTURES
        for size in TOPOLOGIES
    ],
)
def test_every_topology_trains_it_to_the_last_bit_as_plain_integers_or_refuses_it_by_name(
    name: str, size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prg.STREAMS, "zeros", ZeroStream)
    job = job_of(name)
    parts = {"replicas": size.replicas, "stages": size.stages, "tensor": size.tensor, "microbatches": size.microbatches}
    if (name, size.tensor) in REFUSED:
        with pytest.raises(ConfigError, match=r"cannot be split over workers: (Rearrange|Residual)"):
            fit_model(job, workers=2, **parts)
        return
    data, _ = data_of(name)
    fit_model(job, workers=2, **parts)
    found = train(job, size, data=data, prg="zeros")
    clear = twin_of(name, size.replicas)
    losses, integers = integers_of(name, size.replicas)
    check_replicas(found)
    for ours, plain, theirs in zip(weights(job, found, size), integers, clear.weights, strict=True):
        assert np.array_equal(ours, plain)
        assert np.abs(ours - theirs).max() < 1024 * UNIT  # rounded down each time, not to either side
    assert np.allclose(losses, clear.losses, atol=4e-3)
    told = found[Coord(0, 0, 0, 0)]["losses"]
    # a loss is rounded by each worker for each microbatch
    one = size.replicas * size.tensor * size.microbatches == 1
    assert told == losses if one else np.allclose(told, losses, atol=8 * UNIT)


@pytest.mark.parametrize(
    ("size", "verify"),
    [
        (Topology(1, 2, 1, 1), "off"),
        pytest.param(Topology(1, 2, 1, 1), "products", marks=pytest.mark.ci(__file__)),
        (Topology(2, 1, 1, 1), "off"),
        pytest.param(Topology(1, 1, 1, 3), "off", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(2, 2, 1, 2), "proofs", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 1, 2, 1), "off", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 1, 2, 1), "products", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(2, 1, 2, 2), "off", marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_a_batch_normalisation_takes_the_statistics_of_each_microbatch_of_each_replica(
    size: Topology, verify: str
) -> None:
    made = model_of_module(ResNet(norm=True), (1, 8, 8), 3)
    job = PrivateJob.from_json(job_of("resnet").to_json() | {"model": model_to_json(made.model), "verify": verify})
    parts = {"replicas": size.replicas, "microbatches": size.microbatches}
    fit_model(job, workers=2, stages=size.stages, tensor=size.tensor, **parts)
    data, whole = data_of("resnet")[0], replace(job, batch=job.batch * size.replicas)
    found, clear = train(job, size, data=data), train_plaintext(whole, data, **parts)
    check_replicas(found)
    undivided = train_plaintext(whole, data).weights
    for ours, theirs, other, spec in zip(
        weights(job, found, size), clear.weights, undivided, made.model.weights, strict=True
    ):
        assert np.abs(ours - theirs).max() < 256 * UNIT
        if isinstance(spec, BatchNorm):
            assert np.abs(ours[1:3] - [[0.0], [1.0]]).max() > 0.01  # the running statistics have moved
            if size.replicas * size.microbatches > 1:  # and not as those of the whole batch
                assert np.abs(ours - other).max() > 4 * np.abs(ours - theirs).max()
    assert np.allclose(found[Coord(0, 0, 0, 0)]["losses"], clear.losses, atol=4e-3)


MANY_NORMS = ["batch-norm", {"linear": 5}, "batch-norm", {"linear": 4}, "batch-norm", "relu", "linear"]


@pytest.mark.parametrize(
    ("layers", "replicas"),
    [
        pytest.param([{"linear": 5}, "batch-norm", "relu", "linear"], 2, id="columns", marks=pytest.mark.ci(__file__)),
        pytest.param(MANY_NORMS, 2, id="first and behind each, on replicas", marks=pytest.mark.ci(__file__)),
        pytest.param(MANY_NORMS, 1, id="first and behind each"),
    ],
)
def test_tensor_ranks_normalise_the_columns_that_they_compute_and_the_rows_that_they_have(
    layers: list[Any], replicas: int
) -> None:
    model = model_of_list(layers, 6, 3)
    job = PrivateJob.from_json(job_of("mlp").to_json() | {"model": model_to_json(model), "batch": 9})
    size, data = Topology(replicas, 1, 2, 1), data_of("mlp")[0]
    fit_model(job, workers=2 * replicas, replicas=replicas, tensor=2)
    found = train(job, size, data=data)
    check_replicas(found)
    clear = train_plaintext(replace(job, batch=9 * replicas), data, replicas=replicas)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT


def test_the_running_statistics_are_the_mean_of_what_torch_takes_of_each_part() -> None:
    spec = model_of_list(["batch-norm", "linear"], 3, 2)
    job = PrivateJob.from_json({"model": model_to_json(spec), "steps": 1, "batch": 8, "lr": 1e-9, "test_rows": 8})
    rows = np.random.default_rng(1).normal(size=(16, 3))
    data = Dataset(rows[8:], np.arange(8) % 2, rows[:8], np.arange(8) % 2, 2)
    kept = train_plaintext(job, data, replicas=2, microbatches=2).weights[0][1:3]
    torch_means = []
    for part in np.split(rows[8:][batch_rows(job.seed, 0, 8, 8)], 4):
        norm = torch.nn.BatchNorm1d(3, momentum=0.1).double()
        norm(torch.from_numpy(part))
        torch_means.append(norm.running_mean.numpy())
    assert np.allclose(kept[0], np.mean(torch_means, 0))


def test_a_variance_of_one_number_and_columns_of_a_channel_are_refused_by_name() -> None:
    job = job_of("resnet")
    image = model_to_json(model_of_list([{"linear": 8}, {"image": [2, 2, 2]}, "batch-norm", "flatten", "linear"], 6, 3))
    with pytest.raises(ConfigError, match=r"BatchNorm .it is fed columns, several of which are a channel"):
        fit_model(PrivateJob.from_json(job.to_json() | {"model": image}), workers=2, tensor=2)
    narrow = model_to_json(model_of_list([{"linear": 4}, "batch-norm", "linear"], 6, 3))
    row = PrivateJob.from_json(job.to_json() | {"model": narrow, "batch": 4})
    fit_model(row, workers=2, microbatches=2)
    with pytest.raises(ConfigError, match=r"BatchNorm of microbatches of 1 row"):
        fit_model(row, workers=4, microbatches=4)
    with pytest.raises(ConfigError, match=r"BatchNorm of microbatches of 1 row"):  # by one worker, too
        fit_model(replace(row, batch=1))


@pytest.mark.parametrize(
    ("size", "verify", "letters"),
    [
        (Topology(1, 1, 2, 1), "off", 7),
        pytest.param(Topology(1, 1, 2, 1), "proofs", 7, marks=pytest.mark.ci(__file__)),
        # whose first rank has all letters
        pytest.param(Topology(2, 1, 2, 2), "off", 3, marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 1, 3, 1), "off", 5, marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 1, 3, 1), "products", 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tensor_ranks_share_the_table_that_is_used_twice(size: Topology, verify: str, letters: int) -> None:
    block = [{"residual": ["layer-norm", {"attention": size.tensor}]}, "layer-norm"]
    table = {"embedding": {"vocabulary": letters, "width": 6}}
    model = model_of_list([{"tied": [table, *block]}], 4 * letters, letters, 4)
    job = PrivateJob.from_json(job_of("tied").to_json() | {"model": model_to_json(model), "verify": verify})
    rng = np.random.default_rng(4)
    x, y = one_hot(rng.integers(0, letters, (48, 4)), letters), rng.integers(0, letters, (48, 4))
    data = Dataset(x[8:], y[8:], x[:8], y[:8], letters)
    fit_model(job, workers=2, replicas=size.replicas, tensor=size.tensor, microbatches=size.microbatches)
    found, clear = train(job, size, data=data), train_plaintext(replace(job, batch=job.batch * size.replicas), data)
    check_replicas(found)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT
    starts = initial_weights(model, job.seed, job.frac_bits)
    assert np.abs(clear.weights[0] - starts[0]).max() > 256 * UNIT
    assert np.allclose(found[Coord(0, 0, 0, 0)]["losses"], clear.losses, atol=4e-3)


@pytest.mark.parametrize(
    ("size", "verify"),
    [
        (Topology(1, 3, 1, 1), "off"),  # the middle stage has nothing to do with the table
        pytest.param(Topology(2, 2, 1, 2), "off", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 2, 2, 2), "off", marks=pytest.mark.slow),
        pytest.param(Topology(1, 3, 1, 2), "products", marks=pytest.mark.ci(__file__)),
        pytest.param(Topology(1, 2, 2, 1), "proofs", marks=pytest.mark.ci(__file__)),
    ],
    ids=str,
)
def test_stages_share_the_table_that_is_used_twice(size: Topology, verify: str) -> None:
    letters = 5
    mix, think = ["layer-norm", {"attention": 2}], ["layer-norm", {"linear": 8}, "relu", {"linear": 6}]
    layers = [{"embedding": {"vocabulary": letters, "width": 6}}, {"residual": mix}, {"residual": think}, "layer-norm"]
    model = model_of_list([{"tied": layers}], 4 * letters, letters, 4)
    keys = {"model": model_to_json(model), "verify": verify, "momentum": 0.9, "val_rows": 8, "val_every": 1}
    told = {"reveal": ["loss", "accuracy", "val_loss", "perplexity"], "keep_best": True, "checkpoint_every": 1}
    job = PrivateJob.from_json(job_of("tied").to_json() | keys | told)
    rng = np.random.default_rng(4)
    x, y = one_hot(rng.integers(0, letters, (56, 4)), letters), rng.integers(0, letters, (56, 4))
    data = Dataset(x[16:], y[16:], x[:8], y[:8], letters, x[8:16], y[8:16])
    parts = {"stages": size.stages, "tensor": size.tensor, "microbatches": size.microbatches}
    fit_model(job, workers=2, replicas=size.replicas, **parts)
    found, clear = train(job, size, data=data), train_plaintext(replace(job, batch=job.batch * size.replicas), data)
    check_replicas(found)
    assert [n for s in range(size.stages) for n in found[Coord(0, 0, s, 0)]["state"]].count("weight.0.lo") == 1
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT
    first = found[Coord(0, 0, 0, 0)]
    assert np.allclose(first["losses"], clear.losses, atol=4e-3)
    assert first["metrics"]["perplexity"] == pytest.approx(clear.metrics["perplexity"], rel=1e-2)
    for step, numbers in clear.validated.items():
        assert first["validated"][step]["val_loss"] == pytest.approx(numbers["val_loss"], abs=4e-3)


@pytest.mark.ci(__file__)
def test_a_table_may_be_borrowed_by_a_stage_between_others_or_not_at_all() -> None:
    layers = [{"embedding": {"vocabulary": 5, "width": 6}}, {"residual": [{"linear": 6}, "relu"]}]
    tied = {"tied": layers}
    model = model_of_list([tied, {"linear": 8}, "relu", {"linear": 5}], 20, 5, 4)
    placed, cut = place_layers(model, 1)[0], {}
    for stages in range(1, 5):
        cut[stages] = stage_layers(model, placed, stages)
        held = [one.weight for layers in cut[stages] for one in weighted_places(layers)]
        assert held == [0, 1, 2, 3]
        ends = [(s, one.borrows) for s, own in enumerate(cut[stages]) for one in own if one.spec == model.layers[0]]
        assert len(ends) == 1
        assert ends[0] == ((0, -1) if ends[0][0] == 0 else (ends[0][0], 0))
    assert cut[1][0] == placed
    assert [one.borrows for one in cut[4][1]] == [-1, 0]
    job = PrivateJob.from_json(job_of("tied").to_json() | {"model": model_to_json(model)})
    size = Topology(1, 4, 1, 2)
    rng = np.random.default_rng(4)
    x, y = one_hot(rng.integers(0, 5, (24, 4)), 5), rng.integers(0, 5, (24, 4))
    data = Dataset(x[8:], y[8:], x[:8], y[:8], 5)
    found, clear = train(job, size, data=data), train_plaintext(job, data)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT
    few = PrivateJob.from_json(job.to_json() | {"model": model_to_json(model_of_list([tied], 20, 5, 4))})
    with pytest.raises(ConfigError, match="has 2 weighted layers or blocks for 3 stages"):
        fit_model(few, workers=3, stages=3)


def test_what_does_not_divide_among_tensor_ranks_is_refused_by_name() -> None:
    table, narrow = {"embedding": {"vocabulary": 5, "width": 6}}, {"linear": 6}
    for layers, what in (
        ([table, {"residual": ["layer-norm", {"attention": 3}]}, "linear"], "3 heads do not divide among 2"),
        ([{"tied": [table, narrow]}], "Tied .its layers leave columns"),
    ):
        model = model_to_json(model_of_list(layers, 20, 5, 4))
        with pytest.raises(ConfigError, match=what):
            fit_model(PrivateJob.from_json(job_of("tied").to_json() | {"model": model}), workers=2, tensor=2)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"bias": True}, "adds a bias to a product with the embedding's table"),
        ({"twice": True}, "uses the weight of .* again"),
    ],
)
def test_a_weight_is_used_twice_in_one_way_only(change: dict[str, bool], what: str) -> None:
    class Twice(TiedHead):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.nn.functional.linear(self.letters(x), self.letters.weight)

    made = Twice() if change.pop("twice", False) else TiedHead(**change)
    with pytest.raises(ConfigError, match=what):
        model_of_module(made, (4,), 7, positions=4)
    asked = [{"tied": [{"linear": 4}]}]
    with pytest.raises(ConfigError, match="does not begin with an embedding"):
        model_of_list(asked, 4, 4)
    hostile = {"type": "tied", "table": {"type": "relu", "width": 4}, "layers": []}
    with pytest.raises(ConfigError, match=r"layer\.table is of another type"):
        layer_from_json(hostile)
    with pytest.raises(ConfigError, match="ends on 3 features, its table has vectors of 4"):
        model_of_list([{"tied": [{"embedding": {"vocabulary": 5, "width": 4}}, {"linear": 3}]}], 20, 5, 4)


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([{"concat": [[{"linear": 4}], [{"linear": 4}]]}, "linear"], "columns of several branches side by side"),
        ([{"sum": [[{"linear": 4}], [{"linear": 4}, {"linear": 4}]]}, "linear"], "its branches leave columns and rows"),
    ],
)
def test_branches_that_cannot_meet_on_tensor_ranks_are_refused_by_name(layers: list[Any], what: str) -> None:
    job = PrivateJob.from_json({"model": model_to_json(model_of_list(layers, 6, 2)), "test_rows": 8})
    fit_model(job, workers=2, stages=1, replicas=2)
    with pytest.raises(ConfigError, match=f"cannot be split over workers: Branches .{what}"):
        fit_model(job, workers=2, tensor=2)


def test_a_concatenation_in_rows_trains_on_tensor_ranks_as_its_plaintext_twin() -> None:
    ends = [{"linear": 4}, "relu", {"linear": 3}]
    model = model_of_list([{"linear": 8}, "relu", {"linear": 8}, {"concat": [ends, [*ends, "relu"]]}, "linear"], 6, 2)
    rng, size = np.random.default_rng(4), Topology(1, 1, 2, 1)
    x, y = rng.normal(size=(24, 6)), rng.integers(0, 2, 24)
    data = Dataset(x[8:], y[8:], x[:8], y[:8], 2)
    job = PrivateJob.from_json({"model": model_to_json(model), "steps": 2, "batch": 8, "lr": 0.1, "test_rows": 8})
    found, clear = train(job, size, data=data), train_plaintext(job, data)
    for ours, theirs in zip(weights(job, found, size), clear.weights, strict=True):
        assert np.abs(ours - theirs).max() < 256 * UNIT


def test_a_language_model_of_ones_own_is_fitted_on_letters() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 7, (40, 4))
    torch.manual_seed(1)
    found = simulate.fit(ARCHITECTURES["gpt"].make(), x, np.roll(x, -1, 1), steps=2, batch=8, lr=0.25)
    assert (found.model.positions, found.model.classes, len(found.losses)) == (4, 7, 2)
    assert np.allclose(found.losses, found.twin().losses, atol=4e-3)
    with pytest.raises(ConfigError, match="letters of shape"):
        simulate.fit(ARCHITECTURES["gpt"].make(), x + 1, x, steps=2)


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_places_that_turn_neighbours_are_understood_and_others_refused(base: float) -> None:
    torch.manual_seed(2)
    module = Rotary(neighbours=True, base=base)
    made = model_of_module(module, (5, 8), 2)
    (attention,) = [spec for spec in made.model.layers if type(spec).__name__ == "Attention"]
    assert getattr(attention, "rotary", 0.0) == base
    order = [0, 2, 1, 3]  # the layer turns halves: neighbours lie one half apart there
    both = weights_of(module, ("q", "kv"), 1)
    mixed = torch.cat([both[0][:, [*order, *(4 + i for i in order)]], both[1][:, [*order, 4, 5, 6, 7]]], 1)
    x = torch.randn(6, 5, 8)
    ours = forward(made.model, [mixed, *weights_of(module, ("out",), 1)], x.flatten(1).double())
    assert (ours - module(x).double()).abs().max() < 1e-6
    with pytest.raises(ConfigError, match=r"line [0-9]+: "):
        model_of_module(Rotary(base=base, apart=0.5), (5, 8), 2)
