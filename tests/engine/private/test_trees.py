"""Boosted trees on shares against float64: every question near the best, leaves and losses the twin's, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.bins import bits_of, edges_of
from uvcc_engine.data.csv_table import CsvTable
from uvcc_engine.data.features import feature_names, prepare
from uvcc_engine.data.fitting_pass import FittingPass
from uvcc_engine.data.infer import infer
from uvcc_engine.data.schema import parse_schema
from uvcc_engine.data.schema_text import schema_text
from uvcc_engine.data.sets import Floats, Ints
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.layer_types.trees import Trees
from uvcc_engine.model.learning.plaintext_trees import ClearTrees
from uvcc_engine.model.learning.trainers import trainer_of
from uvcc_engine.mpc.comparisons.tournament import greatest_place_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes, run_three
from uvcc_engine.mpc.foundation.share import reconstruct, share_of, split
from uvcc_engine.sealing.inputs import dataset_tensors
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.simulate.fitting import SimulatedFit, party_inputs

torch.set_num_threads(1)
RNG = np.random.default_rng(5)
ROWS, COLUMNS, BINS = 96, 3, 4


def some_rows() -> tuple[Floats, Ints, Floats]:
    """Bits of three columns, two classes that follow from them, and a number that does."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(ROWS, COLUMNS))
    line = np.where(x[:, 0] > 0.3, 1.5, -1.0) + x[:, 1] * (x[:, 2] > 0) + 0.3 * rng.normal(size=ROWS)
    bits = [b for column in x.T for b in bits_of(column, edges_of(column, BINS))]
    return np.stack(bits, 1), (line > 0).astype(int), (line - line.mean()) / line.std()


def targets_for(objective: str, classes: Ints, numbers: Floats) -> Any:
    """Two classes, three words, or a number."""
    words = np.where(numbers > 0.5, "high", np.where(numbers < -0.5, "low", "mid"))
    return {"binary": classes, "mse": numbers, "cross-entropy": words}[objective]


def trained(y: Any, x: Floats, **job: Any) -> SimulatedFit:
    asked: dict[str, Any] = {"count": 2, "depth": 2} | job.pop("trees", {})
    given = {"steps": 2, "batch": len(x), "lr": 0.5, "schedule": "constant", "momentum": 0.0, "test": (x, y)} | job
    return simulate.fit([{"trees": asked}], x, y, watch_range=True, **given)


@pytest.mark.parametrize(
    ("objective", "metric", "more"),
    [
        ("binary", "auc", {"batch": ROWS}),
        ("mse", "rmse", {"batch": 70, "trees": {"min_gain": 2.0}}),
        ("cross-entropy", "accuracy", {"batch": 80, "label_smoothing": 0.1}),
        pytest.param("cross-entropy", "perplexity", {"verify": "proofs", "steps": 1}, marks=pytest.mark.ci(__file__)),
    ],
)
def test_every_question_is_near_the_best_and_every_leaf_the_twins(
    objective: str, metric: str, more: dict[str, Any]
) -> None:
    bits, classes, numbers = some_rows()
    told = ["loss", metric]
    fit = trained(targets_for(objective, classes, numbers), bits, **more, objective=objective, reveal=told)
    min_gain = more.get("trees", {}).get("min_gain", 0.0)
    spec = fit.model.layers[0]
    assert isinstance(spec, Trees)
    weight, follow = fit.weights[0], _Following(fit)
    asked = weight[:, : spec.inputs]
    assert set(np.unique(asked)) <= {0.0, 1.0}
    assert asked.sum(1).max() == 1.0
    losses = [follow.step(step, _batch(fit, step)) for step in range(fit.steps)]
    assert fit.losses == pytest.approx(losses, abs=2e-4)
    assert np.abs(follow.weight - weight).max() < 2e-3  # the leaves; the questions are the private model's own
    assert follow.worst < 0.01  # of the best gain at that node
    if min_gain or objective != "cross-entropy":  # of which a node may hold rows of one class alone
        assert bool(follow.empty) == bool(min_gain)  # with it some nodes ask nothing
    twin = fit.twin()
    for name in told[1:]:
        assert fit.metrics[name] == pytest.approx(twin.metrics[name], abs=0.02)
    margins = fit.outputs(bits)
    assert margins.shape == (ROWS, 3 if objective == "cross-entropy" else 1)
    assert all(len(np.unique(column)) > 2 for column in margins.T)


