"""Models as lists of layers: shapes from the data, canonical JSON in the policy, the same training as by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from test_private_training import train, weights_of

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.data.sets import load_digits
from uvcc_engine.model.definition.layer_list import model_of_json, model_of_list, model_of_text, model_to_json
from uvcc_engine.model.definition.specs import MODELS, BatchNorm, Image, find_model
from uvcc_engine.model.learning.plaintext import train_plaintext
from uvcc_engine.sharding.validation import fit_model


def job_of(layers: Any, features: int = 64, classes: int = 10, **values: Any) -> PrivateJob:
    return PrivateJob.from_json({"model": model_to_json(model_of_list(layers, features, classes)), **values})


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ([{"linear": 32}, "relu", "linear"], "mlp-digits"),
        ([{"linear": 10}], "logistic-digits"),
        ([{"image": [1, 8, 8]}, {"conv": 8}, "relu", "avg-pool", "flatten", "linear"], ""),
        (
            [{"image": [1, 8, 8]}, {"conv": {"channels": 8, "padding": 1}}, "relu", {"avg-pool": 2}, "linear"],
            "cnn-digits",
        ),
        (
            [{"image": [1, 8, 8]}, {"conv": {"channels": 8, "padding": 1}}, "batch-norm", "relu", "avg-pool", "linear"],
            "cnn-digits-norm",
        ),
        ([{"linear": 16}, "batch-norm", "gelu", {"residual": [{"linear": 16}, "layer-norm", "relu"]}, "linear"], ""),
    ],
)
def test_a_list_becomes_the_layers_that_it_says(layers: list[Any], name: str) -> None:
    model = model_of_list(layers, 64, 10)
    assert model_of_json(json.loads(json.dumps(model_to_json(model)))) == model
    if name:
        assert model.layers == MODELS[name].layers
        assert model.frac_bits == MODELS[name].frac_bits


def test_a_normalisation_of_numbers_in_a_row_has_a_gain_for_each() -> None:
    assert model_of_list([{"linear": 4}, "batch-norm", "linear"], 3, 2).layers[1] == BatchNorm(Image(4, 1, 1))


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ([{"linear": 3}, "rellu", "linear"], r"job.model\[1\]: unknown layer 'rellu' .did you mean 'relu'"),
        ([{"liner": 3}], r"job.model\[0\]: unknown layer 'liner' .did you mean 'linear'"),
        (["rearrange"], r"unknown layer 'rearrange' .it is not written in lists"),
        (["attention"], "cannot divide|takes|gives"),
        (["mean", "linear"], r"job.model\[0\] is over lines, a row has one"),
        (
            [{"embedding": {"vocabulary": 7, "width": 4}}, "mean", "linear"],
            r"64 features on 1 lines are no letters of 7",
        ),
        ([{"lines": 7}, "mean", "linear"], r"job.model\[0\].*7 even lines"),
        ([{"lines": 8}, {"attention": 3}, "mean", "linear"], r"job.model\[1\]: .*cannot divide 8 features"),
        ([{"lines": 8}, {"attention": {"heads": 2, "kv-heads": 3}}, "mean", "linear"], "cannot share 3 heads"),
        ([{"lines": 8}, {"attention": {"heads": 2, "causal": 1}}, "mean", "linear"], "causal is 1"),
        ([{"concat": [["relu"], 3]}, "linear"], "write .concat"),
        ([{"sum": [[{"linear": 3}], ["relu"]]}, "linear"], r"job.model\[0\]: branches that meet in a sum give"),
        ([{"product": [["relu"]]}, "linear"], "a product of 1 branches"),
        ([{"conv1d": 3}, "linear"], r"job.model\[0\] works on sequences.*say before how they lie"),
        ([{"image": [1, 8, 8]}, {"patches": 3}, "linear"], "squares of 3 do not fill"),
        ([{"image": [1, 8, 8]}, {"adaptive-avg-pool": 3}, "linear"], "does not divide into 3 x 3"),
        ([{"image": [1, 1, 64]}, {"max-pool1d": 65}, "linear"], "a window of 65 on 64 places"),
        ([{"dropout": 2}, "linear"], "give the share that is left out"),
        ([{"lines": 8}, "batch-norm", "mean", "linear"], "use layer-norm"),
        ([{"linear": 3}], "not 1 of 10 classes"),
        (["relu"], "not 1 of 10 classes"),
        (["linear", "relu", "linear"], r"job.model\[0\]: the width is None"),
        ([{"linear": 2**40}, "linear"], "the width is"),
        ([{"linear": 2**20}, {"linear": 2**20}, "linear"], "weights, at most"),
        ([{"linear": True}, "linear"], "the width is True"),
        ([{"conv": 3}, "linear"], r"job.model\[0\] works on images.*say before how they lie"),
        ([{"image": [1, 9, 9]}, "linear"], "an image of 81 pixels, there are 64 features"),
        ([{"image": 8}, "linear"], "write .image"),
        ([{"image": [1, 8, 8]}, {"conv": {"chanels": 3}}, "linear"], "unknown key 'chanels' .did you mean 'channels'"),
        ([{"image": [1, 8, 8]}, {"conv": {"channels": 3, "kernel": 9}}, "linear"], r"job.model\[1\]"),
        ([{"image": [1, 8, 8]}, {"max-pool": 9}, "linear"], r"job.model\[1\].*window"),
        ([{"relu": 3}, "linear"], "takes no value"),
        ([{"residual": [{"linear": 3}]}, "linear"], r"job.model\[0\].*residual"),
        ([{"residual": []}, "linear"], "write .residual"),
        ([{"residual": ["what"]}, "linear"], r"job.model\[0\].residual\[0\]: unknown layer"),
        ([["linear"]], "a layer is a word"),
        ([{"linear": 3, "relu": None}], "a layer is a word"),
        ([{3: 3}], "a layer is a word"),
        ([], "no list of layers"),
        ("relu", "no list of layers"),
    ],
)
def test_a_wrong_list_is_refused_at_its_place(layers: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        model_of_list(layers, 64, 10)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"layers": []},
        {"layers": [], "features": 64, "classes": 10},
        {"layers": [{"type": "dense", "inputs": 64, "outputs": 10}], "features": True, "classes": 10},
        {"layers": [{"type": "dense", "inputs": 64, "outputs": 10}], "features": 63, "classes": 10},
        {"layers": [{"type": "dense", "inputs": 64, "outputs": 10}], "features": 64, "classes": 10, "positions": 2},
        {"layers": [{"type": "relu", "width": 64}], "features": 64, "classes": 64},
        {"layers": {"type": "dense"}, "features": 64, "classes": 10},
        {"layers": [[[]]], "features": 64, "classes": 10},
        {"layers": [{"type": "dense", "inputs": 2**30, "outputs": 2**30}], "features": 2**30, "classes": 2**30},
    ],
)
def test_a_policy_with_a_model_that_is_none_is_refused(found: Any) -> None:
    with pytest.raises(ConfigError):
        fit_model(PrivateJob.from_json({"model": found}))


@pytest.mark.parametrize("text", ["{", "{}", '{"a": 1}', '{"layers":NaN}', "{" * 100_000, "[1]", ""])
def test_a_text_that_is_no_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        find_model(PrivateJob(model=text).model)
    with pytest.raises(ConfigError):
        model_of_text(text)


def test_the_policy_holds_the_model_and_not_its_text() -> None:
    job = job_of([{"linear": 3}, "relu", "linear"], 5, 2)
    said = job.to_json()
    assert said["model"]["layers"][0] == {"type": "dense", "inputs": 5, "outputs": 3}
    assert PrivateJob.from_json(json.loads(canonical(said))) == job
    assert find_model(job.model) == model_of_list([{"linear": 3}, "relu", "linear"], 5, 2)
    # what a policy means may not change between versions
    digest = hashlib.sha256(canonical(said["model"])).hexdigest()
    assert digest == "eb6fef81ffd11db8c538d0c9f98c16fe66e8b7d21cf49a79efb56d2c99881dec"
    digest = hashlib.sha256(canonical(PrivateJob().to_json())).hexdigest()
    assert digest == "e34538af1551743465abc79efb03d1cf07b9711104282887508a2f398c9e96be"


def test_whole_numbers_of_a_model_are_the_same_in_the_policy_and_in_the_worker() -> None:
    job = job_of([{"lines": 2}, {"linear": 4}, {"attention": 2}, {"leaky-relu": 0.0}, "mean", "linear"], 6, 2)
    signed = PrivateJob.from_json(json.loads(canonical(job.to_json())))
    assert signed == job
    assert find_model(signed.model) == find_model(job.model)


def test_a_list_trains_to_the_last_bit_as_the_shipped_model_of_the_same_layers() -> None:
    shipped = PrivateJob(steps=2, batch=32, test_rows=60)
    listed = replace(shipped, model=job_of([{"linear": 32}, "relu", "linear"]).model)
    one, two = train(shipped), train(listed)
    for a, b in zip(one, two, strict=True):
        assert (a["losses"], a["correct"], a["digests"]) == (b["losses"], b["correct"], b["digests"])


@pytest.mark.parametrize(
    "layers",
    [
        [{"linear": 12}, "relu", {"residual": [{"linear": 12}, "relu"]}, "linear"],
        [{"image": [1, 8, 8]}, {"conv": {"channels": 2, "kernel": 3, "stride": 2}}, "relu", "flatten", "linear"],
        [{"image": [1, 8, 8]}, {"conv": 2}, "relu", "max-pool", {"linear": 8}, "relu", "linear"],
        [{"linear": 12}, "layer-norm", "gelu", "linear"],
    ],
    ids=["residual", "conv", "pool", "gelu"],
)
def test_two_steps_end_where_the_plaintext_twin_does(layers: list[Any]) -> None:
    job = job_of(layers, steps=2, batch=16, lr=0.25, test_rows=60)
    found, clear = train(job), train_plaintext(job, load_digits(job.seed, job.test_rows))
    for ours, theirs in zip(weights_of(found), clear.weights, strict=True):
        assert abs(ours - theirs).max() < 64 * 2.0**-16
    assert abs(found[0]["losses"][1] - clear.losses[1]) < 2e-3
