"""An exported model under the real lm-evaluation-harness: its requests answered as the model answers by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_kit import small

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.harness import UvccLM
from uvcc_engine.train.trained import evaluate, exported
from uvcc_engine.train.trained import generate as gen

LENGTH = 48
CHOICES = ["amber", "birch"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights large enough that it prefers some tokens."""
    torch.manual_seed(0)
    cfg = small().model
    weights = LanguageModel(cfg).state_dict()
    for tensor in weights.values():
        tensor.add_(torch.randn_like(tensor), alpha=0.3)
    origin = exported.Origin(run="r", step=1, checkpoint="0" * 64, seq_len=LENGTH, tokens=1)
    out = tmp_path_factory.mktemp("harness") / "model"
    exported.write(out, exported.ExportedConfig(model=cfg, origin=origin), dict(weights), None)
    return out


def asked(kind: Any, *args: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=args, idx=0)


def made(folder: Path, **settings: str) -> UvccLM:
    """As ``--model uvcc --model_args folder=...`` makes it."""
    text = ",".join(f"{k}={v}" for k, v in {"folder": str(folder), **settings}.items())
    model = get_model("uvcc").create_from_arg_string(text)
    assert isinstance(model, UvccLM)
    return model


def test_likelihoods_are_the_models_own_in_the_order_asked(folder: Path) -> None:
    model = made(folder, batch_size="3")
    pairs = [("one two", " three"), ("", "abc"), ("a ", "b"), ("x" * 200, " end"), ("same", " b"), ("q", "")]
    found = model.loglikelihood([asked("loglikelihood", *pair) for pair in pairs])
    rows = [b"one two three", b"\0abc", b"a b", (b"x" * 200 + b" end")[-LENGTH - 1 :], b"same b"]
    for (value, _), row, many in zip(found, rows, (6, 3, 2, 4, 2), strict=False):
        own = evaluate.log_likelihoods(model.model, torch.tensor([list(row)]))[0, -many:]
        assert value == pytest.approx(float(own.sum()), abs=1e-4)
    assert found[-1] == (0.0, True)


def test_what_the_model_itself_would_write_is_greedy_and_nothing_else(folder: Path) -> None:
    model = made(folder)
    how = gen.Sampling(temperature=0.0)
    written = ((p, gen.continue_text(model.model, model.tokenizer, p, 1, how).text) for p in map(chr, range(97, 123)))
    prompt, said = next((p, text) for p, text in written if text.isascii() and text.strip())
    other = "a" if said != "a" else "b"
    found = model.loglikelihood([asked("loglikelihood", prompt, text) for text in (said, other)])
    assert [greedy for _, greedy in found] == [True, False]
    assert found[0][0] > found[1][0]


def test_a_long_text_is_scored_once_token_by_token(folder: Path) -> None:
    model = made(folder)
    text = "many words that do not fit into one row, " * 4
    (value,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", text)])
    ids = [0, *text.encode()]
    whole = 0.0
    for t in range(1, len(ids)):  # each token has at most a row before it, at least one token
        window = 1 + (t - 1) // LENGTH * LENGTH
        last = min(window + LENGTH, len(ids))
        begin = max(0, last - LENGTH - 1) if window > 1 else 0
        row = torch.tensor([ids[begin : t + 1]])
        whole += float(evaluate.log_likelihoods(model.model, row)[0, -1])
    assert value == pytest.approx(whole, rel=1e-4)


def test_answers_end_where_the_task_says(folder: Path) -> None:
    model = made(folder)
    long = model.generate_until([asked("generate_until", "some", {"until": [], "max_gen_toks": 12})])[0]
    own = gen.continue_text(model.model, model.tokenizer, "some", 12, gen.Sampling(temperature=0.0))
    assert long == own.text
    assert long
    stop = long[len(long) // 2]
    short = model.generate_until([asked("generate_until", "some", {"until": [stop], "max_gen_toks": 12})])[0]
    assert short == long.partition(stop)[0]


def test_what_cannot_be_loaded_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="uvcc-engine export"):
        made(tmp_path)
    with pytest.raises(ConfigError, match="length at least 2"):
        made(folder, length="1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_harness_own_command_asks_a_task_of_it(folder: Path, tmp_path: Path) -> None:
    """A task of two choices on a file of this machine: the accuracy is what the model's own likelihoods say."""
    questions = [{"question": f"{letter} then", "label": n % 2} for n, letter in enumerate("abcdefg")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    task = {
        "task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "q.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": CHOICES, "doc_to_target": "label",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "uvcc_engine.train.harness", "run", "--model", "uvcc", "--tasks", "mine"]
    where = [
        "--model_args",
        f"folder={folder}",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
    ]
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([*command, *where], env=env, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    told = json.loads(results.read_text())["results"]["mine"]["acc,none"]
    model = made(folder)
    right = 0
    for q in questions:
        pairs = [asked("loglikelihood", q["question"], f" {choice}") for choice in CHOICES]
        values = [value for value, _ in model.loglikelihood(pairs)]
        right += int(values.index(max(values)) == q["label"])
    assert told == pytest.approx(right / len(questions))