@pytest.mark.parametrize("objective", ["binary", "cross-entropy"])
def test_messages_tell_nothing_of_rows_or_of_what_is_asked(objective: str) -> None:
    bits, classes, numbers = some_rows()
    job: dict[str, Any] = {"objective": objective, "reveal": ["loss"], "batch": 40, "trees": {"count": 1}, "steps": 1}
    y = targets_for(objective, classes, numbers)
    one, other = trained(y, bits, **job), trained(y[::-1], np.zeros_like(bits), **job)
    assert one.weights[0][-1, -1] != other.weights[0][-1, -1]
    assert one.step_costs == other.step_costs


class _Following(ClearTrees):
    """Grows the twin's trees with the private ones' questions, and notes how far each is from the best."""

    def __init__(self, fit: SimulatedFit) -> None:
        spec = fit.model.layers[0]
        assert isinstance(spec, Trees)
        super().__init__(fit.job, spec, fit.data, np.zeros(spec.weight_shape))
        self._private, self._level, self._tree = fit.weights[0], 0, 0
        self.worst, self.empty = 0.0, 0

    def gains(self, slopes: Floats, here: Floats, rows: Ints) -> Floats:
        found, spec = super().gains(slopes, here, rows), self._spec
        first = self._tree * spec.nodes + (1 << self._level) - 1
        asked = self._private[first : first + here.shape[1], : spec.inputs]
        chosen = np.where(asked.any(1), asked.argmax(1) + 1, 0)
        mine = np.take_along_axis(found, chosen[:, None], 1)[:, 0]
        self.worst = max(self.worst, float(((found.max(1) - mine) / (1.0 + found.max(1))).max()))
        self.empty += int((chosen == 0).sum())
        self._level += 1
        if self._level == spec.depth:
            self._level, self._tree = 0, self._tree + 1
        followed: Floats = np.eye(found.shape[1])[chosen]
        return followed


def _batch(fit: SimulatedFit, step: int) -> Ints:
    from uvcc_engine.data.sets import batch_rows

    return batch_rows(fit.job.seed, step, fit.job.batch, len(fit.data.train_x))


@pytest.mark.parametrize("n", [1, 2, 10, 11, 137])
def test_the_place_of_the_greatest_of_many(n: int) -> None:
    x = RNG.integers(-50, 50, (7, n)).astype(float)
    x[0] = 3.0  # all alike: the first wins
    made = split(torch.from_numpy(x), 16, np.random.default_rng(1).bytes)
    found = run_three(lambda rt: rt.run(greatest_place_protocol(rt, share_of(made, rt.party))))
    assert np.array_equal(reconstruct(found).numpy(), np.eye(n)[x.argmax(1)])


def test_trees_of_several_classes_grow_in_the_rounds_of_one() -> None:
    bits, classes, numbers = some_rows()
    job: dict[str, Any] = {"objective": "mse", "reveal": ["loss"], "trees": {"count": 1}, "steps": 1}
    many = trained(targets_for("cross-entropy", classes, numbers), bits, **job)
    assert many.step_costs[0][0] == trained(numbers, bits, **job).step_costs[0][0]


