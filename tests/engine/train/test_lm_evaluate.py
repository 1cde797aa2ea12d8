"""What ``uvcc-engine evaluate`` says of models whose answers are known: a perfect copier, a finder, a uniform one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lm_kit import small
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.text.tokenizer import ByteTokenizer
from uvcc_engine.train.trained import evaluate, exported


class Oracle:
    """A model that is sure of what ``foretell`` says of each row; -1 where it is not: there it is uniform."""

    cfg = SimpleNamespace(vocab=256)
    embed = SimpleNamespace(weight=torch.zeros(1))

    def __init__(self, foretell: Any) -> None:
        self.foretell = foretell

    def __call__(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        for row, ids in enumerate(tokens.tolist()):
            for at in range(len(ids)):
                if (sure := self.foretell(ids[: at + 1])) >= 0:
                    logits[row, at, sure] = 50.0
        return logits


def model(foretell: Any) -> exported.Exported:
    return cast(exported.Exported, SimpleNamespace(model=Oracle(foretell), tokenizer=ByteTokenizer(), config=None))


def scores(foretell: Any, *tasks: str, texts: list[str] | None = None, length: int = 96) -> dict[str, float]:
    found = evaluate.evaluate(model(foretell), tasks, texts or [], length=length, trials=3, seed=1)
    return {s.metric: s.value for s in found}


def repeats(ids: list[int]) -> int:
    """The token behind the last occurrence of the newest one."""
    earlier = [n for n, t in enumerate(ids[:-1]) if t == ids[-1]]
    return ids[earlier[-1] + 1] if earlier else -1


def finds(ids: list[int]) -> int:
    """The next letter of the needle, once its sentence is asked for again."""
    text = bytes(ids).decode(errors="replace")
    _, told, rest = text.partition("The secret word of ")
    sentence = (told + rest).partition("\n")[0]
    _, asked, tail = text.rpartition("The secret word of ")
    said = asked + tail
    return ord(sentence[len(said)]) if text.count(told) > 1 and len(said) < len(sentence) else -1


def test_who_knows_nothing_scores_chance() -> None:
    found = scores(lambda ids: -1, "perplexity", texts=["some words, " * 20])
    assert found["loss"] == pytest.approx(math.log(256))
    assert found["perplexity"] == pytest.approx(256, rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(8, rel=1e-4)
    assert scores(lambda ids: 7, "copy")["foretold"] < 0.1


def test_a_copier_copies_and_a_finder_finds_at_every_depth() -> None:
    assert scores(repeats, "copy")["foretold"] > 0.8  # a random row may hold a token twice
    found = scores(finds, "needle", length=400)
    assert found == dict.fromkeys([*(f"found_at_{d:.0%}" for d in evaluate.DEPTHS), "found"], 1.0)
    missed = scores(lambda ids: -1, "needle", length=400)
    assert missed["found"] < 0.5


def test_a_needle_lies_where_it_is_said_to() -> None:
    tokenizer = ByteTokenizer()
    places = []
    for depth in evaluate.DEPTHS:
        rows, answer = evaluate.needle_rows(tokenizer, 400, depth, "Ada", 2)
        assert rows.shape[1] <= 400
        assert answer == len(" amber")
        text = tokenizer.decode(rows[2].tolist())
        assert text.endswith("The secret word of Ada is coral")
        places.append(text.index("coral") / len(text))
    assert places == sorted(places)
    assert places[0] < 0.2
    assert places[-1] > 0.7


@pytest.mark.parametrize(
    ("tasks", "length", "said"),
    [(["needle"], 96, "no room for a needle"), (["copy"], 8, "--length 8"), (["perplexity"], 96, "no token")],
)
def test_what_cannot_be_scored_is_refused(tasks: list[str], length: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scores(repeats, *tasks, texts=[""], length=length)
    assert said in str(caught.value)


def test_the_command_reads_an_exported_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    cfg = small().model
    weights = LanguageModel(cfg).state_dict()
    origin = exported.Origin(run="r", step=1, checkpoint="0" * 64, seq_len=96, tokens=1)
    exported.write(tmp_path / "model", exported.ExportedConfig(model=cfg, origin=origin), dict(weights), None)
    text = tmp_path / "a.txt"
    text.write_text("abc " * 100)
    args = [str(tmp_path / "model"), "--task", "perplexity", "--task", "copy", "--text", str(text), "--trials", "2"]
    assert evaluate.main([*args, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [r["metric"] for r in rows] == ["loss", "perplexity", "bits_per_byte", "foretold"]
    assert rows[0]["value"] == pytest.approx(math.log(256), abs=0.5)
    assert rows[0]["chance"] is None
    assert rows[0]["count"] == 399
    assert evaluate.main(args) == 0
    assert "chance 0.003906" in capsys.readouterr().out
    with pytest.raises(UnreadableError, match="cannot read"):
        evaluate.main([*args[:-2], "--text", str(tmp_path / "none")])
