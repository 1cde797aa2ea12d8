"""Letters hidden in prose: what is trained on, what is held out, and how finding them is scored."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lm_kit import small
from test_lm_evaluate import model, scores

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.nsa.model import NO_LABEL, token_loss
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.text.data import Packer, inputs_and_labels
from uvcc_engine.train.text.documents import unasked
from uvcc_engine.train.text.hidden_letters import GROUPS, HiddenLetters, Hideout, longest
from uvcc_engine.train.text.prepare import one_pass
from uvcc_engine.train.text.sources import PythonManual, make_source
from uvcc_engine.train.text.tokenizer import ByteTokenizer
from uvcc_engine.train.trained.evaluate import evaluate

HIDEOUT = Hideout(PythonManual())


def asked(ids: list[int]) -> int:
    """Who reads the passage: the letter of the group that was named last."""
    text = bytes(ids).decode()
    _, line, rest = text.partition("\n")
    group = text[-1:]
    if not line or len(rest) % 2 == 0 or group not in "123":
        return -1
    return next(ord(c) for c in text if c in GROUPS[int(group) - 1])


def test_a_passage_hides_one_letter_of_each_group_and_gives_them_back() -> None:
    document, answers = HIDEOUT.passage(random.Random(1), 3, 200, 0.5)
    passage, _, line = document.decode().partition("\n")
    assert len(passage) == 200
    hidden = {group: c for c in passage for group, letters in enumerate(GROUPS) if c in letters}
    assert sorted(hidden) == [0, 1, 2]
    assert sum(c.isupper() for c in passage) == 3
    assert not any(c.isupper() or c.isdigit() for c in passage[100:])
    assert sorted(zip(line[::2], line[1::2], strict=True)) == [(str(g + 1), hidden[g]) for g in range(3)]
    assert [chr(document[at]) for at in answers] == list(line[1::2])
    assert passage.lower() != HIDEOUT.passage(random.Random(2), 3, 200)[0].decode()[:200].lower()


def test_held_out_passages_are_of_stretches_that_no_training_reads() -> None:
    assert len(set(HIDEOUT.stretches)) == 100
    source = HiddenLetters(HIDEOUT, 7)
    stream = source.open(0, 0, 1, {})
    documents = [next(stream) for _ in range(60)]
    assert [n for n, _ in documents] == list(range(60))
    assert next(source.open(59, 0, 1, {})) == documents[59]
    for _, document in documents:
        assert not isinstance(document, str)
        passage = bytes(t if t >= 0 else unasked(t) for t in document.tokens).decode().partition("\n")[0]
        assert sum(t >= 0 for t in document.tokens) == 3, "loss is taken of the answers alone"
        untouched = max(re.split("[A-Z]", passage), key=len)
        assert untouched in HIDEOUT.stretches[document.bucket]

    def rows(val: bool) -> str:
        packer = Packer(source, ByteTokenizer(), seq_len=512, rank=0, world=1, val=val, val_percent=50)
        inputs, labels = inputs_and_labels(packer.batch(8).tokens)
        asked = labels[(labels != NO_LABEL) & (labels != 0)].tolist()
        assert all(chr(t) in "".join(GROUPS) for t in asked)
        return bytes(inputs.flatten().tolist()).decode()

    held, read = (set(rows(val).split("\0")) for val in (True, False))
    assert len(held) > 5
    assert not held & read


def test_long_passages_come_later_but_in_what_is_held_out_first() -> None:
    assert [longest(n, 50) for n in (0, 5005, 5006, 10**6)] == [16, 16, 17, 248]
    assert longest(0, 0) == 248


@pytest.mark.parametrize("chunk", [0, 5])
def test_tokens_without_a_label_do_not_count(chunk: int) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 6, 8), torch.randn(11, 8)
    labels = torch.randint(0, 11, (2, 6))
    asked = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    wanted = F.cross_entropy(hidden[asked] @ weight.T, labels[asked])
    found = token_loss(hidden, weight, labels.masked_fill(~asked, NO_LABEL), chunk)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
    assert float(token_loss(hidden, weight, torch.full((2, 6), NO_LABEL), chunk)) == 0.0


def test_a_finder_scores_one_and_who_knows_nothing_chance() -> None:
    texts = list(PythonManual().one_pass())
    assert scores(asked, "letters", texts=texts, length=200) == {"found": 1.0}
    assert scores(lambda ids: ord("A"), "letters", texts=texts, length=200)["found"] < 0.2
    score = next(iter(evaluate(model(asked), ["letters"], texts, length=128, trials=1, seed=0)))
    assert (score.chance, score.count) == (1 / 8, 15)


def test_what_cannot_hide_letters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a passage of 5000 bytes"):
        HIDEOUT.passage(random.Random(0), 0, 5000)
    short = tmp_path / "short.txt"
    short.write_text("too few words. " * 100)
    mapping = lm_config.to_mapping(small())
    cfg = lm_config.from_mapping({**mapping, "data": {"source": "hidden_letters", "path": str(short)}})
    source = make_source(cfg.data, 1)
    with pytest.raises(UnreadableError, match="too few to hide letters in"):
        next(source.open(0, 0, 1, {}))
    with pytest.raises(ConfigError, match="is made while it is read"):
        one_pass(source, 10)
    data = {"source": "hidden_letters", "tokenizer": "gpt2"}
    with pytest.raises(ConfigError, match="hidden_letters is text of bytes"):
        lm_config.from_mapping({**mapping, "model": {**mapping["model"], "vocab": 50257}, "data": data})