@pytest.mark.parametrize("objective", [pytest.param("binary", marks=pytest.mark.ci(__file__)), "cross-entropy"])
def test_a_checkpoint_goes_on_to_the_same_trees(objective: str) -> None:
    bits, classes, numbers = some_rows()
    y = targets_for(objective, classes, numbers)
    fit = trained(y, bits, objective=objective, reveal=["loss"], steps=2, trees={"count": 2})
    inputs = party_inputs(dataset_tensors(fit.data, 16, fit.job), 16)

    def halves(stop: bool) -> list[Floats]:
        kept: dict[int, dict[str, torch.Tensor]] = {}

        def body(planes: LocalPlanes, steps: range) -> list[Floats]:
            def party(rt: Any) -> Any:
                trainer = trainer_of(rt, fit.job, fit.model, inputs[rt.party])
                if rt.party in kept:
                    trainer.load_state(kept[rt.party])
                for step in steps:
                    rt.begin_epoch(step)
                    trainer.step(step)
                kept[rt.party] = trainer.state()
                return trainer.weights[0]

            return [reconstruct(planes.run_three(party)).numpy()]

        if not stop:
            return body(LocalPlanes(3), range(2))
        body(LocalPlanes(3), range(1))
        assert {name.split(".")[0] for name in kept[0]} == {"weight", "margins"}
        return body(LocalPlanes(3), range(1, 2))

    assert np.array_equal(halves(True)[0], halves(False)[0])


@pytest.mark.parametrize(
    ("job", "what"),
    [
        ({"momentum": 0.9}, "job.momentum 0.9 with trees"),
        ({"optimizer": "adam"}, "job.optimizer 'adam' with trees"),
        ({"steps": 4}, "job.steps is 4, one for each of 2 trees"),
        ({"objective": "huber", "reveal": ["loss"]}, "objective 'huber' with trees"),
        ({"trees": {"depth": 9}}, "trees of depth 9"),
        ({"trees": {"l2": 0.0}}, "trees with l2 0"),
        ({"trees": {"deep": 2}}, "unknown key 'deep'"),
    ],
)
def test_what_trees_do_not_take_is_refused_by_name(job: dict[str, Any], what: str) -> None:
    x, y = np.eye(4)[[0, 1, 2, 3, 0, 1]], np.array([0, 1, 0, 1, 0, 1])
    with pytest.raises(ConfigError, match=what):
        trained(y, x, **({"objective": "binary", "reveal": ["loss"]} | job))


def test_trees_ask_bits_and_stand_alone() -> None:
    x, y = np.array([[0.0, 1.0], [1.0, 0.5]] * 4), np.array([0, 1] * 4)
    with pytest.raises(ConfigError, match=r"train features: feature 1 \(from 0\) holds 0.5, and trees ask bits"):
        trained(y, x, objective="binary")
    with pytest.raises(ConfigError, match="trees for 1 outputs, or beside other layers"):
        model_of_list([{"trees": 2}, "linear"], 4, 1)
    with pytest.raises(ConfigError, match="the schema names no target"):
        model_of_list([{"trees": 2}], 4, 0)
    made = model_to_json(model_of_list([{"trees": 2}], 4, 1))
    made["layers"].append({"type": "dense", "inputs": 1, "outputs": 1})
    job = PrivateJob.from_json({"model": made, "objective": "binary", "momentum": 0.0})
    with pytest.raises(ConfigError, match="has trees and other layers"):
        fit_model(job)
    alone = PrivateJob.from_json(job.to_json() | {"model": model_to_json(model_of_list([{"trees": 60}], 4, 1))})
    assert fit_model(alone).classes == 1
    with pytest.raises(ConfigError, match=r"tensor of 2, and .* is trees"):
        fit_model(alone, workers=2, tensor=2)


