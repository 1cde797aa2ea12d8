"""A private GPT by one command: its curve beside the clear twin's, and the letters that the clear model would write."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from uvcc_engine import simulate
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.sets import Dataset, one_hot
from uvcc_engine.model.definition.layer_list import model_of_list, model_to_json
from uvcc_engine.model.definition.specs import gpt, initial_weights
from uvcc_engine.model.layer_types.dense import Dense
from uvcc_engine.model.learning.plaintext import forward
from uvcc_engine.model.shapes import MOST_SHARED
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share, reconstruct
from uvcc_engine.mpc.functions.nonlinear import MOST_SUMMANDS, softmax_protocol
from uvcc_engine.mpc.products.arithmetic import public
from uvcc_engine.simulate import gpt_forecast, private_gpt
from uvcc_engine.simulate.generation import check_prompt, generate
from uvcc_engine.simulate.metering import flat_specs
from uvcc_engine.simulate.step_rehearsal import rehearse

LAYERS = [
    {"embedding": {"width": 8, "places": False}},
    {"residual": ["layer-norm", {"attention": {"heads": 4, "kv-heads": 2, "causal": True, "rotary": True}}]},
    {"residual": [{"product": [[{"linear": 8}, "silu"], [{"linear": 8}]]}]},
    "rms-norm",
    "linear",
]


def job_of(layers: object, vocabulary: int, positions: int) -> PrivateJob:
    model = model_of_list(layers, vocabulary * positions, vocabulary, positions)
    values = {"model": model_to_json(model), "steps": 4, "batch": 8, "lr": 0.5, "test_rows": 4}
    return PrivateJob.from_json(json.loads(json.dumps(values)))


@pytest.mark.parametrize("learned", [pytest.param(False, marks=pytest.mark.ci(__file__)), True])
def test_letters_are_those_that_the_clear_model_would_write(learned: bool) -> None:
    first = [{"embedding": 8}, *LAYERS[1:]] if learned else LAYERS
    job = job_of(first, 5, 8)
    x = (np.arange(9)[None] + np.arange(24)[:, None]) % 5  # the next letter is one further on
    data = Dataset(one_hot(x[4:, :8], 5), x[4:, 1:], one_hot(x[:4, :8], 5), x[:4, 1:], 5)
    found = simulate.train(job, data)
    made = generate(job, found.weights, [2, 3], 4)
    known = [2, 3]
    weights = [torch.from_numpy(w) for w in found.weights]
    while len(known) < 6:
        row = one_hot(np.array([[*known, *[0] * (8 - len(known))]]), 5)
        scores = forward(found.model, weights, torch.from_numpy(row))[len(known) - 1]
        top = torch.topk(scores, 2).values
        assert top[0] - top[1] > 1e-3  # no tie that rounding could turn
        known.append(int(scores.argmax()))
    assert made.tokens == tuple(known[2:])
    assert made.rounds > 50
    assert made.bytes_sent > 0


def test_what_cannot_be_continued_is_refused() -> None:
    job = job_of(LAYERS, 5, 8)
    model = model_of_list(LAYERS, 40, 5, 8)
    for prompt, letters, what in (([], 2, "prompt of 0"), ([1] * 7, 3, "8 places"), ([5], 1, "does not know")):
        with pytest.raises(ConfigError, match=what):
            check_prompt(model, prompt, letters)
    with pytest.raises(ConfigError, match="no model of the letters"):
        check_prompt(model_of_list(["linear"], 5, 5), [1], 1)
    open_ended = job_of([{"embedding": 8}, {"attention": 2}, "linear"], 5, 8)
    weights = [
        np.zeros(spec.weight_shape)
        for spec in model_of_list([{"embedding": 8}, {"attention": 2}, "linear"], 40, 5, 8).weights
    ]
    with pytest.raises(ConfigError, match="lines that are still to come"):
        generate(open_ended, weights, [1], 2)
    assert job.frac_bits == 16


def test_a_step_of_a_language_model_is_rehearsed_on_made_up_letters() -> None:
    found = rehearse(job_of(LAYERS, 3, 4), 2)
    assert found.rounds > 100
    assert found.warnings == ()


@pytest.mark.ci(__file__)
def test_one_command_writes_both_curves_and_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text(private_gpt.SHIPPED.read_text()[:3000])
    assert set(private_gpt.SHIPPED.read_text()) < set(private_gpt.LETTERS)
    assert len(private_gpt.LETTERS) == 65
    small = [
        "--text",
        str(poem),
        "--lr",
        "0.1",
        "--width",
        "8",
        "--heads",
        "2",
        "--blocks",
        "1",
        "--positions",
        "8",
        "--steps",
        "3",
        "--batch",
        "4",
    ]
    code = private_gpt.main([*small, "--prompt", "You ", "--letters", "3", "--out", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["steps"], len(found["text"])) == (0, 3, 7)
    rows = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert max(abs(float(row["private"]) - float(row["clear"])) for row in rows) < 4e-3
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
    assert private_gpt.main([*small, "--prompt", "Ω", "--out", str(tmp_path)]) == 2
    assert "the prompt has 'Ω'" in capsys.readouterr().err


def test_the_sizes_of_a_gpt_say_its_weights_and_its_products() -> None:
    size = gpt_forecast.GptSize(11, 6, 8, 2, 2, 3)
    model = gpt("any", 11, 6, 8, 2, 2)
    assert size.weights == sum(w.size for w in initial_weights(model, 7, 16))
    assert gpt_forecast.GPT2_SMALL.weights > 124e6
    dense = [spec.inputs * spec.outputs for spec in flat_specs(model.layers) if isinstance(spec, Dense)]
    mixing = 2 * (2 * 3 * 6 * 6 * 8)  # blocks times scores and mixtures
    assert size.macs == 3 * (18 * sum(dense) + mixing) + 2 * 18 * 8 * (11 + 6)


def test_a_softmax_among_too_many_is_refused_before_it_is_run() -> None:
    assert MOST_SHARED == MOST_SUMMANDS
    with pytest.raises(ConfigError, match="the number of classes is 2049"):
        rehearse(PrivateJob.from_json({"model": model_to_json(model_of_list(["linear"], 4, 2049))}), 2)
    with pytest.raises(ConfigError, match=r"Attention\.positions is 2049"):
        model_of_list([{"lines": 2049}, {"attention": 1}, "mean", "linear"], 2049, 2)
    x = torch.zeros(1, MOST_SHARED, dtype=torch.float64)
    x[0, 0] = 4.0

    def body(rt: Runtime) -> Share:
        return rt.run(softmax_protocol(rt, public(rt, x, f=16)))[0]

    found = reconstruct(LocalPlanes(3).run_three(body))
    assert float((found - torch.softmax(x, 1)).abs().max()) < 1e-3
    x = torch.zeros(1, MOST_SHARED + 1, dtype=torch.float64)
    with pytest.raises(ConfigError, match="softmax of 2049"):
        LocalPlanes(3).run_three(body)


@pytest.mark.slow
def test_the_cost_of_a_large_step_is_foretold_from_small_ones() -> None:
    found = gpt_forecast.foretell(gpt_forecast.GptSize(65, 128, 128, 4, 4, 2))
    rounds, sent = gpt_forecast.measured_step(found.size)
    assert abs(found.check - 1.0) < 0.05
    assert abs(found.bytes_per_party / sent - 1.0) < 0.05
    assert abs(found.rounds / rounds - 1.0) < 0.05


def test_sizes_that_make_no_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert private_gpt.main(["--foretell", "--width", "10", "--heads", "3"]) == 2
    assert "a width that the heads divide" in capsys.readouterr().err
    assert private_gpt.main(["--steps", "1"]) == 2
    assert "name one with --out" in capsys.readouterr().err