def test_a_schema_turns_numbers_into_bits() -> None:
    text = ["age,sex,ill"] + [f"{a},{'fm'[a % 2]},{int(a > 30)}" for a in range(1, 61)] + [",f,1"]
    lines = [line.split(",") for line in text]
    table = CsvTable(
        "p.csv", {name: [row[i] for row in lines[1:]] for i, name in enumerate(lines[0])}, tuple(range(2, 63)), ""
    )
    schema = infer(table, "ill", 4).schema
    assert schema.kind == "binary"
    assert [(c.kind, c.bins, c.missing) for c in schema.columns] == [("bins", 4, "mean"), ("one-hot", 0, "error")]
    made = prepare(table, schema)
    edges = made.schema.columns[0].statistics
    assert edges is not None
    assert len(edges.edges) == 3
    ages = [float(row[0]) if row[0] else edges.fill for row in lines[1:]]
    sides = np.concatenate([made.data.train_x, made.data.test_x])
    assert sorted(map(tuple, sides[:, :3])) == sorted(tuple(float(a <= e) for e in edges.edges) for a in ages)
    names = [f"age <= {e:g}" for e in edges.edges]
    assert feature_names(made.schema) == [*names, "sex=f", "sex=m"]
    assert feature_names(schema)[:3] == ["age bit 1", "age bit 2", "age bit 3"]
    import yaml

    assert parse_schema(yaml.safe_load(schema_text(made.schema))) == made.schema
    one = FittingPass(schema)
    one.add(table)
    assert one.fitted("p.csv") == made.schema


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ({"kind": "bins", "bins": 1}, "bins is 1"),
        ({"kind": "bins", "bins": 2.5}, "bins is 2.5"),
        ({"kind": "minmax", "bins": 4}, "of kind minmax and says bins"),
        ({"kind": "bins", "bins": 4, "statistics": {"edges": [1.0]}}, "edges does not fit 4 bins"),
        ({"kind": "bins", "statistics": {"edges": ["a"] * 15}}, "edges is 'a'"),
    ],
)
def test_bins_that_make_no_sense_are_refused(column: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_schema({"target": {"column": "y", "values": [0, 1]}, "columns": {"x": column}})


def test_an_estimator_of_trees_learns_numbers_and_classes() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(80, 2))
    y = np.where(x[:, 0] > 0, 3.0, -1.0)
    real = simulate.PrivateTrees(3, max_depth=1, n_bins=4, learning_rate=0.7).fit(x, y)
    assert real.score(x, y) > 0.9
    words = np.where(y > 0, "yes", "no")
    told = simulate.PrivateTrees(2, max_depth=1, n_bins=4, subsample=0.5).fit(x, words)
    assert told.score(x, words) > 0.9
    assert told.predict_proba(x).shape == (80, 2)
    assert told.classes_.tolist() == ["no", "yes"]
    three = np.where(y > 0, np.where(x[:, 1] > 0, "up", "down"), "left")
    many = simulate.PrivateTrees(2, max_depth=2, n_bins=4).fit(x, three)
    assert many.score(x, three) > 0.9
    assert many.predict_proba(x).sum(1) == pytest.approx(np.ones(80))
    assert many.classes_.tolist() == ["down", "left", "up"]


@pytest.mark.parametrize(
    ("x", "what"),
    [
        ([["a", "b"]] * 4, "features are no table of numbers"),
        ([[1.0], [1.0, 2.0], [1.0], [1.0]], "features are no table of numbers"),
        (np.array([[1.0 + 1j]] * 4), "features are complex numbers"),
        (np.array([[1.0], [np.nan], [1.0], [2.0]]), "not finite"),
        (np.zeros((0, 2)), r"rows of shape \(0, 2\)"),
    ],
)
def test_rows_that_are_no_numbers_are_refused(x: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        simulate.PrivateTrees(1).fit(x, [0, 1, 0, 1])
    if "no table" in what or "complex" in what:
        with pytest.raises(ConfigError, match=what):
            simulate.fit(["linear"], x, [0, 1, 0, 1], steps=1)


def test_labels_of_one_class_and_trees_that_were_not_grown_are_refused() -> None:
    with pytest.raises(ConfigError, match="all 4 labels are 1"):
        simulate.fit(["linear"], np.eye(4), [1, 1, 1, 1], steps=1)
    with pytest.raises(ConfigError, match="not grown"):
        simulate.PrivateTrees(1).predict(np.eye(2))
